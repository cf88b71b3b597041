"""A drawing of the ranks of a grid on their nodes, coloured by group.

Lessons 08 and 15 use it; `plot.grid` is the way in.
"""

import string
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from course.figures.style import (
    PALE,
    RULE,
    Picture,
    Point,
    blank,
    canvas,
    colour_of,
    figure,
    ink_on,
    put_text,
)
from labcode.topology import AXES, GridShape

MAX_RANKS = 64
MAX_RANKS_WITH_COORDS = 32  # more are drawn as smaller boxes, without coordinates
MAX_WIDTH_IN = 6.6


class _NodeLayout:
    """Where nodes and ranks stand; lengths are in boxes of ranks, y is 0 on top and negative below.

    Args:
        num_nodes: Nodes that share the ranks evenly.
        ranks_per_node: Ranks of each.
        boxes_per_row: How many boxes the drawing has room for beside each other.
    """

    def __init__(self, num_nodes: int, ranks_per_node: int, boxes_per_row: int) -> None:
        self.num_nodes = num_nodes
        self.ranks_per_node = ranks_per_node
        self.columns = min(8, ranks_per_node)  # of ranks in a node
        self.rows = -(-ranks_per_node // self.columns)
        self.nodes_across = max(1, min(num_nodes, boxes_per_row // self.columns))
        self.nodes_down = -(-num_nodes // self.nodes_across)
        self.node_width = self.columns + 0.5  # with the space to the next node
        self.node_height = self.rows + 0.75

    @property
    def width(self) -> float:
        return self.nodes_across * self.node_width

    @property
    def height(self) -> float:
        names = 0.65 if self.num_nodes > 1 else 0.2
        rows_above_the_last = (self.nodes_down - 1) * self.node_height
        return rows_above_the_last + self.rows + names

    def node(self, number: int) -> Point:
        """(left, top) of the boxes of a node."""
        row, column = divmod(number, self.nodes_across)
        return column * self.node_width, -row * self.node_height

    def rank(self, rank: int) -> Point:
        """The lower left corner of the box of a rank; ranks fill the nodes in order."""
        node, index = divmod(rank, self.ranks_per_node)
        row, column = divmod(index, self.columns)
        left, top = self.node(node)
        return left + column, top - 1 - row


@figure
def grid(
    shape: GridShape,
    *,
    alt: str,
    color_by: str | Sequence[str] = "tp",
    nodes: int = 1,
    title: str = "",
) -> Picture:
    """The ranks of a grid (device mesh) as boxes on their nodes, coloured by group.

    Ranks fill the nodes in order, as launchers place them. A box shows its rank and its coordinates
    along axes longer than 1. The letter in its corner names the group too, so that nothing depends
    on colour alone.

    Args:
        shape: The grid, up to 64 ranks.
        alt: What the figure shows.
        color_by: An axis ("tp") or several (("dp", "cp")): each group along them has its colour.
        nodes: Number of nodes that share the ranks evenly.
        title: Above the figure; "": the sizes of the axes and the number of groups.

    Raises:
        ValueError: Too many ranks to draw, or ranks that do not fill the nodes.
    """
    world_size = shape.world_size
    if world_size > MAX_RANKS:
        raise ValueError(
            f"{world_size} ranks are too many to draw: show a grid of at most {MAX_RANKS}"
        )
    if world_size % nodes:
        raise ValueError(
            f"{world_size} ranks do not fill {nodes} nodes evenly: choose a divisor of {world_size}"
        )
    group_axes = (color_by,) if isinstance(color_by, str) else tuple(color_by)
    groups = shape.groups(*group_axes)
    with_coords = world_size <= MAX_RANKS_WITH_COORDS
    boxes_per_row = 8 if with_coords else 16
    layout = _NodeLayout(nodes, world_size // nodes, boxes_per_row)
    width_in = min(MAX_WIDTH_IN, 0.9 * layout.width)
    height_in = width_in * layout.height / layout.width + 0.35
    picture = canvas(width_in, height_in, alt=alt)
    axes = picture.axes[0]

    if nodes > 1:
        for node in range(nodes):
            _draw_node(axes, layout, node)
    box_in = MAX_WIDTH_IN / layout.width
    smallest = 5.5 if with_coords else 8  # points
    size = max(smallest, min(11, 13 * box_in))
    for number, group in enumerate(groups):
        for rank in group:
            corner = layout.rank(rank)
            coordinates = _coordinates(shape, rank) if with_coords else ""
            _draw_rank(axes, corner, rank, number, coordinates, size)

    top = 0.5 if nodes > 1 else 0.05
    axes.set_xlim(-0.15, layout.width - 0.25)
    axes.set_ylim(top - layout.height, top)
    blank(axes)
    text = title or _summary(shape, group_axes, len(groups))
    axes.set_title(text, loc="left", fontsize=10)
    return picture


def _coordinates(shape: GridShape, rank: int) -> str:
    """The coordinates of a rank along the axes longer than 1, two to a line: "tp1 dp0"."""
    coords = shape.coords(rank)
    named = [f"{axis}{coords[axis]}" for axis in _long_axes(shape)]
    lines = [" ".join(named[i : i + 2]) for i in range(0, len(named), 2)]
    return "\n".join(lines)


def _long_axes(shape: GridShape) -> list[str]:
    return [axis for axis in AXES if shape.size(axis) > 1]


def _summary(shape: GridShape, group_axes: Sequence[str], num_groups: int) -> str:
    """The title of a grid that has no other."""
    sizes = [f"{axis}={shape.size(axis)}" for axis in _long_axes(shape)]
    named = " x ".join(sizes) or "one rank"
    kind = "-".join(group_axes)
    groups = "group" if num_groups == 1 else "groups"
    return f"{named}, order {shape.order}: {num_groups} {kind} {groups}"


def _draw_node(axes: Axes, layout: _NodeLayout, node: int) -> None:
    """The frame of a node, with its name."""
    left, top = layout.node(node)
    corner = (left - 0.08, top - layout.rows - 0.1)
    style: dict[str, Any] = {
        "facecolor": PALE,
        "edgecolor": RULE,
        "boxstyle": "round,pad=0,rounding_size=0.08",
    }
    width = layout.columns + 0.16
    height = layout.rows + 0.48
    axes.add_patch(FancyBboxPatch(corner, width, height, **style))
    put_text(axes, left + 0.02, top + 0.15, f"node {node}", 9, ha="left")


def _draw_rank(
    axes: Axes,
    corner: Point,
    rank: int,
    group: int,
    coordinates: str,
    size: float,
) -> None:
    """The box of a rank: its number, its coordinates, the letter of its group."""
    x, y = corner
    colour = colour_of(group)
    ink = ink_on(colour)
    style: dict[str, Any] = {
        "facecolor": colour,
        "edgecolor": "white",
        "boxstyle": "round,pad=0,rounding_size=0.06",
        "gid": f"group {group}",
    }
    axes.add_patch(FancyBboxPatch((x + 0.05, y + 0.05), 0.9, 0.9, **style))
    height = 0.66 if coordinates else 0.42
    put_text(axes, x + 0.54, y + height, str(rank), size, weight="bold", color=ink)
    if coordinates:
        small = 0.68 * size
        put_text(axes, x + 0.5, y + 0.3, coordinates, small, color=ink, linespacing=1.1)
    repeats, index = divmod(group, len(string.ascii_lowercase))
    letter = string.ascii_lowercase[index] * (1 + repeats)
    put_text(axes, x + 0.14, y + 0.82, letter, 0.65 * size, ha="left", color=ink)
