"""What failures cost a run: how often to save, by formula, and a simulation to hold it against.

One model for both. Failures come at random, `mtbf_s` apart on average, whatever happened before:
the times between them are exponentially distributed. A run works for `interval_s`, then it stands
still for `save_s` and writes a checkpoint. A failure costs what was done since the last whole
checkpoint, also a save that was under way, and `restart_s` until work resumes.

Source: Young 1974 (doi:10.1145/361147.361115); Daly 2006 (doi:10.1016/j.future.2004.11.016).
Held by: tests/unit/test_failures.py
"""

import math
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

What = Literal["work", "save", "lost", "restart"]


class Event(NamedTuple):
    """What a run did for a while.

    Args:
        what: It did; "lost" is work, or a save, that a failure has undone.
        start_s: Seconds on the clock of the run.
        end_s: Seconds on the clock of the run.
    """

    what: What
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Story:
    """A run from its begin to its end.

    Args:
        events: Events in order, without gaps.
    """

    events: tuple[Event, ...]

    def seconds(self, what: What) -> float:
        """How long the run did one thing, in all."""
        return sum(event.end_s - event.start_s for event in self.events if event.what == what)

    @property
    def total_s(self) -> float:
        """How long it took."""
        return self.events[-1].end_s

    @property
    def overhead(self) -> float:
        """Seconds beyond the work, for each second of work."""
        return self.total_s / self.seconds("work") - 1


def simulate(
    work_s: float,
    interval_s: float,
    save_s: float,
    restart_s: float,
    mtbf_s: float,
    seed: int = 0,
) -> Story:
    """Play a run with failures at random times.

    Args:
        work_s: Seconds of work in the whole run, without failures and checkpoints.
        interval_s: Seconds of work between two checkpoints.
        save_s: Standstill for a checkpoint.
        restart_s: Seconds from a failure until work resumes; no other failure comes meanwhile.
        mtbf_s: Mean time between failures.
        seed: Seed of the failures.
    """
    random = Random(seed)
    now_s = 0.0
    saved_s = 0.0  # work that no failure can undo
    failure_s = random.expovariate(1 / mtbf_s)
    events = []
    while saved_s < work_s:
        piece_s = min(interval_s, work_s - saved_s)
        done_s = now_s + piece_s
        if done_s + save_s <= failure_s:
            events.append(Event("work", now_s, done_s))
            events.append(Event("save", done_s, done_s + save_s))
            saved_s += piece_s
            now_s = done_s + save_s
        else:
            back_s = failure_s + restart_s
            events.append(Event("lost", now_s, failure_s))
            events.append(Event("restart", failure_s, back_s))
            now_s = back_s
            failure_s = now_s + random.expovariate(1 / mtbf_s)
    return Story(tuple(events))


def overhead(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Expected seconds beyond the work, for each second of work.

    A piece of x = interval + save seconds succeeds with probability exp(-x/M). It fails
    exp(x/M) - 1 times on average before it succeeds, and takes M (exp(x/M) - 1) seconds with all
    of these attempts; each failure adds the restart.

    Args:
        interval_s: Seconds of work between two checkpoints.
        save_s: Standstill for a checkpoint.
        restart_s: Seconds from a failure until work resumes.
        mtbf_s: Mean time between failures, M.

    Source: Daly 2006, section 3; there failures come during restarts too, which makes the factor
        M exp(R/M) in place of M + R.
    """
    failures = math.expm1((interval_s + save_s) / mtbf_s)
    return (mtbf_s + restart_s) * failures / interval_s - 1


def young_interval_s(save_s: float, mtbf_s: float) -> float:
    """The interval at which saving and lost work cost the same: sqrt(2 C M).

    Source: Young 1974.
    """
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """The interval of the lowest expected overhead, also where saving takes long.

    Source: Daly 2006, equation 37.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    first_order = young_interval_s(save_s, mtbf_s)
    return first_order * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
