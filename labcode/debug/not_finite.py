"""What is told of a tensor that is not finite: where it was made, and what it was made of.

One value that is not finite spreads to all others within the step, and over all ranks with the next
collective. There is no common clock, so what came first is decided by what depends on what: the
part of the step, the stage of the pipeline, and how many tensors the rank had seen before. Ranks of
dp, cp and tp do the same things in the same order, so these counts can be compared.

Held by: tests/ranks/test_not_finite.py
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

# the parts of a step in their order
BEFORE = 0
FORWARD = 1
BACKWARD = 2
AFTER = 3
DIRECTIONS = {FORWARD: "forward", BACKWARD: "backward"}


@dataclass(frozen=True)
class Amount:
    """How large a tensor is, and how much of it is lost.

    Args:
        what: What it is called in a sentence.
        amax: Largest absolute value among those that are finite; 0 if there is none.
        num_bad: How many values are not finite.
        num_values: How many it has.
    """

    what: str
    amax: float
    num_bad: int
    num_values: int

    def __str__(self) -> str:
        share = 100 * self.num_bad / max(1, self.num_values)
        return f"{self.what}: amax {self.amax:.3g}, {share:.3g} % not finite"


@dataclass(frozen=True)
class Finding:
    """A tensor of one rank that is not finite.

    Args:
        order: (part of the step, stage, number, rank): a smaller one came first.
        module: Its dotted name in the whole model; "" is the model itself.
        tensor: The name of one of its tensors, such as "output" or "gradient of the weight".
        microbatch: Its number on this rank, from 0; None outside of micro-batches.
        found: The tensor itself.
        went_in: What it was made of.
    """

    order: tuple[int, int, int, int]
    module: str
    tensor: str
    microbatch: int | None
    found: Amount
    went_in: tuple[Amount, ...] = ()

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.order[-1]

    @property
    def line(self) -> str:
        """All of it in one line."""
        place = f"{self.tensor} of {self.module or 'the model'}"
        when = f"rank {self.rank}"
        if self.microbatch is not None:
            when += f", micro-batch {self.microbatch}, {DIRECTIONS[self.order[0]]}"
        count = f"{self.found.num_bad} of {self.found.num_values} values"
        source = "; ".join(str(amount) for amount in self.went_in)
        source = f"; into it went {source}" if source else ""
        return f"the first tensor that is not finite: {place} ({when}), {count}{source}"


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values that this rank holds are finite; also if it holds none."""
    return not is_readable(tensor) or bool(torch.isfinite(_local(tensor)).all())


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds memory: under ZeRO a weight gives its memory back after its layer."""
    own = _local(tensor)
    # a meta tensor has no memory either; its storage claims that it has
    if own.is_meta:
        return False
    return own.numel() == 0 or own.untyped_storage().nbytes() > 0


def amount(what: str, tensor: torch.Tensor) -> Amount:
    """How large a tensor is; of a DTensor this rank's part."""
    own = _local(tensor)
    # Copies of the tensor and a GPU that waits, which is fine: only one that is not finite, and
    # what went into it, is measured.
    finite = torch.isfinite(own)
    num_bad = own.numel() - int(finite.sum())
    known = own.abs().masked_fill(~finite, 0)
    amax = known.max().item() if own.numel() else 0.0
    return Amount(what, float(amax), num_bad, own.numel())


def floating(values: Any) -> Iterator[torch.Tensor]:
    """The tensors of floating-point numbers among some values that hold memory."""
    if isinstance(values, torch.Tensor):
        values = (values,)
    if not isinstance(values, Iterable):
        return
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and is_readable(value):
            yield value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, without its autograd history; any other tensor as it is."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
