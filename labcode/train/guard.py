"""What to do about a step whose gradient cannot be trusted: stop, leave it out, or roll back.

The norm of the whole gradient is the same number on every rank, so that all ranks decide alike and
nothing is communicated.
"""

import math
import statistics
from collections import deque

import torch

from labcode.train.finite import CURE, Diverged

# Long enough that a spike of some steps moves no median, and short enough to follow a norm that
# falls over a run: our choice, no number of the paper.
WINDOW = 64  # good steps whose norms are remembered
FEWEST = 16  # of them, before a norm can be called a spike: the first ones fall fast


class Guard:
    """Judges the gradient norm of each step.

    A norm that is not finite is bad. So is a spike, a norm above `spike_factor` times the median of
    those of the last good steps.

    Args:
        rule: What is done about a bad step: "stop", "skip" or "rollback".
        spike_factor: 0: no norm that is finite is bad.
        in_a_row: More bad steps than this one after another end the run.
        in_all: More bad steps than this in the whole run end it.

    Attributes:
        bad_steps: How many there were in the whole run.

    Source: Chowdhery et al. 2022 (arXiv:2204.02311), section 5.1, for rolling back and leaving out
        the batches around a spike.
    Held by: tests/unit/test_guard.py
    """

    def __init__(self, rule: str, spike_factor: float, in_a_row: int, in_all: int) -> None:
        self.rule = rule
        self.spike_factor = spike_factor
        self.in_a_row = in_a_row
        self.in_all = in_all
        self.bad_steps = 0
        self._row = 0
        self._norms: deque[float] = deque(maxlen=WINDOW)

    @property
    def remembers(self) -> bool:
        """Whether its decisions depend on the steps before: then a checkpoint has to hold them."""
        return self.rule != "stop" or self.spike_factor > 0

    def judge(self, grad_norm: float) -> str:
        """Why a step is bad; "" if it is good.

        Args:
            grad_norm: 2-norm of the whole model's gradient, before clipping.

        Raises:
            Diverged: It is bad, and the rule is to stop; or there were too many.
        """
        reason = self._reason(grad_norm)
        if not reason:
            self._row = 0
            self._norms.append(grad_norm)
            return ""
        self.bad_steps += 1
        self._row += 1
        if self.rule == "stop":
            raise Diverged(f"{reason}: {CURE}")
        for count, most, field, where in (
            (self._row, self.in_a_row, "bad_in_a_row", "in a row"),
            (self.bad_steps, self.in_all, "bad_in_all", "in all"),
        ):
            if count > most:
                raise Diverged(
                    f"{reason}, and train.{field}={most} bad steps {where} are over: {CURE}"
                )
        return reason

    def _reason(self, grad_norm: float) -> str:
        """Why a norm is bad; "" if it is good."""
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        if not self.spike_factor or len(self._norms) < FEWEST:
            return ""
        # The median, not the mean: one spike that was let through would raise a mean, and hide the
        # next one. Bad norms do not enter the window at all.
        median = statistics.median(self._norms)
        if grad_norm <= self.spike_factor * median:
            return ""
        times = grad_norm / median if median else math.inf
        return f"the gradient norm is {grad_norm:.3g}, {times:.3g} times its median of {median:.3g}"

    # ---- in a checkpoint

    @property
    def state(self) -> torch.Tensor:
        """All that it remembers, [2 + WINDOW] float64: two counts, then norms, -1 where none is."""
        # always of one size, so that a checkpoint's tensor can be compared with what is expected
        norms = list(self._norms)
        unused = [-1.0] * (WINDOW - len(norms))
        return torch.tensor([self.bad_steps, self._row, *norms, *unused], dtype=torch.float64)

    @state.setter
    def state(self, found: torch.Tensor) -> None:
        bad_steps, row, *norms = found.tolist()
        self.bad_steps = int(bad_steps)
        self._row = int(row)
        self._norms.clear()
        self._norms.extend(norm for norm in norms if norm >= 0)
