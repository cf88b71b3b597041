"""The gradient noise scale: how large a batch is before more samples only repeat each other.

A gradient over B samples is the true one plus noise, whose squared length is tr(Sigma) / B, where
Sigma is the covariance of the gradient of one sample. The batch at which both are equally long is

    B_simple = tr(Sigma) / |G|^2

Far below it, twice the batch halves the steps. Far above it, twice the batch changes nothing.

Source: McCandlish et al. 2018 (arXiv:1812.06162), section 2.2 and appendix A.1.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

SMOOTHING = 0.95  # a step counts e times less after 20 more


class Estimate(NamedTuple):
    """What two squared gradient norms say.

    Args:
        square: |G|^2, squared 2-norm of the gradient without noise.
        variance: tr(Sigma), of the gradient of one sample.
    """

    square: float
    variance: float

    @property
    def noise_scale(self) -> float:
        """B_simple in samples; NaN while noise hides the gradient, so that |G|^2 is not above 0."""
        return self.variance / self.square if self.square > 0 else math.nan


def estimate(small_batch: int, small_square: float, big_batch: int, big_square: float) -> Estimate:
    """The two numbers without bias, from E|G_B|^2 = |G|^2 + tr(Sigma) / B at two sizes of batch.

        |G|^2     = (B_big |G_big|^2 - B_small |G_small|^2) / (B_big - B_small)
        tr(Sigma) = (|G_small|^2 - |G_big|^2) / (1 / B_small - 1 / B_big)

    Args:
        small_batch: B_small, samples.
        small_square: |G_small|^2, the mean over all small batches that make up the big one.
        big_batch: B_big, samples.
        big_square: |G_big|^2, of the mean gradient.

    Raises:
        ValueError: The small batch is not smaller.

    Source: McCandlish et al. 2018 (arXiv:1812.06162), equations A.2 and A.3.
    Held by: tests/unit/test_noise_scale.py::test_the_estimators_have_no_bias
    """
    if not 0 < small_batch < big_batch:
        raise ValueError(
            f"small_batch={small_batch} and big_batch={big_batch}: two sizes are compared, give a "
            "smaller one first"
        )
    difference = big_batch * big_square - small_batch * small_square
    square = difference / (big_batch - small_batch)
    variance = (small_square - big_square) / (1 / small_batch - 1 / big_batch)
    return Estimate(square, variance)


class NoiseScale:
    """Measures the noise scale during a run, from gradients that the run computes anyway.

    A hook on each weight sees the gradient of each micro-batch before it is added to the others and
    averaged over dp. The small batch is the micro-batch, the big one the global batch, so that the
    result is the same for any division of it into ranks and micro-batches of that size.

    Both numbers are smoothed by themselves, and divided only then: the mean of a ratio of noisy
    numbers is not the ratio of their means.

    Communicates: one all-reduce of one number over dp at each step.

    Args:
        params: The weights of this rank, whole; those that are frozen do not count.
        global_batch: Samples of a step.
        num_microbatches: The number of micro-batches of a step over all ranks, of equal size.
        group: The ranks that share a global batch.

    Source: McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1.
    Held by: tests/ranks/test_noise_scale_runs.py
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        global_batch: int,
        num_microbatches: int,
        group: dist.ProcessGroup,
    ) -> None:
        self.global_batch = global_batch
        self.num_microbatches = num_microbatches
        self.group = group
        self._steps = 0
        self._square = 0.0
        self._variance = 0.0
        # A tensor hook sees the gradient of one backward. A hook after accumulation would see the
        # sum with the micro-batches before.
        trained = [param for param in params if param.requires_grad]
        device = trained[0].device
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        for param in trained:
            param.register_hook(self._add_square)

    def _add_square(self, grad: torch.Tensor) -> None:
        """Add the squared norm of a weight's gradient in one micro-batch."""
        self._sum += torch.linalg.vector_norm(grad.detach()).double().square()

    def end_step(self, grad_norm: float, loss_scale: float = 1.0, *, keep: bool = True) -> None:
        """Take in one optimizer step; all ranks call it.

        Args:
            grad_norm: 2-norm of the mean gradient of the global batch, without the loss scale.
            loss_scale: The factor of each micro-batch's gradient.
            keep: False forgets the step, whose gradient is bad.
        """
        total = self._sum.clone()
        self._sum.zero_()
        dist.all_reduce(total, group=self.group)
        if not keep:
            return
        # The loss of each micro-batch is multiplied by its share of this rank's mean, and the
        # average over dp makes that 1 / num_microbatches of the whole.
        share = dist.get_world_size(self.group) / self.num_microbatches
        mean_square = total.item() / self.num_microbatches / (share * loss_scale) ** 2
        small_batch = self.global_batch // self.num_microbatches
        found = estimate(small_batch, mean_square, self.global_batch, grad_norm**2)
        self._steps += 1
        self._square += (1 - SMOOTHING) * (found.square - self._square)
        self._variance += (1 - SMOOTHING) * (found.variance - self._variance)

    @property
    def smoothed(self) -> Estimate:
        """Both numbers, as weighted means of the steps so far."""
        if self._steps == 0:
            return Estimate(math.nan, math.nan)
        weight = 1 - SMOOTHING**self._steps  # of the steps; the rest is the zero it began with
        return Estimate(self._square / weight, self._variance / weight)

    def metrics(self) -> dict[str, float]:
        """What a row of metrics says of it; without a noise scale while there is none."""
        found = self.smoothed
        if self._steps == 0:
            return {}
        row = {"gradient_square": found.square, "gradient_variance": found.variance}
        if found.square > 0:
            row["noise_scale"] = found.noise_scale
        return row

    # ---- in a checkpoint

    @property
    def state(self) -> torch.Tensor:
        """All that it remembers, [3] float64: number of steps, and the two sums."""
        return torch.tensor([self._steps, self._square, self._variance], dtype=torch.float64)

    @state.setter
    def state(self, found: torch.Tensor) -> None:
        steps, self._square, self._variance = found.tolist()
        self._steps = int(steps)
