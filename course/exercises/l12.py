"""Checks of lesson 12, pipeline parallelism."""

import re
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from course import tracebacks
from course.answer import RETURNED_NONE, Exercise, Hint, due
from course.exercises.expect import (
    TOLERANCE,
    confirm,
    diagnose,
    distance,
    own_answers,
    plural,
    refuse,
    run,
    settle,
    tensor,
    times,
    waited_twice,
)
from course.exercises.simulated import Event, Outcome, here, simulate
from course.labs import l12_paced_pipeline
from course.labs.l12_paced_pipeline import Stage, part_of
from course.pool.ranks import Ranks
from labcode.comm.grid import Grid
from labcode.parallel.pipeline import Pipeline
from labcode.perf.pipeline import StageTimes, Timeline, peak_microbatches
from labcode.perf.pipeline import simulate as timeline
from labcode.runtime.units import ranks_text, type_in_words
from labcode.schedules import Action, Actions, check_schedule, schedule
from labcode.topology import GridShape

# ---- orders, for 12.1 and 12.3

KINDS = {"F": "forward", "B": "backward"}
UNIT = StageTimes(1, 1, 1)
OUR_SCHEDULE = own_answers(schedule)


def _check_orders(case: str, orders: Actions, m: int) -> None:
    """Each rank has F and B of each micro-batch once, and of its own stage."""
    due(*orders.values())
    for rank, actions in orders.items():
        _check_list_of_actions(f"{case}rank {rank} has ", actions)
        for action in actions:
            mistakes = {
                f"rank {rank} has {action}, an action of stage {action.stage}: each rank runs the "
                "stage with its own number": action.stage != rank,
                f"rank {rank} has {action}: the kinds here are F and B": action.kind not in KINDS,
            }
            refuse(mistakes, case)
        for kind, name in KINDS.items():
            _check_each_once(f"{case}rank {rank} has ", name, _microbatches(actions, kind), m)


def _check_list_of_actions(case: str, actions: Any) -> None:
    """What one rank was given, or the first of its entries that is no action."""
    what = "give a list of Action(kind, stage, microbatch)"
    if not isinstance(actions, list):
        raise Hint(f"{case}{type_in_words(actions)}: {what}")
    others = [one for one in actions if not isinstance(one, Action)]
    if others:
        raise Hint(f"{case}the entry {str(others[0])[:40]!r}, which is no Action: {what}")


def _microbatches(actions: Sequence[Action], kind: str) -> list[int]:
    """The micro-batches of the actions of one kind, in their order."""
    return [action.microbatch for action in actions if action.kind == kind]


def _check_each_once(case: str, name: str, found: Sequence[int], m: int) -> None:
    """The micro-batches are those from 0 to m - 1."""
    missing = min(set(range(m)) - set(found), default=None)
    unknown = min(set(found) - set(range(m)), default=None)
    number, count = Counter(found).most_common(1)[0] if found else (0, 0)
    mistakes = {
        f"no {name} of micro-batch {missing}: each micro-batch has one, and they count from 0": (
            missing is not None
        ),
        f"the {name} of micro-batch {unknown}, and the last one is micro-batch {m - 1}": (
            unknown is not None
        ),
        f"the {name} of micro-batch {number} {count} times": count > 1,
    }
    refuse(mistakes, case)


def _checked_timeline(case: str, orders: Actions, p: int, m: int) -> Timeline:
    """The time line in units of a forward; a schedule that would hang is said to."""
    try:
        check_schedule(orders, p, m)
    except ValueError as error:
        raise Hint(f"{case}{error}") from None
    return timeline(orders, UNIT)


# ---- 12.1


def gpipe(order: Callable[[int, int], list[Action]]) -> None:
    """The learner's `order(rank, m)`: the actions of one rank."""
    for p, m in ((2, 3), (4, 5), (3, 1)):
        case = f"p={p}, m={m}: "
        outcome = run(order, m, size=p, case=case, ours=OUR_SCHEDULE)
        orders = dict(enumerate(outcome.results))
        _check_orders(case, orders, m)
        for rank, actions in orders.items():
            for place, action in enumerate(actions[:m]):
                early = (
                    f"rank {rank}, place {place}: {action} comes before the last forward; GPipe "
                    "does all forwards first"
                )
                refuse({early: action.kind == "B"}, case)
        found = _checked_timeline(case, orders, p, m).total_s
        best = timeline(schedule("gpipe", p, m), UNIT).total_s
        slow = (
            f"it takes {found:.0f} units where GPipe takes {best:.0f}: do all ranks take the "
            "micro-batches in the same order?"
        )
        refuse({slow: found > best}, case)


# ---- 12.2

# All ranks; and two groups of two at the same time, in which a rank of the group is not the rank of
# the world.
SHAPES = (GridShape(pp=4), GridShape(dp=2, pp=2))
OLD_GRADIENT = 0.25  # all there is in `.grad` before a step that is not the first
OUR_RUNNER: dict[Callable[..., Any], str] = {
    Pipeline.step: (
        "labcode's Pipeline runs schedules already: write the sends and receives yourself"
    )
}


@dataclass(frozen=True)
class _Step:
    """A step of the learner's runner.

    Args:
        name: Name of the schedule.
        m: Micro-batches.
        has_gradients: The parameters have gradients already, as after a step without `zero_grad`.
    """

    name: str
    m: int
    has_gradients: bool = False

    @property
    def case(self) -> str:
        """For the start of a hint."""
        again = ", a second step without zero_grad" if self.has_gradients else ""
        return f"{self.name}, m={self.m}{again}: "

    def orders(self, p: int) -> Actions:
        """The schedule; "gpipe, back to front" is the one that the GPipe paper draws."""
        if self.name != "gpipe, back to front":
            return schedule(self.name, p, self.m)
        orders = {}
        for rank, order in schedule("gpipe", p, self.m).items():
            orders[rank] = order[: self.m] + order[: self.m - 1 : -1]
        return orders

    def data(self, members: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and targets of the micro-batches, others for each group."""
        seed = 100 * sum(members) + 10 * len(members) + self.m
        generator = torch.Generator().manual_seed(seed)
        size = (2, self.m, l12_paced_pipeline.BATCH, l12_paced_pipeline.WIDTH)
        inputs, targets = torch.randn(size, dtype=torch.float64, generator=generator)
        return list(inputs), list(targets)

    def num_sends(self, p: int, place: int) -> int:
        """How many messages a rank of a pipeline sends."""
        num_neighbours = 1 if place in (0, p - 1) else 2
        return self.m * num_neighbours


STEPS = (
    _Step("gpipe", 1),
    _Step("gpipe", 4),
    _Step("gpipe, back to front", 4),
    _Step("1f1b", 6),
    _Step("gpipe", 3, has_gradients=True),
)


class _WatchedStage(Stage):
    """A stage that keeps what goes into it.

    Args:
        number: Number of the stage.
        m: How often it may be called.

    Attributes:
        seen: Inputs of the stage, call by call.
        went_back: Numbers of the calls, in the order in which backward went through them.
        overwritten: Calls whose input had changed by then.
        outputs: What the calls gave, as long as the learner holds it.
    """

    def __init__(self, number: int, m: int) -> None:
        super().__init__(number)
        self.number = number
        self.m = m
        self.seen: list[Tensor] = []
        self.went_back: list[int] = []
        self.overwritten: list[int] = []
        self.outputs: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor | None, inputs: Tensor | None = None) -> Tensor:
        if not isinstance(x, Tensor):
            raise Hint(f"the stage was called with {type(x).__name__}, not a tensor")
        often = "once" if self.m == 1 else f"{self.m} times"
        mistakes = {
            f"the stage was called more than {often}: one F is one call, and B needs none": (
                len(self.seen) == self.m
            ),
            "the input of this stage does not require a gradient, so backward will have nothing "
            "for the rank before": self.number > 0 and not x.requires_grad,
            "the stage ran without autograd: its output has no graph that B could go back "
            "through": not torch.is_grad_enabled(),
        }
        refuse(mistakes)
        call = len(self.seen)
        self.seen.append(x.detach().clone())
        y = super().forward(x, inputs)
        self.outputs.append(weakref.ref(y))

        def note(_: Tensor) -> None:
            done = self.went_back[:-1]  # a variable may still hold what the latest B has used
            here().note("held", [self.outputs[other]() is not None for other in done].count(True))
            self.went_back.append(call)
            if not torch.equal(x.detach(), self.seen[call]):
                self.overwritten.append(call)

        y.register_hook(note)
        return y


class _Ran(NamedTuple):
    """What a runner left on one rank.

    Args:
        seen, went_back, overwritten: What its stage has noted.
        grads: Gradients of the stage's parameters.
        inputs, targets: The data, which it may have changed.
    """

    seen: list[Tensor]
    went_back: list[int]
    overwritten: list[int]
    grads: list[Tensor | None]
    inputs: list[Tensor]
    targets: list[Tensor]


def _run_step(rank: int, run_actions: Callable[..., Any], step: _Step, shape: GridShape) -> _Ran:
    """One step on this rank, in its pipeline of a grid."""
    group = Grid.create(shape).group("pp")
    place = group.rank()
    stage = _WatchedStage(place, step.m)
    if step.has_gradients:
        for param in stage.parameters():
            param.grad = torch.full_like(param, OLD_GRADIENT)
    inputs, targets = step.data(dist.get_process_group_ranks(group))
    actions = step.orders(group.size())[place]
    here().note("group", group.group_name)
    run_actions(actions, stage, F.mse_loss, inputs, targets, group)
    grads = [param.grad for param in stage.parameters()]
    return _Ran(stage.seen, stage.went_back, stage.overwritten, grads, inputs, targets)


def runner(run_actions: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `run_actions(actions, stage, loss, inputs, targets, group)`.

    Messages are judged first, because a wrong one ends a run in many ways; numbers last, in the
    order in which a mistake would spread.
    """
    for step in STEPS:
        for shape in SHAPES:
            outcome = simulate(4, _run_step, run_actions, step, shape, ours=OUR_RUNNER)
            pipelines = shape.groups("pp")
            for members in pipelines:
                for place, rank in enumerate(members):
                    case = f"{step.case}on {_who(members, place)}: "
                    num_sends = step.num_sends(len(members), place)
                    _check_needed_is_sent(case, outcome.of(rank), num_sends)
            _check_ends(outcome, step, shape)
            for members in pipelines:
                for place, rank in enumerate(members):
                    _check_waits(f"{step.case}on {_who(members, place)}: ", outcome.of(rank))
            for members in pipelines:
                runs = [outcome.results[rank] for rank in members]
                _check_forward(runs, members, step)
                _check_backward(runs, members, step)
                for place, rank in enumerate(members):
                    _check_freed(f"{step.case}{_who(members, place)} ", outcome.of(rank))
    return confirm(ranks, outcome, _run_step, run_actions, step, shape)


def _who(members: Sequence[int], place: int) -> str:
    """A rank of a group, in words."""
    if len(members) == 4:
        return f"rank {place}"
    return f"the rank with number {place} in the group of {ranks_text(members)}"


def _check_needed_is_sent(case: str, events: Sequence[Event], num_sends: int) -> None:
    """Its messages have the right size and go through its group, also where a run has no end."""
    like = f"float64 [{l12_paced_pipeline.BATCH}, {l12_paced_pipeline.WIDTH}]"
    numel = l12_paced_pipeline.BATCH * l12_paced_pipeline.WIDTH
    group_names = [one.value for one in events if one.kind == "group"]
    sends = [one for one in events if one.kind == "send"]
    receives = [one for one in events if one.kind == "recv"]
    others = [one.kind for one in events if one.kind not in ("group", "held", "send", "recv")]
    is_outside = any(one.group_name not in group_names for one in sends + receives)
    sent = _first_unlike(sends, numel)
    buffer = _first_unlike(receives, numel)
    mistakes = {
        "a message does not go through `group`: it is found only in the group in which it was "
        "sent": is_outside,
        f"{', '.join(others[:1])} talks to all ranks: a pipeline needs only messages between "
        "neighbours": others,
        f"it sends more messages than the {num_sends} that it has to: each F and each B has at "
        "most one": len(sends) > num_sends,
        f"it sends {sent}, and the receiver expects {like}": sent,
        f"the buffer of a receive is {buffer}, and the message {like}: torch.empty_like makes a "
        "tensor like another one": buffer,
    }
    refuse(mistakes, case)


def _first_unlike(messages: Sequence[Event], numel: int) -> str:
    """The first message that is not float64 or has another size: "float32 [4, 16]"; else ""."""
    for one in messages:
        if one.dtype != "float64" or one.numel != numel:
            return f"{one.dtype} {list(one.shape)}"
    return ""


def _check_ends(outcome: Outcome, step: _Step, shape: GridShape) -> None:
    """All ranks came to their end."""
    rank = min(outcome.errors, default=0)
    error = outcome.errors.get(rank)
    why = f"rank {rank}: {error}" if error else outcome.why()
    no_such_rank = isinstance(error, ValueError) and "rank" in str(error)
    is_stuck = bool(outcome.stuck) and not outcome.errors
    mistakes = {
        "in two groups of two, messages go to the wrong rank; on all four it worked: is every rank "
        f"counted within the group? ({why})": shape.dp > 1 and (is_stuck or no_such_rank),
        "the ranks wait for each other; with GPipe it worked: does a rank that sends stand still "
        f"until its neighbour takes the message? ({why})": is_stuck and step.name == "1f1b",
        "messages do not meet: does every send have its receive, and do the first and the last "
        f"rank leave out what they have no neighbour for? ({why})": is_stuck,
    }
    refuse(mistakes, step.case)
    settle(outcome, step.case)


def _check_waits(case: str, events: Sequence[Event]) -> None:
    """Each message was waited for, once."""
    messages = [one for one in events if one.kind in ("send", "recv")]
    lost = {one.kind for one in messages if not one.arrived}
    mistakes = {
        "a send was dropped before it had left: keep the handle that isend gives, and wait for it "
        "at the end": "send" in lost,
        "nobody waited for a receive: until its wait() has returned, the message is not in the "
        "tensor": "recv" in lost,
        **waited_twice(messages),
    }
    refuse(mistakes, case)


def _check_forward(runs: Sequence[_Ran], members: Sequence[int], step: _Step) -> None:
    """Each stage was given what the stage before made, and the data is as it was."""
    inputs, targets = step.data(members)
    values = inputs
    for place, ran in enumerate(runs):
        who = _who(members, place)
        for number, (x, y) in enumerate(zip(ran.inputs, ran.targets)):
            is_same = torch.equal(x, inputs[number]) and torch.equal(y, targets[number])
            mistakes = {
                f"{who} has changed inputs[{number}] or targets[{number}]: receive into a new "
                "tensor, with torch.empty_like": not is_same,
                f"after the step inputs[{number}] requires a gradient on {who}: data needs none, "
                "and the tensor belongs to the caller": x.requires_grad,
            }
            refuse(mistakes, step.case)
        order = step.orders(len(members))[place]
        forwards = [action for action in order if action.kind == "F"]
        few = (
            f"{who} ran its stage {len(ran.seen)} times, and its list has "
            f"{plural(len(forwards), 'forward')}"
        )
        refuse({few: len(ran.seen) < len(forwards)}, step.case)
        for action, found in zip(forwards, ran.seen):
            own = action.microbatch
            mistakes = {
                f"the input of its stage is not inputs[{own}]": place == 0,
                "its stage works on the inputs of the batch; it needs what the rank before has "
                "sent": inputs[own],
            }
            for number, value in enumerate(values):
                other = (
                    f"it got what belongs to micro-batch {number}: do both neighbours go by the "
                    "numbers in their lists?"
                )
                mistakes[other] = value
            otherwise = "the input of its stage is not what the rank before computed"
            diagnose(f"{step.case}{who}, at {action}: ", found, values[own], mistakes, otherwise)
        with torch.no_grad():
            values = [Stage(place)(value) for value in values]


def _check_backward(runs: Sequence[_Ran], members: Sequence[int], step: _Step) -> None:
    """Each B went through the graph of its own micro-batch, and the gradients are right."""
    p = len(members)
    for place in reversed(range(p)):
        who = _who(members, place)
        ran = runs[place]
        order = step.orders(p)[place]
        numbers = _microbatches(order, "F")
        backwards = [action for action in order if action.kind == "B"]
        for call, action in zip(ran.went_back, backwards):
            mistakes = {
                f"backward went through micro-batch {numbers[call]}; the number in the list says "
                "which one's turn it is": numbers[call] != action.microbatch,
                "x is no longer what its F was given: a later message was received into the same "
                "tensor": call in ran.overwritten,
            }
            refuse(mistakes, f"{step.case}{who}, at {action}: ")
        parts = _true_parts(p, place, *step.data(members))
        _check_gradients(f"{step.case}{who} ", ran, parts, step, is_last=place == p - 1)


def _check_freed(case: str, events: Sequence[Event]) -> None:
    """What an F has kept is gone once its B has used it."""
    most = max((one.value for one in events if one.kind == "held"), default=0)
    sends_graph = any(one.requires_grad for one in events if one.kind == "send")
    by_handle = (
        f"still holds the graphs of {plural(most, 'micro-batch')}, though B has used them: a "
        "tensor is sent together with its graph, and the handle of its message keeps both until "
        "the end"
    )
    hint = (
        f"still holds what the F of {plural(most, 'micro-batch')} has kept, though B has used it: "
        "then every micro-batch of the step stays in memory"
    )
    refuse({by_handle: most > 0 and sends_graph, hint: most > 0}, case)


def _true_parts(
    p: int, place: int, inputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> list[Tensor]:
    """What each micro-batch adds to the gradient of one stage, by one process."""
    stages = nn.Sequential(*[Stage(number) for number in range(p)])
    parts = []
    for x, y in zip(inputs, targets):
        loss = F.mse_loss(stages(x), y) / len(inputs)
        grads = torch.autograd.grad(loss, list(stages[place].parameters()))
        parts.append(torch.cat([grad.flatten() for grad in grads]))
    return parts


def _check_gradients(case: str, ran: _Ran, parts: list[Tensor], step: _Step, is_last: bool) -> None:
    """The gradients of a stage are those of one process, added to what there was."""
    grads = [grad.flatten() for grad in ran.grads if grad is not None]
    if len(grads) < len(ran.grads):
        raise Hint(f"{case}has no gradients: does its B call backward?")
    found = torch.cat(grads)
    truth = torch.stack(parts).sum(0)
    if step.has_gradients:
        # The step alone was right in the cases before: the rest is what became of the old ones.
        had = f"{case}had gradients before the step, and what stood in .grad "
        rule = ": a step adds its own to them, and they may not change otherwise"
        old = torch.full_like(found, OLD_GRADIENT)
        mistakes = {
            f"is gone{rule}": distance(found, truth) < TOLERANCE,
            f"is {{times:.4g}} times as large{rule}": times(old),
        }
        diagnose(had, found - truth, old, mistakes, f"has changed{rule}")
        return
    mistakes: dict[str, Any] = {
        "has gradients {times:.4g} times as large as they should be: the loss of the step is the "
        "mean over the micro-batches": times(truth),
    }
    for number, part in enumerate(parts):
        one = f"has only the gradient of micro-batch {number}: those of all micro-batches are added"
        mistakes[one] = times(part)
    otherwise = (
        "has wrong gradients, and the rank behind it has the right ones: which tensor does that "
        "one send back, and which output is it the gradient of here?"
    )
    if is_last:
        otherwise = (
            "is the last one, and its gradients are wrong: does each B take the loss of its own "
            "micro-batch?"
        )
    diagnose(case, found, truth, mistakes, otherwise)


# ---- 12.3

PIPELINES = ((2, 3), (3, 5), (4, 2), (4, 8))  # p, m; the last one is run


def one_f_one_b(order: Callable[[int, int, int], list[Action]], ranks: Ranks | None = None) -> str:
    """The learner's `order(rank, p, m)`, checked as data first, and then run."""
    for p, m in PIPELINES:
        case = f"p={p}, m={m}: "
        outcome = run(order, p, m, size=p, case=case, ours=OUR_SCHEDULE)
        orders = dict(enumerate(outcome.results))
        _check_orders(case, orders, m)
        for rank, actions in orders.items():
            for kind, name in KINDS.items():
                numbers = _microbatches(actions, kind)
                hint = (
                    f"rank {rank} has its {name}s in the order {', '.join(map(str, numbers))}: "
                    "the first micro-batch that came is the first that goes back"
                )
                refuse({hint: numbers != sorted(numbers)}, case)
        line = _checked_timeline(case, orders, p, m)
        for rank, actions in orders.items():
            _check_kept_bytes(case, rank, actions, line.peak_microbatches(rank), p, m)
        for rank, expected in schedule("1f1b", p, m).items():
            _check_expected(case, rank, orders[rank], expected)
    outcome = run(_gradients, orders, p, m)
    return confirm(ranks, outcome, _gradients, orders, p, m)


def _gradients(rank: int, orders: Actions, p: int, m: int) -> dict[int, Tensor]:
    """{stage: gradient} of one step on this rank."""
    return l12_paced_pipeline.run_schedule(rank, orders, p, m).gradients


def _check_kept_bytes(
    case: str, rank: int, actions: Sequence[Action], kept: int, p: int, m: int
) -> None:
    """It keeps as few micro-batches as 1F1B does."""
    needed = peak_microbatches("1f1b", p, m, rank=rank)
    num_forwards_first = [action.kind for action in actions].index("B")
    is_long = num_forwards_first > min(p - rank, m)
    enough = "1 is" if needed == 1 else f"{needed:g} are"
    keeps = f"rank {rank} keeps {kept:g} micro-batches at once, {enough} enough: "
    mistakes = {
        f"{keeps}its warm-up is too long": kept > needed and is_long,
        f"{keeps}after the warm-up each forward is followed by a backward": kept > needed,
    }
    refuse(mistakes, case)


def _check_expected(
    case: str, rank: int, actions: Sequence[Action], expected: Sequence[Action]
) -> None:
    """Action by action."""
    for place, (found, wanted) in enumerate(zip(actions, expected)):
        before = [action.kind for action in actions[:place]]
        mistakes = {
            f"rank {rank} has {plural(place, 'forward')} before its first backward: how many ranks "
            "are behind it?": found != wanted and "B" not in before,
            f"rank {rank}, place {place}: {found} comes too early: which of F and B did the rank "
            "do last?": found != wanted,
        }
        refuse(mistakes, case)


# ---- 12.4

OTHER_SHAPE = "must match the size|to a tensor of size|output with shape"  # of a .grad


class _MicroBatch(NamedTuple):
    """One that has gone forward.

    Args:
        x: Input of the stage.
        y: Output of the stage.
        later: The list that it was given.
        grad: What its backward is given.
    """

    x: Tensor
    y: Tensor
    later: list[Callable[[], Any]]
    grad: Tensor

    @property
    def grad_weight(self) -> Tensor:
        """What it adds to the gradient of the weight."""
        return self.grad.flatten(0, -2).T @ self.x.detach().flatten(0, -2)


def split(linear: Any) -> None:
    """The learner's `linear.apply(x, weight, later)`, whose backward leaves the weight's half."""
    apply = getattr(linear, "apply", linear)
    generator = torch.Generator().manual_seed(2)
    weight = nn.Parameter(torch.randn(3, 7, dtype=torch.float64, generator=generator))
    # Both forwards come before the first backward, each with a list of its own.
    micro_batches = []
    for leading in ((2, 5), (4,)):
        x = torch.randn(*leading, 7, dtype=torch.float64, generator=generator, requires_grad=True)
        grad = torch.randn(*leading, 3, dtype=torch.float64, generator=generator)
        micro_batches.append(_forward(apply, x, weight, grad))
    for micro_batch in micro_batches:
        _check_input_half(micro_batch, weight)
    first, second = micro_batches
    found = _weight_half(weight, first.later)
    values = (
        "dA has the right shape and the wrong values, for x [2, 5, 7]: it is the sum over all "
        "samples and tokens"
    )
    diagnose("", found, first.grad_weight, {}, values)
    both = _weight_half(weight, second.later)
    mistakes = {
        "the second micro-batch has left weight.grad as it was: both are added": first.grad_weight,
        "the second micro-batch has replaced the gradient of the first one: both are added": (
            second.grad_weight
        ),
    }
    dims = (
        "the first micro-batch, with x [2, 5, 7], adds the right dA, and the second one, with x "
        "[4, 7], does not: x may have any number of leading dims"
    )
    diagnose("", both, first.grad_weight + second.grad_weight, mistakes, dims)


def _forward(apply: Callable[..., Any], x: Tensor, weight: Tensor, grad: Tensor) -> _MicroBatch:
    later: list[Callable[[], Any]] = []
    y = due(apply(x, weight, later))
    wanted = x.detach() @ weight.detach().T
    tensor(y, wanted.shape, f"for x {list(x.shape)} and A {list(weight.shape)} forward gives")
    diagnose("", y, wanted, {}, "forward has the right shape, but it is not x times A^T")
    if later:
        raise Hint("`later` has an entry right after forward: it is backward that appends one")
    return _MicroBatch(x, y, later, grad)


def _check_input_half(micro_batch: _MicroBatch, weight: nn.Parameter) -> None:
    """The half that is needed at once."""
    x, y, later, grad = micro_batch
    handed = grad.clone()
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            y.backward(handed)
    except (TypeError, RuntimeError) as error:
        no_tensor = re.search(r"expected Variable or None \(got (\w+)\)", str(error))
        if no_tensor:
            raise Hint(
                f"backward returns a {no_tensor[1]}, and autograd takes a tensor or None for each "
                "argument: what is put off goes into `later`"
            ) from None
        raise
    if x.grad is None:
        raise Hint("x has no gradient: the first thing that backward returns is dx")
    values = f"dx has the right shape and the wrong values, for x {list(x.shape)}"
    diagnose("", x.grad, grad @ weight.detach(), {}, values)
    one_product = 2 * grad.numel() * x.shape[-1]
    mistakes = {
        "backward has changed the gradient that it was given: it is the caller's, and W needs it "
        "as it was": not torch.equal(handed, grad),
        "weight.grad is there right after backward: this half has to wait in `later`": (
            weight.grad is not None
        ),
        "`later` is empty after backward: the function has to stand in the list that this forward "
        "was given, or nobody would ever compute dA": not later,
        f"`later` has {len(later)} entries after one backward, not 1": len(later) > 1,
        "backward multiplies twice: the product for dA is to be computed when the function in "
        "`later` is called, not before": counter.get_total_flops() > one_product,
    }
    refuse(mistakes)


@torch.no_grad()
def _weight_half(weight: nn.Parameter, later: list[Callable[[], Any]]) -> Tensor:
    """The gradient of the weight after one call of what stands in `later`."""
    (function,) = later
    if not callable(function):
        raise Hint(
            f"`later` holds {type_in_words(function)}: put a function there that computes the "
            "gradient when it is called"
        )
    is_first = weight.grad is None
    try:
        function()
    except (TypeError, RuntimeError) as error:
        text = str(error)
        mistakes = {
            "the first W finds None in weight.grad, and nothing can be added to None": (
                is_first and "NoneType" in text
            ),
            "what stands in `later` asks ctx for the saved tensors, and when it is called they are "
            "freed: ctx gives them only while backward runs": (
                "saved tensors after they have already been freed" in text
            ),
            "what the function in `later` adds does not have the shape of A, "
            f"{list(weight.shape)}: which of the two factors is transposed, and what becomes of "
            "the leading dims?": (re.search(OTHER_SHAPE, text) is not None),
        }
        refuse(mistakes)
        raise
    if weight.grad is None:
        raise Hint("the function in `later` was called, and weight.grad is still None")
    return weight.grad.clone()


# ---- 12.5

CANDIDATES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1))
NOTHING_FOUND = "NoneType|empty|index out of range"  # what Python says where nothing was kept
ONE_FITS = "At least one candidate fits each time; `at most` includes the limit itself"


@dataclass(frozen=True)
class _Situation:
    """What a schedule is chosen for.

    Args:
        about: What is special about it.
        p, m, stage_s, message_s, most: The arguments that the learner's function is given.
    """

    about: str
    p: int
    m: int
    stage_s: StageTimes
    message_s: float
    most: float

    @property
    def case(self) -> str:
        """For the start of a hint."""
        return f"{self.about} (p={self.p}, m={self.m}, most={self.most:g}): "

    def played(self, name: str, v: int) -> tuple[float, float] | None:
        """(seconds of a step, micro-batches on the fullest rank); None if it is impossible."""
        if name == "interleaved" and self.m % self.p:
            return None
        actions = schedule(name, self.p * v, self.m, self.p)
        line = timeline(actions, part_of(self.stage_s, v), message_s=self.message_s)
        return line.total_s, line.peak_microbatches() / v

    def best_s(self) -> float:
        """Seconds of the fastest candidate that fits."""
        fitting = []
        for candidate in CANDIDATES:
            played = self.played(*candidate)
            if played is not None and played[1] <= self.most:
                fitting.append(played[0])
        return min(fitting)


_EVEN = StageTimes(0.010, 0.010, 0.010)
SITUATIONS = (
    _Situation("little memory", 4, 8, _EVEN, 0.0, 4),
    _Situation("more memory, a fast link", 4, 8, _EVEN, 0.0, 6),
    _Situation("more memory, a slow link", 4, 8, _EVEN, 0.008, 6),
    _Situation("m is no multiple of p", 4, 6, _EVEN, 0.0, 8),
    _Situation("a short W", 4, 8, StageTimes(0.010, 0.019, 0.001), 0.002, 6),
    _Situation("a long I", 4, 8, StageTimes(0.010, 0.020, 0.008), 0.002, 6),
    _Situation("eight ranks", 8, 16, StageTimes(0.010, 0.012, 0.008), 0.0005, 9.6),
    _Situation("eight ranks, more memory", 8, 16, StageTimes(0.010, 0.012, 0.008), 0.0005, 12),
)


def choose(answer: Callable[..., Any]) -> None:
    """The learner's `answer(p, m, stage_s, message_s, most)`: (name, v), in several situations."""
    for one in SITUATIONS:
        try:
            found = answer(one.p, one.m, one.stage_s, one.message_s, one.most)
        except (TypeError, ValueError, IndexError) as error:
            if not re.search(NOTHING_FOUND, str(error)):
                raise
            place = tracebacks.place_in_cells(error)
            raise Hint(f"{one.case}no candidate was left{place}. {ONE_FITS}") from None
        if found is None:
            raise Hint(f"{one.case}{RETURNED_NONE} {ONE_FITS}")
        _check_best(due(found), one)


def _check_best(found: Any, one: _Situation) -> None:
    """A candidate that is possible and fits, and none that does is faster."""
    is_pair = isinstance(found, (tuple, list)) and len(found) == 2
    if not is_pair or tuple(found) not in CANDIDATES:
        raise Hint(f"{one.case}{str(found)[:40]} is none of the candidates: return (name, v)")
    name, v = found
    played = one.played(name, v)
    if played is None:
        raise Hint(f"{one.case}{name} is not possible with this m")
    total_s, kept = played
    best_s = one.best_s()
    mistakes = {
        f"{name} with v={v} keeps {kept:g} micro-batches, and there is room for {one.most:g}": (
            kept > one.most
        ),
        f"{name} with v={v} takes {1e3 * total_s:.1f} ms, and another candidate that fits takes "
        f"{1e3 * best_s:.1f} ms: does your choice count every time that it was given, and a stage "
        "as 1/v of its rank, in time and in memory?": (total_s > best_s * (1 + TOLERANCE)),
    }
    refuse(mistakes, one.case)


EXERCISES = {
    "12.1": Exercise(
        check=gpipe,
        praise="all forwards, then all backwards, and every rank has its own stage",
        hints=(
            "The list of rank 2 begins with Action('F', 2, 0), and the list of rank 0 with "
            "Action('F', 0, 0).",
            "How many actions does the list of one rank have, if there are m micro-batches?",
        ),
    ),
    "12.2": Exercise(
        check=runner,
        praise="your runner gives the gradients of one process, with GPipe and with 1F1B, "
        "on all ranks and in groups of two",
        hints=(
            "Write F first, for a rank in the middle: receive x, ask for its gradient, run the "
            "stage, send y, keep both. Then ask what is different on the first and the last rank.",
            "recv writes into a tensor that you bring. Which tensor has the right shape?",
            "In B a rank in the middle receives the gradient of its y. Where does autograd leave "
            "the gradient of x, which the rank before waits for?",
            "The loss of a step is the mean over m micro-batches. Which rank can see to that?",
            "The handle of a message keeps what was sent, until the end. What hangs on y besides "
            "its numbers, and which tensor has the numbers alone?",
        ),
    ),
    "12.3": Exercise(
        check=one_f_one_b,
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
        check=split,
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
        check=choose,
        praise="the fastest schedule that fits, in each of the cases",
        hints=(
            "For each candidate: make its schedule, simulate it, look at its memory and its time.",
            "With v stages on a rank, how long does one stage take, and how much does a "
            "micro-batch leave in it?",
            "Not every candidate is possible with every m.",
        ),
    ),
}
