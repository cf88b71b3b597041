"""Drawings of reinforcement learning on two fleets: what travels, and one weight in two cuts.

Lesson 26 uses them; `plot.two_fleets` and `plot.two_cuts` are the ways in.
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from course.figures.style import (
    INK,
    PALETTE,
    Picture,
    blank,
    canvas,
    figure,
    ink_on,
    put_text,
)

Block = tuple[int, int, int, int]  # first row, first column, rows, columns
BOX_WIDTH = 3.4
BOX_HEIGHT = 1.9
GAP = 4.4  # from one fleet to the other


@figure
def two_fleets(
    learners: Sequence[int], generators: Sequence[int], *, alt: str, title: str = ""
) -> Picture:
    """The loop: prompts, answers, rewards, an update, and weights back to the generator.

    Args:
        learners: Global ranks that learn.
        generators: Global ranks that generate.
    """
    picture = canvas(6.6, 2.9, alt=alt)
    axes = picture.axes[0]
    right = BOX_WIDTH + GAP
    _fleet(axes, 0.0, f"generator\n{_ranks(generators)}", PALETTE[1])
    _fleet(axes, right, f"learner\n{_ranks(learners)}", PALETTE[0])
    middle = BOX_WIDTH + GAP / 2
    _arrow(axes, (BOX_WIDTH, 1.45), (right, 1.45), "-")
    put_text(axes, middle, 1.85, "answers,\nlog-probs, version", 8.5, linespacing=1.25)
    _arrow(axes, (right, 0.45), (BOX_WIDTH, 0.45), "-")
    put_text(axes, middle, 0.02, "weights, version", 8.5)
    _arrow(axes, (BOX_WIDTH / 2, 2.9), (BOX_WIDTH / 2, BOX_HEIGHT), "-")
    put_text(axes, BOX_WIDTH / 2, 3.1, "prompts", 8.5)
    put_text(axes, right + BOX_WIDTH / 2, 2.25, "rewards, advantages,\nloss, update", 8.5)
    axes.set_xlim(-0.2, right + BOX_WIDTH + 0.2)
    axes.set_ylim(-0.35, 3.45)
    blank(axes)
    if title:
        axes.set_title(title, loc="left")
    return picture


def _ranks(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"


def _fleet(axes: Axes, left: float, text: str, colour: str) -> None:
    patch = FancyBboxPatch((left, 0), BOX_WIDTH, BOX_HEIGHT)
    patch.set_boxstyle("round,pad=0,rounding_size=0.12")
    patch.set(facecolor=colour, edgecolor=INK, linewidth=1.0)
    axes.add_patch(patch)
    put_text(
        axes,
        left + BOX_WIDTH / 2,
        BOX_HEIGHT / 2,
        text,
        10,
        color=ink_on(colour),
        linespacing=1.4,
    )


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], style: str) -> None:
    arrow = FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13)
    arrow.set(color=INK, linewidth=1.5, linestyle=style)
    axes.add_patch(arrow)


@figure
def two_cuts(
    shape: tuple[int, int],
    learner: Mapping[int, Block],
    generator: Mapping[int, Sequence[Block]],
    *,
    alt: str,
    title: str = "",
    names: Mapping[str, int] | None = None,
) -> Picture:
    """One weight as two fleets cut it; on the right each block says which rank sends it.

    Args:
        shape: Rows and columns of the whole weight.
        learner: {rank: its block}, colours of the picture.
        generator: {rank: its blocks}, outlines on the right.
        alt: What the figure shows.
        title: Above it.
        names: {name: its rows}, of matrices that lie one below the other in the weight.
    """
    picture = canvas(4.6, 3.7, alt=alt)
    axes = picture.axes[0]
    rows, columns = shape
    shift = columns * 1.9
    colours = {rank: PALETTE[number] for number, rank in enumerate(learner)}
    for rank, block in learner.items():
        _block(axes, block, 0.0, colours[rank], f"rank {rank}")
    for rank, blocks in generator.items():
        for block in blocks:
            for source, held in learner.items():
                common = _common(held, block)
                if common is not None:
                    _block(axes, common, shift, colours[source], f"from {source}")
            top, left, height, width = block
            outline = Rectangle((shift + left, -top - height), width, height)
            outline.set(facecolor="none", edgecolor=INK, linewidth=2.6)
            axes.add_patch(outline)
            x = shift + columns * 1.06
            put_text(axes, x, -top - height / 2, f"rank {rank}", 9.5, ha="left")
    above = rows * 0.06
    put_text(axes, columns / 2, above, "learner", 9.5)
    put_text(axes, shift + columns / 2, above, "generator", 9.5)
    edges = {0, rows}
    for blocks in (learner.values(), *generator.values()):
        for top, _, height, _ in blocks:
            edges |= {top, top + height}
    for row in sorted(edges):
        put_text(axes, shift - columns * 0.05, -row, str(row), 8, ha="right")
    first = 0
    for name, height in (names or {}).items():
        left = -columns * 0.07
        axes.plot([left, left], [-first - rows * 0.01, -first - height + rows * 0.01], color=INK)
        put_text(axes, left - columns * 0.07, -first - height / 2, name, 9.5, ha="right")
        first += height
    axes.set_xlim(-columns * (0.25 if names else 0.05), shift + columns * 1.6)
    axes.set_ylim(-rows * 1.03, 2 * above)
    blank(axes)
    if title:
        axes.set_title(title, loc="left")
    return picture


def _block(axes: Axes, block: Block, shift: float, colour: str, text: str) -> None:
    top, left, height, width = block
    patch = Rectangle((shift + left, -top - height), width, height)
    patch.set(facecolor=colour, edgecolor="white", linewidth=1.2)
    axes.add_patch(patch)
    x = shift + left + width / 2
    put_text(axes, x, -top - height / 2, text, 8.5, color=ink_on(colour))


def _common(one: Block, other: Block) -> Block | None:
    top = max(one[0], other[0])
    left = max(one[1], other[1])
    height = min(one[0] + one[2], other[0] + other[2]) - top
    width = min(one[1] + one[3], other[1] + other[3]) - left
    return (top, left, height, width) if height > 0 and width > 0 else None
