"""Drawings of a pipeline: its stages with their messages, its time lines, a backward in two halves.

Lessons 12 and 15 use them; `plot.stages`, `plot.pipeline` and `plot.halves` are the way in. F, B, I
and W have the same colours in all of them, and each block carries the number of its micro-batch.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from course.figures.style import (
    INK,
    PALE,
    RULE,
    Picture,
    Point,
    canvas,
    figure,
    ink_on,
    put_text,
)
from labcode.perf.pipeline import Bar, Timeline

WIDTH_IN = 7.2
AXIS_IN = 6.1  # about the length of the time axis


class Kind(NamedTuple):
    """How the blocks of one kind of action look, and what the key says about them."""

    colour: str
    name: str


# They differ in lightness too: F dark, I and B in the middle, W light.
KINDS = {
    "F": Kind("#0072B2", "forward"),
    "B": Kind("#E69F00", "backward"),
    "I": Kind("#CC79A7", "input half of backward"),
    "W": Kind("#F0E442", "weight half of backward"),
}
MESSAGES = {"activation": KINDS["F"].colour, "gradient": "#B87F00"}  # B's colour, dark enough


class Note(NamedTuple):
    """A letter in a gap of a time line.

    Args:
        rank: Rank whose row it is in.
        start_s, stop_s: The gap.
        text: One or two letters.
    """

    rank: int
    start_s: float
    stop_s: float
    text: str


# ---- time lines


@figure
def pipeline(
    lines: Mapping[str, Timeline],
    *,
    title: str,
    alt: str,
    notes: Sequence[Note] = (),
    lanes: Mapping[str, str] | None = None,
) -> Picture:
    """Time lines of a pipeline below each other, on one axis in milliseconds.

    A block is one action: its colour and letter say which kind, its number which micro-batch; in
    narrow blocks the letter stands above the number. Where a rank
    has several stages, the blocks of its first one are full and those of later ones pale.

    Args:
        lines: {what it is: time line}, such as "simulated" and "measured".
        title: What the figure shows, as a sentence.
        alt: The same for those who cannot see it.
        notes: Letters in gaps of the first time line.
        lanes: {name of a time line: what its rows are}, where they are not ranks.
    """
    num_rows = sum(len(line.ranks) for line in lines.values())
    total_ms = 1e3 * max(line.total_s for line in lines.values())
    row_in = 0.27
    if any(_is_narrow(line, total_ms) for line in lines.values()):
        row_in = 0.36  # two lines of text in a block
    height_in = 1.15 + row_in * num_rows + 0.42 * len(lines)
    picture = canvas(WIDTH_IN, height_in, alt=alt, rows=len(lines))
    for number, (name, line) in enumerate(lines.items()):
        axes = picture.axes[number]
        lane = "rank" if lanes is None else lanes.get(name, "rank")
        _draw_line(axes, line, total_ms, lane)
        axes.set_title(name, loc="left", fontsize=9, pad=3)
        if number == 0:
            for note in notes:
                _draw_note(axes, note)
        is_last = number == len(lines) - 1
        if is_last:
            axes.set_xlabel("ms")
        else:
            axes.tick_params(labelbottom=False)
    picture.figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    _draw_key(picture, list(lines.values()))
    return picture


def _draw_line(axes: Axes, line: Timeline, total_ms: float, lane: str) -> None:
    first = _first_stages(line.rows)
    is_narrow = _is_narrow(line, total_ms)
    ranks = line.ranks
    for row, rank in enumerate(ranks):
        # what is not covered by a block is a rank that waits
        axes.barh(row, 1e3 * line.total_s, height=0.8, color=PALE, edgecolor="none")
        put_text(axes, -0.008 * total_ms, row, f"{lane} {rank}", 8, ha="right")
    for bar in line.rows:
        is_first = bar.action.stage == first[bar.rank]
        _draw_block(axes, ranks.index(bar.rank), bar, is_first, is_narrow)
    axes.set_ylim(len(ranks) - 0.5, -0.5)  # rank 0 on top
    axes.set_xlim(0, total_ms)
    axes.set_yticks([])
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(labelsize=8)


def _is_narrow(line: Timeline, total_ms: float) -> bool:
    """Whether a letter and a number do not fit beside each other into its shortest block."""
    shortest_ms = 1e3 * min(bar.duration_s for bar in line.rows)
    return shortest_ms / total_ms * AXIS_IN <= 0.15


def _first_stages(rows: Sequence[Bar]) -> dict[int, int]:
    """{rank: its lowest stage}."""
    first: dict[int, int] = {}
    for bar in rows:
        first[bar.rank] = min(bar.action.stage, first.get(bar.rank, bar.action.stage))
    return first


def _draw_block(axes: Axes, row: int, bar: Bar, is_first: bool, is_narrow: bool) -> None:
    colour = KINDS[bar.action.kind].colour
    fill = colour if is_first else _pale(colour)
    start_ms = 1e3 * bar.start_s
    length_ms = 1e3 * bar.duration_s
    axes.barh(row, length_ms, left=start_ms, height=0.8, color=fill, edgecolor="white", lw=0.7)
    middle_ms = start_ms + length_ms / 2
    letter = bar.action.kind
    number = str(bar.action.microbatch)
    colour = ink_on(fill)
    if is_narrow:
        put_text(axes, middle_ms, row - 0.19, letter, 7, color=colour)
        put_text(axes, middle_ms, row + 0.19, number, 7, color=colour)
    else:
        put_text(axes, middle_ms, row, f"{letter}{number}", 6.5, color=colour)


def _pale(colour: str) -> str:
    """The colour mixed with white."""
    mixed = [(channel + 2 * 255) // 3 for channel in bytes.fromhex(colour[1:])]
    return "#" + bytes(mixed).hex().upper()


def _draw_note(axes: Axes, note: Note) -> None:
    start_ms = 1e3 * note.start_s
    length_ms = 1e3 * (note.stop_s - note.start_s)
    frame = Rectangle((start_ms, note.rank - 0.36), length_ms, 0.72, fill=False)
    frame.set(edgecolor=INK, linestyle="--", linewidth=0.9)
    axes.add_patch(frame)
    middle = start_ms + length_ms / 2
    put_text(axes, middle, note.rank, note.text, 8, style="italic", weight="bold")


def _draw_key(picture: Picture, lines: Sequence[Timeline]) -> None:
    """Which colour is which, and what pale blocks are, if there are any."""
    found = set()
    num_stages = 0
    for line in lines:
        for bar in line.rows:
            found.add(bar.action.kind)
            num_stages = max(num_stages, bar.action.stage + 1)
    signs = []
    names = []
    for letter, kind in KINDS.items():
        if letter in found:
            signs.append(Rectangle((0, 0), 1, 1, facecolor=kind.colour, edgecolor="none"))
            names.append(f"{letter}  {kind.name}")
    if num_stages > len(lines[0].ranks):
        pales = []
        for letter in KINDS:
            if letter in found:
                pale = _pale(KINDS[letter].colour)
                pales.append(Rectangle((0, 0), 1, 1, facecolor=pale, edgecolor="none"))
        signs.append(tuple(pales))
        names.append("pale: the rank's later stage")
    signs.append(Rectangle((0, 0), 1, 1, facecolor=PALE, edgecolor=RULE, lw=0.5))
    names.append("waits")
    picture.figure.legend(
        signs,
        names,
        loc="outside lower left",
        ncols=len(names),
        fontsize=8,
        handlelength=1.0,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.1)},
    )


# ---- stages and their messages


@figure
def stages(num_ranks: int, layers_per_rank: int, *, title: str, alt: str) -> Picture:
    """The stages of a model, each on its rank, and what travels between them.

    Args:
        num_ranks: Ranks of the pipeline, 2 to 5.
        layers_per_rank: Layers of each.
        title: What the figure shows, as a sentence.
        alt: The same for those who cannot see it.
    """
    if not 2 <= num_ranks <= 5:
        raise ValueError(f"num_ranks={num_ranks}: draw 2 to 5 ranks")
    picture = canvas(WIDTH_IN, 2.75, alt=alt)
    axes = picture.axes[0]
    for rank in range(num_ranks):
        left = 3.0 * rank
        first = rank * layers_per_rank
        last = first + layers_per_rank - 1
        _draw_box(axes, (left, 0), 1.7, 2.2)
        put_text(axes, left + 0.85, 1.95, f"rank {rank}", 9, weight="bold")
        put_text(axes, left + 0.85, 1.6, f"layers {first}-{last}", 8)
        put_text(axes, left + 0.85, 1.0, "keeps x and y", 7.5, style="italic")
        put_text(axes, left + 0.85, 0.7, "from F to B", 7.5, style="italic")
        if rank < num_ranks - 1:
            _draw_message(axes, (left + 1.75, 1.55), (left + 2.95, 1.55), "activation", above=True)
            _draw_message(axes, (left + 2.95, 0.65), (left + 1.75, 0.65), "gradient", above=False)
    end = 3.0 * (num_ranks - 1) + 1.7
    _arrow(axes, (0.85, 2.95), (0.85, 2.25), INK)
    put_text(axes, 0.85, 3.1, "inputs", 8)
    _arrow(axes, (end - 0.85, 2.95), (end - 0.85, 2.25), INK)
    put_text(axes, end - 0.85, 3.1, "targets", 8)
    _arrow(axes, (end - 0.85, -0.05), (end - 0.85, -0.6), INK)
    put_text(axes, end - 0.85, -0.78, "loss", 8)
    axes.set_xlim(-0.15, end + 0.15)
    axes.set_ylim(-1.0, 3.3)
    axes.set_axis_off()
    picture.figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return picture


def _draw_box(axes: Axes, corner: Point, width: float, height: float, fill: str = PALE) -> None:
    style = "round,pad=0,rounding_size=0.12"
    box = FancyBboxPatch(corner, width, height, boxstyle=style)
    box.set(facecolor=fill, edgecolor=INK, linewidth=1.1)
    axes.add_patch(box)


def _draw_message(axes: Axes, tail: Point, tip: Point, kind: str, *, above: bool) -> None:
    """An arrow with its name, and on the other side of it which action of the sender makes it."""
    colour = MESSAGES[kind]
    _arrow(axes, tail, tip, colour)
    middle = (tail[0] + tip[0]) / 2
    maker = "after F" if kind == "activation" else "after B"
    offset = 0.2 if above else -0.22
    put_text(axes, middle, tail[1] + offset, kind, 8, color=colour, weight="bold")
    put_text(axes, middle, tail[1] - offset, maker, 7.5, color=INK)


def _arrow(axes: Axes, tail: Point, tip: Point, colour: str) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 12, "shrinkA": 0, "shrinkB": 0}
    arrow = FancyArrowPatch(tail, tip, **style)
    arrow.set(color=colour, linewidth=1.8)
    axes.add_patch(arrow)


# ---- a backward in two halves


@figure
def halves(*, title: str, alt: str) -> Picture:
    """What the two halves of a linear layer's backward read, what they give, and who waits for it.

    Args:
        title: What the figure shows, as a sentence.
        alt: The same for those who cannot see it.
    """
    picture = canvas(WIDTH_IN, 2.3, alt=alt)
    axes = picture.axes[0]
    _half(axes, 2.0, "I", "gradient of x", reads="dy and the weight A", gives="dx")
    _half(axes, 0.5, "W", "gradient of A", reads="dy and the input x", gives="dA")
    put_text(axes, 9.25, 2.35, "the rank before waits for it:", 8.5, ha="left")
    put_text(axes, 9.25, 2.05, "send it at once", 8.5, ha="left", weight="bold")
    put_text(axes, 9.25, 0.85, "only the optimizer waits for it:", 8.5, ha="left")
    put_text(axes, 9.25, 0.55, "do it in a gap", 8.5, ha="left", weight="bold")
    axes.set_xlim(0, 14.2)
    axes.set_ylim(0, 3.1)
    axes.set_axis_off()
    picture.figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return picture


def _half(axes: Axes, bottom: float, letter: str, what: str, *, reads: str, gives: str) -> None:
    colour = KINDS[letter].colour
    middle = bottom + 0.2
    put_text(axes, 2.9, middle, reads, 8.5, ha="right")
    _arrow(axes, (3.0, middle), (3.85, middle), INK)
    _draw_box(axes, (3.9, bottom - 0.3), 3.1, 1.0, fill=colour)
    put_text(axes, 5.45, middle, f"{letter}:  {what}", 10, color=ink_on(colour))
    _arrow(axes, (7.05, middle), (7.95, middle), INK)
    put_text(axes, 8.5, middle, gives, 10)
