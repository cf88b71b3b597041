"""Where FP8 loses its time: a layer's forward with the casts apart, as they are, and compiled.

    python benchmarks/fp8_by_tokens.py         # on a GPU: 1024 to 16384 tokens, 4096 features

Five contestants take turns: `F.linear` in bfloat16; the product of 8-bit operands alone, which were
cast before; the same with both casts (largest number, scale, cast) before each product; these as
one graph of torch.compile, which makes a kernel of each cast; and compiled with the weight cast
once, as in a step of several micro-batches. A ratio above 1 is faster than bfloat16.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine, options, outer_quartiles, seconds_of, taking_turns, write
from torch.nn import functional as F

RESULTS = Path(__file__).parent / "results"
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
TOKENS = (1024, 2048, 4096, 8192, 16384)
ON_A_CPU = (128,)  # a trial: 8-bit products are slow there
FEATURES = {"cuda": 4096, "cpu": 256}
BFLOAT16 = "bfloat16"

Pair = tuple[torch.Tensor, torch.Tensor]


def cast(x: torch.Tensor) -> Pair:
    """(`x` in e4m3, what an 8-bit number is worth), by the largest number of the tensor."""
    scale = x.abs().amax().float().clamp(min=1e-12) / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def product(x: Pair, weight: Pair) -> torch.Tensor:
    """[tokens, out] in bfloat16 from [tokens, in] and [out, in] in 8 bits."""
    return torch._scaled_mm(
        x[0], weight[0].T, scale_a=x[1], scale_b=weight[1], out_dtype=torch.bfloat16
    )


def with_casts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A layer's forward, both operands cast anew."""
    return product(cast(x), cast(weight))


def with_one_cast(x: torch.Tensor, weight: Pair) -> torch.Tensor:
    """A layer's forward whose weight is in 8 bits already."""
    return product(cast(x), weight)


def contestants(
    tokens: int, features: int, device: torch.device, compiled: bool
) -> dict[str, Callable[[], torch.Tensor]]:
    """{name: one forward of [tokens, features] through a square layer}."""
    torch.manual_seed(0)
    x = torch.randn(tokens, features, device=device, dtype=torch.bfloat16)
    weight = torch.randn(features, features, device=device, dtype=torch.bfloat16)
    x8 = cast(x)
    weight8 = cast(weight)
    field: dict[str, Callable[[], torch.Tensor]] = {
        BFLOAT16: lambda: F.linear(x, weight),
        "product alone": lambda: product(x8, weight8),
        "casts and product": lambda: with_casts(x, weight),
    }
    if compiled:
        fused = torch.compile(with_casts, dynamic=False)
        fused_one = torch.compile(with_one_cast, dynamic=False)
        field["casts and product, compiled"] = lambda: fused(x, weight)
        field["one cast and product, compiled"] = lambda: fused_one(x, weight8)
    return field


def race(field: dict[str, Callable[[], torch.Tensor]], rounds: int) -> list[dict[str, Any]]:
    """A row for each contestant."""
    results = {name: forward() for name, forward in field.items()}
    truth = results[BFLOAT16].float()
    found = taking_turns(field, rounds, seconds_of)
    rows = []
    for name, seconds in found.items():
        ratios = [a / b for a, b in zip(found[BFLOAT16], seconds, strict=True)]
        error = (results[name].float() - truth).norm() / truth.norm()
        row = {
            "implementation": name,
            "median_ms": round(1e3 * statistics.median(seconds), 4),
            "times_as_fast": round(statistics.median(ratios), 3),
            "quartiles": outer_quartiles(ratios),
            "relative_error": round(float(error), 4),
        }
        rows.append(row)
    return rows


def main() -> None:
    """Race for each number of tokens and write the record of a GPU."""
    arguments = options(__doc__, rounds=15, features=0, tokens=0).parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    features = arguments.features or FEATURES[device.type]
    all_tokens = TOKENS if device.type == "cuda" else ON_A_CPU
    if arguments.tokens:
        all_tokens = (arguments.tokens,)
    rows = []
    print("| tokens | implementation | ms | times as fast as bfloat16 | quartiles | error |")
    print("|---:|---|---:|---:|---|---:|", flush=True)
    for tokens in all_tokens:
        field = contestants(tokens, features, device, compiled=device.type == "cuda")
        for row in race(field, arguments.rounds):
            rows.append({"tokens": tokens, **row})
            low, high = row["quartiles"]
            cells = f"{row['implementation']} | {row['median_ms']} | {row['times_as_fast']:.2f}"
            ends = f"{low:.2f} to {high:.2f} | {row['relative_error']}"
            print(f"| {tokens} | {cells} | {ends} |", flush=True)
    if device.type == "cuda":
        record = {**machine(), "device": torch.cuda.get_device_name(device)}
        write(RESULTS / "fp8_by_tokens_cuda.json", {**record, "rows": rows})


if __name__ == "__main__":
    main()
