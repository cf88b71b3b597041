"""A lesson's source, `solutions/NN_topic.py` (jupytext py:percent), as its two notebooks.

### BEGIN SOLUTION ... ### END SOLUTION   left out of the student notebook; a stub takes its place
### BEGIN BROKEN ... ### END BROKEN       comments; the student notebook has the code in them, in
                                          place of the solution directly above, if there is one
tag `predict`                             the student notebook keeps the names, each set to `...`
tag `by-hand`                             the cell also goes into a module (`tools.by_hand`)
tag `solution-only`                       the whole cell is left out of the student notebook
tag `raises-exception`                    broken on purpose: raises="ValueError: first words" beside
                                          the tag says what the cell must raise

Nothing is executed here.
"""

import ast
import copy
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jupytext
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from course import catalog
from tools import decorate, fingerprint
from tools.decorate import Headline

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BEGIN = "### BEGIN SOLUTION"
END = "### END SOLUTION"
BEGIN_BROKEN = "### BEGIN BROKEN"
END_BROKEN = "### END BROKEN"
MARKERS = (BEGIN, END, BEGIN_BROKEN, END_BROKEN)
STUB = 'raise NotImplementedError("exercise: your code here")'
# What a kernel says about its language, without its version, which varies; the settings of
# JupyterLab add it when a notebook is opened (tools/jupyter/).
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


class LessonError(ValueError):
    """A source that cannot be built: one line that says where and what to do."""


class Block(NamedTuple):
    """Lines of a cell between two markers."""

    kind: str  # "text", "solution" or "broken"
    lines: list[str]
    start: int  # number of the first line


def notebooks_of(
    text: str, name: str, course: Sequence[Headline] = ()
) -> tuple[NotebookNode, NotebookNode]:
    """The solution notebook (without outputs) and the student notebook of one source.

    A cell that begins a numbered section has the id to which links lead, `course.Section.anchor`.
    All others have one of their content, so a cell keeps its id when others change around it.

    Args:
        text: The py:percent source.
        name: File name of the source, for messages and for the notebook's metadata.
        course: The headlines of all lessons, this one among them: then the notebooks get what
            `tools.decorate` adds. Empty: the bare cells.

    Raises:
        LessonError: Unbalanced markers, a solution in a markdown cell, a cell that is not Python,
            or a cell that is broken on purpose and does not say what it raises.
    """
    solution = []
    student = []
    seen: dict[str, int] = {}
    for number, cell in enumerate(jupytext.reads(text, fmt="py:percent").cells, 1):
        where = f"{name}, cell {number}"
        metadata = _metadata(cell, where)
        key = f"{cell.cell_type}\n{cell.source}"
        seen[key] = seen.get(key, 0) + 1
        cell_id = hashlib.sha256(f"{key}\n{seen[key]}".encode()).hexdigest()[:12]
        for section in catalog.sections(cell.source.partition("\n")[0]):
            if section.number is not None:
                cell_id = section.cell_id
        for_students = _blanked(cell, where)
        solved = without_markers(cell.source)
        solution.append(_cell(cell.cell_type, solved, metadata, cell_id))
        if "solution-only" not in cell.metadata.get("tags", []):
            student.append(_cell(cell.cell_type, for_students, metadata, cell_id))
    about = {"source": name, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    if course:
        stem = name.removesuffix(".py")
        for cells, is_solution in ((solution, True), (student, False)):
            links = decorate.navigation(stem, course, is_solution=is_solution)
            _decorate(cells, links, course)
        mine = decorate.headline(stem, text)
        about |= {"title": mine.title, "minutes": mine.minutes}
    student_notebook = _notebook(student, about)
    student_notebook.metadata.lesson["built"] = fingerprint.of_cells(student_notebook)
    return _notebook(solution, about), student_notebook


def _decorate(cells: list[NotebookNode], links: str, course: Sequence[Headline]) -> None:
    """Add links, boxes and the guard to the cells of one notebook, in place."""
    for cell, following in itertools.pairwise(cells):
        if cell.cell_type == "markdown" and "predict" in following.metadata.get("tags", []):
            cell.source = decorate.boxed(cell.source)
    for cell in cells:
        if cell.cell_type == "markdown":
            cell.source = decorate.with_links(cell.source)
            cell.source = decorate.with_sections(cell.source, course)
    for cell in cells:
        if cell.cell_type == "code":
            cell.source = decorate.guarded(cell.source)
            break
    if cells[0].cell_type == "markdown":
        cells[0].source = f"{links}\n\n{cells[0].source}"
    if cells[-1].cell_type == "markdown":
        cells[-1].source = f"{cells[-1].source}\n\n{links}"
    else:
        cells.append(_cell("markdown", links, {}, "navigation"))


def solution_lines(text: str) -> list[str]:
    """What the student notebook must not show: solutions and predictions, their lines stripped."""
    lines = []
    for cell in jupytext.reads(text, fmt="py:percent").cells:
        if "predict" in cell.metadata.get("tags", []):
            lines += cell.source.splitlines()
            continue
        for block in _blocks(cell.source, "source"):
            if block.kind == "solution":
                lines += block.lines
    return [line.strip() for line in lines if line.strip()]


def _metadata(cell: NotebookNode, where: str) -> dict[str, object]:
    """The metadata that goes into both notebooks: the tags, and what a broken cell raises."""
    kept: dict[str, object] = {}
    tags = list(cell.metadata.get("tags", []))
    expected = cell.metadata.get("raises")
    if tags:
        kept["tags"] = tags
    if ("raises-exception" in tags) != bool(expected):
        raise LessonError(
            f"{where}: the tag 'raises-exception' and the error go together: "
            'write tags=["raises-exception"] raises="ValueError: its first words"'
        )
    if expected:
        kept["raises"] = expected
    return kept


def _cell(kind: str, source: str, metadata: dict[str, object], cell_id: str) -> NotebookNode:
    make = new_code_cell if kind == "code" else new_markdown_cell
    return make(source, id=cell_id, metadata=dict(metadata))


def _notebook(cells: list[NotebookNode], about: Mapping[str, object]) -> NotebookNode:
    metadata = {
        "kernelspec": dict(KERNELSPEC),
        "language_info": copy.deepcopy(LANGUAGE),
        "lesson": dict(about),
    }
    notebook = new_notebook(cells=cells, metadata=metadata)
    notebook.nbformat_minor = 5
    return notebook


def without_markers(source: str) -> str:
    lines = []
    for block in _blocks(source, "source"):
        if block.kind != "broken":
            lines += block.lines
    return "\n".join(lines)


def _blocks(source: str, where: str) -> list[Block]:
    """The source, cut at the markers."""
    blocks = []
    block = Block("text", [], 1)
    for number, line in enumerate(source.splitlines(), 1):
        found = line.strip()
        if found in MARKERS:
            wanted = (BEGIN, BEGIN_BROKEN) if block.kind == "text" else (_end_of(block.kind),)
            if found not in wanted:
                raise LessonError(
                    f"{where}, line {number}: found '{found}' where '{wanted[0]}' was due"
                )
            blocks.append(block)
            kind = {BEGIN: "solution", BEGIN_BROKEN: "broken"}.get(found, "text")
            block = Block(kind, [], number + 1)
        elif re.search(r"#+\s*(BEGIN|END)\s+(SOLUTION|BROKEN)", line, re.IGNORECASE):
            raise LessonError(
                f"{where}, line {number}: write the marker alone on its line, "
                f"as '{BEGIN}' or '{END}'"
            )
        elif block.kind == "broken" and found and not found.startswith("# "):
            raise LessonError(f"{where}, line {number}: broken code is a comment: '# {found}'")
        else:
            block.lines.append(line)
    if block.kind != "text":
        begin = BEGIN if block.kind == "solution" else BEGIN_BROKEN
        raise LessonError(f"{where}: '{begin}' without '{_end_of(block.kind)}'")
    return [*blocks, block]


def _end_of(kind: str) -> str:
    return END if kind == "solution" else END_BROKEN


def _blanked(cell: NotebookNode, where: str) -> str:
    """The cell as the student sees it."""
    blocks = _blocks(cell.source, where)
    has_solution = any(block.kind != "text" for block in blocks)
    is_prediction = "predict" in cell.metadata.get("tags", [])
    if cell.cell_type != "code":
        if has_solution:
            raise LessonError(
                f"{where}: a solution in a markdown cell; tag the cell 'solution-only' instead"
            )
        return cell.source
    if not has_solution and not is_prediction:
        return cell.source
    tree = parse(cell.source, where)
    original = cell.source.splitlines()
    if is_prediction:
        return f"{decorate.PREDICT}\n" + _unset(tree, 1, len(original), "", "your prediction")
    lines = []
    for place, block in enumerate(blocks):
        if block.kind == "text":
            lines += block.lines
        elif block.kind == "broken":
            lines += [line.replace("# ", "", 1) for line in block.lines]
        elif not _is_broken_instead(blocks[place + 1 : place + 3]):
            marker = original[block.start - 2]
            indent = marker[: len(marker) - len(marker.lstrip())]
            lines.append(_stub(tree, block, indent, where))
    return "\n".join(lines)


def _is_broken_instead(following: Sequence[Block]) -> bool:
    """Whether broken code comes directly behind a solution, with no line between them."""
    between, broken = (*following, None, None)[:2]
    return between is not None and not between.lines and getattr(broken, "kind", "") == "broken"


def _stub(tree: ast.Module, block: Block, indent: str, where: str) -> str:
    """What stands in the place of a solution: an exception in a function, unset names elsewhere."""
    first_code = None
    for number, line in enumerate(block.lines, block.start):
        if line.strip() and not line.strip().startswith("#"):
            first_code = number
            break
    if first_code is None:
        raise LessonError(f"{where}, line {block.start}: an empty solution")
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            last = node.end_lineno or node.lineno
            if node.lineno < block.start and first_code <= last:
                return indent + STUB
    end = block.start + len(block.lines) - 1
    return _unset(tree, block.start, end, indent, "your answer")


def parse(source: str, where: str) -> ast.Module:
    """The cell as a syntax tree; magics become `pass`, so that the numbers of lines stay."""
    plain = re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", source)
    try:
        return ast.parse(plain)
    except SyntaxError as error:
        raise LessonError(f"{where}, line {error.lineno}: {error.msg}") from None


def _unset(tree: ast.Module, first: int, last: int, indent: str, comment: str) -> str:
    """`name = ...` for each name that lines first..last bind; `...` if they bind none."""
    names = dict.fromkeys(_bound_names(tree, first, last))
    lines = [f"{indent}{name} = ...  # {comment}" for name in names]
    if not lines:
        lines = [f"{indent}...  # {comment}"]
    return "\n".join(lines)


def _bound_names(parent: ast.AST, first: int, last: int) -> list[str]:
    """The names that lines first..last bind outside functions, in order, some more than once."""
    names = []
    is_loop = isinstance(parent, (ast.For, ast.comprehension, ast.NamedExpr))
    for child in ast.iter_child_nodes(parent):
        line = getattr(child, "lineno", 0)
        is_named = isinstance(child, (*FUNCTIONS, ast.ClassDef))
        if is_named and first <= line <= last:
            names.append(child.name)
        elif isinstance(child, (*FUNCTIONS, ast.Lambda)):
            continue  # what a function binds is its own
        elif isinstance(child, ast.Name):
            if isinstance(child.ctx, ast.Store) and first <= line <= last and not is_loop:
                names.append(child.id)
        else:
            names += _bound_names(child, first, last)
    return names
