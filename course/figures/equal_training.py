"""Lesson 04: whether several ranks train as one process does, and who reads which samples."""

from collections.abc import Callable, Mapping, Sequence

import torch

from course.figures.charts import heatmap
from course.figures.style import INK, PALETTE, Picture, canvas, figure

EXACT = 1e-17  # where a difference of exactly 0 is drawn


@figure
def losses_of_ranks(
    one_process: torch.Tensor, rank_losses: Sequence[torch.Tensor], mean: torch.Tensor
) -> Picture:
    """The losses of one process, of each rank, and the mean over the ranks."""
    picture = canvas(
        6.2,
        3.4,
        alt="Grey lines of four ranks scatter; at each step the cross of their mean lies inside "
        "the circle of one process",
    )
    axes = picture.axes[0]
    steps = range(1, len(one_process) + 1)
    for rank, losses in enumerate(rank_losses):
        label = "" if rank else "each rank alone"
        axes.plot(steps, losses, color="#AAAAAA", lw=1.2, label=label)
    axes.plot(
        steps, one_process, "o", mfc="none", mec=PALETTE[0], mew=1.8, ms=12, label="one process"
    )
    axes.plot(steps, mean, "x", color=INK, ms=7, mew=1.8, label="mean of the four ranks")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per character)")
    axes.set_title("The mean of four ranks is the loss of one process")
    axes.set_xlim(0.6, steps[-1] + 0.7)
    axes.legend(loc="upper right")
    return picture


Runs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (losses, final weights) of each rank


@figure
def off_one_process(cases: Mapping[str, Runs], one_process: torch.Tensor) -> Picture:
    """How far the mean loss of the ranks is from that of one process, for each case.

    Args:
        cases: {name: what the ranks returned}.
        one_process: The losses to compare with.
    """
    picture = canvas(
        6.6,
        3.6,
        alt="With averaging and equal weights the difference stays below 1e-15; with own seeds, "
        "or without averaging, it is above 1e-2 from the second step on",
    )
    axes = picture.axes[0]
    steps = range(1, len(one_process) + 1)
    for number, (name, runs) in enumerate(cases.items()):
        mean = torch.stack([losses for losses, _ in runs]).mean(0)
        off = (mean - one_process).abs().clamp(min=EXACT)
        style = {"color": PALETTE[number], "marker": "osD^"[number], "mfc": "none", "mew": 1.5}
        # The first line has larger marks, so that those of another one do not hide them.
        mark_size = 7 if number == 0 else 5
        axes.semilogy(steps, off, lw=1.2, ms=mark_size, **style)
        # two lines lie close together each time: one has its name higher, the other lower
        place = (steps[-1], off[-1].item())
        shift = (10, -7 if number % 2 else 7)
        axes.annotate(name, place, shift, textcoords="offset points", fontsize=8.5, va="center")
    axes.set_xticks(steps)
    axes.set_xlim(0.7, steps[-1] + 2.6)  # room for the names
    axes.set_xlabel("step")
    axes.set_ylabel(f"difference (nats; 0 is drawn at {EXACT:.0e})")
    axes.set_title("Equal to rounding, or wrong from the start")
    axes.set_ylim(1e-19, 10)
    return picture


def epochs(epoch_order: Callable[[int, bool, int], Sequence[int]]) -> Picture:
    """Three epochs of 16 samples on four ranks, without and with `set_epoch`."""
    matrix = []
    names = []
    for set_epoch in (False, True):
        for epoch in range(3):
            matrix.append(list(epoch_order(epoch, set_epoch, 16)))
            names.append(f"epoch {epoch}, {'with' if set_epoch else 'without'} set_epoch")
    return heatmap(
        matrix,
        rows=names,
        columns=[f"r{place // 4}" for place in range(16)],
        xlabel="four samples each of rank 0, 1, 2 and 3",
        title="Without set_epoch all epochs are the same",
        unit="number of the sample",
        alt="Without set_epoch three epochs have the same row of sample numbers, "
        "with it three different rows",
    )
