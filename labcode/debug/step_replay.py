"""A step whose loss or gradient is not finite, run once more to find where that began."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from labcode.debug.record import Recorder
from labcode.parallel.dropout import IsolatedRng
from labcode.parallel.model import Batch, ParallelModel


class StepReplay:
    """Repeats a step with the same weights, samples and random numbers, and checks each tensor.

    Args:
        model: This rank's part.
        device: Device that it computes on.

    Held by: tests/ranks/test_not_finite.py::test_a_training_names_the_tensor_and_stops
    """

    def __init__(self, model: ParallelModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._random: list[torch.Tensor] = []

    def begin(self) -> None:
        """Remember the states of all random generators; called before each step."""
        self._random = self._random_states()

    def is_bad(self, loss: torch.Tensor, grad_norm: float) -> bool:
        """Whether any rank has a loss or a gradient norm that is not finite.

        Communicates: an all-reduce of one number over all ranks.
        """
        own = not (math.isfinite(loss.item()) and math.isfinite(grad_norm))
        bad = torch.tensor(float(own), device=self._device)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        return bad.item() > 0

    def report(self, batches: Sequence[Batch], loss_scale: float) -> str:
        """One line about what was found when the step ran again; gradients are as before it.

        Communicates: what the step does, and `Recorder.first_not_finite`.
        """
        # Put aside, not copied: the caller still has to unscale and judge them. For the replay a
        # second set of gradients is allocated, of a run that stops or leaves the step out anyway.
        before = [param.grad for param in self._model.weights.values()]
        self._forget_gradients()
        later = self._random_states()
        self._set_random_states(self._random)
        recorder = Recorder(self._model)
        with recorder.step(1, batches, loss_scale):
            self._model.forward_backward(batches, loss_scale)
        finding = recorder.first_not_finite()
        self._set_random_states(later)
        self._forget_gradients()
        for param, grad in zip(self._model.weights.values(), before):
            param.grad = grad
        if finding is None:
            return "run a second time, everything was finite: the fault does not repeat"
        return finding.line

    def _forget_gradients(self) -> None:
        params = [*self._model.module.parameters(), *self._model.weights.values()]
        for param in params:
            param.grad = None

    def _random_states(self) -> list[torch.Tensor]:
        """The states of the generators of this process, then of each isolated stream."""
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        for module in self._isolated():
            states.append(module.stream.state)
        return states

    def _set_random_states(self, states: Sequence[torch.Tensor]) -> None:
        """Give all generators the states of `_random_states`."""
        # in the order in which they were taken
        left = list(states)
        torch.set_rng_state(left.pop(0))
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(left.pop(0), self._device)
        for module, state in zip(self._isolated(), left):
            module.stream.state = state

    def _isolated(self) -> list[IsolatedRng]:
        """The modules that draw from a stream of their own."""
        found = []
        for module in self._model.module.modules():
            if isinstance(module, IsolatedRng):
                found.append(module)
        return found
