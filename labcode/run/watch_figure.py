"""The figure of `watch`: loss, speed, how busy the device is and its memory, over the steps."""

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from labcode.run.run_files import TITLES, Look, series, shown, table
from labcode.runtime.units import si

OWN = "#0072B2"  # Okabe and Ito's blue and orange, which all readers can tell apart
HELD_OUT = "#D55E00"
REFERENCE = "#767676"
DPI = 160
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


class Picture:
    """What a notebook shows of a run: the figure, with the table of `watch` as its text.

    Args:
        seen: The run.
    """

    def __init__(self, seen: Look) -> None:
        self.seen = seen

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        source = base64.b64encode(png(self.seen)).decode()
        alt = html.escape(described(self.seen))
        image = f'<img alt="{alt}" width="860" src="data:image/png;base64,{source}">'
        return {"text/html": image, "image/png": source, "text/plain": table(self.seen)}


def described(seen: Look) -> str:
    """One sentence for those who cannot see the figure."""
    said = [f"{seen.folder.name} is at step {seen.step} of {seen.steps}, {seen.state}"]
    for name, title in TITLES.items():
        _, values = seen.series(name)
        if values:
            said.append(f"{title} {shown(name, values[-1])}")
    return ", ".join(said)


def png(seen: Look) -> bytes:
    """The figure: four panels over the steps, those without numbers left out."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 4.8), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(2, 2, sharex=True)
        title = f"{seen.folder.name}: step {seen.step} of {seen.steps}, {seen.state}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        _losses(panels[0, 0], seen)
        _numbers(panels[0, 1], seen, "tokens_per_s", "tokens/s")
        panels[0, 1].yaxis.set_major_formatter(FuncFormatter(_thousands))
        _numbers(panels[1, 0], seen, "utilisation", "device busy")
        panels[1, 0].set_ylim(0, 1.05)
        panels[1, 0].yaxis.set_major_formatter(PercentFormatter(1.0))
        _numbers(panels[1, 1], seen, "memory_bytes", "memory")
        panels[1, 1].yaxis.set_major_formatter(FuncFormatter(_bytes))
        for panel in panels[1]:
            panel.set_xlabel("optimizer step")
            panel.set_xlim(0, max(seen.steps, 1))
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=DPI)
    return drawn.getvalue()


def _losses(axes: Axes, seen: Look) -> None:
    """The run's own losses over those of the reference run."""
    axes.set_title("loss", loc="left", fontsize=10)
    _line(axes, seen.reference_rows, "loss", "reference", color=REFERENCE, linestyle="--")
    _line(axes, seen.rows, "loss", "training", color=OWN)
    _line(axes, seen.rows, "val_loss", "validation", color=HELD_OUT, marker="o", linestyle="")
    held_out = {"color": REFERENCE, "marker": "o", "linestyle": "", "markerfacecolor": "none"}
    _line(axes, seen.reference_rows, "val_loss", "reference, validation", **held_out)
    if axes.lines:
        axes.legend(fontsize=8)


def _line(
    axes: Axes, rows: Sequence[dict[str, float]], name: str, label: str, **style: Any
) -> None:
    steps, values = series(rows, name)
    if values:
        axes.plot(steps, values, label=label, linewidth=1.3, markersize=4, **style)


def _numbers(axes: Axes, seen: Look, name: str, title: str) -> None:
    """One number of the run; a first value alone is a point."""
    axes.set_title(title, loc="left", fontsize=10)
    steps, values = seen.series(name)
    if values:
        axes.plot(steps, values, color=OWN, linewidth=1.0, marker="." if len(values) < 30 else "")
        axes.set_ylim(0, 1.1 * max(values) or 1)
    else:
        axes.text(0.5, 0.5, "no samples yet", transform=axes.transAxes, ha="center")


def _thousands(value: float, position: int) -> str:
    return f"{value:,.0f}"


def _bytes(value: float, position: int) -> str:
    return si(value, "B")
