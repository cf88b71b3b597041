"""What a pipeline does in each tick and what it sends after it, worked out once for all steps.

A schedule says in which order each rank computes. To run it, the ranks must also agree on the order
of the messages between them. For that time is cut into ticks, in each of which every rank does one
action or none, and all that is sent between two ticks is one list that every rank can work out
alone.

Building, checking and simulating a schedule is plain Python over all actions of all ranks: about
0.2 s for 16 ranks and 512 micro-batches. A training step must not pay that, so a plan is made once
and kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from labcode.schedules.actions import Action, Actions, Message, stage_ranks
from labcode.schedules.orders import schedule
from labcode.schedules.simulation import check_complete, simulate_order


def ticks(actions: Actions, num_stages: int) -> dict[int, list[Action | None]]:
    """The schedule as a table: one action per tick, None where a rank waits; rows of one length.

    An action stands in the first tick in which its rank is free and all that it waits for was done
    in earlier ticks.

    Raises:
        ValueError: The schedule cannot run to its end.
    """
    # every action takes 1, so the times of the simulation are the numbers of the ticks
    spans = simulate_order(actions, num_stages)
    num_ticks = 0
    for row in spans.values():
        if row:
            num_ticks = max(num_ticks, int(row[-1].stop))
    table: dict[int, list[Action | None]] = {}
    for rank, row in spans.items():
        table[rank] = [None] * num_ticks
        for action, start, _ in row:
            table[rank][int(start)] = action
    return table


# {kind of action: (how many stages further its result goes, what it is there)}; a W sends nothing.
_SENDS = {"F": (+1, "activation"), "B": (-1, "gradient"), "I": (-1, "gradient")}


def messages(table: Mapping[int, Sequence[Action | None]], num_stages: int) -> list[list[Message]]:
    """What has to be sent after each tick, in the order of the senders' ranks.

    A rank sends at most one message per tick. Between two stages on one rank nothing is sent.

    Args:
        table: What `ticks` returns.
        num_stages: The number of stages of the whole pipeline.
    """
    # Both ends read the same list and post their sends and receives in its order, so they always
    # agree on which message is which, and no ranks wait for each other in a circle. A message is
    # listed right after the tick that made it, never when it is needed: the receiver posts its
    # buffer early, and the bytes travel while it computes something else.
    computed = {}
    num_ticks = 0
    for rank, row in table.items():
        computed[rank] = [action for action in row if action is not None]
        num_ticks = len(row)
    rank_of = stage_ranks(computed)
    sent: list[list[Message]] = [[] for _ in range(num_ticks)]
    for rank, row in sorted(table.items()):
        for tick, action in enumerate(row):
            if action is None or action.kind not in _SENDS:
                continue
            step, kind = _SENDS[action.kind]
            to_stage = action.stage + step
            if not 0 <= to_stage < num_stages:
                continue  # no stage before the first one, none after the last one
            to_rank = rank_of[to_stage]
            if to_rank != rank:
                sent[tick].append(Message(rank, to_rank, kind, to_stage, action.microbatch))
    return sent


class Tick(NamedTuple):
    """One tick of one rank.

    Args:
        action: What the rank computes, None for nothing.
        messages: What it sends or begins to receive afterwards, in the order on which all ranks
            agree.
    """

    action: Action | None
    messages: tuple[Message, ...]


@dataclass(frozen=True, eq=False)
class PipelinePlan:
    """A checked schedule with all that a runner needs of it, made once and read at every step.

    Args:
        num_stages: The number of stages of the whole pipeline.
        num_microbatches: The number of micro-batches of one step.
        orders: `orders[rank]` is what the rank computes, in order.
        ticks: `ticks[rank][tick]` is the same with None where the rank waits.
        messages: `messages[tick]` is what is sent after the tick, between any ranks.
        programs: `programs[rank]` is all of that as one rank sees it, tick by tick.
        stage_ranks: `stage_ranks[stage]` is the rank of the stage.
        splits_backward: Whether backward is split into I and W.
    """

    num_stages: int
    num_microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    ticks: tuple[tuple[Action | None, ...], ...]
    messages: tuple[tuple[Message, ...], ...]
    programs: tuple[tuple[Tick, ...], ...]
    stage_ranks: tuple[int, ...]
    splits_backward: bool


@lru_cache(maxsize=32)
def plan_pipeline(
    name: str, num_stages: int, num_microbatches: int, num_ranks: int | None = None
) -> PipelinePlan:
    """The plan of a named schedule; asked again for the same one, it returns the same object.

    Args:
        All as in `schedule`.

    Raises:
        ValueError: An unknown name, or numbers that do not fit each other.
    Held by:
        tests/unit/test_schedules.py::test_a_plan_is_simulated_once_however_many_steps_ask_for_it;
        over the steps of a run by tests/ranks/test_pipeline_plan.py
    """
    actions = schedule(name, num_stages, num_microbatches, num_ranks)
    return make_plan(actions, num_stages, num_microbatches)


def make_plan(actions: Actions, num_stages: int, num_microbatches: int) -> PipelinePlan:
    """The plan of any schedule, such as one written by hand. Not cached: keep it for all steps.

    Args:
        actions: The schedule.
        num_stages: The number of stages of the whole pipeline.
        num_microbatches: The number of micro-batches of one step.

    Raises:
        ValueError: What `check_schedule` says is wrong with it.
    """
    check_complete(actions, num_stages, num_microbatches)
    # the one simulation that the ticks need is the rest of the check
    return _plan(actions, num_stages, num_microbatches)


@lru_cache(maxsize=32)
def evaluation_plan(stages_to_ranks: tuple[int, ...], num_microbatches: int) -> PipelinePlan:
    """The plan of forwards alone, for validation: nothing is kept for a backward.

    Args:
        stages_to_ranks: The rank of each stage, as in `PipelinePlan.stage_ranks`.
        num_microbatches: Any number, whatever the training schedule asks for.
    """
    num_stages = len(stages_to_ranks)
    num_ranks = 1 + max(stages_to_ranks)
    actions: Actions = {rank: [] for rank in range(num_ranks)}
    for microbatch in range(num_microbatches):
        for stage, rank in enumerate(stages_to_ranks):
            actions[rank].append(Action("F", stage, microbatch))
    return _plan(actions, num_stages, num_microbatches)


def _plan(actions: Actions, num_stages: int, num_microbatches: int) -> PipelinePlan:
    table = ticks(actions, num_stages)
    sent = messages(table, num_stages)
    orders = []
    rows = []
    programs = []
    splits_backward = False
    for rank, order in sorted(actions.items()):
        orders.append(tuple(order))
        rows.append(tuple(table[rank]))
        programs.append(_program(rank, table[rank], sent))
        if any(action.kind == "W" for action in order):
            splits_backward = True
    return PipelinePlan(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        orders=tuple(orders),
        ticks=tuple(rows),
        messages=tuple(map(tuple, sent)),
        programs=tuple(programs),
        stage_ranks=tuple(stage_ranks(actions).values()),
        splits_backward=splits_backward,
    )


def _program(
    rank: int, row: Sequence[Action | None], sent: Sequence[Sequence[Message]]
) -> tuple[Tick, ...]:
    """What one rank does and exchanges, so that no step has to look through what others send."""
    program = []
    for action, after in zip(row, sent, strict=True):
        own = []
        for message in after:
            if rank in (message.from_rank, message.to_rank):
                own.append(message)
        program.append(Tick(action, tuple(own)))
    return tuple(program)
