"""With which factor a mean loss enters the gradient, and how many values it averages.

    loss = cross_entropy(...) / m      factor 1/m, and n targets that are not ignored

Between the loss that backward gets and the mean stand only factors: divisions and products. The
gradient that arrives at the mean is their product.
"""

import os
import sys
import zlib
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

SCALES = ("DivBackward0", "MulBackward0")
CALLERS = 12  # of backward that are looked at
MEAN = 1  # of PyTorch's numbers for the reduction of a loss


class Weight:
    """The factor and the number of values of one backward pass, read when the block is over.

    Attributes:
        key: The same for the micro-batches of one loss.
    """

    def __init__(self) -> None:
        self.factor: torch.Tensor | None = None
        self.count: torch.Tensor | int = 0
        self.key = 0

    def plain(self) -> list[float] | None:
        """[factor, count, key]; None if the loss is no mean that is known."""
        if self.factor is None:
            return None
        return [float(self.factor), float(self.count), float(self.key)]


def watch_loss(loss: torch.Tensor) -> Weight:
    """What will be known after `loss.backward()`."""
    weight = Weight()
    node = loss.grad_fn
    while node is not None and node.name() in SCALES:
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        node = parents[0] if len(parents) == 1 else None
    count = _mean_over(node)
    if node is None or count is None:
        return weight
    weight.count = count

    def note(gradients: tuple[torch.Tensor, ...]) -> None:
        weight.factor = gradients[0].detach()

    node.register_prehook(note)
    return weight


def _mean_over(node: Any) -> torch.Tensor | int | None:
    """How many values a node averages; None if it is no mean."""
    if node is None:
        return None
    kind = node.name()
    if kind == "MeanBackward0":
        return node._saved_self_sym_sizes and _product(node._saved_self_sym_sizes)
    if kind in ("NllLossBackward0", "NllLoss2DBackward0") and node._saved_reduction == MEAN:
        return node._saved_total_weight.detach()
    if kind == "MseLossBackward0" and node._saved_reduction == MEAN:
        return node._saved_self.numel()
    return None


def _product(sizes: Any) -> int:
    total = 1
    for size in sizes:
        total *= int(size)
    return total


def key_of(place: str, nth: int, reached: Iterable[int]) -> int:
    """A number that the micro-batches of one loss have in common, on all ranks.

    Args:
        place: Where backward was called (`calling_place`).
        nth: How many times since the last forward pass: two losses of one are no micro-batches.
        reached: Numbers of the weights that got a gradient.
    """
    return zlib.crc32(f"{place} {nth} {sorted(reached)}".encode())


def calling_place() -> str:
    """The lines that have led to the call of backward; the same in each turn of a loop."""
    lines = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(lines) < CALLERS:
        lines.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return " ".join(lines)
