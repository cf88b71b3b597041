"""What a rank writes down of its calls, and what it finds there of the others, in one process."""

import time
import types

import pytest
import torch
import torch.distributed as dist

from course.pool import record, recorder
from course.pool.recorder import CollectiveMismatch, Recorder

ALL_REDUCE, BROADCAST = (record.NAMES.index(name) for name in ("all_reduce", "broadcast"))


class Rank:
    """A rank of two with its recorder."""

    def __init__(self, folder, rank):
        self.recorder = Recorder(str(folder), rank, 2)
        self.world = recorder._Group(recorder._key("world"), (0, 1))

    def enter(self, name):
        """Call something; its place."""
        return self.recorder.enter(self.world, name, torch.ones(3))


@pytest.fixture
def two(tmp_path):
    record.create(tmp_path, 2)
    return Rank(tmp_path, 0), Rank(tmp_path, 1)


@pytest.fixture
def at_look(monkeypatch):
    """`at_look(number, function)` calls it when a rank looks for so many times at the others."""

    def at_look(number, function):
        looks = iter(range(1, 10_000))

        def sleep(_seconds):
            if next(looks) == number:
                function()

        clock = types.SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
        monkeypatch.setattr(recorder, "time", clock)

    return at_look


@pytest.mark.parametrize("caller", [0, 1])
def test_a_call_is_compared_when_torch_has_taken_the_other(two, at_look, caller):
    me, other = two[caller], two[1 - caller]
    place = other.enter(ALL_REDUCE)
    taken = []

    def take():
        taken.append(place)
        other.recorder.has_started(None, place)

    at_look(5, take)
    text = f"rank {1 - caller} called all_reduce of float32 \\[3\\]"
    with pytest.raises(CollectiveMismatch, match=text):
        me.enter(BROADCAST)
    assert taken
    # what has raised is not made: after it, both may go on together
    assert me.world.count == other.world.count - 1


@pytest.mark.parametrize("caller", [0, 1])
def test_a_call_that_torch_refuses_is_compared_with_none(two, at_look, caller):
    me, other = two[caller], two[1 - caller]
    place = other.enter(ALL_REDUCE)
    at_look(5, lambda: other.recorder.take_back(other.world, place))
    assert me.enter(BROADCAST) == place
    assert other.enter(BROADCAST) == place


def test_a_call_that_torch_does_not_answer_is_compared_too(two, monkeypatch):
    me, other = two
    monkeypatch.setattr(recorder, "ANSWER_S", 0.0)
    other.enter(ALL_REDUCE)
    with pytest.raises(CollectiveMismatch):
        me.enter(BROADCAST)


class Work(dist.Work):
    """What an asynchronous call gives."""


def test_a_work_that_nobody_waited_for_leaves_its_place_to_none(two, monkeypatch):
    rank, _ = two
    monkeypatch.setattr(recorder, "_recorders", [rank.recorder])
    waits_in = []
    wait = recorder._wait(lambda work: waits_in.append(rank.recorder.file[record.WAITS_IN]))
    place = rank.enter(ALL_REDUCE)
    work = Work()
    rank.recorder.has_started(work, place)
    number = id(work)
    del work
    others = [Work()]
    while id(others[-1]) != number and len(others) < 10_000:
        others.append(Work())  # of calls that are not seen, such as those of DDP
    assert id(others[-1]) == number
    wait(others[-1])
    rank.recorder.has_started(others[-1], place)
    wait(others[-1])
    assert waits_in == [0, place + 1]
