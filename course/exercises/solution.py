"""The solutions of the lessons, as the checks run them: as they are, and with a mistake in them.

    own = Solution("15", "iteration_s")
    own.changed()(model, shape, 8, 2, cluster)            # what is right
    own.changed("(m + shape.pp - 1) => m")(model, ...)    # what comes out without the bubble

The text is that of `solutions/NN_*.py`. A handout for learners has no solutions: there it lies
beside this file, packed, so that nobody meets it by scrolling (`tools.handout`).

Held by: tests/unit/test_contract.py
"""

import ast
import functools
import json
import linecache
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKED = Path(__file__).with_suffix(".packed")
CELL = re.compile(r"(?m)^# %%(?= |$)(.*)\n")  # of jupytext's py:percent
ARROW = " => "
RUNS = (ast.Call, ast.comprehension, ast.Subscript)  # in a value: it is computed, no constant
Example = str | tuple[str, ...]  # "old => new", or several such changes


class Solution:
    """What a lesson's solution defines under some names.

    Args:
        lesson: "05", or "13b".
        names: Names of functions, classes or values; each cell that defines one of them is run.
        cell: What tracebacks call a cell; None: by lesson and number.
    """

    def __init__(self, lesson: str, *names: str, cell: str | None = None) -> None:
        self.lesson = lesson
        self.names = names
        self._cell = cell or f"<lesson {lesson}, cell {{number}}>"

    def __repr__(self) -> str:
        return f"Solution({', '.join(map(repr, (self.lesson, *self.names)))})"

    @functools.cached_property
    def cells(self) -> Mapping[int, str]:
        """{number: text} of the cells that define the names."""
        return dict(sorted(cell_that_defines(self.lesson, name) for name in self.names))

    def changed(self, *changes: str) -> Any:
        """What the names stand for after some changes of the text; a tuple for several names.

        Args:
            changes: Each "old => new"; the old text must occur, and is replaced wherever it does.
        """
        cells = dict(self.cells)
        for change in changes:
            old, arrow, new = change.partition(ARROW)
            assert arrow, f"a change is 'old => new', and not {change!r}"
            is_there = any(old in text for text in cells.values())
            assert is_there, f"the {self} has nothing of {change!r}"
            cells = {number: text.replace(old, new) for number, text in cells.items()}
        return self._values(cells)

    def _values(self, cells: Mapping[int, str]) -> Any:
        namespace = names_for(self.lesson, cells)
        for number, text in cells.items():
            execute(text, self._cell.format(number=number), namespace)
        values = [namespace[name] for name in self.names]
        return tuple(values) if len(values) > 1 else values[0]


# ---- the text


@functools.cache
def cells_of(lesson: str) -> tuple[str, ...]:
    """The code cells of a lesson, without the marks of its solutions.

    Raises:
        FileNotFoundError: Neither is there the solution nor a packed one.
    """
    sources = sorted((ROOT / "solutions").glob(f"{lesson}_*.py"))
    if sources:
        return _code_cells(sources[0].read_text(encoding="utf-8"))
    if not PACKED.exists():
        raise FileNotFoundError(
            f"the checks of lesson {lesson} run its solution, and there is neither "
            f"{ROOT}/solutions/{lesson}_*.py nor {PACKED}: get the course anew"
        )
    return tuple(json.loads(zlib.decompress(PACKED.read_bytes()))[lesson])


def _code_cells(text: str) -> tuple[str, ...]:
    _, *parts = CELL.split(text)
    found = []
    for head, body in zip(parts[::2], parts[1::2]):
        if not head.startswith(" [markdown]"):
            lines = [line for line in body.strip("\n").splitlines() if "### " not in line]
            found.append("\n".join(lines) + "\n")
    return tuple(found)


def packed(root: Path) -> bytes:
    """The code cells of all lessons below a folder, for a course without solutions."""
    cells = {}
    for source in sorted((root / "solutions").glob("[0-9][0-9]*_*.py")):
        cells[source.stem.partition("_")[0]] = _code_cells(source.read_text(encoding="utf-8"))
    return zlib.compress(json.dumps(cells).encode(), 9)


@functools.cache
def cell_that_defines(lesson: str, name: str) -> tuple[int, str]:
    """(number, text) of the last cell that defines a name at its top level."""
    for number, text in reversed(list(enumerate(cells_of(lesson)))):
        if name in text and any(name in _binds(statement) for statement in _statements(text)):
            return number, text
    raise KeyError(f"no cell of lesson {lesson} defines {name}")


def names_for(lesson: str, cells: Mapping[int, str]) -> dict[str, Any]:
    """What some cells of a solution use: functions, classes and constants above them, all imports.

    A learner who wants a name that the lesson imports further below imports it too.
    """
    known = _definitions(lesson, min(cells))
    needed = set()
    for text in cells.values():
        needed |= _uses(ast.parse(text))
    count = 0
    while count < len(needed):
        count = len(needed)
        for one in known:
            needed |= one.uses if one.binds & needed else set()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for one in known:
        if one.binds & needed:
            execute(one.source, f"<lesson {lesson}>", namespace)
    return namespace


class _Definition(NamedTuple):
    """A statement at the top level of a cell."""

    source: str
    binds: set[str]
    uses: set[str]


@functools.cache
def _definitions(lesson: str, number: int) -> tuple[_Definition, ...]:
    """Functions, classes and constants of the cells before one, and the imports of all cells."""
    known: set[str] = set()
    found = []
    for place, text in enumerate(cells_of(lesson)):
        for statement in _statements(text):
            is_import = isinstance(statement, (ast.Import, ast.ImportFrom))
            if is_import or (place < number and _is_definition(statement, known)):
                decorators = getattr(statement, "decorator_list", [])
                above = [f"@{ast.unparse(one)}\n" for one in decorators]
                source = "".join(above) + (ast.get_source_segment(text, statement) or "")
                found.append(_Definition(source, _binds(statement), _uses(statement)))
                known |= _binds(statement)
    return tuple(found)


def _is_definition(statement: ast.stmt, known: set[str]) -> bool:
    """Whether it is a function, a class, or a value of constants and known names."""
    if isinstance(statement, ast.Assign):
        calls = [part for part in ast.walk(statement.value) if isinstance(part, RUNS)]
        changes = [target for target in statement.targets if isinstance(target, ast.Subscript)]
        return not calls and not changes and _uses(statement.value) <= known
    return isinstance(statement, (ast.FunctionDef, ast.ClassDef))


def _uses(tree: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(tree) if isinstance(part, ast.Name)}


def _binds(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        names = [alias.asname or alias.name for alias in statement.names]
        return {name.partition(".")[0] for name in names}
    return set()


def _statements(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except SyntaxError:  # a cell with a magic
        return []


def execute(source: str, name: str, namespace: dict[str, Any]) -> None:
    """Run a text whose lines `inspect` and tracebacks can show."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)
