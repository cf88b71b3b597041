"""Dynamic loss scaling: what keeps small gradients alive in float16.

A float16 below 6e-8 is zero, and many gradients are smaller. Backward is linear in the loss, so a
loss times s gives gradients times s, which are divided by s again before the update:

    g = (1/s) d(s L)/dw

If s is too large, a gradient overflows to infinity: the update is left out and s is halved. After
`growth_interval` steps without an overflow s is doubled, so that it stays near the largest value
that works. s is a power of two, so that scaling rounds nothing.

bfloat16 has the range of float32 and needs none of this.

Source: Micikevicius et al. 2017 (arXiv:1710.03740), section 3.2, for the scale; the numbers are
    those of `torch.amp.GradScaler`.
Held by: tests/unit/test_loss_scale.py, tests/ranks/test_float16.py
"""

import math
from collections.abc import Iterable

import torch
from torch import nn

from labcode.train.optim import scale_gradients

FIRST = 2.0**16
GROWTH_INTERVAL = 2000  # good steps before the scale is doubled
LEAST = 1.0


class LossScaler:
    """The scale of the loss, and when it changes.

    It decides by the norm of the whole gradient, which is the same number on every rank: all ranks
    leave out the same steps, and nothing is communicated.

    Args:
        first: The scale to begin with.
        growth_interval: Steps in a row without an overflow after which it is doubled.

    Attributes:
        scale: The factor of the loss now.
        overflows: How many steps of the whole run were left out.
    """

    def __init__(self, first: float = FIRST, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.scale = first
        self.growth_interval = growth_interval
        self.overflows = 0
        self._good_in_a_row = 0

    def unscale(self, params: Iterable[nn.Parameter], scaled_norm: float) -> float:
        """Divide all gradients by the scale, unless they have overflowed; their true norm.

        Args:
            params: This rank's weights.
            scaled_norm: 2-norm of the whole model's gradient, as backward has left it.
        """
        if math.isfinite(scaled_norm):
            scale_gradients(params, 1 / self.scale)
        return scaled_norm / self.scale

    def can_cure(self, norm: float, loss: float) -> bool:
        """Whether a smaller scale may help: the gradient has overflowed, the loss has not.

        At a scale of 1 the gradient itself is too large for float16, or it is NaN for a reason of
        its own. GradScaler would go on halving and leave out every step from there on.

        Args:
            norm: 2-norm of the whole model's gradient.
            loss: The loss of the whole batch, unscaled.
        """
        return not math.isfinite(norm) and math.isfinite(loss) and self.scale > LEAST

    def update(self, overflowed: bool) -> None:
        """Choose the scale of the next step."""
        if overflowed:
            self.overflows += 1
            self.scale /= 2  # the step is lost; the next one tries a smaller scale
            self._good_in_a_row = 0
            return
        self._good_in_a_row += 1
        if self._good_in_a_row == self.growth_interval:
            self._good_in_a_row = 0
            # The scaled loss is float32, so a scale beyond its range would be infinite itself.
            if self.scale * 2 <= torch.finfo(torch.float32).max:
                self.scale *= 2

    # ---- in a checkpoint

    @property
    def state(self) -> torch.Tensor:
        """The scale, good steps in a row, and overflows in all, [3] float64."""
        numbers = [self.scale, self._good_in_a_row, self.overflows]
        return torch.tensor(numbers, dtype=torch.float64)

    @state.setter
    def state(self, found: torch.Tensor) -> None:
        scale, good, overflows = found.tolist()
        self.scale = scale
        self._good_in_a_row = int(good)
        self.overflows = int(overflows)
