"""Where a rank's part of a weight lies within the whole, as boxes of consecutive indices.

A part need not be one block: of a fused q | k | v a rank of tp has some rows of each third, and if
dp cuts these rows once more, its share may end in the middle of one. A checkpoint stores each box
under its place in the whole weight, and a rank that reads it takes what it needs from the boxes of
other ranks. So a run can be resumed on a grid that cuts every weight in another way.

    whole of 6 rows, sections q | k | v of 2, tp = 2, this rank is the second:

    rows of the whole   0 1 2 3 4 5         boxes: rows 1, 3 and 5, which are
    rows it has           0   1   2                rows 0, 1 and 2 of its part

Source: the same idea in PyTorch is the resharding of torch.distributed.checkpoint; the boxes of a
    DTensor there are one per rank.
Held by: tests/unit/test_boxes.py
"""

import itertools
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from labcode.parallel.sharding import ParamSharding


class Coordinates(Protocol):
    """What is asked of a grid here."""

    def coord(self, axis: str) -> int:
        """This rank's coordinate along an axis."""
        ...

    def size(self, *axes: str) -> int:
        """Number of ranks along some axes."""
        ...


class WeightBlock(Protocol):
    """A block of a whole weight, wherever its numbers lie."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where it begins in the whole weight."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its shape."""
        ...


class Run(NamedTuple):
    """Consecutive indices along one dim.

    Args:
        first: First index in the whole weight.
        own_first: First index in this rank's part.
        length: Number of indices.
    """

    first: int
    own_first: int
    length: int


class Box(NamedTuple):
    """A block of a whole weight that one rank has.

    Args:
        offsets: Where it begins in the whole weight.
        own_offsets: Where it begins in this rank's part.
        sizes: Its shape.
    """

    offsets: tuple[int, ...]
    own_offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def view(self, own: torch.Tensor) -> torch.Tensor:
        """The block within this rank's part."""
        for dim, (first, length) in enumerate(zip(self.own_offsets, self.sizes)):
            own = own.narrow(dim, first, length)
        return own

    def common(self, other: WeightBlock) -> "Box | None":
        """What this box and another one of the same weight have in common; None: nothing.

        It is a box of the same part as this one, so that `view` finds it there.
        """
        firsts = []
        own_firsts = []
        lengths = []
        for dim, first in enumerate(self.offsets):
            begin = max(first, other.offsets[dim])
            end = min(first + self.sizes[dim], other.offsets[dim] + other.sizes[dim])
            if end <= begin:
                return None
            # Both boxes count from the beginning of the whole weight. What they have in common lies
            # as far into this rank's part as it lies into this box.
            firsts.append(begin)
            own_firsts.append(self.own_offsets[dim] + begin - first)
            lengths.append(end - begin)
        return Box(tuple(firsts), tuple(own_firsts), tuple(lengths))


def boxes_of(sharding: ParamSharding, place: Coordinates) -> list[Box]:
    """The blocks of the whole weight that make this rank's part; none if the part is empty.

    Boxes of two ranks are either the same or have nothing in common.
    """
    runs_of_dims = []
    for dim in range(len(sharding.shape)):
        starts = _starts_of_copied_sections(sharding, dim)
        runs_of_dims.append(_runs(_indices(sharding, dim, place), starts))
    boxes = []
    # Each dim is cut without regard to the others, so every run of rows meets every run of columns:
    # 3 runs of a fused q | k | v along dim 0, each with 1 along dim 1, are 3 boxes.
    for runs in itertools.product(*runs_of_dims):
        offsets = tuple(run.first for run in runs)
        own_offsets = tuple(run.own_first for run in runs)
        sizes = tuple(run.length for run in runs)
        boxes.append(Box(offsets, own_offsets, sizes))
    return boxes


def _indices(sharding: ParamSharding, dim: int, place: Coordinates) -> torch.Tensor:
    """Which indices of one dim this rank has, in the order in which it has them."""
    # The cuts of all axes are played on the numbers 0, 1, 2, ... in place of the weight. A formula
    # for the bounds would be shorter for one cut, but has to know how cuts of two axes, uneven
    # sizes and fused sections work together; `take` knows all of that already.
    indices = torch.arange(sharding.shape[dim])
    for axis, shard in sharding.shards.items():
        if shard.dim == dim:
            # cut like the weight itself, so that both never disagree
            along_first = replace(shard, dim=0)
            indices = along_first.take(indices, place.coord(axis), place.size(axis))
    return indices


def _starts_of_copied_sections(sharding: ParamSharding, dim: int) -> list[int]:
    """Where sections begin of which several ranks hold a copy; a box ends there.

    Of the sections q | k | v with one key/value head, the second of two ranks has the last rows of
    q and all of k and v. As one box it would overlap the box k | v of the first rank.
    """
    starts = []
    for shard in sharding.shards.values():
        if shard.dim == dim and shard.sections and shard.copies:
            starts += itertools.accumulate(shard.sections)
    return starts


def _runs(indices: torch.Tensor, starts: list[int]) -> list[Run]:
    """Indices that follow each other, joined to runs: 1 2 3 7 8 -> (1, length 3), (7, length 2).

    Args:
        indices: Indices in ascending order.
        starts: Indices at which a new run begins in any case.
    """
    if len(indices) == 0:
        return []
    # a run ends where the next index is not one more, or where a section begins that is copied
    is_break = (indices.diff() != 1) | torch.isin(indices[1:], torch.tensor(starts))
    breaks = is_break.nonzero().flatten() + 1
    begins = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(indices)]
    firsts = indices[begins].tolist()
    runs = []
    for first, start, end in zip(firsts, begins, ends):
        runs.append(Run(first, start, end - start))
    return runs
