"""The memory of a GPU as PyTorch's allocator has cut it: segments, blocks, and what fits nowhere.

Lesson 16 uses it; `plot.fragments` is the way in.
"""

from collections.abc import Sequence
from itertools import chain

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from course.figures.style import (
    INK,
    PALETTE,
    Picture,
    canvas,
    figure,
    ink_on,
    put_headline,
    put_text,
)

USED = PALETTE[0]
REQUEST = PALETTE[1]
HEIGHT = 0.8
BETWEEN = 0.35  # GiB of paper between two segments

Segment = Sequence[tuple[float, bool]]


@figure
def fragments(
    segments: Sequence[Segment], request_gib: float, *, alt: str, title: str = ""
) -> Picture:
    """Blocks in use and free ones, and a request, all to one scale.

    Below them the same memory with expandable segments, in which the free pages have moved
    together at the end of the addresses.

    Args:
        segments: What was asked of CUDA at once; the blocks of each as (GiB, whether it is used).
        request_gib: One tensor.
        alt: What the figure shows.
        title: Above it.
    """
    picture = canvas(6.6, 3.0, alt=alt, rows=2)
    above, below = picture.axes
    blocks = list(chain.from_iterable(segments))
    all_free = [gib for gib, is_used in blocks if not is_used]
    in_all = sum(gib for gib, _ in blocks)
    end = in_all + BETWEEN * (len(segments) - 1)
    _draw_segments(above, segments)
    _draw_request(above, request_gib, f"request of {request_gib:g} GiB: fits nowhere")
    name = f"{sum(all_free):g} GiB free, the largest free block has {max(all_free):g}"
    above.set_title(name, loc="left", fontsize=10)
    at = _draw_pages(below, segments)
    _draw_box(below, at, request_gib, REQUEST, f"{request_gib:g}")
    rest_gib = sum(all_free) - request_gib
    _draw_box(below, at + request_gib, rest_gib, None, f"{rest_gib:g} free")
    below.set_title(
        "expandable: the free pages lie one behind another, at other addresses",
        loc="left",
        fontsize=10,
    )
    for axes in picture.axes:
        axes.set_axis_off()
        axes.set_xlim(-0.1, max(end, at + sum(all_free)) + 0.1)
    above.set_ylim(-1.2, 1.1)
    below.set_ylim(-0.3, 1.1)
    put_headline(picture, title)
    return picture


def _draw_segments(axes: Axes, segments: Sequence[Segment]) -> None:
    at = 0.0
    for segment in segments:
        begin = at
        for gib, is_used in segment:
            _draw_box(axes, at, gib, USED if is_used else None, f"{gib:g}")
            at += gib
        outline = Rectangle((begin, 0), at - begin, HEIGHT, facecolor="none", edgecolor=INK, lw=2)
        axes.add_patch(outline)
        at += BETWEEN


def _draw_request(axes: Axes, request_gib: float, name: str) -> None:
    box = Rectangle((0, -0.9), request_gib, 0.6, facecolor=REQUEST, edgecolor=INK, lw=0.8)
    axes.add_patch(box)
    put_text(axes, request_gib + 0.15, -0.6, name, 9, ha="left")


def _draw_pages(axes: Axes, segments: Sequence[Segment]) -> float:
    """The blocks in use where they were, with gaps of addresses without memory; their end."""
    at = 0.0
    for segment in segments:
        for gib, is_used in segment:
            if is_used:
                _draw_box(axes, at, gib, USED, f"{gib:g}")
            else:
                # the addresses are left, and the memory behind them is not
                axes.plot([at, at + 0.25], [HEIGHT / 2] * 2, ":", color=INK, lw=1)
            at += gib if is_used else 0.25
    return at


def _draw_box(axes: Axes, at: float, gib: float, colour: str | None, text: str) -> None:
    """A block; one without a colour is free."""
    facecolor = colour or "white"
    hatch = None if colour else "///"
    box = Rectangle((at, 0), gib, HEIGHT, facecolor=facecolor, edgecolor="#BBBBBB", hatch=hatch)
    axes.add_patch(box)
    edge = Rectangle((at, 0), gib, HEIGHT, facecolor="none", edgecolor=INK, lw=0.8)
    axes.add_patch(edge)
    label = put_text(axes, at + gib / 2, HEIGHT / 2, text, 9, color=ink_on(colour or "#FFFFFF"))
    if colour is None:
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
