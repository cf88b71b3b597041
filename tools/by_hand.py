"""Solutions that later cells of a lesson show and use, as a module.

A code cell with the tag `by-hand` goes, without its markers, into
`course/labs/lNN_by_hand.py`, with those imports of the cells above whose names it uses. So
what a lesson shows as labcode's version is the solution itself, which the tests hold to the check
of its exercise.
"""

import ast
from pathlib import Path

import jupytext

from tools.lesson_source import parse, without_markers

TAG = "by-hand"
HEAD = '"""Solutions that cells of lesson {lesson} show and use; `make notebooks` writes this."""'


def target(source: Path) -> Path:
    """The module of a lesson's source, whether it has one or not."""
    number = source.stem.partition("_")[0]
    return source.parents[1] / "course/labs" / f"l{number}_by_hand.py"


def module_of(source: Path) -> str | None:
    """The text of a lesson's module; None if no cell has the tag."""
    imports: dict[str, str] = {}
    parts = []
    used = set()
    module = ".".join(target(source).with_suffix("").parts[-3:])
    itself = f"from {module} "  # cells further below import it
    for number, cell in enumerate(jupytext.read(source, fmt="py:percent").cells, 1):
        if cell.cell_type != "code":
            continue
        solved = without_markers(cell.source)
        tree = parse(solved, f"{source.name}, cell {number}")
        for statement in tree.body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                imports |= _imported(statement)
        if TAG in cell.metadata.get("tags", []):
            parts.append(_without_imports(solved, tree))
            used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if not parts:
        return None
    lines = [line for name, line in imports.items() if name in used]
    needed = sorted(line for line in lines if not line.startswith(itself))
    lesson = source.stem.partition("_")[0]
    head = HEAD.format(lesson=lesson) + "\n\n" + "\n".join(needed)
    return "\n\n\n".join([head, *parts]) + "\n"


def _imported(statement: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """{name that an import binds: a line that imports this name alone}."""
    found = {}
    for alias in statement.names:
        line = alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
        line = f"import {line}"
        if isinstance(statement, ast.ImportFrom):
            line = f"from {statement.module} {line}"
        found[(alias.asname or alias.name).partition(".")[0]] = line
    return found


def _without_imports(text: str, tree: ast.Module) -> str:
    lines = text.splitlines()
    for statement in tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for number in range(statement.lineno - 1, statement.end_lineno or statement.lineno):
                lines[number] = ""
    return "\n".join(lines).strip()
