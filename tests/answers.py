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

import ast
import functools
import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext

from labcode.pool.ranks import Ranks
from tools import course_map

SOLUTIONS = Path(__file__).resolve().parents[1] / "solutions"
MIN_RIGHT = 3
MIN_WRONG = 5
ARROW = " => "
RUNS = (ast.Call, ast.comprehension, ast.Subscript)  # in a value: it is computed, no constant
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


# ---- the solution's text


def solution_of(lesson: str, name: str) -> str:
    """The source of what a lesson's solution defines under a name, as it stands in its cell.

    Args:
        lesson: "05", or "13b".
        name: Of a function, a class or a value.
    """
    _, cell = _cell_that_defines(lesson, name)
    return cell


def answer(exercise: str, kept: Answers, value: Any) -> tuple[Any, ...]:
    """A kept answer as what stands in the check cell after the number.

    Args:
        exercise: "5.1".
        kept: Its answers.
        value: One of them.
    """
    if not isinstance(value, Changed):
        return value if isinstance(kept.solves, tuple) else (value,)
    names = kept.solves if isinstance(kept.solves, tuple) else (kept.solves,)
    lesson = course_map.source_of_exercise(exercise).stem
    cells = dict(_cell_that_defines(lesson, name) for name in names)
    unused = set(value.changes)
    namespace = _names_before(lesson, min(cells))
    for number, text in sorted(cells.items()):
        for change in value.changes:
            old, arrow, new = change.partition(ARROW)
            assert arrow, f"a change is 'old => new', and not {change!r}"
            if old in text:
                text = text.replace(old, new)
                unused.discard(change)
        _execute(text, f"<ipython exercise {exercise}, cell {number}>", namespace)
    assert not unused, f"the solution of {exercise} has nothing of {sorted(unused)}"
    return tuple(namespace[name] for name in names)


@functools.cache
def _cells(lesson: str) -> tuple[str, ...]:
    """The code cells of a lesson, without the marks of its solutions."""
    (path,) = SOLUTIONS.glob(f"{lesson}*.py")
    notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    found = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        lines = [line for line in cell.source.splitlines() if "### " not in line]
        found.append("\n".join(lines) + "\n")
    return tuple(found)


def _cell_that_defines(lesson: str, name: str) -> tuple[int, str]:
    """(number, text) of the last cell that defines a name at its top level."""
    for number, text in reversed(list(enumerate(_cells(lesson)))):
        if name in text and name in _defined(text):
            return number, text
    raise KeyError(f"no cell of lesson {lesson} defines {name}")


def _defined(text: str) -> set[str]:
    names = set()
    for statement in _statements(text):
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names.add(statement.name)
        if isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return names


def _statements(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except SyntaxError:  # a cell with a magic
        return []


def _names_before(lesson: str, number: int) -> dict[str, Any]:
    """What a solution may use: of the cells above it functions, classes and constants; all imports.

    A learner who wants a name that the lesson imports further below imports it too.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for place, text in enumerate(_cells(lesson)):
        for statement in _statements(text):
            is_import = isinstance(statement, (ast.Import, ast.ImportFrom))
            if is_import or (place < number and _is_definition(statement, namespace)):
                source = ast.get_source_segment(text, statement)
                assert source is not None
                decorators = getattr(statement, "decorator_list", [])
                above = [f"@{ast.unparse(one)}\n" for one in decorators]
                _execute("".join(above) + source, f"<lesson {lesson}>", namespace)
    return namespace


def _is_definition(statement: ast.stmt, known: Mapping[str, Any]) -> bool:
    """Whether it is an import, a function, a class, or a value of constants and known names."""
    if isinstance(statement, ast.Assign):
        parts = list(ast.walk(statement.value))
        names = [part.id for part in parts if isinstance(part, ast.Name)]
        calls = [part for part in parts if isinstance(part, RUNS)]
        changes = [target for target in statement.targets if isinstance(target, ast.Subscript)]
        return not calls and not changes and all(name in known for name in names)
    return isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))


def _execute(source: str, name: str, namespace: dict[str, Any]) -> None:
    """Run a text whose lines `inspect` and tracebacks can show."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)
