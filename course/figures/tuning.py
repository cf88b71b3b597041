"""Drawings of fine-tuning: documents in one packed row, and an adapter beside a weight.

Lesson 25 uses them; `plot.packed_row` and `plot.adapters` are the way in.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

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

# ---- a packed row


class _Place(NamedTuple):
    """A place of the row: its token, what it is to predict, its position and its document."""

    token: str
    target: str
    position: int
    document: int


def places(documents: Sequence[tuple[str, str]]) -> list[_Place]:
    """What stands at each place of a row of documents.

    Args:
        documents: (prompt, answer), a letter for each token.
    """
    found = []
    for number, (prompt, answer) in enumerate(documents):
        whole = prompt + answer
        for position in range(len(whole) - 1):
            counts = position + 1 >= len(prompt)
            target = whole[position + 1] if counts else ""
            found.append(_Place(whole[position], target, position, number))
    return found


@figure
def packed_row(documents: Sequence[tuple[str, str]], *, alt: str, title: str = "") -> Picture:
    """Documents in one row, with their targets and positions, and who sees whom.

    Args:
        documents: (prompt, answer), a letter for each token.
        alt: What the figure shows.
        title: Above it.
    """
    row = places(documents)
    picture = canvas(7.2, 3.5, alt=alt, columns=2)
    left, right = picture.axes
    for y, name in ((3, "token"), (2, "target"), (1, "position")):
        put_text(left, -0.75, y, name, 9, ha="right")
    for x, place in enumerate(row):
        colour = PALETTE[place.document % len(PALETTE)]
        _square(left, x, 3, place.token, colour)
        _square(left, x, 2, place.target or "-100", PALE, size=9 if place.target else 6.5)
        _square(left, x, 1, str(place.position), PALE)
    left.set_xlim(-3.0, len(row) - 0.4)
    left.set_ylim(-1.5, 5.5)
    left.set_aspect("equal")
    blank(left)
    for y, query in enumerate(row):
        for x, key in enumerate(row):
            sees = key.document == query.document and x <= y
            colour = PALETTE[query.document % len(PALETTE)] if sees else "#FFFFFF"
            box = Rectangle((x - 0.5, -y - 0.5), 1, 1, facecolor=colour, edgecolor=RULE, lw=0.5)
            right.add_patch(box)
    for at, place in enumerate(row):
        put_text(right, at, 0.95, place.token, 9)
        put_text(right, -0.95, -at, place.token, 9)
    put_text(right, len(row) / 2 - 0.5, 2.0, "is seen", 9)
    put_text(right, -2.0, -len(row) / 2 + 0.5, "sees", 9, rotation=90)
    right.set_xlim(-2.6, len(row))
    right.set_ylim(-len(row), 2.6)
    right.set_aspect("equal")
    blank(right)
    put_headline(picture, title)
    return picture


def _square(axes: Axes, x: float, y: float, text: str, colour: str, size: float = 9) -> None:
    box = Rectangle((x - 0.46, y - 0.42), 0.92, 0.84, facecolor=colour, edgecolor=INK, lw=0.8)
    axes.add_patch(box)
    put_text(axes, x, y, text, size, color=ink_on(colour))


# ---- adapters

WIDE = 2.6  # of W
THIN = 0.55  # the rank of the adapter
B_AT = (3.75, 0.0)  # the lower left corner
A_AT = (4.8, 2.05)  # behind B, as in the product B A


@figure
def adapters(
    panels: Mapping[str, Mapping[str, str]], num_ranks: int = 1, *, alt: str, title: str = ""
) -> Picture:
    """A weight W with A and B beside it, once or several times.

    Parts have the number and the colour of the rank that keeps them; what every rank keeps is grey.

    Args:
        panels: {heading: {"W" or "A" or "B": "rows" or "columns", along which it is cut}}.
        num_ranks: Into how many parts.
        alt: What the figure shows.
        title: Above it.
    """
    picture = canvas(3.7 * len(panels) + 0.4, 2.7, alt=alt, columns=len(panels))
    for axes, (heading, cuts) in zip(picture.axes, panels.items(), strict=True):
        _weight(axes, (0, 0), (WIDE, WIDE), cuts.get("W"), num_ranks)
        put_text(axes, WIDE / 2, -0.35, "W [out, in]", 9)
        _weight(axes, B_AT, (THIN, WIDE), cuts.get("B"), num_ranks)
        put_text(axes, B_AT[0] + THIN / 2, -0.35, "B [out, r]", 9)
        _weight(axes, A_AT, (WIDE, THIN), cuts.get("A"), num_ranks)
        put_text(axes, A_AT[0] + WIDE / 2, A_AT[1] - 0.35, "A [r, in]", 9)
        put_text(axes, (WIDE + B_AT[0]) / 2, WIDE / 2, "+", 13)
        axes.set_title(heading, loc="center", fontsize=10)
        axes.set_xlim(-0.2, A_AT[0] + WIDE + 0.3)
        axes.set_ylim(-0.7, WIDE + 0.2)
        axes.set_aspect("equal")
        blank(axes)
    put_headline(picture, title)
    return picture


def _weight(
    axes: Axes,
    at: tuple[float, float],
    size: tuple[float, float],
    cut: str | None,
    num_ranks: int,
) -> None:
    """A matrix, with its parts if it is cut along its rows or columns."""
    width, height = size
    if cut is None:
        axes.add_patch(Rectangle(at, width, height, facecolor=PALE, edgecolor=INK, lw=1.0))
        if num_ranks > 1:
            whole = ", ".join(map(str, range(num_ranks)))
            put_text(axes, at[0] + width / 2, at[1] + height / 2, whole, 9)
        return
    for rank in range(num_ranks):
        colour = PALETTE[rank % len(PALETTE)]
        if cut == "rows":
            part = height / num_ranks
            corner = (at[0], at[1] + height - (rank + 1) * part)
            piece = Rectangle(corner, width, part)
        else:
            part = width / num_ranks
            corner = (at[0] + rank * part, at[1])
            piece = Rectangle(corner, part, height)
        piece.set(facecolor=colour, edgecolor=INK, linewidth=1.0)
        axes.add_patch(piece)
        middle = (corner[0] + piece.get_width() / 2, corner[1] + piece.get_height() / 2)
        put_text(axes, *middle, str(rank), 9, color=ink_on(colour))
