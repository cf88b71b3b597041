"""Drawings of sharded data parallelism: what each stage of ZeRO keeps, and what it sends when.

Lesson 13 uses them; `plot.zero` and `plot.zero_steps` are the ways in.
"""

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from labcode.perf.state_memory import state_bytes
from labcode.teach.figures.style import (
    INK,
    PALE,
    PALETTE,
    RULE,
    Picture,
    blank,
    canvas,
    figure,
    ink_on,
    put_text,
    swatch,
)

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
UPDATE = (6.4, 7.6)
AFTER = (7.8, 9.8)
PHASES = (("forward", FORWARD), ("backward", BACKWARD), ("optimizer", UPDATE))
# For each row of the drawing: (label, colour of what travels, where).
SENT = {
    "data parallel": [("all-reduce: gradients", GRADIENTS, BACKWARD)],
    "stages 1 and 2": [
        ("reduce-scatter: gradients", GRADIENTS, BACKWARD),
        ("all-gather:\nweights", WEIGHTS, AFTER),
    ],
    "stage 3": [
        ("G", WEIGHTS, (0.0, 0.95)),
        ("G", WEIGHTS, (1.05, 2.0)),
        ("G", WEIGHTS, (2.2, 3.15)),
        ("R", GRADIENTS, (3.25, 4.15)),
        ("G", WEIGHTS, (4.25, 5.2)),
        ("R", GRADIENTS, (5.3, 6.2)),
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
        for phase, (start, stop) in PHASES:
            _draw_box(axes, start, stop, y, 0.7, PALE, phase)
        for label, colour, (start, stop) in messages:
            _draw_box(axes, start, stop, y - 1.0, 0.85, colour, label)
        cost = f"{TIMES_N[name]} (p-1)/p N"
        put_text(axes, 10.0, y - 0.3, cost, 9, ha="left")
    below = "each unit, here two: G all-gather of its weights, R reduce-scatter of its gradients"
    put_text(axes, 0.0, -6.1, below, 8.5, ha="left")
    put_text(axes, 10.0, 1.15, "numbers sent", 8.5, ha="left", color=RULE)
    axes.set_xlim(-2.6, 12.1)
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
