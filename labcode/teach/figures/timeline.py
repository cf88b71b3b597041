"""Drawings: ranks on their nodes, who is busy when. Lessons reach them through `plot`."""

import re
import string

import matplotlib as mpl
from matplotlib.patches import FancyBboxPatch, Rectangle

from labcode.teach.figures.style import (
    PALE,
    RULE,
    STYLE,
    Picture,
    blank,
    canvas,
    colour_of,
    described,
    ink_on,
)
from labcode.topology import AXES, GridShape

MAX_RANKS = 64


def grid(shape: GridShape, *, alt: str, color_by="tp", nodes: int = 1, title="") -> Picture:
    """The ranks of a grid as boxes on their nodes, one colour for each group along `color_by`.

    Ranks fill the nodes in order, as launchers place them. A box names its rank and its coordinates along axes longer than
    1; the letter in its corner names the group, so that nothing depends on colour alone.

    Args:
        shape: The grid, up to 64 ranks.
        alt: What the figure shows.
        color_by: An axis ("tp") or several (("dp", "cp")).
        nodes: Number of nodes that share the ranks evenly.

    Raises:
        ValueError: Too many ranks to draw, or ranks that do not fill the nodes.
    """
    world_size, axes_of = (
        shape.world_size,
        (color_by,) if isinstance(color_by, str) else tuple(color_by),
    )
    if world_size > MAX_RANKS:
        raise ValueError(
            f"{world_size} ranks are too many to draw: show a grid of at most {MAX_RANKS}"
        )
    if world_size % nodes:
        raise ValueError(
            f"{world_size} ranks do not fill {nodes} nodes evenly: choose a divisor of {world_size}"
        )
    group_of = {rank: i for i, group in enumerate(shape.groups(*axes_of)) for rank in group}
    per_node, columns = world_size // nodes, min(8, world_size // nodes)
    rows = -(-per_node // columns)
    dense = world_size > 32  # smaller boxes, without coordinates
    across = max(1, min(nodes, (16 if dense else 8) // columns))  # nodes side by side
    down = -(-nodes // across)
    wide, high = columns + 0.5, rows + 0.75
    span = (
        (down - 1) * high + rows + (0.65 if nodes > 1 else 0.2)
    )  # height of the drawing, in boxes
    width = min(6.6, 0.9 * across * wide)
    figure, (axes,) = canvas(width, width * span / (across * wide) + 0.35)
    with mpl.rc_context(STYLE):
        for node in range(nodes):
            left, top = node % across * wide, -(node // across) * high
            if nodes > 1:
                frame = (left - 0.08, top - rows - 0.1)
                style = {
                    "facecolor": PALE,
                    "edgecolor": RULE,
                    "boxstyle": "round,pad=0,rounding_size=0.08",
                }
                axes.add_patch(FancyBboxPatch(frame, columns + 0.16, rows + 0.48, **style))
                axes.text(left + 0.02, top + 0.15, f"node {node}", fontsize=9, va="center")
            for i in range(per_node):
                corner = (left + i % columns, top - 1 - i // columns)
                rank = node * per_node + i
                _rank_box(
                    axes, corner, shape, rank, group_of[rank], 6.6 / (across * wide), not dense
                )
        top = 0.5 if nodes > 1 else 0.05
        axes.set(xlim=(-0.15, across * wide - 0.25), ylim=(top - span, top))
        blank(axes)
        count, kind = max(group_of.values()) + 1, "-".join(axes_of)
        sizes = (
            " x ".join(f"{axis}={shape.size(axis)}" for axis in AXES if shape.size(axis) > 1)
            or "one rank"
        )
        text = f"{sizes}, order {shape.order}: {count} {kind} group{'s' if count > 1 else ''}"
        axes.set_title(title or text, loc="left", fontsize=10)
    return Picture(figure, described(alt))


def _rank_box(axes, corner, shape, rank, group, inches, with_coords):
    x, y = corner
    colour = colour_of(group)
    ink, size = ink_on(colour), max(5.5 if with_coords else 8, min(11, 13 * inches))
    box = {
        "facecolor": colour,
        "edgecolor": "white",
        "boxstyle": "round,pad=0,rounding_size=0.06",
        "gid": f"group {group}",
    }
    axes.add_patch(FancyBboxPatch((x + 0.05, y + 0.05), 0.9, 0.9, **box))
    axes.text(
        x + 0.54,
        y + (0.66 if with_coords else 0.42),
        str(rank),
        ha="center",
        va="center",
        fontsize=size,
        weight="bold",
        color=ink,
    )
    coords = shape.coords(rank)
    named = [f"{axis}{coords[axis]}" for axis in AXES if shape.size(axis) > 1 and with_coords]
    text = "\n".join(" ".join(named[i : i + 2]) for i in range(0, len(named), 2))
    axes.text(
        x + 0.5,
        y + 0.3,
        text,
        ha="center",
        va="center",
        fontsize=size * 0.68,
        color=ink,
        linespacing=1.1,
    )
    letter = string.ascii_lowercase[group % 26] * (1 + group // 26)
    axes.text(x + 0.14, y + 0.82, letter, ha="left", va="center", fontsize=size * 0.65, color=ink)


def timeline(rows, *, alt: str, xlabel="time", title="") -> Picture:
    """Labelled bars over time, one lane each: what a rank, a stream or a bucket is doing when.

    Args:
        rows: Sequence of (lane, label, start, stop), for instance ("rank 0", "forward 1", 0.0, 2.5). Lanes come in the order
            of their first rows; labels that differ only in a number share a colour.
        alt: What the figure shows.
        xlabel: The time and its unit.

    Raises:
        ValueError: No rows, or one that stops before it starts.
    """
    rows = [tuple(row) for row in rows]
    wrong = next((row for row in rows if row[3] < row[2]), None)
    if not rows or wrong:
        raise ValueError(
            f"the row {wrong} stops before it starts"
            if wrong
            else "a time line without rows: give at least one"
        )
    lanes = list(dict.fromkeys(lane for lane, *_ in rows))
    kinds = list(dict.fromkeys(_kind(label) for _, label, *_ in rows))
    span = max(row[3] for row in rows) - min(row[2] for row in rows) or 1.0
    room = {kind: min(row[3] - row[2] for row in rows if _kind(row[1]) == kind) for kind in kinds}
    figure, (axes,) = canvas(6.4, 1.0 + 0.4 * len(lanes))
    with mpl.rc_context(STYLE):
        for lane, label, start, stop in rows:
            colour = colour_of(kinds.index(_kind(label)))
            y = lanes.index(lane)
            axes.barh(
                y, stop - start, left=start, height=0.74, color=colour, edgecolor="white", lw=0.8
            )
            text = next(
                (
                    text
                    for text in (label, label.split()[-1])
                    if _width(text, span) < room[_kind(label)]
                ),
                "",
            )
            axes.text(
                (start + stop) / 2,
                y,
                text,
                ha="center",
                va="center",
                fontsize=8,
                color=ink_on(colour),
            )
        axes.set_yticks(range(len(lanes)), [str(lane) for lane in lanes])
        axes.set(xlabel=xlabel, ylim=(len(lanes) - 0.45, -0.55))
        axes.grid(False, axis="y")
        squares = [Rectangle((0, 0), 1, 1, color=colour_of(i)) for i in range(len(kinds))]
        figure.legend(
            squares, kinds, loc="outside upper right", ncols=min(5, len(kinds)), handlelength=1
        )
        if title:
            axes.set_title(title, loc="left")
    return Picture(figure, described(alt))


def _kind(label):
    return re.sub(r"\s*\d+$", "", label) or label


def _width(text, span):
    """About how much time a text in 8 points covers on an axis 5.2 inches long."""
    return (len(text) * 0.075 + 0.06) * span / 5.2
