"""The check of the exercise on a synchronised BatchNorm of lesson 07."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from course.answer import Hint, due
from course.exercises.expect import (
    careless,
    confirm_in_group,
    diagnose,
    distance,
    in_groups,
    own_answers,
    refuse,
    tensor,
)
from course.exercises.simulated import Event, Outcome, here
from course.pool.ranks import Ranks
from labcode.parallel import batch_norm as by_labcode

CHANNELS = 3
LENGTH = 8  # values of a channel in one sample
EPS = 1e-2  # large, so that it matters where it is added
EVEN = {
    3: (2, 2, 2),
    4: (2, 2, 2, 2),
    6: (2, 2, 2, 2, 2, 2),
}  # samples of each rank, by their number
UNEVEN = {3: (2, 5, 1), 4: (3, 1, 4, 2), 6: (3, 1, 4, 2, 5, 2)}
DIMS = (0, 2)
OURS = own_answers(
    by_labcode.WholeBatchNorm.forward,
    by_labcode._WholeBatchNorm.forward,
    by_labcode._WholeBatchNorm.backward,
    by_labcode._of_all_ranks,
)


class _Batch(NamedTuple):
    """The whole batch, the same on every rank: x and the gradient of y [N, C, L], and [C]s."""

    x: Tensor
    grad: Tensor
    weight: Tensor
    bias: Tensor


def batch_norm(answer: Any, ranks: Ranks | None = None) -> str:
    """The learner's `MySyncBatchNorm`, called as `apply(x, weight, bias, eps, group)`."""
    if answer is None:
        raise Hint("MySyncBatchNorm is None: write it")
    for shares in (EVEN, UNEVEN):
        judge = partial(_check_normalized, shares=shares)
        outcome = in_groups(_pass, answer, shares, judge=judge, ours=OURS)
    return confirm_in_group(ranks, outcome, _pass, answer, shares)


def _batch(num_samples: int) -> _Batch:
    generator = torch.Generator().manual_seed(num_samples)
    shape = (num_samples, CHANNELS, LENGTH)
    spread = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)[:, None]
    x = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    # Samples have levels of their own, so that ranks have different means.
    levels = torch.randn((num_samples, CHANNELS, 1), generator=generator, dtype=torch.float64)
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    weight = torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64)
    bias = torch.tensor([0.3, 1.0, -2.0], dtype=torch.float64)
    return _Batch(x + levels + 1, grad + 0.5, weight, bias)


def _part(sizes: Sequence[int], place: int) -> slice:
    """Which samples belong to the rank with this number in the group."""
    start = sum(sizes[:place])
    return slice(start, start + sizes[place])


def _pass(
    group: dist.ProcessGroup, answer: Any, shares: dict[int, tuple[int, ...]]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """y, and the gradients of x, weight and bias, on one rank."""
    sizes = shares[group.size()]
    whole = _batch(sum(sizes))
    part = _part(sizes, group.rank())
    x = whole.x[part].clone().requires_grad_()
    weight = whole.weight.clone().requires_grad_()
    bias = whole.bias.clone().requires_grad_()
    with here().block("forward"):
        y = _applied(answer)(x, weight, bias, EPS, group)
    due(y)
    tensor(y, what="forward gives")
    shape = (
        f"y is {list(y.shape)}, expected is {list(x.shape)}, as x has it: the samples of this rank"
    )
    refuse({shape: y.shape != x.shape})
    grad = whole.grad[part].clone()
    with here().block("backward"):
        grads = torch.autograd.grad(y, (x, weight, bias), grad, allow_unused=True)
    given = {
        "x": (x, whole.x[part]),
        "weight": (weight, whole.weight),
        "bias": (bias, whole.bias),
        "the gradient that backward was handed": (grad, whole.grad[part]),
    }
    for name, (now, before) in given.items():
        refuse({f"{name} has changed: it belongs to the caller": not torch.equal(now, before)})
    return y.detach(), grads


def _applied(answer: Any) -> Callable[..., Any]:
    """What to call: the Function's `apply`."""
    if inspect.isclass(answer) and issubclass(answer, torch.autograd.Function):
        return answer.apply

    def refuse_call(*args: Any) -> None:
        due(answer(*args))  # what is not written yet says so
        raise Hint(
            "this is no torch.autograd.Function: hand in the class that has forward and backward"
        )

    return refuse_call


def _check_normalized(
    results: list[Any],
    outcome: Outcome,
    members: Sequence[int],
    shares: dict[int, tuple[int, ...]],
) -> None:
    """Each rank of a group has its part of what one process makes of the whole batch."""
    sizes = shares[len(members)]
    whole = _batch(sum(sizes))
    uneven = f"with {', '.join(map(str, sizes))} samples on the ranks: "
    for place, rank in enumerate(members):
        case = f"on rank {rank}: {uneven if shares is UNEVEN else ''}"
        y, (grad_x, grad_weight, grad_bias) = results[place]
        part = _part(sizes, place)
        calls = outcome.of(rank)
        _check_statistics_sent(case, "forward", calls, len(members))
        _check_output(case, y, whole, sizes, part)
        _check_grad_x(case, grad_x, whole, part)
        _check_statistics_sent(case, "backward", calls, len(members))
        _check_own_gradients(case, grad_weight, grad_bias, whole, part)


def _check_statistics_sent(case: str, where: str, all_calls: Sequence[Event], p: int) -> None:
    """Statistics travel, and samples do not."""
    calls = [one for one in all_calls if one.block == where]
    numbers = sum(one.num_bytes for one in calls if one.kind != "recv") / 8  # of float64
    enough = 4 * p * (CHANNELS + 1)
    mistakes = {
        f"nothing travels in {where}, so it knows no other rank's samples: which sums go over all "
        "of them?": not calls,
        f"{numbers:.0f} numbers travel in {where}, and for {CHANNELS} channels on {p} ranks "
        f"{enough} are more than enough: do samples travel, where their sums would do?": (
            numbers > enough
        ),
    }
    refuse({**mistakes, **careless(calls)}, case)


# ---- the output


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel, [C]."""
    return x.mean(DIMS), x.var(DIMS, correction=0)


def _normalized(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return (x - mean[:, None]) / (var + EPS).sqrt()[:, None]


def _check_output(
    case: str, found: Tensor, whole: _Batch, sizes: Sequence[int], part: slice
) -> None:
    x = whole.x[part]
    mean, var = _moments(whole.x)
    x_hat = _normalized(x, mean, var)
    weight = whole.weight[:, None]
    bias = whole.bias[:, None]
    truth = weight * x_hat + bias
    off = distance(found, truth)
    mistakes: dict[str, Any] = {}
    for hint, wrong in _mistaken_x_hats(whole, sizes, part).items():
        mistakes[hint] = weight * wrong + bias
    mistakes |= {
        "y is x_hat: where are weight and bias?": x_hat,
        "y is weight * x_hat: where is bias?": weight * x_hat,
        "y is x_hat + bias: where is weight?": x_hat + bias,
        "y has inf or nan: is var negative, or a count 0?": not found.isfinite().all(),
        f"y is right to {off:.0e} only: where do the numbers cease to be float64?": off < 1e-5,
    }
    otherwise = (
        "y is {off:.0%} off what one process makes of the whole batch: compare mean and var with "
        "those of all samples, one after the other"
    )
    diagnose(case, found, truth, mistakes, otherwise)


def _mistaken_x_hats(whole: _Batch, sizes: Sequence[int], part: slice) -> dict[str, Tensor]:
    """{hint: x_hat of who makes this mistake}; with equal shares some of them are none."""
    x = whole.x[part]
    mean, var = _moments(whole.x)
    total = whole.x.numel() // CHANNELS
    shares = [_moments(share) for share in whole.x.split(list(sizes))]
    means = torch.stack([share[0] for share in shares])
    variances = torch.stack([share[1] for share in shares])
    counts = torch.tensor(sizes, dtype=torch.float64)[:, None]
    within = (counts * variances).sum(0) / counts.sum()
    plain_mean = means.mean(0)
    plain_var = (variances + (means - plain_mean).square()).mean(0)
    uneven = (
        "every rank counts as much as the others, and they have different numbers of samples: "
        "which numbers may be averaged over ranks, which must be added?"
    )
    return {
        "y is normalised with the statistics of this rank's samples alone": (
            _normalized(x, *_moments(x))
        ),
        "var is the average of the ranks' variances: the ranks' means differ too, and that is a "
        "part of the variance": _normalized(x, mean, within),
        "var is divided by one value less than there are: BatchNorm normalises with the plain mean "
        "of the squares": _normalized(x, mean, var * total / (total - 1)),
        "eps is missing: it is added to the variance": (x - mean[:, None]) / var.sqrt()[:, None],
        "eps is 1e-5, whatever is asked for: take that of the call": (
            (x - mean[:, None]) / (var + 1e-5).sqrt()[:, None]
        ),
        "eps is added to the root: it belongs to the variance, under the root": (
            (x - mean[:, None]) / (var.sqrt() + EPS)[:, None]
        ),
        uneven: _normalized(x, plain_mean, plain_var),
        f"{uneven} Also, the ranks' means differ, which is a part of the variance": (
            _normalized(x, plain_mean, variances.mean(0))
        ),
    }


# ---- the gradients


def _check_grad_x(case: str, found: Tensor | None, whole: _Batch, part: slice) -> None:
    if found is None:
        raise Hint(f"{case}no gradient reaches x: what does backward return first?")
    x = whole.x.clone().requires_grad_()
    y = F.batch_norm(x, None, None, whole.weight, whole.bias, training=True, eps=EPS)
    (truth,) = torch.autograd.grad(y, x, whole.grad)
    mistakes = {
        "y is right, and the gradient of x has inf or nan": not found.isfinite().all(),
        **_mistaken_gradients(whole, part),
    }
    otherwise = (
        "y is right, and the gradient of x is {off:.0%} off: compare the three terms of dx with "
        "the formula"
    )
    diagnose(case, found, truth[part], mistakes, otherwise)


def _mistaken_gradients(whole: _Batch, part: slice) -> dict[str, Tensor]:
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

    def inner(sums: tuple[Tensor, Tensor], number: int) -> Tensor:
        return grad - sums[0] / number - x_hat * sums[1] / number

    own = (
        "in backward the sums go over this rank's samples alone: the statistics that this x moves "
        "are used by all ranks"
    )
    return {
        "dx is weight / sqrt(var + eps) * dy, as if mean and var were constants: they depend on x "
        "too": factor * grad,
        own: factor * inner(own_sums, count),
        f"{own}; and m counts the values of all": factor * inner(own_sums, total),
        "the sums of backward are those of all ranks, and are divided by the number of this rank's "
        "values: m counts those of the whole batch": factor * inner(all_sums, count),
        "the gradient of x lacks the factor weight": (
            factor / whole.weight[:, None] * inner(all_sums, total)
        ),
    }


def _check_own_gradients(
    case: str,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
    whole: _Batch,
    part: slice,
) -> None:
    """The gradients of weight and bias are those of this rank's samples."""
    if grad_weight is None or grad_bias is None:
        name = "weight" if grad_weight is None else "bias"
        raise Hint(f"{case}no gradient reaches {name}")
    products = whole.grad * _normalized(whole.x, *_moments(whole.x))
    own_weight = products[part].sum(DIMS)
    own_bias = whole.grad[part].sum(DIMS)
    swapped = (
        "the gradients of weight and bias are swapped: backward returns them in the order of "
        "forward's arguments"
    )
    both = torch.cat([grad_weight, grad_bias])
    refuse({swapped: torch.cat([own_bias, own_weight])}, case, both)
    for name, found, own, of_all in (
        ("weight", grad_weight, own_weight, products.sum(DIMS)),
        ("bias", grad_bias, own_bias, whole.grad.sum(DIMS)),
    ):
        mistakes = {
            f"the gradient of {name} is the sum over all ranks already, and data parallelism will "
            "average over them, too: did all_reduce write into the tensor that you return?": of_all,
        }
        otherwise = f"the gradient of {name} is {{off:.0%}} off what this rank's samples give"
        diagnose(case, found, own, mistakes, otherwise)
