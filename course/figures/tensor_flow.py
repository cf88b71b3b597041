"""Drawings of tensor parallelism: the way of a tensor through an MLP on two ranks, and the cuts.

Lesson 09 uses them; `plot.tensor_parallel_mlp`, `plot.column_then_row` and `plot.layouts` are the
way in.
"""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from course.figures.style import (
    INK,
    PALE,
    PALETTE,
    RULE,
    Picture,
    Point,
    blank,
    canvas,
    figure,
    ink_on,
    put_text,
)

WHOLE = "#DDDDDD"  # the same on every rank
FORWARD = INK
BACKWARD = PALETTE[5]


# ---- X -> f -> A -> gelu -> B -> g -> Y


@figure
def tensor_parallel_mlp(*, alt: str, title: str = "") -> Picture:
    """The way of X through an MLP on two ranks, forward and backward.

    What is whole on every rank is grey, what a rank has of its own is in the rank's colour. Forward
    goes to the right above, backward to the left below.
    """
    picture = canvas(6.6, 3.5, alt=alt)
    axes = picture.axes[0]
    places = {"X": 0.6, "f": 2.0, "A": 3.7, "gelu": 5.3, "B": 6.9, "g": 8.6, "Y": 10.0}
    for rank, y in enumerate((1.5, -1.5)):
        colour = PALETTE[rank]
        put_text(axes, -0.75, y, f"rank {rank}", 10)
        _box(axes, (places["X"], y), "X", WHOLE)
        _box(axes, (places["A"], y), f"A{rank}", colour, "columns")
        _box(axes, (places["gelu"], y), "gelu", "#FFFFFF")
        _box(axes, (places["B"], y), f"B{rank}", colour, "rows")
        _box(axes, (places["Y"], y), "Y", WHOLE)
        for start, stop in (
            ("X", "f"),
            ("f", "A"),
            ("A", "gelu"),
            ("gelu", "B"),
            ("B", "g"),
            ("g", "Y"),
        ):
            _there_and_back(axes, places[start], places[stop], y)
    _operator(axes, places["f"], "f", "copy", "sum over ranks")
    _operator(axes, places["g"], "g", "sum over ranks", "copy")
    put_text(axes, 5.3, 0.28, "forward  →", 9.5, color=FORWARD)
    put_text(axes, 5.3, -0.28, "←  backward", 9.5, color=BACKWARD)
    axes.set_xlim(-1.4, 10.7)
    axes.set_ylim(-3.5, 3.5)
    blank(axes)
    if title:
        axes.set_title(title, loc="left")
    return picture


def _box(axes: Axes, middle: Point, text: str, colour: str, note: str = "") -> None:
    """A tensor or an operation; a note stands under it."""
    x, y = middle
    patch = FancyBboxPatch((x - 0.45, y - 0.42), 0.9, 0.84)
    patch.set_boxstyle("round,pad=0,rounding_size=0.1")
    patch.set(facecolor=colour, edgecolor=INK, linewidth=1.0)
    axes.add_patch(patch)
    put_text(axes, x, y, text, 10.5, color=ink_on(colour))
    if note:
        put_text(axes, x, y - 0.68, note, 8)


def _operator(axes: Axes, x: float, name: str, forward: str, backward: str) -> None:
    """f or g: a bar over both ranks; what it does is written above and below."""
    patch = FancyBboxPatch((x - 0.38, -2.1), 0.76, 4.2)
    patch.set_boxstyle("round,pad=0,rounding_size=0.1")
    patch.set(facecolor=PALE, edgecolor=INK, linewidth=1.4)
    axes.add_patch(patch)
    put_text(axes, x, 0, name, 15, style="italic", weight="bold")
    put_text(axes, x, 2.75, f"forward:\n{forward}", 8.5, color=FORWARD, linespacing=1.3)
    put_text(axes, x, -2.75, f"backward:\n{backward}", 8.5, color=BACKWARD, linespacing=1.3)


def _there_and_back(axes: Axes, start: float, stop: float, y: float) -> None:
    """A full arrow to the right, and a dashed one back below it."""
    tail = start + 0.47
    tip = stop - 0.47
    there = {"arrowstyle": "-|>", "lw": 1.4, "color": FORWARD, "shrinkA": 0, "shrinkB": 0}
    back = {**there, "color": BACKWARD, "linestyle": "--"}
    axes.annotate("", (tip, y + 0.16), (tail, y + 0.16), arrowprops=there)
    axes.annotate("", (tail, y - 0.16), (tip, y - 0.16), arrowprops=back)


# ---- columns of A, rows of B


class _Matrix(NamedTuple):
    """A matrix to draw: where, how large, and how it is cut."""

    left: float
    width: float
    height: float
    cut: str  # "columns", "rows" or "" for whole
    name: str
    shape: str


@figure
def column_then_row(*, alt: str, title: str = "") -> Picture:
    """The two products of an MLP as matrices: A cut into columns, B into rows, on two ranks.

    T tokens, H features of a token, F features inside of the MLP.
    """
    picture = canvas(6.6, 2.5, alt=alt)
    axes = picture.axes[0]
    matrices = (
        _Matrix(0.0, 1.0, 1.4, "", "X", "[T, H]"),
        _Matrix(1.7, 3.0, 1.0, "columns", "A", "[H, F]"),
        _Matrix(5.5, 3.0, 1.4, "columns", "gelu(X A)", "[T, F]"),
        _Matrix(9.2, 1.0, 3.0, "rows", "B", "[F, H]"),
        _Matrix(11.1, 1.0, 1.4, "sum", "Y", "[T, H]"),
    )
    for matrix in matrices:
        _draw_matrix(axes, matrix)
    for x, sign in ((1.35, "·"), (5.1, "→"), (8.85, "·"), (10.65, "=")):
        put_text(axes, x, 0, sign, 14)
    legend = "T: tokens    H: features of a token    F: features inside the MLP"
    put_text(axes, -0.1, -2.5, legend, 8.5, ha="left")
    axes.set_xlim(-0.2, 13.75)
    axes.set_ylim(-2.8, 1.75)
    blank(axes)
    if title:
        axes.set_title(title, loc="left")
    return picture


def _draw_matrix(axes: Axes, matrix: _Matrix) -> None:
    bottom = -matrix.height / 2
    middle = matrix.left + matrix.width / 2
    if matrix.cut == "columns":
        for rank in (0, 1):
            left = matrix.left + rank * matrix.width / 2
            _part(axes, left, bottom, matrix.width / 2, matrix.height, rank)
    elif matrix.cut == "rows":
        for rank in (0, 1):
            top = matrix.height / 2 - rank * matrix.height / 2
            _part(axes, matrix.left, top - matrix.height / 2, matrix.width, matrix.height / 2, rank)
    elif matrix.cut == "sum":
        _part(axes, matrix.left, bottom, matrix.width, matrix.height, 0)
        put_text(axes, matrix.left + matrix.width + 0.22, 0, "+", 12)
        _part(axes, matrix.left + matrix.width + 0.45, bottom, matrix.width, matrix.height, 1)
    else:
        _part(axes, matrix.left, bottom, matrix.width, matrix.height, None)
    if matrix.cut == "sum":
        middle += 0.72
    put_text(
        axes, middle, bottom - 0.12, f"{matrix.name}\n{matrix.shape}", 9, va="top", linespacing=1.3
    )


def _part(
    axes: Axes,
    left: float,
    bottom: float,
    width: float,
    height: float,
    rank: int | None,
) -> None:
    """A rectangle of one rank, with its name; grey and "all" if it is whole."""
    colour = WHOLE if rank is None else PALETTE[rank]
    patch = Rectangle((left, bottom), width, height)
    patch.set(facecolor=colour, edgecolor="white", linewidth=1.2)
    axes.add_patch(patch)
    text = "all" if rank is None else f"rank {rank}"
    put_text(axes, left + width / 2, bottom + height / 2, text, 9, color=ink_on(colour))


# ---- the layouts of a DTensor

NUMBERS = ((1, 2), (3, 4))
LAYOUTS = {  # what each of two ranks holds of NUMBERS; None is nothing
    "Replicate()": (((1, 2), (3, 4)), ((1, 2), (3, 4))),
    "Shard(0)": (((1, 2), (None, None)), ((None, None), (3, 4))),
    "Shard(1)": (((1, None), (3, None)), ((None, 2), (None, 4))),
    "Partial()": (((1, 0), (2, 5)), ((0, 2), (1, -1))),
}
NOTES = {
    "Replicate()": "all of it",
    "Shard(0)": "its rows",
    "Shard(1)": "its columns",
    "Partial()": "one summand",
}


@figure
def layouts(*, alt: str, title: str = "") -> Picture:
    """What two ranks hold of one small tensor in each layout of a DTensor."""
    picture = canvas(6.6, 2.35, alt=alt)
    axes = picture.axes[0]
    left = 0.0
    _draw_numbers(axes, (left, 0.0), NUMBERS, WHOLE)
    put_text(axes, left + 1.0, 1.45, "the tensor", 9.5)
    left += 4.4
    for name, of_ranks in LAYOUTS.items():
        put_text(axes, left + 1.0, 2.55, name, 9.5, family="monospace")
        for rank, held in enumerate(of_ranks):
            y = 1.2 - 2.5 * rank
            _draw_numbers(axes, (left, y), held, PALETTE[rank])
        put_text(axes, left + 1.0, -2.75, NOTES[name], 8.5)
        left += 3.3
    for rank in (0, 1):
        put_text(axes, 4.2, 1.2 - 2.5 * rank, f"rank {rank}", 9, ha="right")
    axes.set_xlim(-0.3, left - 0.5)
    axes.set_ylim(-3.1, 2.9)
    blank(axes)
    if title:
        axes.set_title(title, loc="left")
    return picture


def _draw_numbers(
    axes: Axes, middle: Point, rows: Sequence[Sequence[int | None]], colour: str
) -> None:
    """Two rows of two numbers; a place without a number is empty and dotted."""
    left, y = middle
    for row, numbers in enumerate(rows):
        for column, number in enumerate(numbers):
            corner = (left + column, y - row)
            cell = Rectangle(corner, 1, 1)
            if number is None:
                cell.set(fill=False, edgecolor=RULE, linestyle=":", linewidth=0.9)
            else:
                cell.set(facecolor=colour, edgecolor="white", linewidth=1.0)
                x = left + column + 0.5
                put_text(axes, x, y - row + 0.5, str(number), 9.5, color=ink_on(colour))
            axes.add_patch(cell)
