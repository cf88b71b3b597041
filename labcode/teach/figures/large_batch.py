"""Drawings of large batches: noise in gradients, sweeps over batch and rate, rare messages.

Lesson 06 uses them; `plot.gradient_noise`, `plot.sweep`, `plot.steps_against_batch` and
`plot.local_steps` are the ways in.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Circle, Rectangle

from labcode.teach.figures.style import (
    INK,
    PALETTE,
    RULE,
    Picture,
    blank,
    canvas,
    figure,
    put_text,
)
from labcode.train import sweep_table
from labcode.train.sweep_table import Row, Tradeoff

ARROWS = 14  # gradients in each panel
NOISE = 1.1  # length of the noise of one sample, where the true gradient has length 1


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
    return picture


@figure
def sweep(
    rows: Sequence[Row], *, alt: str, of: str = "val_loss", target: float = 0.0, title: str = ""
) -> Picture:
    """A sweep as a map: batches from left to right, rates upwards, the best rate of each framed.

    Args:
        rows: Of one sweep; the means over their seeds are shown.
        alt: What the figure shows.
        of: "val_loss" or "loss" at the end, or "steps" to `target`.
        target: The loss for `of="steps"`.
        title: Above the figure.
    """
    batches, rates, matrix = _cells(rows, of, target)
    values = np.array(matrix, dtype=float)
    shown = np.where(np.isfinite(values), values, np.nan)
    picture = canvas(1.9 + 0.62 * len(batches), 1.3 + 0.45 * len(rates), alt=alt)
    axes = picture.axes[0]
    image = axes.imshow(np.log(shown), cmap="cividis_r", aspect="auto", origin="lower")
    darkness = np.asarray(image.norm(np.log(shown)))
    for (row, column), value in np.ndenumerate(values):
        if math.isnan(value):
            text, colour = "-", INK
        elif math.isinf(value):
            text, colour = "never" if of == "steps" else "diverged", INK
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
            line.append(np.mean(found) if whole and found else math.inf if same else math.nan)
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
        curve: As fitted.
        alt: What the figure shows.
        noise_scale: Drawn as an upright line beside the critical batch.
        title: Above the figure.
    """
    picture = canvas(6.2, 3.4, alt=alt)
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
        axes.axvline(noise_scale, color=PALETTE[3], ls="--", lw=1.3, label="noise scale")
    axes.set(xscale="log", yscale="log", xlabel="batch, samples per step", ylabel="steps")
    axes.set_ylim(min(steps) / 2, max(steps) * 1.5)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    if title:
        axes.set_title(title, loc="left")
    return picture


@figure
def local_steps(inner_steps: int = 4, num_ranks: int = 2, *, alt: str) -> Picture:
    """Time lines of two ways to train: gradients averaged at each step, or weights now and then.

    Args:
        inner_steps: H, steps between two averages of the weights.
        num_ranks: Lanes of each way.
        alt: What the figure shows.
    """
    picture = canvas(6.6, 1.1 + 0.75 * num_ranks, alt=alt, rows=2)
    names = ("gradients averaged at each step", f"weights averaged every {inner_steps} steps")
    for axes, name, every in zip(picture.axes, names, (1, inner_steps)):
        axes.set_title(name, loc="left", fontsize=10)
        axes.set(xlim=(0, 2 * inner_steps * 1.75), ylim=(num_ranks - 0.5, -0.5))
        axes.grid(False)
        axes.set_xticks([])
        axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
        now = 0.0
        for step in range(1, 2 * inner_steps + 1):
            for rank in range(num_ranks):
                box = Rectangle((now, rank - 0.36), 0.92, 0.72, fc=PALETTE[4], ec=INK, lw=0.5)
                axes.add_patch(box)
                put_text(axes, now + 0.46, rank, str(step), 8, color=INK)
            now += 0.96
            if step % every == 0:
                bar = Rectangle((now, -0.42), 0.7, num_ranks - 0.16, fc=PALETTE[1], ec=INK, lw=0.5)
                bar.set_hatch("//")
                axes.add_patch(bar)
                now += 0.76
    picture.axes[-1].set_xlabel("time; numbers are steps, hatched is the network")
    return picture
