"""When each action of a schedule runs, and whether the schedule can run to its end at all."""

from collections.abc import Callable
from typing import NamedTuple

from labcode.schedules.actions import KINDS, Action, Actions, stage_ranks, waits_for


class Span(NamedTuple):
    """An action and when it runs; the unit of time is the caller's."""

    action: Action
    start: float
    stop: float


class _Done(NamedTuple):
    """When an action was done, and on which rank."""

    when: float
    rank: int


def _one_unit(action: Action) -> float:
    return 1


def simulate_order(
    actions: Actions,
    num_stages: int,
    duration: Callable[[Action], float] = _one_unit,
    hop: float = 0,
) -> dict[int, list[Span]]:
    """When each action runs, if every rank starts its next one as soon as it can.

        start = max(stop of the rank's action before,
                    stop of what the action waits for (+ hop if that is on another rank))

    Args:
        actions: The schedule.
        num_stages: The number of stages of the whole pipeline.
        duration: Time of an action; 1 by default.
        hop: Time of a message between two ranks. It delays the receiver and keeps no rank busy.

    Raises:
        ValueError: The schedule cannot run to its end; names the rank, the action and what it waits
            for.
    """
    spans: dict[int, list[Span]] = {rank: [] for rank in sorted(actions)}
    done: dict[Action, _Done] = {}
    # Each rank runs ahead until it needs something that is not there yet. What it has done
    # meanwhile may free others, so repeat the round until no rank moves. No queue of events is
    # needed: times depend on the order within each rank and on what is waited for, not on the order
    # in which they are worked out here.
    moved = True
    while moved:
        moved = False
        for rank in spans:
            if _run_ahead(rank, actions[rank], num_stages, duration, hop, spans[rank], done):
                moved = True
    stuck = {}
    for rank, finished in spans.items():
        if len(finished) < len(actions[rank]):
            stuck[rank] = actions[rank][len(finished)]
    if stuck:
        raise ValueError(_why_stuck(actions, num_stages, stuck, done))
    return spans


def _run_ahead(
    rank: int,
    order: list[Action],
    num_stages: int,
    duration: Callable[[Action], float],
    hop: float,
    spans: list[Span],
    done: dict[Action, _Done],
) -> bool:
    """Run the next actions of one rank as far as their inputs are there.

    Args:
        rank: The rank.
        order: Actions of the rank, in order.
        num_stages: The number of stages of the whole pipeline.
        duration: Time of an action.
        hop: Time of a message between two ranks.
        spans: What the rank has run; grows here.
        done: What all ranks have run; grows here.

    Returns:
        Whether any action ran.
    """
    first = len(spans)
    while len(spans) < len(order):
        action = order[len(spans)]
        start = spans[-1].stop if spans else 0
        # A message is late by one hop only where it changes the rank: between two stages of one
        # rank (interleaving) the tensor is handed over and nothing is sent.
        for need in waits_for(action, num_stages):
            if need not in done:
                return len(spans) > first
            arrival = done[need].when
            if done[need].rank != rank:
                arrival += hop
            start = max(start, arrival)
        stop = start + duration(action)
        spans.append(Span(action, start, stop))
        # What waits for a backward names its I (`waits_for`); a full backward has done I and W.
        if action.kind == "B":
            done[action._replace(kind="I")] = _Done(stop, rank)
            done[action._replace(kind="W")] = _Done(stop, rank)
        else:
            done[action] = _Done(stop, rank)
    return len(spans) > first


def _why_stuck(
    actions: Actions, num_stages: int, stuck: dict[int, Action], done: dict[Action, _Done]
) -> str:
    """One line: the first rank that waits forever, what for, and the circle of waiting ranks.

    Args:
        actions: The schedule.
        num_stages: The number of stages of the whole pipeline.
        stuck: For each rank that did not reach its end, the action that it cannot start.
        done: What could run.
    """
    rank_of = {}
    for rank, order in actions.items():
        for action in order:
            rank_of[action] = rank
    # For each stuck rank the first thing that is missing, and the rank that should do it: None if
    # it is on no rank.
    missing: dict[int, Action] = {}
    waits_on: dict[int, int | None] = {}
    for rank, action in stuck.items():
        need = _first_missing(action, num_stages, done)
        if need.kind == "I" and need not in rank_of:
            # this schedule has full backwards: name the action that it should have
            need = need._replace(kind="B")
        missing[rank] = need
        waits_on[rank] = rank_of.get(need)

    # An action that is on no rank is the cause itself, so name a rank that waits for one before a
    # rank that only waits for another rank.
    without_a_rank = [rank for rank, other in waits_on.items() if other is None]
    first = min(without_a_rank or stuck)
    other = waits_on[first]
    text = f"rank {first} cannot start {stuck[first]}: it waits for {missing[first]}"
    if other is None:
        return f"{text}, which is on no rank: add it"
    if other == first:
        return f"{text}, which comes later on the same rank: put it before"

    circle = _circle(first, waits_on)
    links = []
    for rank in circle:
        links.append(
            f"rank {rank} at {stuck[rank]} waits for {missing[rank]} of rank {waits_on[rank]}"
        )
    if len(circle) == 1:
        links[0] += " itself"
    return f"{text} of rank {other}, which never comes: {', '.join(links)}"


def _first_missing(action: Action, num_stages: int, done: dict[Action, _Done]) -> Action:
    for need in waits_for(action, num_stages):
        if need not in done:
            return need
    raise AssertionError(f"{action} is stuck though all that it waits for is done")


def _circle(first: int, waits_on: dict[int, int | None]) -> list[int]:
    """The ranks that wait for each other in a circle, reached from rank `first`.

    What a stuck rank waits for is on a rank that is stuck too, or it would have been done. So the
    walk from rank to rank never leaves the stuck ones, and as they are finitely many it comes back
    to one that it has passed. The ranks before that one only lead into the circle.
    """
    path = []
    rank = first
    # Each stuck rank names one other, so there is one way to go and no search to do.
    while rank not in path:
        path.append(rank)
        following = waits_on[rank]
        assert following is not None, "an action on no rank is reported before"
        rank = following
    return path[path.index(rank) :]


def check_schedule(actions: Actions, num_stages: int, num_microbatches: int) -> None:
    """Refuse a schedule that would hang or compute something twice, before any process runs it.

    Every (stage, micro-batch) has one F and one B, or one F, one I and one W; each stage is on one
    rank; and when simulated in order, each rank reaches the end of its list: no receive without its
    send, no circle of ranks that wait for each other.

    Raises:
        ValueError: Names the first thing that is wrong, and for a hang the rank, its action and
            what that waits for.
    """
    check_complete(actions, num_stages, num_microbatches)
    simulate_order(actions, num_stages)


def check_complete(actions: Actions, num_stages: int, num_microbatches: int) -> None:
    """All of `check_schedule` but the simulation: nothing is missing, nothing is there twice.

    Raises:
        ValueError: Names the first thing that is wrong.
    """
    ranks = sorted(actions)
    if not ranks or ranks != list(range(len(ranks))):
        raise ValueError(f"the schedule has the ranks {ranks}: number them from 0 without gaps")
    kinds_of: dict[tuple[int, int], list[str]] = {}
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            kinds_of[stage, microbatch] = []
    for rank in ranks:
        for action in actions[rank]:
            if not _is_known(action) or (action.stage, action.microbatch) not in kinds_of:
                raise ValueError(
                    f"rank {rank} has {action}, which is no action of {num_stages} stages and "
                    f"{num_microbatches} micro-batches: count both from 0, "
                    f"the kinds are {', '.join(KINDS)}"
                )
            kinds_of[action.stage, action.microbatch].append(action.kind)
    for (stage, microbatch), kinds in kinds_of.items():
        if sorted(kinds) not in (["B", "F"], ["F", "I", "W"]):
            held = " ".join(kinds) or "nothing"
            raise ValueError(
                f"stage {stage} has {held} for micro-batch {microbatch}: it needs F and B, "
                "or F, I and W, each once"
            )
    stage_ranks(actions)


def _is_known(action: object) -> bool:
    return isinstance(action, Action) and action.kind in tuple(KINDS)
