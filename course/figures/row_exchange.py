"""Drawing of expert parallelism: the way of rows to the ranks that keep their experts.

Lesson 24 uses it; `plot.row_exchange` is the way in.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from course.figures.style import (
    INK,
    PALETTE,
    RULE,
    Picture,
    blank,
    canvas,
    figure,
    ink_on,
    put_text,
)

WIDTH = 1.3  # of a row
HEIGHT = 0.74
COLUMN = 3.5  # from one stage to the next
BETWEEN = 7.0  # from rank 0 down to rank 1
STAGES = (
    "rows as the\ntokens stand",
    "1. sorted\nby expert",
    "2. after the\nall-to-all",
    "3. sorted by\nexpert again",
)


class Row(NamedTuple):
    """One token on its way to one of its experts."""

    token: str
    expert: int
    source: int  # the rank whose token it is


def stages(
    choices: Sequence[Mapping[str, Sequence[int]]], experts_per_rank: int
) -> list[list[list[Row]]]:
    """Which rows lie on each rank in each stage, in their order: [stage][rank][row].

    Args:
        choices: {token: its experts} of each rank.
        experts_per_rank: Rank r keeps the experts from r times this number on.
    """
    as_they_stand: list[list[Row]] = []
    for rank, of_rank in enumerate(choices):
        rows = []
        for token, experts in of_rank.items():
            rows.extend(Row(token, expert, rank) for expert in experts)
        as_they_stand.append(rows)
    by_expert = [_sorted_by_expert(rows) for rows in as_they_stand]
    arrived: list[list[Row]] = []
    for rank in range(len(choices)):
        rows = []
        for sent in by_expert:
            rows.extend(row for row in sent if row.expert // experts_per_rank == rank)
        arrived.append(rows)
    return [as_they_stand, by_expert, arrived, [_sorted_by_expert(rows) for rows in arrived]]


def _sorted_by_expert(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=_expert)


def _expert(row: Row) -> int:
    return row.expert


@figure
def row_exchange(
    choices: Sequence[Mapping[str, Sequence[int]]],
    *,
    experts_per_rank: int,
    alt: str,
    title: str = "",
) -> Picture:
    """The rows of each rank in four stages, from the tokens to the experts, with their ways.

    A row is written as its token and its expert, "b 3", and has the colour of its token's rank.

    Args:
        choices: {token: its experts} of each rank; two ranks.
        experts_per_rank: How many experts a rank keeps.
    """
    picture = canvas(6.8, 5.6, alt=alt)
    axes = picture.axes[0]
    all_stages = stages(choices, experts_per_rank)
    for number, heading in enumerate(STAGES):
        put_text(axes, number * COLUMN + WIDTH / 2, 1.0, heading, 9, linespacing=1.25)
    for rank in range(len(choices)):
        put_text(axes, -0.35, _top(rank, 0) - HEIGHT / 2, f"rank {rank}", 9.5, ha="right")
    for number in range(1, len(STAGES)):
        _ways(axes, all_stages, number)
    for number, of_ranks in enumerate(all_stages):
        for rank, rows in enumerate(of_ranks):
            for place, row in enumerate(rows):
                _draw_row(axes, number * COLUMN, _top(rank, place), row)
    for rank, rows in enumerate(all_stages[-1]):
        _name_experts(axes, rank, rows)
    back = "←  the way back: the same three steps from right to left, then each token's sum"
    middle = (3 * COLUMN + WIDTH) / 2
    put_text(axes, middle, _top(1, 7) - 0.75, back, 9)
    axes.set_xlim(-2.2, 3 * COLUMN + WIDTH + 2.4)
    axes.set_ylim(_top(1, 7) - 1.2, 1.9)
    blank(axes)
    if title:
        axes.set_title(title, loc="left")
    return picture


def _top(rank: int, place: int) -> float:
    return -rank * BETWEEN - place * (HEIGHT + 0.16)


def _draw_row(axes: Axes, left: float, top: float, row: Row) -> None:
    colour = PALETTE[row.source]
    patch = FancyBboxPatch((left, top - HEIGHT), WIDTH, HEIGHT)
    patch.set_boxstyle("round,pad=0,rounding_size=0.08")
    patch.set(facecolor=colour, edgecolor=INK, linewidth=0.8)
    axes.add_patch(patch)
    text = f"{row.token} {row.expert}"
    put_text(axes, left + WIDTH / 2, top - HEIGHT / 2, text, 9, color=ink_on(colour))


def _ways(axes: Axes, all_stages: list[list[list[Row]]], number: int) -> None:
    """A line from each row's place in the stage before to its place in this one."""
    begins = _places(all_stages[number - 1])
    ends = _places(all_stages[number])
    for row, (rank, place) in begins.items():
        other_rank, other_place = ends[row]
        axes.plot(
            [(number - 1) * COLUMN + WIDTH, number * COLUMN],
            [_top(rank, place) - HEIGHT / 2, _top(other_rank, other_place) - HEIGHT / 2],
            color=PALETTE[row.source],
            linewidth=1.1 if rank == other_rank else 2.2,
            linestyle="-" if row.source == 0 else "--",
        )


def _places(of_ranks: list[list[Row]]) -> dict[Row, tuple[int, int]]:
    """{row: (its rank, its place there)}."""
    found = {}
    for rank, rows in enumerate(of_ranks):
        for place, row in enumerate(rows):
            found[row] = rank, place
    return found


def _name_experts(axes: Axes, rank: int, rows: list[Row]) -> None:
    """A bracket beside the rows of each expert, with its number."""
    x = 3 * COLUMN + WIDTH + 0.2
    for expert in sorted({row.expert for row in rows}):
        places = [place for place, row in enumerate(rows) if row.expert == expert]
        top = _top(rank, places[0]) - 0.04
        bottom = _top(rank, places[-1]) - HEIGHT + 0.04
        axes.plot([x, x + 0.15, x + 0.15, x], [top, top, bottom, bottom], color=RULE, lw=1.3)
        put_text(axes, x + 0.35, (top + bottom) / 2, f"expert {expert}", 9, ha="left")
