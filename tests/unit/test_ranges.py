"""Seconds by named part: nesting, means, a GPU's clock, and what a profiler is told."""

import inspect

import pytest
import torch
from faults.waiting import pause
from torch.profiler import ProfilerActivity, profile

from labcode.measure import ranges as module
from labcode.measure.ranges import StepRanges


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes only when it is told to."""
    moment = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: moment[0])

    def sleep(seconds):
        moment[0] += seconds

    return sleep


def test_each_second_counts_once_for_the_innermost_part(clock):
    ranges = StepRanges()
    clock(1)
    with ranges("forward"):
        clock(2)
        with ranges("communication"):
            clock(4)
        clock(8)
    clock(16)
    with ranges("forward"):
        clock(32)
    ranges.end_step()
    assert ranges.take() == {"forward": 42, "communication": 4}


def test_means_over_the_steps_since_it_was_last_asked(clock):
    ranges = StepRanges()
    for seconds in (1, 2, 3):
        with ranges("data"):
            clock(seconds)
        ranges.end_step()
        clock(100)  # validation, between two steps
    assert ranges.take() == {"data": 2}
    assert ranges.take() == {}
    with ranges("data"):
        clock(5)
    ranges.end_step()
    assert ranges.take() == {"data": 5}


def test_a_step_may_end_within_a_part(clock):
    ranges = StepRanges()
    with ranges("optimizer"):
        clock(1)
        ranges.end_step()
        clock(2)
    assert ranges.take() == {"optimizer": 3}


def test_an_error_ends_its_part(clock):
    ranges = StepRanges()
    with pytest.raises(KeyError), ranges("forward"):
        clock(1)
        raise KeyError("x")
    with ranges("backward"):
        clock(2)
    ranges.end_step()
    assert ranges.take() == {"forward": 1, "backward": 2}


def test_of_a_real_clock():
    ranges = StepRanges()
    with ranges("data"):
        pause(0.02)
    ranges.end_step()
    assert ranges.take()["data"] >= 0.02


def test_a_profiler_sees_the_parts_only_when_they_are_marked():
    ranges = StepRanges()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        with ranges("forward"):
            torch.ones(2)
        ranges.marked = True
        with ranges("backward"):
            torch.ones(2)
    names = {event.name for event in recorded.events()}
    assert "backward" in names
    assert "forward" not in names


class FakeEvent:
    """An event of CUDA whose time is said by the test, as is when the device has passed it."""

    def __init__(self):
        self.at_ms = None

    def query(self):
        return self.at_ms is not None

    def synchronize(self):
        assert self.query()

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


def test_on_a_gpu_events_are_the_clock_and_no_step_waits_for_them(monkeypatch):
    made = []

    def record(on_gpu):
        made.append(FakeEvent())
        return made[-1]

    monkeypatch.setattr(module.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(module.torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(module, "_now", record)
    ranges = StepRanges(on_gpu=True)
    for _ in range(2):
        with ranges("forward"):
            pass
        with ranges("backward"):
            pass
        ranges.end_step()  # the device has passed none of them, and nothing waits
    assert len(made) == 8
    for event, at_ms in zip(made, (0, 10, 10, 30, 50, 70, 70, 110)):
        event.at_ms = at_ms
    assert ranges.take() == pytest.approx({"forward": 0.015, "backward": 0.030})


def test_while_a_cuda_graph_is_recorded_no_moment_is_noted(monkeypatch):
    monkeypatch.setattr(module.torch.cuda, "is_current_stream_capturing", lambda: True)
    ranges = StepRanges(on_gpu=True)
    with ranges("forward"):
        pass
    ranges.end_step()
    assert ranges.take() == {}


def test_the_class_can_be_read_in_a_lesson():
    lines, _ = inspect.getsourcelines(StepRanges)
    assert len(lines) <= 60
