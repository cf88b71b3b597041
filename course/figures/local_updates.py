"""Drawing of trainings that send much or little: loss against time, and against bytes sent.

Lesson 06 uses it; `plot.loss_against_cost` is the way in.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

from course.figures.style import (
    MARKERS,
    PALE,
    PALETTE,
    Picture,
    canvas,
    figure,
    put_headline,
)

MOST_CURVES = 6  # more curves cannot be distinguished


class LossCurve(NamedTuple):
    """A training, at some of its steps.

    Args:
        steps: Optimizer steps so far; begins with 0.
        seconds: Seconds since it began.
        sent_bytes: Sent by one rank since it began.
        losses: Losses of the weights that all ranks share at that step.
    """

    steps: Sequence[int]
    seconds: Sequence[float]
    sent_bytes: Sequence[float]
    losses: Sequence[float]


@figure
def loss_against_cost(curves: Mapping[str, LossCurve], *, alt: str, title: str = "") -> Picture:
    """Draw the same trainings twice: loss against seconds, and loss against bytes on a log axis.

    Shaded is where all of them still run: beyond it one has no loss to compare with. Where nothing
    has been sent yet there is no place on a log axis: the curves on the right begin with the first
    point that has.

    Args:
        curves: {name: the training}.
        alt: What the figure shows.
        title: Above the figure.

    Raises:
        ValueError: No curve, or too many.
    """
    if not 1 <= len(curves) <= MOST_CURVES:
        raise ValueError(f"{len(curves)} curves: draw 1 to {MOST_CURVES}")
    picture = canvas(7.0, 3.3, alt=alt, columns=2)
    against_time, against_bytes = picture.axes
    for number, (name, curve) in enumerate(curves.items()):
        _draw(against_time, number, name, curve.seconds, curve.losses)
        sent = [(size, loss) for size, loss in zip(curve.sent_bytes, curve.losses) if size > 0]
        megabytes = [size / 1e6 for size, _ in sent]
        _draw(against_bytes, number, name, megabytes, [loss for _, loss in sent])
    together_s = min(curve.seconds[-1] for curve in curves.values())
    against_time.axvspan(0, together_s, color=PALE, zorder=0, label="all still run")
    against_time.set(xlabel="seconds", ylabel="loss, nats per character")
    against_time.set_xlim(0, None)
    against_bytes.set(xlabel="MB sent by each rank", xscale="log")
    against_bytes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    against_bytes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    against_bytes.xaxis.set_minor_locator(NullLocator())
    against_bytes.sharey(against_time)
    against_bytes.tick_params(labelleft=False)
    handles, names = against_time.get_legend_handles_labels()
    picture.figure.legend(handles, names, loc="outside lower center", ncols=4)
    put_headline(picture, title)
    return picture


def _draw(axes: Axes, number: int, name: str, xs: Sequence[float], ys: Sequence[float]) -> None:
    colour = PALETTE[number % len(PALETTE)]
    marker = MARKERS[number % len(MARKERS)]
    axes.plot(xs, ys, label=name, color=colour, marker=marker, markersize=5, lw=1.8)
