"""Drawings of data that moves between ranks: collectives, and the ring step by step. Lessons reach them through `plot`."""

import string
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.patches import Rectangle

from labcode.teach.figures.style import (
    INK,
    PALETTE,
    RULE,
    STYLE,
    Picture,
    blank,
    canvas,
    described,
    ink_on,
)

GAP, LABELS = 1.6, 1.6  # between before and after, and for "rank 0", in cells


def _collective_states(n):
    """For each collective what each rank holds before and after: {slot: (label, source ranks)} per rank."""
    letters = string.ascii_uppercase[:n]
    everyone = tuple(range(n))
    total = "+".join(letters) if n <= 4 else f"{letters[0]}+…+{letters[-1]}"

    whole = [{0: (letters[r], (r,))} for r in range(n)]
    parts = [{i: (f"{letters[r]}{i}", (r,)) for i in range(n)} for r in range(n)]
    summed, gathered = {0: (total, everyone)}, {i: (letters[i], (i,)) for i in range(n)}
    sums = [{r: (f"Σ{r}", everyone)} for r in range(n)]
    root = [{}] * (n - 1)
    return {
        "broadcast": ([whole[0], *root], [whole[0]] * n),
        "scatter": ([parts[0], *root], [{r: parts[0][r]} for r in range(n)]),
        "gather": (whole, [gathered, *root]),
        "all_gather": (whole, [gathered] * n),
        "reduce": (whole, [summed, *root]),
        "all_reduce": (whole, [summed] * n),
        "reduce_scatter": (parts, sums),
        "all_to_all": (parts, [{i: parts[i][r] for i in range(n)} for r in range(n)]),
    }


class _Panel:
    """One collective: its states, and where its columns stand, in cells."""

    def __init__(self, name, n):
        if not 2 <= n <= len(PALETTE):
            raise ValueError(f"n={n}: draw 2 to {len(PALETTE)} ranks")
        states = _collective_states(n)
        if name not in states:
            raise ValueError(f"there is no drawing of {name!r}: choose one of {', '.join(states)}")
        self.name, self.n, self.sides = name, n, states[name]
        self.slots = [
            1 + max((slot for held in side for slot in held), default=0) for side in self.sides
        ]
        # room for "A+B+C+D"
        self.cells = (
            (1.2, 2.7 if n > 2 else 1.9) if name in ("reduce", "all_reduce") else (1.0, 1.0)
        )
        self.starts = (0.0, self.slots[0] * self.cells[0] + GAP)
        self.width = self.starts[1] + self.slots[1] * self.cells[1]

    def draw(self, axes, scale, room, size=10):
        """Draw on `axes` where a cell is `scale` inches and `room` cells fit beside each other."""
        for side, start, count, cell, label in zip(
            self.sides, self.starts, self.slots, self.cells, ("before", "after")
        ):
            axes.text(
                start + count * cell / 2, 0.25, label, ha="center", va="center", fontsize=size
            )
            for rank, held in enumerate(side):
                for slot in range(count):
                    _cell(
                        axes, (start + slot * cell, -0.8 * rank - 0.76), cell, held.get(slot), scale
                    )
        for rank in range(self.n):
            axes.text(
                -0.15, -0.8 * rank - 0.4, f"rank {rank}", ha="right", va="center", fontsize=size
            )
        arrow = {"arrowstyle": "-|>", "lw": 1.6, "color": INK}
        middle = -0.4 * self.n
        axes.annotate(
            "", (self.starts[1] - 0.25, middle), (self.starts[1] - 1.35, middle), arrowprops=arrow
        )
        axes.set(xlim=(-LABELS - 0.1, room + 0.05), ylim=(-0.8 * self.n - 0.05, 0.55))
        blank(axes)


def collective(name: str, n: int = 4, *, alt: str) -> Picture:
    """What every rank holds before and after a collective; the colour of a box is the rank its data comes from.

    Args:
        name: broadcast, scatter, gather, all_gather, reduce, all_reduce, reduce_scatter or all_to_all.
        n: Number of ranks, 2 to 8. Rank 0 is the root where there is one.
        alt: What the figure shows.

    Raises:
        ValueError: An unknown collective, or a number of ranks that does not fit.
    """
    panel = _Panel(name, n)
    scale = min(0.46, 5.6 / (panel.width + LABELS))
    figure, (axes,) = canvas((panel.width + LABELS) * scale, (n * 0.8 + 0.9) * scale + 0.2)
    with mpl.rc_context(STYLE):
        panel.draw(axes, scale, panel.width)
        axes.set_title(name, loc="center", family="monospace", fontsize=11)
    return Picture(figure, described(alt))


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
            f"{len(panels)} collectives on n={n} ranks: a sheet holds two or more, on at most 4 ranks"
        )
    columns = [panels[i::2] for i in range(2)]
    rooms = [max(panel.width for panel in column) for column in columns]
    scale = min(0.4, 6.4 / (sum(rooms) + 2 * LABELS + 0.6))
    rows = len(columns[0])
    widths = [(room + LABELS) * scale for room in rooms]
    figure, _ = canvas(sum(widths) + 0.3, rows * ((n * 0.8 + 0.75) * scale + 0.32))
    figure.clear()
    with mpl.rc_context(STYLE):
        all_axes = figure.subplots(rows, 2, squeeze=False, width_ratios=widths)
        for i, axes in enumerate(all_axes.flat):
            if i >= len(panels):
                axes.set_axis_off()
                continue
            panels[i].draw(axes, scale, rooms[i % 2], size=8)
            axes.set_anchor("W")
            axes.set_title(
                panels[i].name,
                loc="left",
                family="monospace",
                fontsize=10,
                x=LABELS / (rooms[i % 2] + LABELS),
            )
    return Picture(figure, described(alt))


def _cell(axes, corner, width, held, scale):
    """One slot of a rank's memory; a sum shows a stripe of each rank's colour."""
    (x, y), height = corner, 0.72
    if held is None:
        axes.add_patch(
            Rectangle(
                (x + 0.03, y),
                width - 0.06,
                height,
                fill=False,
                ec="#BBBBBB",
                ls=":",
                lw=0.9,
                gid="empty",
            )
        )
        return
    label, sources = held
    _stripes(axes, (x + 0.03, y), width - 0.06, height, sources)
    plate = (
        {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
        if len(sources) > 1
        else None
    )
    ink = INK if plate else ink_on(PALETTE[sources[0]])
    size = max(7, min(10, 22 * scale))
    axes.text(
        x + width / 2,
        y + height / 2,
        label,
        ha="center",
        va="center",
        fontsize=size,
        color=ink,
        bbox=plate,
    )


def _stripes(axes, corner, width, height, sources):
    part = width / len(sources)
    for i, rank in enumerate(sources):
        stripe = (corner[0] + i * part, corner[1])
        axes.add_patch(
            Rectangle(stripe, part, height, color=PALETTE[rank], lw=0, gid=f"from {rank}")
        )


def ring_states(n: int) -> list[list[list[tuple[int, ...]]]]:
    """Whose numbers are added up in each chunk, before a ring all-reduce and after each of its 2 (n-1) steps.

    Returns:
        [step][rank][chunk] -> ranks in it, in the order of adding.
    """
    states = [[[(rank,)] * n for rank in range(n)]]
    for step in range(2 * (n - 1)):
        before, after = states[-1], [list(chunks) for chunks in states[-1]]
        for rank in range(n):
            left = (rank - 1) % n
            if step < n - 1:
                chunk = (left - step) % n
                after[rank][chunk] = before[left][chunk] + before[rank][chunk]
            else:
                chunk = (left + 1 - (step - (n - 1))) % n
                after[rank][chunk] = before[left][chunk]
        states.append(after)
    return states


def ring(n: int = 4, *, alt: str) -> Picture:
    """A ring all-reduce step by step: rows are ranks, columns chunks, a stripe is one rank's contribution.

    The chunk that arrived in a step has a thick frame. First row: reduce-scatter, second row: all-gather.

    Args:
        n: Number of ranks, 2 to 5.
        alt: What the figure shows.

    Raises:
        ValueError: A number of ranks that does not fit.
    """
    if not 2 <= n <= 5:
        raise ValueError(f"n={n}: draw a ring of 2 to 5 ranks")
    states = ring_states(n)
    figure, _ = canvas(6.4, 6.4 / n * 1.65 + 0.5)
    figure.clear()
    with mpl.rc_context(STYLE):
        all_axes = figure.subplots(2, n)
        titles = [
            "before",
            *(f"step {step}: add" for step in range(1, n)),
            *(f"step {n - 1 + s}: copy" for s in range(1, n)),
        ]
        places = [*all_axes[0], *all_axes[1][1:]]
        _explain(all_axes[1][0], n)
        for step, (axes, title, state) in enumerate(zip(places, titles, states)):
            _memories(axes, state, states[step - 1] if step else state)
            axes.set_title(title, loc="center", fontsize=9)
        for chunk in range(n):
            places[0].text(chunk + 0.5, 0.02, str(chunk), ha="center", va="bottom", fontsize=8)
    return Picture(figure, described(alt))


def _explain(axes, n):
    """What the colours and the frames of a ring mean, in the corner that no step needs."""
    signs = [Rectangle((0, 0), 1, 1, color=PALETTE[rank], lw=0) for rank in range(n)]
    signs.append(Rectangle((0, 0), 1, 1, fill=False, ec=INK, lw=2.0))
    names = [*(f"part of rank {rank}" for rank in range(n)), "just arrived"]
    axes.legend(signs, names, loc="center", handlelength=1.2, handleheight=1.2, fontsize=8)
    axes.set_axis_off()


def _memories(axes, state, before):
    """The chunks of all ranks; those that differ from `before` are framed."""
    n = len(state)
    for rank, chunks in enumerate(state):
        axes.text(-0.12, -rank - 0.5, str(rank), ha="right", va="center", fontsize=9)
        for chunk, sources in enumerate(chunks):
            corner = (chunk + 0.06, -rank - 0.94)
            _stripes(axes, corner, 0.88, 0.88, sources)
            new = sources != before[rank][chunk]
            frame = (
                {"ec": INK, "lw": 2.0, "gid": "arrived"}
                if new
                else {"ec": RULE, "lw": 0.5, "gid": "kept"}
            )
            axes.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, **frame))
    axes.set(xlim=(-0.4, n + 0.05), ylim=(-n - 0.05, 0.35))
    blank(axes)
