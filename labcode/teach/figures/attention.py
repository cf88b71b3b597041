"""A drawing of causal attention over ranks: who computes which part of the square of queries and keys, and in which step."""

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.patches import Polygon, Rectangle

from labcode.parallel.attention_block import own_chunks
from labcode.teach.figures.style import (
    INK,
    PALE,
    RULE,
    STYLE,
    Picture,
    blank,
    canvas,
    colour_of,
    described,
    ink_on,
)

MAX_RANKS = 6


def tiles(p: int, layout: str) -> dict[tuple[int, int], tuple[int, int]]:
    """{(query chunk, key chunk): (rank that computes it, step of the ring)} of 2p chunks, those the causal mask leaves.

    A rank computes its own queries; the keys of rank s reach rank r in step (r - s) mod p.
    """
    owner = {
        chunk: rank
        for rank in range(p)
        for run in own_chunks(2 * p, p, rank, layout)
        for chunk in run
    }
    return {
        (q, k): (owner[q], (owner[q] - owner[k]) % p) for q in range(2 * p) for k in range(q + 1)
    }


def causal(p: int, layouts: Sequence[str] = ("contiguous", "zigzag"), *, alt: str) -> Picture:
    """The mask in 2p x 2p tiles, rows are queries and columns keys, coloured by rank; the number is the step of the ring.

    Args:
        p: Number of ranks that share the sequence, 2 to 6.
        layouts: Which chunks a rank holds, one panel for each ("contiguous", "zigzag").
        alt: What the figure shows.

    Raises:
        ValueError: A number of ranks that does not fit, or an unknown layout.
    """
    if not 2 <= p <= MAX_RANKS:
        raise ValueError(f"p={p}: draw the mask of 2 to {MAX_RANKS} ranks")
    figure, all_axes = canvas(6.6, 6.6 / len(layouts) + 0.35, len(layouts))
    with mpl.rc_context(STYLE):
        for axes, layout in zip(all_axes, layouts):
            _panel(axes, p, layout)
        signs = [Rectangle((0, 0), 1, 1, facecolor=colour_of(rank), lw=0) for rank in range(p)]
        names = [f"rank {rank}" for rank in range(p)]
        figure.legend(
            signs, names, loc="outside lower center", ncols=p, handlelength=1.2, handleheight=1.2
        )
    return Picture(figure, described(alt))


def _panel(axes, p, layout):
    n = 2 * p
    axes.add_patch(Rectangle((0, -n), n, n, facecolor=PALE, edgecolor="none"))
    for (q, k), (rank, step) in tiles(p, layout).items():
        colour = colour_of(rank)
        corner, style = (
            (k, -q - 1),
            {
                "facecolor": colour,
                "edgecolor": "white",
                "lw": 0.8,
                "gid": f"rank {rank} step {step}",
            },
        )
        if q == k:  # of its own chunk a query sees the earlier half
            axes.add_patch(Polygon([(k, -q), (k, -q - 1), (k + 1, -q - 1)], closed=True, **style))
        else:
            axes.add_patch(Rectangle(corner, 1, 1, **style))
        x, y = (k + 0.3, -q - 0.7) if q == k else (k + 0.5, -q - 0.5)
        axes.text(
            x,
            y,
            str(step),
            ha="center",
            va="center",
            fontsize=9 - 0.3 * n * (q == k),
            color=ink_on(colour),
        )
    axes.add_patch(Rectangle((0, -n), n, n, fill=False, edgecolor=RULE, lw=0.8))
    for q in range(n):  # the rank of each row in words too: nothing depends on colour alone
        axes.text(
            n + 0.2,
            -q - 0.5,
            str(tiles(p, layout)[q, q][0]),
            ha="left",
            va="center",
            fontsize=8,
            color=INK,
        )
    axes.text(n + 0.3, 0.25, "rank", ha="center", va="bottom", fontsize=8, color=INK)
    axes.text(n / 2, 0.25, "keys", ha="center", va="bottom", fontsize=9, color=INK)
    axes.text(-0.25, -n / 2, "queries", ha="right", va="center", rotation=90, fontsize=9, color=INK)
    axes.set(xlim=(-1.0, n + 0.9), ylim=(-n - 0.1, 0.9))
    blank(axes)
    axes.set_title(layout, loc="left", fontsize=10)
