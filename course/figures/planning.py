"""Drawings of a plan: what a step is made of, layouts on a map, efficiency against GPUs.

Lessons 20 and 21 use them; `plot.step_anatomy`, `plot.layout_map`, `plot.scaling` and
`plot.step_parts` are the ways in.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from course.figures.style import (
    INK,
    MARKERS,
    PALE,
    PALETTE,
    RULE,
    STYLES,
    Picture,
    canvas,
    figure,
    put_headline,
    put_text,
)

PARTS = {"product": PALETTE[4], "tp": PALETTE[1], "pp": PALETTE[2], "dp": PALETTE[5]}
IDLE = "white"
TAIL = 1.6  # of the all-reduce at the end of a step, in widths of a box


@figure
def step_anatomy(stages: int, micro_batches: int, *, alt: str, title: str = "") -> Picture:
    """A step on each stage of a pipeline, forward and backward of a micro-batch as one box.

    Args:
        stages: Rows.
        micro_batches: Boxes in a row.
        alt: What the figure shows.
        title: Above the figure.
    """
    picture = canvas(6.8, 1.5 + 0.42 * stages, alt=alt)
    axes = picture.axes[0]
    end = micro_batches + stages - 1
    for stage in range(stages):
        axes.barh(stage, end, color=IDLE, edgecolor=RULE, height=0.62, hatch="//", lw=0.8)
        for number in range(micro_batches):
            _micro_batch(axes, stage + number, stage)
        axes.barh(stage, TAIL, left=end, color=PARTS["dp"], edgecolor=INK, height=0.62, lw=0.8)
    put_text(axes, end + TAIL / 2, -0.75, "dp", 9)
    _span(axes, 0, micro_batches, -0.75, f"m = {micro_batches} micro-batches")
    _span(axes, micro_batches, end, -0.75, "pp - 1")
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.set_ylim(stages - 0.4, -1.25)
    axes.set_xlim(0, end + TAIL + 0.1)
    axes.set_xticks([])
    axes.set_xlabel("time (hatched: the bubble)")
    axes.grid(False)
    handles = []
    for name, label in {
        "product": "products",
        "tp": "tp's all-reduces",
        "pp": "messages",
        "dp": "gradients",
    }.items():
        handles.append(Patch(facecolor=PARTS[name], edgecolor=INK, label=label))
    picture.figure.legend(handles=handles, loc="outside lower center", ncols=4)
    put_headline(picture, title)
    return picture


def _micro_batch(axes: Axes, start: float, row: float) -> None:
    widths = {"product": 0.66, "tp": 0.22, "pp": 0.12}
    for name, width in widths.items():
        axes.barh(row, width, left=start, color=PARTS[name], edgecolor=INK, height=0.62, lw=0.8)
        start += width


def _span(axes: Axes, left: float, right: float, y: float, text: str) -> None:
    axes.annotate("", (right, -0.42), (left, -0.42), arrowprops={"arrowstyle": "<->", "color": INK})
    put_text(axes, (left + right) / 2, y, text, 9)


@figure
def layout_map(
    groups: Mapping[str, Sequence[tuple[float, float]]],
    *,
    limit_gib: float,
    alt: str,
    title: str = "",
    named: Mapping[str, tuple[float, float]] | None = None,
) -> Picture:
    """Every layout as a point, seconds of a step to the right, memory upwards; and their front.

    Args:
        groups: {kind of layout: (seconds, GiB)}.
        limit_gib: What a GPU can give; those above it do not fit.
        alt: What the figure shows.
        title: Above the figure.
        named: {name: (seconds, GiB)}, which have a number and stand in the legend.
    """
    picture = canvas(6.8, 3.7, alt=alt)
    axes = picture.axes[0]
    for number, (name, points) in enumerate(groups.items()):
        seconds = [point[0] for point in points]
        memory_gib = [point[1] for point in points]
        axes.scatter(
            seconds,
            memory_gib,
            s=16,
            marker=MARKERS[number % len(MARKERS)],
            color=PALETTE[number % len(PALETTE)],
            alpha=0.6,
            edgecolors=INK,
            linewidths=0.3,
            label=name,
        )
    front = _front(itertools.chain.from_iterable(groups.values()))
    axes.step(*zip(*front), where="post", color=INK, lw=1.2, label="Pareto front", gid="front")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axhspan(limit_gib, axes.get_ylim()[1], color=PALE, zorder=0)
    axes.axhline(limit_gib, color=INK, ls="--", lw=1.2, label="what a GPU has for it")
    for number, (name, place) in enumerate((named or {}).items(), 1):
        axes.plot(*place, ls="none", marker="o", ms=11, mfc="none", mec=INK, mew=1.4)
        # away from the cloud of points, on a ground of its own, with a line to its circle
        axes.annotate(
            f"{number}",
            place,
            (16, 22),
            textcoords="offset points",
            fontweight="bold",
            fontsize=10,
            bbox={"boxstyle": "circle,pad=0.2", "facecolor": "white", "edgecolor": INK},
            arrowprops={"arrowstyle": "-", "color": INK, "shrinkB": 5},
        )
        axes.plot([], [], ls="none", label=f"{number}  {name}")
    axes.margins(0.04)
    for axis, label in ((axes.xaxis, "s"), (axes.yaxis, "GiB")):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g} " + label)
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("seconds of a step")
    axes.set_ylabel("memory of the fullest rank")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8.5)
    put_headline(picture, title)
    return picture


def _front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those than which no other is both faster and smaller, the fastest first."""
    front: list[tuple[float, float]] = []
    for seconds, memory in sorted(points):
        if not front or memory < front[-1][1]:
            front.append((seconds, memory))
    return front


@figure
def scaling(
    curves: Mapping[str, Sequence[tuple[int, float, str]]], *, alt: str, title: str = ""
) -> Picture:
    """The share of a step that is arithmetic, against GPUs; at each point what limits it.

    Args:
        curves: {name: (GPUs, share, limit)}, a panel for each.
        alt: What the figure shows.
        title: Above the figure.
    """
    picture = canvas(6.8, 1.0 + 2.1 * len(curves), alt=alt, rows=len(curves))
    for number, (axes, (name, points)) in enumerate(zip(picture.axes, curves.items(), strict=True)):
        gpus = [point[0] for point in points]
        shares = [point[1] for point in points]
        style = STYLES[number % len(STYLES)]
        axes.plot(gpus, shares, marker="o", ls=style, color=PALETTE[number % len(PALETTE)], lw=1.8)
        for size, share, limit in points:
            axes.annotate(
                limit, (size, share), (0, -15), textcoords="offset points", ha="center", fontsize=8
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpus, [f"{size:,}" for size in gpus])
        axes.minorticks_off()
        axes.set_ylim(0, 1.08)
        axes.set_xlim(min(gpus) / 1.4, max(gpus) * 1.4)
        axes.set_ylabel("share that is arithmetic")
        axes.set_title(name, fontsize=10, loc="left")
    picture.axes[-1].set_xlabel("GPUs (below each point: what limits it)")
    put_headline(picture, title)
    return picture


# of the parts of an estimate: where they belong, their colour and their hatch
SHOWN = {
    "products and attention": (("product", "attention", "elementwise", "launch"), 4, ""),
    "checkpointing": (("checkpointing",), 3, "//"),
    "tp": (("tp",), 1, ".."),
    "pipeline": (("pp", "bubble"), 2, "xx"),
    "dp": (("dp", "fsdp"), 5, "\\\\"),
    "optimizer": (("optimizer",), 7, ""),
}


@figure
def step_parts(bars: Mapping[str, Mapping[str, float]], *, alt: str, title: str = "") -> Picture:
    """What a predicted step is made of, a bar for each layout.

    Args:
        bars: {name: {part: seconds}}, as `perf.estimate.Estimate.parts` has them.
        alt: What the figure shows.
        title: Above the figure.
    """
    picture = canvas(6.8, 1.5 + 0.52 * len(bars), alt=alt)
    axes = picture.axes[0]
    longest_s = max(sum(parts.values()) for parts in bars.values())
    seen = []
    for row, parts in enumerate(bars.values()):
        begin_s = 0.0
        for name, (members, colour, hatch) in SHOWN.items():
            width_s = sum(parts.get(member, 0.0) for member in members)
            if width_s < 0.002 * longest_s:
                continue
            if name not in seen:
                seen.append(name)
            axes.barh(
                row,
                width_s,
                left=begin_s,
                color=PALETTE[colour],
                hatch=hatch,
                edgecolor=INK,
                height=0.62,
                lw=0.7,
            )
            begin_s += width_s
        total_s = sum(parts.values())
        put_text(axes, begin_s, row, f" {total_s:.2f} s", 9, ha="left")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 1.14 * longest_s)
    axes.set_xlabel("seconds of a step")
    axes.grid(axis="y", visible=False)
    handles = []
    for name in SHOWN:
        if name in seen:
            _, colour, hatch = SHOWN[name]
            handles.append(Patch(facecolor=PALETTE[colour], hatch=hatch, edgecolor=INK, label=name))
    picture.figure.legend(handles=handles, loc="outside lower center", ncols=3)
    put_headline(picture, title)
    return picture
