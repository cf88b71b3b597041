"""The drawings of one device show what they are given."""

import numpy as np
import pytest
from matplotlib.patches import FancyArrowPatch

from course.figures import plot

ALT = "A sentence of some words"


def texts(axes):
    return [text.get_text() for text in axes.texts]


def arrows_in(axes):
    return sum(isinstance(patch, FancyArrowPatch) for patch in axes.patches)


def test_a_format_has_a_square_for_each_bit():
    picture = plot.formats({"float32": (8, 23), "float16": (5, 10)}, alt=ALT)
    assert len(picture.axes[0].patches) == 32 + 16
    assert "23 fraction" in texts(picture.axes[0])


def test_numbers_below_the_range_lie_to_the_left_of_it():
    picture = plot.gradient_range(
        {"small": [2.0**-30], "large": [2.0**3, 0.0]}, least=2**-25, most=65504, alt=ALT
    )
    for axes, exponent, share in zip(picture.axes, (-30, 3), (1.0, 0.5)):
        stairs = axes.patches[-1].get_data()
        place = int(np.argmax(stairs.values))
        assert stairs.edges[place] == exponent
        assert stairs.values[place] == share


def test_fused_operations_touch_memory_twice():
    picture = plot.fusion(["* 2", "+ 1", "abs"], alt=ALT)
    apart, together = picture.axes
    assert arrows_in(apart) == 2 * 3
    assert arrows_in(together) == 2 + 2


def test_a_row_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="9 operations: at most 8"):
        plot.fusion(["+ 1"] * 9, alt=ALT)


@pytest.mark.parametrize(
    ("case", "end_us"), [((5, 12), 5 + 6 * 12), ((5, 2), 6 * 5 + 2), ((0, 2), 5 + 6 * 2)]
)
def test_a_kernel_waits_for_its_launch_and_for_the_one_before(case, end_us):
    axes = plot.launches({"a case": case}, alt=ALT).axes[0]
    assert axes.get_xlim()[1] == pytest.approx(1.06 * end_us)
