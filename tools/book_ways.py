"""Links to the sections of lessons in the book, and its page of the short ways through the course.

The ways are those of `course.catalog`, from which `make pages` writes COURSE.md too.

Held by: tests/unit/test_book.py, tests/notebooks/test_book_pages.py
"""

import html
import re
from collections.abc import Sequence

from docutils.nodes import make_id

from course import catalog
from tools import book_text
from tools.course_map import Lesson

# "07 §1, 2 and 6", "05 §1 to 5"; in "05 §5, 16 §3" the 16 is a lesson.
_SECTIONS = re.compile(r"\b(\d\db?) §(\d+(?:(?:, and |, | and | to )\d+\b(?!b? §))*)")


def address(lesson: Lesson, section: catalog.Section) -> str:
    """Where the book has a section, from a page beside it."""
    return f"{lesson.stem}.html#{make_id(section.heading)}"


def linked(text: str, lessons: Sequence[Lesson]) -> str:
    """Prose in which "05 §1, 3" leads to the sections 1 and 3 of lesson 05.

    Raises:
        ValueError: The lesson has no such section.
    """
    known = {lesson.number: lesson for lesson in lessons}

    def link(match: re.Match) -> str:
        lesson = known[match[1]]
        sections = {section.number: section for section in lesson.sections}

        def link_number(number: re.Match) -> str:
            section = sections.get(int(number[0]))
            if section is None:
                raise ValueError(f"{match[0]!r}: lesson {lesson.number} has no section {number[0]}")
            sign = "§" if number.start() == 0 else ""
            return f'<a href="{address(lesson, section)}">{sign}{number[0]}</a>'

        return f"{match[1]}&nbsp;{re.sub(r'[0-9]+', link_number, match[2])}"

    return book_text.in_prose(text, lambda prose: _SECTIONS.sub(link, prose))


def table(lessons: Sequence[Lesson]) -> str:
    """The ways with their goals and hours; each leads to its lessons on the page of the ways."""
    rows = ["| way | to be able to do | hours |", "|---|---|---:|"]
    for name, way in catalog.WAYS.items():
        hours = sum(stop.minutes for stop in _stops(way, lessons)) / 60
        rows.append(
            f'| <a href="ways.html#{name}"><code>{name}</code></a> | {way.goal} | {hours:.1f} |'
        )
    return "\n".join(rows)


def page(text: str, lessons: Sequence[Lesson]) -> str:
    """The page of the ways: book/ways.md with the lessons of each way and links to the sections."""
    known = {lesson.number: lesson for lesson in lessons}
    lines = []
    for name, way in catalog.WAYS.items():
        found = _stops(way, lessons)
        hours = sum(stop.minutes for stop in found) / 60
        lines += [f"## {name}", "", f"{way.goal}. {hours:.1f} hours.", ""]
        lines += ["| lesson | sections | minutes |", "|---|---|---:|"]
        for stop in found:
            lesson = known[stop.number]
            title = f'<a href="{lesson.stem}.html">{lesson.number} {html.escape(lesson.title)}</a>'
            sections = "<br>".join(_link(lesson, section) for section in stop.taken)
            lines.append(f"| {title} | {sections} | {stop.minutes} |")
        lines.append("")
    return text.replace("<!-- table -->", table(lessons)).replace("<!-- ways -->", "\n".join(lines))


def _stops(way: catalog.Way, lessons: Sequence[Lesson]) -> list[catalog.Stop]:
    return catalog.stops(way.taken, {lesson.number: lesson.sections for lesson in lessons})


def _link(lesson: Lesson, section: catalog.Section) -> str:
    number = "" if section.number is None else f"{section.number}. "
    title = html.escape(f"{number}{section.title}").replace("`", "")
    return f'<a href="{address(lesson, section)}">{title}</a>'
