"""Who computes what, and in which order: the schedules of a pipeline as plain data. No process, no torch.

The model is cut into `num_stages` stages, the batch into `num_microbatches` micro-batches, and a schedule is
`{rank: [Action, ...]}`, what each rank does one after the other. Communication follows from it: the forward of a stage sends
activations to the next stage, its backward sends gradients to the stage before.

    F   forward                                  needs F of the stage before
    B   backward, all of it: I and W in one      needs its own F, and I or B of the stage after
    I   backward for the input only              the same; all that the stage before waits for
    W   backward for the weights only            needs its own I; nobody waits for it

p ranks, m micro-batches, v stages on each rank (1 except for "interleaved"), r the rank.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

KINDS = "FBIW"


class Action(NamedTuple):
    """What a rank computes at a time: F, B, I or W of one stage for one micro-batch; stage 1's F of micro-batch 3 is 1F3."""

    kind: str
    stage: int
    microbatch: int

    def __repr__(self):
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that is written "1F3".

        Raises:
            ValueError: Text of another form.
        """
        match = re.fullmatch(rf"(\d+)([{KINDS}])(\d+)", text)
        if not match:
            raise ValueError(
                f"{text!r} is no action: write stage, one of {', '.join(KINDS)}, micro-batch, as in '1F3'"
            )
        return cls(match[2], int(match[1]), int(match[3]))


class Message(NamedTuple):
    """What one rank sends to another: the input of `stage` ("activation") or the gradient of its output ("gradient")."""

    from_rank: int
    to_rank: int
    kind: str
    stage: int
    microbatch: int


class Span(NamedTuple):
    """An action and when it runs; the unit of time is the caller's."""

    action: Action
    start: float
    stop: float


Actions = dict[int, list[Action]]


# ---- the schedules: one rank's order from (rank, ranks, stages per rank, micro-batches)


def _in_turn(forwards, backwards, warmup):
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    pairs = zip(forwards[warmup:], backwards)
    return [
        *forwards[:warmup],
        *(action for pair in pairs for action in pair),
        *backwards[len(forwards) - warmup :],
    ]


def _gpipe(r, p, v, m):
    """All forwards, then all backwards."""
    return _in_turn(
        [Action("F", r, i) for i in range(m)], [Action("B", r, i) for i in range(m)], warmup=m
    )


def _1f1b(r, p, v, m):
    """As many forwards first as there are stages behind: then the first backward is on its way, and no more are kept."""
    return _in_turn(
        [Action("F", r, i) for i in range(m)],
        [Action("B", r, i) for i in range(m)],
        warmup=min(p - 1 - r, m),
    )


def _interleaved(r, p, v, m):
    """1F1B over v stages on each rank: p micro-batches through one stage, then the same p through the rank's next stage."""
    turns = [(first + i, chunk) for first in range(0, m, p) for chunk in range(v) for i in range(p)]
    forwards = [Action("F", chunk * p + r, i) for i, chunk in turns]
    backwards = [Action("B", (v - 1 - chunk) * p + r, i) for i, chunk in turns]
    return _in_turn(forwards, backwards, warmup=min(2 * (p - 1 - r) + (v - 1) * p, v * m))


def _zero_bubble(r, p, v, m):
    """1F1B with I in place of B; each W comes r micro-batches late, so that the last ones fill the gaps at the end."""
    order = [Action("F", r, i) for i in range(min(p - r, m))]
    for i in range(m):
        order.append(Action("I", r, i))
        order += [Action("W", r, i - r)] if i >= r else []
        order += [Action("F", r, p - r + i)] if p - r + i < m else []
    return order + [Action("W", r, i) for i in range(max(m - r, 0), m)]


_ORDERS = {"gpipe": _gpipe, "1f1b": _1f1b, "interleaved": _interleaved, "zero_bubble": _zero_bubble}
NAMES = tuple(_ORDERS)


def schedule(
    name: str, num_stages: int, num_microbatches: int, num_ranks: int | None = None
) -> Actions:
    """What every rank computes, in order; each rank can make the whole table, so nobody has to ask.

    Stage s is on rank s % num_ranks.

    Args:
        name: "gpipe", "1f1b", "interleaved" or "zero_bubble" (ZB-H1: 1F1B's memory, about a third of its bubble).
        num_stages: As many as ranks; for "interleaved" any multiple, v stages on each rank.
        num_microbatches: Any number; for "interleaved" a multiple of num_ranks.
        num_ranks: Ranks of the pipeline; None for as many as stages.

    Raises:
        ValueError: An unknown name, or numbers that do not fit each other.

    Source: Huang et al. 2019 (arXiv:1811.06965) for gpipe; Narayanan et al. 2021 (arXiv:2104.04473), section 2.2, for 1f1b
        and interleaved; Qi et al. 2023 (arXiv:2401.10241), section 2.1, for zero_bubble.
    Held by: tests/unit/test_schedules.py::test_the_orders_are_those_of_pytorch; zero_bubble by its bubble and its
        peak, in tests/unit/test_perf_pipeline.py.
    """
    p = num_stages if num_ranks is None else num_ranks
    if name not in _ORDERS:
        raise ValueError(f"there is no schedule {name!r}: choose one of {', '.join(NAMES)}")
    for what, count in {
        "num_stages": num_stages,
        "num_microbatches": num_microbatches,
        "num_ranks": p,
    }.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{what}={count!r}: a pipeline needs a whole number, at least 1")
    if num_stages % p:
        raise ValueError(
            f"num_stages={num_stages} is not a multiple of num_ranks={p}: change one of them"
        )
    if name != "interleaved" and num_stages != p:
        raise ValueError(
            f"{name} has one stage per rank, not num_stages={num_stages} on num_ranks={p}: use interleaved"
        )
    if name == "interleaved" and num_microbatches % p:
        raise ValueError(
            f"interleaved needs num_microbatches={num_microbatches} to be a multiple of num_ranks={p}"
        )
    return {rank: _ORDERS[name](rank, p, num_stages // p, num_microbatches) for rank in range(p)}


# ---- playing a schedule


def stage_ranks(actions: Actions) -> dict[int, int]:
    """The rank of each stage, `{stage: rank}`.

    Raises:
        ValueError: A stage on two ranks.
    """
    homes = {}
    for rank, order in sorted(actions.items()):
        for action in order:
            home, first = homes.setdefault(action.stage, (rank, action))
            if home != rank:
                raise ValueError(
                    f"stage {action.stage} is on ranks {home} ({first}) and {rank} ({action}): give it one rank"
                )
    return {stage: rank for stage, (rank, _) in sorted(homes.items())}


def waits_for(action: Action, num_stages: int) -> list[Action]:
    """What has to be done before `action`; the I that it names is done by a B as well."""
    kind, stage, microbatch = action
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage > 0 else []
    if kind == "W":
        return [Action("I", stage, microbatch)]
    after = [Action("I", stage + 1, microbatch)] if stage < num_stages - 1 else []
    return [Action("F", stage, microbatch), *after]


def simulate_order(
    actions: Actions,
    num_stages: int,
    duration: Callable[[Action], float] = lambda action: 1,
    hop: float = 0,
) -> dict[int, list[Span]]:
    """When each action runs, if every rank starts its next one as soon as it is free and the input is there.

        start = max(stop of the rank's action before, stop of what it waits for (+ hop if that is on another rank))

    Args:
        actions: The schedule.
        num_stages: Of the whole pipeline.
        duration: Time of an action; 1 unless told.
        hop: Time of a message between two ranks. It delays the receiver and keeps nobody busy.

    Raises:
        ValueError: The schedule cannot be played to its end; names the rank, the action and what it waits for.
    """
    spans = {rank: [] for rank in sorted(actions)}
    done = {}  # F, I, W -> (when, on which rank)
    moving = True
    while moving:
        moving = False
        for rank, played in spans.items():
            while len(played) < len(actions[rank]):
                action = actions[rank][len(played)]
                inputs = [done.get(need) for need in waits_for(action, num_stages)]
                if None in inputs:
                    break
                free = played[-1].stop if played else 0
                start = max([free, *(when + (hop if home != rank else 0) for when, home in inputs)])
                played.append(Span(action, start, start + duration(action)))
                for kind in "IW" if action.kind == "B" else action.kind:
                    done[action._replace(kind=kind)] = (played[-1].stop, rank)
                moving = True
    stuck = {
        rank: actions[rank][len(played)]
        for rank, played in spans.items()
        if len(played) < len(actions[rank])
    }
    if stuck:
        raise ValueError(_why_stuck(actions, num_stages, stuck, done))
    return spans


def _why_stuck(actions, num_stages, stuck, done):
    """One line: the first rank that waits for ever, what for, and the circle of ranks that wait for each other."""
    where = {action: rank for rank, order in actions.items() for action in order}
    waits = {}  # rank -> (what it needs, the rank of that)
    for rank, action in stuck.items():
        need = next(need for need in waits_for(action, num_stages) if need not in done)
        if need.kind == "I" and need not in where:
            need = need._replace(kind="B")
        waits[rank] = (need, where.get(need))
    first = min([rank for rank, (_, home) in waits.items() if home is None] or waits)
    need, home = waits[first]
    text = f"rank {first} cannot start {stuck[first]}: it waits for {need}"
    if home is None:
        return f"{text}, which is on no rank: add it"
    if home == first:
        return f"{text}, which comes later on the same rank: put it before"
    path = [first]
    while (
        waits[path[-1]][1] not in path
    ):  # what a stuck rank waits for is on a stuck rank, so the walk ends in a circle
        path.append(waits[path[-1]][1])
    circle = path[path.index(waits[path[-1]][1]) :]
    links = [
        f"rank {rank} at {stuck[rank]} waits for {waits[rank][0]} of rank {waits[rank][1]}"
        for rank in circle
    ]
    links = links if len(circle) > 1 else [links[0] + " itself"]
    return f"{text} of rank {home}, which never comes: {', '.join(links)}"


def check_schedule(actions: Actions, num_stages: int, num_microbatches: int) -> None:
    """Refuses a schedule that would hang or compute something twice, before any process runs it.

    Every (stage, micro-batch) has one F and one B, or one F, one I and one W; a stage lives on one rank; and played in
    order, each rank reaches the end of its list: no receive without its send, no circle of ranks that wait for each other.

    Raises:
        ValueError: Names the first thing that is wrong, and for a hang the rank, its action and what that waits for.
    """
    if not actions or sorted(actions) != list(range(len(actions))):
        raise ValueError(
            f"the schedule has the ranks {sorted(actions)}: number them from 0 without gaps"
        )
    found = {(stage, i): [] for stage in range(num_stages) for i in range(num_microbatches)}
    for rank, order in sorted(actions.items()):
        for action in order:
            if (
                not isinstance(action, Action)
                or action.kind not in tuple(KINDS)
                or action[1:] not in found
            ):
                raise ValueError(
                    f"rank {rank} has {action}, which is no action of {num_stages} stages and {num_microbatches} "
                    f"micro-batches: count both from 0, the kinds are {', '.join(KINDS)}"
                )
            found[action[1:]].append(action.kind)
    for (stage, i), kinds in found.items():
        if "".join(sorted(kinds)) not in ("BF", "FIW"):
            held = " ".join(kinds) or "nothing"
            raise ValueError(
                f"stage {stage} has {held} for micro-batch {i}: it needs F and B, or F, I and W, each once"
            )
    stage_ranks(actions)
    simulate_order(actions, num_stages)


def ticks(actions: Actions, num_stages: int) -> dict[int, list[Action | None]]:
    """The schedule as a table, one action per tick, None where a rank waits; all rows are equally long.

    An action stands in the first tick in which its rank is free and all that it waits for was done in earlier ticks.

    Raises:
        ValueError: The schedule cannot be played to its end.
    """
    spans = simulate_order(actions, num_stages)
    num_ticks = max(played[-1].stop for played in spans.values() if played)
    table = {rank: [None] * num_ticks for rank in spans}
    for rank, played in spans.items():
        for action, start, _ in played:
            table[rank][start] = action
    return table


_SENDS = {"F": (+1, "activation"), "B": (-1, "gradient"), "I": (-1, "gradient")}


def messages(table: dict[int, list[Action | None]], num_stages: int) -> list[list[Message]]:
    """What has to be sent after each tick, by the rank of the sender; a rank sends at most one message per tick.

    Between two stages on one rank nothing is sent.
    """
    home = stage_ranks({rank: [action for action in row if action] for rank, row in table.items()})
    sent = [[] for _ in next(iter(table.values()))]
    for rank, row in sorted(table.items()):
        for tick, action in enumerate(row):
            if action and action.kind in _SENDS:
                step, kind = _SENDS[action.kind]
                to = action.stage + step
                if 0 <= to < num_stages and home[to] != rank:
                    sent[tick].append(Message(rank, home[to], kind, to, action.microbatch))
    return sent
