"""Lesson 17: the boxes that ranks write of one tensor, and what a rank of another grid needs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Box(NamedTuple):
    """A block of a whole tensor.

    Args:
        offsets: Where it begins in the whole, for each dim.
        sizes: How many indices it has, for each dim.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


Written = list[tuple[Box, Callable[[], torch.Tensor]]]


def columns(shape: Sequence[int], parts: int) -> list[Box]:
    """A matrix cut into parts of whole columns, as even as they can be."""
    return [Box((0, first), (shape[0], size)) for first, size in _even(shape[1], parts)]


def rows(shape: Sequence[int], parts: int) -> list[Box]:
    """A tensor cut along its first dim, as even as can be."""
    rest = tuple(shape[1:])
    zeros = (0,) * len(rest)
    return [Box((first, *zeros), (size, *rest)) for first, size in _even(shape[0], parts)]


def tiles(shape: Sequence[int], down: int, across: int) -> list[Box]:
    """A matrix cut both ways: `down` parts of its rows, each in `across` parts of its columns."""
    found = []
    for top, height in _even(shape[0], down):
        for left, width in _even(shape[1], across):
            found.append(Box((top, left), (height, width)))
    return found


def _even(length: int, parts: int) -> list[tuple[int, int]]:
    """(first, size) of each part; the first ones have one more where it does not divide."""
    found = []
    first = 0
    for part in range(parts):
        size = length // parts
        if part < length % parts:
            size += 1  # the first parts take what is left over
        found.append((first, size))
        first += size
    return found


def block(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """The block of a whole tensor, copied, as a file would hold it."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes)):
        whole = whole.narrow(dim, offset, size)
    return whole.clone()
