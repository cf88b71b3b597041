"""A drawing of nodes, their ranks, and the links between ranks that NCCL's log names.

Lesson 14 uses it; `plot.transports` is the way in.
"""

import math
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

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
    put_text,
)
from labcode.doctor.nccl_log import Communicator, NcclLog, Rank

MAX_RANKS = 32
CURVE_STEPS = 16

Places = dict[int, Point]  # {rank: middle of its circle}


class _Look(NamedTuple):
    """How the arrows of a transport look; both differ, so that nothing depends on colour alone."""

    colour: str
    dash: Any  # a line style of matplotlib's
    name: str  # in the legend


_LOOKS = {  # fast ones first
    "P2P": _Look(PALETTE[2], "-", "P2P: from GPU to GPU"),
    "SHM": _Look(PALETTE[1], "--", "SHM: through host memory"),
    "NET/IB": _Look(PALETTE[0], "-.", "NET/IB: InfiniBand"),
    "NET/Socket": _Look(PALETTE[5], ":", "NET/Socket: TCP"),
}

_UNKNOWN_DASH = (0, (6, 1, 1, 1, 1, 1))  # of a transport that is not listed

# Lengths of the drawing, in its own units.
_RADIUS = 0.3  # of a rank's circle
_CLEARANCE = 1.2 * _RADIUS  # between an arrow and the middle of a rank that it passes
# How far an arrow bends to the side, as a fraction of its length. They are tried in this order
# until the arrow passes no rank.
_BENDS = (0.16, 0.26, -0.26, 0.36, -0.36, 0.48, -0.48)


@figure
def transports(log: NcclLog | Communicator, *, alt: str, title: str = "") -> Picture:
    """Nodes as boxes, ranks as circles, and an arrow for each pair of ranks that NCCL connected.

    Colour and dash of an arrow show the transport, its number how many channels it has. The number
    of its GPU stands below each rank.

    Args:
        log: What `nccl_log.parse` returned; of a whole log the largest communicator is drawn.
        alt: What the figure shows.
        title: Above the figure.

    Raises:
        ValueError: Nothing to draw, or more than 32 ranks.
    """
    comm = log.main if isinstance(log, NcclLog) else log
    if len(comm.ranks) > MAX_RANKS:
        raise ValueError(
            f"{len(comm.ranks)} ranks are too many to draw: show a job of at most {MAX_RANKS}"
        )
    if not comm.ranks:
        raise ValueError(
            "the log names no ranks: run with NCCL_DEBUG=INFO, and keep the lines of all ranks"
        )
    nodes = _place_nodes(comm)
    places = _place_ranks(comm, nodes)
    right = max(node.right for node in nodes)
    top = max(node.top for node in nodes)
    width_in = min(6.6, 1.0 + 0.95 * right)
    aspect = (top + 0.3) / (right + 0.3)
    height_in = max(1.8, width_in * aspect + 0.6)
    picture = canvas(width_in, height_in, alt=alt)
    axes = picture.axes[0]

    for node in nodes:
        _draw_node(axes, node)
    lowest, highest = _draw_links(axes, comm, places)
    for rank, place in places.items():
        _draw_rank(axes, comm.ranks[rank], place)
    axes.set_xlim(-0.15, right + 0.15)
    axes.set_ylim(min(0.0, lowest) - 0.15, max(top, highest) + 0.15)
    blank(axes)
    _draw_legend(picture.figure, comm)
    if title:
        axes.set_title(title, loc="left")
    return picture


# ---- where things stand


class _Node(NamedTuple):
    """The box of a node."""

    name: str
    left: float
    bottom: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def top(self) -> float:
        return self.bottom + self.height

    @property
    def middle(self) -> Point:
        """Middle of the part below the name."""
        x = self.left + self.width / 2
        y = self.bottom + (self.height - 0.35) / 2
        return x, y


def _most_ranks(comm: Communicator) -> int:
    return max(len(ranks) for ranks in comm.hosts.values())


def _place_nodes(comm: Communicator) -> list[_Node]:
    """The boxes of the nodes, all of one size, in rows from the top."""
    most = _most_ranks(comm)
    if most == 1:
        width = 1.5
        height = 1.7
        per_row = 4
    elif most == 2:
        width = 1.5
        height = 3.0
        per_row = 4
    else:
        width = 1.8 + 0.42 * most
        height = 2.1 + 0.42 * most
        per_row = 3 if most <= 4 else 2
    per_row = min(per_row, len(comm.hosts))
    num_rows = math.ceil(len(comm.hosts) / per_row)
    nodes = []
    for i, name in enumerate(comm.hosts):
        row, column = divmod(i, per_row)
        left = column * (width + 1.1)
        bottom = (num_rows - 1 - row) * (height + 0.8)
        nodes.append(_Node(name, left, bottom, width, height))
    return nodes


def _place_ranks(comm: Communicator, nodes: list[_Node]) -> Places:
    """{rank: middle of its circle}.

    Two ranks stand one above the other, so that arrows between nodes do not cross them. More stand
    in a ring. Of two such nodes each has its first and its last rank on the side of the other, so
    that the two arrows between them do not cross.
    """
    most = _most_ranks(comm)
    face = most > 2 and len(nodes) == 2
    places = {}
    for number, (node, ranks) in enumerate(zip(nodes, comm.hosts.values())):
        if len(ranks) == 1:
            radius = 0.0
        elif most <= 2:
            radius = 0.62
        else:
            radius = (min(node.width, node.height) - 1.5) / 2
        x, y = node.middle
        for i, rank in enumerate(ranks):
            turn = 2 * math.pi * i / len(ranks)
            if face:
                # the side of the other node lies between the last rank and the first
                angle = math.pi * number + math.pi / len(ranks) + turn
            else:
                angle = math.pi * (0.5 if most <= 2 else 0.75) - turn  # clockwise
            across = radius * math.cos(angle)
            up = radius * math.sin(angle)
            places[rank] = (x + across, y + up)
    return places


def _curve(start: Point, end: Point, bend: float) -> list[Point]:
    """Points of matplotlib's arc3: a parabola whose control point lies beside the middle."""
    x0, y0 = start
    x1, y1 = end
    control_x = (x0 + x1) / 2 + bend * (y1 - y0)
    control_y = (y0 + y1) / 2 - bend * (x1 - x0)
    points: list[Point] = []
    for i in range(CURVE_STEPS + 1):
        t = i / CURVE_STEPS
        x = _bezier(t, x0, control_x, x1)
        y = _bezier(t, y0, control_y, y1)
        points.append((x, y))
    return points


def _bezier(t: float, start: float, control: float, end: float) -> float:
    """A quadratic Bezier curve at 0 <= t <= 1."""
    to_control = start + t * (control - start)
    from_control = control + t * (end - control)
    return to_control + t * (from_control - to_control)


def _free_bend(start: Point, end: Point, others: list[Point]) -> float:
    """The first bend with which an arrow hits none of `others`, or the smallest if all hit one."""
    for bend in _BENDS:
        if _is_clear(_curve(start, end, bend), others):
            return bend
    return _BENDS[0]


def _is_clear(curve: list[Point], places: list[Point]) -> bool:
    """Whether the curve keeps away from all these places."""
    for place in places:
        nearest = min(math.dist(point, place) for point in curve)
        if nearest <= _CLEARANCE:
            return False
    return True


# ---- drawing


def _look(transport: str) -> _Look:
    if transport in _LOOKS:
        return _LOOKS[transport]
    return _Look(PALETTE[3], _UNKNOWN_DASH, transport)


def _draw_node(axes: Axes, node: _Node) -> None:
    style: dict[str, Any] = {
        "facecolor": PALE,
        "edgecolor": RULE,
        "boxstyle": "round,pad=0,rounding_size=0.1",
        "gid": f"node {node.name}",
        "zorder": 0,
    }
    corner = (node.left, node.bottom)
    axes.add_patch(FancyBboxPatch(corner, node.width, node.height, **style))
    put_text(axes, node.left + 0.14, node.top - 0.24, node.name, 9, ha="left")


def _draw_links(axes: Axes, comm: Communicator, places: Places) -> tuple[float, float]:
    """The arrows of all pairs; returns the lowest and the highest point that one passes."""
    heights = [0.0]
    for (source, target), transports_of in comm.pairs().items():
        if source not in places or target not in places:
            continue
        start = places[source]
        end = places[target]
        others = [place for rank, place in places.items() if rank not in (source, target)]
        free = _free_bend(start, end, others)
        for i, (transport, channels) in enumerate(transports_of.items()):
            bend = free + 0.16 * i  # a pair may have several transports: one arrow beside the other
            arrow = _arrow(axes, start, end, bend, _look(transport))
            arrow.set_gid(f"{source} -> {target} {transport}")
            axes.add_patch(arrow)
            curve = _curve(start, end, bend)
            _draw_channels(axes, curve[len(curve) // 2], channels)
            heights += [y for _, y in curve]
    return min(heights), max(heights)


def _arrow(axes: Axes, start: Point, end: Point, bend: float, look: _Look) -> FancyArrowPatch:
    """An arrow from the edge of one circle to the edge of another."""
    arrow = FancyArrowPatch(
        start,
        end,
        connectionstyle=f"arc3,rad={bend}",
        arrowstyle="-|>",
        mutation_scale=11,
        color=look.colour,
        lw=1.9,
        linestyle=look.dash,
        shrinkA=0,
        shrinkB=0,
        zorder=2,
    )
    # matplotlib cuts the arrow off at these patches, which are not drawn themselves.
    arrow.set_patchA(_invisible_circle(axes, start))
    arrow.set_patchB(_invisible_circle(axes, end))
    return arrow


def _invisible_circle(axes: Axes, place: Point) -> Circle:
    circle = Circle(place, _RADIUS)
    circle.set_transform(axes.transData)
    return circle


def _draw_channels(axes: Axes, place: Point, channels: int) -> None:
    """The number of channels on an arrow."""
    plate = {
        "facecolor": "white",
        "edgecolor": "none",
        "pad": 0.8,
        "alpha": 0.85,
    }
    put_text(axes, *place, str(channels), 7.5, color=INK, bbox=plate, zorder=3)


def _draw_rank(axes: Axes, rank: Rank, place: Point) -> None:
    """The circle of a rank, with its number and its GPU."""
    x, y = place
    circle = Circle(place, _RADIUS, zorder=4, gid=f"rank {rank.rank}")
    circle.set(facecolor="white", edgecolor=INK, linewidth=1.3)
    axes.add_patch(circle)
    number_y = y
    if rank.gpu is not None:
        number_y = y + 0.07
        put_text(axes, x, y - 0.14, f"GPU {rank.gpu}", 6, zorder=5)
    put_text(axes, x, number_y, str(rank.rank), 10, weight="bold", zorder=5)


def _draw_legend(drawing: Figure, comm: Communicator) -> None:
    """The transports that occur, fast ones first, unknown ones last."""
    seen = {link.transport for link in comm.links}
    if not seen:
        return
    shown = [name for name in _LOOKS if name in seen]
    shown += sorted(seen - set(_LOOKS))
    lines = []
    names = []
    for transport in shown:
        look = _look(transport)
        lines.append(Line2D([0], [0], color=look.colour, ls=look.dash, lw=2.2))
        names.append(look.name)
    drawing.legend(lines, names, loc="outside lower left", ncols=2, handlelength=2.6)
