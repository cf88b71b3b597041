"""A learner's code on ranks: a hang, an error, an endless loop ends as one line that says where."""

import linecache

import pytest
import torch
import torch.distributed as dist

from labcode.comm import ring
from labcode.pool.answers import LateError
from labcode.pool.limits import limited
from labcode.teach.check import check
from labcode.teach.exercises.on_ranks import GROUPS, STILL_THE_WORLD, in_groups, without


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("labcode.pool.ranks.HANG_S", 1.0)


def total(group):
    x = torch.tensor(dist.get_rank())
    dist.all_reduce(x, group=group)
    return x.item()


def test_results_come_in_the_order_of_each_group(ranks4):
    assert in_groups(ranks4, GROUPS, total) == [[6] * 4, [6] * 3]
    assert in_groups(ranks4, ((0, 1, 2, 3), (3, 1)), total) == [[6] * 4, [4] * 2]


def asserts(group):
    assert group.rank() != 1, "the sum is missing"


def asserts_in_the_small_group(group):
    assert group.size() == 4 or group.rank() < 1, "the sum is missing"


def in_the_world(group):
    dist.all_reduce(torch.ones(3))


def index_of_the_world(group):
    return list(range(group.size()))[dist.get_rank()]


def endless(group):
    while dist.get_rank() == 2:
        pass


def endless_while_others_wait(group):
    while group.rank() == 0:
        pass
    dist.barrier(group)


def not_written_yet(group):
    raise NotImplementedError("exercise: your code here")


LATE = "was still at work after 3 s, and had to be stopped: does each loop come to its end?"
FAULTS = {
    "an assertion": (asserts, "on rank 1: the sum is missing"),
    "an assertion in the small group": (
        asserts_in_the_small_group,
        "with ranks 0, 1, 2 and 3 it is right; in the group of ranks 1, 2 and 3, on the rank with "
        f"number 1 in the group: the sum is missing. {STILL_THE_WORLD}",
    ),
    "the world's group": (
        in_the_world,
        "in the group of ranks 1, 2 and 3: rank 0 has finished, "
        "ranks 1, 2 and 3 wait in all_reduce of float32 [3]",
    ),
    "an index": (
        index_of_the_world,
        "in the group of ranks 1, 2 and 3: on the rank with number 2 in the group: IndexError: "
        "list index out of range",
    ),
    "a loop without an end": (endless, f"rank 2 {LATE}"),
    "a loop, and the others wait": (endless_while_others_wait, f"rank 0 {LATE}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_that_says_where(ranks4, quick, fault):
    work, text = FAULTS[fault]
    with pytest.raises(AssertionError) as caught:
        in_groups(ranks4, GROUPS, work, limit_s=3)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert in_groups(ranks4, GROUPS[:1], total) == [[6] * 4]  # the pool can be used again


def test_what_is_not_done_yet_stays_so(ranks4, capsys):
    check("99.1", lambda: in_groups(ranks4, GROUPS, not_written_yet))
    assert capsys.readouterr().out == "[ ] 99.1 not done yet\n"


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
    monkeypatch.setattr("labcode.teach.check.LIMIT_S", 2)
    check("99.1", lambda: ranks2.run(names["spin"]))
    said = capsys.readouterr().out
    assert said.startswith("[x] 99.1 wrong: rank 1 was still at work after 2 s, and had to be")
    assert "of your cell, in spin: `" in said


def test_what_hears_nothing_is_stopped_as_well(ranks2, monkeypatch):
    monkeypatch.setattr("labcode.pool.ranks.PATIENCE_S", 1.0)

    def deaf(rank):
        while rank == 0:
            try:
                while True:
                    pass
            except KeyboardInterrupt:
                continue

    with pytest.raises(LateError, match=r"^rank 0 was still at work after 1 s"):
        ranks2.run(deaf, limit_s=1)
    with pytest.warns(UserWarning, match="started anew"):
        assert ranks2.run(lambda rank: rank) == [0, 1]


def test_a_limit_of_a_call_comes_before_that_of_its_block(ranks2):
    with limited(0.5):
        assert ranks2.run(total_after, 1.0, limit_s=30) == [1, 1]
        with pytest.raises(LateError, match=r"after 0\.5 s"):
            ranks2.run(total_after, 5.0)
    assert ranks2.run(total_after, 1.0) == [1, 1]


def total_after(seconds):
    import time

    time.sleep(seconds)
    return total(dist.group.WORLD)


# ---- labcode's own answers


def own_way(x):
    return x


def test_labcodes_own_answer_is_found_under_any_name():
    another_name = ring.loopback_bytes
    found = r"^ring\.loopback_bytes is labcode's own answer"
    with pytest.raises(AssertionError, match=found), without(ring.all_reduce, ring.loopback_bytes):
        another_name()


def test_what_is_not_forbidden_may_be_called():
    with without(ring.all_reduce):
        assert own_way(3) == 3
    with pytest.raises(KeyError), without(ring.all_reduce):
        raise KeyError


def test_the_pool_announces_its_start(monkeypatch):
    from labcode.pool.ranks import Ranks

    said = []
    monkeypatch.setattr(Ranks, "announce", staticmethod(said.append))
    with Ranks(1):
        assert said == ["starting 1 rank", ""]
