"""Drawings of data parallelism: a step, uneven shares, accumulation, memory, and buckets.

Lessons 04 and 05 use them; `plot.data_parallel` and so on are the ways in.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from course.figures.style import (
    INK,
    PALETTE,
    RULE,
    Picture,
    blank,
    canvas,
    figure,
    ink_on,
    put_text,
)

WIDTH = 2.3  # of a rank's column
GAP = 0.5
MODEL = "#DDDDDD"


@figure
def data_parallel(p: int = 4, *, alt: str) -> Picture:
    """One training step on p ranks: samples, model, own gradient, all-reduce, mean, step.

    The colour of a gradient says whose samples are in it.

    Args:
        p: Number of ranks, 2 to 4.
        alt: What the figure shows.

    Raises:
        ValueError: A number of ranks that does not fit.
    """
    if not 2 <= p <= 4:
        raise ValueError(f"p={p}: draw 2 to 4 ranks")
    picture = canvas(1.6 + 1.25 * p, 3.9, alt=alt)
    axes = picture.axes[0]
    right = p * (WIDTH + GAP) - GAP
    for rank in range(p):
        left = rank * (WIDTH + GAP)
        middle = left + WIDTH / 2
        colour = PALETTE[rank]
        put_text(axes, middle, 0.45, f"rank {rank}", 9, fontweight="bold")
        _box(axes, left, -0.8, f"share {rank}", [colour])
        _arrow(axes, middle, -0.8, -1.3)
        _box(axes, left, -2.1, "model", [MODEL])
        _arrow(axes, middle, -2.1, -2.6)
        _box(axes, left, -3.4, f"gradient {rank}", [colour])
        _arrow(axes, middle, -3.4, -3.9)
        _arrow(axes, middle, -4.6, -5.1)
        _box(axes, left, -5.9, "mean", PALETTE[:p])
        _arrow(axes, middle, -5.9, -6.4)
        _box(axes, left, -7.2, "same step", [MODEL])
    band = Rectangle((0, -4.6), right, 0.7, facecolor="white", edgecolor=INK, lw=1.4)
    axes.add_patch(band)
    put_text(axes, right / 2, -4.25, "all-reduce: add up, divide by p", 9)
    rows = {
        -0.4: "batch",
        -1.7: "forward",
        -3.0: "backward",
        -5.5: "the same\non all",
        -6.8: "optimizer",
    }
    for y, name in rows.items():
        put_text(axes, -0.25, y, name, 8.5, ha="right", color=RULE)
    axes.set_xlim(-2.2, right + 0.1)
    axes.set_ylim(-7.3, 0.8)
    blank(axes)
    axes.set_aspect("auto")
    return picture


def _box(axes: Axes, left: float, bottom: float, label: str, colours: list[str] | tuple) -> None:
    """A labelled box; several colours are stripes of it."""
    part = WIDTH / len(colours)
    for number, colour in enumerate(colours):
        axes.add_patch(Rectangle((left + number * part, bottom), part, 0.8, color=colour, lw=0))
    frame = Rectangle((left, bottom), WIDTH, 0.8, fill=False, edgecolor=RULE, lw=0.8)
    axes.add_patch(frame)
    place = (left + WIDTH / 2, bottom + 0.4)
    if len(colours) == 1:
        put_text(axes, *place, label, 8.5, color=ink_on(colours[0]))
        return
    plate = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    put_text(axes, *place, label, 8.5, color=INK, bbox=plate)


def _arrow(axes: Axes, x: float, top: float, bottom: float) -> None:
    """An arrow downwards."""
    arrow = {"arrowstyle": "-|>", "lw": 1.1, "color": INK, "shrinkA": 1, "shrinkB": 1}
    axes.annotate("", (x, bottom), (x, top), arrowprops=arrow)


# ---- uneven shares


@figure
def sample_weights(weights: Sequence[Sequence[float]], *, alt: str) -> Picture:
    """How much each sample of each rank counts, beside the weight that all should have.

    Args:
        weights: For each rank, the weights of its samples.
        alt: What the figure shows.
    """
    number_of_samples = sum(len(share) for share in weights)
    picture = canvas(6.4, 2.7, alt=alt)
    axes = picture.axes[0]
    left = 0.0
    for rank, share in enumerate(weights):
        colour = PALETTE[rank]
        places = [left + number for number in range(len(share))]
        axes.bar(places, share, width=0.86, color=colour)
        middle = left + (len(share) - 1) / 2
        name = f"rank {rank}\n{len(share)} samples"
        put_text(axes, middle, -0.004, name, 8.5, va="top")
        put_text(axes, middle, max(share) + 0.006, f"1/{round(1 / share[0])}", 9)
        left += len(share) + 0.6
    fair = 1 / number_of_samples
    axes.axhline(fair, color=INK, lw=1.2, ls="--")
    # above the last rank's bars there would be no room: all but the first are higher than the line
    label = f"1/{number_of_samples}, what each should weigh"
    put_text(axes, len(weights[0]) - 0.7, fair + 0.006, label, 9, ha="right")
    axes.set_xlim(-0.8, left + 0.6)
    axes.set_ylim(0, 0.11)
    axes.set_xticks([])
    axes.set_ylabel("weight of a sample")
    axes.set_title("The mean of the means weighs samples differently", loc="left")
    return picture


# ---- accumulation

FORWARD = PALETTE[0]  # as in the drawings of pipelines
BACKWARD = PALETTE[1]
STEP = 1.0  # width of a forward or a backward


@figure
def accumulation(m: int = 4, *, alt: str) -> Picture:
    """One step with m micro-batches on one rank: what it computes, and what is in `.grad`.

    Args:
        m: Number of micro-batches, 2 to 4.
        alt: What the figure shows.

    Raises:
        ValueError: A number of micro-batches that does not fit.
    """
    if not 2 <= m <= 4:
        raise ValueError(f"m={m}: draw 2 to 4 micro-batches")
    picture = canvas(6.6, 2.5, alt=alt)
    axes = picture.axes[0]
    for number in range(m):
        left = 2 * STEP * number
        _block(axes, left, 1.2, STEP, f"F{number}", FORWARD)
        _block(axes, left + STEP, 1.2, STEP, f"B{number}", BACKWARD)
        _arrow(axes, left + 1.5 * STEP, 1.2, 0.85)
        _stack(axes, left + STEP + 0.2, number + 1, m)
    end = 2 * STEP * m
    _block(axes, end + 0.3, 1.2, 2.1, "all-reduce", "#FFFFFF")
    _block(axes, end + 2.7, 1.2, 1.1, "step", MODEL)
    elbow = {"arrowstyle": "-|>", "lw": 1.1, "color": INK, "shrinkA": 0, "shrinkB": 1}
    elbow["connectionstyle"] = "angle,angleA=0,angleB=90,rad=0"
    axes.annotate("", (end + 1.35, 1.2), (end + 0.05, 0.4), arrowprops=elbow)
    put_text(axes, -0.25, 1.55, "computes", 9, ha="right", color=RULE)
    put_text(axes, -0.25, 0.4, ".grad", 9, ha="right", color=RULE, family="monospace")
    legend = "F: forward, B: backward of a micro-batch; each B adds its part"
    put_text(axes, end / 2, 2.25, legend, 8.5, color=RULE)
    axes.set_xlim(-1.6, end + 3.9)
    axes.set_ylim(-0.2, 2.5)
    blank(axes)
    axes.set_aspect("auto")
    return picture


def _block(axes: Axes, left: float, bottom: float, width: float, label: str, colour: str) -> None:
    box = Rectangle((left, bottom), width, 0.7, facecolor=colour, edgecolor=INK, lw=0.8)
    axes.add_patch(box)
    put_text(axes, left + width / 2, bottom + 0.35, label, 8.5, color=ink_on(colour))


def _stack(axes: Axes, left: float, filled: int, m: int) -> None:
    """What is in `.grad` after some micro-batches: one part of each."""
    height = 0.8 / m
    for part in range(m):
        bottom = height * part
        colour = BACKWARD if part < filled else "#FFFFFF"
        box = Rectangle((left, bottom), 0.6, height, facecolor=colour, edgecolor=RULE, lw=0.6)
        axes.add_patch(box)
        if part < filled:
            put_text(axes, left + 0.3, bottom + height / 2, str(part), 6.5, color=ink_on(colour))


# ---- memory

# What a rank keeps for each parameter; grey, as it is the same on all ranks.
KEPT = ("weights", "gradients", "Adam: mean", "Adam: square")
DIVIDED_LATER = """16 bytes a parameter,
the same on every rank

Divided in lessons
09 tensor parallel
12 pipeline parallel
13 ZeRO, FSDP"""
DIVIDED_HERE = """a share of the batch,
divided here; lessons 10
and 11 divide it further"""


@figure
def copies(p: int = 4, *, alt: str) -> Picture:
    """What each rank of data parallelism keeps, and which lesson divides it.

    Args:
        p: Number of ranks.
        alt: What the figure shows.
    """
    picture = canvas(6.9, 3.1, alt=alt)
    axes = picture.axes[0]
    column = 1.9
    for rank in range(p):
        left = rank * column
        put_text(axes, left + 0.8, 4.35, f"rank {rank}", 9, fontweight="bold")
        for row, name in enumerate(KEPT):
            _kept(axes, left, 3.25 - row * 0.85, name, MODEL)
        _kept(axes, left, -0.4, f"activations {rank}", PALETTE[rank])
    for row in range(len(KEPT)):
        put_text(axes, -0.15, 3.62 - row * 0.85, "4 B", 9, ha="right")
    right = p * column
    axes.plot([right, right + 0.15, right + 0.15, right], [4.0, 4.0, 0.7, 0.7], color=INK, lw=1)
    put_text(axes, right + 0.35, 2.35, DIVIDED_LATER, 8.5, ha="left")
    put_text(axes, right + 0.35, -0.02, DIVIDED_HERE, 8.5, ha="left")
    axes.set_xlim(-0.8, right + 3.4)
    axes.set_ylim(-0.55, 4.7)
    blank(axes)
    axes.set_aspect("auto")
    return picture


def _kept(axes: Axes, left: float, bottom: float, label: str, colour: str) -> None:
    box = Rectangle((left, bottom), 1.6, 0.75, facecolor=colour, edgecolor=INK, lw=0.8)
    axes.add_patch(box)
    put_text(axes, left + 0.8, bottom + 0.37, label, 7.5, color=ink_on(colour))


# ---- buckets


@figure
def buckets(
    sizes: Sequence[int], assigned: Sequence[Sequence[int]], limit: int, *, alt: str
) -> Picture:
    """Parameters in the order of forward, and the messages that their gradients travel in.

    Args:
        sizes: Sizes of the gradients, in any unit; the drawing is to scale.
        assigned: For each message, the numbers of the parameters in it, as they stand in its row.
        limit: The most that a message may hold.
        alt: What the figure shows.
    """
    picture = canvas(6.6, 2.4, alt=alt)
    axes = picture.axes[0]
    total = sum(sizes)
    gap = 0.02 * total
    colour_by_param = {}
    for number, bucket in enumerate(assigned):
        for index in bucket:
            colour_by_param[index] = PALETTE[number]
    left = 0.0
    middles = []
    for index, size in enumerate(sizes):
        _gradient(axes, left, 2.0, size, f"g{index}: {size}", colour_by_param[index])
        middles.append(left + size / 2)
        left += size + gap
    end = left - gap
    # messages from the right to the left: the first one to leave lies under the last parameter
    for number, bucket in enumerate(assigned):
        length = sum(sizes[index] for index in bucket)
        end -= length
        place = end
        for index in bucket:
            _gradient(axes, place, 0.3, sizes[index], f"g{index}", PALETTE[number])
            middle = place + sizes[index] / 2
            arrow = {"arrowstyle": "-|>", "lw": 0.9, "color": RULE}
            axes.annotate("", (middle, 1.0), (middles[index], 2.0), arrowprops=arrow)
            place += sizes[index]
        frame = Rectangle((end, 0.3), length, 0.7, fill=False, edgecolor=INK, lw=1.8)
        axes.add_patch(frame)
        label = f"message {number + 1}: {length} of {limit}"
        put_text(axes, end + length / 2, 0.05, label, 8.5, va="top")
        end -= 2.5 * gap
    put_text(axes, -gap, 2.35, "gradients", 9, ha="right", color=RULE)
    put_text(axes, -gap, 0.65, "one row each", 9, ha="right", color=RULE)
    axes.annotate("", (0, 2.95), (left - gap, 2.95), arrowprops={"arrowstyle": "-|>", "color": INK})
    put_text(axes, left / 2, 3.15, "backward reaches them in this direction", 8.5)
    axes.set_xlim(-0.2 * total, left + gap)
    axes.set_ylim(-0.35, 3.4)
    blank(axes)
    axes.set_aspect("auto")
    return picture


def _gradient(
    axes: Axes, left: float, bottom: float, width: float, label: str, colour: str
) -> None:
    box = Rectangle((left, bottom), width, 0.7, facecolor=colour, edgecolor="white", lw=1)
    axes.add_patch(box)
    put_text(axes, left + width / 2, bottom + 0.35, label, 8, color=ink_on(colour))


# ---- clipping


@figure
def clipping(gradients: Sequence[float], max_norm: float, *, alt: str) -> Picture:
    """Numbers as arrows: averaged and then clipped, beside clipped and then averaged.

    Args:
        gradients: One number for each rank.
        max_norm: The largest length that is allowed.
        alt: What the figure shows.
    """
    clipped = [max(-max_norm, min(max_norm, gradient)) for gradient in gradients]
    mean = sum(gradients) / len(gradients)
    kept = max(-max_norm, min(max_norm, mean))
    longest = max(abs(gradient) for gradient in gradients)
    picture = canvas(6.6, 2.1, alt=alt, columns=2)
    cases = (("averaged, then clipped", gradients, kept), ("clipped, then averaged", clipped, None))
    for axes, (title, numbers, result) in zip(picture.axes, cases):
        end = sum(numbers) / len(numbers) if result is None else result
        for rank, number in enumerate(numbers):
            _number(axes, -rank, number, f"rank {rank}: {number:g}", PALETTE[rank])
        _number(axes, -len(numbers), end, f"step: {end:g}", INK)
        for limit in (-max_norm, max_norm):
            axes.axvline(limit, color=RULE, lw=1, ls=":")
        axes.set_title(title, fontsize=10)
        axes.set_xlim(-longest - 0.3, longest + 0.3)
        axes.set_ylim(-len(numbers) - 0.5, 0.8)
        axes.set_yticks([])
        axes.set_xticks([-max_norm, 0, max_norm], ["-c", "0", "c"])
        axes.grid(False)
        axes.spines["left"].set_visible(False)
    return picture


def _number(axes: Axes, y: float, number: float, label: str, colour: str) -> None:
    """An arrow from 0 to a number, or a dot where it is 0, with its label above."""
    if number:
        arrow = {"arrowstyle": "-|>", "lw": 2.2, "color": colour, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (number, y), (0, y), arrowprops=arrow)
    else:
        axes.plot([0], [y], "o", color=colour, ms=7)
    plate = {"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none"}
    put_text(axes, number / 2, y + 0.34, label, 8.5, bbox=plate)
