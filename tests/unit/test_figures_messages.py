"""A drawing of single messages: who has the tensor after each round."""

import pytest

from course.figures import plot

ALT = "Four words at least"


def marks(axes, gid):
    found = []
    for line in axes.lines:
        if line.get_gid() == gid:
            found.append((int(line.get_xdata()[0]), -int(line.get_ydata()[0])))
    return sorted(found)


def test_the_filled_circles_are_the_ranks_that_have_the_tensor():
    (axes,) = plot.rounds([[(0, 1)], [(0, 2), (1, 3)]], 4, alt=ALT).axes
    assert marks(axes, "has it") == [(0, 0), (2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)]
    assert len(marks(axes, "waits")) == 12 - 7
    words = [text.get_text() for text in axes.texts]
    assert {"before", "after round 1", "after round 2", "rank 3"} <= set(words)


def test_nobody_sends_what_it_does_not_have():
    with pytest.raises(ValueError, match="rank 2 sends in round 2 before it has the tensor"):
        plot.rounds([[(0, 1)], [(2, 3)]], 4, alt=ALT)
