"""Seconds of a training step on this device, against `perf.step.device_step` from three numbers.

    python benchmarks/predicted_step.py [--threads 1 --rounds 9]

The device's matrix-product rate, its bandwidth and its launch time are measured first, which takes
about a second; then steps of small GPTs and of a ViT: forward, backward, gradient norm and fused
AdamW. Exits with status 1 if a model in float32 is off by more than a factor of 2. bfloat16 is
measured too and held to nothing: on a CPU attention has no fast backward in it. About 20 seconds.
"""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine, options, write

from labcode.comm.grid import Grid
from labcode.config import GPTConfig, OptimConfig, ParallelConfig, ViTConfig
from labcode.measure.device_speed import device_speed, median_s
from labcode.models.gpt import GPT
from labcode.models.parallelize import parallelize
from labcode.models.vit import ViT
from labcode.perf.step import device_step
from labcode.runtime import bootstrap
from labcode.runtime.bootstrap import Place
from labcode.topology import GridShape
from labcode.train.optim import make_optimizer

RESULT = Path(__file__).parent / "results"
FACTOR = 2.0
TINY = GPTConfig(
    vocab_size=83,
    context_length=128,
    num_layers=2,
    num_heads=4,
    hidden_size=64,
    positions="rotary",
)
VIT_TINY = ViTConfig(num_variables=4, num_forcings=2, lat=90, lon=180)
SIX_LAYERS = replace(TINY, num_layers=6, num_heads=6, hidden_size=192)
# name: model, micro-batch, dtype of its matrix products
MODELS = {
    "gpt_tiny": (TINY, 16, torch.float32),
    "gpt_tiny, 1 sample": (TINY, 1, torch.float32),
    "4 layers 128 wide": (replace(TINY, num_layers=4, hidden_size=128), 8, torch.float32),
    "6 layers 192 wide": (SIX_LAYERS, 8, torch.float32),
    "2 layers 512 wide": (replace(TINY, hidden_size=512, num_heads=8), 4, torch.float32),
    "vocabulary of 4,000": (replace(TINY, vocab_size=4000), 4, torch.float32),
    "vit_tiny": (VIT_TINY, 4, torch.float32),
    "6 layers 192 wide, bfloat16": (SIX_LAYERS, 8, torch.bfloat16),
}


def example(
    config: GPTConfig | ViTConfig, batch: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(config, GPTConfig):
        tokens = torch.randint(config.vocab_size, (batch, config.context_length + 1))
        return tokens[:, :-1].to(device), tokens[:, 1:].to(device)
    fields = config.num_variables + config.num_forcings
    state = torch.randn(batch, fields, config.lat, config.lon)
    return state.to(device), state[:, : config.num_variables].to(device)


def measured_s(
    config: GPTConfig | ViTConfig,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    grid: Grid,
    rounds: int,
) -> float:
    """Median seconds of a step."""
    with torch.device("meta"):
        whole = GPT(config) if isinstance(config, GPTConfig) else ViT(config)
    narrow = dtype if dtype != torch.float32 else None
    model = parallelize(
        whole,
        grid,
        ParallelConfig(),
        seed=0,
        device=device,
        dtype=torch.float32,
        autocast_dtype=narrow,
    )
    optimizer = make_optimizer(model.weights.values(), OptimConfig())
    batches = [example(config, batch, device)]

    def step() -> None:
        model.forward_backward(batches)
        model.gradient_norm()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    return median_s(device, step, rounds)


def main() -> None:
    given = options(__doc__, threads=1, rounds=9).parse_args()
    torch.set_num_threads(given.threads)
    world = bootstrap.start(Place())
    grid = Grid.create(GridShape())
    device = world.device
    rows = []
    print(
        "| model | ms measured | predicted | products | bytes | launches | measured / predicted |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, (config, batch, dtype) in MODELS.items():
        speed = device_speed(device, dtype)
        value_bytes = dtype.itemsize
        predicted = device_step(config, speed, micro_batch=batch, value_bytes=value_bytes)
        seconds = measured_s(config, batch, dtype, device, grid, given.rounds)
        rows.append(row(name, dtype, speed, seconds, predicted))
    bootstrap.stop()
    found = machine() | {"threads_per_rank": given.threads, "device": device.type, "rows": rows}
    write(RESULT / f"predicted_step_{device.type}.json", found)
    off = []
    for entry in rows:
        near = 1 / FACTOR <= entry["ratio"] <= FACTOR
        if entry["dtype"] == "torch.float32" and not near:
            off.append(entry["model"])
    if off:
        sys.exit(f"off by more than a factor of {FACTOR:g}: {', '.join(off)}")


def row(
    name: str, dtype: torch.dtype, speed: Any, seconds: float, predicted: Any
) -> dict[str, Any]:
    """Print a row of the table and return it."""
    ratio = seconds / predicted.step_s
    parts = [predicted.step_s, predicted.matmul_s, predicted.memory_s, predicted.launch_s]
    shown = " | ".join(f"{part * 1e3:.1f}" for part in parts)
    print(f"| {name} | {seconds * 1e3:.1f} | {shown} | **{ratio:.2f}** |", flush=True)
    return {
        "model": name,
        "dtype": str(dtype),
        "measured_ms": round(seconds * 1e3, 2),
        "predicted_ms": round(predicted.step_s * 1e3, 2),
        "ratio": round(ratio, 3),
        "speed": asdict(speed),
    }


if __name__ == "__main__":
    main()
