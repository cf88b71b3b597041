"""One can begin at any section of a lesson, each says what it takes, and none needs an answer."""

import ast
import re
import symtable
from pathlib import Path

import jupytext
import pytest

from labcode import course
from tools import course_map
from tools.lesson_source import BEGIN, END, without_markers

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "solutions").glob("[0-9][0-9]*_*.py"))
LESSONS = {lesson.stem: lesson for lesson in course_map.lessons()}
WITHOUT_TIME = ("Goals", "Recap", "Where to go", "Sources")
TIME = re.compile(r"\*\*Time\*\*: (\d+) minutes(?:, and (\d+) more for what is optional)?\.")
NEEDED = re.compile(r"\b(\d\db?) \(sections? ([^)]+)\)")

each_lesson = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def prose(source: Path) -> str:
    cells = jupytext.read(source, fmt="py:percent").cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


@each_lesson
def test_each_section_says_how_long_it_takes_and_the_top_is_their_sum(source):
    text = prose(source)
    headings = re.findall(r"(?m)^## (.+)$", text)
    timed = [heading for heading in headings if course.SECTION.match(f"## {heading}")]
    assert set(headings) - set(timed) <= set(WITHOUT_TIME)
    told = TIME.search(" ".join(text.split()))
    assert told, "write '**Time**: 90 minutes, and 15 more for what is optional.'"
    core = 0
    optional = 0
    for section in course.sections(text):
        if section.is_optional:
            optional += section.minutes
        else:
            core += section.minutes
    assert (int(told[1]), int(told[2] or 0)) == (core, optional)


@each_lesson
def test_what_a_lesson_needs_are_sections_that_exist(source):
    found = re.search(r"\*\*Needs\*\*:\s(.*?\.)(?:\s|\Z)", prose(source), re.DOTALL)
    assert found
    numbers = {lesson.number: lesson for lesson in LESSONS.values()}
    named = {}
    for number, sections in NEEDED.findall(" ".join(found[1].split())):
        named[number] = {int(section) for section in re.findall(r"\d+", sections)}
    assert set(LESSONS[source.stem].needs) == set(named), "give the sections of each lesson"
    for number, sections in named.items():
        assert sections <= {section.number for section in numbers[number].sections}, number


@pytest.mark.parametrize("goal", course.WAYS)
def test_a_way_goes_through_sections_that_exist(goal):
    numbers = {lesson.number: lesson for lesson in LESSONS.values()}
    for number, sections in course.WAYS[goal].items():
        assert set(sections) <= {section.number for section in numbers[number].sections}, number


@each_lesson
def test_a_section_of_another_lesson_that_is_mentioned_exists(source):
    known = {
        lesson.number: {part.number for part in lesson.sections} for lesson in LESSONS.values()
    }
    text = " ".join(prose(source).split())
    wrong = []
    for number, section in re.findall(r"\b[Ll]esson (\d\db?), sections? (\d+)", text):
        if int(section) not in known[number]:
            wrong.append((number, section))
    assert wrong == []


# ---- one can begin anywhere


def names_of(code: str) -> tuple[set[str], set[str]]:
    """(names that a cell reads from outside, names that it binds)."""
    table = symtable.symtable(code, "cell", "exec")
    bound = set()
    for symbol in table.get_symbols():
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
            bound.add(symbol.get_name())
    read = set()
    waiting = [table]
    while waiting:
        scope = waiting.pop()
        waiting.extend(scope.get_children())
        for symbol in scope.get_symbols():
            is_outside = scope is table or symbol.is_global()
            if symbol.is_referenced() and is_outside:
                read.add(symbol.get_name())
    return read, bound


def from_earlier_sections(text: str) -> list[str]:
    """What a section of a lesson reads that only an earlier section has bound."""
    set_up: set[str] = set()
    earlier: dict[str, str] = {}
    here: set[str] = set()
    section = ""
    found = []
    for cell in jupytext.reads(text, fmt="py:percent").cells:
        if cell.cell_type == "markdown":
            for heading in re.findall(r"(?m)^## (.*)", cell.source):
                if heading != "Goals":
                    section = heading
                    here = set()
            continue
        lines = without_markers(cell.source).splitlines()
        code = "\n".join(line for line in lines if not line.startswith("%"))
        ast.parse(code)
        read, bound = names_of(code)
        if not section:
            set_up |= bound
            continue
        for name in sorted(read - here - bound - set_up):
            if name in earlier:
                found.append(f"{section}: {name} is of {earlier[name]}")
        here |= bound
        for name in bound:
            earlier.setdefault(name, section)
    return found


@each_lesson
def test_no_section_needs_what_an_earlier_one_has_computed(source):
    assert from_earlier_sections(source.read_text(encoding="utf-8")) == []


def test_a_section_that_needs_another_one_is_found():
    text = (
        "# %% [markdown]\n# ## Goals\n\n# %%\nimport math\nranks = 4\n\n"
        "# %% [markdown]\n# ## 1. One (core, 5 min)\n\n# %%\nx = math.pi\n"
        "def f(y):\n    return x * y\n\n"
        "# %% [markdown]\n# ## 2. Two (core, 5 min)\n\n# %%\nprint(f(ranks))\n"
    )
    expected = ["2. Two (core, 5 min): f is of 1. One (core, 5 min)"]
    assert from_earlier_sections(text) == expected
    assert from_earlier_sections(text.replace("print(f", "f = abs\nprint(f")) == []


# ---- the student version runs to its end, whatever the learner writes

# In the student version a prediction is `name = ...`, and instructors have these cells alone; a
# check accepts an exercise that is open.
MAY_USE_ANSWERS = {"check", "exercise", "predict", "solution-only"}


def without_magics(cell: str) -> str:
    """The code of a cell; a line with a magic is empty, so that the others keep their numbers."""
    return "\n".join("" if line.startswith(("%", "!")) else line for line in cell.splitlines())


def names_of_learner(cell: str) -> set[str]:
    """What an exercise binds by statements that the learner writes, wholly or in part."""
    inside = set()
    is_inside = False
    for number, line in enumerate(cell.splitlines(), 1):
        if line.strip() in (BEGIN, END):
            is_inside = line.strip() == BEGIN
        elif is_inside:
            inside.add(number)
    names = set()
    for statement in ast.parse(without_magics(cell)).body:
        lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        if inside.intersection(lines):
            _, bound = names_of(ast.unparse(statement))
            names |= bound
    return names


def uses_of_answers(text: str) -> list[str]:
    """The cells that need what a learner has written in a cell above."""
    open_names: set[str] = set()
    found = []
    for cell in jupytext.reads(text, fmt="py:percent").cells:
        if cell.cell_type != "code":
            continue
        tags = set(cell.metadata.get("tags", []))
        read, bound = names_of(without_magics(cell.source))
        if not tags & MAY_USE_ANSWERS:
            for name in sorted(read & open_names):
                found.append(f"{name}: {cell.source.splitlines()[0]}")
        open_names -= bound
        if "exercise" in tags:
            open_names |= names_of_learner(cell.source)
    return found


@each_lesson
def test_no_cell_uses_what_the_learner_writes(source):
    """So the student version runs to its end with every exercise open.

    By turns it is executed as well: tests/notebooks/test_lessons.py.
    """
    assert uses_of_answers(source.read_text(encoding="utf-8")) == []


def test_a_cell_that_uses_an_answer_is_found():
    exercise = (
        '# %% tags=["exercise"]\nsizes = [3]\n\n\ndef mine(x):\n'
        "    ### BEGIN SOLUTION\n    return x\n    ### END SOLUTION\n\n\n"
    )
    assert uses_of_answers(f"{exercise}# %%\nprint(mine(3))\n") == ["mine: print(mine(3))"]
    assert uses_of_answers(f"{exercise}# %%\nprint(sizes)\n") == []
    assert uses_of_answers(f'{exercise}# %% tags=["check"]\ncheck("1.1", mine)\n') == []
    assert uses_of_answers(f"{exercise}# %%\nfrom labs import mine\n\n# %%\nmine(3)\n") == []
