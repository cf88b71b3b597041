"""Checks of lesson 12, pipeline parallelism. The text of each assertion is a hint."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from labcode.comm.counting import Collective, CollectiveSpy
from labcode.comm.grid import Grid
from labcode.parallel.pipeline import Pipeline
from labcode.perf.pipeline import StageTimes, Timeline, peak_microbatches, simulate
from labcode.pool.answers import HangError, LateError
from labcode.pool.ranks import RankError, Ranks
from labcode.schedules import Action, Actions, check_schedule, schedule
from labcode.teach import tracebacks
from labcode.teach.check import Exercise, due
from labcode.teach.exercises.on_ranks import IMPORT_LIMIT_S, LIMIT_S, without
from labcode.teach.labs import l12_paced_pipeline
from labcode.teach.labs.l12_paced_pipeline import part_of
from labcode.topology import GridShape

EXERCISES = {
    "12.1": Exercise(
        praise="all forwards, then all backwards, and every rank has its own stage",
        hints=(
            "The list of rank 2 begins with Action('F', 2, 0), and the list of rank 0 with "
            "Action('F', 0, 0).",
            "How many actions does the list of one rank have, if there are m micro-batches?",
        ),
    ),
    "12.2": Exercise(
        praise="your runner gives the gradients of one process, with GPipe and with 1F1B, "
        "on all ranks and in groups of two",
        hints=(
            "Write F first, for a rank in the middle: receive x, ask for its gradient, run the "
            "stage, send y, keep both. Then ask what is different on the first and the last rank.",
            "recv writes into a tensor that you bring. Which tensor has the right shape?",
            "In B a rank in the middle receives the gradient of its y. Where does autograd leave "
            "the gradient of x, which the rank before waits for?",
            "The loss of a step is the mean over m micro-batches. Which rank can see to that?",
        ),
    ),
    "12.3": Exercise(
        praise="1F1B, action by action, and the ranks have run it",
        hints=(
            "Write down the lists of the last rank and of the last but one for m = 4.",
            "How many forwards has a rank done when its first backward begins? It is one more "
            "than the ranks behind it.",
            "After the warm-up there are two lists left, forwards and backwards. Take one from "
            "each in turn, until one of them is empty.",
        ),
    ),
    "12.4": Exercise(
        praise="backward gives dx at once and leaves dA for later, and two micro-batches add up",
        hints=(
            "y is [.., outputs] and A is [outputs, inputs]. Which product of dy and A has the "
            "shape of x?",
            "dA sums over everything but outputs and inputs: flatten the leading dims into one.",
            "What stands in `later` is called when W's turn has come: the product belongs inside "
            "the function that you put there.",
            "Two micro-batches share one weight. What should the second W do with the .grad that "
            "the first one made?",
        ),
    ),
    "12.5": Exercise(
        praise="the fastest schedule that fits, in each of the cases",
        hints=(
            "For each candidate: make its schedule, simulate it, look at its memory and its time.",
            "With v stages on a rank, how long does one stage take, and how much does a "
            "micro-batch leave in it?",
            "Not every candidate is possible with every m.",
        ),
    ),
}

# ---- what several exercises share

# All ranks; and two groups of two at the same time, in which a rank of the group is not the rank of
# the world.
SHAPES = (GridShape(pp=4), GridShape(dp=2, pp=2))
UNIT = StageTimes(1, 1, 1)


def _who(members: Sequence[int], place: int) -> str:
    """A rank of a group, in words."""
    if list(members) == list(range(len(members))):
        return f"rank {place}"
    listed = ", ".join(map(str, members))
    return f"in the group of ranks {listed}, the rank with number {place}"


def _check_types(orders: dict[int, Any], case: str) -> None:
    for rank, actions in orders.items():
        right = isinstance(actions, list) and all(isinstance(one, Action) for one in actions)
        assert right, case + (
            f"rank {rank} has {str(actions)[:40]}: give a list of Action(kind, stage, microbatch)"
        )


def _check_once(orders: Actions, m: int, case: str) -> None:
    """Each rank has F and B of each micro-batch, once, of its own stage."""
    for rank, actions in orders.items():
        for action in actions:
            assert action.stage == rank, case + (
                f"rank {rank} has {action}, an action of stage {action.stage}: each rank runs "
                "the stage with its own number"
            )
            assert action.kind in ("F", "B"), case + (
                f"rank {rank} has {action}: the kinds here are F and B"
            )
        for kind, name in (("F", "forward"), ("B", "backward")):
            found = Counter(action.microbatch for action in actions if action.kind == kind)
            for number in range(m):
                assert found[number], case + (
                    f"rank {rank} has no {name} of micro-batch {number}: each micro-batch has "
                    "one, and they count from 0"
                )
            for number, times in found.items():
                assert number < m, case + (
                    f"rank {rank} has the {name} of micro-batch {number}, and the last one is "
                    f"micro-batch {m - 1}"
                )
                assert times == 1, case + (
                    f"rank {rank} has the {name} of micro-batch {number} {times} times"
                )


def _simulated(orders: Actions, p: int, m: int, case: str) -> Timeline:
    """The time line in units of a forward; a schedule that would hang is said to."""
    try:
        check_schedule(orders, p, m)
    except ValueError as error:
        raise AssertionError(case + str(error)) from None
    return simulate(orders, UNIT)


# ---- 12.1


def gpipe(order: Callable[[int, int], list[Action]]) -> None:
    """The learner's GPipe.

    Args:
        order: `order(rank, m)`: the actions of one rank.
    """
    for p, m in ((2, 3), (4, 5), (3, 1)):
        case = f"p={p}, m={m}: "
        with without(schedule):
            orders = {rank: due(order(rank, m)) for rank in range(p)}
        _check_types(orders, case)
        _check_once(orders, m, case)
        for rank, actions in orders.items():
            for place, action in enumerate(actions[:m]):
                assert action.kind == "F", case + (
                    f"rank {rank}, place {place}: {action} comes before the last forward; "
                    "GPipe does all forwards first"
                )
        found = _simulated(orders, p, m, case).total_s
        best = simulate(schedule("gpipe", p, m), UNIT).total_s
        assert found <= best, case + (
            f"it takes {found:.0f} units where GPipe takes {best:.0f}: do all ranks take the "
            "micro-batches in the same order?"
        )


# ---- 12.2


OLD_GRADIENT = 0.25  # all there is in `.grad` before a step that is not the first


@dataclass(frozen=True)
class _Case:
    """A step of the learner's runner.

    Args:
        name: Of the schedule, for `_orders`.
        m: Micro-batches.
        has_gradients: The parameters have gradients already, as after a step without `zero_grad`.
    """

    name: str
    m: int
    has_gradients: bool = False

    @property
    def text(self) -> str:
        """For the start of a hint."""
        again = ", a second step without zero_grad" if self.has_gradients else ""
        return f"{self.name}, m={self.m}{again}: "


RUNNER_CASES = (
    _Case("gpipe", 1),
    _Case("gpipe", 4),
    _Case("gpipe, back to front", 4),
    _Case("1f1b", 6),
    _Case("gpipe", 3, has_gradients=True),
)


class _WatchedStage(l12_paced_pipeline.Stage):
    """A stage that keeps what goes into it.

    Args:
        number: Of the stage.
        num_microbatches: How often it may be called.
    """

    def __init__(self, number: int, num_microbatches: int) -> None:
        super().__init__(number)
        self.number = number
        self.num_microbatches = num_microbatches
        self.seen: list[Tensor] = []
        self.went_back: list[int] = []  # numbers of the calls, in the order of their backwards
        self.overwritten: list[int] = []  # calls whose input was another one at their backward

    def forward(self, x: Tensor | None, inputs: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor), f"the stage was called with {type(x).__name__}, not a tensor"
        often = "once" if self.num_microbatches == 1 else f"{self.num_microbatches} times"
        assert len(self.seen) < self.num_microbatches, (
            f"the stage was called more than {often}: one F is one call, and B needs none"
        )
        self.seen.append(x.detach().clone())
        if self.number > 0:
            assert x.requires_grad, (
                "the input of this stage does not require a gradient, so backward will have "
                "nothing for the rank before"
            )
        y = super().forward(x, inputs)
        assert y.requires_grad, (
            "the stage ran without autograd: its output has no graph that B could go back through"
        )
        call = len(self.seen) - 1

        def note(_: Tensor) -> None:
            self.went_back.append(call)
            if not torch.equal(x.detach(), self.seen[call]):
                self.overwritten.append(call)

        y.register_hook(note)
        return y


class _Messages(CollectiveSpy):
    """How many messages this rank sends, and which collectives it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.num_sent = 0
        self.collectives: list[str] = []

    def on_collective(self, call: Collective, start: Callable[[], Any]) -> Any:
        if call.name == "send":
            self.num_sent += 1
        elif call.name != "recv":
            self.collectives.append(call.name)
        return start()


NOT_WAITED_FOR = {
    "send": "a send was dropped before it had left: keep the handle that isend gives, and wait for "
    "it at the end",
    "recv": "nobody waited for a receive: until its wait() has returned, the message is not in the "
    "tensor",
}


@dataclass
class _Handles:
    """Which messages nobody waits for.

    Args:
        open: How many handles of each kind exist that nobody has waited for.
        dropped: Kinds of those that are gone, "send" or "recv".
        works: The true handles, kept so that no message is lost while a step runs.
    """

    open: Counter[str] = field(default_factory=Counter)
    dropped: list[str] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)

    def check(self) -> None:
        """Nothing was dropped so far."""
        assert not self.dropped, NOT_WAITED_FOR[self.dropped[0]]

    def check_all(self) -> None:
        """At the end of a step: all have been waited for."""
        self.check()
        for kind, number in self.open.items():
            assert number == 0, NOT_WAITED_FOR[kind]


class _Handle:
    """Stands for the handle of a message, and notes when it goes before anybody has waited.

    Args:
        work: The handle.
        kind: "send" or "recv".
        handles: Where to note it.
    """

    def __init__(self, work: Any, kind: str, handles: _Handles) -> None:
        self._work = work
        self._kind = kind
        self._handles = handles
        self._is_open = True
        handles.open[kind] += 1
        handles.works.append(work)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        # gloo would wait for a second end of the message, which never comes
        assert self._is_open, (
            f"the handle of a {self._kind} was waited for twice: its message ends once, and the "
            "second wait() does not return"
        )
        result = self._work.wait(*args, **kwargs)
        self._close()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __del__(self) -> None:
        if self._is_open:
            self._close()
            self._handles.dropped.append(self._kind)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._handles.open[self._kind] -= 1


@contextlib.contextmanager
def _watched_messages(like: Tensor, num_sends: int, group: dist.ProcessGroup) -> Iterator[_Handles]:
    """See that each message has its size, goes through its group, and is waited for.

    gloo ends the process that receives into a tensor of another size.

    Args:
        like: What every message looks like.
        num_sends: How many this rank may send.
        group: Through which all of them go.
    """
    handles = _Handles()
    num_sent = 0
    send = dist.ProcessGroup.send
    recv = dist.ProcessGroup.recv

    def check_group(used: Any) -> None:
        # the same words for a send and for a receive: chance says which rank comes to one first
        assert used.group_name == group.group_name, (
            "a message does not go through `group`: it is found only in the group in which it was "
            "sent"
        )

    def watched_send(used: Any, tensors: list[Tensor], *args: Any) -> _Handle:
        nonlocal num_sent
        handles.check()
        check_group(used)
        num_sent += 1
        assert num_sent <= num_sends, (
            f"it sends more messages than the {num_sends} that it has to: each F and each B has "
            "at most one"
        )
        found = tensors[0]
        assert _is_like(found, like), (
            f"it sends {_kind_of(found)}, and the receiver expects {_kind_of(like)}"
        )
        return _Handle(send(used, tensors, *args), "send", handles)

    def watched_recv(used: Any, tensors: list[Tensor], *args: Any) -> _Handle:
        handles.check()
        check_group(used)
        found = tensors[0]
        assert _is_like(found, like), (
            f"the buffer of a receive is {_kind_of(found)}, and the message {_kind_of(like)}: "
            "torch.empty_like makes a tensor like another one"
        )
        return _Handle(recv(used, tensors, *args), "recv", handles)

    with (
        mock.patch.object(dist.ProcessGroup, "send", watched_send),
        mock.patch.object(dist.ProcessGroup, "recv", watched_recv),
    ):
        yield handles


def _is_like(found: Tensor, like: Tensor) -> bool:
    return found.dtype == like.dtype and found.numel() == like.numel()


def _kind_of(tensor: Tensor) -> str:
    """ "float64 [4, 16]"."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)}"


@dataclass(frozen=True)
class _Ran:
    """What a runner left on one rank.

    Args:
        seen: Inputs of the stage, in the order of its calls.
        went_back: Numbers of these calls, in the order in which backward went through them.
        overwritten: Those whose input had changed by then.
        gradients: Of the stage's parameters in one row; None if one has none.
        num_sent: Messages.
        changed: The first micro-batch whose inputs or targets are not what they were.
        asked_for: The first micro-batch whose inputs require a gradient now.
    """

    seen: list[Tensor]
    went_back: list[int]
    overwritten: list[int]
    gradients: Tensor | None
    num_sent: int
    changed: int | None
    asked_for: int | None


def _orders(name: str, p: int, m: int) -> Actions:
    """A schedule; "gpipe, back to front" is the one that the GPipe paper draws."""
    if name != "gpipe, back to front":
        return schedule(name, p, m)
    orders = {}
    for rank, order in schedule("gpipe", p, m).items():
        orders[rank] = order[:m] + order[: m - 1 : -1]
    return orders


def _data(members: Sequence[int], m: int) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets of m micro-batches, others for each group."""
    generator = torch.Generator().manual_seed(100 * sum(members) + 10 * len(members) + m)
    size = (2, m, l12_paced_pipeline.BATCH, l12_paced_pipeline.WIDTH)
    inputs, targets = torch.randn(size, dtype=torch.float64, generator=generator)
    return list(inputs), list(targets)


@contextlib.contextmanager
def _without_the_library() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError(
            "labcode's Pipeline runs schedules already: write the sends and receives yourself"
        )

    with mock.patch.object(Pipeline, "step", refuse):
        yield


def _run_once(group: dist.ProcessGroup, run_actions: Callable[..., Any], case: _Case) -> _Ran:
    """One step of the learner's runner on this rank of a group."""
    name = case.name
    m = case.m
    place = group.rank()
    p = group.size()
    members = dist.get_process_group_ranks(group)
    stage = _WatchedStage(place, m)
    if case.has_gradients:
        for param in stage.parameters():
            param.grad = torch.full_like(param, OLD_GRADIENT)
    inputs, targets = _data(members, m)
    watched = _watched_messages(inputs[0], _num_sends(place, p, m), group)
    with _without_the_library(), watched as handles, _Messages() as messages:
        run_actions(_orders(name, p, m)[place], stage, F.mse_loss, inputs, targets, group)
        handles.check_all()
    assert not messages.collectives, (
        f"{messages.collectives[0]} talks to all ranks: a pipeline needs only messages between "
        "neighbours"
    )
    changed = None
    for number, (old, new) in enumerate(zip(zip(*_data(members, m)), zip(inputs, targets))):
        same = torch.equal(old[0], new[0]) and torch.equal(old[1], new[1])
        if changed is None and not same:
            changed = number
    asked_for = None
    for number, one in enumerate(inputs):
        if asked_for is None and one.requires_grad:
            asked_for = number
    grads = None
    if all(param.grad is not None for param in stage.parameters()):
        grads = stage.gradient()
    return _Ran(
        stage.seen,
        stage.went_back,
        stage.overwritten,
        grads,
        messages.num_sent,
        changed,
        asked_for,
    )


def _import_all(rank: int) -> None:
    """Let this rank import what it needs, and make its groups, in time that is not the learner's.

    An import that is broken off in its middle leaves half a module, and no call works any more.
    """
    for shape in SHAPES:
        Grid.create(shape)
    with _Messages():
        torch.ones(1).add_(1)


def _run_in_groups(
    rank: int, run_actions: Callable[..., Any], case: _Case, shape: GridShape
) -> _Ran:
    """On this rank, in its pipeline of a grid."""
    return _run_once(Grid.create(shape).group("pp"), run_actions, case)


def runner(run_actions: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's runner, with three schedules, on all ranks and in two groups of two.

    In the end it is run as in a second step without `zero_grad`.

    Args:
        run_actions: `run_actions(actions, stage, loss, inputs, targets, group)`.
        ranks: Where it runs.
    """
    ranks.run(_import_all, limit_s=IMPORT_LIMIT_S)
    for case in RUNNER_CASES:
        for shape in SHAPES:
            try:
                of_ranks = ranks.run(_run_in_groups, run_actions, case, shape, limit_s=LIMIT_S)
            except RankError as error:
                hint = _lost_message(error, case.name, shape)
                if not hint:
                    raise
                raise AssertionError(f"{case.text}{hint} {_last_calls(ranks)}") from None
            try:
                for members in shape.groups("pp"):
                    runs = [of_ranks[member] for member in members]
                    _check_runs(runs, members, case)
            except AssertionError:
                # what was sent in vain is not to reach the next answer
                ranks.leave_group()
                raise


def _num_sends(place: int, p: int, m: int) -> int:
    """How many messages one rank of a pipeline sends."""
    neighbours = 2
    if place == 0 or place == p - 1:
        neighbours = 1
    return m * neighbours


def _lost_message(error: RankError, name: str, shape: GridShape) -> str:
    """Why messages did not meet, if that is what happened; "" if it is another error."""
    if "AssertionError" in str(error):
        return ""
    if shape.dp > 1:
        # Which rank fails first, and with what, is chance: a message to a rank that the group does
        # not have raises on one rank, and on another one waits for an answer.
        return (
            "in two groups of two, messages go to the wrong rank; on all four it worked: is every "
            "rank counted within the group?"
        )
    if isinstance(error, LateError):
        return (
            f"after {LIMIT_S:g} s the ranks were still at work: does every send have its receive, "
            "and does each loop come to its end?"
        )
    signs = ("imed out", "wait timeout", "gloo", "onnection", "NCCL")
    is_lost = isinstance(error, HangError) or any(sign in str(error) for sign in signs)
    if not is_lost:
        return ""
    if name == "1f1b":
        return (
            "the ranks wait for each other; with GPipe it worked: does a rank that sends stand "
            "still until its neighbour takes the message?"
        )
    return (
        "messages do not meet: does every send have its receive, and do the first and the last "
        "rank leave out what they have no neighbour for?"
    )


def _last_calls(ranks: Ranks) -> str:
    """What each rank has called last, in words."""
    words = []
    for rank, call in enumerate(ranks.last_collectives()):
        if call is not None:
            without_shape = re.sub(r" of \w+ \[[^]]*\]", "", str(call))
            words.append(f"rank {rank}: {without_shape}")
    if not words:
        return ""
    return f"(last calls: {'; '.join(words)})"


def _check_runs(runs: Sequence[_Ran], members: Sequence[int], of_case: _Case) -> None:
    """All ranks of one group, in the order in which a mistake would spread."""
    name = of_case.name
    m = of_case.m
    case = of_case.text
    p = len(members)
    inputs, targets = _data(members, m)
    stages = [l12_paced_pipeline.Stage(number) for number in range(p)]
    values = inputs
    for place, ran in enumerate(runs):
        who = _who(members, place)
        assert ran.changed is None, case + (
            f"{who} has changed inputs[{ran.changed}] or targets[{ran.changed}]: receive into a "
            "new tensor, with torch.empty_like"
        )
        assert ran.asked_for is None, case + (
            f"after the step inputs[{ran.asked_for}] requires a gradient on {who}: data needs "
            "none, and the tensor belongs to the caller"
        )
        forwards = [one for one in _orders(name, p, m)[place] if one.kind == "F"]
        _check_seen(ran.seen, values, forwards, inputs, place, case + who)
        with torch.no_grad():
            values = [stages[place](value) for value in values]
    for place in reversed(range(p)):
        who = _who(members, place)
        order = _orders(name, p, m)[place]
        _check_order(runs[place].went_back, order, case + who)
        for call in runs[place].overwritten:
            number = [action.microbatch for action in order if action.kind == "F"][call]
            raise AssertionError(
                f"{case}{who}, at the B of micro-batch {number}: x is no longer what its F was "
                "given: a later message was received into the same tensor"
            )
        found = runs[place].gradients
        if of_case.has_gradients:
            found = _without_old(found, stages, place, inputs, targets, case + who)
        _check_gradients(found, stages, place, inputs, targets, case + who)
    for place, ran in enumerate(runs):
        wanted = _num_sends(place, p, m)
        assert ran.num_sent == wanted, case + (
            f"{_who(members, place)} sent {ran.num_sent} messages where {wanted} are needed"
        )


def _check_seen(
    seen: Sequence[Tensor],
    values: Sequence[Tensor],
    forwards: Sequence[Action],
    inputs: Sequence[Tensor],
    place: int,
    who: str,
) -> None:
    """Whether a stage was given what the stage before made."""
    assert len(seen) == len(forwards), (
        f"{who} ran its stage {len(seen)} times, and its list has {len(forwards)} forwards"
    )
    for action, found in zip(forwards, seen):
        number = action.microbatch
        text = f"{who}, at {action}: "
        if found.shape == values[number].shape and torch.equal(found, values[number]):
            continue
        assert place > 0, text + f"the input of its stage is not inputs[{number}]"
        assert not torch.equal(found, inputs[number]), text + (
            "its stage works on the inputs of the batch; it needs what the rank before has sent"
        )
        for other, value in enumerate(values):
            assert not torch.equal(found, value), text + (
                f"it got what belongs to micro-batch {other}: do both neighbours go by the "
                "numbers in their lists?"
            )
        raise AssertionError(text + "the input of its stage is not what the rank before computed")


def _check_order(went_back: Sequence[int], order: Sequence[Action], who: str) -> None:
    """Whether each B went through the graph of its own micro-batch."""
    forwards = [action.microbatch for action in order if action.kind == "F"]
    backwards = [action for action in order if action.kind == "B"]
    for call, action in zip(went_back, backwards):
        assert forwards[call] == action.microbatch, (
            f"{who}, at {action}: backward went through micro-batch {forwards[call]}; the number "
            "in the list says which one's turn it is"
        )


def _true_parts(
    stages: Sequence[nn.Module], place: int, inputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> list[Tensor]:
    """What each micro-batch adds to the gradients of one stage, by one process."""
    parts = []
    for x, y in zip(inputs, targets):
        loss = F.mse_loss(nn.Sequential(*stages)(x), y) / len(inputs)
        grads = torch.autograd.grad(loss, list(stages[place].parameters()))
        parts.append(torch.cat([grad.flatten() for grad in grads]))
    return parts


def _without_old(
    found: Tensor | None,
    stages: Sequence[nn.Module],
    place: int,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    who: str,
) -> Tensor | None:
    """What a step has added to gradients that were there before it."""
    assert found is not None, f"{who} has no gradients after the step, and before it had some"
    expected = torch.stack(_true_parts(stages, place, inputs, targets)).sum(0)
    # The step alone was right in the cases before, so the rest is what has become of the old ones.
    rest = found - expected
    times = float(rest.mean()) / OLD_GRADIENT
    is_old = bool((rest - times * OLD_GRADIENT).norm() < 1e-9 * found.norm())
    if is_old and abs(times - 1) > 1e-9:
        became = "is gone" if abs(times) < 1e-9 else f"is {times:.4g} times as large"
        raise AssertionError(
            f"{who} had gradients before the step, and what stood in .grad {became}: a step adds "
            "its own to them, and they may not change otherwise"
        )
    return found - OLD_GRADIENT


def _check_gradients(
    found: Tensor | None,
    stages: Sequence[nn.Module],
    place: int,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    who: str,
) -> None:
    """Whether the gradients of one stage are those of one process."""
    assert found is not None, f"{who} has no gradients: does its B call backward?"
    parts = _true_parts(stages, place, inputs, targets)
    expected = torch.stack(parts).sum(0)

    def is_close(other: Tensor) -> bool:
        return bool((found - other).norm() < 1e-9 * expected.norm())

    if is_close(expected):
        return
    m = len(parts)
    times = float((found * expected).sum() / (expected * expected).sum())
    assert abs(times) < 1e-6 or not is_close(times * expected), (
        f"{who} has gradients {times:.4g} times as large as they should be: the loss of the step "
        "is the mean over the micro-batches"
    )
    for number, part in enumerate(parts):
        assert not (is_close(part) or is_close(m * part)), (
            f"{who} has only the gradient of micro-batch {number}: those of all micro-batches "
            "are added"
        )
    if place == len(stages) - 1:
        raise AssertionError(
            f"{who} is the last one, and its gradients are wrong: does each B take the loss of "
            "its own micro-batch?"
        )
    raise AssertionError(
        f"{who} has wrong gradients, and the rank behind it has the right ones: which tensor does "
        "that one send back, and which output is it the gradient of here?"
    )


# ---- 12.3


ORDERS_LIMIT_S = 5.0  # a list that grows for ever would fill the memory of the machine
PIPELINES = ((2, 3), (4, 8), (3, 5), (4, 2))  # p, m


def _orders_on_rank_0(rank: int, order: Callable[[int, int, int], Any]) -> dict:
    """What the learner's function gives for each pipeline, as {(p, m): {rank: its order}}."""
    found = {}
    for p, m in PIPELINES:
        if rank == 0:
            with without(schedule):
                found[p, m] = {number: order(number, p, m) for number in range(p)}
    return found


def one_f_one_b(order: Callable[[int, int, int], list[Action]], ranks: Ranks) -> None:
    """The learner's 1F1B, checked as data first, and then run.

    Args:
        order: `order(rank, p, m)`: the actions of one rank.
        ranks: Where it runs.
    """
    # on a rank, so that a loop without an end is stopped
    found = ranks.run(_orders_on_rank_0, order, limit_s=ORDERS_LIMIT_S)[0]
    for (p, m), orders in found.items():
        case = f"p={p}, m={m}: "
        due(*orders.values())
        _check_types(orders, case)
        _check_once(orders, m, case)
        _check_micro_batches(orders, case)
        line = _simulated(orders, p, m, case)
        _check_memory(orders, line, p, m, case)
        _check_actions(orders, p, m, case)
    p = ranks.n
    m = 8
    orders = found[p, m]
    runs = ranks.run(l12_paced_pipeline.run_schedule, orders, p, m, limit_s=LIMIT_S)
    off = l12_paced_pipeline.difference(runs, p, m)
    assert off < 1e-12, f"the gradients differ from one process by {off:.0e}"


def _check_micro_batches(orders: Actions, case: str) -> None:
    """Forwards and backwards each go through the micro-batches from 0 up."""
    for rank, actions in orders.items():
        for kind, name in (("F", "forwards"), ("B", "backwards")):
            numbers = [action.microbatch for action in actions if action.kind == kind]
            assert numbers == sorted(numbers), case + (
                f"rank {rank} has its {name} in the order {', '.join(map(str, numbers))}: "
                "the first micro-batch that came is the first that goes back"
            )


def _check_memory(orders: Actions, line: Timeline, p: int, m: int, case: str) -> None:
    for rank in range(p):
        kept = line.peak_microbatches(rank)
        needed = peak_microbatches("1f1b", p, m, rank=rank)
        enough = "1 is" if needed == 1 else f"{needed} are"
        cause = "after the warm-up each forward is followed by a backward"
        if _forwards_first(orders[rank]) > min(p - rank, m):
            cause = "its warm-up is too long"
        assert kept <= needed, case + (
            f"rank {rank} keeps {kept} micro-batches at once, {enough} enough: {cause}"
        )


def _forwards_first(actions: Sequence[Action]) -> int:
    """How many forwards a rank does before its first backward."""
    kinds = [action.kind for action in actions]
    return kinds.index("B")


def _check_actions(orders: Actions, p: int, m: int, case: str) -> None:
    """Action by action."""
    for rank, expected in schedule("1f1b", p, m).items():
        for place, (found, wanted) in enumerate(zip(orders[rank], expected)):
            if found == wanted:
                continue
            before = [one.kind for one in orders[rank][:place]]
            if "B" not in before:
                number = before.count("F")
                counted = "1 forward" if number == 1 else f"{number} forwards"
                raise AssertionError(
                    case + f"rank {rank} has {counted} before its first backward: how many ranks "
                    "are behind it?"
                )
            raise AssertionError(
                case + f"rank {rank}, place {place}: {found} comes too early: which of F and B "
                "did the rank do last?"
            )


# ---- 12.4


def split(linear: Any) -> None:
    """The learner's linear layer whose backward leaves the weight's half for later.

    Args:
        linear: An autograd Function: `linear.apply(x, weight, later)`.
    """
    apply = getattr(linear, "apply", linear)
    generator = torch.Generator().manual_seed(2)
    weight = nn.Parameter(torch.randn(3, 7, dtype=torch.float64, generator=generator))
    # Both forwards come before the first backward, each with a list of its own.
    micro_batches = []
    for leading in ((2, 5), (4,)):
        x = torch.randn(*leading, 7, dtype=torch.float64, generator=generator, requires_grad=True)
        micro_batches.append(_forward(apply, x, weight))
    for micro_batch in micro_batches:
        x = micro_batch.x
        grad = torch.randn(*x.shape[:-1], 3, dtype=torch.float64, generator=generator)
        micro_batch.expected = grad.flatten(0, -2).T @ x.detach().flatten(0, -2)
        _check_input_half(micro_batch, weight, grad)
    first, second = micro_batches
    found = _weight_half(weight, first.later)
    assert torch.allclose(found, first.expected), (
        "dA has the right shape and the wrong values, for x [2, 5, 7]: it is the sum over all "
        "samples and tokens"
    )
    both = _weight_half(weight, second.later)
    assert not torch.allclose(both, first.expected), (
        "the second micro-batch has left weight.grad as it was: both are added"
    )
    assert not torch.allclose(both, second.expected), (
        "the second micro-batch has replaced the gradient of the first one: both are added"
    )
    assert torch.allclose(both, first.expected + second.expected), (
        "the first micro-batch, with x [2, 5, 7], adds the right dA, and the second one, with x "
        "[4, 7], does not: x may have any number of leading dims"
    )


@dataclass
class _MicroBatch:
    """One that has gone forward.

    Args:
        x: Its input.
        y: Its output.
        later: The list that it was given.
        expected: Its dA.
    """

    x: Tensor
    y: Tensor
    later: list[Callable[[], Any]]
    expected: Tensor = field(default_factory=lambda: torch.empty(0))


def _forward(apply: Callable[..., Any], x: Tensor, weight: nn.Parameter) -> _MicroBatch:
    later: list[Callable[[], Any]] = []
    y = due(apply(x, weight, later))
    wanted = x.detach() @ weight.detach().T
    assert y.shape == wanted.shape, (
        f"forward gives {list(y.shape)} for x {list(x.shape)} and A {list(weight.shape)}, "
        f"not {list(wanted.shape)}"
    )
    assert torch.allclose(y, wanted), "forward has the right shape, but it is not x times A^T"
    assert not later, "`later` has an entry right after forward: it is backward that appends one"
    return _MicroBatch(x, y, later)


@torch.no_grad()
def _weight_half(weight: nn.Parameter, later: list[Callable[[], Any]]) -> Tensor:
    """The gradient of the weight after one call of what stands in `later`."""
    assert callable(later[0]), (
        f"`later` holds a {type(later[0]).__name__}: put a function there that computes "
        "the gradient when it is called"
    )
    is_first = weight.grad is None
    try:
        later[0]()
    except TypeError as error:
        assert not (is_first and "NoneType" in str(error)), (
            "the first W finds None in weight.grad, and nothing can be added to None"
        )
        raise
    except RuntimeError as error:
        assert "saved tensors after they have already been freed" not in str(error), (
            "what stands in `later` asks ctx for the saved tensors, and when it is called they are "
            "freed: ctx gives them only while backward runs"
        )
        raise
    assert weight.grad is not None, (
        "the function in `later` was called, and weight.grad is still None"
    )
    return weight.grad.clone()


def _check_input_half(micro_batch: _MicroBatch, weight: nn.Parameter, grad: Tensor) -> None:
    """The half that is needed at once."""
    x = micro_batch.x
    later = micro_batch.later
    counter = FlopCounterMode(display=False)
    handed = grad.clone()
    with counter:
        micro_batch.y.backward(handed)
    assert x.grad is not None, "x has no gradient: the first thing that backward returns is dx"
    expected = grad @ weight.detach()
    assert torch.allclose(x.grad, expected), (
        f"dx has the right shape and the wrong values, for x {list(x.shape)}"
    )
    assert torch.equal(handed, grad), (
        "backward has changed the gradient that it was given: it is the caller's, and W needs it "
        "as it was"
    )
    assert weight.grad is None, (
        "weight.grad is there right after backward: this half has to wait in `later`"
    )
    assert later, (
        "`later` is empty after backward: the function has to stand in the list that this forward "
        "was given, or nobody would ever compute dA"
    )
    assert len(later) == 1, f"`later` has {len(later)} entries after one backward, not 1"
    one_product = 2 * grad.numel() * x.shape[-1]
    assert counter.get_total_flops() <= one_product, (
        "backward multiplies twice: the product for dA is to be computed when the function in "
        "`later` is called, not before"
    )


# ---- 12.5

CANDIDATES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1))


@dataclass(frozen=True)
class _Situation:
    """What a schedule is chosen for."""

    about: str
    p: int
    m: int
    stage_s: StageTimes
    message_s: float
    most: float

    @property
    def text(self) -> str:
        """For the start of a hint."""
        return f"{self.about} (p={self.p}, m={self.m}, most={self.most:g}): "


_EVEN = StageTimes(0.010, 0.010, 0.010)
CASES = (
    _Situation("little memory", 4, 8, _EVEN, 0.0, 4),
    _Situation("more memory, a fast link", 4, 8, _EVEN, 0.0, 6),
    _Situation("more memory, a slow link", 4, 8, _EVEN, 0.008, 6),
    _Situation("m is no multiple of p", 4, 6, _EVEN, 0.0, 8),
    _Situation("a short W", 4, 8, StageTimes(0.010, 0.019, 0.001), 0.002, 6),
    _Situation("a long I", 4, 8, StageTimes(0.010, 0.020, 0.008), 0.002, 6),
    _Situation("eight ranks", 8, 16, StageTimes(0.010, 0.012, 0.008), 0.0005, 9.6),
    _Situation("eight ranks, more memory", 8, 16, StageTimes(0.010, 0.012, 0.008), 0.0005, 12),
)


# What Python says of a loop that has kept no candidate.
NOTHING_FOUND = "NoneType|empty|index out of range"
ONE_FITS = "At least one candidate fits each time; `at most` includes the limit itself"


def _outcome(case: _Situation, name: str, v: int) -> tuple[float, float] | None:
    """(seconds of a step, micro-batches kept by the fullest rank); None if it is impossible."""
    if name == "interleaved" and case.m % case.p:
        return None
    actions = schedule(name, case.p * v, case.m, case.p)
    line = simulate(actions, part_of(case.stage_s, v), message_s=case.message_s)
    return line.total_s, line.peak_microbatches() / v


def choose(answer: Callable[..., Any]) -> None:
    """The learner's choice of a schedule, in several cases.

    Args:
        answer: `answer(p, m, stage_s, message_s, most)`: (name, v).
    """
    for case in CASES:
        try:
            found = answer(case.p, case.m, case.stage_s, case.message_s, case.most)
        except (TypeError, ValueError, IndexError) as error:
            if not re.search(NOTHING_FOUND, str(error)):
                raise
            place = tracebacks.place_in_cells(error)
            raise AssertionError(f"{case.text}no candidate was left{place}. {ONE_FITS}") from None
        assert found is not None, f"{case.text}it returned None: is there a `return`? {ONE_FITS}"
        _check_choice(due(found), case)


def _check_choice(found: Any, case: _Situation) -> None:
    text = case.text
    is_pair = isinstance(found, (tuple, list)) and len(found) == 2
    assert is_pair and tuple(found) in CANDIDATES, text + (
        f"{str(found)[:40]} is none of the candidates: return (name, v)"
    )
    name, v = found
    outcome = _outcome(case, name, v)
    assert outcome is not None, text + f"{name} is not possible with this m"
    total_s, kept = outcome
    assert kept <= case.most, text + (
        f"{name} with v={v} keeps {kept:g} micro-batches, and there is room for {case.most:g}"
    )
    best_s = total_s
    for candidate in CANDIDATES:
        other = _outcome(case, *candidate)
        if other is not None and other[1] <= case.most:
            best_s = min(best_s, other[0])
    assert total_s <= best_s * (1 + 1e-9), text + (
        f"{name} with v={v} takes {1e3 * total_s:.1f} ms, and another candidate that fits takes "
        f"{1e3 * best_s:.1f} ms"
    )
