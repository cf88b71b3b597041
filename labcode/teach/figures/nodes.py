"""Who talks to whom over what: the links that NCCL's log names, drawn on the nodes. Lessons reach it through `plot`."""

import math

import matplotlib as mpl
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from labcode.doctor.nccl_log import Communicator, NcclLog
from labcode.teach.figures.style import (
    INK,
    PALE,
    PALETTE,
    RULE,
    STYLE,
    Picture,
    blank,
    canvas,
    described,
)

MAX_RANKS = 32
# colour and dash of a transport, so that nothing depends on colour alone; fast ones first
_LOOK = {
    "P2P": (PALETTE[2], "-", "P2P: from GPU to GPU"),
    "SHM": (PALETTE[1], "--", "SHM: through host memory"),
    "NET/IB": (PALETTE[0], "-.", "NET/IB: RDMA network"),
    "NET/Socket": (PALETTE[5], ":", "NET/Socket: TCP"),
}
_OTHER = (PALETTE[3], (0, (6, 1, 1, 1, 1, 1)))
_RADIUS = 0.3
_BENDS = (
    0.16,
    0.26,
    -0.26,
    0.36,
    -0.36,
    0.48,
    -0.48,
)  # of an arrow, as parts of its length: the first that hits no rank


def transports(log: NcclLog | Communicator, *, alt: str, title="") -> Picture:
    """Nodes as boxes, ranks as circles, and an arrow for each pair of ranks that NCCL has connected.

    Colour and dash say the transport, the number on an arrow how many channels it has. Under a rank stands its GPU.

    Args:
        log: What `nccl.parse` returned; of a whole log the largest communicator is drawn.
        alt: What the figure shows.

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
    places, boxes = _places(comm)
    right, top = max(x + w for x, _, w, _, _ in boxes), max(y + h for _, y, _, h, _ in boxes)
    width = min(6.6, 1.0 + 0.95 * right)
    figure, (axes,) = canvas(width, max(1.8, width * (top + 0.3) / (right + 0.3) + 0.6))
    with mpl.rc_context(STYLE):
        for x, y, w, h, name in boxes:
            style = {
                "facecolor": PALE,
                "edgecolor": RULE,
                "boxstyle": "round,pad=0,rounding_size=0.1",
                "gid": f"node {name}",
            }
            axes.add_patch(FancyBboxPatch((x, y), w, h, zorder=0, **style))
            axes.text(x + 0.14, y + h - 0.24, name, fontsize=9, va="center")
        low = 0.0
        for (source, target), counts in comm.pairs().items():
            if source in places and target in places:
                for i, (transport, channels) in enumerate(counts.items()):
                    heights = _arrow(axes, places, (source, target), transport, channels, i)
                    low, top = min(low, *heights), max(top, *heights)
        for rank, (x, y) in places.items():
            _rank(axes, comm.ranks[rank], x, y)
        axes.set(xlim=(-0.15, right + 0.15), ylim=(low - 0.15, top + 0.15))
        blank(axes)
        seen = {link.transport for link in comm.links}
        shown = [name for name in _LOOK if name in seen] + sorted(seen - set(_LOOK))
        lines = [
            Line2D([0], [0], color=_look(name)[0], ls=_look(name)[1], lw=2.2) for name in shown
        ]
        if lines:
            figure.legend(
                lines,
                [_look(name)[2] for name in shown],
                loc="outside upper left",
                ncols=2,
                handlelength=2.6,
            )
        if title:
            axes.set_title(title, loc="left")
    return Picture(figure, described(alt))


def _look(transport):
    return _LOOK.get(transport, (*_OTHER, transport))


def _places(comm):
    """({rank: (x, y) of its circle}, [(x, y, width, height, name) of each node's box]); nodes in rows of at most three.

    Two ranks stand one above the other, so that arrows between nodes do not cross them; more stand in a ring.
    """
    hosts = list(comm.hosts.items())
    most = max(len(ranks) for _, ranks in hosts)
    across = min(len(hosts), 4 if most <= 2 else 2 if most > 4 else 3)
    size = {1: (1.5, 1.7), 2: (1.5, 3.0)}.get(most, (1.8 + 0.42 * most, 2.1 + 0.42 * most))
    rows, places, boxes = math.ceil(len(hosts) / across), {}, []
    for i, (name, ranks) in enumerate(hosts):
        x, y = i % across * (size[0] + 1.1), (rows - 1 - i // across) * (size[1] + 0.8)
        boxes.append((x, y, *size, name))
        middle = (x + size[0] / 2, y + (size[1] - 0.35) / 2)
        radius = 0 if len(ranks) == 1 else (min(size) - 1.5) / 2 if most > 2 else 0.62
        for k, rank in enumerate(ranks):
            angle = math.pi * (0.5 if most <= 2 else 0.75) - 2 * math.pi * k / len(ranks)
            places[rank] = (
                middle[0] + radius * math.cos(angle),
                middle[1] + radius * math.sin(angle),
            )
    return places, boxes


def _arrow(axes, places, pair, transport, channels, nth) -> list[float]:
    """One arrow with its number; returns the heights that it passes."""
    start, end = (places[rank] for rank in pair)
    others = [place for rank, place in places.items() if rank not in pair]
    clear = (
        bend
        for bend in _BENDS
        if all(math.dist(at, o) > 1.2 * _RADIUS for at in _curve(start, end, bend) for o in others)
    )
    bend = next(clear, _BENDS[0]) + 0.16 * nth
    colour, dash, _ = _look(transport)
    line = FancyArrowPatch(
        start, end, connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>", mutation_scale=11, color=colour, lw=1.9,
        linestyle=dash, shrinkA=0, shrinkB=0, zorder=2, gid=f"{pair[0]} -> {pair[1]} {transport}",
    )  # fmt: skip
    for place, tie in ((start, line.set_patchA), (end, line.set_patchB)):
        circle = Circle(place, _RADIUS)
        circle.set_transform(axes.transData)
        tie(circle)
    axes.add_patch(line)
    curve = _curve(start, end, bend)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
    axes.text(
        *curve[len(curve) // 2],
        str(channels),
        fontsize=7.5,
        ha="center",
        va="center",
        color=INK,
        bbox=box,
        zorder=3,
    )
    return [y for _, y in curve]


def _curve(start, end, bend, steps=16):
    """Points of matplotlib's arc3: a parabola whose control point lies beside the middle."""
    (x0, y0), (x1, y1) = start, end
    cx, cy = (x0 + x1) / 2 + bend * (y1 - y0), (y0 + y1) / 2 - bend * (x1 - x0)
    parts = [((1 - t) ** 2, 2 * t * (1 - t), t**2) for t in (i / steps for i in range(steps + 1))]
    return [(a * x0 + b * cx + c * x1, a * y0 + b * cy + c * y1) for a, b, c in parts]


def _rank(axes, rank, x, y):
    axes.add_patch(
        Circle(
            (x, y),
            _RADIUS,
            facecolor="white",
            edgecolor=INK,
            lw=1.3,
            zorder=4,
            gid=f"rank {rank.rank}",
        )
    )
    axes.text(
        x,
        y + (0.07 if rank.gpu is not None else 0),
        str(rank.rank),
        ha="center",
        va="center",
        weight="bold",
        zorder=5,
    )
    if rank.gpu is not None:
        axes.text(x, y - 0.14, f"GPU {rank.gpu}", ha="center", va="center", fontsize=6, zorder=5)
