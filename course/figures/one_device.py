"""Drawings of what makes one device fast: number formats, their range, fusion, launches.

Lesson 03 uses them; `plot.formats`, `plot.gradient_range`, `plot.fusion` and `plot.launches` are
the ways in.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle
from numpy.typing import ArrayLike

from course.figures.style import (
    INK,
    PALE,
    PALETTE,
    RULE,
    Picture,
    canvas,
    figure,
    ink_on,
    put_headline,
    put_text,
)

SIGN = "#999999"
EXPONENT = PALETTE[1]
FRACTION = PALETTE[4]
MEMORY = PALETTE[4]
COMPUTE = PALETTE[1]
WHITE = "#FFFFFF"
MOST_STAGES = 8  # more boxes cannot be read
NUM_KERNELS = 6


@figure
def formats(bits: Mapping[str, tuple[int, int]], *, alt: str, title: str = "") -> Picture:
    """The bits of number formats, a row each: one for the sign, some for exponent and fraction.

    Args:
        bits: `{"name": (bits of the exponent, bits of the fraction)}`.
        alt: What the figure shows.
        title: Above the figure.
    """
    picture = canvas(6.6, 0.75 + 0.42 * len(bits), alt=alt)
    axes = picture.axes[0]
    for row, (name, (exponent, fraction)) in enumerate(bits.items()):
        put_text(axes, -0.4, row, name, 10, ha="right")
        _run_of_bits(axes, 0, row, 1, SIGN, "±")
        _run_of_bits(axes, 1, row, exponent, EXPONENT, f"{exponent} exponent")
        fits = _run_of_bits(axes, 1 + exponent, row, fraction, FRACTION, f"{fraction} fraction")
        if not fits:
            end = 1 + exponent + fraction
            put_text(axes, end + 0.2, row, f"{fraction} fraction", 8.5, ha="left")
    longest = max(1 + exponent + fraction for exponent, fraction in bits.values())
    axes.set_xlim(-5, longest + 0.2)
    axes.set_ylim(len(bits) - 0.4, -0.6)
    axes.set_axis_off()
    put_headline(picture, title)
    return picture


def _run_of_bits(axes: Axes, start: int, row: int, count: int, colour: str, text: str) -> bool:
    """`count` squares beside each other, with a text over them if it fits; whether it does."""
    for place in range(start, start + count):
        square = Rectangle((place, row - 0.36), 1, 0.72, facecolor=colour, edgecolor=WHITE)
        axes.add_patch(square)
    fits = len(text) <= 3.2 * count
    if fits:
        label = put_text(axes, start + count / 2, row, text, 8.5, color=ink_on(colour))
        label.set_bbox({"facecolor": colour, "edgecolor": "none", "pad": 1.0})
    return fits


@figure
def gradient_range(
    sizes: Mapping[str, ArrayLike],
    *,
    alt: str,
    least: float,
    most: float,
    where: str = "float16",
    above: str = "inf",
    title: str = "",
) -> Picture:
    """How often each size occurs among some numbers, over the range of a format.

    Args:
        sizes: `{"label": numbers}`; their signs do not count, and zeros are left out.
        alt: What the figure shows.
        least: Smaller numbers become zero.
        most: Larger numbers become infinite.
        where: The name of the format.
        above: What becomes of numbers that are too large.
        title: Above the figure.
    """
    picture = canvas(6.6, 1.0 + 1.15 * len(sizes), alt=alt, rows=len(sizes))
    lowest = np.floor(np.log2(least) - 14)
    highest = np.ceil(np.log2(most) + 4)
    edges = np.arange(lowest, highest + 1)
    for axes, (label, numbers) in zip(picture.axes, sizes.items()):
        found = np.abs(np.asarray(numbers)).ravel()
        exponents = np.log2(found[found > 0])
        share = np.histogram(np.clip(exponents, edges[0], edges[-1]), edges)[0] / found.size
        axes.axvspan(np.log2(least), np.log2(most), color=PALE, zorder=0)
        axes.stairs(share, edges, fill=True, color=PALETTE[0], alpha=0.85)
        for limit in (least, most):
            axes.axvline(np.log2(limit), color=INK, lw=1.2, ls="--")
        top = 1.3 * share.max()
        axes.set(ylim=(0, top), xlim=(edges[0], edges[-1]), yticks=[])
        axes.grid(False, axis="y")
        put_text(axes, edges[0] + 0.6, 0.86 * top, label, 9, ha="left")
        axes.spines["left"].set_visible(False)
    first = picture.axes[0]
    for place, text in (
        (np.log2(least) - 7, "becomes 0"),
        ((np.log2(least) + np.log2(most)) / 2, f"what {where} can hold"),
        (np.log2(most) + 2, above),
    ):
        first.annotate(
            text,
            (place, 1.02),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=9,
        )
    picture.axes[-1].set_xlabel("size, as a power of two")
    put_headline(picture, title)
    return picture


@figure
def fusion(steps: Sequence[str], *, alt: str, title: str = "") -> Picture:
    """A chain of elementwise operations: every one through memory, and all in one pass.

    Args:
        steps: The operations, in order; their texts are short.
        alt: What the figure shows.
        title: Above the figure.

    Raises:
        ValueError: More operations than can be drawn.
    """
    if len(steps) > MOST_STAGES:
        raise ValueError(f"{len(steps)} operations: at most {MOST_STAGES} can be read in a row")
    picture = canvas(6.6, 3.3, alt=alt, rows=2)
    apart, together = picture.axes
    for axes, label in ((apart, "one by one"), (together, "fused")):
        axes.set_xlim(-0.3, 2.0 * len(steps) + 0.1)
        axes.set_ylim(-0.45, 1.75)
        axes.set_axis_off()
        put_text(axes, -0.2, 1.6, label, 10, ha="left")
        _box(axes, 0, -0.35, 2.0 * len(steps) - 0.4, 0.4, MEMORY, "memory")
    for place, step in enumerate(steps):
        left = 2.0 * place
        _box(apart, left, 0.85, 1.6, 0.5, COMPUTE, step)
        _arrow(apart, (left + 0.35, 0.07), (left + 0.35, 0.83))
        _arrow(apart, (left + 1.25, 0.83), (left + 1.25, 0.07))
        _box(together, left, 0.85, 1.6, 0.5, COMPUTE, step)
        if place:
            _arrow(together, (left - 0.38, 1.1), (left - 0.02, 1.1))
    _arrow(together, (0.8, 0.07), (0.8, 0.83))
    _arrow(together, (2.0 * len(steps) - 1.2, 0.83), (2.0 * len(steps) - 1.2, 0.07))
    put_headline(picture, title)
    return picture


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, colour: str, text: str
) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=INK, lw=0.8))
    put_text(axes, x + width / 2, y + height / 2, text, 8.5, color=ink_on(colour))


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 9, "color": INK, "lw": 1.1}
    axes.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **style))


@figure
def launches(cases: Mapping[str, tuple[float, float]], *, alt: str, title: str = "") -> Picture:
    """A processor that launches kernels, and the device that runs them, over time.

    Kernel i can run when it is launched and when the one before it is done.

    Args:
        cases: `{"label": (time of a launch, time of a kernel)}`, both in microseconds. A launch
            of 0 stands for a graph: one launch for all kernels.
        alt: What the figure shows.
        title: Above the figure.
    """
    picture = canvas(6.6, 0.9 + 1.15 * len(cases), alt=alt, rows=len(cases))
    ends = []
    for axes, (label, (launch_us, kernel_us)) in zip(picture.axes, cases.items()):
        ends.append(_lanes(axes, label, launch_us, kernel_us))
    for axes in picture.axes:
        axes.set_xlim(0, 1.06 * max(ends))
    picture.axes[-1].set_xlabel("microseconds")
    put_headline(picture, title)
    return picture


def _lanes(axes: Axes, label: str, launch_us: float, kernel_us: float) -> float:
    """Draw one case; when its last kernel ends, in microseconds."""
    one_launch_us = launch_us or 5.0
    done_us = 0.0
    for number in range(NUM_KERNELS):
        launched_us = (number + 1) * launch_us if launch_us else one_launch_us
        if launch_us:
            _span(axes, 1, number * launch_us, launch_us, RULE, "")
        elif number == 0:
            _span(axes, 1, 0, one_launch_us, RULE, "")
        begin_us = max(launched_us, done_us)
        done_us = begin_us + kernel_us
        _span(axes, 0, begin_us, kernel_us, COMPUTE, str(number + 1))
    axes.set_yticks([1, 0], ["CPU", "GPU"])
    axes.set_ylim(-0.55, 1.55)
    axes.grid(False, axis="y")
    axes.set_title(label, loc="left", fontsize=9.5)
    return done_us


def _span(axes: Axes, lane: int, start: float, length: float, colour: str, text: str) -> None:
    box = Rectangle((start, lane - 0.34), length, 0.68, facecolor=colour, edgecolor=WHITE, lw=1)
    axes.add_patch(box)
    if text:
        put_text(axes, start + length / 2, lane, text, 7.5, color=ink_on(colour))
