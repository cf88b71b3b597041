"""A lesson as a page of the book: the executed solution, with what gives answers away folded.

The instructor's notes are left out. An exercise shows its hints, folded, and the code as learners
get it. Its solution is folded, and so are predictions and what they are compared with, the code
that only draws a figure, and the library's own version beside an exercise. Figures become files of
their own.
"""

import ast
import base64
import copy
import hashlib
import html
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from tools import book_text, book_ways, decorate
from tools.book_terms import FirstUses
from tools.course_map import Lesson

NAVIGATION = re.compile(r"(?m)^[^\n]*\[Map of the course\][^\n]*(?:\n\n|\Z)")
EXERCISE = re.compile(r"(?m)^### Exercise (\d+\.\d+)")
SHOWN_SOURCE = re.compile(r"<div><small><code>([^<]*)</code></small></div>")
SECTION_LINK = re.compile(r"\[([^\]]*)\]\((\w+\.ipynb#cell-id=[\w-]+)\)")
CHECKS = "course/exercises"


class Page(NamedTuple):
    """A lesson for the book.

    Args:
        notebook: What myst-nb reads.
        figures: {name of a file below figures/: PNG}.
    """

    notebook: NotebookNode
    figures: dict[str, bytes]


def hints(lesson: Lesson, root: Path) -> dict[str, list[str]]:
    """{exercise: its hints}, read from the checks of a lesson without importing them."""
    path = root / CHECKS / f"l{lesson.number[:2]}.py"  # 13b goes on with the exercises of 13
    found: dict[str, list[str]] = {}
    if not path.exists():
        return found
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        if ast.unparse(node.targets[0]) != "EXERCISES":
            continue
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Call):
                found[str(key.value)] = _hints_of(value)
    return found


def _hints_of(call: ast.Call) -> list[str]:
    for keyword in call.keywords:
        if keyword.arg == "hints":
            return [str(hint) for hint in ast.literal_eval(keyword.value)]
    return []


def page(
    lesson: Lesson,
    solution: NotebookNode,
    student: NotebookNode,
    known_hints: Mapping[str, list[str]],
    uses: FirstUses,
    link_code: Callable[[str], str],
    lessons: Sequence[Lesson],
) -> Page:
    """The page of a lesson.

    Args:
        lesson: What the course says about it.
        solution: The executed notebook.
        student: The notebook of learners; its cells have the ids of the solution's.
        known_hints: {exercise: its hints}.
        uses: Links the terms of the glossary.
        link_code: Makes a link of `code` that names something of the library.
        lessons: All, to whose sections the text has links.
    """
    open_cells = {cell.id: cell.source for cell in student.cells}
    figures: dict[str, bytes] = {}
    cells: list[NotebookNode] = []
    exercise = ""
    for old in solution.cells:
        cell = copy.deepcopy(old)
        tags = cell.metadata.pop("tags", [])
        if "solution-only" in tags:
            continue
        if cell.cell_type == "code":
            cells += _code(cell, tags, open_cells[cell.id], exercise)
            cells += _outputs(cell, lesson, figures)
            continue
        found = EXERCISE.search(cell.source)
        prose = _prose(cell.source, lesson, uses, link_code)
        cell.source = with_sections(prose, lessons)
        if cell.source:
            cells.append(cell)
        if found:
            exercise = found[1]
            cells += _hint_cells(exercise, known_hints.get(exercise, []))
    notebook = copy.copy(solution)
    notebook.cells = cells
    return Page(notebook, figures)


def _prose(text: str, lesson: Lesson, uses: FirstUses, link_code: Callable[[str], str]) -> str:
    text = NAVIGATION.sub("", text).strip()
    text = text.replace(f'<div style="{decorate.BORDERS}">', '<div class="predict">')
    # the pages of the book lie beside them
    text = text.replace("](../images/", "](images/").replace("](../book/guide/", "](")
    text, heading, rest = text.partition("## Sources\n")  # which names papers by their titles
    text = book_text.with_code(uses.link(text), link_code)
    if text.startswith("# "):
        text = _with_facts(text, lesson)
    return text + heading + rest


def with_sections(text: str, lessons: Sequence[Lesson]) -> str:
    """Markdown whose links to cells of other lessons lead to the headings of the book's pages."""
    headings = {}
    for lesson in lessons:
        for section in lesson.sections:
            target = f"{lesson.stem}.ipynb#{section.anchor}"
            headings[target] = book_ways.address(lesson, section)

    def link(found: re.Match) -> str:
        return f'<a href="{headings[found[2]]}">{found[1]}</a>'

    return SECTION_LINK.sub(link, text)


def _with_facts(text: str, lesson: Lesson) -> str:
    """The first cell with a line on the lesson below its title."""
    title, _, rest = text.partition("\n")
    href = html.escape(lesson.notebook)
    facts = (
        f'<p class="facts">{lesson.part} · {lesson.minutes} minutes · '
        f'<a href="{href}" download>Download the notebook to work in</a></p>'
    )
    return f"{title}\n\n{facts}\n{rest}"


def _hint_cells(exercise: str, known: list[str]) -> list[NotebookNode]:
    if not known:
        return []
    folded = []
    for number, hint in enumerate(known, 1):
        summary = f"Hint {number} of {len(known)} for {exercise}"
        text = book_text.escaped(hint)
        folded.append(f'<details class="hint"><summary>{summary}</summary>\n\n{text}\n\n</details>')
    name = f"hints-{exercise.replace('.', '-')}"
    return [new_markdown_cell("\n\n".join(folded), id=name)]


def _code(
    cell: NotebookNode, tags: list[str], for_learners: str, exercise: str
) -> list[NotebookNode]:
    """A code cell, folded where it gives an answer away, behind what learners get."""
    cells = [cell]
    hidden = "hide-input"
    is_exercise = "exercise" in tags and for_learners != cell.source
    if is_exercise:
        cells.insert(0, new_code_cell(for_learners, id=f"{cell.id}-open"))
        fold = f"Solution of exercise {exercise}"
    elif "predict" in tags:
        fold = "One possible prediction"
    elif "figure" in tags and re.match(r"(?:plot|draw)\.\w+\(", cell.source):
        fold = "Code of the figure"
    elif re.search(r"(?m)^ *compare\(", cell.source):
        fold = "What came out, beside the prediction"
        hidden = "hide-output"
    else:
        return cells
    cell.metadata["tags"] = [hidden]
    cell.metadata["mystnb"] = {"code_prompt_show": fold, "code_prompt_hide": fold}
    return cells


def _outputs(cell: NotebookNode, lesson: Lesson, figures: dict[str, bytes]) -> list[NotebookNode]:
    """Change the outputs of a cell for the book, in place; what becomes a cell of its own.

    Figures go to files. The library's own version, which `show_source` shows, is folded.
    """
    kept = []
    cells = []
    for output in cell.outputs:
        data = output.get("data", {})
        named = SHOWN_SOURCE.match(data.get("text/html", ""))
        if named:
            cells.append(_library_version(cell, named[1], data["text/html"][named.end() :]))
            continue
        if "image/png" in data:
            name = f"{lesson.number}-{len(figures) + 1}.png"
            figures[name] = base64.b64decode(data.pop("image/png"))
            about = output.metadata.pop("image/png", {})
            alt = html.escape(about.get("alt", ""))
            size = f'width="{about["width"]}" height="{about["height"]}" loading="lazy"'
            data["text/html"] = f'<img class="figure" alt="{alt}" {size} src="figures/{name}">'
        kept.append(output)
    cell.outputs = kept
    return cells


def _library_version(cell: NotebookNode, file: str, highlighted: str) -> NotebookNode:
    code = html.unescape(re.sub(r"<[^>]*>", "", highlighted)).strip("\n")
    summary = f"<summary>labcode's own version: <code>{file}</code></summary>"
    text = f"<details>{summary}\n\n````python\n{code}\n````\n\n</details>"
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return new_markdown_cell(text, id=f"{cell.id}-{digest}")
