"""The most bytes within a training step, as the allocator sees them, against the formula.

    python benchmarks/training_memory.py

One rank; GPTs and a ViT whose peak lies at different moments of the step, in float32 and under
bfloat16 autocast, with accumulation and with activation checkpointing. On a CPU the profiler sees
each allocation, on a GPU the allocator counts. Exits with status 1 if a peak is off by more than
2 % on a CPU, or 5 % on a GPU, whose libraries keep buffers of their own. About 20 seconds.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from predicted_step import TINY, VIT_TINY, example
from side_by_side import machine, options, write

from labcode.comm.grid import Grid
from labcode.config import GPTConfig, OptimConfig, ParallelConfig, ViTConfig
from labcode.measure.steps import allocated_bytes, held_bytes
from labcode.models.gpt import GPT
from labcode.models.parallelize import parallelize
from labcode.models.vit import ViT
from labcode.perf.training_memory import training_memory
from labcode.runtime import bootstrap
from labcode.runtime.bootstrap import Place
from labcode.topology import GridShape
from labcode.train.optim import make_optimizer

RESULT = Path(__file__).parent / "results"
TARGET = {"cpu": 0.02, "cuda": 0.05}
DEEP = replace(TINY, num_layers=8, hidden_size=128)
WIDE = replace(TINY, num_layers=4, hidden_size=256, context_length=16)
# name: model, micro-batch, micro-batches, dtype, activation checkpointing
CASES = {
    "gpt_tiny": (TINY, 16, 1, "float32", "none"),
    "gpt_tiny, 2 micro-batches": (TINY, 8, 2, "float32", "none"),
    "gpt_tiny, autocast": (TINY, 16, 1, "bfloat16", "none"),
    "vocabulary of 4,000": (replace(TINY, vocab_size=4000), 4, 1, "float32", "none"),
    "8 layers 128 wide": (DEEP, 4, 1, "float32", "none"),
    "8 layers 128 wide, autocast": (DEEP, 4, 1, "bfloat16", "none"),
    "8 layers 128 wide, checkpointing": (DEEP, 4, 1, "float32", "full"),
    "few tokens, 256 wide": (WIDE, 2, 1, "float32", "none"),
    "vit_tiny": (VIT_TINY, 1, 1, "float32", "none"),
    "vit_tiny, autocast": (VIT_TINY, 1, 1, "bfloat16", "none"),
}


def peak_bytes(
    config: GPTConfig | ViTConfig,
    micro_batch: int,
    count: int,
    dtype: str,
    checkpointing: str,
    device: torch.device,
    grid: Grid,
) -> float:
    """The most that tensors take within the third step."""
    with torch.device("meta"):
        whole = GPT(config) if isinstance(config, GPTConfig) else ViT(config)
    model = parallelize(
        whole,
        grid,
        ParallelConfig(activation_checkpointing=checkpointing),
        seed=0,
        device=device,
        dtype=torch.float32,
        autocast_dtype=torch.bfloat16 if dtype == "bfloat16" else None,
    )
    optimizer = make_optimizer(model.weights.values(), OptimConfig())

    def step() -> None:
        batches = []
        for _ in range(count):
            inputs, targets = example(config, micro_batch, device)
            batches.append((inputs.contiguous(), targets.clone()))
        model.forward_backward(batches)
        model.gradient_norm()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    step()
    held = held_bytes(model, optimizer)
    buckets = held.weights  # DDP's, of all gradients
    return held.weights + held.optimizer + buckets + allocated_bytes(step, device).peak


def main() -> None:
    options(__doc__).parse_args()
    torch.set_num_threads(1)
    world = bootstrap.start(Place())
    grid = Grid.create(GridShape())
    rows = []
    print("| model | MB at the peak | formula | measured / formula | the peak is at |")
    print("|---|---:|---:|---:|---|")
    for name, (config, batch, count, dtype, checkpointing) in CASES.items():
        measured = peak_bytes(config, batch, count, dtype, checkpointing, world.device, grid)
        predicted = training_memory(
            config,
            micro_batch=batch,
            num_micro_batches=count,
            dtype=dtype,
            activation_checkpointing=checkpointing,
        )
        rows.append(row(name, measured, predicted))
    bootstrap.stop()
    found = machine() | {"device": world.device.type, "rows": rows}
    write(RESULT / f"training_memory_{world.device.type}.json", found)
    target = TARGET[world.device.type]
    off = [entry["model"] for entry in rows if abs(entry["ratio"] - 1) > target]
    if off:
        sys.exit(f"more than {target:.0%} from the formula: {', '.join(off)}")


def row(name: str, measured: float, predicted: Any) -> dict[str, Any]:
    """Print a row of the table and return it."""
    ratio = measured / predicted.total
    sizes = f"{measured / 1e6:.2f} | {predicted.total / 1e6:.2f} | {ratio:.4f}"
    print(f"| {name} | {sizes} | {predicted.moment} |", flush=True)
    return {
        "model": name,
        "measured": measured,
        "formula": round(predicted.total),
        "ratio": round(ratio, 4),
        "moment": predicted.moment,
    }


if __name__ == "__main__":
    main()
