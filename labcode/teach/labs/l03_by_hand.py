"""Lesson 03: the answers to its exercises, which its checks compare with.

Held by: tests/exercises/03.py, tests/unit/test_l03_labs.py
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from labcode.models import gpt

Batch = tuple[torch.Tensor, torch.Tensor]


def spacing(x: float, fraction_bits: int) -> float:
    """From the size of x to the next larger number of a format.

    Args:
        x: Not zero, and not so small that the format loses bits (subnormal).
        fraction_bits: Of the format.
    """
    return 2.0 ** (math.floor(math.log2(abs(x))) - fraction_bits)


class Scaler:
    """A dynamic loss scale.

    Args:
        scale: To begin with.
        growth_interval: Good steps in a row after which it is doubled.
    """

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self.good_steps = 0

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `scale * loss`."""
        (loss * self.scale).backward()

    def unscale(self, params: Iterable[nn.Parameter]) -> bool:
        """Divide all gradients by the scale; whether all of them are finite."""
        finite = True
        for param in params:
            if param.grad is not None:
                param.grad /= self.scale
                finite = finite and bool(param.grad.isfinite().all())
        return finite

    def update(self, finite: bool) -> None:
        """Choose the scale of the next step."""
        if not finite:
            self.scale /= 2
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Scaler,
    micro_batches: Sequence[Batch],
    max_norm: float,
) -> None:
    """One step in float16 over several micro-batches, with clipping."""
    optimizer.zero_grad()
    for tokens, targets in micro_batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = gpt.loss(model(tokens), targets)
        scaler.backward(loss / len(micro_batches))
    finite = scaler.unscale(model.parameters())
    if finite:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    scaler.update(finite)


@torch.no_grad()
def adamw(
    weights: list[torch.Tensor],
    grads: list[torch.Tensor],
    means: list[torch.Tensor],
    squares: list[torch.Tensor],
    step: int,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    decay: float = 0.1,
) -> None:
    """One step of AdamW on lists of tensors; weights, means and squares change in place.

    Source: Loshchilov and Hutter 2017 (arXiv:1711.05101), algorithm 2.
    """
    torch._foreach_mul_(weights, 1 - lr * decay)
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, math.sqrt(1 - beta2**step))
    torch._foreach_add_(roots, eps)
    torch._foreach_addcdiv_(weights, means, roots, -lr / (1 - beta1**step))
