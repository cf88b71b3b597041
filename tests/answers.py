"""What `tests/exercises/NN.py` says about each exercise of a lesson: right and wrong answers.

A kept answer is a change of the solution's text, or, where people write it quite differently, an
answer of its own.

ANSWERS = {
    "5.1": Answers(
        solves="average_buckets",
        right={"with an offset": with_an_offset},
        wrong={
            "a sum": (changed("row /= p => pass"), "4 times as long as the mean"),
            "divides twice": (divides_twice, "0.25 times as long"),
        },
    ),
}
"""

import importlib
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from course.exercises.solution import Solution, cell_that_defines
from course.pool.ranks import Ranks
from tools import course_map

MIN_RIGHT = 3
MIN_WRONG = 5
THE_SOLUTION = "the lesson's solution"


@dataclass(frozen=True)
class Changed:
    """An answer that is the lesson's solution with some changes.

    Args:
        changes: Each "old => new"; the old text must occur, and is replaced wherever it does.
    """

    changes: tuple[str, ...]


def changed(*changes: str) -> Changed:
    """The lesson's solution with these changes, "old => new" each."""
    return Changed(changes)


@dataclass(frozen=True)
class Answers:
    """Answers to one exercise, as people write them.

    Args:
        solves: What the exercise asks for, by its name in the lesson; several names, if the answer
            consists of several things.
        right: {what is special about it: answer}; each must pass. The solution comes before them.
        wrong: {the mistake: (answer, a part of the hint that it must get)}.
        takes_ranks: Whether the check cell ends with the ranks. Answers are tried without them, and
            the solution once more with them.
        real: Whether each answer needs real processes, or a training. It is then tried with the
            ranks, if the cell has them, and not in every run of the tests.
        cell: `cell(answer, ranks)` gives what stands in the check cell after the number, where that
            is more than the answer.
        solution: Whether the solution's cell stands for itself; it does not where it reads what the
            cells above have computed.
    """

    solves: str | tuple[str, ...]
    right: Mapping[str, Any]
    wrong: Mapping[str, tuple[Any, str]]
    takes_ranks: bool = True
    real: bool = False
    cell: Callable[[Any, Ranks], tuple[Any, ...]] | None = None
    solution: bool = True

    @property
    def all_right(self) -> Mapping[str, Any]:
        """The right answers, the lesson's solution first."""
        if self.solution:
            return {THE_SOLUTION: changed(), **self.right}
        return self.right


def of_the_check(exercise: str) -> dict[str, tuple[Any, str]]:
    """The examples of mistakes that stand in the check itself, as wrong answers.

    Args:
        exercise: "15.2".
    """
    lesson, _, _ = exercise.partition(".")
    checks = importlib.import_module(f"course.exercises.l{lesson:>02}")
    found = {}
    for mistake in checks.EXERCISES[exercise].mistakes:
        pieces = [literal for literal, *_ in string.Formatter().parse(mistake.hint)]
        hint = max(pieces, key=len)
        for example in mistake.like:
            changes = (example,) if isinstance(example, str) else example
            found[f"{hint[:30]}: {' and '.join(changes)}"] = (Changed(changes), hint)
    return found


# ---- the solution's text


def solution_of(lesson: str, name: str) -> str:
    """The source of what a lesson's solution defines under a name, as it stands in its cell.

    Args:
        lesson: "05", or "13b".
        name: Name of a function, a class or a value.
    """
    _, cell = cell_that_defines(lesson, name)
    return cell


def answer(exercise: str, kept: Answers, value: Any) -> tuple[Any, ...]:
    """A kept answer as what stands in the check cell after the number.

    Args:
        exercise: "5.1".
        kept: Its answers.
        value: One of them.
    """
    several = isinstance(kept.solves, tuple)
    if isinstance(value, Changed):
        names = kept.solves if isinstance(kept.solves, tuple) else (kept.solves,)
        lesson, _, _ = course_map.source_of_exercise(exercise).stem.partition("_")
        cell = f"<ipython exercise {exercise}, cell {{number}}>"  # as tracebacks know a learner's
        value = Solution(lesson, *names, cell=cell).changed(*value.changes)
        several = len(names) > 1
    return tuple(value) if several else (value,)
