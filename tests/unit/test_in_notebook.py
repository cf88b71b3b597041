"""A learner's code that runs in the notebook's own process comes to an end, and breaks nothing."""

import itertools
import statistics
import sys

import pytest

from course.answer import Hint
from course.exercises import in_notebook
from course.exercises.in_notebook import bounded, without
from labcode.comm import ring


def two_lines():
    number = 0
    while True:
        number += 1


def one_line():
    while True: pass  # fmt: skip  # noqa: E701


def swallows_everything():
    while True:
        try:
            one_line()
        except:  # noqa: E722
            continue


def keeps_what_it_catches():
    caught = []
    while True:
        try:
            one_line()
        except BaseException as error:
            caught.append(error)
            one_line()


def called_by_a_library_without_end():
    return all(map(lambda number: number >= 0, itertools.count()))  # noqa: C417


ENDLESS = [
    two_lines,
    one_line,
    swallows_everything,
    keeps_what_it_catches,
    called_by_a_library_without_end,
]


@pytest.mark.parametrize("endless", ENDLESS)
def test_what_has_no_end_is_ended(monkeypatch, endless):
    monkeypatch.setattr(in_notebook, "MAX_STEPS", 1000)
    before = sys.gettrace()
    with pytest.raises(Hint, match="after 1,000 steps: does it end"):
        bounded("does it end?", endless)
    assert sys.gettrace() is before


def test_lines_of_libraries_do_not_count(monkeypatch):
    monkeypatch.setattr(in_notebook, "MAX_STEPS", 200)

    def sort_much():
        return statistics.median(range(1000)), statistics.mean(range(100))

    assert bounded("does it end?", sort_much) == (499.5, 49.5)


def test_a_loop_that_ends_may_be_long():
    def count(first):
        total = first
        for number in range(50_000):
            total += number
        return total

    assert bounded("does it end?", count, 1) == 50_000 * 49_999 // 2 + 1


def test_what_the_function_raises_is_raised():
    def fails():
        return 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        bounded("does it end?", fails)
    assert caught.traceback[-1].name == "fails"


def test_the_calls_of_the_function_are_watched_as_those_of_the_check():
    def uses_the_answer():
        return statistics.mean([1, 2])

    with pytest.raises(Hint, match="mean is PyTorch's"), without(statistics.mean):
        bounded("does it end?", uses_the_answer)


# ---- labcode's own answers


def own_way(x):
    return x


def test_labcodes_own_answer_is_found_under_any_name():
    another_name = ring.loopback_bytes
    found = r"^ring\.loopback_bytes is labcode's own answer"
    with pytest.raises(Hint, match=found), without(ring.all_reduce, ring.loopback_bytes):
        another_name()


def test_what_is_not_forbidden_may_be_called():
    with without(ring.all_reduce):
        assert own_way(3) == 3
    with pytest.raises(KeyError), without(ring.all_reduce):
        raise KeyError
