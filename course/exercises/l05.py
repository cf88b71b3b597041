"""Checks of lesson 05, buckets, overlap and hooks."""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from course.answer import Exercise, Hint, due
from course.exercises import small_gpt
from course.exercises.expect import (
    careless,
    confirm,
    diagnose,
    distance,
    own_answers,
    plural,
    refuse,
    run,
    tensor,
    times,
)
from course.exercises.simulated import Event, here
from course.labs import l05_by_hand
from course.pool.ranks import Ranks
from labcode.models.gpt import loss as gpt_loss
from labcode.parallel.data import Bucket, make_buckets
from labcode.runtime.units import type_in_words

BUCKET_MB = 0.01  # cuts the small GPT into several buckets
NUM_STEPS = 3
LR = 0.5
CLIP_ROUNDING = 1e-4  # clipping adds 1e-6 to the norm, or does not
HALF_ROUNDING = 0.03  # what bfloat16 loses
OURS = own_answers(
    l05_by_hand.average_buckets,
    l05_by_hand.OverlappedDataParallel.__init__,
    l05_by_hand.OverlappedDataParallel.gradient_ready,
    l05_by_hand.OverlappedDataParallel.finish_gradient_sync,
    Bucket.send,
    Bucket.receive,
)


# ---- gradients that should be a mean


def _check_mean(
    case: str,
    own: torch.Tensor,
    found: torch.Tensor,
    mean: torch.Tensor,
    of_world: torch.Tensor | None = None,
) -> None:
    """A gradient is the mean over the group.

    Args:
        case: What a hint begins with.
        own: The rank's own gradient.
        found: What is in `.grad`.
        mean: Mean over the group.
        of_world: Mean over all ranks.
    """
    of_weights = small_gpt.weights(small_gpt.model())
    same_numbers = torch.allclose(found.sort().values, mean.sort().values)
    outside = (
        "the result holds gradients of ranks outside of the group: which group does your "
        "all-reduce use?"
    )
    mistakes = {
        "`.grad` still holds the rank's own gradient: is the mean copied into it?": own,
        "`.grad` holds the rank's own gradient, {times:.3g} times: where is the sum, and was it "
        "there when you copied?": times(own),
        "right direction, but {times:.3g} times as long as the mean over the group: by what do "
        "you divide, and how often?": times(mean),
        **({} if of_world is None else {outside: times(of_world)}),
        "`.grad` holds weights of the model: what did you join, weights or gradients?": times(
            of_weights
        ),
        "the right numbers in the wrong places: which part of the row belongs to which "
        "parameter?": same_numbers,
    }
    away = "the gradient is {off:.0%} away from the mean over the group"
    diagnose(case, found, mean, mistakes, away)


def _buckets(module: nn.Module, bucket_mb: float) -> list[list[nn.Parameter]]:
    return [bucket.params for bucket in make_buckets(module, bucket_mb)]


def _numel(bucket: list[nn.Parameter]) -> int:
    return sum(param.numel() for param in bucket)


def _blocks_of_waits(calls: Sequence[Event]) -> list[str]:
    """In which of the check's blocks somebody has waited for these calls."""
    blocks = []
    for call in calls:
        for _, block in call.waits:
            blocks.append(block)
    return blocks


# ---- 5.1

LAYOUTS = {  # MB for each bucket
    "with one bucket": 1.0,
    "with a bucket for each parameter": 1e-9,
    "with several buckets": BUCKET_MB,
}


def _average(
    rank: int,
    average: Callable[..., Any],
    grouping: Sequence[Sequence[int]],
    bucket_mb: float,
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The rank's own gradient, the gradient afterwards, and the bytes of each bucket."""
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    module = small_gpt.model()
    small_gpt.backward(module, small_gpt.shares(members, [4] * len(members))[members.index(rank)])
    own = small_gpt.gradient(module).clone()
    weights = small_gpt.weights(module)
    buckets = _buckets(module, bucket_mb)
    bucket_bytes = [_numel(bucket) * bucket[0].itemsize for bucket in buckets]
    average(buckets, group)
    is_changed = not torch.equal(weights, small_gpt.weights(module))
    refuse({"the weights have changed: average the gradients only": is_changed})
    return own, small_gpt.gradient(module), bucket_bytes


def average_buckets(average: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `average_buckets(buckets, group)`, on all ranks and on two pairs."""
    for grouping in small_gpt.GROUPINGS:
        for layout, bucket_mb in LAYOUTS.items():
            outcome = run(_average, average, grouping, bucket_mb, ours=OURS)
            of_world = torch.stack([own for own, _, _ in outcome.results]).mean(0)
            for members in grouping:
                case = f"{layout}, {small_gpt.named(members)}"
                mean = torch.stack([outcome.results[rank][0] for rank in members]).mean(0)
                for rank in members:
                    own, found, bucket_bytes = outcome.results[rank]
                    _check_buckets_sent(case, outcome.of(rank), bucket_bytes)
                    _check_mean(case, own, found, mean, of_world)
    return confirm(ranks, outcome, _average, average, grouping, bucket_mb)


def _check_buckets_sent(case: str, calls: Sequence[Event], bucket_bytes: Sequence[int]) -> None:
    """One all-reduce for each bucket, of the bucket's size."""
    kinds = sorted({call.kind for call in calls})
    sent = [call.num_bytes for call in calls]
    messages = plural(len(calls), "all-reduce")
    buckets = plural(len(bucket_bytes), "bucket")
    mistakes = {
        "no collective was called: did anything travel?": not calls,
        f"it calls {', '.join(kinds)}: all-reduces are enough": kinds != ["all_reduce"],
        f"{messages} for {buckets}: one for each bucket": len(sent) != len(bucket_bytes),
        f"all-reduces of {sent} bytes, and the buckets have {list(bucket_bytes)}": (
            sorted(sent) != sorted(bucket_bytes)
        ),
    }
    refuse({**mistakes, **careless(calls)}, case)


# ---- 5.2


class _Trained(NamedTuple):
    """What a rank has after some steps.

    Args:
        owns: Its gradient when backward ended, for each step.
        founds: Its gradient when the step had finished.
        left: How many handles it kept in each step.
        buckets: The numbers of the parameters of each bucket.
        numels: How many numbers each bucket has.
    """

    owns: list[torch.Tensor]
    founds: list[torch.Tensor]
    left: list[int]
    buckets: list[set[int]]
    numels: list[int]


def _train(
    rank: int, parallel_class: Callable[..., Any], grouping: Sequence[Sequence[int]]
) -> _Trained:
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    module = small_gpt.model()
    number_of = {param: number for number, param in enumerate(module.parameters())}
    for param in number_of:  # before the learner's hook, which PyTorch then calls second
        param.register_post_accumulate_grad_hook(lambda p: here().note("ready", number_of[p]))
    buckets = _buckets(module, BUCKET_MB)
    members_of = [set(map(number_of.__getitem__, bucket)) for bucket in buckets]
    numels = [_numel(bucket) for bucket in buckets]
    trained = _Trained([], [], [], members_of, numels)
    parallel = parallel_class(module, group, buckets)
    for step in range(NUM_STEPS):
        share = small_gpt.shares(members, [4] * len(members), step)[members.index(rank)]
        for param in module.parameters():
            param.grad = torch.zeros_like(param)  # so that a row can be made too early
        here().note("step")
        with here().block("backward"):
            small_gpt.backward(module, share)
            own = small_gpt.gradient(module).clone()  # before a Future puts the means into place
        parallel.finish_gradient_sync()
        trained.owns.append(own)
        trained.founds.append(small_gpt.gradient(module).clone())
        trained.left.append(len(getattr(parallel, "under_way", ())))
        _sgd(module)
    return trained


def _sgd(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param -= LR * param.grad  # pyright: ignore[reportOperatorIssue]


def _one_process(members: Sequence[int]) -> list[torch.Tensor]:
    """The gradients of the steps that one process makes with the shares of a group."""
    module = small_gpt.model()
    gradients = []
    for step in range(NUM_STEPS):
        module.zero_grad()
        shares = small_gpt.shares(members, [4] * len(members), step)
        small_gpt.backward(module, small_gpt.joined(shares))
        gradients.append(small_gpt.gradient(module).clone())
        _sgd(module)
    return gradients


def overlapped(parallel_class: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's class: three steps on all ranks and on two pairs, against one process."""
    for grouping in small_gpt.GROUPINGS:
        outcome = run(_train, parallel_class, grouping, ours=OURS)
        for members in grouping:
            truth = _one_process(members)
            for rank in members:
                trained = outcome.results[rank]
                for number, events in enumerate(outcome.parts(rank, "step")):
                    case = f"{small_gpt.named(members)}step {number + 1}: "
                    _check_overlapped(case, events, trained, is_first=number == 0)
                    owns = torch.stack([other.owns[number] for other in outcome.results])
                    own = trained.owns[number]
                    found = trained.founds[number]
                    _check_mean(case, own, found, truth[number], owns.mean(0))
                    left = (
                        f"when finish_gradient_sync returns, under_way still holds "
                        f"{trained.left[number]} entries, and the next step adds its own"
                    )
                    refuse({left: trained.left[number] > 0}, case)
    return confirm(ranks, outcome, _train, parallel_class, grouping)


def _check_overlapped(
    case: str, events: Sequence[Event], trained: _Trained, is_first: bool
) -> None:
    """Each bucket once, complete, during backward, without waiting; and waited for afterwards."""
    calls = [one for one in events if one.kind == "all_reduce"]
    in_backward = [one for one in calls if one.block == "backward"]
    numels = trained.numels
    foreign = [one.numel for one in calls if one.numel not in numels]
    asked = [one for one in calls if one.asynchronous]
    early, late = _moments(events, calls, trained)
    threads, *other_mistakes = careless(calls).items()
    mistakes = {
        "nothing was sent, though step 1 did send: what must `missing` hold when a step begins?": (
            not calls and not is_first
        ),
        "no all-reduce was started, neither in backward nor afterwards": not calls,
        threads[0]: threads[1],
        "gradient_ready waits until its all-reduce is done, and backward stands still meanwhile: "
        "start it with async_op=True": not all(one.asynchronous for one in in_backward),
        "gradient_ready calls wait(), and backward stands still meanwhile: wait in "
        "finish_gradient_sync": "backward" in _blocks_of_waits(asked),
        f"an all-reduce of {foreign[:1]} numbers, and the buckets have {numels}": foreign,
        "a bucket was sent before the last of its gradients was ready: on which count do you "
        "send?": early,
        "everything was sent after backward, so nothing overlaps: which method is called while "
        "backward runs?": not in_backward,
        f"{plural(len(calls), 'all-reduce')} for {len(numels)} buckets: each bucket travels once": (
            len(calls) != len(numels)
        ),
        f"a bucket was complete, and backward went on to {plural(late, 'more gradient')} before it "
        "left: that time is lost for overlap": late,
        **dict(other_mistakes),
    }
    refuse(mistakes, case)


def _moments(
    events: Sequence[Event], calls: Sequence[Event], trained: _Trained
) -> tuple[bool, int]:
    """Whether a bucket left too early, and after how many more gradients the first late one left.

    A bucket may wait for those before it. Buckets of one size cannot be told apart: they left in
    the order of their numbers.
    """
    ready_at = {one.value: one.at for one in events if one.kind == "ready"}
    complete_at = [max(map(ready_at.__getitem__, params)) for params in trained.buckets]
    could_leave: dict[int, list[int]] = {}
    first_complete: dict[int, int] = {}
    for place, numel in enumerate(trained.numels):
        could_leave.setdefault(numel, []).append(max(complete_at[: place + 1]))
        first_complete[numel] = min(
            complete_at[place], first_complete.get(numel, complete_at[place])
        )
    early = False
    late = 0
    for one in calls:
        early = early or one.at < first_complete.get(one.numel, 0)
        if could_leave.get(one.numel):
            since = could_leave[one.numel].pop(0)
            late = late or sum(since < at < one.at for at in ready_at.values())
    return early, late


# ---- 5.3


class _Accumulated(NamedTuple):
    """What a rank has after one step with accumulation, and two more trials.

    Args:
        own, found: Its gradient before and after `finish_gradient_sync`.
        num_buckets: How many there are.
        is_counted: `missing` was no longer whole when the last backward began.
        is_swallowed: An error inside `no_sync` did not come out of it.
    """

    own: torch.Tensor
    found: torch.Tensor
    num_buckets: int
    is_counted: bool
    is_swallowed: bool


def _accumulate(
    rank: int,
    parallel_class: Callable[..., Any],
    num_micro_batches: int,
    grouping: Sequence[Sequence[int]],
) -> _Accumulated:
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    inputs, targets = small_gpt.shares(members, [4] * len(members))[members.index(rank)]
    module = small_gpt.model()
    buckets = _buckets(module, BUCKET_MB)
    parallel = parallel_class(module, group, buckets)
    is_counted = False
    for number in range(num_micro_batches):
        part = slice(number, None, num_micro_batches)
        is_last = number == num_micro_batches - 1
        is_counted = list(parallel.missing) != [len(bucket) for bucket in buckets]
        context = contextlib.nullcontext() if is_last else _no_sync(parallel)
        with context, here().block("last" if is_last else "inside no_sync()"):
            small_gpt.backward(module, (inputs[part], targets[part]))
    own = small_gpt.gradient(module).clone()
    parallel.finish_gradient_sync()
    found = small_gpt.gradient(module).clone()
    is_swallowed = _swallows(_no_sync(parallel))
    with here().block("after an error"):
        small_gpt.backward(module, (inputs, targets))
        parallel.finish_gradient_sync()
    other_module = small_gpt.model()
    other = parallel_class(other_module, group, _buckets(other_module, BUCKET_MB))
    with _no_sync(parallel), here().block("of another model"):
        small_gpt.backward(other_module, (inputs, targets))
    with here().block("of another model"):
        other.finish_gradient_sync()
    own /= num_micro_batches
    found /= num_micro_batches
    return _Accumulated(own, found, len(buckets), is_counted, is_swallowed)


def _no_sync(parallel: Any) -> contextlib.AbstractContextManager:
    """The learner's context; a hint says why it is none."""
    context = due(parallel.no_sync())
    is_made = isinstance(context, contextlib._GeneratorContextManager)
    has_no_yield = is_made and context.gen is None
    mistakes = {
        "no_sync has a `yield`, but it is no context: what stood above its `def`?": (
            inspect.isgenerator(context)
        ),
        "no_sync has no `yield`: where does the code inside the `with` block run?": has_no_yield,
    }
    refuse(mistakes)
    return context


def _swallows(context: contextlib.AbstractContextManager) -> bool:
    """Whether an error inside the context does not come out of it."""
    try:
        with context:
            raise ZeroDivisionError
    except ZeroDivisionError:
        return False
    return True


def quiet(parallel_class: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's class with `no_sync()`, for 1, 2 and 4 micro-batches."""
    for grouping in small_gpt.GROUPINGS:
        for num_micro_batches in (2, 4, 1):
            outcome = run(_accumulate, parallel_class, num_micro_batches, grouping)
            for members in grouping:
                shares = small_gpt.shares(members, [4] * len(members))
                mean = small_gpt.gradient_of(small_gpt.joined(shares))
                number = plural(num_micro_batches, "micro-batch")
                case = f"with {number}, {small_gpt.named(members)}"
                for rank in members:
                    _check_quiet(case, outcome.of(rank), outcome.results[rank], mean)
    return confirm(ranks, outcome, _accumulate, parallel_class, num_micro_batches, grouping)


def _check_quiet(
    case: str, calls: Sequence[Event], result: _Accumulated, mean: torch.Tensor
) -> None:
    """Nothing leaves inside of no_sync(), everything outside of it."""
    inside = [one for one in calls if one.block == "inside no_sync()"]
    total = len([one for one in calls if one.block == "last"])
    due_calls = result.num_buckets
    mistakes = {
        f"{len(inside)} all-reduces were started inside no_sync(): who asks whether gradients are "
        "to be sent?": inside,
        "when the last backward began, `missing` was no longer what it is at the beginning of a "
        "step: who counts inside no_sync()?": result.is_counted and total != due_calls,
        "the last backward, outside of no_sync(), sent nothing: is the flag set back?": total == 0,
        f"{total} all-reduces for {due_calls} buckets": total != due_calls,
    }
    refuse(mistakes, case)
    _check_mean(case, result.own, result.found, mean)
    blocks = {one.block for one in calls}
    mistakes = {
        "after an error inside no_sync() nothing is ever sent again: set the flag back also "
        "then": "after an error" not in blocks,
        "an error inside no_sync() does not come out of the `with` block: whoever called backward "
        "has to learn of it": result.is_swallowed,
        "while one model is inside no_sync(), another model sends nothing either: to whom does "
        "the flag belong?": "of another model" not in blocks,
    }
    refuse(mistakes, case)


# ---- 5.4

NOT_BY_TORCH = "PyTorch does what you are asked to write: take the norm yourself"
BY_TORCH: dict[Callable[..., Any], str] = {
    nn.utils.clip_grad_norm_: NOT_BY_TORCH,
    nn.utils.get_total_norm: NOT_BY_TORCH,
    nn.utils.clip_grads_with_norm_: NOT_BY_TORCH,
}


class _Clipped(NamedTuple):
    """What a rank has after two steps; and, of the truth, what one process has.

    Args:
        norms: What the learner's function returned.
        used: The gradients that the optimizer used: how far the weights moved, divided by the
            learning rate.
        own: The gradient of this rank's share in the first step.
        num_buckets: How many there are.
        loss: Loss of this rank's share in the first step.
        sum_of_norms: Sum of the norms of the parameters, one by one, in the first step; of the
            truth only.
    """

    norms: list[float]
    used: list[torch.Tensor]
    own: torch.Tensor
    num_buckets: int = 0
    loss: float = 0.0
    sum_of_norms: float = 0.0


def _clip_steps(
    rank: int, step: Callable[..., Any], max_norm: float, grouping: Sequence[Sequence[int]]
) -> _Clipped:
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    module = small_gpt.model()
    buckets = _buckets(module, BUCKET_MB)
    parallel = l05_by_hand.OverlappedDataParallel(module, group, buckets)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    first = small_gpt.shares(members, [4] * len(members))[members.index(rank)]
    own = small_gpt.gradient_of(first)
    with torch.no_grad():
        loss = gpt_loss(module(first[0]), first[1]).item()
    norms = []
    used = []
    for number in range(2):
        share = small_gpt.shares(members, [4] * len(members), number)[members.index(rank)]
        before = small_gpt.weights(module)
        here().note("step")
        norm = due(step(parallel, optimizer, *share, max_norm))
        norms.append(float(norm.detach() if isinstance(norm, torch.Tensor) else norm))
        used.append((before - small_gpt.weights(module)) / LR)
    return _Clipped(norms, used, own, len(buckets), loss)


def _one_clipped(members: Sequence[int], max_norm: float) -> _Clipped:
    """Two steps of one process with the shares of a group."""
    module = small_gpt.model()
    norms = []
    used = []
    owns = []
    sums_of_norms = []
    for number in range(2):
        module.zero_grad()
        shares = small_gpt.shares(members, [4] * len(members), number)
        small_gpt.backward(module, small_gpt.joined(shares))
        owns.append(small_gpt.gradient(module).clone())
        all_norms = [p.grad.norm().item() for p in module.parameters() if p.grad is not None]
        sums_of_norms.append(sum(all_norms))
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), max_norm).item())
        used.append(small_gpt.gradient(module).clone())
        _sgd(module)
    return _Clipped(norms, used, owns[0], sum_of_norms=sums_of_norms[0])


def clipped(step: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `clipped_step(model, optimizer, inputs, targets, max_norm)`."""
    for grouping in small_gpt.GROUPINGS:
        for factor in (10.0, 0.02):  # of the first norm: not clipped; below many single numbers
            max_norm = factor * _one_clipped(grouping[0], max_norm=1e9).norms[0]
            outcome = run(_clip_steps, step, max_norm, grouping, ours=BY_TORCH)
            for members in grouping:
                truth = _one_clipped(members, max_norm)
                owns = torch.stack([outcome.results[rank].own for rank in members])
                for rank in members:
                    case = f"max_norm {max_norm:.3g}, {small_gpt.named(members)}"
                    result = outcome.results[rank]
                    _check_clipped(case, result, truth, owns, max_norm)
                    _check_norm(case, result, truth, owns, max_norm)
                    num_sent = len(outcome.parts(rank, "step")[0])
                    messages = plural(num_sent, "message")
                    buckets = plural(result.num_buckets, "bucket")
                    mistakes = {
                        f"{messages} in one step for {buckets}: what does every rank hold when "
                        "finish_gradient_sync returns?": num_sent != result.num_buckets
                    }
                    refuse(mistakes, case)
                    second = (
                        "step 1 is right, step 2 is {off:.0%} away: what is in `.grad` when it "
                        "begins?"
                    )
                    diagnose(case, result.used[1], truth.used[1], {}, second, CLIP_ROUNDING)
    return confirm(ranks, outcome, _clip_steps, step, max_norm, grouping)


def _check_clipped(
    case: str, result: _Clipped, truth: _Clipped, owns: torch.Tensor, max_norm: float
) -> None:
    """The step was made with the clipped mean gradient."""
    found = result.used[0]
    factors = (max_norm / owns.norm(dim=1, keepdim=True)).clamp(max=1)
    clipped_first = (owns * factors).mean(0)
    mistakes = {
        "the weights have not changed: who makes the step?": found.norm() == 0,
        "the step was made with the gradient of this rank's own share: when do the ranks "
        "average?": times(result.own),
        f"the step was made with a gradient of norm {found.norm():.3g}: not clipped, or clipped "
        "after the step": truth.own,
        "no number is above max_norm, but it limits the norm of all of them together, and that is "
        f"{found.norm():.3g}": truth.own.clamp(-max_norm, max_norm),
        "each rank has clipped its own gradient, and then they were averaged: at that moment "
        "every rank has another norm": clipped_first,
        "right direction, but {times:.3g} times as long as it should be: the norm is "
        f"{truth.norms[0]:.3g}": times(truth.used[0]),
    }
    otherwise = (
        "the step is {off:.0%} away from the clipped mean gradient: do all parameters have the "
        "same factor, from the norm of all of them together?"
    )
    diagnose(case, found, truth.used[0], mistakes, otherwise, CLIP_ROUNDING)


def _check_norm(
    case: str, result: _Clipped, truth: _Clipped, owns: torch.Tensor, max_norm: float
) -> None:
    """The norm that was returned is that of the mean gradient, before clipping."""
    found = result.norms[0]
    right = truth.norms[0]
    p = len(owns)
    own_norms = [own.norm().item() for own in owns]
    mistakes = {
        f"it returns {found:.4g}, which is the loss: asked is the norm": result.loss,
        "it returns the norm after clipping: asked is the one before": max_norm,
        "it returns the norm of the rank's own gradient: take it after the average": any(
            distance(found, own) < CLIP_ROUNDING for own in own_norms
        ),
        f"it returns {found:.4g}, the sum of the norms of all parameters: is that the norm of all "
        "of them together?": truth.sum_of_norms,
        f"it returns {found:.4g}, the square of the norm": right**2,
        f"it returns {found:.4g}, sqrt({p}) times the norm: after the average the {p} ranks hold "
        "the same gradient, and its squares were added up over them": right * p**0.5,
    }
    otherwise = f"it returns the norm {found:.4g}, and it is {right:.4g}"
    diagnose(case, found, right, mistakes, otherwise, CLIP_ROUNDING)


# ---- 5.5


class _Bucket:
    """What a communication hook sees of DDP's bucket."""

    def __init__(self, gradient: torch.Tensor, params: list[nn.Parameter]) -> None:
        self._gradient = gradient
        self._params = params

    def buffer(self) -> torch.Tensor:
        return self._gradient

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def gradients(self) -> list[torch.Tensor]:
        parts = self._gradient.split([param.numel() for param in self._params])
        return [part.view_as(param) for part, param in zip(parts, self._params)]

    def parameters(self) -> list[nn.Parameter]:
        return list(self._params)


def _compress(
    rank: int, hook: Callable[..., Any], grouping: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank's bucket before, and what the Future of the hook holds."""
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    share = small_gpt.shares(members, [4] * len(members))[members.index(rank)]
    gradient = small_gpt.gradient_of(share, torch.float32)
    bucket = _Bucket(gradient.clone(), list(small_gpt.model(torch.float32).parameters()))
    with here().block("hook"):
        future = due(hook(group, bucket=bucket))
    if not isinstance(future, torch._C.Future):
        raise Hint(
            f"it returned {type_in_words(future)}: DDP expects a Future, which says later what "
            "the mean is"
        )
    found = future.wait()
    if isinstance(found, (list, tuple)):
        raise Hint("the Future holds a list, as that of all_reduce does: hand on the tensor in it")
    tensor(found, gradient.shape, "the Future holds")
    return gradient, found.float().clone()


def _in_ddp(rank: int, hook: Callable[..., Any]) -> torch.Tensor:
    """The gradient that DDP has with the hook, on all ranks."""
    module = small_gpt.model(torch.float32)
    model = nn.parallel.DistributedDataParallel(module)
    model.register_comm_hook(dist.group.WORLD, hook)
    members = range(dist.get_world_size())
    small_gpt.backward(model, small_gpt.shares(members, [4] * len(members))[rank])
    return small_gpt.gradient(module)


def compress(hook: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's communication hook: half the bytes, nearly the mean, and no waiting."""
    _check_signature(hook)
    ours = own_answers(
        default_hooks.bf16_compress_hook,
        default_hooks.fp16_compress_hook,
        l05_by_hand.compress,
    )
    for grouping in small_gpt.GROUPINGS:
        outcome = run(_compress, hook, grouping, ours=ours)
        of_world = torch.stack([own for own, _ in outcome.results]).mean(0)
        for members in grouping:
            case = small_gpt.named(members)
            mean = torch.stack([outcome.results[rank][0] for rank in members]).mean(0)
            for rank in members:
                own, found = outcome.results[rank]
                _check_half_sent(case, outcome.of(rank), own.nbytes // 2)
                mistakes = {
                    "the result holds gradients of ranks outside of the group": of_world,
                    "the result is {times:.2g} times as long as the mean over the group: sum or "
                    "mean, and divided how often?": times(mean),
                }
                otherwise = "{off:.0%} away from the mean: more than rounding explains"
                diagnose(case, found, mean, mistakes, otherwise, HALF_ROUNDING)
    in_ddp = run(_in_ddp, hook, case="registered with DDP, ")
    mean = small_gpt.gradient_of(small_gpt.joined(small_gpt.shares(range(4), [4] * 4)))
    for found in in_ddp.results:
        away = "registered with DDP, the gradient is {off:.0%} away from the mean"
        diagnose("", found, mean, {}, away, HALF_ROUNDING)
    return confirm(ranks, in_ddp, _in_ddp, hook, tolerance=HALF_ROUNDING)


def _check_signature(hook: Callable[..., Any]) -> None:
    names = list(inspect.signature(hook).parameters)
    takes_anything = names[:1] == ["_"]  # the test's function
    mistakes = {
        "PyTorch's own hook would do; here you write it": (
            getattr(hook, "__module__", "").startswith("torch.")
        ),
        f"DDP wants the parameters (state, bucket); yours are called {names}": (
            names[1:] != ["bucket"] and not takes_anything
        ),
    }
    refuse(mistakes)


def _check_half_sent(case: str, calls: Sequence[Event], half: int) -> None:
    """One all-reduce of bfloat16 for the bucket, and nobody waits in the hook."""
    dtypes = sorted({one.dtype for one in calls})
    sent_bytes = sum(one.num_bytes for one in calls)
    mistakes = {
        "no all_reduce was called: did anything travel?": not calls,
        f"{', '.join(dtypes)} travelled, it should be bfloat16 alone": dtypes != ["bfloat16"],
        f"{sent_bytes} bytes travelled, half of the bucket are {half}": sent_bytes != half,
        f"{len(calls)} all-reduces for one bucket: what is a bucket for?": len(calls) != 1,
        "the hook waits for the all-reduce, and backward stands still meanwhile: start it with "
        "async_op=True, and leave the rest to `then`": "hook" in _blocks_of_waits(calls),
    }
    refuse(mistakes, case)


EXERCISES = {
    "5.1": Exercise(
        check=average_buckets,
        praise="one all-reduce for each bucket, and every gradient is the mean over its group",
        hints=(
            "The row holds the gradients one after the other. In which order, and how long is "
            "the part of each?",
            "`row.split` gives views: what do you have to do with a part so that `.grad` holds it?",
        ),
    ),
    "5.2": Exercise(
        check=overlapped,
        praise="buckets leave while backward runs, and three steps train like one process",
        hints=(
            "`missing[number]` says how many gradients of a bucket are still to come. What is it "
            "when the last one comes?",
            "After backward three things are needed to finish a bucket: the handle, the row, and "
            "the parameters. Where do you keep them?",
            "What must `missing` and `under_way` hold when the next step begins?",
        ),
    ),
    "5.3": Exercise(
        check=quiet,
        praise="gradients add up in silence, and travel once",
        hints=(
            "Within `with model.no_sync():` the code up to `yield` has run, the code after it not "
            "yet.",
            "If backward raises an error, the code after `yield` is skipped, unless it stands in a "
            "`finally`.",
        ),
    ),
    "5.4": Exercise(
        check=clipped,
        praise="all ranks scale by the same factor, and only where the norm is too large",
        hints=(
            "The norm of all gradients together is the root of the sum of all squares.",
            "At which of the steps do all ranks hold the same gradient?",
        ),
    ),
    "5.5": Exercise(
        check=compress,
        praise="half the bytes, the mean to two or three digits, and nothing waits",
        hints=(
            "`dist.all_reduce(..., async_op=True)` gives a handle; its `get_future()` a Future.",
            "`then(function)` gives another Future, which will hold what the function returns.",
        ),
    ),
}
