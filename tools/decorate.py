"""What the builder adds to a lesson, so that no source has to carry it.

Links to the lessons before and after, to map, glossary and solution; sources and sections of other
lessons that can be clicked; a box round each question that is to be predicted; a first line of code
that says what to do where labcode is missing. Markdown and plain HTML: it shows in JupyterLab, in
VS Code and in an exported page alike.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from course import catalog

MAP = "[Map of the course](../COURSE.md)"
GLOSSARY = "[Glossary](../book/glossary.md)"
GUARD = "import labcode  # not found? Kernel > Change Kernel: take the one of .venv, or `make lab`"
PREDICT = "# PREDICT: put your answer in the place of each `...`, run this cell, then go on."
# Borders alone, in a blue that shows on white and on black: a ground of its own would keep the
# letters of a dark theme from being read. Opened and closed in paragraphs of their own, so that
# what stands between is still Markdown.
BORDERS = "border: 1px solid #2f7fd1; border-left: 6px solid #2f7fd1; padding: 2px 14px"
BOX = f'<div style="{BORDERS}">\n\n{{}}\n\n</div>'

# Text that is left as it is: code, links, and what is a link without our help.
_TAKEN = re.compile(r"(`[^`]*`|!?\[[^\]]*\]\([^)]*\)|<[^>\s][^>]*>)")
_ARXIV = re.compile(r"\barXiv:(\d{4}\.\d{4,5})")
_DOI = re.compile(r"\bdoi:? ?(10\.\d{4,9}/[^\s,;)]*[\w/])")
_ADDRESS = re.compile(
    r"(?<![\w@./-])(https?://)?((?:[a-z0-9-]+\.)+(?:org|com|gov|io|edu|net|ai|dev|eu|int)\b"
    r"(?:/[\w./#?=&%~+-]*[\w/])?)"
)
_SECTION = re.compile(r"\b[Ll]esson\s+(\d\db?),\s+section\s+(\d+)\b")
_SECTIONS = re.compile(
    r"(?<![\w.])(\d\db?)(?:\s+\(|,\s+)sections?\s+\d+(?:(?:,\s+|\s+to\s+|\s+and\s+)\d+)*"
)
_SOURCES = re.compile(r"(?ms)(^## +Sources\b.*?)(?=^## |\Z)")


class Headline(NamedTuple):
    """What a source says about itself at its top.

    Args:
        stem: The name of its notebooks, without the ending.
        title: First heading without the number, "Tensor parallel".
        minutes: What a learner needs; None where it does not say.
    """

    stem: str
    title: str
    minutes: int | None

    @property
    def number(self) -> str:
        """Number as in its name: "04", or "13b"."""
        return catalog.number_of(self.stem)

    @property
    def label(self) -> str:
        """Number and title, as a link shows them."""
        return f"{self.number} {self.title}"


def headline(stem: str, text: str) -> Headline:
    """The headline of a py:percent source."""
    found = re.search(r"(?m)^# # (?:Lesson )?\d+b?\W+(.+)$", text)
    title = found[1].strip() if found else stem.partition("_")[2].replace("_", " ")
    minutes = re.search(r"\*\*Time\*\*:? (\d+) min", text)
    return Headline(stem, title, int(minutes[1]) if minutes else None)


def navigation(stem: str, course: Sequence[Headline], *, is_solution: bool) -> str:
    """One line: that it is a solution, and links to other lessons, map, glossary and solution.

    Args:
        stem: Stem of the lesson that gets the line.
        course: All lessons, in order.
        is_solution: Whether the line is for the solved notebook.
    """
    stems = [lesson.stem for lesson in course]
    here = stems.index(stem)
    links = ["**Solution**"] if is_solution else []
    if here > 0:
        before = course[here - 1]
        links.append(f"[← {before.label}]({before.stem}.ipynb)")
    links += [MAP, GLOSSARY]
    if is_solution:
        links.append(f"[This lesson, to solve](../notebooks/{stem}.ipynb)")
    else:
        links.append(f"[Solution of this lesson](../solutions/{stem}.ipynb)")
    if here + 1 < len(course):
        after = course[here + 1]
        links.append(f"[{after.label} →]({after.stem}.ipynb)")
    return " &nbsp;|&nbsp; ".join(links)


def with_links(text: str) -> str:
    """Markdown in which papers can be clicked, and under `## Sources` addresses as well."""
    text = _outside_links(text, _link_papers)
    return _SOURCES.sub(_link_addresses, text)


def with_sections(text: str, lessons: Sequence[Headline]) -> str:
    """Markdown in which what is said of "lesson 04, section 1" leads there.

    So do the numbers in "lesson 04 (sections 1 and 3 to 5)".

    Args:
        text: The Markdown.
        lessons: All lessons.
    """
    stems = {lesson.number: lesson.stem for lesson in lessons}

    def address(lesson: str, section: str) -> str:
        cell_id = catalog.Section(int(section), "", False, 0).cell_id
        return f"{stems[lesson]}.ipynb#cell-id={cell_id}"

    def link_phrase(found: re.Match) -> str:
        return f"[{found[0]}]({address(found[1], found[2])})" if found[1] in stems else found[0]

    def link_numbers(found: re.Match) -> str:
        if found[1] not in stems:
            return found[0]

        def link(number: re.Match) -> str:
            return f"[{number[0]}]({address(found[1], number[1])})"

        which = found[0].removeprefix(found[1])
        return found[1] + re.sub(r"(?:section\s+)?(\d+)", link, which)

    text = _outside_links(text, lambda part: _SECTION.sub(link_phrase, part))
    return _outside_links(text, lambda part: _SECTIONS.sub(link_numbers, part))


def _link_papers(text: str) -> str:
    text = _ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    return _DOI.sub(r"[doi:\1](https://doi.org/\1)", text)


def _link_addresses(section: re.Match) -> str:
    def link(text: str) -> str:
        return _ADDRESS.sub(r"[\2](https://\2)", text)

    return _outside_links(section[1], link)


def _outside_links(text: str, change: Callable[[str], str]) -> str:
    pieces = _TAKEN.split(text)
    for i in range(0, len(pieces), 2):  # the others are what `_TAKEN` found
        pieces[i] = change(pieces[i])
    return "".join(pieces)


def boxed(text: str) -> str:
    """Markdown with a box from the paragraph that says **Predict** to its end."""
    at = text.find("**Predict")
    if at < 0:
        return text
    start = text.rfind("\n\n", 0, at) + 2
    if start == 1:  # there is no paragraph before
        start = 0
    return text[:start] + BOX.format(text[start:].strip())


def guarded(code: str) -> str:
    """The first code cell of a lesson: it begins by importing what another kernel lacks."""
    if code.startswith("%%"):
        return code
    return f"{GUARD}\n{code}"
