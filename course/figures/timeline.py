"""A drawing of who is busy when: ranks, streams, buckets.

Any lesson may use it; `plot.timeline` is the way in.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.ticker import MaxNLocator

from course.figures.style import (
    Picture,
    canvas,
    colour_of,
    figure,
    ink_on,
    put_text,
    swatch,
)

AXIS_IN = 5.2  # about the length of the time axis, inches

TimelineRow = tuple[str, str, float, float]  # lane, label, start, stop


@figure
def timeline(
    rows: Iterable[Sequence],
    *,
    alt: str,
    xlabel: str = "time",
    title: str = "",
    names: Mapping[str, str] | None = None,
) -> Picture:
    """Labelled bars over time, one lane each: what a rank, a stream or a bucket is doing when.

    Args:
        rows: (lane, label, start, stop) each, for instance ("rank 0", "forward 1", 0.0, 2.5). Lanes
            come in the order of their first rows; labels that differ only in a number share a
            colour.
        alt: What the figure shows.
        xlabel: The time and its unit.
        title: Above the figure.
        names: What the legend says for a label; None: the labels themselves, without numbers.

    Raises:
        ValueError: No rows, or one that stops before it starts.
    """
    checked = _checked(rows)
    lanes = _lanes(checked)
    shortest = _shortest_of_each_kind(checked)
    kinds = list(shortest)
    span = _span(checked)

    height_in = 1.0 + 0.4 * len(lanes)
    picture = canvas(6.4, height_in, alt=alt)
    axes = picture.axes[0]
    for lane, label, start, stop in checked:
        kind = _kind(label)
        colour = colour_of(kinds.index(kind))
        y = lanes.index(lane)
        length = stop - start
        axes.barh(
            y,
            length,
            left=start,
            height=0.74,
            color=colour,
            edgecolor="white",
            lw=0.8,
        )
        # All bars of a kind show the same part of their label: that which fits the shortest.
        text = _fitting(label, shortest[kind], span)
        middle = (start + stop) / 2
        put_text(axes, middle, y, text, 8, color=ink_on(colour))
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.45, -0.55)  # the first lane on top
    axes.set_xlabel(xlabel)
    axes.xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 5, 10]))
    axes.grid(False, axis="y")
    if title:
        axes.set_title(title, loc="left")
    signs = [swatch(colour_of(i), edge=1) for i in range(len(kinds))]
    picture.figure.legend(
        signs,
        [(names or {}).get(kind, kind) for kind in kinds],
        loc="outside upper right",
        ncols=min(5, len(kinds)),
        handlelength=1,
    )
    return picture


def _checked(rows: Iterable[Sequence]) -> list[TimelineRow]:
    found = []
    for row in rows:
        lane, label, start, stop = row
        if stop < start:
            raise ValueError(f"the row {tuple(row)} stops before it starts")
        found.append((str(lane), label, start, stop))
    if not found:
        raise ValueError("a time line without rows: give at least one")
    return found


def _lanes(rows: Iterable[TimelineRow]) -> list[str]:
    """Each lane once, in the order of its first row."""
    lanes = [lane for lane, *_ in rows]
    return list(dict.fromkeys(lanes))


def _span(rows: Iterable[TimelineRow]) -> float:
    """The time from the first start to the last stop; 1 where that is 0, to divide by it."""
    first = math.inf
    last = -math.inf
    for _, _, start, stop in rows:
        first = min(first, start)
        last = max(last, stop)
    return (last - first) or 1.0


def _kind(label: str) -> str:
    """The label without the number at its end; a label that is a number stays."""
    return re.sub(r"\s*\d+$", "", label) or label


def _shortest_of_each_kind(rows: Iterable[TimelineRow]) -> dict[str, float]:
    """{kind: the length of its shortest bar}, in the order of first occurrence."""
    shortest: dict[str, float] = {}
    for _, label, start, stop in rows:
        kind = _kind(label)
        length = stop - start
        shortest[kind] = min(length, shortest.get(kind, length))
    return shortest


def _fitting(label: str, room: float, span: float) -> str:
    """The label, or its number alone, or nothing: what fits in a bar of length `room`.

    Args:
        label: Label of the bar.
        room: Length of the bar, in units of the axis.
        span: Length of the whole axis, in the same units.
    """
    number = re.search(r"\d+$", label)
    for text in (label, number[0] if number else ""):
        inches = len(text) * 0.075 + 0.03  # about, in 8 points
        if inches * span / AXIS_IN < room:
            return text
    return ""
