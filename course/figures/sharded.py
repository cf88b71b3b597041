"""Drawings of sharded data parallelism: what each stage of ZeRO keeps, and what it sends when.

Lesson 13 uses them; `plot.zero`, `plot.zero_steps`, `plot.tokens_that_hide` and
`plot.hybrid_sharding` are the ways in.
"""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

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
    swatch,
)
from labcode.perf.state_memory import state_bytes

WEIGHTS = PALETTE[0]
GRADIENTS = PALETTE[1]
OPTIMIZER = PALETTE[2]
KINDS = (("weights", WEIGHTS, 2), ("gradients", GRADIENTS, 2), ("optimizer", OPTIMIZER, 12))
WHOLE = 16  # bytes for each parameter
GAP = 2.0
HEIGHT = 1.0
ROW = 1.7


@figure
def zero(num_ranks: int = 4, *, alt: str, title: str = "") -> Picture:
    """What each rank keeps of the 16 bytes of a parameter without ZeRO and at its three stages.

    Each box is a rank. What is divided keeps its place, and the parts of other ranks are empty.

    Args:
        num_ranks: 2 to 6.
        alt: What the figure shows.
        title: Above the figure.

    Raises:
        ValueError: A number of ranks that cannot be drawn.
    """
    if not 2 <= num_ranks <= 6:
        raise ValueError(f"num_ranks={num_ranks}: draw 2 to 6 ranks")
    picture = canvas(7.0, 3.3, alt=alt)
    axes = picture.axes[0]
    right = num_ranks * (WHOLE + GAP)
    for stage in range(4):
        y = -ROW * stage
        name = f"stage {stage}" if stage else "no ZeRO"
        put_text(axes, -1, y + HEIGHT / 2, name, 9, ha="right")
        for rank in range(num_ranks):
            _draw_rank(axes, rank * (WHOLE + GAP), y, stage, rank, num_ranks)
        kept = state_bytes(
            1, stage, num_ranks, weight_bytes=2, gradient_bytes=2, optimizer_bytes=12
        )
        put_text(axes, right, y + HEIGHT / 2, f"{kept.total:g} bytes", 9, ha="left")
    for rank in range(num_ranks):
        middle = rank * (WHOLE + GAP) + WHOLE / 2
        put_text(axes, middle, HEIGHT + 0.35, f"rank {rank}", 9)
    axes.set_xlim(-12, right + 13)
    axes.set_ylim(-3 * ROW - 0.2, HEIGHT + 0.8)
    blank(axes)
    axes.set_aspect("auto")
    signs = [swatch(colour) for _, colour, _ in KINDS]
    names = [f"{name}, {num_bytes} bytes" for name, _, num_bytes in KINDS]
    picture.figure.legend(signs, names, loc="outside lower center", ncols=3)
    if title:
        axes.set_title(title, loc="left")
    return picture


def _draw_rank(axes: Axes, left: float, bottom: float, stage: int, rank: int, parts: int) -> None:
    """The 16 bytes of one rank; of what is divided only its own part is filled."""
    divided_from = {"weights": 3, "gradients": 2, "optimizer": 1}
    x = left
    for name, colour, num_bytes in KINDS:
        first = x
        length: float = num_bytes
        if stage >= divided_from[name]:
            length = num_bytes / parts
            first = x + rank * length
        axes.add_patch(Rectangle((first, bottom), length, HEIGHT, color=colour, lw=0, gid=name))
        x += num_bytes
    frame = Rectangle((left, bottom), WHOLE, HEIGHT, fill=False, edgecolor=RULE, lw=0.9)
    axes.add_patch(frame)


# ---- what travels in a step

FORWARD = (0.0, 2.0)
BACKWARD = (2.2, 6.2)
AFTER = (8.1, 10.1)
PHASES = [("forward", FORWARD), ("backward", BACKWARD), ("optimizer", (6.4, 7.9))]
# Of stage 3: a unit computes when its own weights are there, so the first gather comes before it.
UNITS = [
    ("F1", (1.0, 2.0)),
    ("F2", (2.0, 3.0)),
    ("B2", (4.0, 6.0)),
    ("B1", (6.0, 8.0)),
    ("optimizer", (9.1, 10.6)),
]
COMPUTED = {"data parallel": PHASES, "stages 1 and 2": PHASES, "stage 3": UNITS}
# For each row of the drawing: (label, colour of what travels, where).
SENT = {
    "data parallel": [("all-reduce: gradients", GRADIENTS, BACKWARD)],
    "stages 1 and 2": [
        ("reduce-scatter: gradients", GRADIENTS, BACKWARD),
        ("all-gather:\nweights", WEIGHTS, AFTER),
    ],
    "stage 3": [
        ("G1", WEIGHTS, (0.0, 0.95)),
        ("G2", WEIGHTS, (1.05, 1.95)),
        ("G2", WEIGHTS, (3.05, 3.95)),
        ("G1", WEIGHTS, (4.05, 4.95)),
        ("R2", GRADIENTS, (6.05, 6.95)),
        ("R1", GRADIENTS, (8.05, 8.95)),
    ],
}
TIMES_N = {"data parallel": 2, "stages 1 and 2": 2, "stage 3": 3}


@figure
def zero_steps(*, alt: str, title: str = "") -> Picture:
    """The collectives of one step of data parallelism and of the stages of ZeRO, in order of time.

    Args:
        alt: What the figure shows.
        title: Above the figure.
    """
    picture = canvas(7.0, 3.4, alt=alt)
    axes = picture.axes[0]
    for number, (name, messages) in enumerate(SENT.items()):
        y = -2.3 * number
        put_text(axes, -0.2, y + 0.35, name, 9, ha="right", fontweight="bold")
        put_text(axes, -0.2, y - 0.6, "on the link", 8.5, ha="right", color=RULE)
        for phase, (start, stop) in COMPUTED[name]:
            _draw_box(axes, start, stop, y, 0.7, PALE, phase)
        for label, colour, (start, stop) in messages:
            _draw_box(axes, start, stop, y - 1.0, 0.85, colour, label)
        cost = f"{TIMES_N[name]} (p-1)/p N"
        put_text(axes, 10.9, y - 0.3, cost, 9, ha="left")
    below = (
        "two units: F forward, B backward, G all-gather of its weights, "
        "R reduce-scatter of its gradients"
    )
    put_text(axes, 0.0, -6.1, below, 8.5, ha="left")
    put_text(axes, 10.9, 1.15, "numbers sent", 8.5, ha="left", color=RULE)
    axes.set_xlim(-2.6, 13.0)
    axes.set_ylim(-6.5, 1.5)
    blank(axes)
    axes.set_aspect("auto")
    if title:
        axes.set_title(title, loc="left")
    return picture


def _draw_box(
    axes: Axes, start: float, stop: float, bottom: float, height: float, colour: str, label: str
) -> None:
    corner = (start, bottom)
    box = Rectangle(corner, stop - start, height, facecolor=colour, edgecolor=RULE, lw=0.8)
    axes.add_patch(box)
    ink = INK if colour == PALE else ink_on(colour)
    put_text(axes, (start + stop) / 2, bottom + height / 2, label, 8, color=ink)


# ---- how many tokens hide a message

FEWEST = 128
MOST = 65536


@figure
def tokens_that_hide(
    flops_per_s: float, bytes_per_s: Mapping[str, float], *, alt: str, title: str = ""
) -> Picture:
    """Time to gather a layer's weights over the time of its forward, against tokens per rank.

        gather / forward = (2 bytes / bandwidth) / (2 FLOPs * tokens / speed)

    for each parameter. It is 1 at flops_per_s / bytes_per_s tokens, marked with a diamond.

    Args:
        flops_per_s: What a rank computes.
        bytes_per_s: {name of a link: its bandwidth}.
        alt: What the figure shows.
        title: Above the figure.
    """
    picture = canvas(6.2, 3.4, alt=alt)
    axes = picture.axes[0]
    axes.axhspan(1e-3, 1, color=PALE, lw=0, zorder=0)
    for number, (name, bandwidth) in enumerate(bytes_per_s.items()):
        enough = flops_per_s / bandwidth
        ends = [FEWEST, MOST]
        ratios = [enough / tokens for tokens in ends]
        style = ("-", "--", "-.")[number % 3]
        axes.plot(ends, ratios, color=colour_of(number), ls=style, lw=1.8, label=name)
        axes.plot([enough], [1], marker="D", color=colour_of(number), ms=7, mec=INK)
        put_text(axes, enough * 1.12, 1.25, f"{enough:,.0f}", 9, ha="left", va="bottom")
    axes.axhline(1, color=INK, lw=1)
    axes.set(xscale="log", yscale="log", xlim=(FEWEST, MOST), ylim=(0.02, 60))
    put_text(axes, 150, 0.03, "the messages hide behind computing", 8.5, ha="left", va="bottom")
    put_text(axes, 60_000, 3.2, "the link sets the pace", 8.5, ha="right", va="bottom")
    ticks = [2**power for power in range(7, 17, 1)]
    labels = []
    for tick in ticks:
        labels.append(f"{tick:,}" if tick < 10_000 else f"{tick // 1024}k")
    axes.set_xticks(ticks, labels)
    axes.set_xticks([], minor=True)
    ratios = [0.1, 1, 10]
    axes.set_yticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.set_xlabel("tokens for each rank in a micro-batch")
    axes.set_ylabel("sending / computing")
    axes.legend(loc="upper right")
    if title:
        axes.set_title(title, loc="left")
    return picture


# ---- a copy in each node


@figure
def hybrid_sharding(
    nodes: int = 2, ranks_per_node: int = 4, *, alt: str, title: str = ""
) -> Picture:
    """Which part of the weights each rank keeps if every node has its own copy, and what travels.

    Args:
        nodes: Number of nodes, at least 2.
        ranks_per_node: Number of ranks on a node, at least 2.
        alt: What the figure shows.
        title: Above the figure.
    """
    picture = canvas(6.4, 1.2 + 1.15 * nodes, alt=alt)
    axes = picture.axes[0]
    right = 2.0 * ranks_per_node
    for node in range(nodes):
        y = -2.2 * node
        frame = Rectangle((-0.3, y - 0.5), right + 0.2, 1.6, facecolor=PALE, edgecolor=RULE)
        axes.add_patch(frame)
        put_text(axes, -0.5, y + 0.3, f"node {node}", 9, ha="right")
        inside = "gathers and reduce-scatters\nstay inside the node"
        put_text(axes, right + 0.2, y + 0.3, inside, 8.5, ha="left")
        for place in range(ranks_per_node):
            rank = node * ranks_per_node + place
            label = f"rank {rank}\npart {place}"
            _draw_box(axes, 2.0 * place, 2.0 * place + 1.6, y - 0.2, 1.0, colour_of(place), label)
    arrow = {"arrowstyle": "<->", "color": INK, "lw": 1.2}
    for node in range(nodes - 1):
        top = -2.2 * node - 0.22
        for place in range(ranks_per_node):
            x = 2.0 * place + 0.8
            axes.annotate("", (x, top - 1.16), (x, top), arrowprops=arrow)
        between = "all-reduce of gradients,\n1/s of them for each rank"
        put_text(axes, right + 0.2, top - 0.58, between, 8.5, ha="left")
    axes.set_xlim(-2.0, right + 4.4)
    axes.set_ylim(-2.2 * (nodes - 1) - 0.7, 1.3)
    blank(axes)
    axes.set_aspect("auto")
    if title:
        axes.set_title(title, loc="left")
    return picture
