"""The loss on held-out data, every `train.eval_every` steps and after the last."""

import math

import numpy as np
import torch
import torch.distributed as dist

from labcode.data.sampler import validation_batches
from labcode.measure.metrics import Log
from labcode.train import finite
from labcode.train.build import Training
from labcode.train.observer import Observer
from labcode.train.step import Step

_FIRST_SAMPLE = np.zeros(1, dtype=np.int64)


class Validation(Observer):
    """Writes the loss on held-out data.

    Args:
        training: What trains.
        log: The metrics of the run.
        target: A loss at which the run may stop; None: there is none.
    """

    def __init__(self, training: Training, log: Log, target: float | None = None) -> None:
        self._training = training
        self._log = log
        self._target = target

    def after(self, step: Step) -> str:
        """Validate where it is due."""
        del step
        training = self._training
        if not training.is_due(training.config.train.eval_every):
            return ""
        loss = validate(training)
        self._log.write({"step": training.steps_done, "val_loss": loss})
        reached = self._target is not None and loss <= self._target
        return "the target" if reached else ""


@torch.no_grad()
def validate(training: Training) -> float:
    """Mean loss over the first `eval_batches` global batches of held-out data.

    It is the same for every grid.

    Communicates: what the forward does, and one all-reduce of two numbers over dp.
    Held by: tests/ranks/test_parallel_parity.py::
        test_a_rank_without_a_sample_takes_part_in_the_forward_of_validation

    Raises:
        Diverged: It is not finite; on every rank.
    """
    settings = training.config.train
    training.model.eval()  # no dropout, and BatchNorm by its running statistics
    # sum of the losses, number of samples: a rank's part of the last batch may be smaller
    sums = torch.zeros(2, dtype=torch.float64, device=training.world.device)
    own_batches = validation_batches(
        len(training.task.val),
        settings.global_batch,
        dp_size=training.grid.size("dp"),
        dp_coord=training.grid.coord("dp"),
        max_batches=settings.eval_batches,
    )
    for indices in own_batches:
        sums += _sum_of_losses(training, indices)
    dist.all_reduce(sums, group=training.grid.group("dp"))
    training.model.train()
    loss = (sums[0] / sums[1]).item()
    if not math.isfinite(loss):
        finite.check(training.model)  # names the weight that is the reason
    finite.check_loss("the validation loss", loss)
    return loss


def _sum_of_losses(training: Training, indices: np.ndarray) -> torch.Tensor:
    """(sum of the losses of some validation samples, their number), [2] float64.

    Every rank runs as many forwards as in a training step, however few samples it has: under ZeRO
    each of them gathers weights over dp. A part without a sample gets the first one, which then
    counts nothing.
    """
    parts = np.array_split(indices, training.accumulation)
    sizes = [len(part) for part in parts]
    filled = [part if len(part) else _FIRST_SAMPLE for part in parts]
    # Weighted by the number of samples: in a mean over parts the samples of a short one would count
    # more.
    losses = training.model.losses(training.loader.read(training.task.val, filled))
    counts = torch.tensor(sizes, dtype=torch.float64, device=losses.device)
    return torch.stack([losses @ counts, counts.sum()])
