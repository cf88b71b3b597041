"""The drawing of weights: which rank holds which stripe."""

import pytest

from course.figures.plot import cuts
from course.figures.weights import owners
from labcode.parallel.sharding import Shard

ALT = "Four words at least"


def stripes(picture):
    """{(left, bottom, width, height): text} of all rectangles."""
    found = {}
    for patch in picture.axes[0].patches:
        bounds = tuple(round(length, 6) for length in patch.get_bbox().bounds)
        found[bounds] = patch.get_gid()
    return found


def test_stripes_are_those_of_the_split():
    assert owners(Shard(0), 6, 2) == [(0, 0, 3), (1, 3, 6)]
    assert owners(Shard(1), 5, 3) == [(0, 0, 2), (1, 2, 4), (2, 4, 5)]
    assert owners(Shard(0, (4, 2, 2)), 8, 2) == [
        (0, 0, 2),
        (1, 2, 4),
        (0, 4, 5),
        (1, 5, 6),
        (0, 6, 7),
        (1, 7, 8),
    ]


def test_a_matrix_is_drawn_to_scale_and_cut_where_the_split_says():
    # PyTorch's [6 outputs, 4 inputs] is drawn 4 high and 6 wide
    columns = stripes(cuts({"w": ((6, 4), Shard(0))}, 2, alt=ALT))
    assert [(width, height) for _, _, width, height in columns] == [(3, 4), (3, 4)]
    assert list(columns.values()) == ["0", "1"]
    rows = stripes(cuts({"w": ((6, 4), Shard(1))}, 4, alt=ALT))
    assert [(width, height) for _, _, width, height in rows] == [(6, 1)] * 4


def test_whole_weights_vectors_and_sections():
    thirds = Shard(0, (3, 3, 3))
    weights = {"w": ((9, 3), thirds), "b": ((9,), thirds), "n": ((4, 4), None)}
    picture = cuts(weights, 3, alt=ALT)
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert texts.count("q") == texts.count("k") == texts.count("v") == 1  # at the matrix alone
    assert texts.count("all") == 1 and texts.count("0") == 3
    assert len(stripes(picture)) == 9 + 9 + 1
    with pytest.raises(ValueError, match="alt"):
        cuts({"w": ((2, 2), None)}, 2, alt="")
