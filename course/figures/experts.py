"""Drawings of a mixture of experts: the way of its rows, and who gets how many of them.

Lesson 23 uses them; `plot.expert_rows` and `plot.expert_loads` are the way in.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle
from numpy.typing import ArrayLike

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
    put_headline,
    put_text,
)

ROW_HEIGHT = 0.62
TOKEN_X = 0.0
ROWS_X = 3.2
EXPERT_X = 5.9
DONE_X = 8.6
OUT_X = 11.8


# ---- tokens, rows sorted by expert, experts, and back


@figure
def expert_rows(
    chosen: Sequence[Sequence[int]], num_experts: int, *, alt: str, title: str = ""
) -> Picture:
    """Tokens to rows that are sorted by expert, through the experts, and back to the tokens.

    A row has the colour of its expert and the name of its token.

    Args:
        chosen: The experts of each token.
        num_experts: How many there are.
        alt: What the figure shows.
        title: Above the figure.
    """
    tokens_of: dict[int, list[int]] = {expert: [] for expert in range(num_experts)}
    for token, experts in enumerate(chosen):
        for expert in experts:
            tokens_of[expert].append(token)
    num_rows = sum(map(len, tokens_of.values()))
    picture = canvas(7.0, 0.55 + 0.36 * num_rows, alt=alt)
    axes = picture.axes[0]
    middle = (num_rows - 1) * ROW_HEIGHT / 2
    spread = (num_rows - 1) * ROW_HEIGHT / max(1, len(chosen) - 1)
    token_y = [2 * middle - token * spread for token in range(len(chosen))]
    for token, y in enumerate(token_y):
        for x, name in ((TOKEN_X, f"t{token}"), (OUT_X, f"y{token}")):
            _cell(axes, x, y, name, PALE)
    place = 0
    for expert, tokens in tokens_of.items():
        colour = PALETTE[expert % len(PALETTE)]
        ys = []
        for token in tokens:
            y = 2 * middle - place * ROW_HEIGHT
            ys.append(y)
            _cell(axes, ROWS_X, y, f"t{token}", colour)
            _cell(axes, DONE_X, y, f"t{token}", colour)
            _line(axes, TOKEN_X, token_y[token], ROWS_X, y, colour)
            _line(axes, DONE_X, y, OUT_X, token_y[token], colour)
            place += 1
        if ys:
            _expert(axes, expert, ys, colour)
    idle = [expert for expert, tokens in tokens_of.items() if not tokens]
    top = 2 * middle + 0.85
    for x, text in (
        (TOKEN_X, "tokens"),
        (ROWS_X, "rows, sorted\nby expert"),
        (EXPERT_X, "experts"),
        (DONE_X, "what they\nmade"),
        (OUT_X, "weighted\nsums"),
    ):
        put_text(axes, x, top, text, 9)
    if idle:
        names = ", ".join(f"expert {expert}" for expert in idle)
        put_text(axes, EXPERT_X, -0.85, f"{names}: no rows", 8.5)
    axes.set_xlim(TOKEN_X - 0.8, OUT_X + 0.8)
    axes.set_ylim(-1.15, top + 0.5)
    blank(axes)
    put_headline(picture, title)
    return picture


def _cell(axes: Axes, x: float, y: float, name: str, colour: str) -> None:
    """A token's features, as one box."""
    box = Rectangle((x - 0.5, y - 0.24), 1.0, 0.48, facecolor=colour, edgecolor=INK, lw=0.9)
    axes.add_patch(box)
    put_text(axes, x, y, name, 9, color=ink_on(colour))


def _line(axes: Axes, x: float, y: float, to_x: float, to_y: float, colour: str) -> None:
    axes.plot([x + 0.5, to_x - 0.5], [y, to_y], color=colour, lw=1.3, zorder=0.5)


def _expert(axes: Axes, number: int, ys: Sequence[float], colour: str) -> None:
    """An expert's box beside its rows, with arrows in and out."""
    low = min(ys) - 0.24
    high = max(ys) + 0.24
    patch = FancyBboxPatch((EXPERT_X - 0.85, low), 1.7, high - low)
    patch.set_boxstyle("round,pad=0,rounding_size=0.1")
    patch.set(facecolor="#FFFFFF", edgecolor=colour, linewidth=2.2)
    axes.add_patch(patch)
    put_text(axes, EXPERT_X, (low + high) / 2, f"expert {number}", 9)
    arrow = {"arrowstyle": "-|>", "lw": 1.1, "color": RULE, "shrinkA": 0, "shrinkB": 0}
    for y in ys:
        axes.annotate("", (EXPERT_X - 0.87, y), (ROWS_X + 0.52, y), arrowprops=arrow)
        axes.annotate("", (DONE_X - 0.52, y), (EXPERT_X + 0.87, y), arrowprops=arrow)


# ---- loads


@figure
def expert_loads(
    loads: Mapping[str, ArrayLike],
    *,
    alt: str,
    width: int = 8,
    title: str = "",
    xlabel: str = "",
    ylabel: str = "",
) -> Picture:
    """The fraction of the rows that each expert gets, step after step: one panel for each run.

    The bands of a panel are the experts; dashed lines stand where they would meet if all loads
    were even.

    Args:
        loads: `{"label": [steps, experts]}`, fractions that add up to 1.
        alt: What the figure shows.
        width: Number of steps that each point is the mean of.
        title: Above the figure.
        xlabel: What the steps are.
        ylabel: What the fractions are.
    """
    picture = canvas(7.2, 2.9, alt=alt, columns=len(loads))
    for axes, (label, values) in zip(picture.axes, loads.items()):
        windows = np.lib.stride_tricks.sliding_window_view(np.asarray(values), width, axis=0)
        fractions = windows.mean(-1)
        num_steps, num_experts = fractions.shape
        fractions = fractions[:, np.argsort(-fractions[-1])]  # the busiest at the end lies lowest
        colours = [PALETTE[number % len(PALETTE)] for number in range(num_experts)]
        steps = np.arange(width, width + num_steps)  # the last one of each window
        axes.stackplot(steps, fractions.T, colors=colours, edgecolor="white", lw=0.5)
        for number in range(1, num_experts):
            axes.axhline(number / num_experts, color=INK, ls="--", lw=0.6)
        axes.set_title(label, loc="left", fontsize=10)
        axes.set(xlim=(steps[0], steps[-1]), ylim=(0, 1), xlabel=xlabel)
        axes.grid(False)
    for axes in picture.axes[1:]:
        axes.set_yticklabels([])
    picture.axes[0].set_ylabel(ylabel)
    put_headline(picture, title)
    return picture
