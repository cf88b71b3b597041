"""The drawing of a time line: a lane for each name, a colour for each kind of bar."""

import pytest
from matplotlib.colors import to_hex

from course.figures import plot

ALT = "Four words at least"


def test_a_lane_for_each_name_and_a_colour_for_each_kind():
    rows = [("rank 0", "forward 1", 0, 2), ("rank 0", "forward 2", 2, 4), ("rank 1", "send", 2, 3)]
    picture = plot.timeline(rows, xlabel="ms", alt=ALT)
    (axes,) = picture.axes
    bars = []
    for bar in axes.patches:
        lane = round(bar.get_y() + bar.get_height() / 2)
        bars.append((bar.get_x(), bar.get_width(), lane))
    assert bars == [(0, 2, 0), (2, 2, 0), (2, 1, 1)]
    first, second, send = (to_hex(bar.get_facecolor()) for bar in axes.patches)
    assert first == second != send
    named = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert named == ["forward", "send"]


def test_bars_of_a_kind_show_the_part_of_their_label_that_fits_the_shortest():
    rows = [("a", "forward 1", 0, 1), ("a", "forward 2", 1, 100), ("b", "wait", 0, 100)]
    (axes,) = plot.timeline(rows, alt=ALT).axes
    assert [text.get_text() for text in axes.texts] == ["", "", "wait"]


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="stops before it starts"):
        plot.timeline([("rank 0", "a", 2, 1)], alt=ALT)
    with pytest.raises(ValueError, match="at least one"):
        plot.timeline([], alt=ALT)


def test_the_legend_spells_short_labels():
    rows = [("link", "G1", 0, 1), ("link", "R1", 1, 2)]
    (legend,) = plot.timeline(rows, alt=ALT, names={"G": "G gather"}).figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["G gather", "R"]
