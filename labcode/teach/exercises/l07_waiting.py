'''The exercises of lesson 07 on ranks that wait. The text of each assertion is a hint.

What the learner is given:

    def roll_call(store, name, rank, num_ranks, limit_s):
        """The ranks that have not come to the point `name` within `limit_s` seconds."""
        ### BEGIN SOLUTION

    def shares(sample_s, global_batch):
        """How many samples each rank gets, so that the slowest rank is ready soonest."""
        ### BEGIN SOLUTION

    check("7.7", lambda: l07.roll_call(roll_call, ranks))
    check("7.9", lambda: l07.shares(shares))
'''

import itertools
import numbers
import random
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from labcode.pool.answers import RankError
from labcode.pool.ranks import Ranks
from labcode.teach.check import due, is_stub, reason
from labcode.teach.exercises.in_notebook import bounded

SHORT_S = 2.5  # that ranks wait for the absent ones
LONG_S = 20.0  # where nobody is absent, and so nobody waits that long
LATE_S = 0.5  # how late a rank comes that is still in time
SLACK_S = 5.0  # that a busy machine may add
MANY = 8  # ranks, most of which are absent
STOPPED_S = LONG_S + 15.0  # a call that takes longer never ends
EARLIER = "rank 2 does not come, and was at an earlier point"

# ---- 7.7


def roll_call(answer: Any, ranks: Ranks) -> None:
    """The learner's `roll_call` on four ranks, and for eight of which one is there."""
    cases = {
        "all come at once": {},
        "rank 2 comes late, but in time": {2: LATE_S},
        EARLIER: {2: None},
        "ranks 1 and 3 do not come": {1: None, 3: None},
        "rank 0 does not come": {0: None},
    }
    for case, absences in cases.items():
        found = _on_ranks(ranks, case, _call, answer, case, absences, ranks.n)
        _judge(case, found, absences)
    only_one = "only rank 0 comes"
    (alone, seconds), *_ = _on_ranks(ranks, only_one, _call_alone, answer)
    assert alone == list(range(1, MANY)), (
        f"of {MANY} ranks only rank 0 came, and it returned {alone}"
    )
    assert seconds < SHORT_S + SLACK_S, (
        f"with {MANY - 1} ranks absent and a limit of {SHORT_S:g} s it took {seconds:.1f} s: the "
        "limit is for all of them together"
    )


def _on_ranks(ranks: Ranks, case: str, work: Any, *args: Any) -> list[Any]:
    """`ranks.run`, and what goes wrong in it as a hint."""
    try:
        return ranks.run(work, *args, limit_s=STOPPED_S)
    except RankError as error:
        if is_stub(error):
            raise
        text = reason(error)
    if "still at work" in text:
        text = (
            f"{text.partition(',')[0]}: a `get` knows nothing of your limit, and a `wait` whose "
            "time-out is zero or less never ends"
        )
    elif "no rank put into the store" in text:
        text = (
            f"{text.partition(' store')[0]} store, and the RuntimeError that says so came out of "
            "roll_call: what does it mean there?"
        )
    raise AssertionError(f"where {case}, {text}")


def _pool_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _fresh_store(case: str) -> dist.Store:
    """A store in which nobody has left a note yet; the same on all ranks."""
    names = [f"7.7/{case}/{time.monotonic_ns()}"]
    dist.broadcast_object_list(names, src=0)
    return dist.PrefixStore(names[0], _pool_store())


def _call(rank: int, answer: Any, case: str, absences: dict, num_ranks: int) -> Any:
    store = _fresh_store(case)
    if case == EARLIER:
        due(answer(store, "the beginning of the epoch", rank, num_ranks, LONG_S))
    late_s = absences.get(rank, 0.0)
    if late_s is None:
        return None
    time.sleep(late_s)
    limit_s = SHORT_S if None in absences.values() else LONG_S
    began = time.perf_counter()
    found = due(answer(store, "the end of the epoch", rank, num_ranks, limit_s))
    seconds = time.perf_counter() - began
    # a busy machine takes a second for that, somebody who waits for nothing takes all of it
    if not absences and not found and seconds > LONG_S - SLACK_S:
        raise AssertionError(
            f"all ranks came at once, and it took {seconds:.0f} s: who waits for the whole limit, "
            "though nobody is absent?"
        )
    return found


def _call_alone(rank: int, answer: Any) -> Any:
    store = _fresh_store("alone")
    if rank != 0:
        return None, 0.0
    began = time.perf_counter()
    found = due(answer(store, "the end of the epoch", 0, MANY, SHORT_S))
    return list(found), time.perf_counter() - began


def _judge(case: str, found: Sequence[Any], absences: dict) -> None:
    missing = [rank for rank, late_s in absences.items() if late_s is None]
    for rank, answer in enumerate(found):
        if rank in missing:
            continue
        assert isinstance(answer, (list, tuple, set)), (
            f"where {case}, rank {rank} got {answer!r}: a list of ranks is wanted"
        )
        assert sorted(answer) == missing, (
            f"where {case}, rank {rank} got {sorted(answer)} as the absent ones, expected {missing}"
        )


# ---- 7.9


def shares(answer: Any) -> None:
    """The learner's `shares`, against the best of all possible ones."""
    draw = random.Random(7)
    cases = [([1.0, 1.0], 64), ([1.0, 3.0], 64), ([1.0, 3.0], 7), ([0.002, 0.001, 0.004], 10)]
    cases += [([1.0], 5), ([1.0, 100.0], 8), ([2.0, 1.0], 0)]
    for _ in range(12):
        sample_s = [draw.choice([0.5, 1.0, 1.5, 2.0, 3.0]) for _ in range(draw.choice([2, 3]))]
        cases.append((sample_s, draw.randrange(1, 20)))
    for sample_s, global_batch in cases:
        given = list(sample_s)
        hint = "does the loop end when all samples are given out?"
        found = due(bounded(hint, answer, given, global_batch))
        asked = f"shares({sample_s}, {global_batch})"
        assert given == sample_s, f"{asked} has changed the list that it was given"
        _check_shares(asked, found, sample_s, global_batch)


def _check_shares(asked: str, found: Any, sample_s: list[float], global_batch: int) -> None:
    assert isinstance(found, (list, tuple)) and len(found) == len(sample_s), (
        f"{asked} is {found!r}: a list with one number for each of the {len(sample_s)} ranks"
    )
    for share in found:
        is_whole = isinstance(share, numbers.Integral) and not isinstance(share, bool)
        assert is_whole, f"{asked} is {list(found)}: samples are whole numbers, of type int"
        assert int(share) >= 0, f"{asked} is {list(found)}: a rank cannot get less than no sample"
    assert sum(found) == global_batch, (
        f"{asked} is {list(found)}, together {sum(found)} samples and not {global_batch}"
    )
    own_s = _step_s(found, sample_s)
    best_s = min(_step_s(other, sample_s) for other in _all_shares(len(sample_s), global_batch))
    assert own_s <= best_s * (1 + 1e-9), (
        f"{asked} is {list(found)}: the slowest rank needs {own_s:.4g} s, and {best_s:.4g} s is "
        "possible"
    )


def _step_s(found: Sequence[int], sample_s: Sequence[float]) -> float:
    return max(share * seconds for share, seconds in zip(found, sample_s))


def _all_shares(num_ranks: int, global_batch: int) -> list[tuple[int, ...]]:
    found = []
    for first in itertools.product(range(global_batch + 1), repeat=num_ranks - 1):
        if sum(first) <= global_batch:
            found.append((*first, global_batch - sum(first)))
    return found
