"""`make slides`: five to ten slides a lesson, from its takeaways and figures, in build/slides.

A slide is a section of the executed solution: its heading, its takeaways, its last figure; the
instructor's notes of the section are the speaker's notes (press S). Before them come the goals,
behind them the recap. nbconvert writes the pages; reveal.js is copied from the package
sphinx-revealjs, and formulas become MathML, so that the pages need no network. The folder can be
copied anywhere and opened from a disk.

python -m tools.slides [NN ...]   all lessons, or some; then open build/slides/index.html

Held by: tests/unit/test_slides.py
"""

import argparse
import html
import importlib.util
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import nbformat
from latex2mathml import converter
from nbconvert.exporters import SlidesExporter
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_notebook

from tools import course_map
from tools.course_map import Lesson

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "slides"
MOST = 10  # slides of a lesson
TEMPLATE = ROOT / "tools" / "slide_template"
COPIED = ("dist/reveal.js", "dist/reveal.css", "plugin/notes/notes.js")
COPIED += ("plugin/notes/speaker-view.html", "LICENSE")
TAKEAWAY = re.compile(r"(?ms)^\*\*Takeaway: (.+?)\*\*|^\*\*Takeaway:\*\* (.+?)(?=\n\n|\Z)")
FORMULA = re.compile(r"(?s)(`[^`]*`)|\$\$(.+?)\$\$|\$(.+?)\$")


class Section(NamedTuple):
    """What a section of a lesson gives to its slide.

    Args:
        heading: Heading with its number, "2. Columns, then rows".
        text: All prose of the section, without what is for the instructor.
        takeaways: Sentences to remember.
        figures: Pictures, each (PNG in base64, alternative text).
        notes: What it tells the instructor.
    """

    heading: str
    text: list[str]
    takeaways: list[str]
    figures: list[tuple[str, str]]
    notes: list[str]


def sections(notebook: NotebookNode) -> list[Section]:
    """An executed solution, cut at its second-level headings."""
    found = [Section("", [], [], [], [])]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            found[-1].figures.extend(_figures(cell))
            continue
        if "solution-only" in cell.metadata.get("tags", []):
            found[-1].notes.append(cell.source)
            continue
        for piece in re.split(r"(?m)^(?=## )", cell.source):
            heading = re.match(r"## (.+)", piece)
            if heading:
                found.append(Section(heading[1].strip(), [], [], [], []))
            found[-1].text.append(piece)
            found[-1].takeaways.extend(_takeaways(piece))
    return found


def _takeaways(text: str) -> list[str]:
    found = []
    for match in TAKEAWAY.finditer(text):
        sentence = match[1] or match[2]
        if re.match(r"\w\w|a ", sentence):  # not a symbol
            sentence = sentence[0].upper() + sentence[1:]
        found.append(sentence)
    return found


def _figures(cell: NotebookNode) -> list[tuple[str, str]]:
    figures = []
    for output in cell.outputs:
        png = output.get("data", {}).get("image/png")
        if png:
            about = output.get("metadata", {}).get("image/png", {})
            figures.append((png.strip(), about.get("alt", "")))
    return figures


def slides(lesson: Lesson, notebook: NotebookNode) -> NotebookNode:
    """The slides of a lesson as a notebook: a cell for each slide, and one for its notes."""
    parts = sections(notebook)
    told = [part for part in parts if part.takeaways]
    cells = [_slide(_title(lesson, parts))]
    for part in told[: MOST - 2]:
        cells.append(_slide(_body(part)))
        if part.notes:
            cells.append(_cell("\n\n".join(part.notes), "notes"))
    for part in parts:
        if part.heading == "Recap":
            cells.append(_slide(f"## Recap\n\n{_table(part.text)}"))
    return new_notebook(cells=cells, metadata={"title": f"{lesson.number} {lesson.title}"})


def _title(lesson: Lesson, parts: Sequence[Section]) -> str:
    goals = ""
    for part in parts:
        if part.heading == "Goals":
            goals = "\n".join(part.text).partition("## Goals")[2].partition("**Time**")[0].strip()
    return (
        f"# {lesson.number} · {lesson.title}\n\n{goals}\n\n"
        f'<p class="small">{lesson.part}, {lesson.minutes} minutes; {lesson.notebook}</p>'
    )


def _body(part: Section) -> str:
    paragraphs = [f"## {part.heading}"]
    for takeaway in part.takeaways:
        paragraphs.append(f'<div class="takeaway">\n\n{takeaway}\n\n</div>')
    if part.figures:
        png, alt = part.figures[-1]
        source = f"data:image/png;base64,{png}"
        paragraphs.append(f'<img alt="{html.escape(alt)}" src="{source}">')
    return "\n\n".join(paragraphs)


def _table(text: Sequence[str]) -> str:
    rows = [line for line in "\n".join(text).splitlines() if line.startswith("|")]
    return "\n".join(rows)


def _slide(source: str) -> NotebookNode:
    return _cell(source, "slide")


def _cell(source: str, kind: str) -> NotebookNode:
    return new_markdown_cell(with_mathml(source), metadata={"slideshow": {"slide_type": kind}})


def with_mathml(text: str) -> str:
    """Markdown whose formulas are MathML, which browsers draw without a script."""
    return FORMULA.sub(_mathml, text)


def _mathml(match: re.Match) -> str:
    if match[1]:  # code
        return match[1]
    display = "block" if match[2] else "inline"
    return converter.convert((match[2] or match[3]).strip(), display=display)


def page(notebook: NotebookNode) -> str:
    """The slides as one page of HTML, which finds reveal.js in `reveal/` beside it."""
    exporter = SlidesExporter(
        template_name=TEMPLATE.name,
        extra_template_basedirs=[str(TEMPLATE.parent)],
        reveal_url_prefix="reveal",
        reveal_theme="course",  # tools/slide_template/course.css
    )
    resources = {"metadata": {"name": notebook.metadata["title"]}}
    return exporter.from_notebook_node(notebook, resources)[0]


def copy_reveal(out: Path) -> None:
    """reveal.js and what it needs, from the package that brings it.

    Raises:
        ValueError: It is not installed.
    """
    found = importlib.util.find_spec("sphinx_revealjs")
    if found is None or found.origin is None:
        raise ValueError("sphinx-revealjs, which brings reveal.js, is missing: run `make setup`")
    source = Path(found.origin).parent / "_static" / "revealjs"
    for name in COPIED:
        target = out / "reveal" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, target)
    theme = out / "reveal" / "dist" / "theme" / "course.css"
    theme.parent.mkdir(exist_ok=True)
    shutil.copy(TEMPLATE / theme.name, theme)


def contents(lessons: Sequence[Lesson]) -> str:
    """The page with a link to the slides of each lesson."""
    rows = []
    for lesson in lessons:
        title = html.escape(f"{lesson.number} {lesson.title}")
        rows.append(f'<li><a href="{lesson.stem}.html">{title}</a>, {lesson.minutes} min</li>')
    listed = "\n".join(rows)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Training at Scale: '
        "slides</title></head>\n<body><h1>Training at Scale: slides</h1>\n"
        f"<ul>\n{listed}\n</ul></body></html>\n"
    )


def write(lessons: Sequence[Lesson], out: Path, root: Path = ROOT) -> None:
    """Write the pages of lessons, their contents, and reveal.js."""
    out.mkdir(parents=True, exist_ok=True)
    copy_reveal(out)
    for lesson in lessons:
        notebook = nbformat.read(root / lesson.solution, as_version=4)
        text = page(slides(lesson, notebook))
        (out / f"{lesson.stem}.html").write_text(text, encoding="utf-8")
    (out / "index.html").write_text(contents(lessons), encoding="utf-8")


def main(wanted: Sequence[str], out: Path = OUT) -> int:
    """The command line; returns the exit code."""
    lessons = course_map.lessons()
    numbers = [lesson.number for lesson in lessons]
    for number in wanted:
        if number not in numbers:
            print(f"there is no lesson {number}: there are {', '.join(numbers)}", file=sys.stderr)
            return 2
    chosen = [lesson for lesson in lessons if not wanted or lesson.number in wanted]
    write(chosen, out)
    print(f"{len(chosen)} lessons: open {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.slides", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("lesson", nargs="*", help="numbers of lessons; none: all")
    sys.exit(main(parser.parse_args().lesson))
