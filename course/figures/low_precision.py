"""Drawings of low precision: the ranges of formats, delayed scaling, the products of a layer.

Lessons 18 and 22 use them; `plot.format_ranges`, `plot.delayed_scaling`, `plot.fp8_linear` and
`plot.scale_blocks` are the ways in.
"""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from course.figures.style import (
    INK,
    PALE,
    PALETTE,
    RULE,
    Picture,
    blank,
    canvas,
    figure,
    ink_on,
    put_headline,
    put_text,
)

# {format: (smallest subnormal number, smallest normal one, largest one)}, as powers of two
RANGES = {
    "float32": (-149, -126, 128.0),
    "tf32": (-136, -126, 128.0),
    "bfloat16": (-133, -126, 128.0),
    "float16": (-24, -14, 16.0),
    "e5m2": (-16, -14, math.log2(57344)),
    "e4m3": (-9, -6, math.log2(448)),
}
NORMAL = PALETTE[4]
SUBNORMAL = PALETTE[1]
BROKEN = PALETTE[5]
SIDE = 8  # of a matrix whose blocks share a scale, in numbers


@figure
def format_ranges(names: Sequence[str], *, alt: str, title: str = "") -> Picture:
    """How far each format reaches: a bar from its smallest to its largest number, as powers of two.

    Args:
        names: Names of formats, from the top.
        alt: What the figure shows.
        title: Above the figure.
    """
    picture = canvas(6.6, 1.0 + 0.42 * len(names), alt=alt)
    axes = picture.axes[0]
    for row, name in enumerate(names):
        subnormal, normal, largest = RANGES[name]
        axes.barh(row, normal - subnormal, left=subnormal, color=SUBNORMAL, height=0.6, hatch="//")
        axes.barh(row, largest - normal, left=normal, color=NORMAL, height=0.6)
        ends = f"2^{subnormal} to {_as_number(largest)}"
        if largest - subnormal > 100:
            put_text(axes, (normal + largest) / 2, row, ends, 8.5)
        else:
            put_text(axes, largest + 3, row, ends, 8.5, ha="left")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xticks([-128, -96, -64, -32, 0, 32, 64, 96, 128])
    axes.set_xlabel("size, as a power of two (hatched: subnormal, with fewer digits)")
    axes.grid(False, axis="y")
    put_headline(picture, title)
    return picture


def _as_number(power: float) -> str:
    if power > 20:
        return f"2^{power:.0f}"
    if power == 16.0:
        return "65,504"
    return f"{2**power:,.0f}"


@figure
def delayed_scaling(amaxes: Sequence[float], *, history: int, alt: str, title: str = "") -> Picture:
    """The amax of each step, and the largest number that the scale of that step can hold.

    Args:
        amaxes: Largest magnitudes of one tensor, step by step.
        history: How many steps the scale looks back.
        alt: What the figure shows.
        title: Above the figure.
    """
    picture = canvas(6.6, 2.7, alt=alt)
    axes = picture.axes[0]
    steps = range(1, len(amaxes))
    held = [max(amaxes[max(0, step - history) : step]) for step in steps]
    axes.step(
        steps, held, where="mid", color=INK, lw=2, label="largest number that the scale can hold"
    )
    for step, most in zip(steps, held):
        too_large = amaxes[step] > most
        colour = BROKEN if too_large else NORMAL
        axes.bar(step, amaxes[step], width=0.55, color=colour, hatch="//" if too_large else None)
        if too_large:
            place = (step - 0.5, amaxes[step] * 0.9)
            axes.annotate("saturates", place, ha="right", va="center", fontsize=9)
    after = next((step for step, most in zip(steps, held) if most > held[0]), None)
    if after is not None:
        middle = after + (history - 1) / 2
        put_text(axes, middle, max(held) * 1.09, f"{history} steps", 9, va="bottom")
        span = {"arrowstyle": "<->", "color": RULE}
        ends = ((after - 0.5, max(held) * 1.06), (after + history - 0.5, max(held) * 1.06))
        axes.annotate("", ends[1], ends[0], arrowprops=span)
    axes.bar(0, 0, color=NORMAL, label="amax of the step")
    axes.set(xlabel="step", ylabel="amax", ylim=(0, 1.28 * max(amaxes)))
    axes.set_xlim(0.4, len(amaxes) - 0.4)
    axes.set_xticks(list(steps))
    axes.grid(False, axis="x")
    axes.legend(loc="upper left")
    put_headline(picture, title)
    return picture


@figure
def scale_blocks(blocks: Mapping[str, tuple[int, int]], *, alt: str, title: str = "") -> Picture:
    """Which numbers of a square matrix share a scale, one matrix for each way to cut it.

    Args:
        blocks: {label: (rows, columns) of a block}.
        alt: What the figure shows.
        title: Above the figure.
    """
    picture = canvas(2.2 * len(blocks), 2.6, columns=len(blocks), alt=alt)
    for axes, (label, (rows, columns)) in zip(picture.axes, blocks.items(), strict=True):
        blank(axes)
        axes.set(xlim=(-0.3, SIDE + 0.3), ylim=(-1.6, SIDE + 0.3))
        per_row = SIDE // columns
        for top in range(0, SIDE, rows):
            for left in range(0, SIDE, columns):
                number = (top // rows) * per_row + left // columns
                shade = PALE if (top // rows + left // columns) % 2 else PALETTE[4]
                corner = (left + 0.04, SIDE - top - rows + 0.04)
                size = (columns - 0.08, rows - 0.08)
                axes.add_patch(Rectangle(corner, *size, facecolor=shade, edgecolor=INK, lw=0.8))
                middle = (left + columns / 2, SIDE - top - rows / 2)
                put_text(axes, *middle, f"s{number}", 9, color=ink_on(shade))
        put_text(axes, SIDE / 2, -0.8, label, 9)
    put_headline(picture, title)
    return picture


@figure
def fp8_linear(*, alt: str, title: str = "") -> Picture:
    """The three products of a linear layer, and which 8-bit tensors go into each of them."""
    picture = canvas(6.6, 3.1, alt=alt)
    axes = picture.axes[0]
    rows = {"x": 2.0, "W": 0.0, "dy": -2.0}
    casts = {"x": "e4m3", "W": "e4m3", "dy": "e5m2"}
    products = {
        "y = x Wᵀ": (2.0, "x", "W"),
        "dW = dyᵀ x": (0.0, "x", "dy"),
        "dx = dy W": (-2.0, "W", "dy"),
    }
    for name, y in rows.items():
        _box(axes, 0.0, y, 1.1, name, PALE)
        colour = PALETTE[4] if casts[name] == "e4m3" else PALETTE[1]
        _box(axes, 2.6, y, 1.5, casts[name], colour)
        _arrow(axes, (0.6, y), (1.82, y), INK)
        put_text(axes, 1.2, y + 0.34, "· scale", 8)
    styles = {"x": "-", "W": "--", "dy": ":"}
    for text, (y, first, second) in products.items():
        _box(axes, 7.0, y, 2.3, text, PALE)
        for name, offset in ((first, 0.22), (second, -0.22)):
            _arrow(axes, (3.4, rows[name]), (5.8, y + offset), INK, styles[name])
        _arrow(axes, (8.2, y), (9.2, y), INK)
        put_text(axes, 9.3, y, "/ scales,\n32 or 16 bits", 8, ha="left")
    put_text(axes, 0.0, 3.15, "32 or 16 bits", 8.5)
    put_text(axes, 2.6, 3.15, "8 bits, each with a scale", 8.5)
    put_text(axes, 7.0, 3.15, "summed in 32 bits", 8.5)
    axes.set_xlim(-0.8, 11.4)
    axes.set_ylim(-2.8, 3.5)
    blank(axes)
    put_headline(picture, title)
    return picture


def _box(axes: Axes, x: float, y: float, width: float, text: str, colour: str) -> None:
    patch = FancyBboxPatch((x - width / 2, y - 0.4), width, 0.8)
    patch.set_boxstyle("round,pad=0,rounding_size=0.12")
    patch.set(facecolor=colour, edgecolor=INK, linewidth=1.1)
    axes.add_patch(patch)
    put_text(axes, x, y, text, 10, color=ink_on(colour))


def _arrow(
    axes: Axes, tail: tuple[float, float], tip: tuple[float, float], colour: str, style: str = "-"
) -> None:
    look = {"arrowstyle": "-|>", "color": colour, "lw": 1.2, "ls": style, "shrinkA": 0}
    axes.annotate("", tip, tail, arrowprops={**look, "shrinkB": 0})
