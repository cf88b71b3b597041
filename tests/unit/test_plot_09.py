"""The drawing of lesson 09: whose tile is where, and that zig-zag shares the work out evenly."""

from collections import Counter

import pytest
import torch

from labcode.parallel.attention_block import visible_block
from labcode.parallel.context import own_positions
from labcode.teach.figures import attention as masks

ALT = "Four words at least"


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_tiles_are_what_the_ring_computes(p, layout):
    """Each tile against the blocks of the real algorithm, token by token, with eight tokens to a chunk."""
    length = 2 * p * 8
    drawn = torch.full((2 * p, 2 * p, 2), -1)
    for (q, k), found in masks.tiles(p, layout).items():
        drawn[q, k] = torch.tensor(found)
    for rank in range(p):
        for source in range(p):
            block = visible_block(length, p, rank, source, layout, causal=True)
            if block is None:
                continue
            queries = own_positions(length, p, rank, layout)[block.queries] // 8
            keys = own_positions(length, p, source, layout)[block.keys] // 8
            pairs = {
                (q, k)
                for q in queries.tolist()
                for k in keys.tolist()
                if q >= k or not block.causal
            }
            assert pairs and all(
                drawn[q, k].tolist() == [rank, (rank - source) % p] for q, k in pairs
            )
    assert (drawn[..., 0] >= 0).sum() == p * (2 * p + 1)


@pytest.mark.parametrize("p", [2, 4])
def test_zigzag_is_balanced_and_contiguous_is_not(p):
    def work(layout):
        return Counter(
            rank
            for (q, k), (rank, _) in masks.tiles(p, layout).items()
            for _ in range(1 if q == k else 2)
        )

    assert len(set(work("zigzag").values())) == 1
    contiguous = work("contiguous")
    assert contiguous[p - 1] == (2 * p - 1) * contiguous[0]


def test_the_drawing_has_a_patch_for_each_tile():
    picture = masks.causal(4, alt=ALT)
    for axes, layout in zip(picture.axes, ("contiguous", "zigzag")):
        drawn = Counter(patch.get_gid() for patch in axes.patches if patch.get_gid())
        assert drawn == Counter(
            f"rank {rank} step {step}" for rank, step in masks.tiles(4, layout).values()
        )
        assert axes.get_title(loc="left") == layout
    assert len(picture.png()) < 60_000
    assert len(masks.causal(2, ["zigzag"], alt=ALT).axes) == 1


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="p=7"):
        masks.causal(7, alt=ALT)
    with pytest.raises(ValueError, match="striped"):
        masks.causal(2, ["striped"], alt=ALT)
    with pytest.raises(ValueError, match="alt"):
        masks.causal(2, alt="")
