"""The checks of the exercises of lesson 07 on ranks that wait."""

import itertools
import math
import numbers
import random
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from course.answer import RETURNED_NONE, Hint, due, is_stub, reason
from course.exercises.expect import refuse
from course.exercises.in_notebook import bounded
from course.pool.answers import RankError
from course.pool.ranks import Ranks

# ---- 7.6, on real ranks: they wait in the store itself, by its clock

SHORT_S = 2.5  # that ranks wait for the absent ones
LONG_S = 20.0  # where nobody is absent, and so nobody waits that long
LATE_S = 0.5  # how late a rank comes that is still in time
SLACK_S = 5.0  # that a busy machine may add
WAIT_SLACK_S = 1.0  # by which waits of a fixed length may exceed the limit
MANY = 8  # ranks, most of which are absent
EARLIER = "rank 2 does not come, and was at an earlier point"
FOR_ALL = "the limit is for all of them together"
Absences = Mapping[int, float | None]  # {rank: how late it comes, or None for never}
CASES: dict[str, Absences] = {
    "all come at once": {},
    "rank 2 comes late, but in time": {2: LATE_S},
    EARLIER: {2: None},
    "ranks 1 and 3 do not come": {1: None, 3: None},
    "rank 0 does not come": {0: None},
}


def roll_call(answer: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `roll_call` on four ranks, and for eight of which one is there."""
    for case, absences in CASES.items():
        found = _on_ranks(ranks, case, _call, answer, case, absences, ranks.n)
        _check_absent(f"where {case}, ", found, absences)
    (alone, seconds), *_ = _on_ranks(ranks, "only rank 0 comes", _call_alone, answer)
    mistakes = {
        f"of {MANY} ranks only rank 0 came, and it returned {alone}": (
            list(alone) != list(range(1, MANY))
        ),
        f"with {MANY - 1} ranks absent and a limit of {SHORT_S:g} s it took {seconds:.1f} s: "
        f"{FOR_ALL}": seconds > SHORT_S + SLACK_S,
    }
    refuse(mistakes)


def _on_ranks(ranks: Ranks, case: str, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`ranks.run`, and what goes wrong in it as a hint."""
    try:
        return ranks.run(work, *args)
    except RankError as error:
        if is_stub(error):
            raise
        text = reason(error)
    if "no rank put into the store" in text:
        text = (
            f"{text.partition(' store')[0]} store, and the RuntimeError that says so came out of "
            "roll_call: what does it mean there?"
        )
    raise Hint(f"where {case}, {text}")


class _Store(dist.PrefixStore):
    """A store that says at once which call would not end with the limit."""

    limit_s = math.inf
    in_vain_s = 0.0  # that waits have taken
    mistake = ""  # also for who catches all exceptions
    of_calls: timedelta | None = None  # the time-out of calls that are given none

    def set_timeout(self, timeout: timedelta) -> None:
        self.of_calls = timeout

    def get(self, key: str) -> bytes:
        if self.of_calls is not None:
            self.wait([key])
        if not self.check([key]):
            self._stop("`get` asked for a note that is not there, and it knows nothing of a limit")
        return super().get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            timeout = self.of_calls
        if timeout is None:
            self._stop("a `wait` without a time-out knows nothing of your limit")
        if timeout < timedelta(0):
            self._stop("a `wait` whose time-out is below zero never ends")
        seconds = timeout.total_seconds()
        if self.in_vain_s + seconds > self.limit_s + WAIT_SLACK_S:
            self._stop(
                f"a `wait` of {seconds:.1f} s after {self.in_vain_s:.1f} s of waiting in vain: "
                f"{FOR_ALL}"
            )
        try:
            super().wait(keys, timeout)
        except RuntimeError:
            self.in_vain_s += seconds
            raise

    def _stop(self, hint: str) -> NoReturn:
        self.mistake = hint
        raise Hint(hint)


def _fresh_store(case: str) -> _Store:
    """A store in which nobody has left a note yet; the same on all ranks."""
    names = [f"7.7/{case}/{time.monotonic_ns()}"]
    dist.broadcast_object_list(names, src=0)
    return _Store(names[0], dist.distributed_c10d._get_default_store())


def _call(
    rank: int, answer: Callable[..., Any], case: str, absences: Absences, num_ranks: int
) -> tuple[Any, float]:
    """What a rank is told, and after how many seconds; (None, 0.0) of one that does not come."""
    store = _fresh_store(case)
    if case == EARLIER:
        answer(store, "the beginning of the epoch", rank, num_ranks, LONG_S)
    late_s = absences.get(rank, 0.0)
    if late_s is None:
        return None, 0.0
    time.sleep(late_s)
    return _timed(answer, store, rank, num_ranks, SHORT_S if None in absences.values() else LONG_S)


def _call_alone(rank: int, answer: Callable[..., Any]) -> tuple[Any, float]:
    """Like `_call`, of many ranks of which only rank 0 comes."""
    store = _fresh_store("alone")
    return _timed(answer, store, rank, MANY, SHORT_S) if rank == 0 else (None, 0.0)


def _timed(
    answer: Callable[..., Any], store: _Store, rank: int, num_ranks: int, limit_s: float
) -> tuple[Any, float]:
    store.limit_s = limit_s
    began = time.perf_counter()
    found = answer(store, "the end of the epoch", rank, num_ranks, limit_s)
    refuse({store.mistake: bool(store.mistake)})
    return found, time.perf_counter() - began


def _check_absent(case: str, results: Sequence[tuple[Any, float]], absences: Absences) -> None:
    """Each rank that came was told who did not, and none of them waited for nothing."""
    missing = [rank for rank, late_s in absences.items() if late_s is None]
    for rank, (found, seconds) in enumerate(results):
        if rank in missing:
            continue
        is_list = isinstance(found, (list, tuple, set))
        named = sorted(found) if is_list else found
        mistakes = {
            f"on rank {rank}: {RETURNED_NONE}": found is None,
            f"rank {rank} got {found!r}, expected is a list of ranks": not is_list,
            f"rank {rank} got {named} as the absent ones, expected is {missing}": named != missing,
            # A busy machine takes a second for that; who waits for nothing takes all of it.
            f"on rank {rank}: all ranks came at once, and it took {seconds:.0f} s: who waits for "
            "the whole limit, though nobody is absent?": (
                not absences and seconds > LONG_S - SLACK_S
            ),
        }
        refuse(mistakes, case)


# ---- 7.9


def shares(answer: Callable[..., Any]) -> None:
    """The learner's `shares(sample_s, global_batch)`, against the best of all possible ones."""
    for sample_s, global_batch in _batches():
        asked = f"shares({sample_s}, {global_batch})"
        given = list(sample_s)
        hint = "does the loop end when all samples are given out?"
        found = due(bounded(hint, answer, given, global_batch))
        refuse({f"{asked} has changed the list that it was given": given != sample_s})
        _check_best(asked, found, sample_s, global_batch)


def _batches() -> list[tuple[list[float], int]]:
    """Seconds that a sample takes on each rank, and the number of samples."""
    generator = random.Random(7)
    found = [
        ([1.0, 1.0], 64),
        ([1.0, 3.0], 64),
        ([1.0, 3.0], 7),
        ([0.002, 0.001, 0.004], 10),
        ([1.0], 5),
        ([1.0, 100.0], 8),
        ([2.0, 1.0], 0),
    ]
    for _ in range(12):
        num_ranks = generator.choice([2, 3])
        sample_s = [generator.choice([0.5, 1.0, 1.5, 2.0, 3.0]) for _ in range(num_ranks)]
        found.append((sample_s, generator.randrange(1, 20)))
    return found


def _check_best(asked: str, found: Any, sample_s: list[float], global_batch: int) -> None:
    if not isinstance(found, (list, tuple)) or len(found) != len(sample_s):
        raise Hint(
            f"{asked} is {found!r}, expected is a list with one number for each of the "
            f"{len(sample_s)} ranks"
        )
    case = f"{asked} is {list(found)}"
    for share in found:
        is_whole = isinstance(share, numbers.Integral) and not isinstance(share, bool)
        refuse({": samples are whole numbers, of type int": not is_whole}, case)
    own_s = _step_s(found, sample_s)
    best_s = min(_step_s(other, sample_s) for other in _all_shares(len(sample_s), global_batch))
    mistakes = {
        ": a rank cannot get less than no sample": min(found) < 0,
        f", together {sum(found)} samples and not {global_batch}": sum(found) != global_batch,
        f": the slowest rank needs {own_s:.4g} s, and {best_s:.4g} s is possible": (
            own_s > best_s * (1 + 1e-9)
        ),
    }
    refuse(mistakes, case)


def _step_s(found: Sequence[int], sample_s: Sequence[float]) -> float:
    return max(share * seconds for share, seconds in zip(found, sample_s))


def _all_shares(num_ranks: int, global_batch: int) -> list[tuple[int, ...]]:
    found = []
    for first in itertools.product(range(global_batch + 1), repeat=num_ranks - 1):
        if sum(first) <= global_batch:
            found.append((*first, global_batch - sum(first)))
    return found
