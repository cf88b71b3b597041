"""Drawing of a data-parallel step over time: what the core computes, and what the link carries.

Lesson 05 uses it; `plot.overlap` is the way in.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from course.figures.style import (
    INK,
    PALETTE,
    RULE,
    Picture,
    canvas,
    figure,
    ink_on,
    put_text,
)

BACKWARD = PALETTE[1]  # as in the drawings of pipelines
SENT = PALETTE[2]
WAIT = "#FFFFFF"
LANE = 0.74  # height of a bar; lanes are 1 apart, runs a little more
RUN = 2.5

Span = tuple[float, float]  # start and stop, milliseconds


class StepLanes(NamedTuple):
    """One step, in milliseconds since its backward began.

    Args:
        backward: When the core computes, piece by piece.
        sent: When the link carries each bucket.
    """

    backward: Sequence[Span]
    sent: Sequence[Span]

    @property
    def total_ms(self) -> float:
        """When both are done."""
        return max(self.backward[-1][1], self.sent[-1][1])


@figure
def overlap(runs: Mapping[str, StepLanes], *, alt: str, title: str = "") -> Picture:
    """Steps below each other on one axis of time, each with a lane for the core and the link.

    Args:
        runs: {name: the step}.
        alt: What the figure shows.
        title: Above the figure.

    Raises:
        ValueError: No step to draw.
    """
    if not runs:
        raise ValueError("no step to draw: give at least one")
    longest = max(run.total_ms for run in runs.values())
    picture = canvas(6.6, 0.8 + 1.05 * len(runs), alt=alt)
    axes = picture.axes[0]
    for number, (name, run) in enumerate(runs.items()):
        top = number * RUN
        put_text(axes, 0, top - 0.72, name, 9, ha="left", fontweight="bold")
        _draw_core(axes, top, run, longest)
        _draw_link(axes, top + 1, run, longest)
        axes.plot([run.total_ms] * 2, [top - 0.5, top + 1.5], color=INK, lw=1, ls=":")
        end = f"{run.total_ms:.0f} ms"
        put_text(axes, run.total_ms + 0.01 * longest, top - 0.3, end, 9, ha="left")
    lanes = []
    for number in range(len(runs)):
        lanes += [number * RUN, number * RUN + 1]
    axes.set_yticks(lanes, ["core", "link"] * len(runs))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(runs) * RUN - 0.9, -1.1)
    axes.set_xlim(0, 1.12 * longest)
    axes.set_xlabel("ms since backward began")
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    if title:
        axes.set_title(title, loc="left")
    return picture


def _draw_core(axes: Axes, y: float, run: StepLanes, longest: float) -> None:
    for number, span in enumerate(run.backward, 1):
        label = "backward" if len(run.backward) == 1 else f"backward {number}"
        _bar(axes, y, span, [label, f"B{number}", ""], BACKWARD, longest)
    done = run.backward[-1][1]
    if run.total_ms > done:
        _bar(axes, y, (done, run.total_ms), ["wait", ""], WAIT, longest, hatch="///")


def _draw_link(axes: Axes, y: float, run: StepLanes, longest: float) -> None:
    for number, span in enumerate(run.sent, 1):
        _bar(axes, y, span, [str(number), ""], SENT, longest)


def _bar(
    axes: Axes,
    y: float,
    span: Span,
    labels: Sequence[str],
    colour: str,
    longest: float,
    hatch: str = "",
) -> None:
    """A bar with the first of the labels that fits into it."""
    start, stop = span
    edge = RULE if hatch else "white"
    axes.barh(
        y, stop - start, left=start, height=LANE, color=colour, edgecolor=edge, lw=0.8, hatch=hatch
    )
    for label in labels:
        inches = 0.075 * len(label) + 0.06  # about, in 8 points
        if inches * 1.12 * longest / 5.6 < stop - start:
            break
    else:
        return
    plate = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    style = {"bbox": plate} if hatch and label else {}
    put_text(axes, (start + stop) / 2, y, label, 8, color=ink_on(colour), **style)
