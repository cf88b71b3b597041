"""How long a pipeline takes, how long its ranks wait and what they keep: simulated and by formula.

A rank that never waits would be done after the time in which it is busy; what it takes beyond that
is the bubble. Papers divide the bubble by one of two times, so both have their name here:

    bubble_over_ideal = bubble_s / busy_s     Narayanan et al.: (p-1)/m for 1F1B; can exceed 1
    bubble_over_total = bubble_s / total_s    Huang et al., and the "bubble rate" of Qi et al.:
                      = over_ideal / (1 + over_ideal)               (p-1)/(m+p-1) for 1F1B

p ranks, m micro-batches, v stages on each rank. In the formulas all stages take the same time;
`simulate` takes any times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labcode.schedules import NAMES, Action, Actions, simulate_order


@dataclass(frozen=True)
class StageTimes:
    """Seconds that a stage takes for one micro-batch. A full backward takes `input_s + weight_s`.

    Args:
        forward_s: F.
        input_s: I, the backward for the input.
        weight_s: W, the backward for the weights.

    Raises:
        ValueError: A negative time.
    """

    forward_s: float
    input_s: float
    weight_s: float

    def __post_init__(self) -> None:
        for name in ("forward_s", "input_s", "weight_s"):
            time_s = getattr(self, name)
            if not time_s >= 0:  # this way round it refuses nan as well
                raise ValueError(f"{name}={time_s}: a stage takes 0 seconds or more")

    @property
    def total_s(self) -> float:
        """F and the whole backward."""
        return self.forward_s + self.input_s + self.weight_s

    def checkpointed(self) -> "StageTimes":
        """The same stage with activation checkpointing: B or I begins with one more forward."""
        return StageTimes(self.forward_s, self.forward_s + self.input_s, self.weight_s)

    def of(self, kind: str) -> float:
        """Seconds of F, B, I or W."""
        times_s = {
            "F": self.forward_s,
            "I": self.input_s,
            "W": self.weight_s,
            "B": self.input_s + self.weight_s,
        }
        return times_s[kind]


class Bar(NamedTuple):
    """One bar of a time line: an action, its rank, and from when to when it runs."""

    rank: int
    action: Action
    start_s: float
    stop_s: float

    @property
    def duration_s(self) -> float:
        """Seconds that the action takes."""
        return self.stop_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """When every action of a schedule runs; simulated, or measured and put into the same bars.

    Time counts from 0, when the first rank may start, to the end of the last action on any rank.

    Args:
        rows: The bars by rank, and in the order in which a rank ran them.
    """

    rows: tuple[Bar, ...]

    @property
    def ranks(self) -> list[int]:
        """All ranks that ran something."""
        return sorted({bar.rank for bar in self.rows})

    @property
    def total_s(self) -> float:
        """Seconds until the last rank is done."""
        return max(bar.stop_s for bar in self.rows)

    def busy_s(self, rank: int | None = None) -> float:
        """Seconds in which `rank` computes.

        None: the mean over ranks, which is the ideal time of the whole batch.
        """
        if rank is None:
            return sum(bar.duration_s for bar in self.rows) / len(self.ranks)
        return sum(bar.duration_s for bar in self.rows if bar.rank == rank)

    def bubble_s(self, rank: int | None = None) -> float:
        """Seconds in which `rank` waits, at the start and at the end too; None: the mean of all."""
        return self.total_s - self.busy_s(rank)

    def bubble_over_total(self, rank: int | None = None) -> float:
        """The share of all time that `rank` waits, from 0 to 1; None: of all ranks together."""
        return self.bubble_s(rank) / self.total_s

    def bubble_over_ideal(self, rank: int | None = None) -> float:
        """Waiting of `rank` divided by its work; None: of all ranks together."""
        return self.bubble_s(rank) / self.busy_s(rank)

    def peak_microbatches(self, rank: int | None = None) -> int:
        """The most activations that `rank` keeps at once, in stage-micro-batches.

        Those of one stage and micro-batch are kept from the start of its F to the end of its B or
        W. The number depends on the order alone, not on the times. None: the fullest rank.
        """
        if rank is None:
            return max(self.peak_microbatches(each) for each in self.ranks)
        kept = 0
        peak = 0
        for bar in self.rows:
            if bar.rank != rank:
                continue
            if bar.action.kind == "F":
                kept += 1
            # before the next line: a backward still needs what it is about to free
            peak = max(peak, kept)
            if bar.action.kind in ("B", "W"):
                kept -= 1
        return peak


def simulate(
    actions: Actions,
    stage_s: StageTimes | Sequence[StageTimes],
    *,
    message_s: float = 0.0,
    activation_checkpointing: bool = False,
) -> Timeline:
    """The time line of a schedule in which every rank starts its next action as soon as it can.

        start = max(stop of the rank's action before,
                    stop of what the action waits for (+ message_s from another rank))

    Messages delay the receiver and take no time from the sender, as if they overlapped with its
    next action.

    Args:
        actions: `{rank: [Action, ...]}`, as from `schedule`.
        stage_s: One for all stages, or one for each.
        message_s: Seconds of a message between two ranks.
        activation_checkpointing: Whether B and I begin with one more forward.

    Raises:
        ValueError: Times for another number of stages, a negative time, or a schedule that would
            hang.

    Source: the critical path of a task graph, without anything that shares a link or a core.
    Held by: tests/unit/test_perf_pipeline.py, against the formulas below.
    """
    num_stages = 0
    for order in actions.values():
        for action in order:
            num_stages = max(num_stages, action.stage + 1)
    times = [stage_s] * num_stages if isinstance(stage_s, StageTimes) else list(stage_s)
    if len(times) != num_stages:
        raise ValueError(
            f"{len(times)} stage times for {num_stages} stages: give one for each, or one for all"
        )
    if not message_s >= 0:
        raise ValueError(f"message_s={message_s}: a message takes 0 seconds or more")
    if activation_checkpointing:
        times = [time.checkpointed() for time in times]

    def duration_s(action: Action) -> float:
        return times[action.stage].of(action.kind)

    bars = []
    for rank, spans in simulate_order(actions, num_stages, duration_s, message_s).items():
        for action, start_s, stop_s in spans:
            bars.append(Bar(rank, action, start_s, stop_s))
    return Timeline(tuple(bars))


# ---- closed forms

EQUAL = StageTimes(1.0, 1.0, 1.0)  # F = I = W, B = 2: what the papers draw


def bubble_over_ideal(name: str, p: int, m: int, v: int = 1, stage_s: StageTimes = EQUAL) -> float:
    """What a rank waits, divided by its work, for equal stages and messages that take no time.

        gpipe, 1f1b    (p-1) / m                                   for any times
        interleaved    (p-1) / (v m)                               for any times
        zero_bubble    (p-1) (t_F + t_I - t_W) / (m (t_F + t_I + t_W))
                                                  for m >= p, t_W <= t_F and t_W <= t_I

    The last is 1/3 of 1F1B's for equal times. Without its conditions it is

        ((p-1) (t_F + t_I) - (min(p, m) - 1) min(t_F, t_I, t_W)) / (m (t_F + t_I + t_W))

    Args:
        name: As in `schedule`.
        p: Ranks.
        m: Micro-batches; a multiple of p for interleaved.
        v: Stages on each rank; 1 except for interleaved.
        stage_s: Only its proportions count, and only for zero_bubble.

    Raises:
        ValueError: An unknown name, or numbers that it does not fit.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), sections 2.2.1 and 2.2.2; Qi et al. 2023
        (arXiv:2401.10241), section 2.3, for zero_bubble with its conditions; without them the
        formula is read off the simulator and in no paper.
    Held by: tests/unit/test_perf_pipeline.py::test_the_simulated_bubble_is_that_of_the_formula
    """
    _check_sizes(name, p, m, v)
    if name != "zero_bubble":
        return (p - 1) / (v * m)
    # The last rank's first I waits for p-1 forwards, and its last gradient needs p-1 times I to get
    # back to stage 0. Into these gaps W fits, as often as there are W that were put off.
    waiting_s = (p - 1) * (stage_s.forward_s + stage_s.input_s)
    shortest_s = min(stage_s.forward_s, stage_s.input_s, stage_s.weight_s)
    filled_s = (min(p, m) - 1) * shortest_s
    return (waiting_s - filled_s) / (m * stage_s.total_s)


def bubble_over_total(name: str, p: int, m: int, v: int = 1, stage_s: StageTimes = EQUAL) -> float:
    """What a rank waits, as a share of the whole time: b / (1 + b) with b = `bubble_over_ideal`.

        gpipe, 1f1b     (p-1) / (m + p-1)

    Args:
        name, p, m, v, stage_s: As in `bubble_over_ideal`.

    Source: Huang et al. 2019 (arXiv:1811.06965), section 2.3.
    """
    over_ideal = bubble_over_ideal(name, p, m, v, stage_s)
    return over_ideal / (1 + over_ideal)


def peak_microbatches(name: str, p: int, m: int, v: int = 1, rank: int | None = None) -> int:
    """The most activations that a rank r keeps at once, in stage-micro-batches.

    Each is that of 1/v of a rank's layers.

        gpipe           m
        1f1b            min(p - r, m)
        interleaved     min(2 (p-1-r) + (v-1) p + 1, v m)
        zero_bubble     min(p, m)         on every rank, because W, not I, sets the activations free

    On rank 0 interleaved keeps v p + p-1 of 1/v each: 1F1B's p, times 1 + (p-1)/(p v).

    Args:
        name, p, m, v: As in `bubble_over_ideal`.
        rank: r; None for the fullest rank, which is rank 0.

    Raises:
        ValueError: An unknown name, numbers that it does not fit, or a rank that does not exist.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2; Korthikanti et al. 2022
        (arXiv:2205.05198), section 4.2.3, for the factor of interleaved; Qi et al. 2023
        (arXiv:2401.10241), section 2.3.
    Held by: tests/unit/test_perf_pipeline.py::test_the_simulated_peak_is_that_of_the_formula
    """
    _check_sizes(name, p, m, v)
    r = 0 if rank is None else rank
    if not 0 <= r < p:
        raise ValueError(f"rank {r} is outside a pipeline of {p} ranks (0 to {p - 1})")
    peaks = {
        "gpipe": m,
        "1f1b": min(p - r, m),
        "interleaved": min(2 * (p - 1 - r) + (v - 1) * p + 1, v * m),
        "zero_bubble": min(p, m),
    }
    return peaks[name]


def _check_sizes(name: str, p: int, m: int, v: int) -> None:
    if name not in NAMES:
        raise ValueError(f"no formula for {name!r}: choose one of {', '.join(NAMES)}")
    if min(p, m, v) < 1:
        raise ValueError(f"p={p}, m={m}, v={v}: each is at least 1")
    if name != "interleaved" and v != 1:
        raise ValueError(f"v={v}: {name} has one stage on each rank; interleaved has more")
    if name == "interleaved" and m % p:
        raise ValueError(f"interleaved needs m={m} to be a multiple of p={p}")
