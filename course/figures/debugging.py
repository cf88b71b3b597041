"""Drawings of precision debugging: what is watched in a layer, parts and the whole, whose files.

Lesson 19 uses them; `plot.watched_layer`, `plot.spread_of_parts` and `plot.reduction_groups` are
the ways in.
"""

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from course.figures.style import (
    INK,
    MARKERS,
    PALE,
    PALETTE,
    Picture,
    blank,
    canvas,
    colour_of,
    figure,
    ink_on,
    put_headline,
    put_text,
)
from labcode.topology import GridShape

FORWARD = PALETTE[4]
BACKWARD = PALETTE[1]


@figure
def watched_layer(*, alt: str, title: str = "") -> Picture:
    """The six tensors of a linear layer that a debug feature may look at, by their names."""
    picture = canvas(6.6, 2.6, alt=alt)
    axes = picture.axes[0]
    _box(axes, 5.0, 0.0, 2.6, 2.5, PALE)
    put_text(axes, 5.0, 1.55, "a linear layer", 9)
    _label(axes, 5.0, 0.78, 1.8, "weight", FORWARD)
    _label(axes, 5.0, -0.78, 1.8, "wgrad", BACKWARD)
    put_text(axes, 5.0, 0.25, "W", 9)
    put_text(axes, 5.0, -0.25, "dW", 9)
    rows = {
        0.6: (FORWARD, ("activation", "x"), ("output", "y"), (True, True)),
        -0.6: (BACKWARD, ("dgrad", "dx"), ("gradient", "dy"), (False, False)),
    }
    for y, (colour, left, right, forward) in rows.items():
        for (name, symbol), x, toward in ((left, 1.6, forward[0]), (right, 8.4, forward[1])):
            _label(axes, x, y, 2.2, name, colour)
            put_text(axes, x, y + (0.62 if y > 0 else -0.62), symbol, 9)
            inner, outer = (3.7, 2.75) if x < 5 else (6.3, 7.25)
            ends = (outer, inner) if (x < 5) == toward else (inner, outer)
            _arrow(axes, (ends[0], y), (ends[1], y))
    put_text(axes, 0.0, 0.6, "forward", 8.5, rotation=90)
    put_text(axes, 0.0, -0.75, "backward", 8.5, rotation=90)
    axes.set_xlim(-0.4, 9.9)
    axes.set_ylim(-1.75, 1.9)
    blank(axes)
    put_headline(picture, title)
    return picture


@figure
def spread_of_parts(parts: Mapping[str, Sequence[float]], *, alt: str, title: str = "") -> Picture:
    """The values of each part and of all together on a line, with their mean and spread.

    Args:
        parts: {name: its values}, two at least of each.
        alt: What the figure shows.
        title: Above the figure.
    """
    whole: list[float] = []
    for values in parts.values():
        whole += values
    rows = {**parts, "all of them": whole}
    picture = canvas(6.4, 0.9 + 0.55 * len(rows), alt=alt)
    axes = picture.axes[0]
    for row, values in enumerate(rows.values()):
        colour = colour_of(row)
        mean = statistics.fmean(values)
        std = statistics.stdev(values)
        axes.plot([mean - std, mean + std], [row + 0.18] * 2, color=INK, lw=2)
        axes.plot([mean], [row + 0.18], marker="|", ms=11, color=INK)
        axes.plot(values, [row - 0.12] * len(values), MARKERS[row], color=colour, ms=7)
        text = f"mean {mean:.3g}, std {std:.3g}"
        put_text(axes, 1.02, row, text, 8.5, ha="left", transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("value (dark lines: mean, and one standard deviation to each side)")
    axes.grid(False, axis="y")
    put_headline(picture, title)
    return picture


@figure
def reduction_groups(
    shape: GridShape, choices: Sequence[Sequence[str]], *, alt: str, title: str = ""
) -> Picture:
    """The ranks of a grid, once for each choice: ranks with the same letter write the same file.

    Args:
        shape: tp lies to the right, dp downwards, and each stage of pp is a block of its own.
        choices: Axes over which statistics are put together; () is none.
        alt: What the figure shows.
        title: Above the figure.
    """
    width = shape.pp * (shape.tp + 0.35)
    picture = canvas(min(6.8, 0.85 * width * len(choices)), 1.9, alt=alt, columns=len(choices))
    for axes, over in zip(picture.axes, choices):
        for number, group in enumerate(shape.groups(*over)):
            for rank in group:
                place = shape.coords(rank)
                left = place["pp"] * (shape.tp + 0.35) + place["tp"]
                _rank(axes, left, -place["dp"], rank, number)
        axes.set_title(f"over {' and '.join(over)}" if over else "over none", fontsize=9)
        for stage in range(shape.pp if shape.pp > 1 else 0):
            middle = stage * (shape.tp + 0.35) + (shape.tp - 1) / 2
            put_text(axes, middle, -shape.dp + 0.3, f"stage {stage}", 8)
        axes.set_xlim(-0.6, width - 0.75)
        axes.set_ylim(-shape.dp + (0.05 if shape.pp > 1 else 0.4), 0.6)
        blank(axes)
    put_headline(picture, title)
    return picture


def _rank(axes: Axes, x: float, y: float, rank: int, group: int) -> None:
    colour = colour_of(group)
    _box(axes, x, y, 0.9, 0.9, colour)
    ink = ink_on(colour)
    put_text(axes, x, y + 0.14, f"rank {rank}", 7.5, color=ink)
    put_text(axes, x, y - 0.2, "ABCDEFGH"[group % 8], 9, color=ink, weight="bold")


def _label(axes: Axes, x: float, y: float, width: float, text: str, colour: str) -> None:
    _box(axes, x, y, width, 0.66, colour)
    put_text(axes, x, y, text, 9.5, color=ink_on(colour))


def _box(axes: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    patch = FancyBboxPatch((x - width / 2, y - height / 2), width, height)
    patch.set_boxstyle("round,pad=0,rounding_size=0.12")
    patch.set(facecolor=colour, edgecolor=INK, linewidth=1.0)
    axes.add_patch(patch)


def _arrow(axes: Axes, tail: tuple[float, float], tip: tuple[float, float]) -> None:
    look = {"arrowstyle": "-|>", "color": INK, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", tip, tail, arrowprops=look)
