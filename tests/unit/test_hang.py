"""Who waits for whom, told from where each rank stands."""

import sys
from pathlib import Path
from types import FrameType

import pytest

from labcode.doctor import standing
from labcode.doctor.hang import describe
from labcode.doctor.standing import Call, Standing
from labcode.slurm.run.client import JobInfo
from labcode.slurm.run.outcome import explain

ALL = (0, 1, 2, 3)
READ = "read (labcode/data/weather.py, line 88)"


def call(number: int, operation: str = "all_reduce", size: int = 8, ranks=ALL) -> Call:
    return Call(operation, number, ((size,),), ranks, created_s=0.0)


def at(
    rank: int, waits_in: Call | None, before: tuple[Call, ...] = (), place: str = "step"
) -> Standing:
    recent = before if waits_in is None else (*before, waits_in)
    return Standing(rank, step=7, place=place, waits_in=waits_in, recent=recent)


def test_the_rank_that_has_not_come_is_named_first_with_what_it_does() -> None:
    standings = [at(rank, call(12)) for rank in (0, 1, 3)]
    standings.append(at(2, None, before=(call(11),), place=READ))
    assert describe(standings, 4) == (
        f"rank 2 has not come to all_reduce #12 of [8]: it is in {READ}; "
        "ranks 0, 1 and 3 wait in all_reduce #12 of [8] among ranks 0-3"
    )


def test_of_a_chain_of_waiting_ranks_its_end_is_blamed() -> None:
    pair = (0, 1)
    standings = [
        at(0, call(5, ranks=pair)),
        at(1, call(9, "broadcast", ranks=(1, 2)), before=(call(4, ranks=pair),)),
        at(2, None, before=(call(8, "broadcast", ranks=(1, 2)),), place=READ),
    ]
    text = describe(standings, 3)
    assert text.startswith(f"rank 2 has not come to broadcast #9 of [8]: it is in {READ}; ")
    assert "rank 0 waits in all_reduce #5 of [8] among ranks 0 and 1" in text
    assert "rank 1 has not come" not in text


@pytest.mark.parametrize("other", [call(12, size=9), call(12, "broadcast")])
def test_ranks_that_do_different_things_are_told_apart(other: Call) -> None:
    standings = [at(0, call(12)), at(1, call(12)), at(2, other), at(3, call(12))]
    text = describe(standings, 4)
    assert text.startswith(
        f"the ranks disagree: ranks 0, 1 and 3 called all_reduce #12 of [8], rank 2 called {other};"
    )


def test_ranks_that_disagreed_and_went_on_are_found_as_well() -> None:
    gone_on = [at(rank, call(13), before=(call(12),)) for rank in (0, 1, 3)]
    text = describe([*gone_on, at(2, call(12, size=9))], 4)
    assert text.startswith("the ranks disagree: ranks 0, 1 and 3 called all_reduce #12 of [8], ")
    assert "rank 2 waits in all_reduce #12 of [9]" in text


def test_a_rank_that_does_not_answer_is_named() -> None:
    text = describe([at(0, call(1)), at(1, call(1))], 3)
    assert text.startswith("rank 2 does not answer (")


def test_where_torch_records_nothing_each_rank_tells_its_place() -> None:
    standings = [at(0, None, place="recv (a.py, line 1)"), at(1, None, place=READ)]
    assert describe(standings, 2) == f"rank 0 is in recv (a.py, line 1); rank 1 is in {READ}"


def test_a_rank_that_called_the_collective_has_come() -> None:
    """It has gone on already, as the source of a broadcast may."""
    standings = [at(0, None, before=(call(3, "broadcast"),)), at(1, call(3, "broadcast"))]
    assert "has not come" not in describe(standings, 2)


def test_a_standing_survives_its_journey() -> None:
    own = at(2, call(12), before=(call(3, ranks=(2,)),), place=READ)
    assert Standing.from_json(own.to_json()) == own


def test_a_place_is_that_of_a_function_of_ours_without_the_folders_of_a_machine() -> None:
    frames: list[FrameType] = []

    def reads(_: object = None) -> bool:
        frames.append(sys._getframe())
        return True

    list(map(reads, [1]))
    here = standing.place_of(frames[0])
    assert here.startswith("reads (tests/unit/test_hang.py, line ")
    assert str(Path.home()) not in here


def test_the_recorders_entry_of_a_call() -> None:
    entry = {
        "process_group": ["7", "grid: ranks along some axes"],
        "is_p2p": False,
        "profiling_name": "gloo:all_reduce",
        "collective_seq_id": 812,
        "input_sizes": [[1024], []],
        "time_created_ns": 2_000_000_000,
    }
    found = standing.call_of(entry, {"7": (1, 3)})
    assert found == Call("all_reduce", 812, ((1024,), ()), (1, 3), created_s=2.0)
    assert str(found) == "all_reduce #812 of [1024], one number"
    assert standing.call_of(entry, {}) is None
    assert standing.call_of(entry | {"is_p2p": True}, {"7": (1, 3)}) is None


TIMED_OUT = (
    "rank 0: after step 75: a collective has timed out: rank 2 has not come to all_reduce #183 "
    f"of [8]: it is in {READ}; ranks 0 and 1 wait in all_reduce #183 of [8] among ranks 0-2\n"
)


def info(state: str) -> JobInfo:
    return JobInfo("17", "try", state, "", (2, 0), 0, "n1", "00:01:00", "00:10:00", None)


def test_a_job_whose_collective_timed_out_blames_the_rank_that_did_not_come() -> None:
    outcome = explain(info("FAILED"), TIMED_OUT)
    assert outcome.rank == 2
    assert outcome.reason.startswith("a collective has timed out: rank 2 has not come to all_red")


def test_a_hang_that_the_time_limit_ended_is_told_as_the_ranks_told_it() -> None:
    log = "hang: no progress for 60 s: rank 1 has not come to barrier #3\n"
    outcome = explain(info("TIMEOUT"), log, "no step since 14:02: a rank hangs")
    assert outcome.reason == (
        "no progress for 60 s: rank 1 has not come to barrier #3 "
        "(the time limit of 00:10:00 ended it)"
    )
