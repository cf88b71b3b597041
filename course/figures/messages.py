"""Drawings of single messages between ranks, round by round."""

from collections.abc import Sequence

from matplotlib.axes import Axes

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

Message = tuple[int, int]  # sender, receiver

COLUMN = 2.0  # from one round to the next
HOLDS = PALETTE[4]


@figure
def rounds(messages: Sequence[Sequence[Message]], n: int, *, title: str = "", alt: str) -> Picture:
    """Who sends to whom in each round, and who has the tensor after it.

    Time runs to the right. A filled circle is a rank that has the tensor.

    Args:
        messages: For each round its (sender, receiver) pairs. Only who has the tensor sends.
        n: Number of ranks.
        title: What the figure shows, in a few words.
        alt: The same for a reader who cannot see it.

    Raises:
        ValueError: A rank sends what it does not have.
    """
    num_columns = len(messages) + 1
    picture = canvas(1.1 + 1.25 * num_columns, 0.8 + 0.36 * n, alt=alt)
    axes = picture.axes[0]
    holders = {messages[0][0][0]}
    for column in range(num_columns):
        x = COLUMN * column
        heading = "before" if column == 0 else f"after round {column}"
        put_text(axes, x, 0.75, heading, 9)
        for rank in range(n):
            _draw_rank(axes, x, rank, rank in holders)
        if column == num_columns - 1:
            break
        for sender, receiver in messages[column]:
            if sender not in holders:
                raise ValueError(
                    f"rank {sender} sends in round {column + 1} before it has the tensor"
                )
            _draw_message(axes, x, sender, receiver)
        holders |= {receiver for _, receiver in messages[column]}
    for rank in range(n):
        put_text(axes, -0.6, -rank, f"rank {rank}", 9, ha="right")
    axes.set_xlim(-2.0, COLUMN * (num_columns - 1) + 0.8)
    axes.set_ylim(-n + 0.4, 1.15)
    if title:
        axes.set_title(title)
    blank(axes)
    axes.set_aspect("auto")
    return picture


def _draw_rank(axes: Axes, x: float, rank: int, holds: bool) -> None:
    colour = HOLDS if holds else "#FFFFFF"
    axes.plot(
        [x],
        [-rank],
        marker="o",
        markersize=15,
        markerfacecolor=colour,
        markeredgecolor=INK if holds else RULE,
        gid="has it" if holds else "waits",
    )
    put_text(axes, x, -rank, str(rank), 8, color=ink_on(colour))


def _draw_message(axes: Axes, x: float, sender: int, receiver: int) -> None:
    arrow = {"arrowstyle": "-|>", "lw": 1.4, "color": INK, "shrinkA": 8, "shrinkB": 8}
    axes.annotate("", (x + COLUMN, -receiver), (x, -sender), arrowprops=arrow)
