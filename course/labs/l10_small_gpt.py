"""Lessons 10 and 11: a small GPT that trains on a real text for a few steps, whole or on a grid."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig, TextData
from labcode.data import sampler, text
from labcode.models import gpt, layers
from labcode.models.parallelize import parallelize
from labcode.topology import GridShape

CONTEXT = 64
SAMPLES = 8
LEARNING_RATE = 3e-3

Batch = tuple[Tensor, Tensor]  # inputs and targets, [SAMPLES, CONTEXT]


def build(dtype: torch.dtype = torch.float32) -> gpt.GPT:
    """The model, with the same weights at each call."""
    splits = text.load(TextData(), context_length=CONTEXT)
    config = GPTConfig(
        splits.tokenizer.vocab_size,
        num_layers=2,
        num_heads=4,
        hidden_size=32,
        context_length=CONTEXT,
    )
    return layers.initialize(gpt.GPT(config), seed=0).to(dtype)


def batches(count: int) -> list[Batch]:
    """The first batches of the text, the same on every rank."""
    splits = text.load(TextData(), context_length=CONTEXT)
    order = sampler.Batches(len(splits.train), global_batch=SAMPLES)
    return [splits.train[order.indices(step)] for step in range(count)]


def steps(
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    count: int,
    finish: Callable[[], None] | None = None,
    given: Sequence[Batch] | None = None,
) -> Iterator[float]:
    """Train with AdamW; gives the loss of each step after the step.

    Args:
        model: Model on this rank.
        loss_of: Loss of its output and the targets.
        count: Steps.
        finish: Called between backward and the optimizer.
        given: Batches in place of those of the text, for a model of something else.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for inputs, targets in batches(count) if given is None else given[:count]:
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if finish is not None:
            finish()
        optimizer.step()
        yield loss.item()


def losses_of_one_process(count: int) -> list[float]:
    """What every grid is compared with, in float64."""
    return list(steps(build(torch.float64), gpt.loss, count))


def losses_on_grid(
    rank: int, shape: GridShape, parallel: ParallelConfig, count: int
) -> list[float]:
    """The losses of the same training on a grid, in float64."""
    model = parallelize(build(torch.float64), Grid.create(shape), parallel)
    return list(steps(model, model.loss, count, model.finish_gradient_sync))
