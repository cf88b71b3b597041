"""A drawing of how far a learner is: a bar for the way or part they are on, and one for the course.

Lesson 00 shows it; `plot.progress` is the way in.
"""

from pathlib import Path
from typing import NamedTuple

from matplotlib.patches import Rectangle

from course import catalog
from course.figures.style import (
    PALE,
    PALETTE,
    RULE,
    Picture,
    blank,
    canvas,
    figure,
    put_text,
)

DONE = PALETTE[2]  # a green
WIDTH_IN = 6.0
ROW_IN = 0.62


class _Row(NamedTuple):
    """A bar.

    Args:
        title: What it counts.
        done: The exercises of it that have passed.
        total: All of its exercises.
    """

    title: str
    done: int
    total: int


@figure
def progress(folder: str | Path | None = None) -> Picture:
    """How many exercises have passed: of the way that is chosen, or of a lesson, and of the course.

    Without a way it is the first lesson that has an open exercise. The lessons are those of the
    course; what has passed is looked up beside the notebook.

    Args:
        folder: Folder of the student notebooks; None: where this notebook lies.

    Raises:
        ValueError: There is no lesson to show.
    """
    here = Path.cwd() if folder is None else Path(folder)
    found = catalog.notebooks_folder(here)
    if found is None:
        raise ValueError(f"no lesson in {here}: give the folder that holds the notebooks")
    lessons = catalog.lessons(found)
    passed = catalog.passed(here)
    everything: list[str] = []
    for lesson in lessons:
        everything += lesson.exercises
    rows = [
        _nearest(lessons, passed, catalog.chosen_way(here)),
        _row("all lessons", everything, passed),
    ]
    told = [f"{row.done} of {row.total} ({row.title})" for row in rows]
    alt = f"Exercises that have passed: {', '.join(told)}"

    picture = canvas(WIDTH_IN, ROW_IN * len(rows), alt=alt)
    axes = picture.axes[0]
    blank(axes)
    axes.set_aspect("auto")
    axes.set(xlim=(0, 1), ylim=(-len(rows), 0))
    for place, row in enumerate(rows):
        top = -place - 0.45
        put_text(axes, 0, top + 0.2, row.title, 9, ha="left")
        put_text(axes, 1, top + 0.2, f"{row.done} of {row.total} exercises", 9, ha="right")
        share = row.done / row.total if row.total else 0
        for width, colour in ((1.0, PALE), (share, DONE)):
            bar = Rectangle((0, top - 0.4), width, 0.32, facecolor=colour, edgecolor=RULE)
            axes.add_patch(bar)
    return picture


def _nearest(lessons: list[catalog.Lesson], passed: set[str], name: str | None) -> _Row:
    """The chosen way, or else the first lesson that is not done."""
    if name is not None:
        exercises: list[str] = []
        for _, section in catalog.steps(catalog.WAYS[name], lessons):
            exercises += section.exercises
        return _row(f"the way {name}", exercises, passed)
    lesson = lessons[-1]
    for one in lessons:
        if not passed.issuperset(one.exercises):
            lesson = one
            break
    return _row(f"lesson {lesson.number}, {lesson.title}", lesson.exercises, passed)


def _row(title: str, exercises: list[str] | tuple[str, ...], passed: set[str]) -> _Row:
    return _Row(title, len(passed.intersection(exercises)), len(exercises))
