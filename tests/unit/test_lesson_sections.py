"""One can begin at any section of a lesson, each says what it takes, and none needs an answer."""

import ast
import re
import symtable
from pathlib import Path

import jupytext
import pytest

from course import catalog
from tools import course_map
from tools.lesson_source import BEGIN, END, without_markers

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "solutions").glob("[0-9][0-9]*_*.py"))
LESSONS = {lesson.stem: lesson for lesson in course_map.lessons()}
WITHOUT_TIME = ("Goals", "Recap", "Where to go", "Sources")
TIME = re.compile(r"\*\*Time\*\*: (\d+) minutes(?:, and (\d+) more for what is optional)?\.")

each_lesson = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def prose(source: Path) -> str:
    cells = jupytext.read(source, fmt="py:percent").cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


@each_lesson
def test_each_section_says_how_long_it_takes_and_the_top_is_their_sum(source):
    text = prose(source)
    headings = re.findall(r"(?m)^## (.+)$", text)
    timed = [heading for heading in headings if catalog.SECTION.match(f"## {heading}")]
    assert set(headings) - set(timed) <= set(WITHOUT_TIME)
    told = TIME.search(" ".join(text.split()))
    assert told, "write '**Time**: 90 minutes, and 15 more for what is optional.'"
    core = 0
    optional = 0
    for section in catalog.sections(text):
        if section.is_optional:
            optional += section.minutes
        else:
            core += section.minutes
    assert (int(told[1]), int(told[2] or 0)) == (core, optional)


def sections_of(lesson: course_map.Lesson) -> set[int | None]:
    return {section.number for section in lesson.sections}


@each_lesson
def test_what_a_lesson_needs_are_sections_that_exist(source):
    numbers = {lesson.number: lesson for lesson in LESSONS.values()}
    lesson = LESSONS[source.stem]
    said = catalog.NEEDS.search(prose(source))
    assert said
    named = set(re.findall(r"\blessons? (\d\db?)", said[1]))
    assert named <= {need.lesson for need in lesson.needed}, "give the sections of each lesson"
    for need in lesson.needed:
        assert set(need.sections) <= sections_of(numbers[need.lesson]), need
        assert set(need.of or ()) <= sections_of(lesson), need


def test_needs_are_read_for_all_sections_and_for_some():
    text = (
        "lessons 01 (section 4) and 03b (sections 1 and\n3 to 5). For section 6 also lesson 04 "
        "(section 1) and lesson 08 (section 2); for sections 7 to 9 also lesson 02 (section 3)."
    )
    assert catalog.needs(text) == (
        ("01", (4,), None),
        ("03b", (1, 3, 4, 5), None),
        ("04", (1,), (6,)),
        ("08", (2,), (6,)),
        ("02", (3,), (7, 8, 9)),
    )
    assert catalog.needs("PyTorch on one device.") == ()


def missing(way: catalog.Way, lessons: dict[str, course_map.Lesson]) -> list[str]:
    """What sections of a way need and no section before them on it gives."""
    sections = {lesson.number: lesson.sections for lesson in lessons.values()}
    passed: set[tuple[str, int | None]] = set()
    found = []
    for stop in catalog.stops(way.taken, sections):
        taken = {section.number for section in stop.taken}
        for need in lessons[stop.number].needed:
            if need.of is not None and taken.isdisjoint(need.of):
                continue
            for section in need.sections:
                if (need.lesson, section) not in passed:
                    found.append(f"{stop} needs {need.lesson} §{section}")
        passed |= {(stop.number, section) for section in taken}
    return found


@pytest.mark.parametrize("name", catalog.WAYS)
def test_a_way_goes_through_sections_that_exist_and_gives_each_what_its_lesson_needs(name):
    lessons = {lesson.number: lesson for lesson in LESSONS.values()}
    way = catalog.WAYS[name]
    for number, taken in way.taken.items():
        assert set(taken) <= sections_of(lessons[number]), number
    assert next(iter(way.taken)) == "00" and way.taken["00"][0] == 1, "how a lesson works"
    assert missing(way, lessons) == []


def test_a_way_that_leaves_out_what_a_section_needs_is_found():
    lessons = {lesson.number: lesson for lesson in LESSONS.values()}
    without = catalog.Way("", {"01": (1,), "04": (1,)})
    assert missing(without, lessons) == [
        "01 §1 needs 00 §1",
        "01 §1 needs 00 §2",
        "04 §1 needs 01 §2",
    ]
    for_another = catalog.Way("", {"03": (1,)})
    of_this = catalog.Way("", {"03": (1, 2)})
    assert missing(for_another, lessons) == ["03 §1 needs 02 §1"]
    assert missing(of_this, lessons) == ["03 §1, 2 needs 02 §1", "03 §1, 2 needs 02 §2"]


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
