"""Drawings of a grid's order: digits of ranks, links that leave a node, adapters in use."""

from dataclasses import replace

import pytest

from course.figures import plot
from labcode.topology import GridShape

ALT = "Four words at least"
SHAPE = GridShape(dp=2, pp=2, tp=4)


def gids(axes):
    return [patch.get_gid() for patch in axes.patches]


def test_the_digits_of_all_ranks_are_their_coordinates():
    axes = plot.digits(SHAPE, alt=ALT).axes[0]
    assert gids(axes).count("digit 3") == 4  # of tp alone
    texts = [text.get_text() for text in axes.texts]
    assert "slowest: pp" in texts and "fastest: tp" in texts
    with pytest.raises(ValueError, match="at most 16"):
        plot.digits(GridShape(dp=32), alt=ALT)


@pytest.mark.parametrize(("order", "leaving"), [("tp-cp-dp-pp", 0), ("dp-pp-tp-cp", 8)])
def test_links_that_leave_a_node_are_counted_and_marked(order, leaving):
    picture = plot.links(replace(SHAPE, order=order), axes_shown=("tp",), nodes=2, alt=ALT)
    axes = picture.axes[0]
    assert gids(axes).count("leaves") == leaving
    assert gids(axes).count("inside") == 16 - leaving
    assert axes.get_title(loc="left") == f"tp: {leaving} of 16 links leave the node"


def test_one_ring_uses_two_adapters_of_a_node_and_the_other_ways_use_all():
    picture = plot.ways_over_nodes(alt=ALT)
    busy = [gids(axes).count("busy") for axes in picture.axes]
    assert busy == [4, 8, 8]
