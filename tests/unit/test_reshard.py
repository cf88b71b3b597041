"""The plan that brings weights from one layout to another: what each rank needs, once."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labcode.parallel.boxes import Box, boxes_of
from labcode.parallel.reshard import (
    Layout,
    Move,
    StaleError,
    check_lag,
    plan,
    recv_bytes,
    send_bytes,
)
from labcode.parallel.sharding import ParamSharding, Shard
from labcode.topology import GridShape

OVER_DP = Shard(0, in_chunks=True)
WHOLES = {
    "embed": torch.arange(13 * 4).view(13, 4),  # 13 rows: no two ranks divide them evenly
    "qkv": torch.arange(16 * 4).view(16, 4),
    "proj": torch.arange(4 * 8).view(4, 8),
    "norm": torch.arange(5),
}


class Place(NamedTuple):
    """A rank of a grid without process groups."""

    shape: GridShape
    rank: int

    def coord(self, axis: str) -> int:
        return self.shape.coord(self.rank, axis)

    def size(self, *axes: str) -> int:
        return self.shape.size(*axes)


class Fleet(NamedTuple):
    """Ranks from `first` on, with their parts of WHOLES."""

    shape: GridShape
    fsdp: bool = False
    kv_heads: int = 2
    first: int = 0

    def sharding(self, name: str) -> ParamSharding:
        tp = {
            "embed": Shard(0),
            # 4 query heads and as many key/value heads as said, of 2 rows each
            "qkv": Shard(0, (8, 4, 4), self.copies()),
            "proj": Shard(1),
        }
        shards = {"tp": tp[name]} if name in tp else {}
        if self.fsdp:
            shards["dp"] = OVER_DP
        return ParamSharding(tuple(WHOLES[name].shape), shards)

    def copies(self) -> tuple[int, int, int] | None:
        shared_by = self.shape.tp // self.kv_heads
        return (1, shared_by, shared_by) if shared_by > 1 else None

    def places(self) -> dict[int, Place]:
        ranks = range(self.shape.world_size)
        return {self.first + rank: Place(self.shape, rank) for rank in ranks}

    def layout(self) -> Layout:
        found = {}
        for rank, place in self.places().items():
            found[rank] = {name: boxes_of(self.sharding(name), place) for name in WHOLES}
        return found

    def parts(self) -> dict[tuple[int, str], torch.Tensor]:
        found = {}
        for rank, place in self.places().items():
            for name, whole in WHOLES.items():
                found[rank, name] = self.sharding(name).own(whole, place)
        return found


def moved(moves: list[Move], source: Fleet, target: Fleet) -> None:
    """Do what a plan says, and compare with the slices of the whole weights."""
    sent = source.parts()
    wanted = target.parts()
    got = {key: torch.full_like(part, -1) for key, part in wanted.items()}
    for move in moves:
        place = move.write.view(got[move.target, move.name])
        assert (place == -1).all()  # nothing is sent twice
        place.copy_(move.read.view(sent[move.source, move.name]))
    for key, part in wanted.items():
        assert torch.equal(got[key], part), key


def test_the_picture_in_the_docstring() -> None:
    rows = ParamSharding((16, 3), {"dp": OVER_DP})
    learner = GridShape(dp=4)
    sources = {rank: {"w": boxes_of(rows, Place(learner, rank))} for rank in range(4)}
    half = ParamSharding((16, 3), {"tp": Shard(0)})
    generator = GridShape(tp=2)
    targets = {4 + rank: {"w": boxes_of(half, Place(generator, rank))} for rank in range(2)}
    moves = plan(sources, targets)
    said = [(move.source, move.target, move.write.offsets, move.write.sizes) for move in moves]
    assert said == [
        (0, 4, (0, 0), (4, 3)),
        (1, 4, (4, 0), (4, 3)),
        (2, 5, (8, 0), (4, 3)),
        (3, 5, (12, 0), (4, 3)),
    ]
    assert [send_bytes(moves, rank, 2) for rank in range(6)] == [4 * 3 * 2 + 8] * 4 + [0, 0]
    assert [recv_bytes(moves, rank, 2) for rank in range(6)] == [0] * 4 + [8 * 3 * 2 + 2 * 8] * 2


SHAPES = st.sampled_from(
    [GridShape(dp=dp, tp=tp) for dp in (1, 2, 3) for tp in (1, 2, 4)]
    + [GridShape(dp=4), GridShape(dp=2, tp=2, order="dp-tp-cp-pp")]
)


@settings(max_examples=60, deadline=None)
@given(SHAPES, SHAPES, st.booleans(), st.booleans(), st.sampled_from([1, 2]))
def test_each_rank_gets_its_part_once(
    learner: GridShape, generator: GridShape, one: bool, other: bool, kv_heads: int
) -> None:
    source = Fleet(learner, one, kv_heads)
    target = Fleet(generator, other, kv_heads, first=learner.world_size)
    moves = plan(source.layout(), target.layout())
    moved(moves, source, target)
    every_rank = range(learner.world_size + generator.world_size)
    sent = sum(send_bytes(moves, rank, 4) for rank in every_rank)
    assert sent == sum(recv_bytes(moves, rank, 4) for rank in every_rank)


@pytest.mark.parametrize("dp", [2, 4])
def test_copies_share_the_sending(dp: int) -> None:
    source = Fleet(GridShape(dp=dp))
    target = Fleet(GridShape(dp=dp, tp=2), first=dp)
    moves = plan(source.layout(), target.layout())
    sent = [sum(move.num_values for move in moves if move.source == rank) for rank in range(dp)]
    largest = max(move.num_values for move in moves)
    assert max(sent) - min(sent) <= largest


def test_a_plan_that_cannot_be_is_refused() -> None:
    box = Box((0,), (0,), (4,))
    half = Box((0,), (0,), (2,))
    with pytest.raises(ValueError, match=r"ranks \[1\] are to send and to receive"):
        plan({0: {"w": [box]}, 1: {"w": [box]}}, {1: {"w": [box]}})
    with pytest.raises(ValueError, match=r"rank 1 needs 4 numbers of w .* have 2 of them"):
        plan({0: {"w": [half]}}, {1: {"w": [box]}})
    with pytest.raises(ValueError, match=r"rank 1 needs 4 numbers of w .* have 0 of them"):
        plan({0: {}}, {1: {"w": [box]}})


# ---- ways to get it wrong, which a check has to find


def shards_taken_for_wholes(layout: Layout) -> Layout:
    """Where a block lies in a rank's part is taken for where it lies in the whole weight."""
    found = {}
    for rank, boxes in layout.items():
        found[rank] = {}
        for name, own in boxes.items():
            found[rank][name] = [box._replace(offsets=box.own_offsets) for box in own]
    return found


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_shard_that_is_sent_as_a_whole_is_found(fsdp: bool) -> None:
    source = Fleet(GridShape(tp=2, dp=2), fsdp)
    target = Fleet(GridShape(tp=2), first=4)
    with pytest.raises(ValueError, match="give both fleets the same model"):
        plan(shards_taken_for_wholes(source.layout()), target.layout())


def test_weights_may_lie_so_far_behind() -> None:
    assert check_lag(5, 5, max_lag=0) == 0
    assert check_lag(4, 5, max_lag=1) == 1
    with pytest.raises(StaleError, match="version 4 of the weights is 1 updates behind"):
        check_lag(4, 5, max_lag=0)
    with pytest.raises(StaleError, match="version 6 of the weights is -1 updates behind"):
        check_lag(6, 5, max_lag=2)
