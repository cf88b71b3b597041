"""A learner's code on real ranks: what simulated ranks have passed, once more; and its limits."""

import linecache
import os
import sys
import types

import pytest
import torch
import torch.distributed as dist

from course.answer import Exercise, Hint
from course.check import check
from course.exercises import expect
from course.pool.answers import LateError
from course.pool.limits import limited
from labcode.comm.grid import group_of


def total(group):
    x = torch.tensor(1.0 + group.rank())
    dist.all_reduce(x, group=group)
    return x


def total_of(rank, members):
    group = group_of(members)
    return None if group is None else total(group).item()


def test_results_come_in_the_order_of_each_group(ranks4):
    assert ranks4.run(total_of, (0, 1, 2, 3)) == [10.0] * 4
    assert ranks4.run(total_of, (1, 3)) == [None, 3.0, None, 3.0]


def test_what_is_the_same_on_real_ranks_is_said_to_be(ranks4):
    outcome = expect.in_groups(total)
    assert expect.confirm_in_group(None, outcome, total) == ""
    said = expect.confirm_in_group(ranks4, outcome, total)
    assert said == "and the same on 4 real ranks"


def its_process(group):
    return torch.tensor(float(os.getpid()))


def test_what_differs_on_real_ranks_is_told(ranks4, monkeypatch):
    outcome = expect.in_groups(its_process)
    with pytest.raises(Hint, match="on 4 real ones rank 1 has another result"):
        expect.confirm_in_group(ranks4, outcome, its_process)


def test_what_fails_on_real_ranks_alone_is_told(ranks4):
    outcome = expect.in_groups(total)
    with pytest.raises(Hint, match="on simulated ranks it is right; on 4 real ones: on rank 1: no"):
        expect.confirm_in_group(ranks4, outcome, refuses)


def refuses(group):
    raise Hint("no")


CELL = """\
def spin(rank):
    count = 0
    while rank == 1:
        count += 1
"""


def test_an_endless_loop_is_shown_by_its_line(ranks2, capsys, monkeypatch):
    file = "/tmp/ipykernel_12/34.py"
    monkeypatch.setitem(linecache.cache, file, (len(CELL), None, CELL.splitlines(True), file))
    names = {"__name__": "__main__"}
    exec(compile(CELL, file, "exec"), names)
    monkeypatch.setattr("course.check.LIMIT_S", 2)
    exercises = {"99.1": Exercise(check=lambda answer, ranks: ranks.run(answer))}
    module = types.SimpleNamespace(EXERCISES=exercises)
    monkeypatch.setitem(sys.modules, "course.exercises.l99", module)
    check("99.1", names["spin"], ranks2)
    said = capsys.readouterr().out
    assert said.startswith("[x] 99.1 wrong: rank 1 was still at work after 2 s, and had to be")
    assert "of your cell, in spin: `" in said


def test_what_hears_nothing_is_stopped_as_well(ranks2):
    def deaf(rank):
        while rank == 0:
            try:
                while True:
                    pass
            except KeyboardInterrupt:
                continue

    with pytest.raises(LateError, match=r"^rank 0 was still at work after 1 s"):
        ranks2.run(deaf, limit_s=1)
    assert ranks2.run(lambda rank: rank) == [0, 1]


def test_a_limit_of_a_call_comes_before_that_of_its_block(ranks2):
    with limited(0.5):
        assert ranks2.run(total_after, 1.0, limit_s=30) == [3, 3]
        with pytest.raises(LateError, match=r"after 0\.5 s"):
            ranks2.run(total_after, 5.0)
    assert ranks2.run(total_after, 1.0) == [3, 3]


def total_after(rank, seconds):
    import time

    time.sleep(seconds)
    return total(dist.group.WORLD).item()


def test_the_pool_announces_its_start(monkeypatch):
    from course.pool.ranks import Ranks

    said = []
    monkeypatch.setattr(Ranks, "announce", staticmethod(said.append))
    with Ranks(1):
        assert said == ["starting 1 rank", ""]
