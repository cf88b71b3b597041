"""One optimizer step: forward and backward, clip, update. No files, no log, no checkpoints."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from labcode.parallel.model import Batch
from labcode.train import finite
from labcode.train.build import Training
from labcode.train.cuda_graph import GraphedStep
from labcode.train.loss_scale import LossScaler
from labcode.train.optim import clip_gradients, learning_rate


class Step(NamedTuple):
    """What one optimizer step did.

    Args:
        loss: Mean over this dp rank's samples, a float64 scalar.
        grad_norm: 2-norm of the whole model's gradient, before clipping; with local steps that of
            this rank's copy.
        lr: Learning rate.
        left_out: Why the step is bad and its update was left out; "" if it was not.
        rescaled: Whether its update was left out because the loss scale was too large for float16.
    """

    loss: torch.Tensor
    grad_norm: float
    lr: float
    left_out: str = ""
    rescaled: bool = False


class TrainStep:
    """Does one step after another; the update of a bad one is left out (`Guard`), and its batch
    counts as read.

    Args:
        training: What it trains with.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        graphs = training.config.train.cuda_graphs
        self._graphed = GraphedStep(training.model) if graphs else None

    def __call__(self) -> Step:
        """One step.

        Raises:
            Diverged: The gradient is bad and the rule is to stop, or there were too many; the
                weights are as before the step.
        """
        training = self.training
        # Computed at each step from the number of the step alone, so that a resumed run needs no
        # state of a schedule.
        lr = learning_rate(training.steps_done, training.config.train.steps, training.optim)
        for group in training.optimizer.param_groups:
            group["lr"] = lr
        with training.ranges("data"):
            batches = training.loader.take(training.steps_done)
        loss_scale = training.scaler.scale if training.scaler else 1.0
        if training.debugging.replay:
            training.debugging.replay.begin()
        loss = self._forward_backward(batches, loss_scale)
        training.debugging.before_update()
        with training.ranges("optimizer"):
            step = self._update(batches, loss, loss_scale, lr)
        # Both are collectives, so they run after a step that was left out as well: all ranks have
        # left it out, since they judge the same norm.
        training.model.gather_parameters()
        training.model.rebalance()
        training.ranges.end_step()
        # Only now: a step that an error ended does not count, and is read again after a resume.
        training.batches.advance()
        self._average_if_due()
        return step

    def _forward_backward(self, batches: list[Batch], loss_scale: float) -> torch.Tensor:
        """The gradients of a step, and its loss."""
        training = self.training
        number = training.steps_done + 1
        if self._graphed is not None and not training.debugging.records(number):
            with training.ranges("forward"):  # and backward: a recording is one
                return self._graphed.forward_backward(batches, loss_scale)
        with training.debugging.recording(number, batches, loss_scale):
            return training.model.forward_backward(batches, loss_scale)

    def _update(
        self, batches: list[Batch], loss: torch.Tensor, loss_scale: float, lr: float
    ) -> Step:
        """Judge the gradient, clip it, and change the weights; or leave that out."""
        training = self.training
        params = training.model.weights.values()
        grad_norm = training.model.gradient_norm().item()
        self._replay_if_bad(batches, loss, grad_norm)
        rescaled = False
        if training.scaler:
            grad_norm, rescaled = self._unscale(training.scaler, grad_norm, loss)
        # After unscaling, since the guard compares true norms. An overflow of float16 is no bad
        # step. And with local steps a copy cannot leave out a step that the others take.
        left_out = "" if rescaled or training.outer else training.guard.judge(grad_norm)
        keep = not left_out and not rescaled
        if training.noise:
            training.noise.end_step(grad_norm, loss_scale, keep=keep)
        if keep:
            clip_gradients(params, grad_norm, training.config.optim.clip_norm)
            training.optimizer.step()
        if training.fp8:
            training.fp8.finish_step()  # amaxes of a bad step count too: they are finite
        training.optimizer.zero_grad(set_to_none=True)
        return Step(loss, grad_norm, lr, left_out, rescaled)

    def _replay_if_bad(self, batches: list[Batch], loss: torch.Tensor, grad_norm: float) -> None:
        """Run a bad step once more with a probe, if the config asks for it, and say what it found.

        An overflow that a smaller loss scale cures is no bad step. All ranks call it.
        """
        replay = self.training.debugging.replay
        scaler = self.training.scaler
        if replay is None or not replay.is_bad(loss, grad_norm):
            return
        if scaler and scaler.can_cure(grad_norm, mean_loss(self.training, loss)):
            return
        line = replay.report(batches, scaler.scale if scaler else 1.0)
        self.training.debugging.say(f"step {self.training.steps_done + 1}: {line}")

    def _unscale(
        self, scaler: LossScaler, scaled_norm: float, loss: torch.Tensor
    ) -> tuple[float, bool]:
        """Undo the loss scale in the gradients, and choose the next one.

        Communicates: only where the gradient has overflowed, one all-reduce of the loss over dp.

        Returns:
            The true norm of the gradient; whether it has overflowed and a smaller scale may help.
        """
        grad_norm = scaler.unscale(self.training.model.weights.values(), scaled_norm)
        if math.isfinite(grad_norm):
            scaler.update(overflowed=False)
            return grad_norm, False
        can_cure = scaler.can_cure(grad_norm, mean_loss(self.training, loss))
        if can_cure:
            scaler.update(overflowed=True)
        return grad_norm, can_cure

    def _average_if_due(self) -> None:
        """With local steps: average the copies, every `local.steps` steps and after the last one.

        Raises:
            Diverged: A weight of one of them is not finite; on every rank.
        """
        training = self.training
        if training.outer and training.is_due(training.config.local.steps):
            with training.ranges("communication"):
                training.outer.step()
            finite.check(training.model)


def mean_loss(training: Training, loss: torch.Tensor) -> float:
    """The loss of a step over all ranks of dp, from this rank's; all ranks call it."""
    total = loss.clone()
    dist.all_reduce(total, group=training.grid.group("dp"))
    return total.item() / training.grid.size("dp")
