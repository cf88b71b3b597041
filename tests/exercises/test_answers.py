"""Every check of an exercise: right answers pass, wrong ones get the hint meant for them.

There are some two thousand answers, and many of them wait for a message that never comes. `make
test` tries those to one lesson, `make test-changed` those to the lessons that changed, `make
answers` all; CI runs an eighth of all at each commit.
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
IN_EVERY_RUN = "8."  # exercises of lesson 08, which has all kinds of checks
EXERCISES = {name: answers for lesson in LESSONS.values() for name, answers in lesson.items()}


def marks(exercise):
    """Those of an exercise whose lesson `make test` does not try."""
    return [] if exercise.startswith(IN_EVERY_RUN) else [pytest.mark.release]


def cases(kind):
    """All answers of a kind."""
    found = []
    for exercise, answers in EXERCISES.items():
        for name in getattr(answers, kind):
            case = pytest.param(exercise, name, id=f"{exercise} {name}", marks=marks(exercise))
            found.append(case)
    return found


each_exercise = pytest.mark.parametrize(
    "exercise", [pytest.param(exercise, marks=marks(exercise)) for exercise in EXERCISES]
)


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


@pytest.mark.parametrize(("exercise", "name"), cases("right"))
def test_a_right_answer_passes(verdict, exercise, name):
    said = verdict(exercise, EXERCISES[exercise].right[name])
    assert said.startswith("[v]"), said


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("exercise", "name"), cases("wrong"))
def test_a_wrong_answer_gets_its_hint(verdict, exercise, name):
    answer, hint = EXERCISES[exercise].wrong[name]
    said = verdict(exercise, answer)
    assert said.startswith("[x]"), said
    assert hint in said


def forgot_to_return(*_, **__):
    """What a function gives whose last line is not a return."""


@pytest.mark.usefixtures("quick")
@each_exercise
def test_a_function_that_returns_nothing_is_wrong_and_not_undone(verdict, exercise):
    if not callable(next(iter(EXERCISES[exercise].right.values()))):
        pytest.skip("this exercise asks for a value")
    said = verdict(exercise, forgot_to_return)
    assert said.startswith("[x]"), said


def untouched(*_, **__):
    raise NotImplementedError("exercise: your code here")


@each_exercise
def test_an_untouched_exercise_is_not_done_yet(verdict, exercise):
    a_function = callable(next(iter(EXERCISES[exercise].right.values())))
    said = verdict(exercise, untouched if a_function else ...)
    assert said.startswith("[ ]"), said
