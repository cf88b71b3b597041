"""A GPT's step with three ways from the last layer to the loss: what the logits cost.

    python benchmarks/gpt_loss.py             # on a GPU 124M with 2048 tokens; else a tiny one

The head of this GPT is a quarter of its arithmetic, and its logits are the largest tensor of the
step. The ways are labcode's (logits in bfloat16, the loss in float32), the loss in bfloat16, and
PyTorch's `linear_cross_entropy`, which never holds all logits; each as it is, and as one graph of
torch.compile. The step is forward, backward and a fused AdamW. MFU is against the device's peak.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine, options, write
from torch import nn
from torch.nn import functional as F

from labcode.config import GPTConfig
from labcode.models.gpt import GPT, loss
from labcode.perf.flops import training_flops_per_sample
from labcode.runtime import hardware

RESULTS = Path(__file__).parent / "results"
ON_A_GPU = GPTConfig(
    num_layers=12,
    num_heads=12,
    hidden_size=768,
    context_length=2048,
    vocab_size=50304,
    positions="learned",
)
ON_A_CPU = GPTConfig(
    num_layers=2,
    num_heads=2,
    hidden_size=64,
    context_length=64,
    vocab_size=512,
    positions="learned",
)
WARM = 3  # steps that are not timed: compilation, the allocator


def in_float32(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """labcode's: logits [B, S, V] in the dtype of `hidden`, then in float32 for the loss."""
    return loss(F.linear(hidden, weight), targets)


def in_bfloat16(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss from logits in the dtype of `hidden`; PyTorch sums in float32 inside its kernel."""
    logits = F.linear(hidden, weight).flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten())


def in_pieces(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """PyTorch's own, which computes the logits of some tokens at a time (lesson 16, section 4)."""
    return F.linear_cross_entropy(hidden.flatten(0, -2), weight, targets.flatten())


WAYS = {
    "logits to float32": in_float32,
    "logits in bfloat16": in_bfloat16,
    "linear_cross_entropy": in_pieces,
}


class Step:
    """One way, with a model and an optimizer of its own."""

    def __init__(self, way: str, compiled: bool, config: GPTConfig, device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            self.model = GPT(config)
        self.weight = self.model.embed.weight  # tied: the head's too
        self.model.head = nn.Identity()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.of_hidden = WAYS[way]
        self.forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self._forward
        if compiled:
            self.forward = torch.compile(self._forward)

    def _forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return self.of_hidden(self.model(tokens), self.weight, targets)

    def run(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward, backward, update; the loss."""
        value = self.forward(tokens, targets)
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value.detach()


def measure(step: Step, batch: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Median seconds of a step, its peak memory and its last loss."""
    config = step.model.config
    tokens = torch.randint(config.vocab_size, (batch, config.context_length), device=device)
    targets = tokens.roll(-1, dims=1)
    seconds = []
    value = torch.zeros(())
    for number in range(WARM + rounds):
        if number == WARM and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        value = step.run(tokens, targets)
        last = float(value)  # waits for the device
        if number >= WARM:
            seconds.append(time.perf_counter() - started)
        assert last == last, "the loss is nan"
    found: dict[str, Any] = {"step_ms": round(1e3 * statistics.median(seconds), 2)}
    flops = training_flops_per_sample(config) * batch / statistics.median(seconds)
    found["flops_per_s"] = flops
    if device.type == "cuda":
        mfu = hardware.mfu(flops, torch.cuda.get_device_name(device), "bfloat16")
        found["mfu"] = None if mfu is None else round(mfu, 4)
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    found["loss"] = round(float(value), 4)
    return found


def main() -> None:
    """Each way, plain and compiled, and the record of all."""
    arguments = options(__doc__, rounds=10, batch=0).parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = ON_A_GPU if device.type == "cuda" else ON_A_CPU
    batch = arguments.batch or (32 if device.type == "cuda" else 2)
    rows = []
    print(
        "| way | compiled | ms a step | MFU | peak, bytes | loss |\n|---|---|---:|---:|---:|---:|"
    )
    for compiled in (False, True) if device.type == "cuda" else (False,):
        for way in WAYS:
            row: dict[str, Any] = {"way": way, "compiled": compiled}
            try:
                step = Step(way, compiled, config, device)
                row |= measure(step, batch, arguments.rounds, device)
            except (RuntimeError, AttributeError) as error:  # out of memory, or an older PyTorch
                row["failed"] = str(error).splitlines()[0]
            step = None
            if device.type == "cuda":
                torch.cuda.empty_cache()
            rows.append(row)
            cells = [row.get(key, "-") for key in ("step_ms", "mfu", "peak_bytes", "loss")]
            print(f"| {way} | {compiled} | {' | '.join(map(str, cells))} |", flush=True)
    record = {**machine(), "device": str(device), "batch": batch, "rows": rows}
    if device.type == "cuda":
        record["device"] = torch.cuda.get_device_name(device)
        write(RESULTS / "gpt_loss_cuda.json", record)


if __name__ == "__main__":
    main()
