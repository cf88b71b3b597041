"""Checks of lesson 10, sequence parallelism. The text of each assertion is a hint."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from labcode.comm.collectives import start_all_gather, start_reduce_scatter
from labcode.comm.counting import Collective
from labcode.parallel.sequence import gathered_linear
from labcode.perf.alpha_beta import bytes_sent
from labcode.perf.saved_bytes import saved_bytes
from labcode.pool.ranks import Ranks
from labcode.teach.check import RETURNED_NONE, Exercise, due
from labcode.teach.exercises.on_ranks import without
from labcode.teach.exercises.requests import Requests
from labcode.teach.exercises.watch import Watch, draw, far, own_part, run_trial

EXERCISES = {
    "10.1": Exercise(
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
        praise="each is the other's backward",
        hints=(
            "dist.all_gather fills a list of p tensors. Where do they belong in [B, S, H]?",
            "dist.reduce_scatter wants a list of p tensors: number i is what goes to rank i.",
            "A rank's tokens were used by all ranks. So its gradient comes from all ranks.",
        ),
    ),
    "10.3": Exercise(
        praise="the right gradients, and only this rank's tokens are kept",
        hints=(
            "What do the two products of backward need, and which of these tensors are here "
            "already?",
            "The gradient of x exists for all S tokens on every rank, and each rank has only the "
            "terms of its own columns.",
        ),
    ),
    "10.4": Exercise(
        praise="the same numbers as one process, with a part of the tokens on each rank",
        hints=(
            "Which shape has h after each line: [B, S/p, .] or [B, S, .]?",
            "What would happen to a bias that is added before a sum over the ranks?",
            "For each of the six parameters: do the ranks hold the same copy of it, and which "
            "tokens have gone into its gradient?",
        ),
    ),
}

# ---- 10.1

Sizes = tuple[int, int, int, int]  # s, b, h, a
PARTS = ("norms", "attention", "mlp")
SHARES = {2: "half", 4: "a quarter", 8: "an eighth"}


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


def layer_bytes(answer: Callable[..., Any]) -> None:
    """The learner's `layer_bytes(s, b, h, a, t)`: what a rank keeps of one layer, by part.

    Args:
        answer: Returns {"norms": bytes, "attention": bytes, "mlp": bytes}.
    """
    for part in PARTS:
        _check_part(answer, part)
    for t in (2, 4, 8):
        for part in PARTS:
            _check_cut(answer, part, t)


def _part_of(answer: Callable[..., Any], sizes: Sizes, t: int, part: str) -> float:
    found = due(answer(*sizes, t))
    assert isinstance(found, Mapping), f"return a dict with {', '.join(PARTS)}, not {found!r}"
    assert part in found, f"the dict has no {part!r}"
    return float(due(found[part]))


def _coefficients(answer: Callable[..., Any], part: str, t: int) -> tuple[float, float]:
    """The bytes for each of s b h, and for each of a s^2 b, that an answer counts."""
    s = 64
    b = 2
    h = 128
    few = _part_of(answer, (s, b, h, 4), t, part)
    many = _part_of(answer, (s, b, h, 8), t, part)
    per_score = (many - few) / (4 * s * s * b)
    per_token = (few - per_score * 4 * s * s * b) / (s * b * h)
    # the same formula must hold for other sizes
    other = _part_of(answer, (48, 3, 96, 6), t, part)
    expected = per_token * 48 * 3 * 96 + per_score * 6 * 48 * 48 * 3
    assert math.isclose(other, expected, rel_tol=1e-6, abs_tol=1e-6), (
        f"{part}: in which terms do s, b, h and a stand? A tensor of hidden features has s*b*h "
        "numbers, a table of scores a*s*s*b"
    )
    return per_token, per_score


def _check_part(answer: Callable[..., Any], part: str) -> None:
    """On one rank."""
    kept = KEPT[part]
    if kept.scores:
        one_head = _part_of(answer, (64, 2, 128, 1), 1, part)
        two_heads = _part_of(answer, (64, 2, 128, 2), 1, part)
        half_as_long = _part_of(answer, (32, 2, 128, 1), 1, part)
        assert one_head != two_heads or math.isclose(one_head, 2 * half_as_long), (
            f"{part}: it does not matter how many heads there are, and each of the a heads has a "
            "table of its own"
        )
    per_token, per_score = _coefficients(answer, part, 1)
    if kept.scores:
        assert math.isclose(per_score, kept.scores, rel_tol=1e-6), (
            f"{part} on one rank: you count {per_score:g} bytes for each score. Three operations "
            "work on this table: what does the backward of each one read?"
        )
    else:
        assert abs(per_score) < 1e-6, f"{part}: nothing in it has s x s numbers for each head"
    wanted = kept.whole + kept.cut
    more = "too much: is a tensor counted twice, or one that nobody reads in backward?"
    if per_token < wanted:
        more = "too little: which operation's input, or whose mask, is missing?"
    if math.isclose(2 * per_token, wanted, rel_tol=1e-6):
        more = "half of it: how many bytes has a 16-bit number?"
    assert math.isclose(per_token, wanted, rel_tol=1e-6), (
        f"{part} on one rank: you count {per_token:g} s b h bytes"
        f"{' beside the scores' if kept.scores else ''}, which is {more}"
    )


def _check_cut(answer: Callable[..., Any], part: str, t: int) -> None:
    """On one of t ranks."""
    kept = KEPT[part]
    per_token, per_score = _coefficients(answer, part, t)
    assert math.isclose(per_score, kept.scores / t, rel_tol=1e-6, abs_tol=1e-9), (
        f"{part}: right on one rank, but a rank of {t} has {SHARES[t]} of the heads, and so "
        f"{SHARES[t]} of the tables"
    )
    wanted = kept.whole + kept.cut / t
    all_cut = (kept.whole + kept.cut) / t
    assert not (kept.whole and math.isclose(per_token, all_cut, rel_tol=1e-6)), (
        f"{part}: right on one rank, but with t = {t} everything is divided by t: which of these "
        "tensors hold all h features on every rank?"
    )
    more = "too little: what is cut that is whole?"
    if per_token > wanted:
        more = "too much: what is whole that belongs to own heads or own features?"
    assert math.isclose(per_token, wanted, rel_tol=1e-6), (
        f"{part}: right on one rank, but with t = {t} you count {per_token:g} s b h bytes, which "
        f"is {more}"
    )


# ---- 10.2

BATCH = 2
TOKENS = 12  # of the whole sequence, which three ranks and four can share
WIDTH = 8
COLUMNS = 4  # output features of each rank

Pair = type[torch.autograd.Function]
GRADIENT_CHANGED = (
    "backward has changed the gradient that it was given: it is not yours, others may read it"
)


def pair(gather: Pair, scatter: Pair, ranks: Ranks) -> None:
    """The learner's two Functions, each called as `apply(x, group)`.

    Args:
        gather: [B, S/p, H] to [B, S, H]: forward an all-gather, backward a reduce-scatter.
        scatter: [B, S, H] to [B, S/p, H]: forward a reduce-scatter, backward an all-gather.
        ranks: Four.
    """
    run_trial(ranks, _try_gather, gather)
    run_trial(ranks, _try_scatter, scatter)


def _by_rank(group: dist.ProcessGroup, seed: int, tokens: int) -> list[Tensor]:
    """A tensor for each rank of the group, [B, tokens, H]; every rank knows all of them."""
    return [draw(group, 10 * seed + i, BATCH, tokens, WIDTH) for i in range(group.size())]


def _forward_and_backward(
    function: Pair, x: Tensor, group: dist.ProcessGroup, shape: tuple[int, ...], grad: Tensor
) -> tuple[str, Tensor, Tensor, list[Watch]]:
    """(hint, output, gradient of x, what forward and backward did)."""
    before = x.clone()
    x = x.requires_grad_()
    with (
        Watch() as forward,
        Requests() as requests,
        without(start_all_gather, start_reduce_scatter),
    ):
        y = function.apply(x, group)
    hint = _shape_hint(y, shape)
    if hint:
        return hint, before, before, []
    requests.check_waited()
    if requests.gaps:
        return f"forward {_gaps_hint(requests)}", before, before, []
    if far(x.detach(), before):
        return "forward has changed the x that it was given", before, before, []
    given = grad.clone()
    with (
        Watch() as backward,
        Requests() as requests,
        without(start_all_gather, start_reduce_scatter),
    ):
        y.backward(given)
    requests.check_waited()
    if requests.gaps:
        return f"backward {_gaps_hint(requests)}", before, before, []
    if x.grad is None:
        return "backward gives no gradient for x", before, before, []
    if far(given, grad):
        return GRADIENT_CHANGED, before, before, []
    return "", y.detach(), x.grad, [forward, backward]


def _gaps_hint(requests: Requests) -> str:
    return (
        f"gives {requests.gaps[0]} a tensor that does not lie in one piece, as one has after a cut "
        "along dim 1: NCCL refuses that"
    )


def _shape_hint(y: Any, shape: tuple[int, ...]) -> str:
    if y is None:
        return f"forward: {RETURNED_NONE}"
    if tuple(y.shape) != shape:
        return f"forward gives {list(y.shape)} where {list(shape)} is due: the tokens are dim 1"
    return ""


def _sent(call: Collective, p: int) -> float:
    """Bytes that a rank sends for a call."""
    if call.name == "recv":
        return 0.0
    if call.name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
        return bytes_sent(call.name, p, call.num_bytes)
    return call.num_bytes


def _traffic_hint(
    ways: list[Watch], num_bytes: int, p: int, gathers: tuple[int, int] = (1, 1)
) -> str:
    """Whether forward and backward each send what some all-gathers of `num_bytes` send.

    Args:
        ways: What forward and backward have done.
        num_bytes: Of the whole tensor.
        p: Ranks.
        gathers: How many forward and backward need; a reduce-scatter sends as much as one.
    """
    for way, made, number in zip(("forward", "backward"), ways, gathers):
        sent = sum(_sent(call, p) for call in made.calls)
        due_bytes = number * bytes_sent("all_gather", p, num_bytes)
        if sent > due_bytes * 1.01:
            names = ", ".join(call.name for call in made.calls)
            return (
                f"the numbers are right, but {way} sends {sent:,.0f} bytes where {due_bytes:,.0f} "
                f"are enough: it calls {names}"
            )
    return ""


def _try_gather(group: dist.ProcessGroup, gather: Pair) -> str:
    p = group.size()
    rank = group.rank()
    parts = _by_rank(group, 1, TOKENS // p)
    grads = _by_rank(group, 2, TOKENS)  # each rank uses the whole in its own way
    whole = torch.cat(parts, 1)
    hint, y, grad, ways = _forward_and_backward(
        gather, parts[rank].clone(), group, tuple(whole.shape), grads[rank]
    )
    if hint:
        return f"the all-gather: {hint}"
    if far(y, whole):
        return (
            "the all-gather: forward does not give the tokens of all ranks in their order; is each "
            "tensor of the list one of its own?"
        )
    own_only = own_part(grads[rank], group, 1)
    expected = own_part(torch.stack(grads).sum(0), group, 1)
    if grad.shape != expected.shape:
        return (
            f"the all-gather: the gradient is {list(grad.shape)}, and x is {list(expected.shape)}"
        )
    if not far(grad, own_only):
        return (
            "the all-gather: the gradient is that of this rank's own use alone; the other ranks "
            "have used these tokens as well"
        )
    if not far(grad, expected / p):
        return "the all-gather: the gradient is the mean over the ranks, and the uses add up"
    if far(grad, expected):
        return "the all-gather: the gradient is wrong: sum over the ranks, then which tokens?"
    return _traffic_hint(ways, whole.nbytes, p)


def _try_scatter(group: dist.ProcessGroup, scatter: Pair) -> str:
    p = group.size()
    rank = group.rank()
    wholes = _by_rank(group, 3, TOKENS)
    grads = _by_rank(group, 4, TOKENS // p)
    total = torch.stack(wholes).sum(0)
    expected = own_part(total, group, 1)
    hint, y, grad, ways = _forward_and_backward(
        scatter, wholes[rank].clone(), group, tuple(expected.shape), grads[rank]
    )
    if hint:
        return f"the reduce-scatter: {hint}"
    if not far(y, own_part(wholes[rank], group, 1)):
        return "the reduce-scatter: forward gives a part of this rank's own x, and no sum"
    if not far(y, expected / p):
        return "the reduce-scatter: forward gives the mean over the ranks, not the sum"
    if far(y, expected):
        return "the reduce-scatter: forward does not give the sum of this rank's own tokens"
    whole_grad = torch.cat(grads, 1)
    if grad.shape != whole_grad.shape:
        return (
            f"the reduce-scatter: the gradient is {list(grad.shape)}, and x is "
            f"{list(whole_grad.shape)}"
        )
    if far(grad, whole_grad):
        return (
            "the reduce-scatter: the gradient is wrong: this rank's x went into the tokens of "
            "every rank, so whose gradients does it need?"
        )
    return _traffic_hint(ways, total.nbytes, p)


# ---- 10.3


def gathers_again(again: Pair, ranks: Ranks) -> None:
    """The learner's Function keeps only its part of x and gathers it a second time in backward.

    Args:
        again: Called as `apply(x, weight, group)`: x [B, S/p, H], weight [F/p, H].
        ranks: Four.
    """
    run_trial(ranks, _try_again, again)


def _try_again(group: dist.ProcessGroup, again: Pair) -> str:
    p = group.size()
    rank = group.rank()
    parts = _by_rank(group, 5, TOKENS // p)
    weights = [draw(group, 60 + i, COLUMNS, WIDTH) for i in range(p)]
    grads = [draw(group, 70 + i, BATCH, TOKENS, COLUMNS) for i in range(p)]

    whole_x = torch.cat(parts, 1).requires_grad_()
    whole_weight = torch.cat(weights).requires_grad_()
    F.linear(whole_x, whole_weight).backward(torch.cat(grads, -1))
    assert whole_x.grad is not None and whole_weight.grad is not None
    expected_y = F.linear(whole_x.detach(), weights[rank])
    expected_grad_x = own_part(whole_x.grad, group, 1)
    own_grad_x = own_part(grads[rank] @ weights[rank], group, 1)

    x = parts[rank].clone().requires_grad_()
    weight = nn.Parameter(weights[rank].clone())
    with (
        Watch() as forward,
        without(gathered_linear),
        saved_bytes(nn.ParameterList([weight])) as saved,
    ):
        y = again.apply(x, weight, group)
        kept_bytes = saved.total()
    hint = _shape_hint(y, (BATCH, TOKENS, COLUMNS)) or _value_hint(y, expected_y, parts, weights)
    if hint:
        return hint
    held_bytes = sum(forward.held(x, weight, y, at_most=x.nbytes))
    given = grads[rank].clone()
    with Watch() as backward, without(gathered_linear):
        y.backward(given)
    if x.grad is None or weight.grad is None:
        return "backward returns a gradient for x, one for weight, and None for group"
    if x.grad.shape != x.shape:
        return f"the gradient of x is {list(x.grad.shape)}, and x is {list(x.shape)}"
    if not far(x.grad, own_grad_x):
        return "the gradient of x is this rank's alone: the other ranks used these tokens as well"
    if far(x.grad, expected_grad_x):
        return "the gradient of x is wrong: which sum over the ranks, and which tokens of it?"
    if far(weight.grad, own_part(whole_weight.grad, group, 0)):
        if not far(weight.grad, whole_weight.grad.unflatten(0, (p, -1)).sum(0)):
            return (
                "the gradient of the weight is summed over the ranks: each rank has its own rows "
                "of W, so nothing is to be summed"
            )
        return (
            "the gradient of the weight is wrong: it needs the rows of all S tokens, in grad and "
            "in x"
        )
    if far(given, grads[rank]):
        return GRADIENT_CHANGED
    if max(held_bytes, kept_bytes) > x.nbytes:
        who = "ctx.save_for_backward"
        if kept_bytes <= x.nbytes:
            who = "ctx itself, by an attribute or by a function that it keeps"
        return (
            f"the numbers are right, but {max(held_bytes, kept_bytes):,} bytes are kept from "
            f"forward to backward by {who}, and this rank's part of x has {x.nbytes:,}"
        )
    gathers = backward.count("all_gather")
    if gathers > 1:
        return f"backward starts {gathers} all-gathers, and one for x is enough"
    return _traffic_hint([forward, backward], whole_x.nbytes, p, gathers=(1, 2))


def _value_hint(y: Tensor, expected: Tensor, parts: list[Tensor], weights: list[Tensor]) -> str:
    if not far(y.detach(), expected):
        return ""
    if not y.any():
        return "forward gives nothing but zeros"
    multiplied_first = [F.linear(part, weight) for part, weight in zip(parts, weights)]
    if not far(y.detach(), torch.cat(multiplied_first, 1)):
        return (
            "forward multiplies before it gathers: each part has then met the weight of its own "
            "rank, and this rank needs all tokens with its own weight"
        )
    return "forward is wrong: it should be the tokens of all ranks, times this rank's weight"


# ---- 10.4

SHARED = ("norm_weight", "norm_bias", "down_bias")
SHARDS = {"up": 0, "up_bias": 0, "down": 1}  # {weight: the dim that is cut}


def _whole_mlp(x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    h = F.layer_norm(x, x.shape[-1:], w["norm_weight"], w["norm_bias"])
    h = F.gelu(F.linear(h, w["up"], w["up_bias"]))
    return x + F.linear(h, w["down"], w["down_bias"])


def sequence_parallel_mlp(mlp: type[nn.Module], ranks: Ranks) -> None:
    """The learner's `SequenceParallelMLP(weights, group)`, beside the whole one in one process.

    Args:
        mlp: A module with `forward(x)` and `finish_gradient_sync()`; its weights are the
            parameters `norm_weight`, `norm_bias`, `up`, `up_bias`, `down` and `down_bias`.
        ranks: Four.
    """
    run_trial(ranks, _try_mlp, mlp)


def _try_mlp(group: dist.ProcessGroup, mlp: type[nn.Module]) -> str:
    p = group.size()
    features = COLUMNS * p
    shapes = {
        "norm_weight": (WIDTH,),
        "norm_bias": (WIDTH,),
        "up": (features, WIDTH),
        "up_bias": (features,),
        "down": (WIDTH, features),
        "down_bias": (WIDTH,),
    }
    whole = {}
    own = {}
    for seed, (name, shape) in enumerate(shapes.items(), 80):
        tensor = draw(group, seed, *shape)
        whole[name] = tensor.clone().requires_grad_()
        own[name] = own_part(tensor, group, SHARDS[name]) if name in SHARDS else tensor.clone()
    whole_x = draw(group, 90, BATCH, TOKENS, WIDTH).requires_grad_()
    grad = draw(group, 91, BATCH, TOKENS, WIDTH)
    expected = _whole_mlp(whole_x, whole)
    expected.backward(grad)
    assert whole_x.grad is not None

    model = mlp(own, group)
    missing = set(shapes) - dict(model.named_parameters()).keys()
    if missing:
        return (
            f"the module has no parameter {min(missing)}: __init__ makes one of each weight, under "
            "the name that it has in the dict"
        )
    x = own_part(whole_x.detach(), group, 1).requires_grad_()
    with Watch() as forward, Requests() as requests:
        y = model(x)
    hint = _shape_hint(y, tuple(x.shape))
    if hint:
        return hint
    requests.check_waited()
    part = own_part(expected.detach(), group, 1)
    hint = _output_hint(y.detach(), part, x.detach(), own["down_bias"], p)
    if hint:
        return hint
    # GELU's input and output, of all tokens
    enough = 2 * BATCH * TOKENS * COLUMNS * x.element_size()
    held = forward.held(x, y, *model.parameters(), at_most=enough + 2 * x.nbytes)
    y.backward(own_part(grad, group, 1))
    if x.grad is None or far(x.grad, own_part(whole_x.grad, group, 1)):
        return "y is right, but the gradient of x is not: does each step have its own backward?"
    before = {name: _gradient(model, name) for name in shapes}
    with Requests() as requests:
        model.finish_gradient_sync()  # pyright: ignore
    requests.check_waited()
    for name in shapes:
        hint = _parameter_hint(name, before[name], _gradient(model, name), whole[name].grad, group)
        if hint:
            return hint
    # of its own tokens a rank may keep what it likes
    of_all_tokens = sum(size for size in held if size > x.nbytes)
    if of_all_tokens > enough:
        return (
            f"the numbers are right, but {of_all_tokens:,} bytes of all S tokens are kept for "
            f"backward, and the input and the output of GELU have {enough:,}: which tensor is it?"
        )
    if forward.count("all_reduce"):
        return "the numbers are right, but forward calls all_reduce: each rank needs a part only"
    return ""


def _gradient(model: nn.Module, name: str) -> Tensor | None:
    grad = model.get_parameter(name).grad
    return None if grad is None else grad.clone()


def _output_hint(y: Tensor, expected: Tensor, x: Tensor, down_bias: Tensor, p: int) -> str:
    if not far(y, expected):
        return ""
    if not far(y, expected + (p - 1) * down_bias):
        return "y has down_bias in it as often as there are ranks: where is it added?"
    if not far(y, expected - down_bias):
        return "y lacks down_bias"
    if not far(y, expected - x):
        return "y lacks the x that goes past the MLP and is added at the end"
    if not far(y, expected + (p - 1) * x):
        return "y has x in it as often as there are ranks: where is it added?"
    return (
        "y is not what one process gives for these tokens: are F.layer_norm and F.gelu called with "
        "their defaults, and is the x that is added at the end the one before the norm?"
    )


def _parameter_hint(
    name: str,
    before: Tensor | None,
    after: Tensor | None,
    whole: Tensor | None,
    group: dist.ProcessGroup,
) -> str:
    assert whole is not None
    if before is None or after is None:
        return f"{name} has no gradient: is it used in forward?"
    p = group.size()
    if name in SHARDS:
        expected = own_part(whole, group, SHARDS[name])
        if not far(after, expected):
            return ""
        if not far(before, expected):
            return (
                f"the gradient of {name} was complete before finish_gradient_sync: each rank has "
                "a part of its own, which has seen all tokens"
            )
        return f"the gradient of {name} is wrong already before finish_gradient_sync"
    if not far(after, whole):
        return ""
    if not far(after, before):
        return (
            f"finish_gradient_sync leaves the gradient of {name} as it was: it is that of this "
            "rank's tokens alone"
        )
    if not far(after, whole / p):
        return f"the gradient of {name} is the mean over the ranks: the tokens' terms add up"
    return f"the gradient of {name} is not that of all tokens"
