"""Time and memory of ring attention against gathering K and V.

    python benchmarks/ring_attention.py \\
        [--length 4096] [--ranks 2] [--rounds 15] [--batch 1] [--heads 8] [--kv-heads 8]

It is the causal attention of one layer, forward and backward. Both run on the same ranks in turns,
in changing order; the slowest rank's time counts, and the ratio is the median over the rounds of
(ring / gather in that round). Before anything is timed, their outputs and gradients must agree.
Saved bytes are those that autograd holds from forward to backward, each storage once. Peak memory
is what one forward and backward adds to the resident memory of a fresh process (on CUDA: to the
allocated memory), the largest rank's. On a machine with as many GPUs as ranks the same runs there,
in bfloat16.
"""

import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from side_by_side import (
    options,
    outer_quartiles,
    seconds_together,
    slowest_rank,
    taking_turns,
    write,
)

from course.pool.ranks import Ranks
from labcode.runtime.hardware import usable_cores

RESULTS = Path(__file__).parent / "results"
WAYS = ("RingAttention", "GatherAttention")
Shape = tuple[int, int, int, int, int]  # batch, heads, kv heads, length, head size


def contestant(way: str, layout: str, shape: Shape) -> Callable[[], list[torch.Tensor]]:
    """A function that runs one forward and backward on this rank.

    It returns [output, gradients of q, k, v].
    """
    import torch
    import torch.distributed as dist

    from labcode.models.layers import CoreAttention
    from labcode.parallel import context

    cuda = dist.get_backend() == "nccl"
    if not cuda:
        torch.set_num_threads(1)
    batch, heads, kv_heads, length, head_size = shape
    attention = getattr(context, way)(CoreAttention(True), dist.group.WORLD, layout)
    attention.length = length
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(batch, length, heads + 2 * kv_heads, head_size, generator=generator)
    qkv = context.take_own(qkv, dist.group.WORLD, 1, layout).to(
        *(("cuda", torch.bfloat16) if cuda else ("cpu",))
    )
    leaves = [
        x.transpose(1, 2).requires_grad_() for x in qkv.split((heads, kv_heads, kv_heads), dim=2)
    ]
    del qkv

    def run() -> list[torch.Tensor]:
        for leaf in leaves:
            leaf.grad = None
        out = attention(*leaves)
        out.backward(torch.ones_like(out))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    return run


def times(
    rank: int, layouts: list[str], shape: Shape, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """{(way, layout): seconds on this rank in each round}; all contestants take turns."""
    import torch

    field = {}
    for layout in layouts:
        for way in WAYS:
            field[way, layout] = contestant(way, layout, shape)
    for layout in layouts:
        for a, b in zip(*(field[way, layout]() for way in WAYS)):
            tolerance = 0.05 if a.dtype == torch.bfloat16 else 1e-3
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    return taking_turns(field, rounds, seconds_together)


def memory(rank: int, way: str, layout: str, shape: Shape) -> tuple[int, int]:
    """Bytes that one forward and backward saves, and bytes of its peak above the start."""
    import torch

    # a short sequence first: after it libraries and connections have their memory already
    contestant(way, layout, (*shape[:3], 64, shape[4]))()
    run, saved = contestant(way, layout, shape), {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        peak = torch.cuda.max_memory_allocated()
    else:
        before, _ = resident_bytes()
        run()
        _, peak = resident_bytes()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return sum(saved.values()), peak - before


def resident_bytes() -> tuple[int, ...]:
    """(now, at its highest) of this process, as Linux counts them."""
    from pathlib import Path

    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))


def main() -> None:
    sizes = {"length": 4096, "batch": 1, "heads": 8, "head_size": 64}
    parser = options(__doc__, ranks=2, rounds=15, **sizes)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--layouts", nargs="+", default=["zigzag", "contiguous"])
    parser.add_argument(
        "--out", type=Path, help="default: results/ring_attention_cpu.json or _cuda.json"
    )
    args = parser.parse_args()
    shape = (args.batch, args.heads, args.kv_heads or args.heads, args.length, args.head_size)
    device = "cuda" if torch.cuda.device_count() >= args.ranks else "cpu"
    machine = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "cores": len(usable_cores()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "threads_per_rank": 1,
    }
    setup = {"ranks": args.ranks, "rounds": args.rounds, "B, N, K, S, D": shape}
    print(", ".join(f"{key} {value}" for key, value in (machine | setup).items()), "\n")
    with Ranks(args.ranks, timeout_s=120) as ranks:
        found = ranks.run(times, args.layouts, shape, args.rounds)
    slowest = slowest_rank(found)
    print(
        "| layout | attention | ms, median | fastest "
        "| ring / gather, median | quartiles | saved MB | peak MB |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    rows = []
    for (way, layout), seconds in slowest.items():
        with Ranks(args.ranks, timeout_s=120) as ranks:
            saved, peak = map(max, zip(*ranks.run(memory, way, layout, shape)))
        ratios = [
            ring / gather
            for ring, gather in zip(slowest[WAYS[0], layout], slowest[WAYS[1], layout])
        ]
        row = {
            "layout": layout,
            "attention": way,
            "median_ms": round(statistics.median(seconds) * 1e3, 1),
        }
        row |= {
            "fastest_ms": round(min(seconds) * 1e3, 1),
            "ring_over_gather": round(statistics.median(ratios), 3),
        }
        row["ratio_quartiles"] = outer_quartiles(ratios)
        rows.append(row | {"saved_bytes": saved, "peak_bytes": peak})
        ratio, quartiles = (
            f"{row['ring_over_gather']:.3f}",
            "{:.3f} to {:.3f}".format(*row["ratio_quartiles"]),
        )
        cells = (
            layout,
            way,
            row["median_ms"],
            row["fastest_ms"],
            *((ratio, quartiles) if way == WAYS[0] else ("", "")),
        )
        print(
            f"| {' | '.join(map(str, cells))} | {saved / 1e6:.1f} | {peak / 1e6:.1f} |", flush=True
        )
    out = args.out or RESULTS / f"ring_attention_{device}.json"
    write(out, {"machine": machine, "setup": setup, "results": rows})


if __name__ == "__main__":
    main()
