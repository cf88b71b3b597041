"""What is left of a run that reached its end: the weights of the whole model, and what it can
do.
"""

import io
from pathlib import Path

import torch
from torch import nn

from labcode.config import TrainConfig
from labcode.measure import metrics
from labcode.measure.metrics import Log
from labcode.models.lora import is_adapter, merged
from labcode.runtime.files import write_atomically
from labcode.train import finite
from labcode.train.build import Training
from labcode.train.checkpoint.hub_files import ADAPTERS
from labcode.train.observer import Observer
from labcode.train.tasks import Task


class Result(Observer):
    """Writes weights and result of a run that has done all its steps; every rank takes part.

    Args:
        training: What has trained.
        log: Log with the rows of the run.
        out: The folder of the run; None: nothing is written.
    """

    def __init__(self, training: Training, log: Log, out: Path | None) -> None:
        self._training = training
        self._log = log
        self._out = out

    def finish(self) -> None:
        """Gather the whole model; rank 0 writes it, and what it can do.

        Adapters are written by themselves, and the model with them added to its weights.

        Raises:
            Diverged: A weight is not finite: the gradient of the last step was, its update was not.
        """
        training = self._training
        finite.check(training.model)
        out = self._out if training.world.rank == 0 else None
        weights = {}
        for name, tensor in training.model.full_state_dict():
            # every rank takes part, rank 0 keeps them
            if out:
                weights[name] = tensor.cpu().clone()
        lora = training.config.lora
        if out and lora.rank:
            adapters = {name: weight for name, weight in weights.items() if is_adapter(name)}
            _write_tensors(out / ADAPTERS, adapters)
            weights = merged(weights, lora)
        if out:
            divided = training.config.parallel.divides_weights
            sharded = training.grid.size("pp", "cp", "tp") > 1 or divided
            own = None if sharded else training.model.module
            write_result(out, training.task, training.config.train, weights, own)
            time_went = metrics.where_time_went(self._log.history)
            lines = [time_went, f"metrics, weights and TensorBoard files: {out}"]
            print("\n".join(filter(None, lines)), flush=True)


def write_result(
    out: Path,
    task: Task,
    settings: TrainConfig,
    weights: dict[str, torch.Tensor],
    model: nn.Module | None,
) -> None:
    """Write `weights.pt` and `result.txt`, and print the latter; on one rank.

    Args:
        out: Folder of the run.
        task: What was trained.
        settings: How much to sample, and from which seed.
        weights: The whole model's state dict, on the CPU.
        model: The trained model where this rank has all of it; None rebuilds it from the weights.

    Raises:
        OSError: No space; a file that is not written completely is removed.
    """
    _write_tensors(out / "weights.pt", weights)
    if model is None:
        model = _rebuild(task, weights)
    result = task.finish(model.eval(), settings.sample_tokens, settings.seed)
    write_atomically(out / "result.txt", (result + "\n").encode())
    print(f"{result}\n", flush=True)


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = io.BytesIO()
    torch.save(tensors, file)
    write_atomically(path, file.getbuffer())


def _rebuild(task: Task, weights: dict[str, torch.Tensor]) -> nn.Module:
    """The whole model, on the CPU: one that was sharded may not fit on this device."""
    dtype = next(iter(weights.values())).dtype
    with torch.device("meta"):
        whole = task.build()
    whole = whole.to_empty(device="cpu").to(dtype)
    whole.load_state_dict(weights)
    return whole
