"""A drawing of weights and of who holds which rows or columns of them: the cuts of tensor parallelism, to scale."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby

import matplotlib as mpl
import torch
from matplotlib.patches import Rectangle

from labcode.parallel.sharding import Split
from labcode.teach.figures.style import (
    INK,
    STYLE,
    Picture,
    blank,
    canvas,
    colour_of,
    described,
    ink_on,
)

VECTOR = 0.12  # width at which a bias is drawn, as a share of the narrowest matrix
WHOLE = "#BBBBBB"


def cuts(
    weights: Mapping[str, tuple[Sequence[int], Split | None]],
    parts: int,
    *,
    alt: str,
    title: str = "",
    section_names: Sequence[str] = ("q", "k", "v"),
) -> Picture:
    """Each weight as a rectangle, rows down and columns across, its stripes coloured and numbered by rank; grey is whole.

    Args:
        weights: `{"label": (shape, split)}`; what `Placement` holds. A vector is drawn as a thin column.
        parts: Number of ranks.
        alt: What the figure shows.
        section_names: Written beside the sections of a weight that has as many.
    """
    thin = VECTOR * min(shape[1] for shape, _ in weights.values() if len(shape) > 1)
    sizes = {
        name: (shape[0], shape[1] if len(shape) > 1 else thin)
        for name, (shape, _) in weights.items()
    }
    tall = max(height for height, _ in sizes.values())
    gap = 0.16 * tall
    total = sum(width for _, width in sizes.values()) + gap * len(sizes)
    inches = min(6.4 / total, 2.6 / tall)
    figure, (axes,) = canvas(total * inches, tall * inches + 0.75)
    left = gap / 2
    with mpl.rc_context(STYLE):
        for name, (_, split) in weights.items():
            height, width = sizes[name]
            _one(axes, (left, width, height), split, parts, numbered=width > thin)
            if (
                width > thin
                and split is not None
                and len(split.sections or ()) == len(section_names)
            ):
                _name_sections(axes, left - 0.15 * gap, split.sections, section_names)
            axes.text(
                left + width / 2,
                -height - 0.04 * tall,
                name,
                ha="center",
                va="top",
                fontsize=8.5,
                linespacing=1.3,
            )
            left += width + gap
        axes.set(xlim=(0, total), ylim=(-1.2 * tall, 0.02 * tall))
        blank(axes)
        if title:
            axes.set_title(title, loc="left")
    return Picture(figure, described(alt))


def owners(split: Split, length: int, parts: int) -> list[tuple[int, int, int]]:
    """(rank, first, stop) of each stripe along the dim that is cut, in order."""
    rank_of = torch.empty(length, dtype=torch.int64)
    for rank in range(parts):
        rank_of[Split(0, split.sections).take(torch.arange(length), rank, parts)] = rank
    runs = [(rank, len(list(members))) for rank, members in groupby(rank_of.tolist())]
    stops = list(accumulate(length for _, length in runs))
    return [(rank, stop - length, stop) for (rank, length), stop in zip(runs, stops)]


def _one(axes, place, split, parts, numbered):
    """The stripes of one weight; y goes down from 0."""
    left, width, height = place
    if split is None:
        return _stripe(axes, (left, -height, width, height), WHOLE, "all" if numbered else "")
    along = height if split.dim == 0 else width
    for rank, first, stop in owners(split, along, parts):
        box = (
            (left, -stop, width, stop - first)
            if split.dim == 0
            else (left + first, -height, stop - first, height)
        )
        _stripe(axes, box, colour_of(rank), str(rank) if numbered else "")


def _stripe(axes, box, colour, text):
    left, bottom, width, height = box
    axes.add_patch(
        Rectangle(
            (left, bottom),
            width,
            height,
            facecolor=colour,
            edgecolor="white",
            lw=1.0,
            gid=text or None,
        )
    )
    axes.text(
        left + width / 2,
        bottom + height / 2,
        text,
        ha="center",
        va="center",
        fontsize=8,
        color=ink_on(colour),
    )


def _name_sections(axes, right, sections, names):
    for name, length, stop in zip(names, sections, accumulate(sections)):
        axes.text(right, -stop + length / 2, name, ha="right", va="center", fontsize=8.5, color=INK)
