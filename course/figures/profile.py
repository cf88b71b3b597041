"""Figures of a recorded run: where the time of its steps went, and its memory over one step."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import blended_transform_factory

from course.figures.style import (
    INK,
    MEMORY_COLOURS,
    PALETTE,
    RULE,
    Picture,
    canvas,
    figure,
    ink_on,
    put_text,
    swatch,
)
from labcode.perf.breakdown import REASONS, StepTimes, breakdown, mean
from labcode.perf.chrome_trace import Trace, read
from labcode.perf.memory_timeline import CATEGORIES, MemoryTimeline
from labcode.perf.summary import SHOWN

COLOURS = dict(zip(REASONS, (PALETTE[0], PALETTE[1], PALETTE[3], "#DDDDDD")))
NARROW = 0.055  # of the axis: a narrower piece of a bar has no room for its share
MIB = 2**20


@figure
def step_breakdown(runs: Any, *, alt: str, title: str = "") -> Picture:
    """Where the time of a step went: one bar for each run, or for each step of one.

    Args:
        runs: `{"label": run}`, each shown by the mean of its recorded steps; or one run, shown step
            by step. A run is what `perf.breakdown.breakdown` takes or returns.
        alt: What the figure shows.
        title: Above it.
    """
    bars = _bars(runs)
    longest_ms = max(times.total_ms for times in bars.values())
    picture = canvas(6.6, 1.3 + 0.42 * len(bars), alt=alt)
    axes = picture.axes[0]
    for row, times in enumerate(bars.values()):
        _draw_bar(axes, row, times, longest_ms)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 1.13 * longest_ms)
    axes.set_xlabel("ms a step")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    signs = [swatch(COLOURS[reason]) for reason in REASONS]
    names = [SHOWN[reason] for reason in REASONS]
    axes.legend(signs, names, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)
    if title:
        axes.set_title(title, loc="left", pad=26)
    return picture


def _bars(runs: Any) -> dict[str, StepTimes]:
    """{label: what its bar shows}."""
    if isinstance(runs, Mapping):
        return {str(label): mean(_times(run)) for label, run in runs.items()}
    return {f"step {times.step}": times for times in _times(runs)}


def _times(run: Any) -> list[StepTimes]:
    if isinstance(run, StepTimes):
        return [run]
    if isinstance(run, list):
        return run
    trace: Trace = read(run)
    return breakdown(trace)


def _draw_bar(axes: Axes, row: int, times: StepTimes, longest_ms: float) -> None:
    begin_ms = 0.0
    for reason in REASONS:
        width_ms = getattr(times, f"{reason}_ms")
        colour = COLOURS[reason]
        axes.barh(row, width_ms, left=begin_ms, height=0.66, color=colour, edgecolor="white")
        if width_ms >= NARROW * longest_ms:
            share = f"{times.share(reason):.0%}"
            put_text(axes, begin_ms + width_ms / 2, row, share, 9, color=ink_on(colour))
        begin_ms += width_ms
    digits = 0 if times.total_ms >= 100 else 1
    put_text(axes, begin_ms, row, f" {times.total_ms:,.{digits}f} ms", 9, ha="left")


@figure
def memory_timeline(
    timeline: MemoryTimeline | Mapping[str, MemoryTimeline], *, alt: str, title: str = ""
) -> Picture:
    """Memory over one step, in layers by what it is for, with the parts of the step above it.

    Args:
        timeline: From `perf.memory_timeline.memory_timeline`, or `{"label": timeline}`: several
            below each other, with one scale of bytes.
        alt: What the figure shows.
        title: Above it.
    """
    timelines = timeline if isinstance(timeline, Mapping) else {"": timeline}
    rows = len(timelines)
    picture = canvas(6.6, 3.4 if rows == 1 else 0.6 + 1.75 * rows, alt=alt, rows=rows)
    shown = []
    for name in CATEGORIES:
        if any(one.most(name) for one in timelines.values()):
            shown.append(name)
    highest = max(sum(one.peak()[1].values()) for one in timelines.values()) / MIB
    end_ms = max(_end_ms(one) for one in timelines.values())
    for axes, (label, one) in zip(picture.axes, timelines.items()):
        axes.set_xlim(0, end_ms)
        _draw_memory(axes, one, shown)
        axes.set_ylim(0, (1.12 if rows == 1 else 1.2) * highest)
        axes.set_ylabel(f"{label}\nMiB" if label else "MiB")
    picture.axes[-1].set_xlabel("ms since the step began")
    signs = [swatch(MEMORY_COLOURS[name]) for name in reversed(shown)]
    names = list(reversed(shown))
    picture.axes[0].legend(signs, names, loc="upper left", bbox_to_anchor=(1, 1))
    if title:
        picture.axes[0].set_title(title, loc="left", pad=22)
    return picture


def _draw_memory(axes: Axes, timeline: MemoryTimeline, shown: list[str]) -> None:
    """The layers of one step, its peak, and the names of its parts."""
    times = np.append(timeline.time_ms, _end_ms(timeline))
    below = np.zeros(len(times))
    peak_ms, at_peak = timeline.peak()
    for name in shown:
        values = np.array(timeline.used_bytes[name]) / MIB
        above = below + np.append(values, values[-1])
        colour = MEMORY_COLOURS[name]
        axes.fill_between(times, below, above, step="post", color=colour, lw=0)
        below = above
    top = sum(at_peak.values()) / MIB
    axes.plot([peak_ms], [top], "o", ms=4, color=INK, clip_on=False)
    axes.annotate(
        f"peak {top:.3g} MiB",
        (peak_ms, top),
        xytext=(6, 3),
        textcoords="offset points",
        fontsize=9,
    )
    _draw_parts(axes, timeline, axes.get_xlim()[1])


def _end_ms(timeline: MemoryTimeline) -> float:
    return max([timeline.time_ms[-1], *[stop for _, _, stop in timeline.parts]])


def _draw_parts(axes: Axes, timeline: MemoryTimeline, end_ms: float) -> None:
    """The names of the parts above the axes, with a line where each begins.

    Where a part that comes again is too narrow for its name, all parts have their first letter.
    """
    above = blended_transform_factory(axes.transData, axes.transAxes)
    names = [name for name, _, _ in timeline.parts]
    in_letters = False
    for name, start_ms, stop_ms in timeline.parts:
        in_letters |= names.count(name) > 1 and not _fits(name, stop_ms - start_ms, end_ms)
    for name, start_ms, stop_ms in timeline.parts:
        axes.axvline(start_ms, color=RULE, lw=0.7, ls=":")
        text = name[0].upper() if in_letters else name
        if _fits(text, stop_ms - start_ms, end_ms):
            middle_ms = (start_ms + stop_ms) / 2
            put_text(axes, middle_ms, 1.03, text, 9, transform=above)


def _fits(text: str, width_ms: float, end_ms: float) -> bool:
    return width_ms > 0.0165 * len(text) * end_ms
