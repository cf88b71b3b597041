"""Drawings of the clinic: signs of many trainings as a table, and calls that find no partner.

Lesson 07 uses them; `plot.ward_round` and `plot.calls` are the ways in.
"""

from collections.abc import Mapping, Sequence

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

ILL = PALETTE[5]


@figure
def ward_round(table: Mapping[str, Mapping[str, float]], *, alt: str, title: str = "") -> Picture:
    """A table: one row for each training, one column for each sign; all but 0 is filled.

    Args:
        table: {training: {sign: value}}, the same signs in each.
        alt: What the figure shows.
        title: Above the figure.
    """
    names = list(table)
    columns = list(table[names[0]])
    picture = canvas(2.0 + 1.05 * len(columns), 0.9 + 0.3 * len(names), alt=alt)
    axes = picture.axes[0]
    for row, name in enumerate(names):
        for column, sign in enumerate(columns):
            value = table[name][sign]
            is_ill = value != 0
            corner = (column - 0.46, row - 0.42)
            colour = ILL if is_ill else PALE
            axes.add_patch(Rectangle(corner, 0.92, 0.84, fc=colour, ec=RULE if is_ill else PALE))
            text = f"{value:.2g}" if is_ill else "0"
            put_text(axes, column, row, text, 9, color=ink_on(colour) if is_ill else RULE)
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xticks(range(len(columns)), [sign.replace(" ", "\n", 1) for sign in columns])
    axes.set_yticks(range(len(names)), names)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.grid(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    if title:
        picture.figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return picture


@figure
def calls(lanes: Mapping[str, Sequence[str]], *, alt: str, title: str = "") -> Picture:
    """The collectives of two ranks in their order; a line joins the n-th calls of both.

    A line between two calls that do not match is drawn dashed, and so is a call that waits for a
    partner that never comes.

    Args:
        lanes: {"rank 0": ["gradients", "loss", ...], "rank 1": [...]}, two ranks.
        alt: What the figure shows.
        title: Above the figure.

    Raises:
        ValueError: There are not two ranks.
    """
    if len(lanes) != 2:
        raise ValueError(f"calls() joins the calls of two ranks, and was given {len(lanes)}")
    (upper, above), (lower, below) = lanes.items()
    length = max(len(above), len(below))
    picture = canvas(1.2 + 1.12 * length, 1.9, alt=alt)
    axes = picture.axes[0]
    blank(axes)
    axes.set_aspect("auto")
    for y, name, row, other in ((1, upper, above, below), (0, lower, below, above)):
        put_text(axes, -0.75, y, name, 10, ha="right")
        for place, call in enumerate(row):
            partner = other[place] if place < len(other) else None
            fits = partner == call
            colour = PALETTE[4] if fits else ILL
            box = Rectangle((place - 0.44, y - 0.2), 0.88, 0.4, fc=colour, ec=INK, lw=0.8)
            axes.add_patch(box)
            put_text(axes, place, y, call, 8.5, color=ink_on(colour))
    for place in range(length):
        one = above[place] if place < len(above) else None
        two = below[place] if place < len(below) else None
        fits = one == two
        line = {"color": INK if fits else ILL, "ls": "-" if fits else "--", "lw": 1.6}
        axes.plot([place, place], [0.8, 0.2], **line)
        if not fits:
            put_text(axes, place + 0.08, 0.5, "not the same", 8.5, ha="left", color=ILL)
    axes.set_xlim(-1.7, length - 0.3)
    axes.set_ylim(-0.35, 1.35)
    if title:
        axes.set_title(title, loc="left")
    return picture
