"""Checks of lesson 04, data parallel. The text of each assertion is a hint."""

import contextlib
import inspect
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from labcode.config import GPTConfig
from labcode.models.gpt import GPT
from labcode.models.gpt import loss as gpt_loss
from labcode.models.layers import initialize
from labcode.parallel.data import make_buckets
from labcode.pool.ranks import RankError, Ranks
from labcode.teach.check import Exercise, due

EXERCISES = {
    "4.1": Exercise("7 + 3 + 3 + 3 samples, the gradient of 16"),
    "4.2": Exercise("the same buckets as the library's"),
    "4.3": Exercise("one all-reduce for 1, 2 and 4 micro-batches"),
    "4.4": Exercise("half the bytes, the mean to two or three digits"),
}

SAMPLES = 16

Future = torch.futures.Future[torch.Tensor]


# ---- what the checks share


def _model(dtype: torch.dtype = torch.float64) -> nn.Module:
    config = GPTConfig(vocab_size=11, num_layers=2, num_heads=2, hidden_size=16, context_length=8)
    return initialize(GPT(config), 0).to(dtype)


def _samples() -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets) of the whole batch, [SAMPLES, 8] each."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(11, (SAMPLES, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _own_samples(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets) of this rank where all ranks have as many."""
    p = dist.get_world_size()
    inputs, targets = _samples()
    return inputs.chunk(p)[rank], targets.chunk(p)[rank]


def _gradient(model: nn.Module) -> torch.Tensor:
    """All gradients of a model as one vector."""
    gradients = []
    for param in model.parameters():
        assert param.grad is not None
        gradients.append(param.grad)
    return parameters_to_vector(gradients)


def _whole_gradient(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The gradient of the whole batch, from one process."""
    model = _model(dtype)
    inputs, targets = _samples()
    gpt_loss(model(inputs), targets).backward()
    return _gradient(model)


def _off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance of two vectors."""
    return ((found - expected).norm() / expected.norm()).item()


def _length(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Length of `found` along `expected`, in lengths of `expected`."""
    return (found @ expected / (expected @ expected)).item()


# ---- 4.1


Average = Callable[[nn.Module, int, int], Any]


def shares(p: int) -> list[int]:
    """Samples of each of `p` ranks: equally few for all but rank 0, which has the rest.

    With 4 ranks these are 7, 3, 3 and 3: as uneven as possible without two different small shares.
    """
    small = SAMPLES // p - 1
    first = SAMPLES - small * (p - 1)
    return [first] + [small] * (p - 1)


def _uneven(rank: int, average: Average) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's own gradient, and what it became."""
    inputs, targets = _samples()
    sizes = shares(dist.get_world_size())
    inputs = inputs.split(sizes)[rank]
    targets = targets.split(sizes)[rank]
    model = _model()
    gpt_loss(model(inputs), targets).backward()
    own = _gradient(model).clone()
    average(model, sizes[rank], SAMPLES)
    return own, _gradient(model)


def average_uneven(average: Average, ranks: Ranks) -> None:
    """The learner's `average(model, mine, total)` on shares of different sizes."""
    owns = []
    averages = []
    for own, averaged in ranks.run(_uneven, average):
        owns.append(own)
        averages.append(averaged)
    found = averages[0]
    expected = _whole_gradient()
    if ranks.n == 1:
        assert _off(found, expected) < 1e-9, "with one rank nothing may change"
        return
    assert _off(found, owns[0]) > 1e-9, "rank 0 still has its own gradient: did anything travel?"
    for other in averages:
        assert _off(other, found) < 1e-9, (
            "the ranks end up with different gradients: weigh first, then the sum has to travel"
        )
    _check_weights(found, expected, owns)
    off = _off(found, expected)
    assert off < 1e-9, f"{off:.1%} away from the gradient of the whole batch"


def _check_weights(found: torch.Tensor, expected: torch.Tensor, owns: list[torch.Tensor]) -> None:
    """Name the wrong weights that people choose: all the same, or such that their sum is not 1."""
    sizes = shares(len(owns))
    total = torch.stack(owns).sum(0)
    mean_of_means = total / len(owns)
    assert _off(found, mean_of_means) > 1e-9, (
        f"that is the mean of the means: a rank with {min(sizes)} samples counts as much as one "
        f"with {max(sizes)}"
    )
    assert _off(found, total) > 1e-9, (
        "that is the plain sum: weigh each rank's gradient before it travels"
    )
    length = _length(found, expected)
    right_direction = _off(found, expected * length) <= 1e-9
    right_length = abs(length - 1) < 1e-9
    assert not right_direction or right_length, (
        f"right direction, but {length:.3g} times as long as it should be: "
        "the weights of the ranks must add up to 1"
    )


# ---- 4.2


Assign = Callable[[list[int], int], Any]

ASSIGNMENTS = {  # (sizes, limit): buckets, worked out by hand
    ((10,), 25): [[0]],
    ((10, 10, 10, 10), 25): [[3, 2], [1, 0]],
    ((10, 10, 10), 1): [[2], [1], [0]],
    ((100, 10, 10), 25): [[2, 1], [0]],
    ((10, 100, 10), 25): [[2], [1], [0]],
    ((10, 15, 10), 25): [[2, 1], [0]],
}


def assign(assign: Assign) -> None:
    """The learner's `assign(sizes, limit)` against small cases by hand and against the library."""
    for (sizes, limit), expected in ASSIGNMENTS.items():
        found = due(assign(list(sizes), limit))
        buckets = [list(bucket) for bucket in found]
        _check_buckets(buckets, list(sizes), limit, expected)

    model = _model(torch.float32)
    sizes = [param.numel() * param.element_size() for param in model.parameters()]
    theirs = [bucket.num_bytes for bucket in make_buckets(model, 5e-3)]
    ours = [_size(bucket, sizes) for bucket in assign(sizes, 5000)]
    assert ours == theirs, f"on a GPT the buckets have {ours} bytes, labcode's {theirs}"


def _size(bucket: list[int], sizes: list[int]) -> int:
    return sum(sizes[index] for index in bucket)


def _check_buckets(
    found: list[list[int]],
    sizes: list[int],
    limit: int,
    expected: list[list[int]],
) -> None:
    case = f"sizes {sizes}, limit {limit}: {found}"
    assert [] not in found, f"{case} holds an empty bucket"
    order = list(itertools.chain.from_iterable(found))
    assert sorted(order) == list(range(len(sizes))), f"{case} does not hold every index once"
    assert order == sorted(order, reverse=True), (
        f"{case} is not in backward's order, the last parameter first"
    )
    for bucket in found:
        # A parameter larger than the limit has a bucket of its own.
        assert len(bucket) == 1 or _size(bucket, sizes) <= limit, (
            f"sizes {sizes}, limit {limit}: bucket {bucket} holds more than the limit"
        )
    assert found == expected, (
        f"{case} is allowed, but {len(found)} all-reduces; fill each bucket as far as it goes"
    )


# ---- 4.3


Context = Callable[[Any, int, int], AbstractContextManager]


def _accumulated(rank: int, context: Context, accumulation: int) -> tuple[int, torch.Tensor]:
    """(all-reduces of a step with `accumulation` micro-batches, the gradient after it)."""
    sent: list[int] = []
    model = DistributedDataParallel(_model())
    model.register_comm_hook(sent, _counting)
    inputs, targets = _own_samples(rank)
    micro_batches = zip(inputs.chunk(accumulation), targets.chunk(accumulation))
    for number, (micro_inputs, micro_targets) in enumerate(micro_batches, start=1):
        with context(model, number, accumulation):
            loss = gpt_loss(model(micro_inputs), micro_targets) / accumulation
            loss.backward()
    return len(sent), _gradient(model)


def _counting(sent: list[int], bucket: dist.GradBucket) -> Future:
    """A communication hook of DDP's that notes each bucket, and averages as usual."""
    sent.append(bucket.index())
    average = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(average, async_op=True)
    assert work is not None  # it is, where every rank takes part
    return work.get_future().then(lambda done: done.value()[0])


def last_only(context: Context, ranks: Ranks) -> None:
    """The learner's `context(model, number, accumulation)` around each micro-batch of DDP's."""
    expected = _whole_gradient()
    for accumulation in (1, 2, 4):
        due(context(_NoRanks(), accumulation, accumulation))
        sent, found = ranks.run(_accumulated, context, accumulation)[0]
        case = f"with {accumulation} micro-batches: "
        if accumulation == 1:
            case = "with one micro-batch, which is also the last: "
        assert sent > 0, case + "no gradient was ever sent, every rank trains alone"
        assert sent == 1, case + f"{sent} all-reduces, one is enough"
        assert _off(found, expected) < 1e-9, (
            case + "the gradient that was sent does not hold all of them: "
            "the last one must be the one that sends"
        )


class _NoRanks:
    """Has a `no_sync()`, so that a stub can be told from an answer without any rank."""

    no_sync = staticmethod(contextlib.nullcontext)


# ---- 4.4


Hook = Callable[[Any, dist.GradBucket], Future]


def _compressed(rank: int, hook: Hook) -> tuple[list[tuple[str, int]], torch.Tensor]:
    """((dtype, bytes) of each tensor that was all-reduced, the gradient after it)."""
    sent = []
    real = dist.all_reduce

    def spy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append((str(tensor.dtype), tensor.nbytes))
        return real(tensor, *args, **kwargs)

    model = DistributedDataParallel(_model(torch.float32))
    model.register_comm_hook(dist.group.WORLD, hook)
    inputs, targets = _own_samples(rank)
    # Not a CollectiveSpy: DDP calls its hooks from backward's threads, and the dtype counts.
    with mock.patch.object(dist, "all_reduce", spy):
        gpt_loss(model(inputs), targets).backward()
    return sent, _gradient(model)


def compress(hook: Hook, ranks: Ranks) -> None:
    """The learner's communication hook `hook(group, bucket)`: half the bytes, nearly the mean."""
    names = list(inspect.signature(hook).parameters)
    assert names[1:] == ["bucket"], (
        f"DDP wants the parameters (state, bucket); yours are called {names}"
    )
    try:
        (sent, found), *others = ranks.run(_compressed, hook)
    except RankError as error:
        is_list = "expected the hook result is a PyObject" in str(error)
        assert not is_list, (
            "the Future holds a list, as all_reduce leaves it: "
            "add .then(lambda done: done.value()[0])"
        )
        raise
    _check_sent(sent, found.nbytes)
    for _, other in others:
        assert torch.equal(other, found), "the ranks end up with different gradients"
    expected = _whole_gradient(torch.float32)
    length = _length(found, expected)
    assert abs(length - 1) < 0.1, (
        f"the gradient is {length:.2f} times as long as the mean: "
        "sum or mean, and divided how often?"
    )
    off = _off(found, expected)
    assert off < 0.03, f"{off:.1%} away from the mean: more than rounding explains"


def _check_sent(sent: list[tuple[str, int]], full_bytes: int) -> None:
    """What travelled is bfloat16 alone, half of the gradient's bytes."""
    assert sent, "no all_reduce was called: send the compressed tensor with dist.all_reduce"
    kinds = sorted({dtype for dtype, _ in sent})
    assert kinds == ["torch.bfloat16"], (
        f"{', '.join(kinds)} travelled, it should be torch.bfloat16 alone"
    )
    sent_bytes = sum(num_bytes for _, num_bytes in sent)
    half = full_bytes // 2
    assert sent_bytes == half, f"{sent_bytes} bytes were sent, half of {full_bytes} are {half}"
