"""The checks of the exercises: right answers pass, wrong ones get the hint meant for them.

There are some seven hundred answers, and many of them wait for a message that never comes. `make
test` tries one right and one wrong answer to each exercise, `make test-full` all right ones and
five wrong ones, `make answers` all.
"""

import runpy
from pathlib import Path

import pytest
from answers import MIN_RIGHT, MIN_WRONG

from labcode.pool.ranks import Ranks
from labcode.teach.check import check

# A file's functions belong to no module that an engine could import, so they travel as code, as
# those of a notebook do.
FILES = sorted(Path(__file__).parent.glob("[0-9][0-9].py"))
LESSONS = {path.stem: runpy.run_path(str(path))["ANSWERS"] for path in FILES}
EXERCISES = {name: answers for lesson in LESSONS.values() for name, answers in lesson.items()}


def cases(kind, always, in_full):
    """All answers of a kind; those behind the first `always` are marked."""
    found = []
    for exercise, answers in EXERCISES.items():
        for place, name in enumerate(getattr(answers, kind)):
            marks = []
            if place >= in_full:
                marks = [pytest.mark.answers]
            elif place >= always:
                marks = [pytest.mark.full]
            found.append(pytest.param(exercise, name, id=f"{exercise} {name}", marks=marks))
    return found


@pytest.fixture(scope="module")
def pool():
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture
def quick(monkeypatch):
    """Ranks that wait in vain, or compute for ever, are stopped sooner than in a lesson."""
    monkeypatch.setattr("labcode.pool.ranks.HANG_S", 3.0)
    monkeypatch.setattr("labcode.teach.exercises.on_ranks.LIMIT_S", 15.0)


@pytest.fixture
def verdict(capsys, pool):
    """`verdict(exercise, answer)`: what the check cell prints."""

    def verdict(exercise, answer):
        check(exercise, lambda: EXERCISES[exercise].check(answer, pool))
        return capsys.readouterr().out

    return verdict


@pytest.mark.parametrize("exercise", EXERCISES)
def test_each_exercise_has_enough_answers(exercise):
    answers = EXERCISES[exercise]
    assert len(answers.right) >= MIN_RIGHT
    assert len(answers.wrong) >= MIN_WRONG


@pytest.mark.parametrize(("exercise", "name"), cases("right", always=1, in_full=100))
def test_a_right_answer_passes(verdict, exercise, name):
    said = verdict(exercise, EXERCISES[exercise].right[name])
    assert said.startswith("[v]"), said


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("exercise", "name"), cases("wrong", always=1, in_full=MIN_WRONG))
def test_a_wrong_answer_gets_its_hint(verdict, exercise, name):
    answer, hint = EXERCISES[exercise].wrong[name]
    said = verdict(exercise, answer)
    assert said.startswith("[x]"), said
    assert hint in said


def forgot_to_return(*_, **__):
    """What a function gives whose last line is not a return."""


@pytest.mark.full
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("exercise", EXERCISES)
def test_a_function_that_returns_nothing_is_wrong_and_not_undone(verdict, exercise):
    if not callable(next(iter(EXERCISES[exercise].right.values()))):
        pytest.skip("this exercise asks for a value")
    said = verdict(exercise, forgot_to_return)
    assert said.startswith("[x]"), said


def untouched(*_, **__):
    raise NotImplementedError("exercise: your code here")


@pytest.mark.full
@pytest.mark.parametrize("exercise", EXERCISES)
def test_an_untouched_exercise_is_not_done_yet(verdict, exercise):
    a_function = callable(next(iter(EXERCISES[exercise].right.values())))
    said = verdict(exercise, untouched if a_function else ...)
    assert said.startswith("[ ]"), said
