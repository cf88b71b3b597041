"""A drawing of what a learner has done: a row for each lesson, a box for each exercise.

Lesson 00 shows it; `plot.progress` is the way in.
"""

from pathlib import Path

from matplotlib.patches import FancyBboxPatch

from labcode import course
from labcode.teach.figures.style import (
    PALE,
    PALETTE,
    RULE,
    Picture,
    blank,
    canvas,
    figure,
    ink_on,
    put_text,
)

DONE = PALETTE[2]  # a green
LETTER = 0.155  # width of a letter of a title, in boxes
BOX = 0.78
ROW_IN = 0.36


@figure
def progress(folder: str | Path | None = None) -> Picture:
    """The exercises of all lessons, those that have passed in colour and ticked.

    The lessons are those of the course; what has passed is looked up beside the notebook.

    Args:
        folder: Of the student notebooks; None: where this notebook lies.

    Raises:
        ValueError: There is no lesson to show.
    """
    here = Path.cwd() if folder is None else Path(folder)
    found = course.notebooks_folder(here)
    if found is None:
        raise ValueError(f"no lesson in {here}: give the folder that holds the notebooks")
    lessons = course.lessons(found)
    passed = course.passed(here)
    most = max(len(lesson.exercises) for lesson in lessons)
    titles = [f"{lesson.number}  {lesson.title}" for lesson in lessons]
    first_box = LETTER * max(map(len, titles)) + 0.3
    width = first_box + most
    counts = []
    for lesson in lessons:
        done = len(passed.intersection(lesson.exercises))
        counts.append(f"{done} of {len(lesson.exercises)} in lesson {lesson.number}")
    alt = f"Exercises that have passed: {', '.join(counts)}"

    picture = canvas(ROW_IN * width * 1.3, ROW_IN * len(lessons), alt=alt)
    axes = picture.axes[0]
    blank(axes)
    axes.set_aspect("auto")
    axes.set(xlim=(0, width), ylim=(-len(lessons), 0))
    for row, lesson in enumerate(lessons):
        y = -row - 0.5
        put_text(axes, 0, y, titles[row], 9, ha="left")
        for column, exercise in enumerate(lesson.exercises):
            is_done = exercise in passed
            colour = DONE if is_done else PALE
            left = first_box + column
            box = FancyBboxPatch(
                (left, y - BOX / 2),
                BOX,
                BOX,
                boxstyle="round,pad=0,rounding_size=0.12",
                facecolor=colour,
                edgecolor=RULE,
                linewidth=0.8,
            )
            axes.add_patch(box)
            text = f"✓ {exercise}" if is_done else exercise
            put_text(axes, left + BOX / 2, y, text, 8, color=ink_on(colour))
    return picture
