"""Checks of lesson 04, data parallel. Each assertion's text is a hint."""

import contextlib
import inspect
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from labcode.config import GPTConfig
from labcode.models.gpt import GPT
from labcode.models.gpt import loss as gpt_loss
from labcode.models.layers import initialize
from labcode.parallel.data import make_buckets
from labcode.pool.ranks import RankError
from labcode.teach.check import due

SAMPLES = 16


def _model(dtype=torch.float64):
    config = GPTConfig(vocab_size=11, num_layers=2, num_heads=2, hidden_size=16, context_length=8)
    return initialize(GPT(config), 0).to(dtype)


def _samples():
    tokens = torch.randint(11, (SAMPLES, 9), generator=torch.Generator().manual_seed(7))
    return tokens[:, :-1], tokens[:, 1:]


def _gradient(model):
    return parameters_to_vector([param.grad for param in model.parameters()])


def _whole_gradient(dtype=torch.float64):
    model, (inputs, targets) = _model(dtype), _samples()
    gpt_loss(model(inputs), targets).backward()
    return _gradient(model)


def _off(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


# ---- 4.1


def shares(p: int) -> list[int]:
    """Samples of each of `p` ranks, as uneven as whole numbers allow while everyone has some: 3, and the rest on rank 0."""
    small = SAMPLES // p - 1
    return [SAMPLES - small * (p - 1)] + [small] * (p - 1)


def _uneven(rank, average):
    inputs, targets = _samples()
    mine = shares(dist.get_world_size())
    part = slice(sum(mine[:rank]), sum(mine[: rank + 1]))
    model = _model()
    gpt_loss(model(inputs[part]), targets[part]).backward()
    own = _gradient(model).clone()
    average(model, mine[rank], SAMPLES)
    return own, _gradient(model)


def average_uneven(average, ranks) -> None:
    """The learner's `average(model, mine, total)` on shares of different sizes."""
    results = ranks.run(_uneven, average)
    owns, found, expected = [own for own, _ in results], results[0][1], _whole_gradient()
    if ranks.n == 1:
        assert _off(found, expected) < 1e-9, "with one rank nothing may change"
        return
    assert _off(found, owns[0]) > 1e-9, "rank 0 still has its own gradient: did anything travel?"
    alike = all(_off(other, found) < 1e-9 for _, other in results)
    assert alike, (
        "the ranks end up with different gradients: weigh first, then the sum has to travel"
    )
    means = torch.stack(owns).mean(0)
    most, least = max(shares(ranks.n)), min(shares(ranks.n))
    hint = f"that is the mean of the means: a rank with {least} samples counts as much as one with {most}"
    assert _off(found, means) > 1e-9, hint
    assert _off(found, means * ranks.n) > 1e-9, (
        "that is the plain sum: weigh each rank's gradient before it travels"
    )
    length = (found @ expected / (expected @ expected)).item()
    assert _off(found, expected * length) > 1e-9 or abs(length - 1) < 1e-9, (
        f"right direction, but {length:.3g} times as long as it should be: the weights of the ranks must add up to 1"
    )
    assert _off(found, expected) < 1e-9, (
        f"{_off(found, expected):.1%} away from the gradient of the whole batch"
    )


# ---- 4.2


def assign(assign) -> None:
    """The learner's `assign(sizes, limit)` against small cases by hand and against the library."""
    cases = {
        ((10,), 25): [[0]],
        ((10, 10, 10, 10), 25): [[3, 2], [1, 0]],
        ((10, 10, 10), 1): [[2], [1], [0]],
        ((100, 10, 10), 25): [[2, 1], [0]],
        ((10, 100, 10), 25): [[2], [1], [0]],
        ((10, 15, 10), 25): [[2, 1], [0]],
    }
    for (sizes, limit), expected in cases.items():
        found = due(assign(list(sizes), limit))
        found = [list(bucket) for bucket in found]
        case = f"sizes {list(sizes)}, limit {limit}: "
        assert [] not in found, case + f"{found} holds an empty bucket"
        order = [index for bucket in found for index in bucket]
        assert sorted(order) == list(range(len(sizes))), (
            case + f"{found} does not hold every index once"
        )
        assert order == sorted(order, reverse=True), (
            case + f"{found} is not in backward's order, the last parameter first"
        )
        full = [
            bucket for bucket in found if len(bucket) > 1 and sum(sizes[i] for i in bucket) > limit
        ]
        assert not full, case + f"bucket {full and full[0]} holds more than the limit"
        assert found == expected, (
            case
            + f"{found} is allowed, but {len(found)} all-reduces; fill each bucket as far as it goes"
        )
    model = _model(torch.float32)
    sizes = [param.numel() * param.element_size() for param in model.parameters()]
    theirs = [bucket.num_bytes for bucket in make_buckets(model, 5e-3)]
    ours = [sum(sizes[i] for i in bucket) for bucket in assign(sizes, 5000)]
    assert ours == theirs, f"on a GPT the buckets have {ours} bytes, labcode's {theirs}"


# ---- 4.3


def _accumulated(rank, context, accumulation):
    p = dist.get_world_size()
    model, sent = DistributedDataParallel(_model()), []
    model.register_comm_hook(sent, _counting)
    inputs, targets = (x.chunk(p)[rank].chunk(accumulation) for x in _samples())
    for number in range(1, accumulation + 1):
        with context(model, number, accumulation):
            (gpt_loss(model(inputs[number - 1]), targets[number - 1]) / accumulation).backward()
    return len(sent), _gradient(model)


def _counting(sent, bucket):
    sent.append(bucket.index())
    future = dist.all_reduce(
        bucket.buffer().div_(dist.get_world_size()), async_op=True
    ).get_future()
    return future.then(lambda done: done.value()[0])


def last_only(context, ranks) -> None:
    """The learner's `context(model, number, accumulation)` in a loop over micro-batches, with PyTorch's DDP."""
    expected = _whole_gradient()
    for accumulation in (1, 2, 4):
        due(context(_NoRanks(), accumulation, accumulation))
        sent, found = ranks.run(_accumulated, context, accumulation)[0]
        case = (
            f"with {accumulation} micro-batches: "
            if accumulation > 1
            else "with one micro-batch, which is also the last: "
        )
        assert sent > 0, case + "no gradient was ever sent, every rank trains alone"
        assert sent == 1, case + f"{sent} all-reduces, one is enough"
        hint = "the gradient that was sent does not hold all of them: the last one must be the one that sends"
        assert _off(found, expected) < 1e-9, case + hint


class _NoRanks:
    """Has a `no_sync()`, so that a stub can be told from an answer without any rank."""

    no_sync = staticmethod(contextlib.nullcontext)


# ---- 4.4


def _compressed(rank, hook):
    p = dist.get_world_size()
    model, group, sent = DistributedDataParallel(_model(torch.float32)), dist.group.WORLD, []
    model.register_comm_hook(group, hook)
    inputs, targets = (x.chunk(p)[rank] for x in _samples())
    real = dist.all_reduce

    def spy(tensor, *args, **kwargs):
        sent.append((str(tensor.dtype), tensor.nbytes))
        return real(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", spy):
        gpt_loss(model(inputs), targets).backward()
    return sent, _gradient(model)


def compress(hook, ranks) -> None:
    """The learner's communication hook `hook(group, bucket)`: half the bytes, nearly the same mean."""
    names = list(inspect.signature(hook).parameters)
    assert names[1:] == ["bucket"], (
        f"DDP wants the parameters (state, bucket); yours are called {names}"
    )
    try:
        (sent, found), *others = ranks.run(_compressed, hook)
    except RankError as error:
        listed = "expected the hook result is a PyObject" in str(error)
        assert not listed, (
            "the Future holds a list, as all_reduce leaves it: add .then(lambda done: done.value()[0])"
        )
        raise
    expected = _whole_gradient(torch.float32)
    assert sent, "no all_reduce was called: send the compressed tensor with dist.all_reduce"
    kinds = sorted({dtype for dtype, _ in sent})
    assert kinds == ["torch.bfloat16"], (
        f"{', '.join(kinds)} travelled, it should be torch.bfloat16 alone"
    )
    bytes_sent, full = sum(size for _, size in sent), found.nbytes
    assert bytes_sent == full // 2, f"{bytes_sent} bytes were sent, half of {full} are {full // 2}"
    assert all(torch.equal(other, found) for _, other in others), (
        "the ranks end up with different gradients"
    )
    length = (found @ expected / (expected @ expected)).item()
    assert abs(length - 1) < 0.1, (
        f"the gradient is {length:.2f} times as long as the mean: sum or mean, and divided how often?"
    )
    assert _off(found, expected) < 0.03, (
        f"{_off(found, expected):.1%} away from the mean: more than rounding explains"
    )
