"""How code cells of lessons look; what `make check` holds besides is not held here again."""

import ast
from pathlib import Path

import jupytext
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "solutions").glob("[0-9][0-9]*_*.py"))
LESSON_COLUMNS = 88
SET_UP_LINES = 8  # of imports in the first cell; a section imports what else it needs


def long_code_lines(text: str) -> list[int]:
    """The numbers of the lines in code cells of a lesson's source that are too long to read."""
    found = []
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("# %%"):
            in_code = "[markdown]" not in line
        elif in_code and len(line) > LESSON_COLUMNS:
            found.append(number)
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_code_of_a_lesson_fits_the_page(source: Path) -> None:
    assert long_code_lines(source.read_text()) == []


def test_long_code_lines_are_found_in_code_alone() -> None:
    long = "x = " + "1" * LESSON_COLUMNS
    assert long_code_lines(f"# %% [markdown]\n# {long}\n\n# %%\n{long}\nx = 1\n") == [5]


def imports_of_the_first_cell(text: str) -> list[str]:
    """The import statements of the first code cell that has any."""
    for cell in jupytext.reads(text, fmt="py:percent").cells:
        if cell.cell_type != "code":
            continue
        statements = ast.parse(cell.source).body
        found = [one for one in statements if isinstance(one, (ast.Import, ast.ImportFrom))]
        if found:
            return [ast.unparse(one) for one in found]
    return []


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_lesson_begins_with_at_most_eight_imports(source: Path) -> None:
    found = imports_of_the_first_cell(source.read_text())
    assert 0 < len(found) <= SET_UP_LINES
    assert any(one.startswith("from course.lab import ") for one in found)
