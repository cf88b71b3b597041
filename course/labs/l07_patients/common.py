"""What all patients share: a little text to learn, a small model, and a block that does nothing."""

import contextlib
import gzip
from collections.abc import Iterable
from importlib import resources
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

CONTEXT = 8  # characters that a model sees
NUM_CHARACTERS = 128
IGNORED = -100  # as a target: `cross_entropy` leaves it out
PADDED_BATCH = 32
# Targets that are none of padding, by rank and batch. In each step of two batches the largest has
# five times as many as the smallest, and no two steps have the same number in all.
NUM_TARGETS = ((30, 18, 25, 14, 20, 16, 30, 22), (6, 10, 5, 9, 4, 12, 12, 6))


def text_samples(num_samples: int) -> TensorDataset:
    """The first characters of the shipped text: inputs [N, 8], and the one after each, [N]."""
    file = resources.files("labcode") / "assets" / "shakespeare.txt.gz"
    with file.open("rb") as packed, gzip.open(packed) as unpacked:
        text = torch.tensor(list(unpacked.read(num_samples + CONTEXT)))
    windows = text.clamp(max=NUM_CHARACTERS - 1).unfold(0, CONTEXT + 1, 1)
    return TensorDataset(windows[:, :-1], windows[:, -1])


def padded_samples() -> TensorDataset:
    """512 samples for two ranks that take every second one; the end of each batch is padding."""
    inputs, targets = text_samples(512).tensors
    targets = targets.clone()
    for rank, counts in enumerate(NUM_TARGETS):
        own = targets[rank :: len(NUM_TARGETS)]
        for batch, count in enumerate(counts):
            own[batch * PADDED_BATCH + count : (batch + 1) * PADDED_BATCH] = IGNORED
    return TensorDataset(inputs, targets)


def small_model() -> nn.Sequential:
    """8 characters in, 128 logits out."""
    return nn.Sequential(
        nn.Embedding(NUM_CHARACTERS, 16),
        nn.Flatten(),
        nn.Linear(CONTEXT * 16, 64),
        nn.ReLU(),
        nn.Linear(64, NUM_CHARACTERS),
    )


def unwatched(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    """In place of `doctor.watch`: nothing is watched."""
    return contextlib.nullcontext()


def apart(model: nn.Module) -> float:
    """The largest difference between a weight here and the mean over all ranks."""
    return widest_gap(model.parameters())


def widest_gap(tensors: Iterable[torch.Tensor]) -> float:
    """The largest difference between a number here and the mean over all ranks."""
    gap = 0.0
    for tensor in tensors:
        mean = tensor.detach().clone()
        torch.distributed.all_reduce(mean)
        mean /= torch.distributed.get_world_size()
        gap = max(gap, float((tensor.detach() - mean).abs().max()))
    return gap
