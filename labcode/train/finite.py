"""Whether the numbers of a run are still numbers, before they are written to a disk.

A weight that is not finite makes every later loss NaN. A checkpoint of it is worse than none: it
takes the place of an older one, and each resume fails again.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from labcode.parallel.model import ParallelModel
from labcode.runtime.agreement import SharedError

CURE = "lower optim.lr, or look at the data"


class Diverged(SharedError, ArithmeticError):
    """A loss, a gradient or a weight is not a number any more; every rank raises it."""


def check(model: ParallelModel, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Check that all weights are finite, and what the optimizer keeps for them.

    Cost: one reading of what is checked. 1 GB of weights took 0.1 s of one core.

    Communicates: an all-reduce of one number, on the CPU; if something is wrong, an all-gather of a
        short text.

    Args:
        model: This rank's part.
        optimizer: The optimizer whose state is checked too; None: the weights alone are checked.

    Raises:
        Diverged: On every rank, with the name of the first weight, its rank and pipeline stage.
    Held by: tests/ranks/test_finite.py
    """
    # First one number, which is nearly always 0; texts only where something is wrong.
    own = None if _all_finite(model, optimizer) else _first_that_is_not(model, optimizer)
    found = torch.tensor(0 if own is None else 1)
    dist.all_reduce(found, dist.ReduceOp.MAX)  # on the CPU, over gloo
    if found.item() == 0:
        return
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, own)
    first = next(text for text in texts if text is not None)
    raise Diverged(f"{first}: {CURE}")


def check_loss(name: str, loss: float) -> None:
    """Check a loss that is the same on every rank, such as that of a validation.

    Args:
        name: Name in the metrics.
        loss: Mean over all ranks.

    Raises:
        Diverged: It is not finite.
    """
    if not math.isfinite(loss):
        raise Diverged(f"{name} is {loss}: {CURE}")


def _all_finite(model: ParallelModel, optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether this rank's tensors are finite, by one number for all of them.

    A norm is finite only if every value is, and needs no copy. The reverse does not hold: the
    squares of large values overflow. So a norm that is not finite is a reason to look closer.
    """
    tensors = [tensor for _, _, tensor in _tensors(model, optimizer)]
    return math.isfinite(nn.utils.get_total_norm(tensors).item())


def _first_that_is_not(model: ParallelModel, optimizer: torch.optim.Optimizer | None) -> str | None:
    """Which tensor of this rank has values that are not finite, and how many; None if none has."""
    for name, what, tensor in _tensors(model, optimizer):
        count = tensor.numel() - int(torch.isfinite(tensor).sum())
        if count:
            values = "1 value that is" if count == 1 else f"{count} values that are"
            return f"{what} has {values} not finite{_place(model, name)}"
    return None


def _tensors(
    model: ParallelModel, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(name of the weight, what to call the tensor, the tensor): all weights, then the state."""
    params = model.weights
    for name, param in params.items():
        yield name, name, param.detach()
    if optimizer is None:
        return
    for name, param in params.items():
        for key, value in optimizer.state.get(param, {}).items():
            if value.is_floating_point():
                yield name, f"{key} of {name}", value


def _place(model: ParallelModel, name: str) -> str:
    """Which rank holds a weight, as far as there is more than one: " on rank 2, pipeline ..."."""
    place = ""
    if dist.get_world_size() > 1:
        place = f" on rank {dist.get_rank()}"
    if model.grid.size("pp") > 1:
        place += f", pipeline stage {model.plan.stages.stage_of(name)}"
    return place
