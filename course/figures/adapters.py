"""A drawing of an all-reduce over two nodes: which adapters carry it, in three ways.

Lesson 08 uses it; `plot.ways_over_nodes` is the way in.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

from course.figures.style import (
    INK,
    PALE,
    PALETTE,
    RULE,
    Picture,
    blank,
    canvas,
    figure,
    put_text,
)

PER_NODE = 4
NETWORK = PALETTE[5]
INSIDE = PALETTE[0]
_GPU_X = (0.75, 4.25)  # of the left and the right node
_ADAPTER_X = (1.6, 3.4)
_BOX_X = (0.2, 3.15)
_BOX_WIDTH = 1.65


@figure
def ways_over_nodes(*, alt: str) -> Picture:
    """Two nodes of four GPUs, each with an adapter of its own: one ring, four rings, two levels.

    A filled square is an adapter that is in use. Arrows between the nodes are messages over the
    network, those inside go over NVLink.

    Args:
        alt: What the figure shows.
    """
    picture = canvas(7.3, 3.3, alt=alt, columns=3)
    titles = ("one ring", "four rings, a quarter each", "two levels")
    for axes, title in zip(picture.axes, titles):
        axes.set_title(title, loc="center", fontsize=10.5)
    _one_ring(picture.axes[0])
    _rings(picture.axes[1])
    _two_levels(picture.axes[2])
    for axes in picture.axes:
        axes.set_xlim(0, 5)
        axes.set_ylim(-PER_NODE - 0.75, 0.6)
        blank(axes)
    return picture


def _one_ring(axes: Axes) -> None:
    last = PER_NODE - 1
    _nodes(axes, busy=(0, last))
    for node in (0, 1):
        _column(axes, node, "-|>")
    _over_network(axes, last, 0, from_left=True)
    _over_network(axes, 0, last, from_left=False)
    _note(axes, "0, 1, ... 7, and back to 0")


def _rings(axes: Axes) -> None:
    _nodes(axes, busy=range(PER_NODE))
    for node in (0, 1):
        _column(axes, node, "<|-|>")
    for row in range(PER_NODE):
        _over_network(axes, row, row, both=True)
    _note(axes, "each ring leaves by another GPU")


def _two_levels(axes: Axes) -> None:
    _nodes(axes, busy=range(PER_NODE))
    for node in (0, 1):
        _column(axes, node, "<|-|>")
        put_text(axes, 1.25 if node == 0 else 3.75, -1.5, "1, 3", 9, color=INSIDE, weight="bold")
    for row in range(PER_NODE):
        _over_network(axes, row, row, both=True)
    put_text(axes, 2.5, 0.28, "2", 9, color=NETWORK, weight="bold")
    _note(axes, "1 reduce-scatter inside\n2 all-reduce of the parts\n3 all-gather inside")


def _nodes(axes: Axes, busy: Sequence[int]) -> None:
    """Both nodes with GPUs and adapters; those of the rows `busy` are filled."""
    for node in (0, 1):
        box = FancyBboxPatch((_BOX_X[node], -PER_NODE + 0.5), _BOX_WIDTH, PER_NODE)
        box.set_boxstyle("round,pad=0,rounding_size=0.12")
        box.set(facecolor=PALE, edgecolor=RULE, linewidth=1.0)
        axes.add_patch(box)
        for row in range(PER_NODE):
            gpu = Circle((_GPU_X[node], -row), 0.27)
            gpu.set(facecolor="white", edgecolor=INK, linewidth=1.0, zorder=3)
            axes.add_patch(gpu)
            put_text(axes, _GPU_X[node], -row, str(node * PER_NODE + row), 9.5, zorder=4)
            adapter = Rectangle((_ADAPTER_X[node] - 0.13, -row - 0.13), 0.26, 0.26)
            in_use = row in busy
            adapter.set(facecolor=NETWORK if in_use else "white", edgecolor=INK, zorder=3)
            adapter.set_gid("busy" if in_use else "idle")
            axes.add_patch(adapter)


def _column(axes: Axes, node: int, style: str) -> None:
    """What goes from GPU to GPU inside a node."""
    for row in range(PER_NODE - 1):
        start = (_GPU_X[node], -row - 0.27)
        stop = (_GPU_X[node], -row - 0.73)
        _arrow(axes, start, stop, style, INSIDE)


def _over_network(
    axes: Axes, left_row: int, right_row: int, *, from_left: bool = True, both: bool = False
) -> None:
    """A message between the adapters of two rows, one way or both ways."""
    left = (_ADAPTER_X[0] + 0.15, -left_row)
    right = (_ADAPTER_X[1] - 0.15, -right_row)
    start, stop = (left, right) if from_left else (right, left)
    _arrow(axes, start, stop, "<|-|>" if both else "-|>", NETWORK)


def _arrow(
    axes: Axes, start: tuple[float, float], stop: tuple[float, float], style: str, colour: str
) -> None:
    arrow = FancyArrowPatch(
        start, stop, arrowstyle=style, mutation_scale=8, shrinkA=0, shrinkB=0, color=colour
    )
    axes.add_patch(arrow)


def _note(axes: Axes, text: str) -> None:
    put_text(axes, 2.5, -PER_NODE + 0.3, text, 9, va="top", linespacing=1.3)
