"""Drawings of attention over ranks that share a sequence: the ring, forth and back, and Ulysses.

Lesson 11 uses them; `plot.ring_attention`, `plot.ring_gradients` and `plot.ulysses` are the way in.
"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from course.figures.style import (
    INK,
    PALE,
    RULE,
    Picture,
    blank,
    canvas,
    colour_of,
    figure,
    ink_on,
    put_headline,
    put_text,
)

MAX_RANKS = 5
BOX = 0.8  # height; ranks stand 1 apart


def source_at(rank: int, step: int, p: int) -> int:
    """Whose keys and values are on a rank in a step, when parts travel to the next rank."""
    return (rank - step) % p


def contributions(p: int) -> list[list[tuple[int, ...]]]:
    """Whose terms are in the travelling sum of dK and dV, in a causal ring of contiguous pieces.

    Returns:
        [step][rank] -> the ranks whose terms are in the sum that is there after the step's work;
        the last entry is after the last message, when each sum is at home.
    """
    sums: list[tuple[int, ...]] = [()] * p  # by source
    steps = []
    for step in range(p):
        for rank in range(p):
            source = source_at(rank, step, p)
            if source <= rank:
                sums[source] = (*sums[source], rank)
        steps.append([sums[source_at(rank, step, p)] for rank in range(p)])
    steps.append(list(sums))
    return steps


def _check_ranks(p: int) -> None:
    if not 2 <= p <= MAX_RANKS:
        raise ValueError(f"p={p}: draw a ring of 2 to {MAX_RANKS} ranks")


@figure
def ring_attention(p: int = 4, *, title: str = "", alt: str) -> Picture:
    """Who holds which keys and values in each step of the ring, and what it computes with them.

    One panel for a step, one row for a rank: its own queries, the part of K and V that is here, and
    what a causal mask of contiguous pieces leaves to do.

    Args:
        p: Number of ranks, 2 to 5.
        title: Above the figure.
        alt: What the figure shows.

    Raises:
        ValueError: A number of ranks that does not fit.
    """
    _check_ranks(p)
    widths = [4.25, *[3.25] * (p - 1)]
    picture = canvas(0.5 * sum(widths), 0.5 * p + 0.8, alt=alt, columns=p, width_ratios=widths)
    put_headline(picture, title)
    for step, axes in enumerate(picture.axes):
        for rank in range(p):
            source = source_at(rank, step, p)
            y = -rank
            if step == 0:
                put_text(axes, -0.15, y, f"rank {rank}", 9, ha="right", color=INK)
            _draw_box(axes, 0.0, y, 0.7, f"Q{rank}", rank)
            _draw_box(axes, 0.85, y, 1.25, f"K{source} V{source}", source)
            put_text(axes, 2.22, y, _work(rank, source), 8, ha="left", color=INK)
        if step + 1 < p:
            _draw_hops(axes, p, 1.47)
        axes.set_title(f"step {step}", loc="center", fontsize=10)
        axes.set_xlim(-1.1 if step == 0 else -0.1, 3.15)
        axes.set_ylim(-p + 0.1, 0.8)
        blank(axes)
    return picture


def _work(rank: int, source: int) -> str:
    if source == rank:
        return "half"
    return "all" if source < rank else "none"


def _draw_box(axes: Axes, x: float, y: float, width: float, text: str, rank: int) -> None:
    colour = colour_of(rank)
    corner = (x, y - BOX / 2)
    box = Rectangle(corner, width, BOX, facecolor=colour, edgecolor="none", gid=text)
    axes.add_patch(box)
    put_text(axes, x + width / 2, y, text, 9, color=ink_on(colour))


def _draw_hops(axes: Axes, p: int, x: float) -> None:
    """Small arrows from each rank to the next; what leaves the last one below enters above."""
    arrow: dict[str, Any] = {"arrowstyle": "-|>", "lw": 1.3, "color": INK}
    arrow |= {"shrinkA": 0, "shrinkB": 0}
    for rank in range(-1, p):
        tail = (x, -rank - 0.36)
        tip = (x, -rank - 0.66)
        axes.annotate("", tip, tail, arrowprops=arrow)


@figure
def ring_gradients(p: int = 4, *, title: str = "", alt: str) -> Picture:
    """The sums of dK and dV on their way round: whose terms are in each, after each step's work.

    One panel for a step and one for the end; one row for a rank. A stripe is a rank's term; it is
    hatched where the rank sees none of these keys.

    Args:
        p: Number of ranks, 2 to 5.
        title: Above the figure.
        alt: What the figure shows.

    Raises:
        ValueError: A number of ranks that does not fit.
    """
    _check_ranks(p)
    own_width = 0.85 + 0.4 * p
    widths = [own_width + 1.0, *[own_width] * p]
    picture = canvas(0.5 * sum(widths), 0.5 * p + 0.8, alt=alt, columns=p + 1, width_ratios=widths)
    put_headline(picture, title)
    for step, (axes, sums) in enumerate(zip(picture.axes, contributions(p))):
        for rank in range(p):
            source = source_at(rank, step, p)
            y = -rank
            if step == 0:
                put_text(axes, -0.15, y, f"rank {rank}", 9, ha="right", color=INK)
            put_text(axes, 0.3, y, f"d{source}", 9, color=INK)
            _draw_terms(axes, 0.65, y, p, source, sums[rank])
        if step < p:
            _draw_hops(axes, p, 0.65 + p * 0.2)
        title = f"step {step}" if step < p else "at home"
        axes.set_title(title, loc="center", fontsize=10)
        axes.set_xlim(-1.1 if step == 0 else -0.1, 0.75 + 0.4 * p)
        axes.set_ylim(-p + 0.1, 0.8)
        blank(axes)
    return picture


def _draw_terms(
    axes: Axes, x: float, y: float, p: int, source: int, ranks: tuple[int, ...]
) -> None:
    """A row of p places, of which those of `ranks` are filled, with the rank's number.

    Places of ranks before `source`, which do not see its keys, are hatched.
    """
    for rank in range(p):
        corner = (x + 0.4 * rank, y - 0.3)
        place = Rectangle(corner, 0.4, 0.6, fill=False, edgecolor=RULE, linewidth=0.6)
        axes.add_patch(place)
        if rank in ranks:
            colour = colour_of(rank)
            place.set(fill=True, facecolor=colour, gid=f"term {rank}")
            put_text(axes, x + 0.4 * rank + 0.2, y, str(rank), 8, color=ink_on(colour))
        elif rank < source:
            place.set(fill=True, facecolor=PALE, hatch="/////")


@figure
def ulysses(p: int = 4, *, title: str = "", alt: str) -> Picture:
    """What an all-to-all before and after attention does: from own tokens to own heads and back.

    Rows are parts of the sequence, columns heads; the colour and the number say which rank holds
    this part of this head.

    Args:
        p: Number of ranks and of heads, 2 to 5.
        title: Above the figure.
        alt: What the figure shows.

    Raises:
        ValueError: A number of ranks that does not fit.
    """
    _check_ranks(p)
    picture = canvas(6.4, 2.4, alt=alt, columns=3)
    put_headline(picture, title)
    titles = ("q, k, v: own tokens", "attention: own heads", "output: own tokens")
    for panel, (axes, title) in enumerate(zip(picture.axes, titles)):
        for token in range(p):
            for head in range(p):
                owner = head if panel == 1 else token
                colour = colour_of(owner)
                tile = Rectangle((head, -token - 1), 1, 1, facecolor=colour, edgecolor="white")
                tile.set_gid(f"panel {panel} rank {owner}")
                axes.add_patch(tile)
                put_text(axes, head + 0.5, -token - 0.5, str(owner), 9, color=ink_on(colour))
        put_text(axes, p / 2, 0.3, "heads", 8, color=INK)
        put_text(axes, -0.35, -p / 2, "tokens", 8, rotation=90, color=INK)
        if panel < 2:
            arrow = {"arrowstyle": "-|>", "lw": 1.8, "color": INK}
            axes.annotate("", (p + 1.25, -p / 2), (p + 0.25, -p / 2), arrowprops=arrow)
            put_text(axes, p + 0.75, -p / 2 + 0.45, "all-to-all", 7, color=INK)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlim(-0.7, p + 1.4)
        axes.set_ylim(-p - 0.1, 0.6)
        blank(axes)
    return picture
