"""A drawing of weights, to scale: which rank of tensor parallelism holds which columns or rows.

A weight is drawn as the W of X W, [inputs, outputs], so that a column-parallel layer is cut into
columns. PyTorch stores its transpose, [outputs, inputs].

Lesson 09 uses it; `plot.cuts` is the way in.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from course.figures.style import (
    INK,
    Picture,
    Point,
    blank,
    canvas,
    colour_of,
    figure,
    ink_on,
    put_text,
)
from labcode.parallel.sharding import Shard

VECTOR = 0.12  # width at which a bias is drawn, as a fraction of the narrowest matrix
REPLICATED = "#BBBBBB"
SECTION_NAMES = ("q", "k", "v")  # above the sections of a weight that has three


Weights = Mapping[str, tuple[Sequence[int], Shard | None]]


class _Area(NamedTuple):
    """A rectangle of the drawing, in elements of the weights; y is 0 on top and negative below."""

    left: float
    bottom: float
    width: float
    height: float

    @property
    def middle(self) -> Point:
        x = self.left + self.width / 2
        y = self.bottom + self.height / 2
        return x, y


@figure
def cuts(
    weights: Weights,
    parts: int,
    *,
    alt: str,
    title: str = "",
) -> Picture:
    """Each weight as a rectangle, inputs down and outputs across, coloured and numbered by rank.

    Grey is replicated: every rank holds all of it.

    Args:
        weights: `{"label": (shape, split)}` as PyTorch stores them, [outputs, inputs]; a vector of
            outputs is drawn as a thin row.
        parts: Number of ranks.
        alt: What the figure shows.
        title: Above the figure.
    """
    sizes = _drawn_sizes(weights)
    tallest = max(height for height, _ in sizes.values())
    gap = 0.16 * tallest
    total_width = gap * len(sizes)
    for _, width in sizes.values():
        total_width += width
    scale = min(6.4 / total_width, 2.6 / tallest)  # inches of an element
    width_in = total_width * scale
    height_in = tallest * scale + 0.95
    picture = canvas(width_in, height_in, alt=alt)
    axes = picture.axes[0]
    left = gap / 2
    for name, (shape, split) in weights.items():
        height, width = sizes[name]
        is_matrix = len(shape) > 1
        area = _Area(left, -height, width, height)
        _draw_weight(axes, area, split, parts, numbered=is_matrix)
        sections = _sections(split)
        if is_matrix and len(sections) == len(SECTION_NAMES):
            _name_sections(axes, left, 0.02 * tallest, sections, SECTION_NAMES)
        middle, _ = area.middle
        below = -height - 0.04 * tallest
        put_text(axes, middle, below, name, 8.5, va="top", linespacing=1.3)
        left += width + gap
    axes.set_xlim(0, total_width)
    axes.set_ylim(-1.2 * tallest, 0.1 * tallest)
    blank(axes)
    if title:
        axes.set_title(title, loc="left")
    return picture


def _drawn_sizes(weights: Weights) -> dict[str, tuple[float, float]]:
    """{label: (height, width)} in elements; a vector is as high as can be seen."""
    shapes = [shape for shape, _ in weights.values()]
    narrowest = min(min(shape) for shape in shapes if len(shape) > 1)
    thin = VECTOR * narrowest
    sizes = {}
    for name, (shape, _) in weights.items():
        height = shape[1] if len(shape) > 1 else thin
        sizes[name] = (height, shape[0])
    return sizes


def _sections(split: Shard | None) -> Sequence[int]:
    if split is None or split.sections is None:
        return ()
    return split.sections


def owners(split: Shard, length: int, parts: int) -> list[tuple[int, int, int]]:
    """(rank, first, stop) of each stripe along the dim that is cut, in order.

    Args:
        split: How the weight is cut.
        length: Size along that dim.
        parts: Number of ranks.
    """
    along_one_dim = Shard(0, split.sections)
    rank_of = torch.empty(length, dtype=torch.int64)
    for rank in range(parts):
        own = along_one_dim.take(torch.arange(length), rank, parts)
        rank_of[own] = rank
    stripes: list[tuple[int, int, int]] = []
    first = 0
    for rank, members in groupby(rank_of.tolist()):
        stop = first + len(list(members))
        stripes.append((rank, first, stop))
        first = stop
    return stripes


def _draw_weight(axes: Axes, area: _Area, split: Shard | None, parts: int, numbered: bool) -> None:
    """The stripes of one weight, or one stripe where it is replicated."""
    if split is None:
        _draw_stripe(axes, area, REPLICATED, "all" if numbered else "")
        return
    by_columns = split.dim == 0  # of PyTorch's weight: the output features
    length = area.width if by_columns else area.height
    for rank, first, stop in owners(split, int(length), parts):
        if by_columns:
            stripe = area._replace(left=area.left + first, width=stop - first)
        else:
            stripe = area._replace(bottom=-stop, height=stop - first)
        _draw_stripe(axes, stripe, colour_of(rank), str(rank) if numbered else "")


def _draw_stripe(axes: Axes, area: _Area, colour: str, text: str) -> None:
    corner = (area.left, area.bottom)
    patch = Rectangle(corner, area.width, area.height, gid=text or None)
    patch.set(facecolor=colour, edgecolor="white", linewidth=1.0)
    axes.add_patch(patch)
    put_text(axes, *area.middle, text, 8, color=ink_on(colour))


def _name_sections(
    axes: Axes, left: float, bottom: float, sections: Sequence[int], names: Sequence[str]
) -> None:
    """The name of each section above it."""
    for name, length in zip(names, sections):
        put_text(axes, left + length / 2, bottom, name, 8.5, va="bottom", color=INK)
        left += length
