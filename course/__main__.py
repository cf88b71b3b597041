"""`python -m labcode`: the lessons, how long they take, what is done, and what comes next.

python -m labcode ways        ways through the course, by what you want to be able to do
python -m labcode way ddp     take one of them: "Next" then follows it; `way off` ends it
python -m labcode 04          one lesson: its sections and exercises, and how to open it
python -m labcode reset 04    begin it anew; your notebook is kept beside the new one
"""

import argparse
import re
import sys
from pathlib import Path

from course import catalog
from labcode.runtime import suggest
from labcode.runtime.files import print_out

EPILOG = """\
Also there: python -m labcode.train RECIPE (a training run), python -m labcode.perf (does a model
fit, and how fast is it?), python -m labcode.slurm (job scripts), python -m labcode.doctor (is this
installation right?), and `make lab`, which opens the course.
An exercise is done when its check in the notebook says so.
"""


PROGRAM = "python -m labcode"
WORDS = ("ways", "way", "reset")  # beside the number of a lesson
# What people ask this program for, and what has it.
ELSEWHERE = {
    "train": "python -m labcode.train",
    "sweep": "python -m labcode.run.sweep",
    "slurm": "python -m labcode.slurm",
    "submit": "python -m labcode.slurm submit",
    "perf": "python -m labcode.perf",
    "plan": "python -m labcode.perf plan",
    "fits": "python -m labcode.perf fits",
    "doctor": "python -m labcode.doctor",
    "lab": "make lab",
    "version": "python -m labcode.doctor",
    "help": f"{PROGRAM} --help",
    "next": PROGRAM,
    "progress": PROGRAM,
    "status": PROGRAM,
    "lessons": PROGRAM,
}


def main(arguments: list[str] | None = None, start: Path | None = None) -> int:
    """The command line; returns the exit code.

    Args:
        arguments: Arguments without the program's name; None: those of this process.
        start: Where to look for the notebooks first; None: here.
    """
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, epilog=EPILOG)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "words", nargs="*", metavar="LESSON", help="its number, or: ways, way NAME, reset NUMBER"
    )
    given = sys.argv[1:] if arguments is None else arguments
    words = given
    if "-h" in given or "--help" in given:
        words = parser.parse_args(given).words
    folder = catalog.notebooks_folder(start or Path.cwd())
    if folder is None:
        print(
            "no lesson found: go to the folder of the course, the one that holds notebooks/",
            file=sys.stderr,
        )
        return 2
    try:
        lines = answer(words, folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_out("\n".join(lines))
    return 0


def answer(words: list[str], folder: Path) -> list[str]:
    """The lines to print for the words of the command line.

    Raises:
        ValueError: There is no such lesson, or there are other words.
    """
    if not words:
        return table(folder)
    if words == ["ways"]:
        return ways(catalog.lessons(folder))
    if words[0] == "way" and len(words) <= 2:
        return way(words[1:], folder)
    if len(words) == 1 and words[0][:1].isdigit() and "." not in words[0]:
        return about(catalog.find(words[0], folder), folder)
    if len(words) == 2 and words[0] == "reset":
        lesson = catalog.find(words[1], folder)
        kept = catalog.begin_anew(lesson)
        name = lesson.notebook.name
        if kept is None:
            return [f"{name} is as new: you had not changed it"]
        return [f"{name} is as new, its exercises are open; yours is {kept.name}, beside it"]
    raise ValueError(_not_understood(words, folder))


def _not_understood(words: list[str], folder: Path) -> str:
    """The one-line message for words that are none of this program: what was probably meant."""
    first = words[0]
    name = first.lstrip("-")
    rest = [name, *words[1:]]
    if name in ELSEWHERE:
        line = " ".join([ELSEWHERE[name], *(words[1:] if "labcode." in ELSEWHERE[name] else [])])
        return f"{first} is no word of this program: {line}"
    if name in ("check", "hint"):
        return f"{first} is for a cell of the lesson's notebook: {name}({rest[-1]!r})"
    if name in catalog.WAYS:
        return f"{first} is the name of a way: {PROGRAM} way {name}"
    if name == "ways" and len(words) == 2:
        return f"ways shows all of them, way takes one: {PROGRAM} way {words[1]}"
    if name == "reset" and len(words) != 2:
        return f"reset takes the number of one lesson: {PROGRAM} reset 04"
    if name == "lesson" and len(words) == 2:
        return f"the number of a lesson is enough: {PROGRAM} {words[1]}"
    lesson = _lesson_in(Path(first).name, folder)
    if lesson is not None:
        return f"{first} belongs to lesson {lesson}: {PROGRAM} {lesson}"
    if first != name and name in WORDS:
        return f"{first} is a word and no option: {PROGRAM} {' '.join(rest)}"
    if len(words) == 1:
        return suggest.unknown("word", first, WORDS)
    return (
        f"{' '.join(words)!r} is no lesson: give a number, ways, way and a name, or reset and a "
        "number"
    )


def _lesson_in(word: str, folder: Path) -> str | None:
    """The lesson to which an exercise, "4.1", or a notebook's name belongs."""
    number = re.match(r"(\d+b?)(?:\.\d|_)", word)
    if number is None:
        return None
    try:
        return catalog.find(number[1], folder).number
    except ValueError:
        return None


def about(lesson: catalog.Lesson, folder: Path) -> list[str]:
    """The lines to print for one lesson; what the chosen way takes of it is marked."""
    done = catalog.passed(folder)
    lines = [f"{lesson.number}  {lesson.title}, {lesson.minutes or '?'} minutes"]
    if lesson.needs:
        lines.append(f"Needs {lesson.needs}")
    name = catalog.chosen_way(folder)
    on_way = []
    if name is not None:
        for other, section in catalog.steps(catalog.WAYS[name], catalog.lessons(folder)):
            if other.number == lesson.number:
                on_way.append(section.number)
    for section in lesson.sections:
        number = "" if section.number is None else f"{section.number}."
        rest = ", optional" if section.is_optional else ""
        if section.number in on_way:
            rest += f"    on the way {name}"
        lines.append(f"{number:>6} {section.title}, {section.minutes} min{rest}")
    for exercise in lesson.exercises:
        lines.append(f"    {exercise:<6} {'done' if exercise in done else 'open'}")
    lines.append(f"Open {lesson.notebook.name} in JupyterLab: make lab")
    if name is not None:
        lines += next_on(name, folder)
    return lines


def ways(lessons: list[catalog.Lesson]) -> list[str]:
    """The lines to print for the ways through the course."""
    known = {lesson.number: lesson.sections for lesson in lessons}
    lines = []
    for name, way in catalog.WAYS.items():
        found = catalog.stops(way.taken, known)
        minutes = sum(stop.minutes for stop in found)
        lines.append(f"{name}: {way.goal} ({minutes / 60:.1f} hours)")
        told = [f"{stop} ({stop.minutes} min)" for stop in found]
        lines.append(f"    {' · '.join(told)}")
    return [
        *lines,
        "",
        "§ names sections; a lesson without § is taken without what is optional.",
        "`python -m labcode way ddp` takes one of them: `python -m labcode` then follows it.",
    ]


def way(words: list[str], folder: Path) -> list[str]:
    """Choose a way or end it, and the lines to print.

    Args:
        words: Nothing, the name of a way, or "off" ("none" is taken for it).
        folder: Folder of the student notebooks.

    Raises:
        ValueError: There is no such way, or the choice cannot be kept.
    """
    if words:
        word = words[0].casefold()
        name = None if word in ("off", "none") else word
        try:
            catalog.choose_way(name, folder)
        except OSError as error:
            raise ValueError(f"the choice cannot be kept in {folder}: {error}") from None
    chosen = catalog.chosen_way(folder)
    if chosen is None:
        return [f"You are on no way. There are {', '.join(catalog.WAYS)}: python -m labcode ways"]
    way = catalog.WAYS[chosen]
    done = catalog.passed(folder)
    lines = [f"{chosen}: {way.goal} (`{PROGRAM} way off` ends it)"]
    for lesson, section in catalog.steps(way, catalog.lessons(folder)):
        line = f"    {lesson.number} §{section.number:<2} {section.title}, {section.minutes} min"
        for exercise in section.exercises:
            line += f"  {'✓' if exercise in done else '·'} {exercise}"
        lines.append(line)
    return [*lines, *next_on(chosen, folder)]


def next_on(name: str, folder: Path) -> list[str]:
    """The lines that say where a way goes on."""
    done = catalog.passed(folder)
    found = catalog.ahead(catalog.WAYS[name], catalog.lessons(folder), done)
    lines = []
    exercises: list[str] = []
    for lesson, section in found:
        lines.append(f"    {lesson.notebook.name}, section {section.number}: {section.title}")
        exercises = [exercise for exercise in section.exercises if exercise not in done]
    if exercises:
        return [f"Next on the way {name}, up to exercise {exercises[0]}:", *lines]
    if lines:
        return [f"All exercises on the way {name} are done; what comes after them:", *lines]
    return [f"All exercises on the way {name} are done."]


def table(folder: Path) -> list[str]:
    """The lines to print for the notebooks of a folder."""
    done = catalog.passed(folder)
    lessons = catalog.lessons(folder)
    rows = []
    total_minutes = 0
    total_done = 0
    next_step = ""
    for lesson in lessons:
        passed = done.intersection(lesson.exercises)
        count = f"{len(passed)} of {len(lesson.exercises)}"
        minutes = "" if lesson.minutes is None else str(lesson.minutes)
        rows.append(f"{lesson.number}  {lesson.title:<48} {minutes:>7}  {count:>9}")
        total_minutes += lesson.minutes or 0
        total_done += len(passed)
        is_open = [exercise for exercise in lesson.exercises if exercise not in done]
        if is_open and not next_step:
            next_step = f"Next: exercise {is_open[0]} in {lesson.notebook.name}"
    total = sum(len(lesson.exercises) for lesson in lessons)
    head = f"{'':2}  {'lesson':<48} {'minutes':>7}  {'exercises':>9}"
    hours = f"{total_minutes // 60} h {total_minutes % 60:02} min"
    name = catalog.chosen_way(folder)
    if name is None:
        end = ["You want one thing only? `python -m labcode ways` shows the way to it."]
        end.append(next_step or "All exercises are done.")
    else:
        end = next_on(name, folder)
    return [
        head,
        *rows,
        "",
        f"{total_done} of {total} exercises done; all lessons together take {hours}.",
        *end,
    ]


if __name__ == "__main__":
    sys.exit(main())
