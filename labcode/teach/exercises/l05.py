"""Checks of lesson 05, buckets, overlap and hooks. The text of each assertion is a hint."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from labcode.comm.counting import Call, counted
from labcode.models.gpt import loss as gpt_loss
from labcode.parallel.data import Bucket, make_buckets
from labcode.pool.ranks import Ranks
from labcode.teach.check import RETURNED_NONE, Exercise, due
from labcode.teach.exercises import small_gpt
from labcode.teach.exercises.all_reduces import Sent, Watch
from labcode.teach.exercises.on_ranks import without
from labcode.teach.labs import l05_by_hand

EXERCISES = {
    "5.1": Exercise(
        praise="one all-reduce for each bucket, and every gradient is the mean over its group",
        hints=(
            "The row holds the gradients one after the other. In which order, and how long is "
            "the part of each?",
            "`row.split` gives views: what do you have to do with a part so that `.grad` holds it?",
        ),
    ),
    "5.2": Exercise(
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
        praise="gradients add up in silence, and travel once",
        hints=(
            "Within `with model.no_sync():` the code up to `yield` has run, the code after it not "
            "yet.",
            "If backward raises an error, the code after `yield` is skipped, unless it stands in a "
            "`finally`.",
        ),
    ),
    "5.4": Exercise(
        praise="all ranks scale by the same factor, and only where the norm is too large",
        hints=(
            "The norm of all gradients together is the root of the sum of all squares.",
            "At which of the steps do all ranks hold the same gradient?",
        ),
    ),
    "5.5": Exercise(
        praise="half the bytes, the mean to two or three digits, and nothing waits",
        hints=(
            "`dist.all_reduce(..., async_op=True)` gives a handle; its `get_future()` a Future.",
            "`then(function)` gives another Future, which will hold what the function returns.",
        ),
    ),
}

BUCKET_MB = 0.01  # cuts the small GPT into several buckets
NUM_STEPS = 3
BY_LABCODE = (  # its own answers to exercises 5.1 and 5.2
    l05_by_hand.average_buckets,
    l05_by_hand.Overlapped.gradient_ready,
    l05_by_hand.Overlapped.finish_gradient_sync,
    Bucket.send,
    Bucket.receive,
)
IN_A_THREAD = (
    "an all-reduce was called in a thread of its own: ranks match collectives by their order, and "
    "threads of two ranks run in different orders. async_op=True needs no thread"
)
NOT_SEEN = (
    "an all-reduce was started, but not by `dist.all_reduce`, and this check can follow no other: "
    "use that one"
)
LR = 0.5

Buckets = list[list[nn.Parameter]]


def _buckets(module: nn.Module, bucket_mb: float) -> Buckets:
    return [bucket.params for bucket in make_buckets(module, bucket_mb)]


def _num_bytes(bucket: list[nn.Parameter]) -> int:
    return sum(param.nbytes for param in bucket)


# ---- 5.1


class _Averaged(NamedTuple):
    """What a rank has after the learner's function.

    Args:
        own: Its own gradient before.
        found: Its gradient afterwards.
        bucket_bytes: Of each bucket.
        calls: The collectives that it started.
        sent: The all-reduces among them.
    """

    own: torch.Tensor
    found: torch.Tensor
    bucket_bytes: list[int]
    calls: list[Call]
    sent: list[Sent]


LAYOUTS = {  # MB for each bucket
    "with one bucket": 1.0,
    "with a bucket for each parameter": 1e-9,
    "with several buckets": BUCKET_MB,
}


def _bucketed(
    rank: int, average: Callable[..., Any], grouping: Sequence[Sequence[int]], bucket_mb: float
) -> _Averaged:
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    module = small_gpt.model()
    small_gpt.backward(module, small_gpt.shares(members, [4] * len(members))[members.index(rank)])
    own = small_gpt.gradient(module).clone()
    weights = parameters_to_vector(module.parameters()).detach().clone()
    buckets = _buckets(module, bucket_mb)
    bucket_bytes = [_num_bytes(bucket) for bucket in buckets]
    watch = Watch()
    with without(*BY_LABCODE), counted() as calls, watch.active():
        average(buckets, group)
        sent = watch.taken()
    assert torch.equal(weights, parameters_to_vector(module.parameters()).detach()), (
        "the weights have changed: average the gradients only"
    )
    return _Averaged(own, small_gpt.gradient(module), bucket_bytes, list(calls), sent)


def average_buckets(average: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `average_buckets(buckets, group)`, on all ranks and on two pairs."""
    for grouping in small_gpt.GROUPINGS:
        for layout, bucket_mb in LAYOUTS.items():
            results = small_gpt.run(ranks, _bucketed, average, grouping, bucket_mb)
            for members in grouping:
                case = f"{layout}, {small_gpt.named(members)}"
                _check_messages(case, results[members[0]])
                _check_means(case, members, results)


def _check_messages(case: str, result: _Averaged) -> None:
    """One all-reduce for each bucket, of the bucket's size."""
    kinds = sorted({call.kind for call in result.calls})
    assert kinds, case + "no collective was called: did anything travel?"
    assert kinds == ["all_reduce"], case + f"it calls {', '.join(kinds)}: all-reduces are enough"
    found = [call.num_bytes for call in result.calls]
    expected = result.bucket_bytes
    assert len(found) == len(expected), (
        case + f"{_counted(len(found), 'all-reduce')} for {_counted(len(expected), 'bucket')}: one "
        "for each bucket"
    )
    assert sorted(found) == sorted(expected), (
        case + f"all-reduces of {found} bytes, and the buckets have {expected}"
    )
    _check_waits(case, result.sent)


def _check_waits(case: str, sent: Sequence[Sent]) -> None:
    """Each all-reduce was waited for, and its row was left alone until then."""
    assert not any(one.in_thread for one in sent), case + IN_A_THREAD
    asynchronous = [one for one in sent if one.is_async]
    arrived = [one for one in asynchronous if one.arrived]
    assert len(arrived) == len(asynchronous), (
        case + f"{_counted(len(asynchronous), 'all-reduce')} started and {len(arrived)} waited "
        "for: without wait() nobody knows that the sum is there"
    )
    assert not any(one.touched for one in arrived), (
        case + "a row was changed while its all-reduce was under way: what has to come after "
        "wait()?"
    )


def _counted(number: int, name: str) -> str:
    ending = "es" if name.endswith("ch") else "s"
    return f"{number} {name}{'' if number == 1 else ending}"


def _check_means(case: str, members: Sequence[int], results: Sequence[_Averaged]) -> None:
    """Every rank of the group has the mean of the group's gradients."""
    owns = torch.stack([results[rank].own for rank in members])
    for rank in members:
        result = results[rank]
        others = torch.stack([other.own for other in results]).mean(0)
        _check_mean(case, result.own, result.found, owns.mean(0), others)


def _check_mean(
    case: str,
    own: torch.Tensor,
    found: torch.Tensor,
    expected: torch.Tensor,
    world_mean: torch.Tensor | None = None,
) -> None:
    """A gradient is the mean over a group; else the mistake that made it what it is."""
    assert small_gpt.distance(found, own) > 1e-9, (
        case + "`.grad` still holds the rank's own gradient: is the mean copied into it?"
    )
    of_own = small_gpt.times_too_long(found, own)
    assert of_own is None, (
        case + f"`.grad` holds the rank's own gradient, {of_own:.3g} times: where is the sum, and "
        "was it there when you copied?"
    )
    too_long = small_gpt.times_too_long(found, expected)
    assert too_long is None or abs(too_long - 1) < 1e-9, (
        case + f"right direction, but {too_long:.3g} times as long as the mean over the group: "
        "by what do you divide, and how often?"
    )
    off = small_gpt.distance(found, expected)
    if off > 1e-9 and world_mean is not None:
        in_world = small_gpt.times_too_long(found, world_mean)
        assert in_world is None, (
            case + "the result holds gradients of ranks outside of the group: "
            "which group does your all-reduce use?"
        )
    of_weights = small_gpt.times_too_long(found, small_gpt.weights(small_gpt.model()))
    assert off < 1e-9 or of_weights is None, (
        case + "`.grad` holds weights of the model: what did you join, weights or gradients?"
    )
    same_numbers = torch.allclose(found.sort().values, expected.sort().values)
    assert off < 1e-9 or not same_numbers, (
        case + "the right numbers in the wrong places: which part of the row belongs to which "
        "parameter?"
    )
    assert off < 1e-9, case + f"the gradient is {off:.0%} away from the mean over the group"


# ---- 5.2


class _Step(NamedTuple):
    """One step of a rank.

    Args:
        own: Its gradient when backward ended.
        found: Its gradient when it had finished.
        sent: Its all-reduces.
        waits: For each wait, whether it was in backward.
        left: How many handles it kept.
        num_calls: All-reduces, however they were started.
        order: The parameters in the order in which their gradients came.
    """

    own: torch.Tensor
    found: torch.Tensor
    sent: list[Sent]
    waits: list[bool]
    left: int
    num_calls: int
    order: list[int]


class _Steps(NamedTuple):
    """What a rank has done.

    Args:
        buckets: Numbers of the parameters in each bucket.
        numels: How many numbers each bucket has.
        steps: In order.
    """

    buckets: list[set[int]]
    numels: list[int]
    steps: list[_Step]


def _overlapped(
    rank: int, parallel_class: Callable[..., Any], grouping: Sequence[Sequence[int]]
) -> _Steps:
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    module = small_gpt.model()
    watch = Watch()
    number_of = {}
    for number, param in enumerate(module.parameters()):
        number_of[param] = number
        # before the learner's hook, which PyTorch then calls second
        param.register_post_accumulate_grad_hook(lambda param: watch.ready.append(number_of[param]))
    buckets = _buckets(module, BUCKET_MB)
    with without(l05_by_hand.Overlapped.__init__):
        parallel = parallel_class(module, group, buckets)
    steps = []
    for step in range(NUM_STEPS):
        share = small_gpt.shares(members, [4] * len(members), step)[members.index(rank)]
        with without(*BY_LABCODE):
            steps.append(_watched_step(parallel, module, share, watch))
        _sgd(module)
    numbers = []
    numels = []
    for bucket in buckets:
        numbers.append({number_of[param] for param in bucket})
        numels.append(sum(param.numel() for param in bucket))
    return _Steps(numbers, numels, steps)


def _watched_step(parallel: Any, module: nn.Module, share: small_gpt.Batch, watch: Watch) -> _Step:
    for param in module.parameters():
        param.grad = torch.zeros_like(param)  # so that a row can be made too early
    watch.begin_step()
    with counted() as calls, watch.active():
        with watch.running():
            small_gpt.backward(module, share)
            own = small_gpt.gradient(module).clone()  # before a Future may put the means into place
        parallel.finish_gradient_sync()
        found = small_gpt.gradient(module).clone()
        sent = watch.taken()
    left = len(getattr(parallel, "under_way", ()))
    num_calls = sum(call.kind == "all_reduce" for call in calls)
    return _Step(own, found, sent, list(watch.waits), left, num_calls, list(watch.ready))


def _sgd(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param -= LR * param.grad  # pyright: ignore[reportOperatorIssue]


def overlapped(parallel_class: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's class: three steps on all ranks and on two pairs, against one process."""
    for grouping in small_gpt.GROUPINGS:
        results = small_gpt.run(ranks, _overlapped, parallel_class, grouping)
        for members in grouping:
            expected = _one_process(members)
            for rank in members:
                _check_steps(small_gpt.named(members), results[rank], expected, results)


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


def _check_steps(
    group: str,
    result: _Steps,
    expected: Sequence[torch.Tensor],
    everybody: Sequence[_Steps],
) -> None:
    for number, step in enumerate(result.steps):
        case = f"{group}step {number + 1}: "
        _check_sending(case, number, step, result)
        world = torch.stack([other.steps[number].own for other in everybody]).mean(0)
        _check_mean(case, step.own, step.found, expected[number], world)
        assert not step.left, (
            case + f"when finish_gradient_sync returns, under_way still holds {step.left} "
            "entries, and the next step adds its own"
        )


def _check_sending(case: str, number: int, step: _Step, result: _Steps) -> None:
    """Each bucket once, complete, during backward, without waiting; and waited for afterwards."""
    sent = step.sent
    assert not any(one.in_thread for one in sent), case + IN_A_THREAD
    assert step.num_calls <= len(sent), case + NOT_SEEN
    assert sent or number == 0, (
        case + "nothing was sent, though step 1 did send: what must `missing` hold when a step "
        "begins?"
    )
    assert sent, case + "no all-reduce was started, neither in backward nor afterwards"
    waits_inside = [one for one in sent if one.in_backward and not one.is_async]
    assert not waits_inside, (
        case + "gradient_ready waits until its all-reduce is done, and backward stands still "
        "meanwhile: start it with async_op=True"
    )
    assert True not in step.waits, (
        case + "gradient_ready calls wait(), and backward stands still meanwhile: wait in "
        "finish_gradient_sync"
    )
    for one in sent:
        _check_bucket(case, one, result)
    assert any(one.in_backward for one in sent), (
        case + "everything was sent after backward, so nothing overlaps: which method is called "
        "while backward runs?"
    )
    buckets = len(result.buckets)
    assert len(sent) == buckets, (
        case + f"{_counted(len(sent), 'all-reduce')} for {buckets} buckets: each bucket travels "
        "once"
    )
    _check_moments(case, step, result)
    _check_waits(case, sent)


def _check_moments(case: str, step: _Step, result: _Steps) -> None:
    """Each bucket left with its last gradient, or waited only for the buckets before it."""
    complete = []  # for each bucket, how many gradients of the model there were by then
    for params in result.buckets:
        latest = 1 + max(step.order.index(param) for param in params)
        complete.append(max([latest, *complete[-1:]]))
    # buckets of the same length cannot be told apart: they left in the order of their numbers
    by_numel: dict[int, list[int]] = {}
    for numel, number in zip(result.numels, complete):
        by_numel.setdefault(numel, []).append(number)
    for one in step.sent:
        assert by_numel[one.numel], case + f"a bucket of {one.numel} numbers travels twice"
        could_leave_at = by_numel[one.numel].pop(0)
        late = len(one.ready) - could_leave_at
        assert late <= 0, (
            case + f"a bucket was complete, and backward went on to {late} more "
            f"gradient{'' if late == 1 else 's'} before it left: that time is lost for overlap"
        )


def _check_bucket(case: str, sent: Sent, result: _Steps) -> None:
    fitting = []
    for params, numel in zip(result.buckets, result.numels):
        if numel == sent.numel:
            fitting.append(params)
    assert fitting, (
        case + f"an all-reduce of {sent.numel} numbers, and the buckets have {result.numels}"
    )
    complete = [params for params in fitting if params <= set(sent.ready)]
    assert complete, (
        case + "a bucket was sent before the last of its gradients was ready: on which count do "
        "you send?"
    )


# ---- 5.3


class _Quiet(NamedTuple):
    """What a rank has after one step with accumulation.

    Args:
        own, found: Its gradient before and after `finish_gradient_sync`.
        sent: All-reduces after each micro-batch.
        num_buckets: How many there are.
        is_counted: `missing` was no longer whole when the last backward began.
        is_swallowed: An error inside `no_sync` did not come out of it.
        after_error: All-reduces of a backward that follows an error inside `no_sync`.
        of_other: All-reduces of another model while the first is inside `no_sync`.
    """

    own: torch.Tensor
    found: torch.Tensor
    sent: list[int]
    num_buckets: int
    is_counted: bool
    is_swallowed: bool
    after_error: int
    of_other: int


def _accumulated(
    rank: int,
    parallel_class: Callable[..., Any],
    num_micro_batches: int,
    grouping: Sequence[Sequence[int]],
) -> _Quiet:
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    inputs, targets = small_gpt.shares(members, [4] * len(members))[members.index(rank)]
    module = small_gpt.model()
    buckets = _buckets(module, BUCKET_MB)
    parallel = parallel_class(module, group, buckets)
    whole = [len(bucket) for bucket in buckets]
    is_counted = False
    watch = Watch()
    sent = []
    with watch.active():
        for number in range(num_micro_batches):
            part = slice(number, None, num_micro_batches)
            is_last = number == num_micro_batches - 1
            is_counted = list(parallel.missing) != whole
            with contextlib.nullcontext() if is_last else _no_sync(parallel):
                small_gpt.backward(module, (inputs[part], targets[part]))
            sent.append(len(watch.sent))
        own = small_gpt.gradient(module).clone()
        parallel.finish_gradient_sync()
        found = small_gpt.gradient(module).clone() / num_micro_batches
        watch.begin_step()
        is_swallowed = _swallows(_no_sync(parallel))
        small_gpt.backward(module, (inputs, targets))
        parallel.finish_gradient_sync()
        after_error = len(watch.sent)
        watch.begin_step()
        other_module = small_gpt.model()
        other = parallel_class(other_module, group, _buckets(other_module, BUCKET_MB))
        with _no_sync(parallel):
            small_gpt.backward(other_module, (inputs, targets))
        other.finish_gradient_sync()
        of_other = len(watch.sent)
    return _Quiet(
        own / num_micro_batches,
        found,
        sent,
        len(buckets),
        is_counted,
        is_swallowed,
        after_error,
        of_other,
    )


def _no_sync(parallel: Any) -> contextlib.AbstractContextManager:
    """The learner's context; an assertion says why it is none."""
    context = due(parallel.no_sync())
    assert not inspect.isgenerator(context), (
        "no_sync has a `yield`, but it is no context: what stood above its `def`?"
    )
    is_made = isinstance(context, contextlib._GeneratorContextManager)
    assert not is_made or context.gen is not None, (
        "no_sync has no `yield`: where does the code inside the `with` block run?"
    )
    return context


def _swallows(context: contextlib.AbstractContextManager) -> bool:
    """Whether an error inside the context does not come out of it."""
    try:
        with context:
            raise ZeroDivisionError
    except ZeroDivisionError:
        return False
    return True


def quiet(parallel_class: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's class with `no_sync()`, for 1, 2 and 4 micro-batches."""
    for grouping in small_gpt.GROUPINGS:
        for num_micro_batches in (2, 4, 1):
            work = (_accumulated, parallel_class, num_micro_batches, grouping)
            results = small_gpt.run(ranks, *work)
            for members in grouping:
                shares = small_gpt.shares(members, [4] * len(members))
                expected = small_gpt.gradient_of(small_gpt.joined(shares))
                number = _counted(num_micro_batches, "micro-batch")
                case = f"with {number}, {small_gpt.named(members)}"
                for rank in members:
                    _check_quiet(case, results[rank], expected)


def _check_quiet(case: str, result: _Quiet, expected: torch.Tensor) -> None:
    *inside, total = result.sent
    assert not any(inside), (
        case + f"{max(inside, default=0)} all-reduces were started inside no_sync(): who asks "
        "whether gradients are to be sent?"
    )
    assert total == result.num_buckets or not result.is_counted, (
        case + "when the last backward began, `missing` was no longer what it is at the beginning "
        "of a step: who counts inside no_sync()?"
    )
    assert total > 0, (
        case + "the last backward, outside of no_sync(), sent nothing: is the flag set back?"
    )
    assert total == result.num_buckets, (
        case + f"{total} all-reduces for {result.num_buckets} buckets"
    )
    _check_mean(case, result.own, result.found, expected)
    assert result.after_error, (
        case + "after an error inside no_sync() nothing is ever sent again: set the flag back "
        "also then"
    )
    assert not result.is_swallowed, (
        case + "an error inside no_sync() does not come out of the `with` block: whoever called "
        "backward has to learn of it"
    )
    assert result.of_other, (
        case + "while one model is inside no_sync(), another model sends nothing either: to whom "
        "does the flag belong?"
    )


# ---- 5.4


class _Clipped(NamedTuple):
    """What a rank has after two steps.

    Args:
        norms: What the learner's function returned.
        used: The gradients that the optimizer used: how far the weights moved, divided by the
            learning rate.
        own: The gradient of this rank's share in the first step.
        num_sent: All-reduces in the first step.
        num_buckets: How many there are.
        loss: Of this rank's share in the first step.
        sum_of_norms: Of the parameters, one by one, in the first step; of the reference only.
    """

    norms: list[float]
    used: list[torch.Tensor]
    own: torch.Tensor
    num_sent: int = 0
    num_buckets: int = 0
    loss: float = 0.0
    sum_of_norms: float = 0.0


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError(f"{name} does what you are asked to write: take the norm yourself")

    return refuse


def _clip_steps(
    rank: int, step: Callable[..., Any], max_norm: float, grouping: Sequence[Sequence[int]]
) -> _Clipped:
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    module = small_gpt.model()
    buckets = _buckets(module, BUCKET_MB)
    parallel = l05_by_hand.Overlapped(module, group, buckets)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    first = small_gpt.shares(members, [4] * len(members))[members.index(rank)]
    own = small_gpt.gradient_of(first)
    with torch.no_grad():
        loss = gpt_loss(module(first[0]), first[1]).item()
    norms = []
    used = []
    num_sent = []
    shortcuts = ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_")
    with contextlib.ExitStack() as stack:
        for name in shortcuts:
            stack.enter_context(mock.patch.object(nn.utils, name, _refused(name)))
        for number in range(2):
            share = small_gpt.shares(members, [4] * len(members), number)[members.index(rank)]
            before = small_gpt.weights(module)
            with counted() as calls:
                norm = due(step(parallel, optimizer, *share, max_norm))
            norms.append(float(norm.detach() if isinstance(norm, torch.Tensor) else norm))
            used.append((before - small_gpt.weights(module)) / LR)
            num_sent.append(len(calls))
    return _Clipped(norms, used, own, num_sent[0], len(buckets), loss)


def clipped(step: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `clipped_step(model, optimizer, inputs, targets, max_norm)`."""
    for grouping in small_gpt.GROUPINGS:
        for factor in (10.0, 0.02):  # of the first norm: not clipped; below many single numbers
            first_norm = _one_clipped(grouping[0], max_norm=1e9).norms[0]
            max_norm = factor * first_norm
            results = small_gpt.run(ranks, _clip_steps, step, max_norm, grouping)
            for members in grouping:
                expected = _one_clipped(members, max_norm)
                owns = torch.stack([results[rank].own for rank in members])
                for rank in members:
                    case = f"max_norm {max_norm:.3g}, {small_gpt.named(members)}"
                    _check_clipped(case, results[rank], expected, owns, max_norm)


def _one_clipped(members: Sequence[int], max_norm: float) -> _Clipped:
    """Two steps of one process with the shares of a group."""
    module = small_gpt.model()
    norms = []
    used = []
    own = torch.zeros(1)
    sum_of_norms = 0.0
    for number in range(2):
        module.zero_grad()
        shares = small_gpt.shares(members, [4] * len(members), number)
        small_gpt.backward(module, small_gpt.joined(shares))
        if number == 0:
            own = small_gpt.gradient(module).clone()
            for param in module.parameters():
                assert param.grad is not None
                sum_of_norms += param.grad.norm().item()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), max_norm).item())
        used.append(small_gpt.gradient(module).clone())
        _sgd(module)
    return _Clipped(norms, used, own, sum_of_norms=sum_of_norms)


def _check_clipped(
    case: str, result: _Clipped, expected: _Clipped, owns: torch.Tensor, max_norm: float
) -> None:
    found = result.used[0]
    right = expected.used[0]
    unclipped = expected.own
    is_clipped = expected.norms[0] > max_norm
    assert found.norm() > 0, case + "the weights have not changed: who makes the step?"
    alone = small_gpt.length_along(found, result.own)
    assert small_gpt.distance(found, alone * result.own) > 1e-6, (
        case + "the step was made with the gradient of this rank's own share: when do the ranks "
        "average?"
    )
    if is_clipped:
        assert small_gpt.distance(found, unclipped) > 1e-6, (
            case + f"the step was made with a gradient of norm {found.norm():.3g}: not clipped, or "
            "clipped after the step"
        )
        by_value = unclipped.clamp(-max_norm, max_norm)
        assert small_gpt.distance(found, by_value) > 1e-4, (
            case + "no number is above max_norm, but it limits the norm of all of them together, "
            f"and that is {found.norm():.3g}"
        )
        _check_not_clipped_first(case, found, owns, max_norm)
    too_long = small_gpt.times_too_long(found, right)
    assert too_long is None or abs(too_long - 1) < 1e-4, (
        case + f"right direction, but {too_long:.3g} times as long as it should be: the norm is "
        f"{expected.norms[0]:.3g}"
    )
    off = small_gpt.distance(found, right)
    assert off < 1e-4, (
        case + f"the step is {off:.0%} away from the clipped mean gradient: do all parameters "
        "have the same factor, from the norm of all of them together?"
    )
    _check_norm(case, result, expected, owns, max_norm)
    assert result.num_sent == result.num_buckets, (
        case + f"{_counted(result.num_sent, 'message')} in one step for "
        f"{_counted(result.num_buckets, 'bucket')}: what does every rank hold when "
        "finish_gradient_sync returns?"
    )
    off = small_gpt.distance(result.used[1], expected.used[1])
    assert off < 1e-4, (
        case + f"step 1 is right, step 2 is {off:.0%} away: what is in `.grad` when it begins?"
    )


def _check_not_clipped_first(
    case: str, found: torch.Tensor, owns: torch.Tensor, max_norm: float
) -> None:
    """It is not the mean of gradients that each rank has clipped for itself."""
    factors = (max_norm / owns.norm(dim=1, keepdim=True)).clamp(max=1)
    clipped_first = (owns * factors).mean(0)
    assert small_gpt.distance(found, clipped_first) > 1e-4, (
        case + "each rank has clipped its own gradient, and then they were averaged: at that "
        "moment every rank has another norm"
    )


def _check_norm(
    case: str, result: _Clipped, reference: _Clipped, owns: torch.Tensor, max_norm: float
) -> None:
    """The norm that was returned is that of the mean gradient, before clipping."""
    found = result.norms[0]
    expected = reference.norms[0]
    right = abs(found / expected - 1) < 1e-4
    assert right or abs(found / result.loss - 1) > 1e-6, (
        case + f"it returns {found:.4g}, which is the loss: asked is the norm"
    )
    after = expected > max_norm and abs(found / max_norm - 1) < 1e-4
    assert right or not after, case + "it returns the norm after clipping: asked is the one before"
    is_own = any(abs(found / own.norm().item() - 1) < 1e-6 for own in owns)
    assert right or not is_own, (
        case + "it returns the norm of the rank's own gradient: take it after the average"
    )
    assert right or abs(found / reference.sum_of_norms - 1) > 1e-4, (
        case + f"it returns {found:.4g}, the sum of the norms of all parameters: is that the norm "
        "of all of them together?"
    )
    assert right or abs(found / expected**2 - 1) > 1e-4, (
        case + f"it returns {found:.4g}, the square of the norm"
    )
    p = len(owns)
    assert right or abs((found / expected) ** 2 / p - 1) > 1e-4, (
        case + f"it returns {found:.4g}, sqrt({p}) times the norm: after the average the {p} ranks "
        "hold the same gradient, and its squares were added up over them"
    )
    assert right, case + f"it returns the norm {found:.4g}, and it is {expected:.4g}"


# ---- 5.5


class _Bucket:
    """What a communication hook sees of DDP's bucket."""

    def __init__(self, gradient: torch.Tensor, params: list[nn.Parameter]) -> None:
        self._gradient = gradient
        self._params = params

    def buffer(self) -> torch.Tensor:
        return self._gradient

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self._gradient = tensor

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def gradients(self) -> list[torch.Tensor]:
        parts = self._gradient.split([param.numel() for param in self._params])
        return [part.view_as(param) for part, param in zip(parts, self._params)]

    def parameters(self) -> list[nn.Parameter]:
        return list(self._params)


class _Compressed(NamedTuple):
    """What a rank has after the learner's hook.

    Args:
        own: Its bucket before.
        found: What the Future holds.
        kinds: The dtypes that travelled.
        sent_bytes: How much.
        num_sent: In how many all-reduces.
        waited: The hook waited for something.
    """

    own: torch.Tensor
    found: torch.Tensor
    kinds: list[str]
    sent_bytes: int
    num_sent: int
    waited: bool


def _compressed(
    rank: int, hook: Callable[..., Any], grouping: Sequence[Sequence[int]]
) -> _Compressed:
    group = small_gpt.own_group(grouping)
    members = dist.get_process_group_ranks(group)
    share = small_gpt.shares(members, [4] * len(members))[members.index(rank)]
    gradient = small_gpt.gradient_of(share, torch.float32)
    watch = Watch()
    bucket = _Bucket(gradient.clone(), list(small_gpt.model(torch.float32).parameters()))
    tensors: list[tuple[str, int]] = []
    with counted() as calls, watch.active(), _noting_dtypes(tensors), watch.running():
        future = hook(group, bucket=bucket)
    assert len(calls) <= len(tensors), NOT_SEEN
    assert future is not None, RETURNED_NONE
    assert isinstance(future, torch._C.Future), (
        f"it returned a {type(future).__name__}: DDP expects a Future, which says later what the "
        "mean is"
    )
    found = future.wait()
    assert not isinstance(found, (list, tuple)), (
        "the Future holds a list, as that of all_reduce does: hand on the tensor in it"
    )
    assert isinstance(found, torch.Tensor), (
        f"the Future holds a {type(found).__name__}, it should hold the mean of the bucket"
    )
    assert found.shape == gradient.shape, (
        f"the Future holds a tensor of shape {list(found.shape)}, the bucket has "
        f"{list(gradient.shape)}"
    )
    waited = True in watch.waits or any(not one.is_async for one in watch.sent)
    kinds = sorted({dtype for dtype, _ in tensors})
    sent_bytes = sum(num_bytes for _, num_bytes in tensors)
    return _Compressed(gradient, found.float().clone(), kinds, sent_bytes, len(tensors), waited)


@contextlib.contextmanager
def _noting_dtypes(found: list[tuple[str, int]]) -> Iterator[None]:
    """Within it (dtype, bytes) of each tensor given to `dist.all_reduce` is written down."""
    real = dist.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append((str(tensor.dtype), tensor.nbytes))
        return real(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", noted):
        yield


def _in_ddp(rank: int, hook: Callable[..., Any]) -> torch.Tensor:
    """The gradient that DDP has with the hook, on all ranks."""
    module = small_gpt.model(torch.float32)
    model = nn.parallel.DistributedDataParallel(module)
    model.register_comm_hook(dist.group.WORLD, hook)
    members = range(dist.get_world_size())
    small_gpt.backward(model, small_gpt.shares(members, [4] * len(members))[rank])
    return small_gpt.gradient(module)


def compress(hook: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's communication hook: half the bytes, nearly the mean, and no waiting."""
    _check_signature(hook)
    for grouping in small_gpt.GROUPINGS:
        results = small_gpt.run(ranks, _compressed, hook, grouping)
        for members in grouping:
            _check_compressed(members, results)
    expected = small_gpt.gradient_of(
        small_gpt.joined(small_gpt.shares(range(ranks.n), [4] * ranks.n)), torch.float32
    )
    for found in small_gpt.run(ranks, _in_ddp, hook):
        off = small_gpt.distance(found, expected)
        assert off < 0.03, f"registered with DDP, the gradient is {off:.0%} away from the mean"


def _check_signature(hook: Callable[..., Any]) -> None:
    names = list(inspect.signature(hook).parameters)
    by_torch = getattr(hook, "__module__", "").startswith("torch.")
    code = getattr(hook, "__code__", None)
    called = code.co_names if code is not None else ()
    assert not by_torch and "bf16_compress_hook" not in called, (
        "PyTorch's own hook would do; here you write it"
    )
    if names and names[0] != "_":  # not the test's function that takes anything
        assert names[1:] == ["bucket"], (
            f"DDP wants the parameters (state, bucket); yours are called {names}"
        )


def _check_compressed(members: Sequence[int], results: Sequence[_Compressed]) -> None:
    case = small_gpt.named(members)
    owns = torch.stack([results[rank].own for rank in members])
    expected = owns.mean(0)
    world_mean = torch.stack([result.own for result in results]).mean(0)
    for rank in members:
        result = results[rank]
        assert result.kinds, case + "no all_reduce was called: did anything travel?"
        assert result.kinds == ["torch.bfloat16"], (
            case + f"{', '.join(result.kinds)} travelled, it should be torch.bfloat16 alone"
        )
        half = result.own.nbytes // 2
        assert result.sent_bytes == half, (
            case + f"{result.sent_bytes} bytes travelled, half of the bucket are {half}"
        )
        assert result.num_sent == 1, (
            case + f"{result.num_sent} all-reduces for one bucket: what is a bucket for?"
        )
        assert not result.waited, (
            case + "the hook waits for the all-reduce, and backward stands still meanwhile: start "
            "it with async_op=True, and leave the rest to `then`"
        )
        off_world = small_gpt.distance(result.found, world_mean)
        off = small_gpt.distance(result.found, expected)
        assert off < 0.03 or off_world > 0.03, (
            case + "the result holds gradients of ranks outside of the group"
        )
        length = small_gpt.length_along(result.found, expected)
        assert abs(length - 1) < 0.1, (
            case + f"the result is {length:.2g} times as long as the mean over the group: sum or "
            "mean, and divided how often?"
        )
        assert off < 0.03, case + f"{off:.0%} away from the mean: more than rounding explains"
