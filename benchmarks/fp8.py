"""A linear layer in FP8 beside the same one in bfloat16: forward, and forward with backward.

    python benchmarks/fp8.py                          # on a GPU 4096 to 16384, else 256 and 512
    python benchmarks/fp8.py --size 8192 --rounds 20  # one size

The layer is square, with as many rows of input as it has features. Each recipe of
`labcode.precision.fp8` takes its turn with bfloat16 in changing order; the ratio is the median over
the rounds. On a device without products of 8 bits FP8 is emulated, and the ratio says what the
emulation costs. The goal was a layer 1.5 times as fast at 8192. On an H100 it is reached at 16384
only: casts, amaxes and transposes take more of the gain than that. Block scaling is emulated there,
too: `torch._scaled_mm` has it for later GPUs.
"""

import statistics
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine, options, outer_quartiles, seconds_of, taking_turns, write
from torch import nn

from labcode.precision.fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8,
    multiplies_in_fp8,
)

RESULTS = Path(__file__).parent / "results"
ON_A_GPU = (4096, 8192, 16384)
ON_A_CPU = (256, 512)
RECIPES = {
    "FP8, delayed": DelayedScaling(),
    "FP8, current": CurrentScaling(),
    "FP8, block": BlockScaling(),
}
BFLOAT16 = "bfloat16"


class Contestant:
    """One layer, its input, and the gradient that comes back to it."""

    def __init__(self, name: str, size: int, device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            model = nn.Sequential(nn.Linear(size, size, bias=False)).to(torch.bfloat16)
            self.x = torch.randn(size, size, dtype=torch.bfloat16, requires_grad=True)
            self.dy = torch.randn(size, size, dtype=torch.bfloat16)
        self.fp8: Fp8 | None = None
        if name != BFLOAT16:
            self.fp8 = Fp8(RECIPES[name], skip=())
            self.fp8.convert(model)
        self.model = model

    def forward(self) -> None:
        """The output alone."""
        with torch.no_grad():
            self.model(self.x)

    def step(self) -> None:
        """Forward and backward, and the end of a step of the recipe."""
        self.x.grad = None
        self.model.zero_grad(set_to_none=True)
        self.model(self.x).backward(self.dy)
        if self.fp8:
            self.fp8.finish_step()


def race(size: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """A row for each contestant and kind of work."""
    field = {name: Contestant(name, size, device) for name in (BFLOAT16, *RECIPES)}
    rows = []
    for kind in ("forward", "step"):
        works = {name: getattr(contestant, kind) for name, contestant in field.items()}
        for work in works.values():
            work()
        found = taking_turns(works, rounds, seconds_of)
        for name, seconds in found.items():
            ratios = [a / b for a, b in zip(seconds, found[BFLOAT16], strict=True)]
            row = {
                "size": size,
                "work": kind,
                "implementation": name,
                "median_ms": round(statistics.median(seconds) * 1e3, 3),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_quartiles": outer_quartiles(ratios),
            }
            rows.append(row)
            low, high = row["ratio_quartiles"]
            print(
                f"| {size} | {kind} | {name} | {row['median_ms']} | {row['ratio']:.2f} | "
                f"{low:.2f} to {high:.2f} |",
                flush=True,
            )
    return rows


def main() -> None:
    """Race at each size and write the record."""
    arguments = options(__doc__, rounds=15, size=0).parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    sizes = ON_A_GPU if device.type == "cuda" else ON_A_CPU
    if arguments.size:
        sizes = (arguments.size,)
    print("| size | work | implementation | ms, median | FP8 / bfloat16, median | quartiles |")
    print("|---:|---|---|---:|---:|---:|", flush=True)
    rows = []
    for size in sizes:
        rows += race(size, arguments.rounds, device)
    record = {**machine(), "device": str(device), "emulated": not multiplies_in_fp8(device)}
    if device.type == "cuda":
        record["device"] = torch.cuda.get_device_name(device)
    write(RESULTS / f"fp8_{device.type}.json", {**record, "rounds": arguments.rounds, "rows": rows})


if __name__ == "__main__":
    main()
