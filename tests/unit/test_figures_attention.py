"""The drawing of the causal mask: whose tile is where, and that zigzag is balanced."""

from collections import Counter
from itertools import product

import pytest
import torch

from course.figures.attention import tiles
from course.figures.plot import causal
from labcode.parallel.attention_block import own_chunks, visible_block

ALT = "Four words at least"


def positions(length, p, rank, layout):
    """Global positions of the tokens that a rank holds."""
    held = []
    for chunk in own_chunks(length, p, rank, layout):
        held += chunk
    return torch.tensor(held)


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_tiles_are_what_the_ring_computes(p, layout):
    """Each tile against the blocks of the real algorithm, token by token, eight tokens a chunk."""
    length = 2 * p * 8
    drawn = torch.full((2 * p, 2 * p, 2), -1)
    for (q, k), found in tiles(p, layout).items():
        drawn[q, k] = torch.tensor(found)
    for rank in range(p):
        for source in range(p):
            block = visible_block(length, p, rank, source, layout, causal=True)
            if block is None:
                continue
            queries = positions(length, p, rank, layout)[block.queries] // 8
            keys = positions(length, p, source, layout)[block.keys] // 8
            step = (rank - source) % p
            seen = 0
            for q, k in set(product(queries.tolist(), keys.tolist())):
                if q >= k or not block.causal:
                    assert drawn[q, k].tolist() == [rank, step]
                    seen += 1
            assert seen
    assert (drawn[..., 0] >= 0).sum() == p * (2 * p + 1)


@pytest.mark.parametrize("p", [2, 4])
def test_zigzag_is_balanced_and_contiguous_is_not(p):
    def work(layout):
        done = Counter()
        for (q, k), (rank, _) in tiles(p, layout).items():
            done[rank] += 1 if q == k else 2
        return done

    assert len(set(work("zigzag").values())) == 1
    contiguous = work("contiguous")
    assert contiguous[p - 1] == (2 * p - 1) * contiguous[0]


@pytest.mark.parametrize("documents", [(4, 1, 1, 1, 1), (3, 5), (8,)])
def test_a_document_mask_leaves_the_tiles_of_each_document(documents):
    """Each tile against the mask of tokens, four of them a chunk."""
    document = torch.repeat_interleave(torch.tensor(documents) * 4)
    same = document[:, None] == document
    visible = same.tril().unflatten(0, (8, 4)).unflatten(2, (8, 4)).any(3).any(1)
    whole = tiles(4, "zigzag")
    left = {tile: whole[tile] for tile in whole if visible[tile]}
    assert tiles(4, "zigzag", documents) == left
    with pytest.raises(ValueError, match="must fill it"):
        tiles(4, "zigzag", (*documents, 1))


def test_the_drawing_has_a_patch_for_each_tile():
    picture = causal(4, alt=ALT)
    for axes, layout in zip(picture.axes, ("contiguous", "zigzag")):
        drawn = Counter(patch.get_gid() for patch in axes.patches if patch.get_gid())
        expected = Counter(f"rank {rank} step {step}" for rank, step in tiles(4, layout).values())
        assert drawn == expected
        assert axes.get_title(loc="left").replace("-", "") == layout
    assert len(picture.png()) < 60_000
    assert len(causal(2, ["zigzag"], alt=ALT).axes) == 1
    patches = causal(2, ["zigzag"], documents=(2, 1, 1), alt=ALT).axes[0].patches
    assert len([patch for patch in patches if patch.get_gid()]) == 3 + 1 + 1


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="p=7"):
        causal(7, alt=ALT)
    with pytest.raises(ValueError, match="striped"):
        causal(2, ["striped"], alt=ALT)
    with pytest.raises(ValueError, match="alt"):
        causal(2, alt="")
