"""A learner's code that runs in the notebook's own process comes to an end, and breaks nothing."""

import sys

import pytest

from labcode.teach.exercises import in_notebook
from labcode.teach.exercises.in_notebook import bounded


def test_a_loop_without_an_end_is_ended_and_the_trace_put_back(monkeypatch):
    monkeypatch.setattr(in_notebook, "MAX_LINES", 1000)
    before = sys.gettrace()

    def endless():
        while True:
            pass

    ended = pytest.raises(AssertionError, match="after 1,000 lines: does it end")
    with ended, bounded("does it end?"):
        endless()
    assert sys.gettrace() is before


def test_lines_of_libraries_do_not_count(monkeypatch):
    monkeypatch.setattr(in_notebook, "MAX_LINES", 20)

    def sort_much():
        import statistics

        return statistics.median(range(1000)), statistics.mean(range(100))

    with bounded("does it end?"):
        assert sort_much() == (499.5, 49.5)


def test_a_loop_that_ends_may_be_long():
    def count():
        total = 0
        for number in range(50_000):
            total += number
        return total

    with bounded("does it end?"):
        assert count() == 50_000 * 49_999 // 2
