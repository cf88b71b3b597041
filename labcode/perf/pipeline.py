"""How long a pipeline takes, how long its ranks wait and what they keep: a simulator of schedules, and formulas beside it.

A rank that never waits would be done after the time in which it is busy; what it takes beyond that is the bubble. Papers
divide the bubble by one of two times, so both have their name here:

    bubble_over_ideal = bubble_s / busy_s       Narayanan et al.: (p-1)/m for 1F1B; can exceed 1
    bubble_over_total = bubble_s / total_s      Huang et al., and the "bubble rate" of Qi et al.: (p-1)/(m+p-1) for 1F1B
                      = over_ideal / (1 + over_ideal)

p ranks, m micro-batches, v stages on each rank; all stages alike in the formulas, while `simulate` takes any times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labcode.schedules import NAMES, Action, Actions, simulate_order


@dataclass(frozen=True)
class StageTimes:
    """Seconds that one stage takes for one micro-batch. A full backward (B) takes `input_s + weight_s`.

    Args:
        forward_s: F.
        input_s: I, the backward for the input.
        weight_s: W, the backward for the weights.
    """

    forward_s: float
    input_s: float
    weight_s: float

    def __post_init__(self):
        for name in ("forward_s", "input_s", "weight_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: a stage takes 0 seconds or more")

    @property
    def total_s(self) -> float:
        """F and the whole backward."""
        return self.forward_s + self.input_s + self.weight_s

    def recomputed(self) -> "StageTimes":
        """The same stage with activation recomputation: the backward (B or I) starts with one more forward."""
        return StageTimes(self.forward_s, self.forward_s + self.input_s, self.weight_s)

    def of(self, kind: str) -> float:
        """Seconds of F, B, I or W."""
        times = {
            "F": self.forward_s,
            "I": self.input_s,
            "W": self.weight_s,
            "B": self.input_s + self.weight_s,
        }
        return times[kind]


class Bar(NamedTuple):
    """One bar of the picture: an action, its rank, and from when to when it runs."""

    rank: int
    action: Action
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Timeline:
    """When every action of a schedule runs; simulated, or measured and put into the same rows.

    Time counts from 0, when the first rank may start, to the end of the last action on any rank.

    Args:
        rows: By rank, and in the order in which a rank ran them.
    """

    rows: tuple[Bar, ...]

    @property
    def ranks(self) -> list[int]:
        """All ranks that ran something."""
        return sorted({row.rank for row in self.rows})

    @property
    def total_s(self) -> float:
        """Seconds until the last rank is done."""
        return max(row.stop_s for row in self.rows)

    def busy_s(self, rank: int | None = None) -> float:
        """Seconds in which `rank` computes; None for the mean over ranks, which is the ideal time of the whole batch."""
        if rank is None:
            return sum(row.stop_s - row.start_s for row in self.rows) / len(self.ranks)
        return sum(row.stop_s - row.start_s for row in self.rows if row.rank == rank)

    def bubble_s(self, rank: int | None = None) -> float:
        """Seconds in which `rank` waits, the start and the end included; None for the mean over ranks."""
        return self.total_s - self.busy_s(rank)

    def bubble_over_total(self, rank: int | None = None) -> float:
        """The share of all time that `rank` waits, from 0 to 1; None for all ranks together."""
        return self.bubble_s(rank) / self.total_s

    def bubble_over_ideal(self, rank: int | None = None) -> float:
        """Waiting against work of `rank`; None for all ranks together."""
        return self.bubble_s(rank) / self.busy_s(rank)

    def peak_microbatches(self, rank: int | None = None) -> int:
        """The most activations that `rank` keeps at once, in stage-micro-batches; None for the fullest rank.

        One is kept from the start of its F to the end of its B or W. It depends on the order alone, not on the times.
        """
        if rank is None:
            return max(self.peak_microbatches(rank) for rank in self.ranks)
        kept = peak = 0
        for row in self.rows:
            if row.rank == rank:
                kept += row.action.kind == "F"
                peak = max(peak, kept)
                kept -= row.action.kind in ("B", "W")
        return peak


def simulate(
    actions: Actions,
    stage_s: StageTimes | Sequence[StageTimes],
    *,
    message_s: float = 0.0,
    recompute: bool = False,
) -> Timeline:
    """The timeline of a schedule in which every rank starts its next action as soon as it is free and the input is there.

        start = max(stop of the rank's action before, stop of what it waits for (+ message_s from another rank))

    Messages delay the receiver and take no time from the sender, as if they overlapped with its next action.

    Args:
        actions: `{rank: [Action, ...]}`, as from `schedule`.
        stage_s: One for all stages, or one for each.
        message_s: Seconds of a message between two ranks.
        recompute: Whether B and I start with one more forward.

    Raises:
        ValueError: Times for another number of stages, a negative time, or a schedule that would hang.
    Source: the critical path of a task graph, without anything that shares a link or a core.
    Held by: tests/unit/test_perf_pipeline.py, against the formulas below.
    """
    num_stages = 1 + max(action.stage for order in actions.values() for action in order)
    times = [stage_s] * num_stages if isinstance(stage_s, StageTimes) else list(stage_s)
    if len(times) != num_stages:
        raise ValueError(
            f"{len(times)} stage times for {num_stages} stages: give one for each, or one for all"
        )
    if not message_s >= 0:
        raise ValueError(f"message_s={message_s}: a message takes 0 seconds or more")
    times = [time.recomputed() for time in times] if recompute else times
    spans = simulate_order(
        actions, num_stages, lambda action: times[action.stage].of(action.kind), message_s
    )
    return Timeline(tuple(Bar(rank, *span) for rank, played in spans.items() for span in played))


# ---- closed forms

EQUAL = StageTimes(1.0, 1.0, 1.0)  # F = I = W, B = 2: what the papers draw


def bubble_over_ideal(name: str, p: int, m: int, v: int = 1, stage_s: StageTimes = EQUAL) -> float:
    """What a rank waits, as a share of its work, for stages alike and messages that take no time.

        gpipe, 1f1b     (p-1) / m                                      for any times
        interleaved     (p-1) / (v m)                                  for any times
        zero_bubble     (p-1) (t_F + t_I - t_W) / (m (t_F + t_I + t_W))     m >= p, t_W <= t_F and t_W <= t_I

    which is 1/3 of 1F1B's for equal times. Without its conditions the last is
    ((p-1) (t_F + t_I) - (min(p, m) - 1) min(t_F, t_I, t_W)) / (m (t_F + t_I + t_W)).

    Args:
        name: As in `schedule`.
        p: Ranks.
        m: Micro-batches; a multiple of p for interleaved.
        v: Stages on each rank; 1 except for interleaved.
        stage_s: Only its proportions count, and only for zero_bubble.

    Raises:
        ValueError: An unknown name, or numbers that it does not fit.
    Source: Narayanan et al. 2021 (arXiv:2104.04473), sections 2.2.1 and 2.2.2; Qi et al. 2023 (arXiv:2401.10241), section
        2.3, for zero_bubble with its conditions; without them the formula is read off the simulator and in no paper.
    Held by: tests/unit/test_perf_pipeline.py::test_the_simulated_bubble_is_that_of_the_formula
    """
    _known(name, p, m, v)
    if name != "zero_bubble":
        return (p - 1) / (v * m)
    forward_s, input_s, weight_s = stage_s.forward_s, stage_s.input_s, stage_s.weight_s
    filled_s = (min(p, m) - 1) * min(forward_s, input_s, weight_s)
    return ((p - 1) * (forward_s + input_s) - filled_s) / (m * stage_s.total_s)


def bubble_over_total(name: str, p: int, m: int, v: int = 1, stage_s: StageTimes = EQUAL) -> float:
    """What a rank waits, as a share of the whole time: b / (1 + b) with b = `bubble_over_ideal`, the same arguments.

        gpipe, 1f1b     (p-1) / (m + p-1)

    Source: Huang et al. 2019 (arXiv:1811.06965), section 2.3.
    """
    over_ideal = bubble_over_ideal(name, p, m, v, stage_s)
    return over_ideal / (1 + over_ideal)


def peak_microbatches(name: str, p: int, m: int, v: int = 1, rank: int | None = None) -> int:
    """The most activations that a rank r keeps at once, in stage-micro-batches, each 1/v of a rank's layers.

        gpipe           m
        1f1b            min(p - r, m)
        interleaved     min(2 (p-1-r) + (v-1) p + 1, v m)      rank 0: v p + p-1, which is 1F1B's p times 1 + (p-1)/(p v)
        zero_bubble     min(p, m)                              on every rank, because W, not I, sets the activations free

    Args:
        name, p, m, v: As in `bubble_over_ideal`.
        rank: r; None for the fullest rank, which is rank 0.

    Raises:
        ValueError: An unknown name, numbers that it does not fit, or a rank that is not there.
    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.3,
        for the factor of interleaved; Qi et al. 2023 (arXiv:2401.10241), section 2.3.
    Held by: tests/unit/test_perf_pipeline.py::test_the_simulated_peak_is_that_of_the_formula
    """
    _known(name, p, m, v)
    r = rank or 0
    if not 0 <= r < p:
        raise ValueError(f"rank {r} is outside a pipeline of {p} ranks (0 to {p - 1})")
    peaks = {"gpipe": m, "1f1b": min(p - r, m), "zero_bubble": min(p, m)}
    return peaks.get(name, min(2 * (p - 1 - r) + (v - 1) * p + 1, v * m))


def _known(name, p, m, v):
    if name not in NAMES:
        raise ValueError(f"no formula for {name!r}: choose one of {', '.join(NAMES)}")
    if min(p, m, v) < 1:
        raise ValueError(f"p={p}, m={m}, v={v}: each is at least 1")
    if name != "interleaved" and v != 1:
        raise ValueError(f"v={v}: {name} has one stage on each rank; interleaved has more")
    if name == "interleaved" and m % p:
        raise ValueError(f"interleaved needs m={m} to be a multiple of p={p}")
