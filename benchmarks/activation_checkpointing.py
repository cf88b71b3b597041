"""Memory and time of activation checkpointing: none, selective and full, with and without a fused
attention.

    python benchmarks/activation_checkpointing.py [--rounds 15] [--layers 6] [--hidden 192]
        [--tokens 512] [--batch 4] [--device cuda]

The bytes are those that autograd holds after forward (`labcode.perf.saved_bytes`), beside the
formula of `labcode.perf.memory`: they agree within 3 %, or the script exits with status 1. The time
is that of forward and backward; the kinds take turns in one process, in changing order, and the
ratio is the median over the rounds of (this kind / none) within a round. Plain attention is
PyTorch's own without a fused kernel, which stores the scores.
"""

import statistics
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine, options, outer_quartiles, seconds_of, taking_turns, write
from torch.nn.attention import SDPBackend, sdpa_kernel

from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig
from labcode.models.gpt import GPT
from labcode.models.parallelize import parallelize
from labcode.parallel.model import Batch, ParallelModel
from labcode.perf.memory import model_activations
from labcode.perf.saved_bytes import saved_bytes
from labcode.runtime import bootstrap
from labcode.topology import GridShape

RESULTS = Path(__file__).parent / "results"
TARGET = 0.03
KINDS = ("none", "selective", "full")
ATTENTIONS = ("fused", "plain")


def kernels(attention: str) -> AbstractContextManager:
    """Around forward and backward: which kernels attention may use."""
    return sdpa_kernel(SDPBackend.MATH) if attention == "plain" else nullcontext()


def kept_bytes(model: ParallelModel, batch: Batch) -> int:
    """What autograd holds between forward and backward."""
    inputs, targets = batch
    with saved_bytes(model.module) as saved:
        loss = model.loss(model(inputs), targets)
        found = saved.total()
        loss.backward()
    return found


def seconds(model: ParallelModel, batch: Batch) -> float:
    """Seconds of one forward and backward."""
    found = seconds_of(lambda: model.forward_backward([batch]))
    model.zero_grad(set_to_none=True)
    return found


def measured(
    config: GPTConfig, batch: Batch, attention: str, rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """A row for each kind of checkpointing."""
    grid = Grid.create(GridShape())
    models: dict[str, ParallelModel] = {}
    kept: dict[str, int] = {}
    for kind in KINDS:
        with torch.device("meta"):
            whole = GPT(config)
        parallel = ParallelConfig(activation_checkpointing=kind)
        models[kind] = parallelize(whole, grid, parallel, seed=0, device=device)
    with kernels(attention):
        for kind, model in models.items():
            kept[kind] = kept_bytes(model, batch)
        for model in models.values():
            seconds(model, batch)
        times = taking_turns(models, rounds, lambda model: seconds(model, batch))
    rows = []
    for kind in KINDS:
        formula = model_activations(
            config,
            batch=len(batch[0]),
            value_bytes=4,
            fused_attention=attention == "fused",
            activation_checkpointing=kind,
        )
        ratios = [own / none for own, none in zip(times[kind], times["none"], strict=True)]
        rows.append(
            {
                "attention": attention,
                "kind": kind,
                "kept_bytes": kept[kind],
                "formula_bytes": round(sum(formula.values())),
                "median_ms": round(statistics.median(times[kind]) * 1e3, 1),
                "time_ratio": round(statistics.median(ratios), 3),
                "time_ratio_quartiles": outer_quartiles(ratios),
            }
        )
    return rows


def main() -> None:
    parser = options(__doc__, rounds=15, layers=6, hidden=192, heads=6, tokens=512, batch=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=bootstrap.device_type())
    given = parser.parse_args()
    world = bootstrap.start(bootstrap.Place())
    device = world.device if given.device == "cuda" else torch.device("cpu")
    config = GPTConfig(
        vocab_size=512,
        context_length=given.tokens,
        num_layers=given.layers,
        num_heads=given.heads,
        hidden_size=given.hidden,
    )
    tokens = torch.randint(512, (given.batch, given.tokens + 1)).to(device)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    print(
        "| attention | kind | MB kept | formula | kept / formula | ms | time / none | quartiles |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    rows = []
    for attention in ATTENTIONS:
        rows += measured(config, batch, attention, given.rounds, device)
    for row in rows:
        agreement = row["kept_bytes"] / row["formula_bytes"]
        low, high = row["time_ratio_quartiles"]
        print(
            f"| {row['attention']} | {row['kind']} | {row['kept_bytes'] / 1e6:.1f} "
            f"| {row['formula_bytes'] / 1e6:.1f} | {agreement:.4f} | {row['median_ms']} "
            f"| {row['time_ratio']:.3f} | {low:.3f} to {high:.3f} |"
        )
    about = machine() | {"device": given.device, "threads": torch.get_num_threads()}
    write(
        RESULTS / f"activation_checkpointing_{given.device}.json",
        about | {"options": vars(given), "rows": rows},
    )
    bootstrap.stop()
    off = []
    for row in rows:
        if abs(row["kept_bytes"] / row["formula_bytes"] - 1) > TARGET:
            off.append(f"{row['attention']} {row['kind']}")
    if off:
        sys.exit(f"more than {TARGET:.0%} from the formula: {', '.join(off)}")


if __name__ == "__main__":
    main()
