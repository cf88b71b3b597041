"""`make pages`: what README, COURSE.md, INSTRUCTORS.md and docs/ take from lessons and checks.

README.md                how long the course is, between two marks; the rest is written by hand
COURSE.md                the table of the lessons and the short ways, between marks as well
INSTRUCTORS.md           the schedules, between two marks as well
book/guide/clusters.md   the rates of GPUs and links, between two marks
docs/wrong_answers.md    what people get wrong in each exercise, and what the check tells them
docs/questions.md        questions for the room, from the instructor's notes of the solutions

python -m tools.pages [--check]     write them; --check: exit with 1 if one is stale

Held by: tests/unit/test_pages.py
"""

import argparse
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jupytext

from course import catalog
from labcode.perf import cluster
from labcode.runtime.files import write_atomically
from labcode.runtime.units import GIB
from tools import course_map
from tools.course_map import Lesson

ROOT = Path(__file__).resolve().parents[1]
README = "README.md"
COURSE = "COURSE.md"
PAGE = "INSTRUCTORS.md"
WRONG = "docs/wrong_answers.md"
QUESTIONS = "docs/questions.md"
BEGINS = "<!-- schedules: written by `make pages` -->"
ENDS = "<!-- end of schedules -->"
TABLE_BEGINS = "<!-- lessons: written by `make pages` -->"
TABLE_ENDS = "<!-- end of lessons -->"
WAYS_BEGIN = "<!-- ways: written by `make pages` -->"
WAYS_END = "<!-- end of ways -->"
GUIDE = "book/guide/clusters.md"
RATES_BEGIN = "<!-- rates: written by `make pages` -->"
RATES_END = "<!-- end of rates -->"
ASKS = re.compile(r"(?:Ask|Ask the room|For the room): ")
HOURS = re.compile(r"(<!-- hours -->).*?(<!-- end of hours -->)")
MOST_WRONG = 8  # of an exercise: the first ones in the data
WRITTEN = "Written by `make pages`; do not edit."


class Schedule(NamedTuple):
    """A way to teach the course.

    Args:
        title: "Half a day".
        aim: What the learners can do afterwards, and for whom it is.
        unit: What a row of the table is, such as "week".
        minutes: Minutes that a unit has for lessons, without breaks.
        units: The lessons of each unit, and their sections, as in `course.catalog.WAYS`.
        skip: What to leave out where time runs short.
    """

    title: str
    aim: str
    unit: str
    minutes: int
    units: tuple[dict[str, tuple[int, ...]], ...]
    skip: str


SCHEDULES = (
    Schedule(
        "Half a day",
        "Four hours with two breaks. Afterwards everybody has written a ring all-reduce and data "
        "parallel training by hand.",
        "half-day",
        220,
        ({"00": (3,), "01": (1, 2, 3, 4, 6), "04": (1, 2, 4, 5, 7)},),
        "Lesson 04: section 7, the script, as homework.",
    ),
    Schedule(
        "Two days",
        "For people who train on a cluster already: from the all-reduce to DDP, tensor and "
        "pipeline parallelism, FSDP2 and a job script.",
        "day",
        380,
        (
            {
                "00": (3,),
                "01": (1, 2, 3, 4, 6, 7),
                "04": (1, 2, 4, 5, 7),
                "05": (1, 2, 3, 4, 5),
            },
            {
                "08": (1, 2, 3),
                "09": (1, 2, 3),
                "12": (1, 2, 3, 4),
                "13": (1,),
                "13b": (7,),
                "14": (1, 2),
            },
        ),
        "Lesson 05: section 1 told at the board. Lesson 14: exercise 14.2 as homework.",
    ),
    Schedule(
        "A semester of weekly labs",
        "Fifteen labs of three hours. Exercises that are not done in the lab are homework: the "
        "notebooks check them.",
        "week",
        180,
        (
            {"00": (), "01": (1, 2, 3, 4, 6)},
            {"04": ()},
            {"05": ()},
            {"02": ()},
            {"03": (1, 2, 3), "03b": (5,)},
            {"07": (1, 2, 3, 4, 6)},
            {"08": ()},
            {"09": ()},
            {"10": ()},
            {"11": (1, 2, 3, 4, 5, 6)},
            {"12": ()},
            {"13": (1, 2, 3, 4)},
            {"13b": (5, 7), "14": (1, 2)},
            {"15": ()},
            {"17": (1, 2, 3, 4)},
        ),
        "Weeks with less than three hours leave time for questions and for the open tasks.",
    ),
)


# ---- schedules


def shown(schedule: Schedule, lessons: Sequence[Lesson]) -> str:
    """A schedule as Markdown; the minutes are those that the lessons state."""
    known = {lesson.number: lesson for lesson in lessons}
    sections = {lesson.number: lesson.sections for lesson in lessons}
    lines = [f"### {schedule.title}", "", schedule.aim, ""]
    lines += [f"| {schedule.unit} | lessons, and § their sections | minutes |", "|---:|---|---:|"]
    total = 0
    for place, unit in enumerate(schedule.units, 1):
        names = []
        minutes = 0
        for stop in catalog.stops(unit, sections):
            lesson = known[stop.number]
            which = str(stop).removeprefix(stop.number)
            names.append(f"[{lesson.number} {lesson.title}]({lesson.solution}){which}")
            minutes += stop.minutes
        total += minutes
        lines.append(f"| {place} | {'; '.join(names)} | {minutes} |")
    lines.append(f"| | **together** | {total} |")
    lines += ["", f"**To skip.** {schedule.skip}"]
    left = left_over(schedule, lessons)
    if left and len(schedule.units) > 2:
        lines += ["", f"Left for projects: lessons {', '.join(left)}."]
    return "\n".join(lines)


def left_over(schedule: Schedule, lessons: Sequence[Lesson]) -> list[str]:
    """The lessons that a schedule does not have."""
    taken = set()
    for unit in schedule.units:
        taken |= set(unit)
    return [lesson.number for lesson in lessons if lesson.number not in taken]


def with_schedules(page: str, lessons: Sequence[Lesson]) -> str:
    """INSTRUCTORS.md with the schedules between its marks."""
    tables = "\n\n".join(shown(schedule, lessons) for schedule in SCHEDULES)
    return between(page, BEGINS, tables, ENDS)


def with_table(page: str, lessons: Sequence[Lesson]) -> str:
    """COURSE.md with the table of the lessons between its marks."""
    rows = ["| lesson | minutes | needs | |", "|---|---:|---|---|"]
    part = ""
    for lesson in lessons:
        if lesson.part != part:
            part = lesson.part
            rows.append(f"| **{part}** | | | |")
        link = f"[{lesson.number} {lesson.title}]({lesson.notebook})"
        needs = ", ".join(sorted(lesson.needs))
        rows.append(f"| {link} | {lesson.minutes} | {needs} | [solved]({lesson.solution}) |")
    hours = sum(lesson.minutes for lesson in lessons) / 60
    rows.append(f"| **together** | {hours:.0f} hours | | |")
    return between(page, TABLE_BEGINS, "\n".join(rows), TABLE_ENDS)


def with_ways(page: str, lessons: Sequence[Lesson]) -> str:
    """COURSE.md with the short ways between its marks; each § leads to its section."""
    notebooks = {lesson.number: lesson.notebook for lesson in lessons}
    known = {lesson.number: lesson.sections for lesson in lessons}
    rows = ["| way | to be able to do | lessons, and § their sections | hours |"]
    rows.append("|---|---|---|---:|")
    for name, way in catalog.WAYS.items():
        found = catalog.stops(way.taken, known)
        hours = sum(stop.minutes for stop in found) / 60
        links = [_linked(stop, notebooks[stop.number]) for stop in found]
        rows.append(f"| `{name}` | {way.goal} | {' · '.join(links)} | {hours:.1f} |")
    return between(page, WAYS_BEGIN, "\n".join(rows), WAYS_END)


def _linked(stop: catalog.Stop, notebook: str) -> str:
    """A lesson on a way, as links to its sections."""
    if not stop.sections:
        return f"[{stop.number}]({notebook})"
    links = []
    for section in stop.taken:
        links.append(f"[§{section.number}](<{notebook}#{section.anchor}>)")
    return f"{stop.number} {' '.join(links)}"


def with_hours(page: str, lessons: Sequence[Lesson], root: Path = ROOT) -> str:
    """README.md with the length of the course between its marks."""
    exercises = 0
    for lesson in lessons:
        exercises += len(_titles(root / "solutions" / f"{lesson.stem}.py"))
    hours = sum(lesson.minutes for lesson in lessons) / 60
    length = f"{len(lessons)} lessons with {exercises} exercises take {hours:.0f} hours"
    return HOURS.sub(rf"\g<1>{length} by their own estimate\g<2>", page)


def with_rates(page: str) -> str:
    """The guide with the table of rates that planner and lessons read."""
    lines = [
        "| GPU | peak, bfloat16 | a large product | a layer | memory | its bandwidth | source |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for name in cluster.gpu_names():
        gpu = cluster.load_gpu(name)
        dtype = "bfloat16" if "bfloat16" in gpu.peak_flops_per_s else "float16"
        peak = gpu.peak_flops_per_s[dtype]
        reached = [_share(gpu.matmul_share, dtype, peak), _share(gpu.layer_share, dtype, peak)]
        cells = [
            f"`{name}`",
            f"{peak / 1e12:.0f} TFLOP/s" + ("" if dtype == "bfloat16" else f" ({dtype})"),
            *reached,
            f"{gpu.memory_bytes / GIB:.0f} GiB",
            f"{gpu.memory_bytes_per_s / 1e12:.2f} TB/s",
            gpu.source,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| cluster | GPUs | in a node | inside a node | a GPU's share of the adapters | source |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name in cluster.cluster_names():
        found = cluster.load_cluster(name)
        cells = [
            f"`{name}`",
            f"`{found.gpu.name}`",
            str(found.gpus_per_node),
            f"{found.inside.beta_bytes_per_s / 1e9:.0f} GB/s",
            f"{found.between.beta_bytes_per_s / 1e9:.4g} GB/s",
            found.source,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return between(page, RATES_BEGIN, "\n".join(lines), RATES_END)


def _share(shares: Mapping[str, float], dtype: str, peak: float) -> str:
    """What is reached of the peak, or that nobody has measured it."""
    if dtype not in shares:
        return "not known"
    return f"{shares[dtype] * peak / 1e12:.0f}"


def between(page: str, begins: str, text: str, ends: str) -> str:
    """A page with this text between two marks.

    Raises:
        ValueError: It has no such marks.
    """
    before, first, rest = page.partition(begins)
    _, second, after = rest.partition(ends)
    if not first or not second:
        raise ValueError(f"the page has no lines {begins} and {ends}: put them where they belong")
    return f"{before}{begins}\n\n{text}\n\n{ends}{after}"


# ---- wrong answers


def answers(root: Path = ROOT) -> dict[str, Any]:
    """{exercise: its `Answers`} of all files `tests/exercises/NN.py`."""
    sys.path.insert(0, str(root / "tests"))  # they import `answers`
    found: dict[str, Any] = {}
    for path in sorted((root / "tests" / "exercises").glob("[0-9][0-9].py")):
        found |= runpy.run_path(str(path))["ANSWERS"]
    return found


def wrong_answers(known: Mapping[str, Any], lessons: Sequence[Lesson], root: Path = ROOT) -> str:
    """docs/wrong_answers.md."""
    lines = ["# What people get wrong", "", WRITTEN, ""]
    lines += [
        "For each exercise: the mistake, and words of the hint that the check gives for it. "
        f"At most {MOST_WRONG} of those that the tests keep (`tests/exercises`).",
    ]
    for lesson in lessons:
        titles = _titles(root / "solutions" / f"{lesson.stem}.py")
        lines += ["", f"## {lesson.number} {lesson.title}"]
        for exercise, kept in known.items():
            if exercise not in titles:
                continue
            lines += ["", f"### {exercise} {titles[exercise]}", ""]
            lines += [f"{len(kept.wrong)} wrong answers are kept.", ""]
            lines += ["| mistake | the hint says |", "|---|---|"]
            for mistake, (_, hint) in list(kept.wrong.items())[:MOST_WRONG]:
                lines.append(f"| {_cell(mistake)} | ... {_cell(hint)} ... |")
    return "\n".join(lines) + "\n"


def _titles(source: Path) -> dict[str, str]:
    """{exercise: its title} from the headings of a lesson."""
    text = source.read_text(encoding="utf-8")
    return dict(re.findall(r"(?m)^# ### Exercise (\d+\.\d+)[ ·:]+(.+?)$", text))


def _cell(text: str) -> str:
    """Text that stays in its cell of a table, and is shown as it is."""
    one_line = " ".join(text.split())
    return re.sub(r"([|<>*_\[\]`\\])", r"\\\1", one_line)


# ---- questions


def questions(lessons: Sequence[Lesson], root: Path = ROOT) -> str:
    """docs/questions.md."""
    lines = ["# Questions for the room", "", WRITTEN, ""]
    lines.append("From the instructor's notes of the solutions, by section; answers in brackets.")
    for lesson in lessons:
        lines += ["", f"## {lesson.number} {lesson.title}"]
        text = (root / "solutions" / f"{lesson.stem}.py").read_text(encoding="utf-8")
        for section, asked in asked_in(text):
            lines += ["", f"**{section}**", ""]
            lines += [f"- {question}" for question in asked]
    return "\n".join(lines) + "\n"


def asked_in(text: str) -> list[tuple[str, list[str]]]:
    """(heading of a section, what its notes tell the instructor to ask) where there is any."""
    found: list[tuple[str, list[str]]] = []
    section = ""
    for cell in jupytext.reads(text, fmt="py:percent").cells:
        if cell.cell_type != "markdown":
            continue
        headings = re.findall(r"(?m)^## (.+)$", cell.source)
        if headings:
            section = headings[-1]
        if "solution-only" in cell.metadata.get("tags", []):
            asked = _asked(" ".join(cell.source.split()))
            if asked and found and found[-1][0] == section:
                found[-1][1].extend(asked)
            elif asked:
                found.append((section, asked))
    return found


def _asked(note: str) -> list[str]:
    """Each "Ask: ...?" of a note, with the answer in brackets behind it."""
    asked = []
    for piece in ASKS.split(note)[1:]:
        end = piece.find("?") + 1
        if end == 0:
            continue
        rest = piece[end:].lstrip()
        if rest.startswith("("):
            end = len(piece) - len(rest) + _closing(rest)
        question = piece[:end].strip()
        asked.append(question[0].upper() + question[1:])
    return asked


def _closing(text: str) -> int:
    """Where the bracket that opens a text is closed; its length if it never is."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place + 1
    return len(text)


# ---- the command


def pages(root: Path = ROOT) -> dict[str, str]:
    """{path from the root: what it should hold}."""
    lessons = course_map.lessons(root)
    readme = (root / README).read_text(encoding="utf-8")
    course = (root / COURSE).read_text(encoding="utf-8")
    page = (root / PAGE).read_text(encoding="utf-8")
    guide = (root / GUIDE).read_text(encoding="utf-8")
    return {
        README: with_hours(readme, lessons, root),
        COURSE: with_ways(with_table(course, lessons), lessons),
        PAGE: with_schedules(page, lessons),
        GUIDE: with_rates(guide),
        WRONG: wrong_answers(answers(root), lessons, root),
        QUESTIONS: questions(lessons, root),
    }


def stale(wanted: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """The pages that hold something else."""
    found = []
    for name, text in wanted.items():
        path = root / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            found.append(name)
    return found


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.pages", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="write nothing, say what is stale")
    options = parser.parse_args(arguments)
    wanted = pages()
    old = stale(wanted)
    if options.check:
        for name in old:
            print(f"{name} is stale: run `make pages`")
        return 1 if old else 0
    for name in old:
        write_atomically(ROOT / name, wanted[name].encode())
    print(f"written: {', '.join(old) or 'nothing was stale'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
