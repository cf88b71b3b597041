"""Every figure of the course in three lines; each function returns a picture, shown when it is a cell's last expression.

    plot.lines({"ring": times_s}, x=sizes, xlabel="bytes", ylabel="seconds", alt="Time grows linearly with size")
    plot.grid(GridShape(dp=2, tp=4), color_by="tp", nodes=2, alt="Each group of four neighbours has its own colour")

Plots of numbers are here, drawings of ranks and time lines in `diagrams`, of collectives in `exchanges`, of NCCL's links in
`transports`. `alt` says what the figure shows, for a reader who cannot see it.
"""

import os

import matplotlib as mpl
import numpy as np
from matplotlib.ticker import LogFormatter

from labcode.teach.figures.collectives import collective, collectives, ring
from labcode.teach.figures.nodes import transports
from labcode.teach.figures.style import (
    INK,
    MARKERS,
    PALETTE,
    RULE,
    STYLE,
    STYLES,
    Picture,
    canvas,
    described,
)
from labcode.teach.figures.timeline import grid, timeline

__all__ = [
    "bars",
    "collective",
    "collectives",
    "curves",
    "field",
    "grid",
    "heatmap",
    "lines",
    "ring",
    "timeline",
]
__all__ += ["transports"]


def lines(
    series: dict,
    *,
    alt: str,
    x=None,
    xlabel="",
    ylabel="",
    title="",
    logx=False,
    logy=False,
    marks=True,
    reference=None,
) -> Picture:
    """Lines with a legend; colour, dash and marker differ, so that no line depends on colour alone.

    Args:
        series: `{"label": y}`, or `{"label": (x, y)}` where the lines do not share `x`.
        alt: What the figure shows.
        x: Values for all lines; None counts 0, 1, 2, ...
        marks: A marker at each point.
        reference: `{"label": y}`, horizontal dashed lines to compare with.
    """
    figure, (axes,) = canvas(6.2, 3.2)
    with mpl.rc_context(STYLE):
        for i, (label, values) in enumerate(series.items()):
            xs, ys = (
                values
                if isinstance(values, tuple)
                else (x if x is not None else range(len(values)), values)
            )
            shape = {"marker": MARKERS[i % len(MARKERS)], "markersize": 5} if marks else {}
            style = STYLES[i // len(PALETTE) % 4] if marks else STYLES[i % 4]
            axes.plot(
                np.asarray(xs),
                np.asarray(ys),
                style,
                color=PALETTE[i % len(PALETTE)],
                label=label,
                lw=1.8,
                **shape,
            )
        axes.set(
            xlabel=xlabel,
            ylabel=ylabel,
            xscale="log" if logx else "linear",
            yscale="log" if logy else "linear",
        )
        _finish(axes, title, reference, legend=len(series) > 1 or bool(reference))
        for axis in (axes.xaxis, axes.yaxis):
            _plain_numbers(axis)
    return Picture(figure, described(alt))


def bars(
    values: dict,
    *,
    alt: str,
    xlabel="",
    ylabel="",
    title="",
    fmt="{:.3g}",
    reference=None,
    logy=False,
) -> Picture:
    """Bars with their values written on them; lie down when the labels are long.

    Args:
        values: `{"label": number}`, or `{"label": {"series": number}}` for groups of bars with a legend.
        alt: What the figure shows.
        ylabel: The quantity and its unit, whichever way the bars point.
        fmt: How a value is written on its bar; "" for none.
        reference: `{"label": value}`, dashed lines to compare with.
    """
    groups = {
        label: entry if isinstance(entry, dict) else {"": entry} for label, entry in values.items()
    }
    names = list(dict.fromkeys(name for entry in groups.values() for name in entry))
    lying = max(len(str(label)) for label in groups) * len(groups) > 64
    count = len(groups) * len(names)
    figure, (axes,) = canvas(6.2, max(2.0, 0.9 + 0.34 * count) if lying else 3.0)
    with mpl.rc_context(STYLE):
        for i, name in enumerate(names):
            at = np.arange(len(groups)) + (i - (len(names) - 1) / 2) * 0.8 / len(names)
            sizes = [entry.get(name, np.nan) for entry in groups.values()]
            draw, thickness = (axes.barh, "height") if lying else (axes.bar, "width")
            drawn = draw(
                at,
                sizes,
                color=PALETTE[i % len(PALETTE)],
                label=name,
                **{thickness: 0.72 / len(names)},
            )
            if fmt:
                labels = ["" if np.isnan(size) else fmt.format(size) for size in sizes]
                axes.bar_label(drawn, labels=labels, padding=2, fontsize=9)
        ticks, log = (
            (axes.set_yticks, axes.set_xscale) if lying else (axes.set_xticks, axes.set_yscale)
        )
        ticks(range(len(groups)), [str(label) for label in groups])
        if logy:
            log("log")
        axes.set(xlabel=ylabel if lying else xlabel, ylabel=xlabel if lying else ylabel)
        axes.margins(**{"x" if lying else "y": 0.12})
        if lying:
            axes.invert_yaxis()
        axes.grid(False, axis="y" if lying else "x")
        _finish(axes, title, reference, vertical=lying)
        if len(names) > 1 or reference:
            figure.legend(loc="outside upper right", ncols=4)
    return Picture(figure, described(alt))


def curves(
    runs: dict,
    *,
    alt: str,
    y="loss",
    x="step",
    xlabel=None,
    ylabel=None,
    title="",
    reference=None,
    logy=False,
) -> Picture:
    """Training curves from metrics.

    Args:
        runs: `{"label": rows or path}`; rows as `labcode.train.metrics.read` returns them, or where the file lies.
        alt: What the figure shows.
        y, x: Keys of the rows; a row without the key is passed over, so "val_loss" works.
        reference: `{"label": y}`, horizontal dashed lines.

    Raises:
        ValueError: No row of a run holds the keys.
    """
    series = {}
    for label, rows in runs.items():
        if isinstance(rows, (str, os.PathLike)):
            from labcode.train import metrics  # only here: a figure of numbers needs no torch

            rows = metrics.read(rows)
        pairs = [
            (row[x], row[y]) for row in rows if row.get(x) is not None and row.get(y) is not None
        ]
        if not pairs:
            raise ValueError(
                f"no row of {label!r} holds both {x!r} and {y!r}: they hold {sorted(rows[0]) if rows else 'nothing'}"
            )
        series[label] = tuple(zip(*pairs))
    marks = max(len(xs) for xs, _ in series.values()) <= 25
    labels = {"xlabel": xlabel or x, "ylabel": ylabel or y.replace("_", " ")}
    return lines(
        series, alt=alt, title=title, logy=logy, marks=marks, reference=reference, **labels
    )


def heatmap(
    matrix,
    *,
    alt: str,
    rows=None,
    columns=None,
    xlabel="",
    ylabel="",
    title="",
    unit="",
    fmt="{:.3g}",
) -> Picture:
    """A small matrix as coloured squares with the numbers in them, for instance bytes from rank to rank.

    Args:
        matrix: [rows, columns] numbers.
        alt: What the figure shows.
        rows, columns: Names along the sides; None numbers them.
        unit: Said beside the colour bar.
        fmt: How a number is written in its square; "" for none.
    """
    matrix = np.asarray(matrix, dtype=float)
    height, width = matrix.shape
    figure, (axes,) = canvas(min(6.4, 1.8 + 0.62 * width), min(5.0, 1.1 + 0.5 * height))
    with mpl.rc_context(STYLE):
        image = axes.imshow(matrix, cmap="cividis", aspect="auto")
        for (i, j), value in np.ndenumerate(matrix):
            dark = image.norm(value) < 0.55
            axes.text(
                j,
                i,
                fmt.format(value),
                ha="center",
                va="center",
                fontsize=9,
                color="white" if dark else INK,
            )
        axes.set_xticks(range(width), columns or range(width))
        axes.set_yticks(range(height), rows or range(height))
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.grid(False)
        figure.colorbar(image, ax=axes, label=unit)
        _finish(axes, title)
    return Picture(figure, described(alt))


def field(
    data, *, alt: str, unit="", title="", diverging=False, extent=(0, 360, -90, 90)
) -> Picture:
    """Weather maps side by side on one colour scale.

    Args:
        data: [lat, lon], north first, or `{"title": [lat, lon]}`.
        alt: What the figure shows.
        unit: Of the values, for the colour bar.
        diverging: Zero in the middle of the scale, for differences and errors.
        extent: Degrees: west, east, south, north.
    """
    maps = data if isinstance(data, dict) else {"": data}
    maps = {name: np.asarray(values, dtype=float) for name, values in maps.items()}
    low, high = min(m.min() for m in maps.values()), max(m.max() for m in maps.values())
    if diverging:
        low, high = -max(abs(low), abs(high)), max(abs(low), abs(high))
    width = 6.6 if len(maps) > 1 else 5.4
    side = (extent[3] - extent[2]) / (extent[1] - extent[0]) * (width - 1.2) / len(maps)
    figure, all_axes = canvas(
        width, side + (0.45 if title else 0.25) + (0.3 if len(maps) > 1 else 0.2), len(maps)
    )
    with mpl.rc_context(STYLE):
        for axes, (name, values) in zip(all_axes, maps.items()):
            colours = "RdBu_r" if diverging else "viridis"
            image = axes.imshow(
                values, cmap=colours, vmin=low, vmax=high, extent=extent, interpolation="nearest"
            )
            axes.set(
                title=name,
                xticks=np.linspace(*extent[:2], 3),
                yticks=np.linspace(*extent[2:], 3) if axes is all_axes[0] else [],
            )
            axes.tick_params(labelsize=8)
            axes.grid(False)
        figure.colorbar(image, ax=all_axes, label=unit, shrink=0.8, pad=0.02)
        if title:
            figure.suptitle(title, fontsize=11)
    return Picture(figure, described(alt))


def _plain_numbers(axis):
    """2, 5, 10 in place of 2 x 10^0, 10^1 on a log axis over small numbers."""
    low, high = axis.get_view_interval()
    if axis.get_scale() == "log" and low >= 0.5 and high <= 5000:
        axis.set_major_formatter(LogFormatter())
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def _finish(axes, title, reference=None, legend=False, vertical=False):
    for i, (label, value) in enumerate((reference or {}).items()):
        draw = axes.axvline if vertical else axes.axhline
        draw(value, color=INK if i == 0 else RULE, linestyle=STYLES[1 + i % 3], lw=1.3, label=label)
    if legend:
        axes.legend(loc="best")
    if title:
        axes.set_title(title, loc="left")
