"""Lesson 06 by hand: the noise of a gradient, a sweep, and rare messages, as a learner writes them.

labcode's own are `train.noise_scale`, `train.sweep` and `parallel.local`.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

Way = tuple[float, int]  # rate, steps


def estimate(
    small_batch: int, small_square: float, big_batch: int, big_square: float
) -> tuple[float, float]:
    """(|G|^2, tr(Sigma)) from the mean squares of gradients at two sizes of batch."""
    variance = (small_square - big_square) / (1 / small_batch - 1 / big_batch)
    square = big_square - variance / big_batch
    return square, variance


def squares(model: nn.Module, group: dist.ProcessGroup) -> tuple[float, float]:
    """(Mean |G_small|^2 over the ranks, |G_big|^2); every gradient becomes the mean over them.

    Communicates: the gradients, as data parallelism does, and one number more.
    """
    p = group.size()
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    small = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        small += gradient.double().square().sum()
    dist.all_reduce(small, group=group)
    big = 0.0
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
        gradient /= p
        big += gradient.double().square().sum().item()
    return small.item() / p, big


class Smoothed:
    """A noise scale from many noisy steps: both parts are smoothed, and divided last."""

    def __init__(self, keep: float = 0.9) -> None:
        self.keep = keep
        self.square = 0.0
        self.variance = 0.0

    def add(self, square: float, variance: float) -> None:
        """Take in what one step says."""
        self.square = self.keep * self.square + (1 - self.keep) * square
        self.variance = self.keep * self.variance + (1 - self.keep) * variance

    def noise_scale(self) -> float:
        """B_simple, samples."""
        return self.variance / self.square


def sweep(
    batches: Sequence[int],
    rates: Sequence[float],
    steps_to_target: Callable[[int, float], int | None],
    table: dict[tuple[int, float], int | None],
) -> dict[int, Way]:
    """{batch: (best rate, its steps)}; `table` gets an entry for each run that it lacks."""
    for batch in batches:
        for lr in rates:
            if (batch, lr) in table:
                continue
            try:
                table[batch, lr] = steps_to_target(batch, lr)
            except ArithmeticError:
                table[batch, lr] = None
    best: dict[int, Way] = {}
    for batch in batches:
        for lr in rates:
            steps = table[batch, lr]
            if steps is None:
                continue
            if batch not in best or steps < best[batch][1]:
                best[batch] = (lr, steps)
    return best


def fit(steps_of: Mapping[int, float]) -> tuple[float, float]:
    """(S_min, E_min) of S = S_min + E_min / B, by least squares of relative errors."""
    batches = np.array(list(steps_of), dtype=float)
    steps = np.array(list(steps_of.values()), dtype=float)
    columns = np.stack([1 / steps, 1 / (batches * steps)], axis=1)
    (least_steps, least_samples), *_ = np.linalg.lstsq(columns, np.ones(len(steps)), rcond=None)
    return float(least_steps), float(least_samples)


class OuterStep:
    """DiLoCo's outer step: the mean way of all copies, as a gradient for Nesterov's momentum."""

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, lr: float, momentum: float
    ) -> None:
        self.params = list(model.parameters())
        self.group = group
        self.lr = lr
        self.momentum = momentum
        self.common = [param.detach().clone() for param in self.params]
        self.velocity = [torch.zeros_like(param) for param in self.params]

    @torch.no_grad()
    def step(self) -> None:
        """Bring all copies together, some way along where they have gone."""
        for param, common, velocity in zip(self.params, self.common, self.velocity):
            gone = common - param
            dist.all_reduce(gone, group=self.group)
            gone /= self.group.size()
            velocity.mul_(self.momentum).add_(gone)
            common -= self.lr * (gone + self.momentum * velocity)
            param.copy_(common)
