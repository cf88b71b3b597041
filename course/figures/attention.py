"""A drawing of causal attention over ranks: who computes which part of the mask, in which step.

The mask is a square of queries (rows) and keys (columns). Lesson 11 uses it; `plot.causal` is the
way in.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle

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
    swatch,
)
from labcode.parallel.attention_block import own_chunks

MAX_RANKS = 6
NAMES = {"zigzag": "zig-zag"}  # of layouts, as one writes them in a sentence

Tile = tuple[int, int]  # query chunk, key chunk


def tiles(p: int, layout: str, documents: Sequence[int] = ()) -> dict[Tile, tuple[int, int]]:
    """Who computes which tile of the causal mask over 2p chunks, and in which step of the ring.

    A rank computes its own queries; the keys of rank s reach rank r in step (r - s) mod p.

    Args:
        p: Number of ranks that share the sequence.
        layout: Which chunks a rank holds, "contiguous" or "zigzag".
        documents: How many chunks each packed document has; a query sees its own document alone.
            None given: the sequence is one document.

    Returns:
        {(query chunk, key chunk): (rank, step)}; tiles that are masked completely are missing.

    Raises:
        ValueError: An unknown layout, or documents that do not fill the sequence.
    """
    owner = _owners(p, layout)
    first = _first_chunks(2 * p, documents)
    found = {}
    for query in range(2 * p):
        for key in range(first[query], query + 1):
            rank = owner[query]
            step = (rank - owner[key]) % p
            found[query, key] = (rank, step)
    return found


def _first_chunks(num_chunks: int, documents: Sequence[int]) -> list[int]:
    """For each chunk, the first one of its document."""
    lengths = documents or (num_chunks,)
    if sum(lengths) != num_chunks:
        raise ValueError(
            f"documents of {sum(lengths)} chunks in a sequence of {num_chunks}: they must fill it"
        )
    first = []
    for length in lengths:
        first += [len(first)] * length
    return first


def _owners(p: int, layout: str) -> dict[int, int]:
    """{chunk: the rank that holds it} of 2p chunks."""
    owner = {}
    for rank in range(p):
        for chunks in own_chunks(2 * p, p, rank, layout):
            for chunk in chunks:
                owner[chunk] = rank
    return owner


@figure
def causal(
    p: int,
    layouts: Sequence[str] = ("contiguous", "zigzag"),
    *,
    documents: Sequence[int] = (),
    title: str = "",
    alt: str,
) -> Picture:
    """The mask in 2p x 2p tiles, coloured by rank; the number in a tile is the step of the ring.

    Rows are chunks of queries, columns chunks of keys; at their ends stands the rank that holds
    them.

    Args:
        p: Number of ranks that share the sequence, 2 to 6.
        layouts: Which chunks a rank holds, one panel for each ("contiguous", "zigzag").
        documents: As for `tiles`.
        title: Above the figure.
        alt: What the figure shows.

    Raises:
        ValueError: A number of ranks that does not fit, an unknown layout, or documents that do not
            fill the sequence.
    """
    if not 2 <= p <= MAX_RANKS:
        raise ValueError(f"p={p}: draw the mask of 2 to {MAX_RANKS} ranks")
    width_in = 6.6 if len(layouts) > 1 else 3.8
    height_in = width_in / len(layouts) + 0.35
    if title:
        height_in += 0.3
    picture = canvas(width_in, height_in, alt=alt, columns=len(layouts))
    for axes, layout in zip(picture.axes, layouts):
        _draw_mask(axes, p, layout, documents)
        axes.set_title(NAMES.get(layout, layout), loc="left", fontsize=10)
    put_headline(picture, title)
    signs = []
    names = []
    for rank in range(p):
        signs.append(swatch(colour_of(rank)))
        names.append(f"rank {rank}")
    picture.figure.legend(
        signs,
        names,
        loc="outside lower center",
        ncols=p,
        handlelength=1.2,
        handleheight=1.2,
    )
    return picture


def _draw_mask(axes: Axes, p: int, layout: str, documents: Sequence[int]) -> None:
    """One panel of `causal`: x counts key chunks to the right, -y query chunks downwards."""
    n = 2 * p
    square = (0, -n)
    axes.add_patch(Rectangle(square, n, n, facecolor=PALE, edgecolor="none"))
    diagonal_size = 9 - 0.3 * n  # points
    for (query, key), (rank, step) in tiles(p, layout, documents).items():
        if query == key:
            _draw_diagonal_tile(axes, query, rank, step, diagonal_size)
        else:
            _draw_tile(axes, query, key, rank, step)
    axes.add_patch(Rectangle(square, n, n, fill=False, edgecolor=RULE, lw=0.8))
    for chunk, rank in _owners(p, layout).items():
        # The rank of each row in words too: nothing depends on colour alone. That of each column
        # tells with the row's in which step the keys are there.
        put_text(axes, n + 0.2, -chunk - 0.5, str(rank), 8, ha="left", color=INK)
        put_text(axes, chunk + 0.5, -n - 0.35, str(rank), 8, color=INK)
    put_text(axes, n + 0.3, 0.25, "rank", 8, va="bottom", color=INK)
    put_text(axes, -0.1, -n - 0.35, "rank", 8, ha="right", color=INK)
    put_text(axes, n / 2, 0.25, "keys", 9, va="bottom", color=INK)
    put_text(axes, -0.25, -n / 2, "queries", 9, ha="right", rotation=90, color=INK)
    axes.set_xlim(-1.0, n + 0.9)
    axes.set_ylim(-n - 0.65, 0.9)
    blank(axes)


def _draw_tile(axes: Axes, query: int, key: int, rank: int, step: int) -> None:
    corner = (key, -query - 1)
    axes.add_patch(Rectangle(corner, 1, 1, **_tile_style(rank, step)))
    ink = ink_on(colour_of(rank))
    put_text(axes, key + 0.5, -query - 0.5, str(step), 9, color=ink)


def _draw_diagonal_tile(axes: Axes, chunk: int, rank: int, step: int, size: float) -> None:
    """A triangle: of its own chunk a query sees the earlier half."""
    left = chunk
    top = -chunk
    corners = [(left, top), (left, top - 1), (left + 1, top - 1)]
    axes.add_patch(Polygon(corners, closed=True, **_tile_style(rank, step)))
    ink = ink_on(colour_of(rank))
    put_text(axes, left + 0.3, top - 0.7, str(step), size, color=ink)


def _tile_style(rank: int, step: int) -> dict[str, Any]:
    return {
        "facecolor": colour_of(rank),
        "edgecolor": "white",
        "lw": 0.8,
        "gid": f"rank {rank} step {step}",
    }
