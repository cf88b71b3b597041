"""Plots of numbers: lines, training curves, bars, matrices and weather maps.

All lessons use them; `plot.lines` and so on are the way in.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import (
    FormatStrFormatter,
    LogFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
)
from numpy.typing import ArrayLike

from course.figures.style import (
    INK,
    MARKERS,
    MEMORY_COLOURS,
    PALETTE,
    RULE,
    STYLES,
    Picture,
    canvas,
    figure,
    put_text,
)
from labcode.measure import metrics

POINT_MARKERS = (
    {"marker": "o", "ms": 11, "mfc": "none"},
    {"marker": "D", "ms": 7, "mfc": INK},
    {"marker": "s", "ms": 10, "mfc": "none"},
)
MAX_MARKED_POINTS = 25  # a curve with more points is drawn without markers
MAX_OWN_TICKS = 8  # an x axis with no more values, all of them whole, has its ticks there
MAX_TICKS_ACROSS = 14  # that closely they do not run into each other
MAX_TICK = 5000  # larger numbers are too long for such ticks
MAX_DECADES = 100  # from one end of a log axis to the other, for ticks at 0.1, 0.2, 0.5, 1
LONG_NAME = 8  # characters of a row or a column of a heatmap, beyond which it needs room
MAX_LABEL_CHARACTERS = 64  # bars whose labels take more characters together lie down

Rows = Iterable[Mapping[str, Any]]  # of metrics, as `labcode.measure.metrics.read` returns them


# ---- lines


@figure
def lines(
    series: Mapping[str, ArrayLike | tuple[ArrayLike, ArrayLike]],
    *,
    alt: str,
    x: ArrayLike | None = None,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    logx: bool = False,
    logy: bool = False,
    from_zero: bool = False,
    marks: bool | Collection[str] = True,
    reference: Mapping[str, float] | None = None,
    upright: Mapping[str, float] | None = None,
    wide: str = "",
    beside: bool = False,
    points: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
    bands: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
) -> Picture:
    """Lines with a legend; colour, dash and marker differ, so that no line depends on colour alone.

    Args:
        series: `{"label": y}`, or `{"label": (x, y)}` where the lines do not share `x`.
        alt: What the figure shows.
        x: Values for all lines; None counts 0, 1, 2, ...
        xlabel: The quantity and its unit.
        ylabel: The quantity and its unit.
        title: Above the figure.
        logx: Logarithmic x axis.
        logy: Logarithmic y axis.
        from_zero: The y axis begins at 0, so that heights can be compared.
        marks: A marker at each point: of all lines, of none, or of those with these labels.
        reference: `{"label": y}`, horizontal dashed lines to compare with.
        upright: `{"label": x}`, vertical dotted lines.
        wide: Label of a line that others may cover: drawn as a wide pale band beneath them.
        beside: The legend stands beside the axes, where many lines leave no room for it.
        points: `{"label": (x, y)}`, places with a circle around them; of a second label diamonds.
        bands: `{"label": (lower y, upper y)}`, grey areas: what seeds alone change, for instance.
    """
    picture = canvas(6.2, 3.2, alt=alt)
    axes = picture.axes[0]
    for label, (low, high) in (bands or {}).items():
        xs, lower = _points(low, x)
        axes.fill_between(xs, lower, np.asarray(high), color=RULE, alpha=0.35, lw=0, label=label)
    places: set[float] = set()
    drawn = [label for label in series if label != wide]  # the wide line takes no style from these
    for label, values in series.items():
        xs, ys = _points(values, x)
        places.update(xs.tolist())
        if label == wide:
            axes.plot(xs, ys, label=label, lw=9, color=RULE, alpha=0.45, zorder=1.5)
            continue
        has_marks = marks if isinstance(marks, bool) else label in marks
        axes.plot(xs, ys, label=label, lw=1.8, **_line_style(drawn.index(label), has_marks))
    axes.set(xlabel=xlabel, ylabel=ylabel, xscale=_scale(logx), yscale=_scale(logy))
    _draw_references(axes.axhline, reference)
    for label, place in (upright or {}).items():
        axes.axvline(place, color=INK, linestyle=":", lw=1.3, label=label)
    for number, (label, (xs, ys)) in enumerate((points or {}).items()):
        marker = POINT_MARKERS[number % len(POINT_MARKERS)]
        axes.plot(xs, ys, label=label, ls="none", mec=INK, mew=1.4, **marker)
    if from_zero:
        axes.set_ylim(bottom=0)
    if len(series) > 1 or reference or upright or points or bands:
        if beside:
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        else:
            axes.legend(loc="best")
    _set_title(axes, title)
    for axis in (axes.xaxis, axes.yaxis):
        _plain_numbers(axis)
    _whole_ticks(axes.xaxis, sorted(places))
    return picture


def _points(
    values: ArrayLike | tuple[ArrayLike, ArrayLike], x: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of one line of `lines`."""
    if isinstance(values, tuple):
        xs, ys = values
        return np.asarray(xs), np.asarray(ys)
    ys = np.asarray(values)
    if x is None:
        return np.arange(len(ys)), ys
    return np.asarray(x), ys


def _line_style(i: int, marks: bool) -> dict[str, Any]:
    """How line number `i` looks: colour and dash, and a marker if there are `marks`."""
    style: dict[str, Any] = {"color": _cycled(PALETTE, i)}
    if not marks:
        style["linestyle"] = _cycled(STYLES, i)
        return style
    style["marker"] = _cycled(MARKERS, i)
    style["markersize"] = 5
    # Markers tell lines apart already: the dash changes only when the colours begin again.
    style["linestyle"] = _cycled(STYLES, i // len(PALETTE))
    return style


def _cycled(choices: Sequence[str], i: int) -> str:
    return choices[i % len(choices)]


def _scale(logarithmic: bool) -> str:
    return "log" if logarithmic else "linear"


def _plain_numbers(axis: Axis) -> None:
    """0.2, 0.5, 1 and 2, 5, 10 in place of powers of ten on a log axis over small numbers."""
    low, high = axis.get_view_interval()
    if axis.get_scale() == "log" and 0.01 <= low < 0.5 and high <= MAX_DECADES * low:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_locator(NullLocator())
        return
    if axis.get_scale() == "log" and low >= 0.5 and high <= 5000:
        axis.set_major_formatter(LogFormatter())
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def _whole_ticks(axis: Axis, places: Sequence[float]) -> None:
    """Counts have no halves: ticks at few whole numbers, or at whole numbers at least."""
    is_log = axis.get_scale() == "log"
    if not places or any(place != int(place) for place in places) or (is_log and places[0] <= 0):
        return
    at = np.log2(places) if is_log else np.asarray(places)
    is_roomy = len(places) == 1 or np.diff(at).min() >= (at[-1] - at[0]) / MAX_TICKS_ACROSS
    if len(places) <= MAX_OWN_TICKS and places[-1] <= MAX_TICK and is_roomy:
        axis.set_ticks(places, [f"{place:g}" for place in places])
        axis.set_minor_locator(NullLocator())
    elif not is_log:
        axis.set_major_locator(MaxNLocator(integer=True))


# ---- training curves


@figure
def curves(
    runs: Mapping[str, Rows | str | os.PathLike[str]],
    *,
    alt: str,
    y: str = "loss",
    x: str = "step",
    xlabel: str | None = None,
    ylabel: str | None = None,
    title: str = "",
    reference: Mapping[str, float] | None = None,
    logy: bool = False,
) -> Picture:
    """Training curves from metrics.

    Args:
        runs: `{"label": rows or path}`: rows as `labcode.measure.metrics.read` returns them, or the
            path of their file.
        alt: What the figure shows.
        y: Key of the rows; a row without it is skipped, so "val_loss" works.
        x: Key of the rows, as `y`.
        xlabel: None: the key.
        ylabel: None: the key.
        title: Above the figure.
        reference: `{"label": y}`, horizontal dashed lines.
        logy: Logarithmic y axis.

    Raises:
        ValueError: No row of a run holds the keys.
    """
    series = {}
    marked = []
    for label, run in runs.items():
        rows = _rows(run)
        xs, ys = _columns(rows, x, y)
        if not xs:
            found = sorted(rows[0]) if rows else "nothing"
            raise ValueError(f"no row of {label!r} holds both {x!r} and {y!r}: they hold {found}")
        series[label] = (xs, ys)
        if len(xs) <= MAX_MARKED_POINTS:
            marked.append(label)
    return lines(
        series,
        alt=alt,
        xlabel=xlabel or x,
        ylabel=ylabel or y.replace("_", " "),
        title=title,
        logy=logy,
        marks=marked,
        reference=reference,
    )


def _rows(run: Rows | str | os.PathLike[str]) -> list[Mapping[str, Any]]:
    if isinstance(run, (str, os.PathLike)):
        return list(metrics.read(os.fspath(run)))
    return list(run)


def _columns(rows: Rows, x: str, y: str) -> tuple[list[float], list[float]]:
    """The values of two keys, from the rows that hold both."""
    xs = []
    ys = []
    for row in rows:
        if row.get(x) is None or row.get(y) is None:
            continue
        xs.append(row[x])
        ys.append(row[y])
    return xs, ys


# ---- bars


@figure
def bars(
    values: Mapping[str, float | Mapping[str, float]],
    *,
    alt: str,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    fmt: str = "{:.3g}",
    reference: Mapping[str, float] | None = None,
    logy: bool = False,
    stacked: bool = False,
) -> Picture:
    """Bars with their values written on them; they lie down when the labels are long.

    Args:
        values: `{"label": number}`, or `{"label": {"series": number}}` for groups of bars with a
            legend.
        alt: What the figure shows.
        xlabel: What the labels are.
        ylabel: The quantity and its unit, whichever way the bars point.
        title: Above the figure.
        fmt: How a value is written on its bar; "" for none.
        reference: `{"label": value}`, dashed lines to compare with.
        logy: Logarithmic axis for the values.
        stacked: The series of a label lie one behind the other, with their sum at the end. Kinds
            of memory have the colours that they have everywhere.
    """
    labels = list(map(str, values))
    series = _by_series(values, missing=0.0 if stacked else np.nan)
    longest = max(map(len, labels))
    horizontal = longest * len(labels) > MAX_LABEL_CHARACTERS
    height_in = 3.0
    if horizontal:
        num_bars = len(labels) * (1 if stacked else len(series))
        height_in = max(2.0, 0.9 + 0.34 * num_bars)
    picture = canvas(6.2, height_in, alt=alt)
    axes = picture.axes[0]

    beside = 1 if stacked else len(series)
    slot = 0.8 / beside  # the bars of a label share 0.8 of the distance between labels
    begins = np.zeros(len(labels))
    for i, (name, sizes) in enumerate(series.items()):
        offset = 0.0 if stacked else (i - (len(series) - 1) / 2) * slot
        at = np.arange(len(labels)) + offset
        thickness = 0.72 / beside
        colour = _cycled(PALETTE, i)
        if stacked:
            colour = MEMORY_COLOURS.get(name, colour)
        if horizontal:
            drawn = axes.barh(at, sizes, thickness, left=begins, color=colour, label=name)
        else:
            drawn = axes.bar(at, sizes, thickness, bottom=begins, color=colour, label=name)
        written: Sequence[float] = sizes
        if stacked:
            begins = begins + np.array(sizes)
            written = list(begins)
        is_last = i == len(series) - 1
        if fmt and (is_last or not stacked):
            texts = axes.bar_label(drawn, labels=_formatted(written, fmt), padding=2, fontsize=9)
            if reference:  # no dashed line runs through a number
                for text in texts:
                    text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})

    if horizontal:
        axes.set_yticks(range(len(labels)), labels)
        axes.set(xlabel=ylabel, ylabel=xlabel, xscale=_scale(logy))
        axes.margins(x=0.12)
        if stacked:
            axes.set_xlim(0, 1.12 * max(begins))
        axes.invert_yaxis()  # the first label on top
        axes.grid(False, axis="y")
        _draw_references(axes.axvline, reference)
    else:
        axes.set_xticks(range(len(labels)), labels)
        axes.set(xlabel=xlabel, ylabel=ylabel, yscale=_scale(logy))
        axes.margins(y=0.12)
        if stacked:
            axes.set_ylim(0, 1.12 * max(begins))
        axes.grid(False, axis="x")
        _draw_references(axes.axhline, reference)
    _set_title(axes, title)
    if len(series) > 1 or reference:
        picture.figure.legend(loc="outside lower center", ncols=4)
    return picture


def _by_series(
    values: Mapping[str, float | Mapping[str, float]], missing: float
) -> dict[str, list[float]]:
    """{series: a value for each label}, `missing` where a label has none.

    Plain numbers are a series without a name.
    """
    series: dict[str, list[float]] = {}
    for place, entry in enumerate(values.values()):
        group = entry if isinstance(entry, Mapping) else {"": entry}
        for name, value in group.items():
            sizes = series.setdefault(name, [missing] * len(values))
            sizes[place] = value
    return series


def _formatted(sizes: Iterable[float], fmt: str) -> list[str]:
    """What is written on the bars: nothing where there is none."""
    return ["" if np.isnan(size) else fmt.format(size) for size in sizes]


# ---- matrices and maps


@figure
def heatmap(
    matrix: ArrayLike,
    *,
    alt: str,
    rows: Sequence[Any] | None = None,
    columns: Sequence[Any] | None = None,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    unit: str = "",
    fmt: str = "{:.3g}",
) -> Picture:
    """A small matrix as coloured squares with numbers: bytes from rank to rank, for instance.

    Args:
        matrix: [rows, columns] numbers.
        alt: What the figure shows.
        rows: Names along the left side; None numbers them.
        columns: Names along the lower side; None numbers them.
        xlabel: What the columns are.
        ylabel: What the rows are.
        title: Above the figure.
        unit: Written beside the colour bar.
        fmt: How a number is written in its square; "" for none.
    """
    values = np.asarray(matrix, dtype=float)
    height, width = values.shape
    # long names need room: beside the squares, and below them
    beside = max((len(str(name)) for name in rows or ()), default=0)
    below = max((len(str(name)) for name in columns or ()), default=0)
    square_in = 0.62 if below <= LONG_NAME else 0.1 * below
    width_in = 1.8 + square_in * width + (0.085 * beside if beside > LONG_NAME else 0)
    width_in = min(6.4, width_in)
    height_in = min(5.0, 1.1 + 0.5 * height)
    picture = canvas(width_in, height_in, alt=alt)
    axes = picture.axes[0]
    image = axes.imshow(values, cmap="cividis", aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        is_dark = np.asarray(image.norm(value)) < 0.55
        colour = "white" if is_dark else INK
        put_text(axes, column, row, fmt.format(value), 9, color=colour)
    axes.set_xticks(range(width), columns or range(width))
    axes.set_yticks(range(height), rows or range(height))
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(False)
    picture.figure.colorbar(image, ax=axes, label=unit)
    _set_title(axes, title)
    return picture


def _draw_references(draw: Callable[..., Any], reference: Mapping[str, float] | None) -> None:
    """Dashed lines to compare with, the first one in black.

    Args:
        draw: `axes.axhline` or `axes.axvline`.
        reference: {label: value}.
    """
    if reference is None:
        return
    for i, (label, value) in enumerate(reference.items()):
        colour = INK if i == 0 else RULE
        dash = _cycled(STYLES[1:], i)
        draw(value, color=colour, linestyle=dash, lw=1.3, label=label)


def _set_title(axes: Axes, title: str) -> None:
    if title:
        axes.set_title(title, loc="left")
