"""Plans as pictures, in files: what the command line draws."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labcode.perf.plan import Layout
from labcode.runtime.units import GIB

NAMED = 6  # of the layouts that no other beats in both


def memory_against_time(layouts: Sequence[Layout], file: Path, *, title: str) -> None:
    """One point for each layout: how long it takes and how much it needs.

    Those that no other beats in both time and memory have a number, and their names stand beside
    the picture.

    Args:
        layouts: The fastest first.
        file: Path of the picture; its ending says in which format.
        title: Above it.
    """
    figure, axes = _canvas(title)
    front = unbeaten(layouts)[:NAMED]
    _points(axes, layouts, "#bbbbbb", 16)
    _points(axes, front, "#0072B2", 60)
    names = []
    for number, layout in enumerate(front, 1):
        shape = layout.shape
        place = (layout.step_s, layout.memory_bytes / GIB)
        axes.annotate(str(number), place, (6, 5), textcoords="offset points", fontweight="bold")
        names.append(f"{number}  dp{shape.dp} pp{shape.pp} cp{shape.cp} tp{shape.tp}")
    text = "\n".join(names)
    axes.text(1.02, 0.98, text, transform=axes.transAxes, va="top", fontsize=9)
    axes.set_xlabel("seconds of a step")
    axes.set_ylabel("GiB of the fullest rank")
    figure.savefig(file)


def _points(axes: Any, layouts: Sequence[Layout], color: str, size: float) -> None:
    steps = [layout.step_s for layout in layouts]
    memory = [layout.memory_bytes / GIB for layout in layouts]
    axes.scatter(steps, memory, s=size, color=color, edgecolors="#222222", linewidths=0.5)


def unbeaten(layouts: Sequence[Layout]) -> list[Layout]:
    """Layouts than which no other is faster and smaller: each needs less than all faster ones.

    Args:
        layouts: The fastest first.

    Held by: tests/unit/test_perf_cli.py::test_who_is_unbeaten_needs_less_than_all_faster_ones
    """
    found: list[Layout] = []
    for layout in layouts:
        if not found or layout.memory_bytes < found[-1].memory_bytes:
            found.append(layout)
    return found


def strong_scaling(
    speeds: Mapping[str, Sequence[tuple[int, float]]], file: Path, *, title: str
) -> None:
    """Samples per second against GPUs, a line for each cluster, and what twice as many would give.

    Args:
        speeds: {cluster: (GPUs, samples per second)}.
        file: Path of the picture.
        title: Above it.
    """
    figure, axes = _canvas(title)
    for (cluster, points), marker in zip(speeds.items(), "osD^vPX*"):
        gpus = [number for number, _ in points]
        axes.plot(gpus, [speed for _, speed in points], marker=marker, label=cluster)
        ideal = [points[0][1] * number / gpus[0] for number in gpus]
        axes.plot(gpus, ideal, linestyle=":", color="#888888")
    axes.set_xscale("log")
    axes.set_yscale("log")
    numbers: set[int] = set()
    for points in speeds.values():
        numbers.update(number for number, _ in points)
    sizes = sorted(numbers)
    axes.set_xticks(sizes, [str(size) for size in sizes], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("GPUs (dotted: twice as many, twice as fast)")
    axes.set_ylabel("samples per second")
    axes.legend(frameon=False)
    figure.savefig(file)


def _canvas(title: str) -> tuple[Any, Any]:
    """An empty figure and its axes; matplotlib is imported here, so that a table does not wait."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title)
    axes.grid(True, color="#dddddd")
    axes.set_axisbelow(True)
    return figure, axes
