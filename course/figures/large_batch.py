"""Drawings of large batches: noise in gradients, sweeps over batch and rate, rare messages.

Lesson 06 uses them; `plot.gradient_noise`, `plot.sweep`, `plot.steps_against_batch`,
`plot.rates_against_batch`, `plot.speed_and_price` and `plot.local_steps` are the ways in.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, Rectangle
from matplotlib.ticker import FixedLocator, NullLocator

from course.figures.style import (
    INK,
    PALETTE,
    RULE,
    STYLES,
    Picture,
    blank,
    canvas,
    figure,
    put_text,
)
from labcode.run import sweep_table
from labcode.run.sweep_table import Row, Tradeoff

ARROWS = 14  # gradients in each panel
NOISE = 1.1  # length of the noise of one sample, where the true gradient has length 1
RATE_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
OVERLAP = 0.6  # part of a message of gradients that travels during backward


@figure
def gradient_noise(batches: Sequence[int] = (1, 4, 16), *, alt: str) -> Picture:
    """The true gradient, and what batches of several sizes take for it: arrows from one point.

    Args:
        batches: Samples per batch, a panel each.
        alt: What the figure shows.
    """
    picture = canvas(6.6, 2.4, alt=alt, columns=len(batches))
    draws = np.random.default_rng(3).normal(size=(ARROWS, 2)) * NOISE / math.sqrt(2)
    for axes, batch in zip(picture.axes, batches):
        blank(axes)
        axes.set(xlim=(-1.6, 3.0), ylim=(-2.1, 2.1), aspect="equal")
        for x, y in draws / math.sqrt(batch):
            axes.annotate(
                "", (1 + x, y), (0, 0), arrowprops={"arrowstyle": "->", "color": PALETTE[4]}
            )
        truth = {"arrowstyle": "-|>", "color": INK, "lw": 2.2}
        axes.annotate("", (1, 0), (0, 0), arrowprops=truth)
        spread = Circle((1, 0), NOISE / math.sqrt(batch), fill=False, ls="--", ec=RULE)
        axes.add_patch(spread)
        samples = "1 sample" if batch == 1 else f"{batch} samples"
        axes.set_title(samples, fontsize=10)
    handles = [
        Line2D([], [], color=INK, lw=2.2, label="true gradient G"),
        Line2D([], [], color=PALETTE[4], lw=1.4, label="gradients of batches"),
        Line2D([], [], color=RULE, ls="--", label="mean length of the noise"),
    ]
    picture.figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return picture


@figure
def sweep(
    rows: Sequence[Row], *, alt: str, of: str = "val_loss", target: float = 0.0, title: str = ""
) -> Picture:
    """A sweep as a map: batches from left to right, rates upwards, the best rate of each framed.

    Where a run has not come to the target, the cell names the steps that it was given.

    Args:
        rows: Rows of one sweep; the means over their seeds are shown.
        alt: What the figure shows.
        of: "val_loss" or "loss" at the end, or "steps" to `target`.
        target: The loss for `of="steps"`.
        title: Above the figure.
    """
    batches, rates, matrix = _cells(rows, of, target)
    values = np.array(matrix, dtype=float)
    given = dict.fromkeys(batches, 0)  # steps that a run of this batch may make
    for row in rows:
        given[row.batch] = max(given[row.batch], row.steps)
    shown = np.where(np.isfinite(values), values, np.nan)
    picture = canvas(1.9 + 0.62 * len(batches), 1.3 + 0.45 * len(rates), alt=alt)
    axes = picture.axes[0]
    image = axes.imshow(np.log(shown), cmap="cividis_r", aspect="auto", origin="lower")
    darkness = np.asarray(image.norm(np.log(shown)))
    for (row, column), value in np.ndenumerate(values):
        if math.isnan(value):
            text = "-"
            colour = INK
        elif math.isinf(value):
            text = "diverged"
            colour = INK
            if of == "steps":
                text = f"> {given[batches[column]]}"
        else:
            text = f"{value:.0f}" if of == "steps" else f"{value:.3g}"
            colour = INK if darkness[row, column] < 0.5 else "white"
        put_text(axes, column, row, text, 8 if len(text) > 5 else 9, color=colour)
    for column in range(len(batches)):
        finite = [row for row in range(len(rates)) if math.isfinite(values[row, column])]
        if finite:
            best = min(finite, key=values[:, column].__getitem__)
            corner = (column - 0.46, best - 0.44)
            axes.add_patch(Rectangle(corner, 0.92, 0.88, fill=False, ec=PALETTE[5], lw=2.4))
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_yticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set(xlabel="batch, samples per step", ylabel="learning rate")
    axes.grid(False)
    if title:
        axes.set_title(title, loc="left")
    return picture


def _cells(
    rows: Sequence[Row], of: str, target: float
) -> tuple[list[int], list[float], list[list[float]]]:
    """(Batches, rates, what a cell shows): infinite where a run went wrong."""
    if of != "steps":
        return sweep_table.final_losses(rows, of=of)
    batches, rates, _ = sweep_table.final_losses(rows)
    groups = sweep_table.grouped(rows)
    matrix = []
    for lr in rates:
        line = []
        for batch in batches:
            same = groups.get((batch, lr), [])
            counts = [sweep_table.steps_to(row, target) for row in same]
            found = [count for count in counts if count is not None]
            whole = len(found) == len(same)
            if whole and found:
                line.append(np.mean(found))
            elif same:
                line.append(math.inf)  # a run has not reached the loss
            else:
                line.append(math.nan)  # nobody tried this rate with this batch
        matrix.append(line)
    return batches, rates, matrix


@figure
def steps_against_batch(
    measured: Mapping[float, float],
    curve: Tradeoff,
    *,
    alt: str,
    noise_scale: float | None = None,
    title: str = "",
) -> Picture:
    """Steps to a loss over the batch, with the fitted curve, its two ends and the critical batch.

    Args:
        measured: {batch: steps}.
        curve: The fitted curve.
        alt: What the figure shows.
        noise_scale: The mean of a run, drawn as an upright line beside the critical batch.
        title: Above the figure.
    """
    picture = canvas(6.8, 3.4, alt=alt)
    axes = picture.axes[0]
    batches = np.array(sorted(measured), dtype=float)
    steps = [measured[batch] for batch in sorted(measured)]
    fine = np.geomspace(batches[0], batches[-1], 100)
    axes.plot(batches, steps, "o", color=PALETTE[0], ms=7, label="measured")
    axes.plot(fine, [curve.steps(batch) for batch in fine], color=PALETTE[0], label="fitted curve")
    axes.plot(
        fine,
        curve.least_samples / fine,
        "--",
        color=PALETTE[1],
        label="half the steps for twice the batch",
    )
    axes.axhline(curve.least_steps, color=PALETTE[2], ls="-.", label="no more steps saved")
    axes.axvline(curve.critical_batch, color=INK, ls=":", label="critical batch, from the sweep")
    if noise_scale is not None:
        label = "noise scale, mean of a run"
        axes.axvline(noise_scale, color=PALETTE[3], ls="--", lw=1.3, label=label)
    axes.set(xscale="log", yscale="log", xlabel="batch, samples per step", ylabel="steps")
    _ticks_at(axes, batches)
    axes.set_ylim(min(steps) / 2, max(steps) * 1.5)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    if title:
        axes.set_title(title, loc="left")
    return picture


def _ticks_at(axes: Axes, batches: Sequence[float] | np.ndarray) -> None:
    """Ticks of a logarithmic x axis at the batches themselves."""
    axes.set_xticks(batches, [f"{batch:g}" for batch in batches])
    axes.xaxis.set_minor_locator(NullLocator())


@figure
def rates_against_batch(
    good: Mapping[int, Sequence[float]],
    curves: Mapping[str, Sequence[float]],
    *,
    alt: str,
    title: str = "",
) -> Picture:
    """The good rates of each batch in a sweep as bars, and what rules say as lines.

    Args:
        good: {batch: its good rates}, those of a grid; a bar is from the lowest to the highest.
        curves: {rule: a rate for each batch}.
        alt: What the figure shows.
        title: Above the figure.
    """
    picture = canvas(6.2, 4.0, alt=alt)
    axes = picture.axes[0]
    batches = np.array(sorted(good), dtype=float)
    label = "good rates of the sweep"
    for batch in sorted(good):
        rates = sorted(good[batch])
        place = [batch] * len(rates)
        axes.plot(place, rates, "o-", color=RULE, lw=7, ms=7, alpha=0.55, label=label)
        label = "_"  # once in the legend
    for number, (name, rates) in enumerate(curves.items()):
        style = STYLES[number % len(STYLES)]
        axes.plot(batches, rates, style, color=PALETTE[number], lw=1.8, label=name)
    axes.set(xscale="log", yscale="log", xlabel="batch, samples per step", ylabel="learning rate")
    _ticks_at(axes, batches)
    highest = max(max(rates) for rates in good.values())
    lowest = min(min(rates) for rates in good.values())
    axes.set_ylim(lowest / 2.5, highest * 4)
    axes.yaxis.set_major_locator(FixedLocator(RATE_TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    picture.figure.legend(loc="outside lower center", ncols=3)
    if title:
        axes.set_title(title, loc="left")
    return picture


@figure
def speed_and_price(
    times: Mapping[int, float], prices: Mapping[int, float], *, alt: str, title: str = ""
) -> Picture:
    """Price over time to a loss, both as multiples of one device's; the devices stand beside.

    Args:
        times: {devices: time to the loss}, relative.
        prices: {devices: device hours to the loss}, relative.
        alt: What the figure shows.
        title: Above the figure.
    """
    picture = canvas(6.2, 3.2, alt=alt)
    axes = picture.axes[0]
    xs = [times[devices] for devices in times]
    ys = [prices[devices] for devices in times]
    axes.plot(xs, ys, "o-", color=PALETTE[0], lw=1.8)
    for devices, x, y in zip(times, xs, ys):
        name = "1 device" if devices == 1 else f"{devices} devices"
        axes.annotate(name, (x, y), (7, 5), textcoords="offset points", fontsize=9)
    axes.set(xlabel="time to the loss, relative to one device", ylabel="device hours, relative")
    axes.set_xlim(0, 1.2 * max(xs))
    axes.set_ylim(0, 1.15 * max(ys))
    if title:
        axes.set_title(title, loc="left")
    return picture


@figure
def local_steps(inner_steps: int = 4, num_ranks: int = 2, *, alt: str) -> Picture:
    """Time lines of two ways to train: gradients averaged at each step, or weights now and then.

    Gradients travel while backward still computes, as DDP sends them; weights only after the last
    step. A message takes as long as a step either way.

    Args:
        inner_steps: H, steps between two averages of the weights.
        num_ranks: Lanes of each way; one for the network comes beneath.
        alt: What the figure shows.
    """
    picture = canvas(6.6, 1.6 + 0.75 * num_ranks, alt=alt, rows=2)
    names = ("gradients averaged at each step", f"weights averaged every {inner_steps} steps")
    overlaps = (OVERLAP, 0.0)
    for axes, name, every, overlap in zip(picture.axes, names, (1, inner_steps), overlaps):
        axes.set_title(name, loc="left", fontsize=10)
        axes.set(xlim=(0, 2 * inner_steps * (2.02 - OVERLAP)), ylim=(num_ranks + 0.5, -0.5))
        axes.grid(False)
        axes.set_xticks([])
        lanes = [f"rank {rank}" for rank in range(num_ranks)]
        axes.set_yticks(range(num_ranks + 1), [*lanes, "network"])
        now = 0.0
        for step in range(1, 2 * inner_steps + 1):
            for rank in range(num_ranks):
                box = Rectangle((now, rank - 0.36), 0.97, 0.72, fc=PALETTE[4], ec=INK, lw=0.5)
                axes.add_patch(box)
                put_text(axes, now + 0.48, rank, str(step), 8, color=INK)
            now += 1
            if step % every == 0:
                start = now - overlap
                bar = Rectangle((start, num_ranks - 0.36), 0.97, 0.72)
                bar.set(facecolor=PALETTE[1], edgecolor=INK, linewidth=0.5, hatch="//")
                axes.add_patch(bar)
                now = start + 1
    picture.axes[-1].set_xlabel("time; numbers are steps, hatched is a message")
    return picture
