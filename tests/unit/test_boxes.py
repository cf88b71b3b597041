"""Where parts of weights lie within the whole: together the boxes of all ranks are the weight."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labcode.parallel.boxes import Box, boxes_of
from labcode.parallel.sharding import ParamSharding, Shard


class Place(NamedTuple):
    """A rank of a grid of tp and dp, without process groups."""

    coords: dict[str, int]
    sizes: dict[str, int]

    def coord(self, axis: str) -> int:
        return self.coords[axis]

    def size(self, *axes: str) -> int:
        return self.sizes[axes[0]]


def places(tp: int, dp: int) -> list[Place]:
    sizes = {"tp": tp, "dp": dp}
    return [Place({"tp": t, "dp": d}, sizes) for t, d in itertools.product(range(tp), range(dp))]


def test_the_picture_in_the_docstring() -> None:
    sharding = ParamSharding((6,), {"tp": Shard(0, (2, 2, 2))})
    found = boxes_of(sharding, places(2, 1)[1])
    assert [(box.offsets, box.own_offsets, box.sizes) for box in found] == [
        ((1,), (0,), (1,)),
        ((3,), (1,), (1,)),
        ((5,), (2,), (1,)),
    ]


SHARDINGS = {
    "columns over tp": {"tp": Shard(1)},
    "fused rows over tp": {"tp": Shard(0, (4, 2, 2))},
    "key/value heads that two ranks hold": {"tp": Shard(0, (4, 2, 2), copies=(1, 2, 2))},
    "fused rows over tp, then over dp": {
        "tp": Shard(0, (4, 2, 2)),
        "dp": Shard(0, in_chunks=True),
    },
    "columns over tp, rows over dp": {"tp": Shard(1), "dp": Shard(0, in_chunks=True)},
    "hybrid": {"dp": Shard(0, copies=(2,), apart=True, in_chunks=True)},
    "replicated": {},
}


@pytest.mark.parametrize("shards", SHARDINGS.values(), ids=SHARDINGS)
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 2), (2, 4), (4, 2)])
def test_the_boxes_of_all_ranks_are_the_weight(shards: dict[str, Shard], tp: int, dp: int) -> None:
    if tp == 1 and any(shard.copies == (1, 2, 2) for shard in shards.values()):
        pytest.skip("two ranks cannot hold copies where there is one")
    if dp == 1 and any(shard.apart for shard in shards.values()):
        pytest.skip("two copies need two ranks")
    whole = torch.arange(8 * 6).view(8, 6)
    sharding = ParamSharding(tuple(whole.shape), shards)
    found = torch.full_like(whole, -1)
    blocks = set()
    for place in places(tp, dp):
        own = sharding.own(whole, place)
        total = 0
        for box in boxes_of(sharding, place):
            block = box.view(own)
            target = found
            for dim, (first, length) in enumerate(zip(box.offsets, box.sizes)):
                target = target.narrow(dim, first, length)
            target.copy_(block)
            total += block.numel()
            blocks.add((box.offsets, box.sizes))
        assert total == own.numel()
    assert torch.equal(found, whole)
    # Boxes of two ranks are the same or have nothing in common: a checkpoint writes each once.
    assert sum(math.prod(sizes) for _, sizes in blocks) == whole.numel()


def test_what_two_boxes_have_in_common() -> None:
    mine = Box((2, 0), (0, 4), (3, 6))
    assert mine.common(Box((4, 1), (0, 0), (9, 2))) == Box((4, 1), (2, 5), (1, 2))
    assert mine.common(Box((5, 0), (0, 0), (9, 9))) is None
    assert Box((), (), ()).common(Box((), (), ())) == Box((), (), ())


@given(st.integers(0, 9), st.integers(1, 5))
def test_uneven_and_empty_parts(rows: int, dp: int) -> None:
    sharding = ParamSharding((rows, 2), {"dp": Shard(0, in_chunks=True)})
    covered = 0
    for place in places(1, dp):
        covered += sum(box.sizes[0] for box in boxes_of(sharding, place))
    assert covered == rows


def test_a_number_is_one_box() -> None:
    (box,) = boxes_of(ParamSharding(()), places(1, 1)[0])
    assert box == ((), (), ())
