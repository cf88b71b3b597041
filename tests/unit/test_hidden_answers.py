"""Nothing that stands between a prediction and its comparison holds the answer.

Between the two stand headings and text, code with its literals and comments, the words of figures,
and what cells print, all of which can be read before a learner has written a number. What the
answers are is read from the lines that `compare` has printed in the built notebook.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jupytext
import nbformat
import pytest

from course.catalog import number_of
from course.compare import WAYS
from course.figures import caption
from tools.notebook_run import text_of

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "solutions").glob("[0-9][0-9]*_*.py"))

# {(lesson, prediction): why what stands there may stand there}
MAY_BE_READ = {
    ("17", "resumes_from"): "the log of a run that takes a minute, printed while it runs",
}

TOLERANCE = re.compile(r"within=[\d.]+")  # a factor, which a measured time may look like
COMPARED = re.compile(
    rf"(?m)^(?P<what>.{{30,}}?) predicted +(?P<predicted>.+?)  (?:{'|'.join(WAYS)}) +(?P<found>.+?)"
    r"  (?:right|wrong|within|NOT)"
)
NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
QUANTITY = re.compile(r"[-+]?([\d,]*\.?\d+(?:e[-+]?\d+)?) *([a-zA-Zµ%/ ]*)")
SOLUTION = re.compile(r"(?s)### BEGIN SOLUTION.*?### END SOLUTION")
PREFIXES = (1e3, 1e6, 1e9, 1e12, 1e-3, 1e-6)

each_lesson = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


class Cell(NamedTuple):
    is_code: bool
    tags: tuple[str, ...]
    text: str
    printed: str  # "" where the notebook was built from other code

    @property
    def tree(self) -> ast.Module:
        lines = self.text.splitlines()
        return ast.parse("\n".join("pass" if line.startswith("%") else line for line in lines))


def cells_of(source: Path) -> list[Cell]:
    """The cells of a lesson as learners get them, without the instructor's."""
    printed = {}
    if source.with_suffix(".ipynb").exists():
        for cell in nbformat.read(source.with_suffix(".ipynb"), as_version=4).cells:
            if cell.cell_type == "code":
                printed[cell.source.strip()] = text_of(cell.outputs)
    cells = []
    for cell in jupytext.read(source, fmt="py:percent").cells:
        tags = tuple(cell.metadata.get("tags", ()))
        if "solution-only" in tags:
            continue
        is_code = cell.cell_type == "code"
        output = printed.get(cell.source.strip(), "") if is_code else ""
        cells.append(Cell(is_code, tags, cell.source, output))
    return cells


# ---- prints


def calls(node: ast.AST, name: str) -> Iterator[ast.Call]:
    """The calls of a function that happen where they stand, not in a function defined there."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from calls(child, name)


def prints_too_early(cell: Cell) -> list[str]:
    """The calls of `print` before the last statement that compares, or in it before `compare`."""
    statements = cell.tree.body
    comparing = [number for number, part in enumerate(statements) if any(calls(part, "compare"))]
    if not comparing:
        return []
    last = statements[comparing[-1]]
    first_line = next(calls(last, "compare")).lineno
    early = []
    for statement in statements[: comparing[-1] + 1]:
        for call in calls(statement, "print"):
            if call.args and (statement is not last or call.lineno < first_line):
                early.append(ast.unparse(call))
    return early


@each_lesson
def test_a_cell_compares_before_it_prints(source):
    early = [prints_too_early(cell) for cell in cells_of(source) if cell.is_code]
    assert [prints for prints in early if prints] == []


# ---- what an answer looks like


def digits(number: str) -> int:
    """How many digits of a number say something: 2 of "0.042", 1 of "400" and of "5.0"."""
    mantissa = re.split("e", number.replace(",", ""), flags=re.IGNORECASE)[0]
    return len(mantissa.replace(".", "").strip("0"))


def shows_number(number: str, answer: str) -> bool:
    """Whether a number is the answer, or rounds it to two digits or more.

    Percent stand for a fraction, and "25.2 MB" for 25,165,824 bytes, if they show three digits:
    two fit too often by chance.
    """
    quantity = QUANTITY.fullmatch(answer)
    if quantity is None or digits(number) < 2:
        return False
    size = float(quantity[1].replace(",", ""))
    shown = float(number.replace(",", ""))
    factors = [1.0]
    if digits(number) > 2:
        factors.append(100.0)
        if quantity[2]:
            factors.extend(PREFIXES)
    return any(float(f"{size * factor:.{digits(number) - 1}e}") == shown for factor in factors)


def is_word(answer: str) -> bool:
    return QUANTITY.fullmatch(answer) is None and answer not in ("True", "False", "nan", "inf")


def shows_word(text: str, answer: str, choices: list[str]) -> bool:
    """Whether a text names the answer and not the other choices beside it."""
    named = re.search(rf"(?<![\w-]){re.escape(answer)}(?![\w-])", text, re.IGNORECASE)
    return bool(named) and not all(choice.lower() in text.lower() for choice in choices)


# ---- what is asked and where it is answered


class Question(NamedTuple):
    name: str  # of the first thing to predict
    answers: list[str]
    choices: list[str]  # empty: not known
    between: list[str]
    comparing: Cell
    seen: set[str]  # numbers that its section has shown before it


def names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def texts_in(node: ast.AST) -> list[str]:
    """The texts of a tuple, the keys of a dictionary."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, (ast.Tuple, ast.List)):
        return [text for part in node.elts for text in texts_in(part)]
    if isinstance(node, ast.Dict):
        return [text for key in node.keys if key is not None for text in texts_in(key)]
    return []


def choices_of(call: ast.Call, cells: list[Cell]) -> list[str]:
    """The options of a comparison, where the lesson writes them down; else nothing."""
    for keyword in call.keywords:
        if keyword.arg != "options":
            continue
        found = texts_in(keyword.value)
        for cell in cells:
            for part in ast.walk(cell.tree) if cell.is_code else ():
                is_it = isinstance(part, ast.Assign) and names_in(part.targets[0])
                if is_it and is_it & names_in(keyword.value):
                    found = texts_in(part.value) or found
        return found
    return []


def label(call: ast.Call) -> str:
    """What a comparison is called in its line, as a pattern."""
    what = call.args[0]
    if isinstance(what, ast.Constant):
        return re.escape(str(what.value))
    if isinstance(what, ast.JoinedStr):
        parts = what.values
        return "".join(re.escape(p.value) if isinstance(p, ast.Constant) else ".*" for p in parts)
    return ".*"


def words_of_figures(text: str) -> str:
    words = []
    for number, name in re.findall(r'caption="(\w+)\.(\w+)"', text):
        words += [str(value) for value in caption.of_lesson(number)[name].values()]
    return "\n".join(words)


def questions(cells: list[Cell]) -> Iterator[Question]:
    """The predictions of a lesson, each up to the first cell that compares it."""
    lines = [match for cell in cells for match in COMPARED.finditer(cell.printed)]
    section = 0
    for start, cell in enumerate(cells):
        if not cell.is_code:
            section = start if re.search(r"(?m)^## ", cell.text) else section
            continue
        if "predict" not in cell.tags:
            continue
        asked = {
            ast.unparse(part.targets[0]) for part in cell.tree.body if hasattr(part, "targets")
        }
        for end in range(start + 1, len(cells)):
            comparing = cells[end]
            if not comparing.is_code or not asked & names_in(comparing.tree):
                continue
            found = [call for call in ast.walk(comparing.tree) if isinstance(call, ast.Call)]
            found = [call for call in found if ast.unparse(call.func) == "compare"]
            if not found:
                continue
            mine = [call for call in found if names_in(call.args[1]) & asked] or found
            answers: set[str] = set()
            for line in lines:
                if any(re.fullmatch(label(call), line["what"].strip()) for call in mine):
                    answers |= {line["predicted"].strip(), line["found"].strip()}
            choices = [choice for call in mine for choice in choices_of(call, cells[: end + 1])]
            before = "\n".join(part.text + part.printed for part in cells[section:start])
            yield Question(
                min(asked & names_in(comparing.tree)),
                sorted(answers),
                choices,
                [text for part in cells[start + 1 : end] for text in readable(part)],
                comparing,
                set(NUMBER.findall(before)),
            )
            asked -= names_in(comparing.tree)
            if not asked:
                break


def readable(cell: Cell) -> list[str]:
    """What learners can read of a cell."""
    if "predict" in cell.tags:
        return []
    text = SOLUTION.sub("", cell.text)
    if "exercise" in cell.tags or not cell.is_code:
        return [text]
    return [text, words_of_figures(text), cell.printed]


def leaks(question: Question) -> list[str]:
    """The lines between a question and its comparison that hold its answer."""
    first = COMPARED.search(question.comparing.printed)
    printed = question.comparing.printed[: first.start()] if first else ""
    comparing = TOLERANCE.sub("", question.comparing.text)
    texts = [*question.between, printed, comparing]
    found = []
    for answer in question.answers:
        for text in texts:
            for line in text.splitlines():
                numbers = set(NUMBER.findall(line)) - question.seen
                if any(shows_number(number, answer) for number in numbers):
                    found.append(f"{answer}: {line.strip()}")
            if not is_word(answer) or (text is comparing and not question.choices):
                continue  # without a list of choices their names are in the code that compares
            if shows_word(text, answer, question.choices):
                found.append(f"{answer}: in {text.strip().splitlines()[0]}")
    return found


@each_lesson
def test_no_answer_stands_between_a_question_and_its_comparison(source):
    found = {}
    for question in questions(cells_of(source)):
        if leaks(question):
            found[number_of(source.name), question.name] = leaks(question)
    assert {place: lines for place, lines in found.items() if place not in MAY_BE_READ} == {}


@each_lesson
def test_every_prediction_is_compared(source):
    cells = cells_of(source)
    asked = [cell for cell in cells if "predict" in cell.tags]
    assert len(list(questions(cells))) >= len(asked)


# ---- the check itself


def lesson_with(between: str, comparing: str, printed: str) -> list[Question]:
    """A lesson of one prediction, with a code cell between it and its comparison."""
    line = f"{'size':<30} predicted      25.2 MB  measured      25.2 MB  right"
    cells = [
        Cell(False, (), "## 1. Sizes, from 4,096 on", ""),
        Cell(True, ("predict",), "size = 25.2e6", ""),
        Cell(True, (), between, ""),
        Cell(True, (), comparing, f"{printed}\n{line}"),
    ]
    return list(questions(cells))


COMPARES = 'compare("size", size, found)'


@pytest.mark.parametrize(
    ("between", "comparing", "printed"),
    [
        ("x = 25.2  # MB", COMPARES, ""),
        ("# some 25,200,000 bytes", COMPARES, ""),
        ("x = 1", f"found = 25200000\n{COMPARES}", ""),
        ("x = 1", COMPARES, "it has 25 MB"),
    ],
)
def test_an_answer_that_can_be_read_is_found(between, comparing, printed):
    (question,) = lesson_with(between, comparing, printed)
    assert leaks(question)


@pytest.mark.parametrize("between", ["x = 2", "x = 4096", "x = 24", "x = 0.252", "x = 125.2"])
def test_a_number_of_one_digit_or_another_number_is_no_answer(between):
    (question,) = lesson_with(between, COMPARES, "")
    assert leaks(question) == []


def test_a_word_is_no_answer_where_all_choices_are_named():
    choices = ["smaller", "larger"]
    assert shows_word("the second is larger", "larger", choices)
    assert not shows_word("smaller or larger?", "larger", choices)


@pytest.mark.parametrize(
    ("code", "early"),
    {
        "print(x)\ncompare('x', guess, x)": 1,
        "compare('x', guess, x)\nprint(x)": 0,
        "for x in xs:\n    print(x)\n    compare('x', guess, x)": 1,
        "for x in xs:\n    compare('x', guess, x)\n    print(x)": 0,
        "def f():\n    print(1)\ncompare('x', guess, f())": 0,
    }.items(),
)
def test_a_print_before_the_comparison_is_found(code, early):
    assert len(prints_too_early(Cell(True, (), code, ""))) == early
