"""With which factor a loss enters the gradient, and over how many values it goes.

    loss = cross_entropy(...) / m      factor 1/m, a mean over n targets that are not ignored

Between the loss that backward gets and the node that makes one number of many stand only functions
of single numbers: divisions, products, sums of several losses, a cast. The gradient that arrives at
that node is the factor, however the loss was written.
"""

import os
import sys
import zlib
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

CALLERS = 12  # of backward that are looked at
NODES = 64  # of a graph that are looked at: a loss of several parts
# PyTorch's numbers for the reduction of a loss
MEAN = 1
SUM = 2
DIVISIONS = ("DivBackward0", "DivBackward1")
CLASSES = ("NllLoss", "BinaryCrossEntropy")  # losses that nobody halves, as one does with squares


class Weight:
    """The factor and the number of values of one backward pass, read when the block is over.

    Attributes:
        key: The same for the micro-batches of one loss.
    """

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.divisor: Any = None
        self.key = 0

    def plain(self) -> dict[str, Any] | None:
        """The part that counts most; None if nothing is known of the loss.

        Returns:
            `factor`; `count`, the number of values; `kind`, "mean" or "sum"; `alone`: the loss has
            no other part; `divisor`: what it was divided by, 0 if by nothing; `classes`: it is one
            of classes, such as cross-entropy.
        """
        known = [part for part in self.parts if part.factor is not None]
        if not known:
            return None
        first = max(known, key=_size)
        return {
            "factor": first.size,
            "count": float(first.count),
            "kind": first.kind if bool(first.is_plain) else "other",
            "alone": len(self.parts) == 1,
            "divisor": 0.0 if self.divisor is None else float(self.divisor),
            "classes": first.is_of_classes,
        }


class _Part:
    """One mean or sum in a loss."""

    def __init__(self, kind: str, count: Any, is_of_classes: bool) -> None:
        self.kind = kind
        self.count = count
        self.is_of_classes = is_of_classes
        self.factor: torch.Tensor | None = None
        self.is_plain: torch.Tensor | bool = True

    def weigh(self, weights: torch.Tensor | None) -> None:
        """Each value of a sum has been multiplied by a constant.

        A mask leaves values out. Other weights, such as a gradient that was kept of an earlier
        pass, may have a mean in them: what the sum goes over is not known.
        """
        if weights is not None and self.kind == "sum":
            self.is_plain = ((weights == 0) | (weights == 1)).all()
            self.count = self.count * weights.float().mean()

    def note(self, gradients: tuple[torch.Tensor, ...]) -> None:
        """What arrives at the node in backward."""
        self.factor = gradients[0].detach()

    @property
    def size(self) -> float:
        """Size of the factor: `-log_probs.mean()` has the factor -1."""
        return 0.0 if self.factor is None else abs(float(self.factor))


def _size(part: _Part) -> float:
    return part.size


def watch_loss(loss: torch.Tensor, batch: int = 0) -> Weight:
    """What will be known after `loss.backward()`.

    Args:
        loss: One number.
        batch: Samples in the inputs of the last forward pass: a sum over as many is one of samples.
    """
    weight = Weight()
    if loss.numel() != 1:
        return weight
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting and len(seen) < NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        part = _part_of(node, batch)
        if part is not None:
            node.register_prehook(part.note)
            weight.parts.append(part)
            continue
        if node.name() in DIVISIONS and _is_one(node._saved_other):
            weight.divisor = node._saved_other
        waiting.extend(_single_numbers(node))
    return weight


def _is_one(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.numel() == 1


def _single_numbers(node: Any) -> list[Any]:
    """Where the inputs of a node come from that are one number each."""
    found = []
    for parent, number in node.next_functions:
        if parent is None:
            continue
        made = parent._input_metadata[number]
        if _product(made.shape) == 1:
            found.append(parent)
    return found


def _part_of(node: Any, batch: int) -> _Part | None:
    """What a node makes of many values; None if it is no mean and no sum that is known."""
    kind = node.name().removesuffix("Backward0")
    if kind == "Mean":
        return _Part("mean", _product(node._saved_self_sym_sizes), False)
    if kind == "Sum":
        sizes = node._saved_self_sym_sizes
        is_of_samples = batch > 1 and len(sizes) > 0 and int(sizes[0]) == batch
        part = _Part("sum" if is_of_samples else "other", _product(sizes), False)
        part.weigh(_weights_of(node))
        return part
    reduction = getattr(node, "_saved_reduction", None)
    if reduction not in (MEAN, SUM):
        return None
    if kind in ("NllLoss", "NllLoss2D"):
        count = node._saved_total_weight.detach()
    else:
        count = node._saved_self.numel()
    return _Part("mean" if reduction == MEAN else "sum", count, kind.startswith(CLASSES))


def _weights_of(node: Any) -> torch.Tensor | None:
    """The constants by which the values of a sum are multiplied; None if by none."""
    parent, _ = node.next_functions[0]
    if parent is None or parent.name() != "MulBackward0":
        return None
    # a factor is kept only for the gradient of the other one: one that is alone is a constant
    first, second = parent._saved_self, parent._saved_other
    constant = first if second is None else second
    if None not in (first, second) or not isinstance(constant, torch.Tensor):
        return None
    return None if constant.numel() == 1 else constant.detach()


def _product(sizes: Any) -> int:
    total = 1
    for size in sizes:
        total *= int(size)
    return total


def key_of(place: str, nth: int, reached: Iterable[int]) -> int:
    """A number that the micro-batches of one loss have in common, on all ranks.

    Args:
        place: Place where backward was called (`calling_place`).
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
