"""Drawings of a batch job: who starts whom on which node, and how a job lives twice.

Lesson 14 uses them; `plot.launch_chain` and `plot.second_attempt` are the ways in.
"""

from typing import Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from course.figures.style import (
    INK,
    PALE,
    PALETTE,
    RULE,
    Picture,
    Point,
    blank,
    canvas,
    figure,
    ink_on,
    put_text,
)

BLUE = PALETTE[0]
ORANGE = PALETTE[1]
GREEN = PALETTE[2]
RED = PALETTE[5]
WHITE = "#FFFFFF"

MAX_NODES = 4
MAX_RANKS_PER_NODE = 4

# Lengths of the chain, in its own units.
_RANK_WIDTH = 1.3
_BOX_HEIGHT = 0.72
_HEAD_WIDTH = 2.6
_ROWS = (5.0, 3.85, 2.6, 1.3)  # script, srun, torchrun, ranks: heights of the middles


class _Box(NamedTuple):
    """A box with a text; `place` is its middle."""

    place: Point
    width: float

    @property
    def top(self) -> Point:
        return self.place[0], self.place[1] + _BOX_HEIGHT / 2

    @property
    def bottom(self) -> Point:
        return self.place[0], self.place[1] - _BOX_HEIGHT / 2

    @property
    def left(self) -> Point:
        return self.place[0] - self.width / 2, self.place[1]

    @property
    def right(self) -> Point:
        return self.place[0] + self.width / 2, self.place[1]


@figure
def launch_chain(
    nodes: int = 2,
    ranks_per_node: int = 2,
    launcher: Literal["torchrun", "srun"] = "torchrun",
    *,
    alt: str,
    title: str = "",
) -> Picture:
    """Who starts whom, from sbatch on the login node to the ranks, with the node that each is on.

    Args:
        nodes: Number of nodes of the job, at most 4.
        ranks_per_node: Number of ranks on each node, at most 4.
        launcher: "torchrun": srun starts one torchrun on each node, and that starts the ranks.
            "srun": srun starts the ranks itself.
        alt: What the figure shows.
        title: Above the figure.

    Raises:
        ValueError: More nodes or ranks than fit.
    """
    if not 1 <= nodes <= MAX_NODES or not 1 <= ranks_per_node <= MAX_RANKS_PER_NODE:
        raise ValueError(
            f"{nodes} nodes x {ranks_per_node} ranks cannot be drawn: "
            f"at most {MAX_NODES} x {MAX_RANKS_PER_NODE}"
        )
    node_width = max(2.9, ranks_per_node * _RANK_WIDTH + 0.3)
    width = _HEAD_WIDTH + 0.9 + nodes * (node_width + 0.35)
    picture = canvas(0.78 * width, 4.6, alt=alt)
    axes = picture.axes[0]

    head_middle = _HEAD_WIDTH / 2
    _node(axes, "head (login node)", 0, _HEAD_WIDTH, bottom=2.95)
    sbatch = _box(axes, (head_middle, _ROWS[0]), 2.0, "sbatch", WHITE)
    queue = _box(axes, (head_middle, _ROWS[1]), 2.2, "SLURM's queue", PALE)
    _arrow(axes, sbatch.bottom, queue.top)

    first_left = _HEAD_WIDTH + 0.9
    middles = []
    for node in range(nodes):
        left = first_left + node * (node_width + 0.35)
        _node(axes, f"n{node + 1}", left, node_width, bottom=0.6)
        middles.append(left + node_width / 2)
    script = _box(axes, (middles[0], _ROWS[0]), 2.3, "your script, once", ORANGE)
    srun = _box(axes, (middles[0], _ROWS[1]), 2.3, "srun", ORANGE)
    _arrow(axes, queue.right, script.left)
    _arrow(axes, script.bottom, srun.top)

    for node, middle in enumerate(middles):
        parent = srun
        if launcher == "torchrun":
            parent = _box(axes, (middle, _ROWS[2]), 2.3, "torchrun", GREEN)
            _from_srun(axes, srun, parent, same_node=node == 0)
        first_rank = node * ranks_per_node
        leftmost = middle - (ranks_per_node - 1) / 2 * _RANK_WIDTH
        for local in range(ranks_per_node):
            place = (leftmost + local * _RANK_WIDTH, _ROWS[3])
            rank = _box(axes, place, _RANK_WIDTH - 0.16, f"rank {first_rank + local}", BLUE)
            if launcher == "torchrun":
                _arrow(axes, parent.bottom, rank.top)
            else:
                _from_srun(axes, srun, rank, same_node=node == 0)

    axes.set_xlim(-0.1, width)
    axes.set_ylim(0.5, 6.15)
    blank(axes)
    axes.set_aspect("auto")
    if title:
        axes.set_title(title, loc="left")
    return picture


def _node(axes: Axes, name: str, left: float, width: float, bottom: float) -> None:
    style = "round,pad=0,rounding_size=0.12"
    frame = FancyBboxPatch((left, bottom), width, 5.95 - bottom, boxstyle=style)
    frame.set(facecolor=WHITE, edgecolor=RULE, linewidth=1.2, zorder=0, gid=f"node {name}")
    axes.add_patch(frame)
    put_text(axes, left + 0.14, 5.68, name, 9.5, ha="left", weight="bold")


def _box(axes: Axes, place: Point, width: float, text: str, colour: str) -> _Box:
    x, y = place
    style = "round,pad=0,rounding_size=0.1"
    corner = (x - width / 2, y - _BOX_HEIGHT / 2)
    patch = FancyBboxPatch(corner, width, _BOX_HEIGHT, boxstyle=style)
    patch.set(facecolor=colour, edgecolor=INK, linewidth=1, zorder=3, gid=text)
    axes.add_patch(patch)
    put_text(axes, x, y, text, 9.5, color=ink_on(colour), zorder=4)
    return _Box(place, width)


def _arrow(axes: Axes, start: Point, end: Point) -> None:
    arrow = FancyArrowPatch(
        start,
        end,
        arrowstyle="-|>",
        mutation_scale=12,
        color=INK,
        lw=1.4,
        shrinkA=1,
        shrinkB=1,
        zorder=2,
    )
    axes.add_patch(arrow)


def _from_srun(axes: Axes, srun: _Box, target: _Box, same_node: bool) -> None:
    """An arrow from srun: from below to its own node, from its side over the network."""
    start = srun.bottom if same_node else srun.right
    _arrow(axes, start, target.top)


# ---- a job that lives twice

_LANES = ("SLURM", "your script", "ranks")
_LANE_HEIGHT = 0.62


class _Bar(NamedTuple):
    lane: int
    start: float
    stop: float
    text: str
    colour: str
    hatch: str = ""


_BARS = (
    _Bar(0, 0, 6.2, "attempt 1", PALE),
    _Bar(0, 6.2, 8.6, "in the queue", WHITE, "//"),
    _Bar(0, 8.6, 12.4, "attempt 2", PALE),
    _Bar(1, 0, 4.0, "wait", ORANGE),
    _Bar(1, 4.0, 6.2, "wait again", ORANGE),
    _Bar(1, 8.6, 12.4, "wait", ORANGE),
    _Bar(2, 0.3, 4.7, "steps 1, 2, 3 ...", BLUE),
    _Bar(2, 4.7, 5.6, "save", GREEN),
    _Bar(2, 8.7, 12.1, "resume, next step ...", BLUE),
)


@figure
def second_attempt(*, alt: str, title: str = "") -> Picture:
    """A job that is told to stop, saves, is requeued and resumes: time to the right, three lanes.

    Args:
        alt: What the figure shows.
        title: Above the figure.
    """
    picture = canvas(8.4, 3.1, alt=alt)
    axes = picture.axes[0]
    for bar in _BARS:
        y = -bar.lane - _LANE_HEIGHT / 2
        patch = Rectangle((bar.start, y), bar.stop - bar.start, _LANE_HEIGHT, gid=bar.text)
        patch.set(facecolor=bar.colour, edgecolor=INK, linewidth=1, hatch=bar.hatch, zorder=2)
        axes.add_patch(patch)
        plate = {"facecolor": WHITE, "edgecolor": "none", "pad": 1.2} if bar.hatch else None
        middle = (bar.start + bar.stop) / 2
        ink = ink_on(bar.colour)
        put_text(axes, middle, -bar.lane, bar.text, 9, color=ink, bbox=plate, zorder=4)
    for lane, name in enumerate(_LANES):
        put_text(axes, -0.2, -lane, name, 9.5, ha="right", weight="bold")

    half = _LANE_HEIGHT / 2
    _step(axes, (4.0, -half), (4.0, -1 + half), "1", "USR1")
    _step(axes, (4.35, -1 - half), (4.35, -2 + half), "2", "scancel --signal")
    _step(axes, (5.6, -2 + half), (5.6, -1 - half), "3", "exit code 0")
    _step(axes, (6.05, -1 + half), (6.05, -half), "4", "scontrol requeue")
    axes.plot([6.4, 6.4], [-half, half + 0.18], color=RED, lw=1.6, ls="--", zorder=5)
    put_text(axes, 6.4, half + 0.3, "the time limit would have been here", 9, color=INK)
    axes.set_xlim(-2.2, 12.5)
    axes.set_ylim(-2.45, 0.85)
    blank(axes)
    axes.set_aspect("auto")
    if title:
        axes.set_title(title, loc="left")
    return picture


def _step(axes: Axes, start: Point, end: Point, number: str, what: str) -> None:
    """An arrow from lane to lane with its number, and what it is beside it."""
    _arrow(axes, start, end)
    x = start[0]
    y = (start[1] + end[1]) / 2
    left_of_arrow = number in "12"
    side = "right" if left_of_arrow else "left"
    offset = -0.14 if left_of_arrow else 0.14
    put_text(axes, x + offset, y, f"{number} {what}", 9, ha=side, zorder=6)
