"""Drawings of failures and checkpoints: runs over time, a save step by step, boxes of two grids.

Lesson 17 uses them; `plot.runs`, `plot.save_steps` and `plot.boxes` are the ways in.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from course.figures.style import (
    INK,
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

BLUE = PALETTE[0]
WHITE = "#FFFFFF"
Corner = tuple[Sequence[int], Sequence[int]]  # offsets and sizes of a box
LOOKS = {  # what a run does: its name in the legend, colour, hatching
    "work": ("work that counts", PALETTE[4], ""),
    "save": ("saving", INK, ""),
    "lost": ("work that is lost", PALETTE[1], "////"),
    "restart": ("restart", "#BBBBBB", ""),
}


@figure
def runs(
    stories: Mapping[str, Sequence[tuple[str, float, float]]],
    *,
    alt: str,
    unit_s: float = 3600.0,
    xlabel: str = "hours",
    title: str = "",
) -> Picture:
    """Runs with failures, one lane each: work that counts, saving, lost work, restarts.

    Args:
        stories: `{"label": events}`, each event (what, start, end) in seconds, as those of
            `perf.failures.Story`.
        alt: What the figure shows.
        unit_s: Seconds in one unit of the axis.
        xlabel: The time and its unit.
        title: Above the figure.
    """
    picture = canvas(6.6, 1.15 + 0.5 * len(stories), alt=alt)
    axes = picture.axes[0]
    for lane, events in enumerate(stories.values()):
        for what, (_, colour, hatch) in LOOKS.items():
            spans = []
            for kind, start_s, end_s in events:
                if kind == what:
                    spans.append((start_s / unit_s, (end_s - start_s) / unit_s))
            style = {"facecolor": colour, "edgecolor": INK, "linewidth": 0, "hatch": hatch}
            axes.broken_barh(spans, (lane - 0.36, 0.72), **style)
    axes.set_yticks(range(len(stories)), list(stories))
    axes.set_ylim(len(stories) - 0.45, -0.55)  # the first lane on top
    axes.set_xlim(left=0)
    axes.set_xlabel(xlabel)
    axes.grid(False, axis="y")
    signs = []
    for _, colour, hatch in LOOKS.values():
        signs.append(Rectangle((0, 0), 1, 1, fc=colour, ec=INK, lw=0, hatch=hatch))
    names = [name for name, _, _ in LOOKS.values()]
    picture.figure.legend(signs, names, loc="outside lower center", ncols=4)
    if title:
        axes.set_title(title, loc="left")
    return picture


@figure
def save_steps(moments: Mapping[str, Mapping[str, str]], *, alt: str, title: str = "") -> Picture:
    """What lies in a folder of checkpoints at each moment of a save, from left to right.

    Args:
        moments: `{"what is done": {"folder": "whole" or "partial"}}`. A whole checkpoint is filled,
            one that must not be read is dashed.
        alt: What the figure shows.
        title: Above the figure.

    Raises:
        ValueError: A folder is neither whole nor partial.
    """
    picture = canvas(1.85 * len(moments), 2.1, alt=alt, columns=len(moments))
    most = max(len(folders) for folders in moments.values())
    for axes, (name, folders) in zip(picture.axes, moments.items()):
        for place, (folder, state) in enumerate(folders.items()):
            if state not in ("whole", "partial"):
                raise ValueError(f"{folder}: {state!r} is neither 'whole' nor 'partial'")
            _folder(axes, place, folder, is_whole=state == "whole")
        axes.set_xlim(-0.05, 2.05)
        axes.set_ylim(-most + 0.9, 1.45)
        put_text(axes, 0, 1.2, name, 9, ha="left", linespacing=1.25)
        axes.set_axis_off()
    put_headline(picture, title)
    return picture


def _folder(axes: Axes, place: int, name: str, is_whole: bool) -> None:
    colour = BLUE if is_whole else WHITE
    frame = Rectangle((0, -place), 2.0, 0.72, facecolor=colour, edgecolor=INK, linewidth=1.2)
    if not is_whole:
        frame.set_linestyle("--")
    axes.add_patch(frame)
    put_text(axes, 1.0, -place + 0.36, name, 8.5, color=ink_on(colour))


@figure
def boxes(
    written: Sequence[Corner],
    wanted: Corner,
    *,
    alt: str,
    title: str = "",
) -> Picture:
    """A matrix as the ranks of one grid have written it, and the box that a rank of another needs.

    At the left the whole, at the right the box of the reader with what it takes from each writer.

    Args:
        written: (offsets, sizes) of each writer's box, by rank; they cover a matrix.
        wanted: (offsets, sizes) of the reader's box.
        alt: What the figure shows.
        title: Above the figure.
    """
    height = max(offsets[0] + sizes[0] for offsets, sizes in written)
    width = max(offsets[1] + sizes[1] for offsets, sizes in written)
    picture = canvas(6.6, 0.9 + 2.9 * height / width, alt=alt, columns=2, width_ratios=[3, 2])
    left, right = picture.axes
    (top, first), (tall, wide) = wanted
    for rank, (offsets, sizes) in enumerate(written):
        colour = colour_of(rank)
        # the name stands in the corner that is farther from the reader's box
        is_left = offsets[1] + sizes[1] / 2 < first + wide / 2
        _block(left, offsets, sizes, colour, f"rank {rank}", corner="left" if is_left else "right")
        begin = [max(offsets[0], top), max(offsets[1], first)]
        end = [min(offsets[0] + sizes[0], top + tall), min(offsets[1] + sizes[1], first + wide)]
        common = [end[0] - begin[0], end[1] - begin[1]]
        if min(common) > 0:
            place = [begin[0] - top, begin[1] - first]
            _block(right, place, common, colour, f"{rank}")
    for axes, corner in ((left, (first, -top - tall)), (right, (0, -tall))):
        for colour, line in ((WHITE, 5.0), (INK, 2.6)):
            frame = Rectangle(corner, wide, tall, fill=False, edgecolor=colour, linewidth=line)
            axes.add_patch(frame)
    for axes, name in (
        (left, "what each rank has written"),
        (right, "the reader's box, by writer"),
    ):
        axes.set_xlim(-0.15, width + 0.15)
        axes.set_ylim(-height - 0.15, 0.15)
        axes.set_title(name, loc="left", fontsize=10)
        blank(axes)
    for row in range(height):
        put_text(left, -0.3, -row - 0.5, f"{row}", 8, ha="right")
    for column in range(width):
        put_text(left, column + 0.5, -height - 0.35, f"{column}", 8)
    left.set_xlim(-0.8, width + 0.15)
    left.set_ylim(-height - 0.7, 0.15)
    right.set_xlim(-0.15, max(wide, 0.62 * width) + 0.15)
    put_headline(picture, title)
    return picture


def _block(
    axes: Axes,
    offsets: Sequence[int],
    sizes: Sequence[int],
    colour: str,
    name: str,
    corner: Literal["", "left", "right"] = "",
) -> None:
    """A block with its elements; rows go down, columns to the right.

    Args:
        axes: Axes to draw in.
        offsets: Row and column of its begin.
        sizes: Rows and columns.
        colour: Colour of the block.
        name: Written in its middle.
        corner: Written in this upper corner instead.
    """
    row, column = offsets
    rows, columns = sizes
    patch = Rectangle((column, -row - rows), columns, rows, facecolor=colour, edgecolor=WHITE)
    patch.set_linewidth(1.5)
    axes.add_patch(patch)
    for line in range(1, columns):
        axes.plot([column + line] * 2, [-row - rows, -row], color=PALE, lw=0.4, alpha=0.6)
    for line in range(1, rows):
        axes.plot([column, column + columns], [-row - line] * 2, color=PALE, lw=0.4, alpha=0.6)
    if corner == "left":
        put_text(axes, column + 0.14, -row - 0.5, name, 8.5, color=ink_on(colour), ha="left")
    elif corner == "right":
        place = (column + columns - 0.14, -row - 0.5)
        put_text(axes, *place, name, 8.5, color=ink_on(colour), ha="right")
    else:
        place = (column + columns / 2, -row - rows / 2)
        put_text(axes, *place, name, 10, color=ink_on(colour))
