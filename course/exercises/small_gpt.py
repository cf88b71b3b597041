"""What the checks of lessons 04 and 05 share: groups, a small GPT, batches, gradients compared."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from course.answer import is_stub
from course.pool.ranks import Ranks
from labcode.comm.grid import group_of
from labcode.config import GPTConfig
from labcode.models.gpt import GPT
from labcode.models.gpt import loss as gpt_loss
from labcode.models.layers import initialize

SAMPLES = 16
CONFIG = GPTConfig(vocab_size=11, num_layers=2, num_heads=2, hidden_size=16, context_length=8)

# All ranks together, and two pairs: there a mean over the world is wrong.
GROUPINGS = (((0, 1, 2, 3),), ((0, 1), (2, 3)))

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, targets


# ---- groups


def run(ranks: Ranks, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(rank, *args)` returns on each rank, in rank order.

    An assertion, and the end of a stub, are carried as plain answers. Raised on a rank, they would
    cut the connections of the others in the middle of what they do, and chance would decide whose
    assertion is the first.

    Raises:
        NotImplementedError: The exercise is not done yet.
        AssertionError: That of the first rank which has one.
        RankError: Anything else went wrong.
    """
    answers = ranks.run(_carried, work, args)
    if any(is_open for _, is_open, _ in answers):
        raise NotImplementedError("exercise: your code here")
    for _, _, wrong in answers:
        assert wrong is None, wrong
    return [result for result, _, _ in answers]


def _carried(
    rank: int, work: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, bool, str | None]:
    """(what `work` returns, whether it is still a stub, what it asserts)."""
    try:
        return work(rank, *args), False, None
    except NotImplementedError as error:
        if not is_stub(error):  # PyTorch raises it too
            raise
        return None, True, None
    except AssertionError as error:
        return None, False, str(error)


def own_group(grouping: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """The group of this rank; every rank makes all groups, in the same order."""
    own = None
    for members in grouping:
        group = group_of(members)
        if group is not None:
            own = group
    assert own is not None
    return own


def shares(members: Sequence[int], sizes: Sequence[int], step: int = 0) -> list[Batch]:
    """The share of each member of a group: other samples for each group and step."""
    inputs, targets = samples(64 * (step + 1))
    found = []
    start = 64 * step + 16 * members[0]
    for size in sizes:
        stop = start + size
        found.append((inputs[start:stop], targets[start:stop]))
        start = stop
    return found


def named(members: Sequence[int]) -> str:
    """A group in words, for the beginning of a hint."""
    return f"in the group of ranks {', '.join(map(str, members))}: "


# ---- model and gradients


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model with the same weights on every rank."""
    return initialize(GPT(CONFIG), 0).to(dtype)


def samples(number: int = SAMPLES) -> Batch:
    """(inputs, targets) of the whole batch, [number, 8] each."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(11, (number, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def joined(shares: Iterable[Batch]) -> Batch:
    """Several shares as one batch."""
    inputs = []
    targets = []
    for share_inputs, share_targets in shares:
        inputs.append(share_inputs)
        targets.append(share_targets)
    return torch.cat(inputs), torch.cat(targets)


def backward(module: nn.Module, batch: Batch) -> None:
    """Add the gradient of the mean loss of some samples to `.grad`."""
    inputs, targets = batch
    gpt_loss(module(inputs), targets).backward()


def gradient(module: nn.Module) -> torch.Tensor:
    """All gradients of a model as one vector."""
    gradients = []
    for name, param in module.named_parameters():
        if not param.requires_grad:
            continue
        assert param.grad is not None, f"{name} has no gradient any more: `.grad` is None"
        gradients.append(param.grad)
    return parameters_to_vector(gradients)


def weights(module: nn.Module) -> torch.Tensor:
    """A copy of all weights as one vector."""
    return parameters_to_vector(module.parameters()).detach().clone()


def gradient_of(batch: Batch, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The gradient of a batch, as one process computes it."""
    module = model(dtype)
    backward(module, batch)
    return gradient(module)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance of two vectors."""
    return ((found - expected).norm() / expected.norm()).item()


def length_along(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Length of `found` along `expected`, in lengths of `expected`."""
    return (found @ expected / (expected @ expected)).item()


def times_too_long(
    found: torch.Tensor, expected: torch.Tensor, rounding: float = 1e-9
) -> float | None:
    """By which factor the length is wrong where the direction is right; None where it is not."""
    length = length_along(found, expected)
    if length == 0 or distance(found, expected * length) > rounding:
        return None
    return length
