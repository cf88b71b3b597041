'''The exercise on a synchronised BatchNorm. The text of each assertion is a hint.

What the learner is given:

    class MySyncBatchNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias, eps, group):
            """x [n, C, L] of this rank, weight and bias [C]; returns y [n, C, L].

            n may differ between ranks; the statistics are those of all samples in the group.
            """
            ### BEGIN SOLUTION

        @staticmethod
        def backward(ctx, grad):
            """grad [n, C, L] of y; returns the gradients of x, weight and bias, and two None.

                x_hat = (x - mean) / sqrt(var + eps)
                dx = weight / sqrt(var + eps) * (dy - sum(dy)/m - x_hat * sum(dy * x_hat)/m)

            m is the number of values that a channel has in the whole batch. Those of weight and
            bias are of this rank's samples: data parallelism takes care of the rest.
            """
            ### BEGIN SOLUTION

    check("7.5", lambda: l07.batch_norm(MySyncBatchNorm, ranks))
'''

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from labcode.comm.counting import Call, counted
from labcode.parallel import batch_norm as by_labcode
from labcode.pool.ranks import Ranks
from labcode.teach.check import due
from labcode.teach.exercises.on_ranks import GROUPS, in_groups, without

CHANNELS = 3
LENGTH = 8  # values of a channel in one sample
EPS = 1e-2  # large, so that it matters where it is added
SHARES = {4: ((2, 2, 2, 2), (3, 1, 4, 2)), 3: ((2, 2, 2), (2, 5, 1))}  # samples, by ranks
TOLERANCE = 1e-9
DIMS = (0, 2)


class _Inputs(NamedTuple):
    """The whole batch, the same on every rank: x and the gradient of y [N, C, L], and [C]s."""

    x: Tensor
    grad: Tensor
    weight: Tensor
    bias: Tensor


class _Own(NamedTuple):
    """What the learner's Function did on one rank.

    Args:
        y: Its output.
        grads: Of x, weight and bias; None where there is none.
        forward, backward: What travelled.
        changed: The names of the tensors that it was given and has changed.
    """

    y: Tensor
    grads: tuple[Tensor | None, ...]
    forward: Sequence[Call]
    backward: Sequence[Call]
    changed: Sequence[str]


def batch_norm(answer: Any, ranks: Ranks) -> None:
    """The learner's `MySyncBatchNorm`, over all ranks and over three of them.

    Args:
        answer: A torch.autograd.Function, called as `apply(x, weight, bias, eps, group)`.
        ranks: Four.
    """
    assert answer is not None, "MySyncBatchNorm is None: write it"
    in_groups(ranks, GROUPS, _try, answer)


def _try(group: dist.ProcessGroup, answer: Any) -> None:
    """Equal shares and unequal ones."""
    even, uneven = SHARES[group.size()]
    _check_shares("", group, answer, even)
    name = f"with {', '.join(map(str, uneven))} samples on the ranks: "
    _check_shares(name, group, answer, uneven)


def _check_shares(case: str, group: dist.ProcessGroup, answer: Any, sizes: Sequence[int]) -> None:
    whole = _inputs(sum(sizes))
    start = sum(sizes[: group.rank()])
    part = slice(start, start + sizes[group.rank()])
    own = _run(group, answer, whole, part)
    for name in own.changed:
        raise AssertionError(f"{case}{name} has changed: it belongs to the caller")
    _check_travel(case, "forward", own.forward, group.size())
    _check_output(case, own.y, whole, sizes, part)
    _check_grad_x(case, own.grads[0], whole, part)
    _check_travel(case, "backward", own.backward, group.size())
    _check_weights(case, own.grads[1:], whole, part)


def _inputs(num_samples: int) -> _Inputs:
    draw = torch.Generator().manual_seed(num_samples)
    shape = (num_samples, CHANNELS, LENGTH)
    spread = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)[:, None]
    x = spread * torch.randn(shape, generator=draw, dtype=torch.float64)
    # samples have levels of their own, so that ranks have different means
    levels = torch.randn((num_samples, CHANNELS, 1), generator=draw, dtype=torch.float64)
    grad = torch.randn(shape, generator=draw, dtype=torch.float64)
    weight = torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64)
    bias = torch.tensor([0.3, 1.0, -2.0], dtype=torch.float64)
    return _Inputs(x + levels + 1, grad + 0.5, weight, bias)


def _run(group: dist.ProcessGroup, answer: Any, whole: _Inputs, part: slice) -> _Own:
    given = {
        "x": whole.x[part].clone().requires_grad_(),
        "weight": whole.weight.clone().requires_grad_(),
        "bias": whole.bias.clone().requires_grad_(),
    }
    grad = whole.grad[part].clone()
    if not _is_autograd_function(answer):
        due(answer(*given.values(), EPS, group))  # what is not written yet says so
        raise AssertionError(
            "this is no torch.autograd.Function: hand in the class that has forward and backward"
        )
    own_functions = (
        by_labcode.WholeBatchNorm.forward,
        by_labcode._WholeBatchNorm.forward,
        by_labcode._WholeBatchNorm.backward,
        by_labcode._of_all_ranks,
    )
    with without(*own_functions):
        with counted() as forward:
            y = due(answer.apply(*given.values(), EPS, group))
        assert isinstance(y, Tensor), "forward returns one tensor, y"
        assert y.shape == grad.shape, (
            f"y is {list(y.shape)}, expected {list(grad.shape)}, as x has it: the samples of this "
            "rank"
        )
        with counted() as backward:
            grads = torch.autograd.grad(y, list(given.values()), grad, allow_unused=True)
    changed = []
    for name, before in (("x", whole.x[part]), ("weight", whole.weight), ("bias", whole.bias)):
        if not torch.equal(given[name].detach(), before):
            changed.append(name)
    if not torch.equal(grad, whole.grad[part]):
        changed.append("the gradient that backward was handed")
    return _Own(y.detach(), grads, forward, backward, changed)


def _is_autograd_function(answer: Any) -> bool:
    return inspect.isclass(answer) and issubclass(answer, torch.autograd.Function)


def _check_travel(case: str, where: str, calls: Sequence[Call], p: int) -> None:
    """Statistics travel, and samples do not."""
    assert calls, case + (
        f"nothing travels in {where}, so it knows no other rank's samples: which sums go over all "
        "of them?"
    )
    numbers = sum(call.num_bytes for call in calls) / 8  # of float64
    enough = 4 * p * (CHANNELS + 1)
    assert numbers <= enough, case + (
        f"{numbers:.0f} numbers travel in {where}, and for {CHANNELS} channels on {p} ranks "
        f"{enough} are more than enough: do samples travel, where their sums would do?"
    )


# ---- the output


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel, [C]."""
    return x.mean(DIMS), x.var(DIMS, correction=0)


def _normalized(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return (x - mean[:, None]) / (var + EPS).sqrt()[:, None]


def _check_output(
    case: str, found: Tensor, whole: _Inputs, sizes: Sequence[int], part: slice
) -> None:
    mean, var = _moments(whole.x)
    x = whole.x[part]
    mistakes = _mistaken_outputs(whole, sizes, part)
    expected = _scaled(_normalized(x, mean, var), whole)
    if _is_close(found, expected):
        return
    for hint, wrong in mistakes.items():
        assert not _is_close(found, wrong), case + hint
    assert found.isfinite().all(), case + "y has inf or nan: is var negative, or a count 0?"
    off = _off(found, expected)
    if off < 1e-5:
        raise AssertionError(
            case + f"y is right to {off:.0e} only: where do the numbers cease to be float64?"
        )
    raise AssertionError(
        case + f"y is {off:.0%} off what one process makes of the whole batch: compare mean and "
        "var with those of all samples, one after the other"
    )


def _mistaken_outputs(whole: _Inputs, sizes: Sequence[int], part: slice) -> dict[str, Tensor]:
    """{hint: the output of who makes this mistake}."""
    mean, var = _moments(whole.x)
    x = whole.x[part]
    total = whole.x.numel() // CHANNELS
    shares = [_moments(share) for share in whole.x.split(list(sizes))]
    means = torch.stack([share[0] for share in shares])
    variances = torch.stack([share[1] for share in shares])
    counts = torch.tensor(sizes, dtype=torch.float64)[:, None]
    within = (counts * variances).sum(0) / counts.sum()
    plain_mean = means.mean(0)
    plain_var = (variances + (means - plain_mean).square()).mean(0)
    alone = _normalized(x, *_moments(x))
    unbiased = var * total / (total - 1)
    outside = (x - mean[:, None]) / (var.sqrt() + EPS)[:, None]
    uneven = (
        "every rank counts as much as the others, and they have different numbers of samples: "
        "which numbers may be averaged over ranks, which must be added?"
    )
    mistakes = {
        "y is normalised with the statistics of this rank's samples alone": alone,
        (
            "var is the average of the ranks' variances: the ranks' means differ too, and that is "
            "a part of the variance"
        ): _normalized(x, mean, within),
        (
            "var is divided by one value less than there are: BatchNorm normalises with the plain "
            "mean of the squares"
        ): _normalized(x, mean, unbiased),
        "eps is added to the root: it belongs to the variance, under the root": outside,
    }
    if len(set(sizes)) > 1:
        mistakes[uneven] = _normalized(x, plain_mean, plain_var)
        mistakes[uneven + " Also, the ranks' means differ, which is a part of the variance"] = (
            _normalized(x, plain_mean, variances.mean(0))
        )
    scaled = {hint: _scaled(x_hat, whole) for hint, x_hat in mistakes.items()}
    x_hat = _normalized(x, mean, var)
    scaled["y is x_hat: where are weight and bias?"] = x_hat
    scaled["y is weight * x_hat: where is bias?"] = whole.weight[:, None] * x_hat
    scaled["y is x_hat + bias: where is weight?"] = x_hat + whole.bias[:, None]
    return scaled


def _scaled(x_hat: Tensor, whole: _Inputs) -> Tensor:
    return whole.weight[:, None] * x_hat + whole.bias[:, None]


# ---- the gradients


def _check_grad_x(case: str, found: Tensor | None, whole: _Inputs, part: slice) -> None:
    assert found is not None, case + "no gradient reaches x: what does backward return first?"
    all_x = whole.x.clone().requires_grad_()
    y = F.batch_norm(all_x, None, None, whole.weight, whole.bias, training=True, eps=EPS)
    expected = torch.autograd.grad(y, all_x, whole.grad)[0][part]
    assert found.shape == expected.shape, case + (
        f"the gradient of x is {list(found.shape)}, and x is {list(expected.shape)}"
    )
    if _is_close(found, expected):
        return
    assert found.isfinite().all(), case + "y is right, and the gradient of x has inf or nan"
    for hint, wrong in _mistaken_gradients(whole, part).items():
        assert not _is_close(found, wrong), case + hint
    raise AssertionError(
        case + f"y is right, and the gradient of x is {_off(found, expected):.0%} off: compare the "
        "three terms of dx with the formula"
    )


def _mistaken_gradients(whole: _Inputs, part: slice) -> dict[str, Tensor]:
    """{hint: the gradient of x of who makes this mistake}."""
    mean, var = _moments(whole.x)
    factor = (whole.weight / (var + EPS).sqrt())[:, None]
    all_hat = _normalized(whole.x, mean, var)
    grad = whole.grad[part]
    x_hat = all_hat[part]
    total = whole.x.numel() // CHANNELS
    count = grad.numel() // CHANNELS
    own_sums = (grad.sum(DIMS)[:, None], (grad * x_hat).sum(DIMS)[:, None])
    all_sums = (whole.grad.sum(DIMS)[:, None], (whole.grad * all_hat).sum(DIMS)[:, None])

    def with_sums(sums: tuple[Tensor, Tensor], number: int) -> Tensor:
        return grad - sums[0] / number - x_hat * sums[1] / number

    own = (
        "in backward the sums go over this rank's samples alone: the statistics that this x moves "
        "are used by all ranks"
    )
    return {
        (
            "dx is weight / sqrt(var + eps) * dy, as if mean and var were constants: they depend "
            "on x too"
        ): factor * grad,
        own: factor * with_sums(own_sums, count),
        own + "; and m counts the values of all": factor * with_sums(own_sums, total),
        (
            "the sums of backward are those of all ranks, and are divided by the number of this "
            "rank's values: m counts those of the whole batch"
        ): factor * with_sums(all_sums, count),
        "the gradient of x lacks the factor weight": (
            factor / whole.weight[:, None] * with_sums(all_sums, total)
        ),
    }


def _check_weights(case: str, found: Sequence[Tensor | None], whole: _Inputs, part: slice) -> None:
    mean, var = _moments(whole.x)
    all_hat = _normalized(whole.x, mean, var)
    of_all = ((whole.grad * all_hat).sum(DIMS), whole.grad.sum(DIMS))
    of_own = ((whole.grad * all_hat)[part].sum(DIMS), whole.grad[part].sum(DIMS))
    for name, grad in zip(("weight", "bias"), found):
        assert grad is not None, case + f"no gradient reaches {name}"
        assert grad.shape == (CHANNELS,), case + (
            f"the gradient of {name} is {list(grad.shape)}, expected [{CHANNELS}]"
        )
    weight_grad, bias_grad = found
    assert weight_grad is not None and bias_grad is not None
    swapped = _is_close(weight_grad, of_own[1]) and _is_close(bias_grad, of_own[0])
    assert not swapped, case + (
        "the gradients of weight and bias are swapped: backward returns them in the order of "
        "forward's arguments"
    )
    for name, grad, total, own in zip(("weight", "bias"), (weight_grad, bias_grad), of_all, of_own):
        assert not _is_close(grad, total), case + (
            f"the gradient of {name} is the sum over all ranks already, and data parallelism will "
            "add these up again: did all_reduce write into the tensor that you return?"
        )
        assert _is_close(grad, own), case + (
            f"the gradient of {name} is {_off(grad, own):.0%} off what this rank's samples give"
        )


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return _off(found, expected) < TOLERANCE


def _off(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest number."""
    difference = (found.double() - expected).abs().max()
    return (difference / expected.abs().max()).item()
