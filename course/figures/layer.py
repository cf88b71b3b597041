"""Drawings of one transformer layer: what each operation keeps, and what travels around it.

Lesson 10 uses them; `plot.kept` and `plot.around_a_layer` are the way in.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

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
    figure,
    ink_on,
    put_text,
)

# ---- what each operation keeps


class Kept(NamedTuple):
    """One tensor that a layer keeps for backward.

    Args:
        operation: Operation whose backward reads it.
        tensor: What it is, one or two short lines.
        numbers: Number of values for each token and hidden feature.
        whole: Whether tensor parallelism leaves it whole on every rank.
    """

    operation: str
    tensor: str
    numbers: int
    whole: bool


# A pre-norm layer with fused attention, without dropout, F = 4 H.
ATTENTION = (
    Kept("norm", "its input", 1, True),
    Kept("qkv", "its input", 1, True),
    Kept("attention", "q, k, v", 3, False),
    Kept("proj", "its input", 1, False),
)
MLP = (
    Kept("norm", "its input", 1, True),
    Kept("up", "its input", 1, True),
    Kept("GELU", "its input", 4, False),
    Kept("down", "its input", 4, False),
)
BLOCKS = {"attention": ATTENTION, "mlp": MLP, "layer": ATTENTION + MLP}

WHOLE = PALETTE[0]
CUT = PALETTE[1]
BAR = 0.66  # width; the operations stand 1 apart


@figure
def kept(
    block: str = "layer",
    tp: int = 1,
    *,
    title: str = "",
    alt: str,
) -> Picture:
    """What a rank keeps of a layer for backward, as one bar for each operation.

    A bar's full height is what one rank alone would keep, the filled part what this rank of tp
    keeps.

    Args:
        block: "layer", or "attention" or "mlp" for one half of it.
        tp: Ranks that share the layer.
        title: Above the figure.
        alt: What the figure shows.

    Raises:
        ValueError: An unknown block.
    """
    if block not in BLOCKS:
        raise ValueError(f"there is no drawing of {block!r}: choose one of {', '.join(BLOCKS)}")
    tensors = BLOCKS[block]
    picture = canvas(0.85 + 0.72 * len(tensors), 2.9, alt=alt)
    axes = picture.axes[0]
    for place, tensor in enumerate(tensors):
        share = 1.0 if tensor.whole else 1 / tp
        _draw_bar(axes, place, tensor, share, tp)
    for place in range(len(tensors) - 1):
        tail = (place + 0.36, 5.0)
        tip = (place + 0.64, 5.0)
        axes.annotate("", tip, tail, arrowprops={"arrowstyle": "-|>", "lw": 1.0, "color": INK})
    axes.set_xlim(-0.6, len(tensors) - 0.4)
    axes.set_ylim(-1.15, 5.4)
    axes.set_axis_off()
    if title:
        axes.set_title(title, loc="left")
    return picture


def _draw_bar(axes: Axes, place: int, tensor: Kept, share: float, tp: int) -> None:
    """One operation with the bar of what it keeps under it."""
    left = place - BAR / 2
    put_text(axes, place, 5.0, tensor.operation, 9, color=INK)
    outline = Rectangle((left, 0), BAR, tensor.numbers, fill=False, edgecolor=RULE)
    outline.set(linestyle=":", linewidth=1.0)
    axes.add_patch(outline)
    colour = WHOLE if share == 1 else CUT
    height = tensor.numbers * share
    filled = Rectangle((left, 0), BAR, height, facecolor=colour, edgecolor="white", gid="kept")
    if share < 1:
        filled.set(hatch="///", linewidth=0)
    axes.add_patch(filled)
    put_text(axes, place, height + 0.25, f"{height:g}", 9, color=INK)
    put_text(axes, place, -0.35, tensor.tensor, 9, color=INK)
    if tp > 1:
        words = "whole" if share == 1 else f"1/{tp} of it"
        put_text(axes, place, -0.8, words, 9, color=INK)


# ---- what travels around a layer

RANKS = 2
WIDE = 0.8  # of a tensor, its features
TALL = 1.3  # of a tensor, its tokens
ROW = 2.0  # from one rank to the next


class _Station(NamedTuple):
    """A tensor in the row of each rank, or a step between two of them.

    Args:
        x: Place of its middle.
        text: Text under a tensor, or above an arrow.
        kind: "whole" tokens, "own" tokens, "partial" sums of all tokens; "step" of each rank for
            itself, "travel" between ranks.
    """

    x: float
    text: str
    kind: str


_TENSOR_PARALLEL = (
    _Station(0.0, "x", "whole"),
    _Station(1.3, "norm", "step"),
    _Station(2.6, "norm(x)", "whole"),
    _Station(3.9, "f: nothing", "step"),
    _Station(5.2, "input", "whole"),
    _Station(6.7, "own heads\nor features", "step"),
    _Station(8.2, "partial sums", "partial"),
    _Station(9.6, "g: all-reduce", "travel"),
    _Station(11.0, "output", "whole"),
    _Station(12.3, "dropout, + x", "step"),
    _Station(13.6, "new x", "whole"),
)
_SEQUENCE_PARALLEL = (
    _Station(0.0, "x", "own"),
    _Station(1.3, "norm", "step"),
    _Station(2.6, "norm(x)", "own"),
    _Station(3.9, "all-gather", "travel"),
    _Station(5.2, "input", "whole"),
    _Station(6.7, "own heads\nor features", "step"),
    _Station(8.2, "partial sums", "partial"),
    _Station(9.6, "reduce-scatter", "travel"),
    _Station(11.0, "output", "own"),
    _Station(12.3, "dropout, + x", "step"),
    _Station(13.6, "new x", "own"),
)


@figure
def around_a_layer(*, alt: str) -> Picture:
    """One half of a layer on two ranks, without sequence parallelism and with it.

    Each square is a tensor: its rows are tokens, its columns features. A colour is a rank's part of
    the tokens; an empty part is not there.

    Args:
        alt: What the figure shows.
    """
    picture = canvas(7.2, 5.0, alt=alt, rows=2)
    titles = (
        "tensor parallel: all tokens on both ranks, all the way",
        "+ sequence parallel: outside the products, each rank has its own tokens only",
    )
    for axes, stations, title in zip(picture.axes, (_TENSOR_PARALLEL, _SEQUENCE_PARALLEL), titles):
        _draw_way(axes, stations)
        axes.set_title(title, loc="left", fontsize=10)
    return picture


def _draw_way(axes: Axes, stations: Sequence[_Station]) -> None:
    bottom = -ROW * (RANKS - 1) - TALL / 2
    for rank in range(RANKS):
        put_text(axes, -0.75, -ROW * rank, f"rank {rank}", 9, ha="right", color=INK)
    for station in stations:
        if station.kind == "travel":
            _draw_travel(axes, station, bottom)
            continue
        for rank in range(RANKS):
            if station.kind == "step":
                _draw_step(axes, station, -ROW * rank)
            else:
                _draw_tensor(axes, station, rank)
        if station.kind == "step":
            put_text(axes, station.x, 0.32, station.text, 7, va="bottom", color=INK)
        else:
            put_text(axes, station.x, bottom - 0.3, station.text, 8, color=INK)
    axes.set_xlim(-2.1, 14.3)
    axes.set_ylim(bottom - 0.6, TALL / 2 + 0.5)
    blank(axes)


def _draw_tensor(axes: Axes, station: _Station, rank: int) -> None:
    """A tensor of one rank: one box for the tokens of each rank, the first on top."""
    part = TALL / RANKS
    for owner in range(RANKS):
        top = -ROW * rank + TALL / 2 - owner * part
        corner = (station.x - WIDE / 2, top - part)
        box = Rectangle(corner, WIDE, part, gid=f"{station.kind} {rank} {owner}")
        if station.kind == "own" and owner != rank:
            box.set(fill=False, edgecolor=RULE, linestyle=":", linewidth=0.9)
            axes.add_patch(box)
            continue
        colour = PALETTE[owner]
        box.set(facecolor=colour, edgecolor="white", linewidth=1.0)
        axes.add_patch(box)
        style: dict[str, Any] = {"color": ink_on(colour)}
        label = str(owner)
        if station.kind == "partial":
            box.set(facecolor=PALE, edgecolor=colour, hatch="////", linewidth=1.2)
            style = {"color": INK, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}}
        put_text(axes, station.x, top - part / 2, label, 8, **style)


def _draw_step(axes: Axes, station: _Station, y: float) -> None:
    tail = (station.x - 0.55, y)
    tip = (station.x + 0.55, y)
    axes.annotate("", tip, tail, arrowprops={"arrowstyle": "-|>", "lw": 1.2, "color": INK})


def _draw_travel(axes: Axes, station: _Station, bottom: float) -> None:
    """A band over all ranks: what happens in it is between them."""
    width = 0.62
    height = TALL / 2 - bottom
    corner = (station.x - width / 2, bottom)
    band = Rectangle(corner, width, height, facecolor=INK, edgecolor="none", gid="travel")
    axes.add_patch(band)
    put_text(axes, station.x, bottom + height / 2, station.text, 9, rotation=90, color="#FFFFFF")
