"""Who is in which roll call, when agents start ranks again and do not count alike; no processes."""

import os

import pytest
import torch.distributed as dist

from labcode.runtime import meeting
from labcode.runtime.meeting import MeetingError, RollCallError
from labcode.runtime.place import Place


@pytest.fixture
def come(monkeypatch):
    """`come(rank)`: a new process of that rank, of two that agents have started, comes."""
    store = dist.HashStore()
    pids = iter(range(1000, 2000))

    def start(rank, has_agent=True):
        # each rank is a process of its own
        pid = next(pids)
        monkeypatch.setattr(os, "getpid", lambda: pid)
        place = Place(rank, 2, 0, 1, address=("localhost", 1), has_agent=has_agent)
        return meeting._RollCall(place, store)

    return start


def test_all_go_on_when_rank_0_has_seen_everybody(come):
    first = come(1)
    assert not first.is_complete() and first.number == 0
    assert first.roll() == ([1], [0])
    zero = come(0)
    assert not zero.is_complete()
    assert not first.is_complete() and first.number == 1
    assert zero.is_complete() and first.is_complete()
    assert zero.number == 1


def test_a_rank_that_comes_again_waits_for_the_next_roll_call(come):
    zero = come(0)
    old = come(1)
    old.is_complete()
    assert zero.is_complete()
    again = come(1)  # its name stands in the first one, which is complete
    assert not again.is_complete() and again.number == 0
    new_zero = come(0)
    assert not new_zero.is_complete()
    assert not again.is_complete() and again.number == 2
    assert new_zero.is_complete() and again.is_complete()


def test_a_roll_call_whose_rank_0_is_gone_is_left_for_the_next(come):
    come(0)  # dies before rank 1 has come
    one = come(1)
    assert not one.is_complete() and one.number == 1
    zero = come(0)
    assert not one.is_complete() and one.number == 2
    assert zero.is_complete() and one.is_complete()


def test_the_verdict_of_an_attempt_before_ends_nobody(come):
    come(0).pronounce("rank 1 has not come")
    one = come(1)
    assert not one.is_complete()
    one.raise_verdict()
    zero = come(0)
    assert not one.is_complete() and one.number == 2
    assert zero.is_complete() and one.is_complete()


def test_a_verdict_ends_those_who_are_in_the_roll_call(come):
    zero = come(0)
    one = come(1)
    one.is_complete()
    zero.pronounce("it takes too long")
    with pytest.raises(RollCallError, match="it takes too long"):
        one.raise_verdict()


def test_without_an_agent_a_rank_comes_once(come):
    come(0, has_agent=False)
    come(1, has_agent=False).is_complete()
    with pytest.raises(MeetingError, match="two processes have rank 1 of 2"):
        come(1, has_agent=False).is_complete()
