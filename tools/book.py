"""`make book`: the course as a web book in build/book, from the executed solutions.

Here its sources are put together in build/book-source; Sphinx with myst-nb and the theme furo then
makes the pages (book/conf.py). Formulas become MathML, and nothing is fetched from anywhere, so the
folder can be put on any server, or opened from a disk.

python -m tools.book [FOLDER]

Held by: tests/unit/test_book.py, tests/notebooks/test_book_pages.py
"""

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import nbformat
from sphinx.cmd.build import main as sphinx_build

from tools import (
    book_api,
    book_lesson,
    book_search,
    book_terms,
    book_text,
    book_ways,
    build_notebooks,
    course_map,
    lesson_source,
)
from tools.book_terms import FirstUses, Term
from tools.course_map import Lesson

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "book"
SOURCE = "book-source"  # beside the book
GUIDE = "book/guide"  # its pages, in this order
GUIDE_PAGES = ("where_to_run", "your_framework", "training", "clusters", "ddp", "failures")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
RECAP = re.compile(r"(?ms)^## Recap\n(.*?)(?=^## |\Z)")
EXTRA = "extra"  # below the sources: what is copied into the book as it is

Files = dict[str, bytes]


class Course(NamedTuple):
    """What the pages are made of.

    Args:
        root: The folder of the course.
        lessons: Lessons in order.
        terms: Terms of the glossary.
        modules: Modules of the library.
    """

    root: Path
    lessons: list[Lesson]
    terms: list[Term]
    modules: list[book_api.Module]


def course(root: Path = ROOT) -> Course:
    """Read all that the book needs but the notebooks."""
    glossary = (root / "book" / "glossary.md").read_text(encoding="utf-8")
    known = book_api.modules(root)
    return Course(root, course_map.lessons(root), book_terms.terms(glossary), known)


# ---- links


def code_links(full_names: set[str], *, bare: bool = False) -> Callable[[str], str]:
    """Makes a reference of `code` that names a module or an object of the library.

    Args:
        full_names: Full names of all of them.
        bare: Also of a name without a dot, if only one object has it.
    """
    by_end: dict[str, list[str]] = {}
    for name in full_names:
        parts = name.split(".")
        for i in range(len(parts)):
            by_end.setdefault(".".join(parts[i:]), []).append(name)

    def link(code: str) -> str:
        name = code.strip("`")
        if "." not in name and not bare:
            return code
        found = by_end.get(name, [])
        exact = [full for full in found if full in (name, f"labcode.{name}")]
        if exact or len(found) == 1:
            return f"{{py:obj}}`{name} <{(exact or found)[0]}>`"
        return code

    return link


def relinked(text: str, folder: str, course: Course) -> str:
    """Markdown from elsewhere in the course with links that hold in the book.

    A file that the book does not have is named without a link. "05 §1, 3" leads to these sections,
    with and without a link to the lesson.

    Args:
        text: The Markdown.
        folder: Where it lies, from the root of the course.
        course: The course.
    """
    sources = {module.file for module in course.modules}
    pages = {"COURSE.md": "index.md", "README.md": "index.md", "book/ways.md": "ways.md"}
    for name in GUIDE_PAGES:
        pages[f"{GUIDE}/{name}.md"] = f"{name}.md"
    for lesson in course.lessons:
        pages |= {lesson.solution: f"{lesson.stem}.ipynb", lesson.notebook: f"{lesson.stem}.ipynb"}

    def link(match: re.Match) -> str:
        mark, shown, target = match.groups()
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return match[0] if not target.startswith("#") else shown
        file, _, _ = target.partition("#")
        path = (course.root / folder / file).resolve().relative_to(course.root).as_posix()
        if mark:
            return f"![{shown}]({path})"
        if path.startswith("images/"):
            return f'<a href="_images/{Path(path).name}">{shown}</a>'
        if path in pages:
            with_sections = book_ways.linked(shown, course.lessons)
            return f"[{shown}]({pages[path]})" if with_sections == shown else with_sections
        if path in sources:
            return f'<a href="source/{book_api.source_page(path)}">{shown}</a>'
        return shown if "`" in shown else f"{shown}" if shown == path else f"{shown} (`{path}`)"

    return book_ways.linked(LINK.sub(link, text), course.lessons)


# ---- pages


def lesson_pages(course: Course) -> tuple[Files, dict[str, str]]:
    """The pages of the lessons, and {term: a link to the lesson that uses it first}."""
    files: Files = {}
    first: dict[str, str] = {}
    link_code = code_links(book_api.names(course.modules))
    headlines = build_notebooks.headlines(course.root)
    for lesson in course.lessons:
        uses = FirstUses(course.terms)
        solution = nbformat.read(course.root / lesson.solution, as_version=4)
        text = (course.root / lesson.solution).with_suffix(".py").read_text(encoding="utf-8")
        _, student = lesson_source.notebooks_of(text, f"{lesson.stem}.py", headlines)
        known_hints = book_lesson.hints(lesson, course.root)
        page = book_lesson.page(
            lesson, solution, student, known_hints, uses, link_code, course.lessons
        )
        files[f"{lesson.stem}.ipynb"] = _notebook(page.notebook)
        files[f"{EXTRA}/{lesson.notebook}"] = _notebook(student)
        for name, png in page.figures.items():
            files[f"{EXTRA}/figures/{name}"] = png
        for name in uses.met:
            first.setdefault(name, f"[lesson {lesson.number}]({lesson.stem}.ipynb)")
    return files, first


def _notebook(notebook: nbformat.NotebookNode) -> bytes:
    return f"{nbformat.writes(notebook, indent=1)}\n".encode()


def cheat_sheet(course: Course) -> str:
    """The page with the recap of each lesson."""
    link_code = code_links(book_api.names(course.modules), bare=True)
    lines = ["# Cheat sheet", "", "The recap of each lesson."]
    for lesson in course.lessons:
        notebook = nbformat.read(course.root / lesson.solution, as_version=4)
        text = book_text.joined(notebook)
        recap = RECAP.search(text)
        lines += ["", f"## [{lesson.number} {lesson.title}]({lesson.stem}.ipynb)", ""]
        if recap is None:
            raise ValueError(f"{lesson.stem} has no `## Recap`: write one, as a table")
        rows = [line for line in recap[1].splitlines() if line.startswith("|")]
        lines.append(book_text.with_code("\n".join(rows), link_code))
    return "\n".join(lines) + "\n"


def index(course: Course) -> str:
    """The title page: book/index.md with the tables of lessons and of what is left out."""
    text = (course.root / "book" / "index.md").read_text(encoding="utf-8")
    rows = ["| lesson | minutes | needs | notebook |", "|---|---:|---|---|"]
    trees = []
    part = ""
    for lesson in course.lessons:
        if lesson.part != part:
            part = lesson.part
            rows.append(f"| **{part}** | | | |")
            trees += [*_end(trees), "```{toctree}", ":hidden:", f":caption: {part}", ""]
        trees.append(lesson.stem)
        link = f"[{lesson.number} {lesson.title}]({lesson.stem}.ipynb)"
        download = f'<a href="{lesson.notebook}" download>download</a>'
        rows.append(
            f"| {link} | {lesson.minutes} | {', '.join(sorted(lesson.needs))} | {download} |"
        )
    hours = sum(lesson.minutes for lesson in course.lessons) / 60
    rows.append(f"| **together** | {hours:.0f} hours | | |")
    trees += [*_end(trees), "```{toctree}", ":hidden:", ":caption: Reference", ""]
    trees += ["ways", "cheat_sheet", "glossary", *GUIDE_PAGES, "api/index", "```"]
    text = relinked(text, "book", course)  # before the links to pages of the book come in
    readme = (course.root / "README.md").read_text(encoding="utf-8")
    _, _, left_out = readme.partition("## What is not in the course\n")
    text = text.replace("<!-- not in the course -->", left_out.partition("\n## ")[0].strip())
    text = text.replace("<!-- ways -->", book_ways.table(course.lessons))
    text = text.replace("<!-- lessons -->", "\n".join(rows))
    return text.replace("<!-- pages -->", "\n".join(trees))


def ways(course: Course) -> str:
    """The page of the short ways."""
    text = (course.root / "book" / "ways.md").read_text(encoding="utf-8")
    return book_ways.page(text, course.lessons)


def _end(trees: Sequence[str]) -> list[str]:
    return ["```", ""] if trees else []


def sources(course: Course) -> Files:
    """All that Sphinx reads: {path below build/book-source: bytes}."""
    files, first = lesson_pages(course)
    texts = {
        "index.md": index(course),
        "glossary.md": book_terms.page(course.terms, first),
        "cheat_sheet.md": cheat_sheet(course),
        "ways.md": ways(course),
    }
    for name, text in guide(course).items():
        texts[f"{name}.md"] = relinked(text, GUIDE, course)
    for name, text in book_api.pages(course.modules).items():
        texts[f"api/{name}"] = text
    for module in course.modules:
        text = (course.root / module.file).read_text(encoding="utf-8")
        name = f"{EXTRA}/source/{book_api.source_page(module.file)}"
        texts[name] = book_api.source_text(module.file, text)
    for name, text in texts.items():
        files[name] = text.encode()
    for path in sorted((course.root / "images").glob("*.svg")):
        files[f"images/{path.name}"] = path.read_bytes()
    return files


def guide(course: Course) -> dict[str, str]:
    """{name of a page of the guide: its Markdown}."""
    found = {}
    for name in GUIDE_PAGES:
        found[name] = (course.root / GUIDE / f"{name}.md").read_text(encoding="utf-8")
    return found


def sections(course: Course) -> list[book_search.Entry]:
    """What the search finds."""
    pages = guide(course) | {"ways": ways(course)}
    return book_search.entries(course.root, course.lessons, pages, course.terms, course.modules)


# ---- writing


def write_sources(files: Files, folder: Path) -> None:
    """Write what changed, and remove what is no longer there, so that Sphinx reads little anew."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.relative_to(folder).as_posix() not in files:
            path.unlink()
    for name, content in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def write(out: Path, root: Path = ROOT) -> int:
    """Build the book; returns Sphinx's exit code, which is not 0 if there was a warning."""
    source = out.parent / SOURCE
    all_of_it = course(root)
    write_sources(sources(all_of_it), source)
    shutil.rmtree(out, ignore_errors=True)
    options = ["-b", "html", "-W", "--keep-going", "-q", "-j", "2"]
    options += ["-c", str(root / "book"), "-d", str(out.parent / "book-doctrees")]
    options += ["-D", f"html_extra_path={source / EXTRA}"]
    status = sphinx_build([*options, str(source), str(out)])
    search = book_search.script(root, sections(all_of_it))
    (out / "searchindex.js").write_text(search, encoding="utf-8")  # in place of Sphinx's own
    return status


def main(out: Path) -> int:
    """The command line; returns the exit code."""
    status = write(out)
    if status == 0:
        print(f"{len(list(out.rglob('*.html')))} pages: open {out / 'index.html'}")
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.book", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", nargs="?", type=Path, default=OUT, help="where to write it")
    sys.exit(main(parser.parse_args().folder.resolve()))
