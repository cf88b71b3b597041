"""Drawings of what the order of a grid decides: the digits of a rank, and the links of its rings.

Lesson 08 uses them; `plot.digits` and `plot.links` are the way in.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Arc, FancyBboxPatch, Rectangle

from course.figures.style import (
    INK,
    PALE,
    PALETTE,
    RULE,
    Picture,
    blank,
    canvas,
    colour_of,
    figure,
    ink_on,
    put_text,
)
from labcode.topology import GridShape

INSIDE = RULE
CROSSING = (PALETTE[5], "#7A3300")  # of groups in turn, so that arcs that touch can be told apart
DASHES = ((0, (4, 1.5)), (0, (1.5, 1.2)))
MAX_RANKS = 16
NODE_GAP = 0.5  # in boxes of ranks
NODE_NAME = 1.0  # left of the ranks of a node


# ---- the digits of a rank


@figure
def digits(shape: GridShape, *, alt: str, title: str = "") -> Picture:
    """Every rank as a column of coordinates: one row for each axis, the fastest at the bottom.

    A cell holds the coordinate, and its colour is that of the coordinate.

    Args:
        shape: The grid, up to 16 ranks; axes of size 1 are left out.
        alt: What the figure shows.
        title: Above the figure.
    """
    _check_size(shape)
    axes_shown = [axis for axis in reversed(shape.axes) if shape.size(axis) > 1]
    num_rows = len(axes_shown)
    picture = canvas(6.6, 0.42 * (num_rows + 1) + 0.5, alt=alt)
    axes = picture.axes[0]
    for rank in range(shape.world_size):
        coords = shape.coords(rank)
        put_text(axes, rank + 0.5, 0.5, str(rank), 10, weight="bold")
        for row, axis in enumerate(axes_shown):
            _draw_digit(axes, rank, row, coords[axis])
    put_text(axes, -0.25, 0.5, "rank", 10, ha="right", weight="bold")
    for row, axis in enumerate(axes_shown):
        note = ""
        if row == 0:
            note = "slowest: "
        if row == num_rows - 1:
            note = "fastest: "
        put_text(axes, -0.25, -row - 0.5, f"{note}{axis}", 10, ha="right")
    axes.set_xlim(-3.0, shape.world_size + 0.1)
    axes.set_ylim(-num_rows - 0.1, 1.1)
    blank(axes)
    if title:
        axes.set_title(title, loc="left", fontsize=10)
    return picture


def _draw_digit(axes: Axes, column: int, row: int, digit: int) -> None:
    colour = colour_of(digit)
    cell = Rectangle((column, -row - 1), 1, 1, gid=f"digit {digit}")
    cell.set(facecolor=colour, edgecolor="white", linewidth=1.0)
    axes.add_patch(cell)
    put_text(axes, column + 0.5, -row - 0.5, str(digit), 10, color=ink_on(colour))


# ---- which links leave a node


@figure
def links(
    shape: GridShape, *, alt: str, axes_shown: Sequence[str], nodes: int, title: str = ""
) -> Picture:
    """The rings of some axes, drawn over the ranks on their nodes.

    An arc is a link between neighbours of a ring. Above the ranks go those to the next member,
    below them those from the last member back to the first. Links that leave a node are thick and
    dashed, in another way for every second group.

    Args:
        shape: The grid, up to 16 ranks.
        alt: What the figure shows.
        axes_shown: One row of the picture for each, for instance ("tp", "dp").
        nodes: Number of nodes that share the ranks evenly.
        title: Above the figure.

    Raises:
        ValueError: Too many ranks to draw.
    """
    _check_size(shape)
    per_node = shape.world_size // nodes
    right = _middle(shape.world_size - 1, per_node) + 0.5
    width_in = min(6.6, 0.62 * right)
    height_in = 1.3 * len(axes_shown) + (0.3 if title else 0)
    picture = canvas(width_in, height_in, alt=alt, rows=len(axes_shown))
    for axes, axis in zip(picture.axes, axes_shown):
        _draw_nodes(axes, nodes, per_node)
        crossing = 0
        total = 0
        for number, group in enumerate(shape.groups(axis)):
            for place, sender in enumerate(group):
                receiver = group[(place + 1) % len(group)]
                leaves = sender // per_node != receiver // per_node
                _draw_link(axes, sender, receiver, per_node, number % 2 if leaves else None)
                total += 1
                crossing += 1 if leaves else 0
        _finish(axes, right, f"{axis}: {crossing} of {total} links leave the node")
    if title:
        picture.figure.suptitle(title, x=0.02, ha="left", fontsize=11)
    return picture


def _middle(rank: int, per_node: int) -> float:
    node = rank // per_node
    return rank + 0.5 + NODE_NAME + (NODE_GAP + NODE_NAME) * node


def _draw_nodes(axes: Axes, nodes: int, per_node: int) -> None:
    """The nodes, each with its ranks in a row."""
    for node in range(nodes):
        left = _middle(node * per_node, per_node) - 0.5
        corner = (left - NODE_NAME, -0.62)
        box = FancyBboxPatch(corner, NODE_NAME + per_node + 0.1, 1.24)
        box.set_boxstyle("round,pad=0,rounding_size=0.12")
        box.set(facecolor=PALE, edgecolor=RULE, linewidth=1.0)
        axes.add_patch(box)
        put_text(axes, left - 0.47, 0, f"node\n{node}", 10, linespacing=1.2)
        for index in range(per_node):
            rank = node * per_node + index
            square = Rectangle((left + index + 0.18, -0.32), 0.64, 0.64)
            square.set(facecolor="white", edgecolor=INK, linewidth=1.0)
            axes.add_patch(square)
            put_text(axes, left + index + 0.5, 0, str(rank), 10.5)


def _draw_link(axes: Axes, sender: int, receiver: int, per_node: int, leaving: int | None) -> None:
    """An arc between two ranks: above where it goes on, below where it closes the ring.

    Args:
        axes: Axes of the picture.
        sender, receiver: Ranks.
        per_node: Ranks of a node.
        leaving: Which style a link that leaves the node has; None for one that does not.
    """
    start = _middle(sender, per_node)
    stop = _middle(receiver, per_node)
    width = abs(stop - start)
    is_above = receiver > sender
    base = 0.34 if is_above else -0.34
    angles = (0, 180) if is_above else (180, 360)
    height = 0.8 + 0.1 * width
    if leaving is not None:
        height += 0.22 * (sender % 4)  # so that parallel arcs can be told apart
    arc = Arc(((start + stop) / 2, base), width, height, theta1=angles[0], theta2=angles[1])
    if leaving is None:
        arc.set(color=INSIDE, linewidth=1.3, gid="inside")
    else:
        arc.set(color=CROSSING[leaving], linestyle=DASHES[leaving], linewidth=2.2, gid="leaves")
    arc.set(zorder=3)
    axes.add_patch(arc)


def _finish(axes: Axes, right: float, text: str) -> None:
    axes.set_xlim(-0.3, right + 0.3)
    axes.set_ylim(-2.0, 1.7)
    axes.set_axis_off()
    axes.set_title(text, loc="left", fontsize=10.5)


def _check_size(shape: GridShape) -> None:
    if shape.world_size > MAX_RANKS:
        raise ValueError(
            f"{shape.world_size} ranks are too many to draw: show a grid of at most {MAX_RANKS}"
        )
