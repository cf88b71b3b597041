"""Checks of lesson 10, sequence parallelism and activation memory."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course.answer import RETURNED_NONE, Exercise, Hint, due
from course.exercises.expect import (
    TOLERANCE,
    careless,
    confirm_in_group,
    diagnose,
    distance,
    draw,
    in_groups,
    own_answers,
    refuse,
    tensor,
    with_gaps,
)
from course.exercises.memory import Made
from course.exercises.simulated import Event, Outcome, here
from course.pool.ranks import Ranks
from labcode.comm.collectives import start_all_gather, start_reduce_scatter
from labcode.parallel.sequence import gathered_linear
from labcode.perf.alpha_beta import bytes_sent

# ---- 10.1


class _Kept(NamedTuple):
    """Bytes of one part of a layer, for each of s b h and for each of a s^2 b.

    Args:
        whole: For each of s b h, on every rank.
        cut: For each of s b h, divided by t.
        scores: For each of a s^2 b, divided by t.
    """

    whole: int
    cut: int
    scores: int


# Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1
KEPT = {"norms": _Kept(4, 0, 0), "attention": _Kept(3, 8, 5), "mlp": _Kept(3, 16, 0)}
SHARES = {2: "half", 4: "a quarter", 8: "an eighth"}


def layer_bytes(count: Callable[..., Any]) -> None:
    """The learner's `layer_bytes(s, b, h, a, t)`: what a rank keeps of one layer, by part."""
    for t in (1, *SHARES):
        for part in KEPT:
            per_token, per_score = _coefficients(count, part, t)
            if t == 1:
                _check_kept_on_one_rank(part, per_token, per_score)
            else:
                _check_kept_on_one_of(t, part, per_token, per_score)


def _coefficients(count: Callable[..., Any], part: str, t: int) -> tuple[float, float]:
    """The bytes for each of s b h, and for each of a s^2 b, that an answer counts."""
    few = _bytes_of(part, count, 64, 2, 128, 4, t)
    many = _bytes_of(part, count, 64, 2, 128, 8, t)
    half_as_long = _bytes_of(part, count, 32, 2, 128, 4, t)
    other = _bytes_of(part, count, 48, 3, 96, 6, t)
    per_score = (many - few) / (4 * 64 * 64 * 2)
    per_token = (few - per_score * 4 * 64 * 64 * 2) / (64 * 2 * 128)
    of_other = per_token * 48 * 3 * 96 + per_score * 6 * 48 * 48 * 3
    has_tables = KEPT[part].scores > 0 and not _near(few, 2 * half_as_long)
    mistakes = {
        "it does not matter how many heads there are, and each of the a heads has a table of its "
        "own": has_tables and few == many,
        "in which terms do s, b, h and a stand? A tensor of hidden features has s*b*h numbers, a "
        "table of scores a*s*s*b": not _near(other, of_other),
    }
    refuse(mistakes, f"{part}: ")
    return per_token, per_score


def _bytes_of(part: str, count: Callable[..., Any], *sizes: int) -> float:
    found = due(count(*sizes))
    if not isinstance(found, Mapping):
        raise Hint(f"return a dict with {', '.join(KEPT)}, not {found!r}")
    if part not in found:
        raise Hint(f"the dict has no {part!r}")
    return float(due(found[part]))


def _near(found: float, right: float) -> bool:
    return math.isclose(found, right, rel_tol=1e-6, abs_tol=1e-6)


def _check_kept_on_one_rank(part: str, per_token: float, per_score: float) -> None:
    kept = KEPT[part]
    right = kept.whole + kept.cut
    mistakes = {
        f"{part}: nothing in it has s x s numbers for each head": (
            kept.scores == 0 and not _near(per_score, 0)
        ),
        f"{part} on one rank: you count {per_score:g} bytes for each score. Three operations work "
        "on this table: what does the backward of each one read?": (
            not _near(per_score, kept.scores)
        ),
    }
    refuse(mistakes)
    beside = " beside the scores" if kept.scores else ""
    mistakes = {
        "half of it: how many bytes has a 16-bit number?": right / 2,
        "too little: which operation's input, or whose mask, is missing?": per_token < right,
    }
    otherwise = "too much: is a tensor counted twice, or one that nobody reads in backward?"
    case = f"{part} on one rank: you count {per_token:g} s b h bytes{beside}, which is "
    diagnose(case, per_token, right, mistakes, otherwise, tolerance=1e-6)


def _check_kept_on_one_of(t: int, part: str, per_token: float, per_score: float) -> None:
    kept = KEPT[part]
    right = kept.whole + kept.cut / t
    case = f"{part}: right on one rank, but "
    heads = f"a rank of {t} has {SHARES[t]} of the heads, and so {SHARES[t]} of the tables"
    refuse({heads: not _near(per_score, kept.scores / t)}, case)
    counted = f"you count {per_token:g} s b h bytes, which is"
    mistakes = {
        "everything is divided by t: which of these tensors hold all h features on every rank?": (
            (kept.whole + kept.cut) / t
        ),
        f"{counted} too much: what is whole that belongs to own heads or own features?": (
            per_token > right
        ),
    }
    otherwise = f"{counted} too little: what is cut that is whole?"
    diagnose(f"{case}with t = {t} ", per_token, right, mistakes, otherwise, tolerance=1e-6)


# ---- what the exercises on ranks share

BATCH = 2
TOKENS = 12  # of the whole sequence, which three ranks and four can share
WIDTH = 8
COLUMNS = 4  # output features of each rank
WHOLE_BYTES = 8 * BATCH * TOKENS * WIDTH  # of all tokens, in float64
SENDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
GRADIENT_CHANGED = (
    "backward has changed the gradient that it was given: it is not yours, others may read it"
)

Function = type[torch.autograd.Function]


class _Passed(NamedTuple):
    """What went into forward and backward on one rank, and what came out."""

    x: Tensor
    grad: Tensor  # of y
    y: Tensor
    grad_x: Tensor


def _own(group: dist.ProcessGroup, seed: int, *shape: int) -> Tensor:
    """Numbers of this rank alone."""
    return draw(group, 10 * seed + group.rank(), *shape)


def _pass(
    case: str,
    x: Tensor,
    grad: Tensor,
    forward: Callable[..., Any],
    *args: Any,
    layout: Callable[[Tensor], Tensor] = torch.clone,
) -> _Passed:
    """Call `forward(x, *args)`, and then backward; what is kept in between is noted.

    Args:
        case: What a hint begins with.
        x: This rank's.
        grad: The gradient of y, of the shape that y should have.
        forward: The learner's.
        args: What else it takes.
        layout: Gives the same numbers, in another order in memory; of x and of the gradient.
    """
    given = layout(x).requires_grad_()
    with here().block("forward"), Made() as made:
        y = forward(given, *args)
    if y is None:
        raise Hint(f"{case}forward: {RETURNED_NONE}")
    tensor(y, what=f"{case}forward gave")
    shape = f"forward gives {list(y.shape)}, expected is {list(grad.shape)}: the tokens are dim 1"
    mistakes = {
        shape: y.shape != grad.shape,
        "forward has changed the x that it was given": not torch.equal(given, x),
    }
    refuse(mistakes, case)
    saved = [one for one in getattr(y.grad_fn, "saved_tensors", ()) if one in made]
    here().note("saved", [one.nbytes for one in saved])
    here().note("held", made.alive(y))
    given_grad = layout(grad)
    with here().block("backward"):
        y.backward(given_grad)
    mistakes = {
        "backward gives no gradient for x": given.grad is None,
        GRADIENT_CHANGED: not torch.equal(given_grad, grad),
    }
    refuse(mistakes, case)
    assert given.grad is not None
    return _Passed(x, grad, y.detach(), given.grad)


def _careful(outcome: Outcome, members: Sequence[int]) -> Iterator[tuple[str, list[Event]]]:
    """What a hint on each rank begins with, and its calls, of which all have been waited for."""
    for rank in members:
        case = f"on rank {rank}: "
        refuse(careless(outcome.of(rank)), case)
        yield case, outcome.of(rank)


def _check_bytes_sent(case: str, calls: Sequence[Event], p: int, num_backward: int = 1) -> None:
    """Forward sends no more than an all-gather of all tokens, and backward than some of them.

    Args:
        case: What a hint begins with.
        calls: Calls of this rank.
        p: Ranks of the group.
        num_backward: How many backward needs; a reduce-scatter sends as much as one.
    """
    for way, number in (("forward", 1), ("backward", num_backward)):
        made = [one for one in calls if one.block == way]
        sent = sum(bytes_sent(one.kind, p, one.num_bytes) for one in made if one.kind in SENDS)
        enough = number * bytes_sent("all_gather", p, WHOLE_BYTES)
        names = ", ".join(one.kind for one in made)
        hint = (
            f"the numbers are right, but {way} sends {sent:,.0f} bytes where {enough:,.0f} are "
            f"enough: it calls {names}"
        )
        refuse({hint: sent > 1.01 * enough}, case)


# ---- 10.2


LAYOUTS = (torch.clone, with_gaps)


def _gather(
    group: dist.ProcessGroup, function: Function, layout: Callable[[Tensor], Tensor]
) -> _Passed:
    x = _own(group, 1, BATCH, TOKENS // group.size(), WIDTH)
    grad = _own(group, 2, BATCH, TOKENS, WIDTH)
    return _pass("the all-gather: ", x, grad, function.apply, group, layout=layout)


def _scatter(
    group: dist.ProcessGroup, function: Function, layout: Callable[[Tensor], Tensor]
) -> _Passed:
    x = _own(group, 3, BATCH, TOKENS, WIDTH)
    grad = _own(group, 4, BATCH, TOKENS // group.size(), WIDTH)
    return _pass("the reduce-scatter: ", x, grad, function.apply, group, layout=layout)


def pair(gather: Function, scatter: Function, ranks: Ranks | None = None) -> str:
    """The learner's two Functions, each called as `apply(x, group)`.

    Args:
        gather: [B, S/p, H] to [B, S, H]: forward an all-gather, backward a reduce-scatter.
        scatter: [B, S, H] to [B, S/p, H]: forward a reduce-scatter, backward an all-gather.
        ranks: Four.
    """
    ours = own_answers(start_all_gather, start_reduce_scatter)
    for layout in LAYOUTS:
        gathered = in_groups(_gather, gather, layout, judge=_check_gathered, ours=ours)
        scattered = in_groups(_scatter, scatter, layout, judge=_check_scattered, ours=ours)
    confirm_in_group(ranks, gathered, _gather, gather, layout)
    return confirm_in_group(ranks, scattered, _scatter, scatter, layout)


def _check_gathered(results: list[_Passed], outcome: Outcome, members: Sequence[int]) -> None:
    p = len(results)
    whole = torch.cat([result.x for result in results], 1)
    rights = torch.stack([result.grad for result in results]).sum(0).chunk(p, 1)
    for number, (case, calls) in enumerate(_careful(outcome, members)):
        result = results[number]
        order = (
            "the all-gather: forward does not give the tokens of all ranks in their order; is each "
            "tensor of the list one of its own?"
        )
        diagnose(case, result.y, whole, {}, order)
        mistakes = {
            "the all-gather: the gradient is that of this rank's own use alone; the other ranks "
            "have used these tokens as well": result.grad.chunk(p, 1)[number],
            "the all-gather: the gradient is the mean over the ranks, and the uses add up": (
                rights[number] / p
            ),
        }
        wrong = "the all-gather: the gradient is wrong: sum over the ranks, then which tokens?"
        diagnose(case, result.grad_x, rights[number], mistakes, wrong)
        _check_bytes_sent(case, calls, p)


def _check_scattered(results: list[_Passed], outcome: Outcome, members: Sequence[int]) -> None:
    p = len(results)
    rights = torch.stack([result.x for result in results]).sum(0).chunk(p, 1)
    whole_grad = torch.cat([result.grad for result in results], 1)
    for number, (case, calls) in enumerate(_careful(outcome, members)):
        result = results[number]
        mistakes = {
            "the reduce-scatter: forward gives a part of this rank's own x, and no sum": (
                result.x.chunk(p, 1)[number]
            ),
            "the reduce-scatter: forward gives the mean over the ranks, not the sum": (
                rights[number] / p
            ),
        }
        wrong = "the reduce-scatter: forward does not give the sum of this rank's own tokens"
        diagnose(case, result.y, rights[number], mistakes, wrong)
        wrong = (
            "the reduce-scatter: the gradient is wrong: this rank's x went into the tokens of "
            "every rank, so whose gradients does it need?"
        )
        diagnose(case, result.grad_x, whole_grad, {}, wrong)
        _check_bytes_sent(case, calls, p)


# ---- 10.3


class _Multiplied(NamedTuple):
    """What a rank has of the gathered product: its rows of the weight, and their gradient."""

    passed: _Passed
    weight: Tensor
    grad_weight: Tensor


def _multiply(group: dist.ProcessGroup, function: Function) -> _Multiplied:
    x = _own(group, 5, BATCH, TOKENS // group.size(), WIDTH)
    weight = nn.Parameter(_own(group, 6, COLUMNS, WIDTH))
    grad = _own(group, 7, BATCH, TOKENS, COLUMNS)
    passed = _pass("", x, grad, function.apply, weight, group)
    if weight.grad is None:
        raise Hint("backward returns a gradient for x, one for weight, and None for group")
    return _Multiplied(passed, weight.detach(), weight.grad)


def gathers_again(function: Function, ranks: Ranks | None = None) -> str:
    """The learner's Function keeps only its part of x and gathers it a second time in backward.

    Args:
        function: Called as `apply(x, weight, group)`: x [B, S/p, H], weight [F/p, H].
        ranks: Four.
    """
    ours = own_answers(gathered_linear)
    outcome = in_groups(_multiply, function, judge=_check_gathered_again, ours=ours)
    return confirm_in_group(ranks, outcome, _multiply, function)


def _check_gathered_again(
    results: list[_Multiplied], outcome: Outcome, members: Sequence[int]
) -> None:
    p = len(results)
    x = torch.cat([result.passed.x for result in results], 1).requires_grad_()
    weight = torch.cat([result.weight for result in results]).requires_grad_()
    F.linear(x, weight).backward(torch.cat([result.passed.grad for result in results], -1))
    assert x.grad is not None and weight.grad is not None
    part_grads = weight.grad.chunk(p)
    multiplied_first = [F.linear(result.passed.x, result.weight) for result in results]
    for number, (case, calls) in enumerate(_careful(outcome, members)):
        passed, own_weight, grad_weight = results[number]
        mistakes = {
            "forward gives nothing but zeros": not passed.y.any(),
            "forward multiplies before it gathers: each part has then met the weight of its own "
            "rank, and this rank needs all tokens with its own weight": (
                torch.cat(multiplied_first, 1)
            ),
        }
        wrong = "forward is wrong: it should be the tokens of all ranks, times this rank's weight"
        diagnose(case, passed.y, F.linear(x.detach(), own_weight), mistakes, wrong)
        mistakes = {
            "the gradient of x is this rank's alone: the other ranks used these tokens as well": (
                (passed.grad @ own_weight).chunk(p, 1)[number]
            ),
        }
        wrong = "the gradient of x is wrong: which sum over the ranks, and which tokens of it?"
        diagnose(case, passed.grad_x, x.grad.chunk(p, 1)[number], mistakes, wrong)
        mistakes = {
            "the gradient of the weight is summed over the ranks: each rank has its own rows of W, "
            "so nothing is to be summed": torch.stack(part_grads).sum(0),
        }
        wrong = (
            "the gradient of the weight is wrong: it needs the rows of all S tokens, in grad and "
            "in x"
        )
        diagnose(case, grad_weight, part_grads[number], mistakes, wrong)
        _check_own_part(case, calls, passed.x.nbytes)
        gathers = sum(one.kind == "all_gather" and one.block == "backward" for one in calls)
        enough = f"backward starts {gathers} all-gathers, and one for x is enough"
        refuse({enough: gathers > 1}, case)
        _check_bytes_sent(case, calls, p, num_backward=2)


def _check_own_part(case: str, events: Sequence[Event], part_bytes: int) -> None:
    """Nothing but this rank's part of x is kept from forward to backward."""
    kept = {one.kind: sum(one.value) for one in events if one.kind in ("saved", "held")}
    by = "ctx.save_for_backward"
    if kept["saved"] <= part_bytes:
        by = "ctx itself, by an attribute or by a function that it keeps"
    hint = (
        f"the numbers are right, but {kept['held']:,} bytes are kept from forward to backward by "
        f"{by}, and this rank's part of x has {part_bytes:,}"
    )
    refuse({hint: kept["held"] > part_bytes}, case)


# ---- 10.4

SHAPES = {  # for each rank
    "norm_weight": (WIDTH,),
    "norm_bias": (WIDTH,),
    "up": (COLUMNS, WIDTH),
    "up_bias": (COLUMNS,),
    "down": (WIDTH, COLUMNS),
    "down_bias": (WIDTH,),
}
SHARDS = {"up": 0, "up_bias": 0, "down": 1}  # {weight: the dim along which the ranks share it}
GELU_BYTES = 2 * 8 * BATCH * TOKENS * COLUMNS  # its input and its output, of all tokens

Weights = dict[str, Tensor]


class _Trained(NamedTuple):
    """What a rank has of the MLP; the gradients are those before and after they were summed."""

    passed: _Passed
    weights: Weights
    before: Weights
    after: Weights


def _train(group: dist.ProcessGroup, mlp: type[nn.Module]) -> _Trained:
    weights = {}
    for seed, (name, shape) in enumerate(SHAPES.items(), 8):
        weights[name] = _own(group, seed, *shape) if name in SHARDS else draw(group, seed, *shape)
    x = _own(group, 20, BATCH, TOKENS // group.size(), WIDTH)
    grad = _own(group, 21, BATCH, TOKENS // group.size(), WIDTH)
    model: Any = mlp({name: weight.clone() for name, weight in weights.items()}, group)
    params = dict(model.named_parameters())
    missing = min(weights.keys() - params.keys(), default="")
    no_parameter = (
        f"the module has no parameter {missing}: __init__ makes one of each weight, under the name "
        "that it has in the dict"
    )
    refuse({no_parameter: missing})
    passed = _pass("", x, grad, model)
    before = _gradients(params)
    model.finish_gradient_sync()
    return _Trained(passed, weights, before, _gradients(params))


def _gradients(params: Mapping[str, nn.Parameter]) -> Weights:
    found = {}
    for name in SHAPES:
        grad = params[name].grad
        if grad is None:
            raise Hint(f"{name} has no gradient: is it used in forward?")
        found[name] = grad.clone()
    return found


def sequence_parallel_mlp(mlp: type[nn.Module], ranks: Ranks | None = None) -> str:
    """The learner's `SequenceParallelMLP(weights, group)`, beside the whole one in one process.

    Args:
        mlp: A module with `forward(x)` and `finish_gradient_sync()`; its weights are the
            parameters `norm_weight`, `norm_bias`, `up`, `up_bias`, `down` and `down_bias`.
        ranks: Four.
    """
    outcome = in_groups(_train, mlp, judge=_check_trained)
    return confirm_in_group(ranks, outcome, _train, mlp)


def _whole_mlp(results: Sequence[_Trained]) -> tuple[Tensor, Tensor, Weights]:
    """What one process has: y, the gradient of x, and those of the weights."""
    w = {}
    for name, weight in results[0].weights.items():
        if name in SHARDS:
            weight = torch.cat([result.weights[name] for result in results], SHARDS[name])
        w[name] = weight.clone().requires_grad_()
    x = torch.cat([result.passed.x for result in results], 1).requires_grad_()
    h = F.layer_norm(x, x.shape[-1:], w["norm_weight"], w["norm_bias"])
    h = F.gelu(F.linear(h, w["up"], w["up_bias"]))
    y = x + F.linear(h, w["down"], w["down_bias"])
    grad = torch.cat([result.passed.grad for result in results], 1)
    grad_x, *gradients = torch.autograd.grad(y, [x, *w.values()], grad)
    return y.detach(), grad_x, dict(zip(w, gradients))


def _check_trained(results: list[_Trained], outcome: Outcome, members: Sequence[int]) -> None:
    p = len(results)
    whole_y, whole_grad_x, gradients = _whole_mlp(results)
    for number, (case, events) in enumerate(_careful(outcome, members)):
        passed = results[number].passed
        bias = results[number].weights["down_bias"]
        y = whole_y.chunk(p, 1)[number]
        mistakes = {
            "y has down_bias in it as often as there are ranks: where is it added?": (
                y + (p - 1) * bias
            ),
            "y lacks down_bias": y - bias,
            "y lacks the x that goes past the MLP and is added at the end": y - passed.x,
            "y has x in it as often as there are ranks: where is it added?": y + (p - 1) * passed.x,
        }
        wrong = (
            "y is not what one process gives for these tokens: are F.layer_norm and F.gelu called "
            "with their defaults, and is the x that is added at the end the one before the norm?"
        )
        diagnose(case, passed.y, y, mistakes, wrong)
        wrong = "y is right, but the gradient of x is not: does each step have its own backward?"
        diagnose(case, passed.grad_x, whole_grad_x.chunk(p, 1)[number], {}, wrong)
        for name, gradient in gradients.items():
            if name in SHARDS:
                gradient = gradient.chunk(p, SHARDS[name])[number]
            _check_gradient(case, name, results[number], gradient, p)
        _check_own_tokens(case, events, passed.x.nbytes)


def _check_gradient(case: str, name: str, result: _Trained, right: Tensor, p: int) -> None:
    """The gradient of a weight is the one that it has in one process."""
    before = result.before[name]
    was_complete = name in SHARDS and distance(before, right) < TOLERANCE
    mistakes = {
        f"the gradient of {name} was complete before finish_gradient_sync: each rank has a part of "
        "its own, which has seen all tokens": was_complete,
        f"the gradient of {name} is wrong already before finish_gradient_sync": name in SHARDS,
        f"finish_gradient_sync leaves the gradient of {name} as it was: it is that of this rank's "
        "tokens alone": before,
        f"the gradient of {name} is the mean over the ranks: the tokens' terms add up": right / p,
    }
    wrong = f"the gradient of {name} is not that of all tokens"
    diagnose(case, result.after[name], right, mistakes, wrong)


def _check_own_tokens(case: str, events: Sequence[Event], part_bytes: int) -> None:
    """Only what GELU needs is kept of all tokens; of its own a rank may keep what it likes."""
    (held,) = [one.value for one in events if one.kind == "held"]
    of_all_tokens = sum(size for size in held if size > part_bytes)
    in_forward = [one.kind for one in events if one.block == "forward"]
    mistakes = {
        f"the numbers are right, but {of_all_tokens:,} bytes of all S tokens are kept for "
        f"backward, and the input and the output of GELU have {GELU_BYTES:,}: which tensor is "
        "it?": of_all_tokens > GELU_BYTES,
        "the numbers are right, but forward calls all_reduce: each rank needs a part only": (
            "all_reduce" in in_forward
        ),
    }
    refuse(mistakes, case)


EXERCISES = {
    "10.1": Exercise(
        check=layer_bytes,
        praise="every part, whole and cut: now add them up",
        hints=(
            "Go through the block from left to right and write down each tensor with its size. "
            "In 16-bit numbers a tensor of b s h takes 2 s b h bytes; a mask takes half of that.",
            "Each head has its own table of s x s scores. How many of the operations on this "
            "table keep something?",
            "Which of the tensors belong to own heads or own features, and which hold all h "
            "features on every rank?",
        ),
    ),
    "10.2": Exercise(
        check=pair,
        praise="each is the other's backward",
        hints=(
            "dist.all_gather fills a list of p tensors. Where do they belong in [B, S, H]?",
            "dist.reduce_scatter wants a list of p tensors: number i is what goes to rank i.",
            "A rank's tokens were used by all ranks. So its gradient comes from all ranks.",
        ),
    ),
    "10.3": Exercise(
        check=gathers_again,
        praise="the right gradients, and only this rank's tokens are kept",
        hints=(
            "What do the two products of backward need, and which of these tensors are here "
            "already?",
            "The gradient of x exists for all S tokens on every rank, and each rank has only the "
            "terms of its own columns.",
        ),
    ),
    "10.4": Exercise(
        check=sequence_parallel_mlp,
        praise="the same numbers as one process, with a part of the tokens on each rank",
        hints=(
            "Which shape has h after each line: [B, S/p, .] or [B, S, .]?",
            "What would happen to a bias that is added before a sum over the ranks?",
            "For each of the six parameters: do the ranks hold the same copy of it, and which "
            "tokens have gone into its gradient?",
        ),
    ),
}
