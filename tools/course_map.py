"""The course as data, read from its sources: lessons, minutes, and what each needs.

A lesson says all of it at its top: `# # 04 · Title`, `**Time**: 80 minutes`,
`**Needs**: lesson 01`. Here that is read; COURSE.md and its picture,
INSTRUCTORS.md and the slides are made from it. Only the names of the parts are written here.
"""

import functools
import re
from pathlib import Path
from typing import NamedTuple

from course import catalog
from tools import decorate

ROOT = Path(__file__).resolve().parents[1]
# The number of its first lesson, and the name of each part.
PARTS = {
    0: "I Foundations",
    4: "II Data parallel",
    8: "III Model parallel",
    14: "IV The cluster",
    18: "V Beyond",
    22: "VI New in 2026",
}


class Lesson(NamedTuple):
    """A lesson as its source describes it.

    Args:
        number: "04".
        stem: The name of its files without the ending.
        title: Title without the number.
        minutes: What a learner needs.
        needs: The numbers of the lessons that must come before its core sections.
        part: The part of the course.
        sections: Sections with their times.
        needed: Which sections of these lessons, and by which of its own.
    """

    number: str
    stem: str
    title: str
    minutes: int
    needs: tuple[str, ...]
    part: str
    sections: tuple[catalog.Section, ...] = ()
    needed: tuple[catalog.Need, ...] = ()

    @property
    def notebook(self) -> str:
        """The student notebook, from the root of the course."""
        return f"notebooks/{self.stem}.ipynb"

    @property
    def solution(self) -> str:
        """The executed solution, from the root of the course."""
        return f"solutions/{self.stem}.ipynb"


def lessons(root: Path = ROOT) -> list[Lesson]:
    """All lessons that have a source, in order."""
    found = []
    for path in sorted((root / "solutions").glob("[0-9][0-9]*_*.py")):
        found.append(lesson_of(path.stem, path.read_text(encoding="utf-8")))
    return found


@functools.cache
def source_of_exercise(exercise: str, root: Path = ROOT) -> Path:
    """The lesson that checks an exercise, "13.5": lesson 13b goes on counting where 13 ends."""
    for path in sorted((root / "solutions").glob(f"{int(exercise.split('.')[0]):02d}*_*.py")):
        if f'check("{exercise}",' in path.read_text(encoding="utf-8"):
            return path
    raise ValueError(f"no lesson has a check of exercise {exercise}")


def lesson_of(stem: str, text: str) -> Lesson:
    """What a source says about its lesson.

    Raises:
        ValueError: It does not say how long it takes or what it needs.
    """
    about = decorate.headline(stem, text)
    if about.minutes is None:
        raise ValueError(f"{stem}: write how long it takes, as in '**Time**: 60 minutes.'")
    prose = re.sub(r"(?m)^# ?", "", text)
    parts = catalog.sections(prose)
    core = {section.number for section in parts if not section.is_optional}
    needed = _needs(stem, prose)
    needs: list[str] = []
    for need in needed:
        is_core = need.of is None or not core.isdisjoint(need.of)
        if is_core and need.lesson not in needs:
            needs.append(need.lesson)
    return Lesson(
        number=about.number,
        stem=stem,
        title=about.title,
        minutes=about.minutes,
        needs=tuple(needs),
        part=part_of(about.number),
        sections=parts,
        needed=needed,
    )


def part_of(number: str) -> str:
    """The part that a lesson belongs to."""
    first = max(first for first in PARTS if first <= int(number[:2]))
    return PARTS[first]


def _needs(stem: str, prose: str) -> tuple[catalog.Need, ...]:
    found = catalog.NEEDS.search(prose)
    if found is None:
        raise ValueError(f"{stem}: write what it needs, as in '**Needs**: lesson 01 (section 2).'")
    return catalog.needs(found[1])


def depths(course: list[Lesson]) -> dict[str, int]:
    """How many lessons must come before each, one after the other, at least."""
    depth: dict[str, int] = {}
    for lesson in course:
        depth[lesson.number] = 1 + max((depth[number] for number in lesson.needs), default=-1)
    return depth


def direct_needs(course: list[Lesson]) -> dict[str, tuple[str, ...]]:
    """The needs of each lesson without those that another need of it already needs."""
    all_before: dict[str, set[str]] = {}
    for lesson in course:
        before = set(lesson.needs)
        for number in lesson.needs:
            before |= all_before[number]
        all_before[lesson.number] = before
    direct = {}
    for lesson in course:
        implied = set()
        for number in lesson.needs:
            implied |= all_before[number]
        direct[lesson.number] = tuple(n for n in lesson.needs if n not in implied)
    return direct
