"""Drawings of data that moves between ranks: collectives, and the ring all-reduce step by step.

Lessons 00 and 01 use them; `plot.collective`, `plot.collectives` and `plot.ring` are the way in.
"""

import string
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from course.figures.style import (
    INK,
    PALETTE,
    RULE,
    Picture,
    Point,
    blank,
    canvas,
    figure,
    ink_on,
    put_text,
    swatch,
)

# Lengths in cells; a cell is one slot of a rank's memory.
GAP = 1.6  # between before and after
LABELS = 1.6  # for "rank 0"
ROW = 0.8  # from one rank to the next


# ---- what each rank holds


class Box(NamedTuple):
    """What one slot of a rank's memory holds: its label, and the ranks whose data is in it."""

    label: str
    sources: tuple[int, ...]


# Memory of one rank: {slot: box}. A slot that is not there is not drawn: the rank needs no memory
# for it.
Memory = dict[int, Box]
ROOM = Box("", ())  # a tensor of which only the room counts: it is overwritten
UNDEFINED = Box("?", ())  # what is left in a tensor that was worked on
State = list[Memory]  # of all ranks


def _collective_states(n: int) -> dict[str, tuple[State, State]]:
    """For each collective what the ranks hold before and after."""
    letters = string.ascii_uppercase[:n]
    everyone = tuple(range(n))
    total = "+".join(letters)
    if n > 4:
        total = f"{letters[0]}+…+{letters[-1]}"

    whole: State = []  # rank 1 holds B
    parts: State = []  # rank 1 holds B0, B1, B2, B3
    sums: State = []  # rank 1 holds the sum of A1, B1, C1, D1
    dealt: State = []  # rank 1 holds A1, one part of rank 0's
    transposed: State = []  # rank 1 holds A1, B1, C1, D1
    gathered: Memory = {}  # A, B, C and D
    for rank, letter in enumerate(letters):
        box = Box(letter, (rank,))
        whole.append({0: box})
        gathered[rank] = box
        parts.append({i: Box(f"{letter}{i}", (rank,)) for i in range(n)})
        sums.append({0: Box(f"Σ{rank}", everyone)})
    for rank in range(n):
        column = {source: memory[rank] for source, memory in enumerate(parts)}
        transposed.append(column)
        dealt.append({0: column[0]})
    summed: Memory = {0: Box(total, everyone)}
    nothing: State = [{}] * (n - 1)  # of all ranks but the root
    room: State = [{0: ROOM}] * (n - 1)
    undefined: State = [{0: UNDEFINED}] * (n - 1)

    return {
        "broadcast": ([whole[0], *room], [whole[0]] * n),
        "scatter": ([parts[0], *nothing], dealt),
        "gather": (whole, [gathered, *nothing]),
        "all_gather": (whole, [gathered] * n),
        "reduce": (whole, [summed, *undefined]),
        "all_reduce": (whole, [summed] * n),
        "reduce_scatter": (parts, sums),
        "all_to_all": (parts, transposed),
    }


# ---- one collective


class _Side:
    """The memories of all ranks before or after a collective; lengths in cells.

    Args:
        title: "before" or "after".
        state: What the ranks hold.
        start: Place of its left edge.
        cell: Width of a slot.
    """

    def __init__(self, title: str, state: State, start: float, cell: float) -> None:
        self.title = title
        self.state = state
        self.start = start
        self.cell = cell
        last_slots = [max(memory, default=0) for memory in state]
        self.num_slots = 1 + max(last_slots)
        self.stop = start + self.num_slots * cell

    def draw(self, axes: Axes, scale: float, size: float) -> None:
        middle = (self.start + self.stop) / 2
        put_text(axes, middle, 0.25, self.title, size)
        for rank, memory in enumerate(self.state):
            bottom = -ROW * rank - 0.76
            for slot, box in memory.items():
                corner = (self.start + slot * self.cell, bottom)
                _draw_slot(axes, corner, self.cell, box, scale)


class _Panel:
    """One collective: its two sides, and how wide both are together, in cells.

    Args:
        name: Name of the collective.
        n: Number of ranks.

    Raises:
        ValueError: An unknown collective, or a number of ranks that does not fit.
    """

    def __init__(self, name: str, n: int) -> None:
        if not 2 <= n <= len(PALETTE):
            raise ValueError(f"n={n}: draw 2 to {len(PALETTE)} ranks")
        states = _collective_states(n)
        if name not in states:
            raise ValueError(f"there is no drawing of {name!r}: choose one of {', '.join(states)}")
        before, after = states[name]
        cell_before = 1.0
        cell_after = 1.0
        if name in ("reduce", "all_reduce"):
            cell_before = 1.2
            cell_after = 2.7 if n > 2 else 1.9  # room for "A+B+C+D"
        self.name = name
        self.n = n
        self.before = _Side("before", before, 0.0, cell_before)
        self.after = _Side("after", after, self.before.stop + GAP, cell_after)
        self.width = self.after.stop

    def draw(self, axes: Axes, scale: float, room: float, size: float = 10) -> None:
        """Draw on `axes`, where a cell is `scale` inches and `room` cells fit beside each other."""
        self.before.draw(axes, scale, size)
        self.after.draw(axes, scale, size)
        for rank in range(self.n):
            y = -ROW * rank - 0.4
            put_text(axes, -0.15, y, f"rank {rank}", size, ha="right")
        middle = -ROW * self.n / 2
        tip = (self.after.start - 0.25, middle)
        tail = (self.after.start - 1.35, middle)
        arrow = {"arrowstyle": "-|>", "lw": 1.6, "color": INK}
        axes.annotate("", tip, tail, arrowprops=arrow)
        axes.set_xlim(-LABELS - 0.1, room + 0.05)
        axes.set_ylim(-ROW * self.n - 0.05, 0.55)
        blank(axes)


@figure
def collective(name: str, n: int = 4, *, alt: str) -> Picture:
    """What every rank holds before and after a collective.

    The colour of a box is the rank that its data comes from. A dotted box is room for what comes,
    one with a question mark holds nothing that is defined, and what is not drawn is not needed.

    Args:
        name: broadcast, scatter, gather, all_gather, reduce, all_reduce, reduce_scatter or
            all_to_all.
        n: Number of ranks, 2 to 8. Rank 0 is the root where there is one.
        alt: What the figure shows.

    Raises:
        ValueError: An unknown collective, or a number of ranks that does not fit.
    """
    panel = _Panel(name, n)
    width = panel.width + LABELS
    height = n * ROW + 0.9
    scale = min(0.46, 5.6 / width)  # inches of a cell
    picture = canvas(width * scale, height * scale + 0.2, alt=alt)
    axes = picture.axes[0]
    panel.draw(axes, scale, panel.width)
    axes.set_title(name, loc="center", family="monospace", fontsize=11)
    return picture


@figure
def collectives(names: Sequence[str], n: int = 4, *, alt: str) -> Picture:
    """Several collectives on one sheet, two beside each other, drawn as `collective` draws them.

    Args:
        names: Two or more of the names that `collective` knows.
        n: Number of ranks, 2 to 4.
        alt: What the figure shows.

    Raises:
        ValueError: An unknown collective, or a number of ranks that does not fit.
    """
    panels = [_Panel(name, n) for name in names]
    if n > 4 or len(panels) < 2:
        raise ValueError(
            f"{len(panels)} collectives on n={n} ranks: "
            "a sheet holds two or more, on at most 4 ranks"
        )
    left_room = max(panel.width for panel in panels[0::2])
    right_room = max(panel.width for panel in panels[1::2])
    rooms = (left_room, right_room)
    cells_across = left_room + right_room + 2 * LABELS + 0.6
    scale = min(0.4, 6.4 / cells_across)  # inches of a cell
    widths = [(room + LABELS) * scale for room in rooms]
    row_height = (n * ROW + 0.75) * scale + 0.32
    num_rows = (len(panels) + 1) // 2
    picture = canvas(
        sum(widths) + 0.3,
        num_rows * row_height,
        alt=alt,
        rows=num_rows,
        columns=2,
        width_ratios=widths,
    )
    for i, panel in enumerate(panels):
        axes = picture.axes[i]
        room = rooms[i % 2]
        panel.draw(axes, scale, room, size=8)
        axes.set_anchor("W")
        over_the_boxes = LABELS / (room + LABELS)
        axes.set_title(panel.name, loc="left", family="monospace", fontsize=10, x=over_the_boxes)
    for axes in picture.axes[len(panels) :]:
        axes.set_axis_off()
    return picture


def _draw_slot(
    axes: Axes,
    corner: Point,
    width: float,
    box: Box,
    scale: float,
) -> None:
    """One slot of a rank's memory; a sum shows a stripe of each rank's colour."""
    x, y = corner
    height = 0.72
    inner = (x + 0.03, y)
    inner_width = width - 0.06
    size = max(7, min(10, 22 * scale))
    middle = (x + width / 2, y + height / 2)
    if not box.sources:
        empty = Rectangle(inner, inner_width, height, fill=False, gid="empty")
        empty.set(edgecolor=RULE, linestyle=":", linewidth=1.0)
        axes.add_patch(empty)
        put_text(axes, *middle, box.label, size, color=INK)
        return
    _draw_stripes(axes, inner, inner_width, height, box.sources)
    if len(box.sources) == 1:
        colour = PALETTE[box.sources[0]]
        put_text(axes, *middle, box.label, size, color=ink_on(colour))
        return
    # No ink is legible on all colours: a white plate under the text.
    plate = {
        "boxstyle": "round,pad=0.15",
        "facecolor": "white",
        "edgecolor": "none",
    }
    put_text(axes, *middle, box.label, size, color=INK, bbox=plate)


def _draw_stripes(
    axes: Axes,
    corner: Point,
    width: float,
    height: float,
    sources: Sequence[int],
) -> None:
    """A rectangle in the colours of `sources`, in stripes from left to right."""
    x, y = corner
    part = width / len(sources)
    for i, rank in enumerate(sources):
        left = x + i * part
        stripe = Rectangle((left, y), part, height, gid=f"from {rank}")
        stripe.set(color=PALETTE[rank], linewidth=0)
        axes.add_patch(stripe)


# ---- the ring


RingState = list[list[tuple[int, ...]]]  # [rank][chunk] -> ranks whose numbers are added up in it


def ring_states(n: int) -> list[RingState]:
    """Whose numbers are added up in each chunk, before and after each step of a ring all-reduce.

    Returns:
        [step][rank][chunk] -> ranks in it, in the order of adding.
    """
    start: RingState = []
    for rank in range(n):
        start.append([(rank,)] * n)
    states = [start]
    for step in range(2 * (n - 1)):
        before = states[-1]
        after = [list(chunks) for chunks in before]
        for rank in range(n):
            left = (rank - 1) % n
            if step < n - 1:  # reduce-scatter: add what the left neighbour has added up so far
                chunk = (left - step) % n
                arrived = before[left][chunk]
                after[rank][chunk] = arrived + before[rank][chunk]
            else:  # all-gather: copy the chunk that the left neighbour completed or got last
                copy_step = step - (n - 1)
                chunk = (left + 1 - copy_step) % n
                after[rank][chunk] = before[left][chunk]
        states.append(after)
    return states


@figure
def ring(n: int = 4, *, alt: str) -> Picture:
    """A ring all-reduce step by step: rows are ranks, columns chunks, stripes ranks' contributions.

    The chunk that arrived in a step has a thick frame. The first row of panels is the
    reduce-scatter, the second the all-gather.

    Args:
        n: Number of ranks, 2 to 5.
        alt: What the figure shows.

    Raises:
        ValueError: A number of ranks that does not fit.
    """
    if not 2 <= n <= 5:
        raise ValueError(f"n={n}: draw a ring of 2 to 5 ranks")
    width_in = 6.4
    height_in = width_in / n * 1.65 + 0.5
    picture = canvas(width_in, height_in, alt=alt, rows=2, columns=n)
    panels = list(picture.axes)
    legend_place = panels.pop(n)  # the first of the second row, which no step needs
    states = ring_states(n)
    for step, axes in enumerate(panels):
        previous = states[max(0, step - 1)]
        _draw_memories(axes, states[step], previous)
        axes.set_title(_step_title(step, n), loc="center", fontsize=9)
    for step, axes in enumerate(panels):
        begins_a_row = step in (0, n)
        _name_memories(axes, n, with_chunk=begins_a_row)
    _draw_ring_legend(legend_place, n)
    return picture


def _step_title(step: int, n: int) -> str:
    if step == 0:
        return "before"
    if step < n:
        return f"step {step}: add"
    return f"step {step}: copy"


def _name_memories(axes: Axes, n: int, *, with_chunk: bool) -> None:
    """The numbers of the chunks over the columns; the ranks beside the rows."""
    if with_chunk:
        put_text(axes, -0.12, 0.05, "chunk", 8, ha="right", va="bottom")
    for chunk in range(n):
        put_text(axes, chunk + 0.5, 0.05, str(chunk), 8, va="bottom")
    for rank in range(n):
        put_text(axes, -0.12, -rank - 0.5, f"rank {rank}", 8, ha="right")


def _draw_memories(axes: Axes, state: RingState, previous: RingState) -> None:
    """The chunks of all ranks; those that differ from `previous` are framed."""
    n = len(state)
    side = 0.88
    for rank, chunks in enumerate(state):
        for chunk, sources in enumerate(chunks):
            corner = (chunk + 0.06, -rank - 0.94)
            _draw_stripes(axes, corner, side, side, sources)
            frame = Rectangle(corner, side, side, fill=False)
            if sources == previous[rank][chunk]:
                frame.set(edgecolor=RULE, linewidth=0.5, gid="kept")
            else:
                frame.set(edgecolor=INK, linewidth=2.0, gid="arrived")
            axes.add_patch(frame)
    axes.set_xlim(-0.4, n + 0.05)
    axes.set_ylim(-n - 0.05, 0.45)
    blank(axes)


def _draw_ring_legend(axes: Axes, n: int) -> None:
    """What the colours and the frames of a ring mean."""
    signs = []
    names = []
    for rank in range(n):
        signs.append(swatch(PALETTE[rank]))
        names.append(f"part of rank {rank}")
    signs.append(Rectangle((0, 0), 1, 1, fill=False, ec=INK, lw=2.0))
    names.append("just arrived")
    axes.legend(
        signs,
        names,
        loc="center",
        handlelength=1.2,
        handleheight=1.2,
        fontsize=8,
    )
    axes.set_axis_off()
