"""The search of the book: the glossary's terms and the sections, each with a text to quote from.

Sphinx finds pages, and must fetch a page to quote it, which one opened from a disk may not. So the
file that its search page loads, searchindex.js, is written here instead: the sections of lessons,
guide and library with their prose, and the code that finds words in them (search.js beside the
book's style sheet). What is folded in a lesson, such as answers, is not in it.

Held by: tests/notebooks/test_book_search.py, tests/notebooks/test_book_pages.py
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import nbformat
from docutils.nodes import make_id

from tools import book_api, book_formula, book_terms, book_text
from tools.book_api import Module
from tools.book_terms import Term
from tools.course_map import Lesson

SCRIPT = "book/static/search.js"
KINDS = ("Glossary", "Lessons", "Guide", "Library")  # in the order of the results
SECTION = re.compile(r"(?m)^## +(.+)$")
PART = re.compile(r"(?m)^###+ +(?:Exercise \d+\.\d+ · )?(.+)$")
NUMBERED = re.compile(r"\d+\. ")  # not goals, questions, recap and sources
FOLDED = re.compile(r"(?s)<details>.*?</details>")
NAVIGATION = re.compile(r"(?m)^.*\[Map of the course\].*$")
EMPHASIS = re.compile(r"(?<![\w*])\*{1,2}([^*\n]{2,40})\*{1,2}(?![\w*])")
NOT_PROSE = (
    re.compile(r"(?ms)^(```+|~~~+|:::+).*?^\1[ ]*$"),  # code, directives
    re.compile(r"!\[[^\]]*\]\([^)]*\)"),
    re.compile(r"</?[a-z][^>]*>|<!--.*?-->"),
    re.compile(r"(?m)^\|[-:| ]+\|$"),  # below the head of a table
)
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
MARKS = re.compile(r"[`*]|\s\|(?=\s)|(?m:^#+ |^\| )")  # a line of a table begins and ends with |


class Entry(NamedTuple):
    """A section that can be found.

    Args:
        kind: Place of the kind in `KINDS`.
        title: Title of its page and its own.
        href: Address at which it begins.
        text: Prose of the entry.
        terms: What it explains: the forms of a term of the glossary, and what a lesson emphasises,
            in small letters; the names that a module defines, with the class before a method.
        parts: The headings below its own, without the numbers of exercises.
    """

    kind: int
    title: str
    href: str
    text: str
    terms: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


def entries(
    root: Path, lessons: list[Lesson], guide: dict[str, str], terms: list[Term], known: list[Module]
) -> list[Entry]:
    """All sections that can be found.

    Args:
        root: Root folder of the course.
        lessons: Lessons in order.
        guide: {name of a page: its Markdown}.
        terms: Terms of the glossary.
        known: The modules of the library.
    """
    found = []
    for lesson in lessons:
        notebook = nbformat.read(root / lesson.solution, as_version=4)
        found += _lesson(lesson, book_text.joined(notebook))
    for name, text in guide.items():
        found += _guide(name, text)
    for term in terms:
        forms = tuple(form.lower() for form in term.forms)
        found.append(Entry(0, term.name, book_terms.address(term.name), plain(term.text), forms))
    for module in known:
        href = f"api/{module.package}.html#module-{module.name}"
        found.append(Entry(3, module.name, href, " ".join(_docstrings(module)), _names(module)))
    return found


def _lesson(lesson: Lesson, text: str) -> Iterator[Entry]:
    """The head of a lesson and its numbered sections."""
    page = f"{lesson.number} {lesson.title}"
    for heading, prose in _sections(FOLDED.sub("", NAVIGATION.sub("", text))):
        terms = tuple(dict.fromkeys(plain(term).lower() for term in EMPHASIS.findall(prose)))
        parts = tuple(plain(part) for part in PART.findall(prose))
        if not heading:
            yield Entry(1, page, f"{lesson.stem}.html", plain(prose), terms, parts)
        elif NUMBERED.match(heading):
            href = f"{lesson.stem}.html#{make_id(heading)}"
            yield Entry(1, f"{page} › {heading}", href, plain(prose), terms, parts)


def _guide(name: str, text: str) -> Iterator[Entry]:
    title = text.partition("\n")[0].removeprefix("# ")
    for heading, prose in _sections(text):
        if heading:
            href = f"{name}.html#{make_id(plain(heading))}"
            yield Entry(2, f"{title} › {plain(heading)}", href, plain(prose))
        else:
            yield Entry(2, title, f"{name}.html", plain(prose))


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """(heading, what stands below it); the first has none."""
    pieces = SECTION.split(text)
    yield "", pieces[0].partition("\n")[2] if pieces[0].startswith("# ") else pieces[0]
    yield from zip(pieces[1::2], pieces[2::2], strict=True)


def _docstrings(module: Module) -> Iterator[str]:
    """What a module and its public functions and classes say of themselves."""
    yield " ".join((ast.get_docstring(module.tree) or "").split())
    for node in book_api.public(module.tree):
        first = (ast.get_docstring(node) or "").partition("\n\n")[0]
        yield f"{node.name}: {' '.join(first.split())}"


def _names(module: Module) -> tuple[str, ...]:
    """What a module defines for its users, as it is written there."""
    found = []
    for node in book_api.public(module.tree):
        found.append(node.name)
        if isinstance(node, ast.ClassDef):
            found += [f"{node.name}.{method.name}" for method in book_api.public(node)]
    return tuple(found)


def plain(text: str) -> str:
    """Markdown as one line of its words."""
    for pattern in NOT_PROSE:
        text = pattern.sub(" ", text)
    text = book_formula.in_words(text)
    return " ".join(MARKS.sub("", LINK.sub(r"\1", text)).split())


def script(root: Path, found: list[Entry]) -> str:
    """What the search page loads: how to search, then what is searched."""
    code = (root / SCRIPT).read_text(encoding="utf-8")
    data = json.dumps({"kinds": KINDS, "entries": found}, ensure_ascii=False)
    return f"{code}\nSearch.setIndex({data});\n"
