"""The drawing of a grid: each rank on its node, in the colour of its group."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch

from course.figures import plot
from course.figures.style import colour_of
from labcode.topology import GridShape

ALT = "Four words at least"


def boxes_by_group(picture):
    """{group: colours of its boxes}."""
    found = {}
    for patch in picture.axes[0].patches:
        gid = patch.get_gid() or ""
        if isinstance(patch, FancyBboxPatch) and gid.startswith("group"):
            colours = found.setdefault(int(gid.split()[1]), [])
            colours.append(to_hex(patch.get_facecolor()).upper())
    return found


@pytest.mark.parametrize(
    ("shape", "color_by", "nodes"),
    [
        (GridShape(dp=2, tp=4), "tp", 2),
        (GridShape(dp=2, tp=4), "dp", 2),
        (GridShape(dp=2, pp=2, cp=2, tp=2), ("dp", "cp"), 4),
        (GridShape(dp=4, pp=4, tp=4), "pp", 8),
        (GridShape(), "tp", 1),
    ],
)
def test_each_rank_has_the_colour_of_its_group(shape, color_by, nodes):
    picture = plot.grid(shape, color_by=color_by, nodes=nodes, alt=ALT)
    groups = shape.groups(*([color_by] if isinstance(color_by, str) else color_by))
    drawn = boxes_by_group(picture)
    assert set(drawn) == set(range(len(groups)))
    for number, group in enumerate(groups):
        assert drawn[number] == [colour_of(number).upper()] * len(group)
    assert len({colours[0] for colours in drawn.values()}) == len(groups)  # no two groups alike
    labels = [text.get_text() for text in picture.axes[0].texts]
    assert {str(rank) for rank in range(shape.world_size)} <= set(labels)
    named = [label for label in labels if label.startswith("node")]
    assert named == ([f"node {i}" for i in range(nodes)] if nodes > 1 else [])


def test_ranks_are_on_their_nodes():
    picture = plot.grid(GridShape(dp=2, tp=2), color_by="tp", nodes=2, alt=ALT)
    place = {text.get_text(): text.get_position() for text in picture.axes[0].texts}
    start_of_node_1 = place["node 1"][0]
    on_node_1 = [place[str(rank)][0] > start_of_node_1 for rank in range(4)]
    assert on_node_1 == [False, False, True, True]


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="at most 64"):
        plot.grid(GridShape(dp=65), alt=ALT)
    with pytest.raises(ValueError, match="do not fill 3 nodes"):
        plot.grid(GridShape(dp=4), nodes=3, alt=ALT)
