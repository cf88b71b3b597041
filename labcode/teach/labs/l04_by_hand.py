"""Lesson 04: gradients averaged by hand, what the lesson compares, and the script's model and data.

The functions that the lesson shows with `show_source` are written as a learner would write them.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from labcode.config import GPTConfig, TextData
from labcode.data import text
from labcode.models.gpt import GPT
from labcode.models.layers import initialize
from labcode.teach.figures.charts import heatmap
from labcode.teach.figures.style import INK, PALETTE, Picture, canvas, figure

EXACT = 1e-17  # where a difference of exactly 0 is drawn


# ---- what the lesson shows


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace every gradient by its mean over the group."""
    p = dist.get_world_size(group)
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= p


def broadcast_weights(model: nn.Module) -> None:
    """Give every rank the weights of rank 0."""
    for param in model.parameters():
        dist.broadcast(param.data, src=0)


# ---- the script of exercise 4.4

NUM_SAMPLES = 96
CONTEXT = 32

_splits = text.load(TextData(), context_length=CONTEXT)
_inputs, _targets = _splits.train[list(range(NUM_SAMPLES))]

# 96 pieces of Shakespeare, 32 characters each: (inputs, targets)
dataset = TensorDataset(_inputs, _targets)

CONFIG = GPTConfig(
    vocab_size=_splits.tokenizer.vocab_size,
    num_layers=1,
    num_heads=2,
    hidden_size=32,
    context_length=CONTEXT,
)


def build_model() -> nn.Module:
    """A small GPT. Its weights are drawn from the process's own random numbers."""
    return initialize(GPT(CONFIG))


# ---- figures


@figure
def plot_losses(
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
def plot_differences(cases: Mapping[str, Runs], one_process: torch.Tensor) -> Picture:
    """How far the mean loss of the ranks is from that of one process, for each case.

    Args:
        cases: {name: what the ranks returned}.
        one_process: The losses to compare with.
    """
    picture = canvas(
        6.6,
        3.6,
        alt="With averaging and equal weights the difference stays below 1e-14; with own seeds, "
        "or without averaging, it is above 1e-2 from the second step on",
    )
    axes = picture.axes[0]
    steps = range(1, len(one_process) + 1)
    for number, (name, runs) in enumerate(cases.items()):
        mean = torch.stack([losses for losses, _ in runs]).mean(0)
        off = (mean - one_process).abs().clamp(min=EXACT)
        style = {"color": PALETTE[number], "marker": "osD^"[number], "mfc": "none", "mew": 1.5}
        axes.semilogy(steps, off, lw=1.2, ms=5 + 2 * (number == 0), **style)
        # two lines lie close together each time: one has its name above it, the other below
        below = number % 2
        place = (steps[-1], off[-1].item())
        shift = (0, -9 if below else 7)
        axes.annotate(
            name,
            place,
            xytext=shift,
            textcoords="offset points",
            fontsize=8.5,
            ha="right",
            va="top" if below else "bottom",
        )
    axes.set_xlabel("step")
    axes.set_ylabel(f"difference (nats; 0 is drawn at {EXACT:.0e})")
    axes.set_title("Equal to rounding, or wrong from the start")
    axes.set_ylim(1e-19, 10)
    return picture


def plot_epochs(epoch_order: Callable[[int, bool, int], Sequence[int]]) -> Picture:
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
