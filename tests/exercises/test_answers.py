"""Every check of an exercise: right answers pass, wrong ones get the hint meant for them.

`make test` tries for each exercise one right answer, the lesson's solution wherever it stands for
itself, and one wrong one; the others belong to the release tier, with all those that need real
processes. A change of a lesson, of its checks or of what all checks stand on touches them; `make
answers` tries all.
"""

import runpy
from pathlib import Path

import pytest
from answers import MIN_RIGHT, MIN_WRONG, THE_SOLUTION, Changed, answer

from course.check import check
from course.pool.ranks import Ranks

# An answer may use names that PyTorch is about to take away: people know them, and they work.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

# A file's functions belong to no module that an engine could import, so they travel as code, as
# those of a notebook do.
FILES = sorted(Path(__file__).parent.glob("[0-9][0-9].py"))
LESSONS = {path.stem: runpy.run_path(str(path))["ANSWERS"] for path in FILES}
EXERCISES = {name: answers for lesson in LESSONS.values() for name, answers in lesson.items()}


def marks(exercise, number=0):
    """The tier of an exercise's answer, by its number among those of its kind."""
    return [pytest.mark.release] if EXERCISES[exercise].real or number > 0 else []


def cases(kind):
    """All answers of a kind."""
    found = []
    for exercise, answers in EXERCISES.items():
        for number, name in enumerate(getattr(answers, kind)):
            label = f"{exercise} {name}"
            found.append(pytest.param(exercise, name, id=label, marks=marks(exercise, number)))
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
    monkeypatch.setattr("course.pool.ranks.HANG_S", 3.0)


def in_the_cell(exercise, value, pool):
    """What stands in the check cell after the number."""
    kept = EXERCISES[exercise]
    things = answer(exercise, kept, value)
    if kept.cell is not None:
        whole = things if isinstance(kept.solves, tuple) else things[0]
        return kept.cell(whole, pool)
    return things if pool is None else (*things, pool)


@pytest.fixture
def verdict(capsys, request, monkeypatch, tmp_path):
    """`verdict(exercise, value)`: what the check cell says in the end."""
    monkeypatch.chdir(tmp_path)

    def verdict(exercise, value):
        kept = EXERCISES[exercise]
        pool = request.getfixturevalue("pool") if kept.real and kept.takes_ranks else None
        check(exercise, *in_the_cell(exercise, value, pool))
        return capsys.readouterr().out.splitlines()[-1]

    return verdict


@pytest.mark.parametrize("exercise", EXERCISES)
def test_each_exercise_has_enough_answers(exercise):
    answers = EXERCISES[exercise]
    assert len(answers.all_right) >= MIN_RIGHT
    assert len(answers.wrong) >= MIN_WRONG


@pytest.mark.parametrize(("exercise", "name"), cases("all_right"))
def test_a_right_answer_passes(verdict, exercise, name):
    said = verdict(exercise, EXERCISES[exercise].all_right[name])
    assert said.startswith("[v]"), said


def on_ranks():
    """The exercises whose solution runs on real ranks as well; `make test` has one of a lesson."""
    found = []
    lessons = set()
    for exercise, kept in EXERCISES.items():
        if kept.takes_ranks and not kept.real:
            lesson = exercise.partition(".")[0]
            in_release = [pytest.mark.release] if lesson in lessons else []
            found.append(pytest.param(exercise, marks=in_release))
            lessons.add(lesson)
    return found


@pytest.mark.parametrize("exercise", on_ranks())
def test_the_solution_does_the_same_on_real_ranks(pool, capsys, exercise):
    check(exercise, *in_the_cell(exercise, EXERCISES[exercise].all_right[THE_SOLUTION], pool))
    said = capsys.readouterr().out
    assert said.startswith("[v]") and "the same on 4 real ranks" in said, said


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("exercise", "name"), cases("wrong"))
def test_a_wrong_answer_gets_its_hint(verdict, exercise, name):
    value, hint = EXERCISES[exercise].wrong[name]
    said = verdict(exercise, value)
    assert said.startswith("[x]"), said
    assert hint in said


def one_of(exercise, whole):
    """One thing in place of each that the exercise asks for."""
    solves = EXERCISES[exercise].solves
    return (whole,) * len(solves) if isinstance(solves, tuple) else whole


def asks_for_functions(exercise):
    """Whether an answer is code, and no value."""
    kept = EXERCISES[exercise]
    first = next(iter(kept.all_right.values()))
    if isinstance(first, Changed):
        return all(callable(part) for part in answer(exercise, kept, first))
    return callable(first)


def forgot_to_return(*_, **__):
    """What a function gives whose last line is not a return."""


@pytest.mark.usefixtures("quick")
@each_exercise
def test_a_function_that_returns_nothing_is_wrong_and_not_undone(verdict, exercise):
    if not asks_for_functions(exercise):
        pytest.skip("this exercise asks for a value")
    said = verdict(exercise, one_of(exercise, forgot_to_return))
    assert said.startswith("[x]"), said


def untouched(*_, **__):
    raise NotImplementedError("exercise: your code here")


@each_exercise
def test_an_untouched_exercise_is_not_done_yet(verdict, exercise):
    said = verdict(exercise, one_of(exercise, untouched if asks_for_functions(exercise) else ...))
    assert said.startswith("[ ]"), said
