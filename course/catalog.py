"""The course as it lies on this disk: its lessons, their exercises, and which of them are done.

A lesson is a student notebook, `notebooks/NN_topic.ipynb`. Exercises that passed are kept in a file
beside the notebooks, which git ignores. No torch, so that `python -m labcode` answers at once.
"""

import ast
import contextlib
import json
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from labcode.runtime import suggest
from labcode.runtime.files import write_atomically

BESIDE_THE_LIBRARY = Path(__file__).resolve().parents[1] / "notebooks"
PROGRESS = ".progress.json"  # beside the notebooks
KEPT = ".yours-"  # in the name of a notebook of a learner's that was put aside
CHECK = re.compile(r"\bcheck\(\s*[\"']([\w.]+)[\"']")

# "## 3. Send while you compute (core, 20 min)"; the end of a lesson has no number
SECTION = re.compile(r"(?m)^## (?:(\d+)\. )?(.+?) \((core|optional), (\d+) min\)$")
# What all its sections need, and then, "For section 9 also lesson 01 (section 2).", what some do.
NEEDS = re.compile(r"\*\*Needs\*\*:\s+(.+?\.(?:\s+For\s+sections?\s.+?\.)*)(?:\s|$)", re.DOTALL)
FOR_SECTIONS = re.compile(r"\b[Ff]or sections? ([\d, andto]+?) also ")
SECTIONS_OF = re.compile(r"\b(\d\db?) \(sections? ([^)]+)\)")


class Way(NamedTuple):
    """A short way through the course.

    Args:
        goal: What somebody wants to be able to do.
        taken: {lesson: its sections}; () is a whole lesson without what is optional.
    """

    goal: str
    taken: dict[str, tuple[int, ...]]


# By the name that one types. What the lessons of a way need stands earlier on it.
WAYS: dict[str, Way] = {
    "monday": Way(
        "Eight GPUs on Monday: the machine, the launch line, what to measure first, the job",
        {"00": (1, 2, 3, 5), "01": (1, 2, 8), "02": (1, 2), "04": (1, 5, 7), "14": (1, 2)},
    ),
    "ddp": Way(
        "A DDP script of my own",
        {"00": (1, 2, 5), "01": (1, 2), "04": (1, 2, 4, 5, 7, 8)},
    ),
    "clinic": Way(
        "DDP understood: overlap, hooks, and what goes wrong",
        {"00": (1, 2, 5), "01": (1, 2, 6, 7), "04": (), "05": (1, 2, 3, 5, 6), "07": ()},
    ),
    "megatron": Way(
        "Tensor and pipeline parallelism, as Megatron-LM has them",
        {
            "00": (1, 2),
            "01": (1, 2, 3, 4, 6),
            "04": (1, 4),
            "08": (1, 2, 3, 5),
            "09": (1, 2, 3, 4, 5, 6),
            "10": (1, 2, 3),
            "12": (1, 2, 3, 4, 5, 6, 9),
        },
    ),
    "fsdp": Way(
        "FSDP: what it shards and sends, and a script of my own",
        {
            "00": (1, 2),
            "01": (1, 2, 3, 4, 6),
            "04": (1, 4, 6, 7),
            "05": (1, 2, 3, 4),
            "13": (1, 2, 3, 4),
            "13b": (5, 7),
        },
    ),
    "slurm": Way(
        "SLURM: jobs that start, last and come back",
        {
            "00": (1, 2, 5),
            "01": (1, 2, 8),
            "04": (1, 7),
            "14": (1, 2, 3, 5, 6),
            "17": (2, 3, 4),
        },
    ),
    "memory": Way(
        "My model does not fit",
        {
            "00": (1, 2),
            "01": (1, 2),
            "04": (1, 6),
            "09": (1, 2),
            "10": (1, 2),
            "13": (1,),
            "16": (),
        },
    ),
    "fast": Way("One GPU, faster", {"00": (1, 3), "02": (), "03": (), "03b": ()}),
    "ring": Way(
        "Long sequences: the ring",
        {
            "00": (1, 2),
            "01": (1, 2, 3, 4, 6),
            "09": (1, 2, 3),
            "10": (1, 2),
            "11": (1, 2, 3, 4, 5, 6, 7),
        },
    ),
    "experts": Way(
        "Mixture of experts, and experts on many ranks",
        {
            "00": (1, 2, 3),
            "01": (1, 2, 3),
            "02": (1,),
            "03": (1,),
            "04": (1,),
            "08": (1, 2),
            "09": (1, 2),
            "13": (1,),
            "23": (),
            "24": (1, 2, 3, 5, 6, 7),
        },
    ),
    "fine-tuning": Way(
        "Fine-tuning on many GPUs: pairs, packed rows, LoRA, sharded and cut",
        {
            "00": (1, 2),
            "01": (1, 2),
            "04": (1, 4, 6),
            "09": (1, 2),
            "13": (1,),
            "25": (),
        },
    ),
    "rewards": Way(
        "Reinforcement learning: weights from those who train to those who generate",
        {
            "00": (1, 2, 3),
            "01": (1, 2, 3, 4),
            "02": (1,),
            "03": (1,),
            "03b": (4,),
            "04": (1,),
            "08": (1,),
            "09": (1, 2),
            "13": (1,),
            "18": (1,),
            "26": (),
        },
    ),
    "bits": Way(
        "16, 8 and 4 bits",
        {
            "00": (1, 3),
            "02": (1,),
            "03": (1,),
            "03b": (4,),
            "18": (1, 2, 4, 5, 6, 7, 8),
            "22": (),
        },
    ),
    "plan": Way(
        "A large training run, planned before it is paid for",
        {
            "00": (1, 2),
            "01": (1, 2, 3, 8),
            "04": (1, 4),
            "05": (2,),
            "08": (1, 2, 4, 5, 6),
            "09": (1, 2, 4),
            "10": (1, 2),
            "12": (2, 4, 9),
            "13": (1,),
            "14": (2,),
            "15": (3,),
            "17": (1,),
            "20": (),
            "21": (),
        },
    ),
}


class Section(NamedTuple):
    """A part of a lesson that one can begin with.

    Args:
        number: Number of its heading; None for what comes after the last numbered one.
        title: Title without number and time.
        is_optional: Whether no other lesson needs it.
        minutes: Minutes that a learner needs.
        exercises: The numbers of those that check themselves, in order.
    """

    number: int | None
    title: str
    is_optional: bool
    minutes: int
    exercises: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """The heading as it stands in the lesson, without the marks of code."""
        number = "" if self.number is None else f"{self.number}. "
        kind = "optional" if self.is_optional else "core"
        return f"{number}{self.title} ({kind}, {self.minutes} min)".replace("`", "")

    @property
    def cell_id(self) -> str:
        """The id of the cell that a numbered section begins with, in both notebooks."""
        return f"section-{self.number}"

    @property
    def anchor(self) -> str:
        """What leads to it in JupyterLab, behind the `#` of a link to its notebook.

        A link to the heading, `#heading=...`, would land at the top of a lesson that was closed:
        JupyterLab 4.6 looks for headings before the cells are drawn.
        """
        return f"cell-id={self.cell_id}"


def sections(markdown: str) -> tuple[Section, ...]:
    """The sections that headings name together with their time, in order."""
    found = []
    for number, title, kind, minutes in SECTION.findall(markdown):
        known = int(number) if number else None
        found.append(Section(known, title, kind == "optional", int(minutes)))
    return tuple(found)


class Need(NamedTuple):
    """Sections of another lesson that must come before.

    Args:
        lesson: Number of the lesson.
        sections: Sections of that lesson.
        of: The sections that need them; None: all.
    """

    lesson: str
    sections: tuple[int, ...]
    of: tuple[int, ...] | None = None


def needs(text: str) -> tuple[Need, ...]:
    """What a lesson says that it needs, read.

    Args:
        text: "lesson 01 (sections 1 to 3). For section 5 also lesson 02 (section 1)."
    """
    # [for all sections, sections, what these need, sections, what these need ...]
    pieces = FOR_SECTIONS.split(" ".join(text.split()))
    found = [Need(lesson, numbers(which)) for lesson, which in SECTIONS_OF.findall(pieces[0])]
    for of, named in zip(pieces[1::2], pieces[2::2]):
        for lesson, which in SECTIONS_OF.findall(named):
            found.append(Need(lesson, numbers(which), numbers(of)))
    return tuple(found)


def numbers(text: str) -> tuple[int, ...]:
    """The numbers that "1, 3 and 5 to 7" names."""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?: to (\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


class Stop(NamedTuple):
    """A lesson on a way.

    Args:
        number: Number of the lesson.
        sections: Those to take, as the way names them; empty: all that are not optional.
        taken: The same sections, whole.
    """

    number: str
    sections: tuple[int, ...]
    taken: tuple[Section, ...]

    @property
    def minutes(self) -> int:
        """Minutes of the sections that are taken."""
        return sum(section.minutes for section in self.taken)

    def __str__(self) -> str:
        if not self.sections:
            return self.number
        return f"{self.number} §{', '.join(str(number) for number in self.sections)}"


def stops(taken: dict[str, tuple[int, ...]], known: dict[str, tuple[Section, ...]]) -> list[Stop]:
    """The lessons of a way, with the sections to take.

    Args:
        taken: As in `Way`.
        known: The sections of each lesson, by its number.
    """
    found = []
    for lesson, wanted in taken.items():
        sections = []
        for section in known.get(lesson, ()):
            if section.number in wanted if wanted else not section.is_optional:
                sections.append(section)
        found.append(Stop(lesson, wanted, tuple(sections)))
    return found


class Lesson(NamedTuple):
    """A lesson that can be opened.

    Args:
        number: Number as in the name of its notebook, "04".
        title: Title of its first heading, without the number.
        minutes: How long a learner takes; None where the lesson does not say.
        exercises: The numbers of those that check themselves, in order.
        notebook: The student notebook.
        needs: What must come before, "lesson 00 (section 1)."; "" where the lesson does not say.
        sections: Sections with their times.
    """

    number: str
    title: str
    minutes: int | None
    exercises: tuple[str, ...]
    notebook: Path
    needs: str = ""
    sections: tuple[Section, ...] = ()


def notebooks_folder(start: Path) -> Path | None:
    """The folder of the student notebooks: `start`, one below it, or the one beside the library."""
    for folder in (start, start / "notebooks", BESIDE_THE_LIBRARY):
        if lessons(folder):
            return folder
    return None


def lessons(folder: Path) -> list[Lesson]:
    """The lessons whose student notebook lies in a folder, in order.

    Solutions, and notebooks that cannot be read, are left out.
    """
    found = []
    for path in sorted(folder.glob("[0-9][0-9]*_*.ipynb")):
        lesson = _lesson(path)
        if lesson is not None:
            found.append(lesson)
    return found


def number_of(name: str) -> str:
    """What stands before the first underscore of a file name: "04", or "13b"."""
    return name.partition("_")[0]


def find(number: str, folder: Path) -> Lesson:
    """The lesson of a number: "04", or "4", or "13b".

    Raises:
        ValueError: There is no run.
    """
    known = {lesson.number: lesson for lesson in lessons(folder)}
    digits = number.rstrip("b")
    wanted = f"{digits:0>2}" + number.removeprefix(digits)
    if wanted not in known:
        raise ValueError(suggest.unknown("lesson", number, known))
    return known[wanted]


def begin_anew(lesson: Lesson) -> Path | None:
    """Put the notebook of a lesson aside, and a fresh one, as git has it, in its place.

    Its exercises are open again.

    Returns:
        The notebook as it was, under another name beside the new one; None if nothing was changed.

    Raises:
        ValueError: git has no such notebook.
    """
    path = lesson.notebook
    command = ["git", "-C", str(path.parent), "show", f"HEAD:./{path.name}"]
    try:
        fresh = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise ValueError(
            f"git has no copy of {path.name}: unpack the archive of the course again, and take it "
            "from there"
        ) from None
    kept = None
    if path.read_bytes() != fresh:
        kept = put_aside(path)
        write_atomically(path, fresh)
    content = _json(path.parent / PROGRESS)
    still = passed(path.parent).difference(lesson.exercises)
    if content:
        content["passed"] = {name: content["passed"][name] for name in sorted(still)}
        _write_progress(content, path.parent)
    return kept


def put_aside(path: Path) -> Path:
    """Rename a notebook to the first free `NN_topic.yours-1.ipynb`; returns the new path."""
    number = 1
    while True:
        aside = path.with_name(f"{path.stem}{KEPT}{number}.ipynb")
        if not aside.exists():
            return path.rename(aside)
        number += 1


def _lesson(path: Path) -> Lesson | None:
    notebook = _json(path)
    about = notebook.get("metadata", {}).get("lesson", {})
    is_student_version = "built" in about
    if not is_student_version or KEPT in path.name:
        return None
    exercises: list[str] = []
    needs = ""
    parts: list[Section] = []
    for cell in notebook.get("cells", []):
        text = "".join(cell["source"])
        if cell.get("cell_type") == "code":
            checked = CHECK.findall(text)
            exercises += checked
            if checked and parts:
                parts[-1] = parts[-1]._replace(exercises=(*parts[-1].exercises, *checked))
            continue
        parts += sections(text)
        said = NEEDS.search(text)
        if said and not needs:
            without_links = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", said[1])
            needs = " ".join(without_links.split())
    title = about.get("title") or path.stem.partition("_")[2].replace("_", " ")
    minutes = about.get("minutes")
    number = number_of(path.name)
    return Lesson(number, title, minutes, tuple(exercises), path, needs, tuple(parts))


class Solution(NamedTuple):
    """Where an exercise is solved.

    Args:
        place: "solutions/01_topic.ipynb, section 4".
        address: What leads there from a notebook of the course in JupyterLab.
    """

    place: str
    address: str


def solution_of(exercise: str, folder: Path) -> Solution | None:
    """Where an exercise is solved.

    Args:
        exercise: "1.2".
        folder: Folder of the student notebooks; the solutions lie beside it.

    Returns:
        The place; None where there is none, as in a copy of the course without solutions.
    """
    for lesson in lessons(folder):
        solution = folder.absolute().parent / "solutions" / lesson.notebook.name
        if exercise in lesson.exercises and solution.exists():
            place = f"solutions/{solution.name}"
            for section in lesson.sections:
                if exercise in section.exercises and section.number is not None:
                    there = f"{place}, section {section.number}"
                    return Solution(there, f"../{place}#{section.anchor}")
            return Solution(place, f"../{place}")
    return None


def check_calls(lesson: str, folder: Path) -> dict[str, str]:
    """The calls in the check cells of a lesson: {"4.1": "check("4.1", average_gradients, ranks)"}.

    Args:
        lesson: "4".
        folder: Folder of notebooks, student versions or solutions.

    Returns:
        The call of each exercise, as far as the notebooks of the folder have it.
    """
    found: dict[str, str] = {}
    for path in sorted(folder.glob(f"{lesson:0>2}*_*.ipynb")):  # "03" and "03b"
        for cell in _json(path).get("cells", []):
            text = "".join(cell["source"])
            if cell["cell_type"] != "code":
                continue
            for exercise in CHECK.findall(text):
                found.setdefault(exercise, _call_in(text, exercise))
    return found


def _call_in(text: str, exercise: str) -> str:
    """The call of `check` for an exercise in the source of a cell, on one line."""
    with contextlib.suppress(SyntaxError):  # a cell with a magic has no call that can be read
        for node in ast.walk(ast.parse(text)):
            call = ast.get_source_segment(text, node) if isinstance(node, ast.Call) else None
            if call and CHECK.match(call) and exercise in CHECK.findall(call):
                return " ".join(call.split())
    return ""


def passed(folder: Path) -> set[str]:
    """The exercises that have passed their check in the notebooks of a folder."""
    found = _json(folder / PROGRESS).get("passed", {})
    return set(found) if isinstance(found, dict) else set()


def record(exercise: str, folder: Path) -> bool:
    """Note that an exercise has passed, if its student notebook lies in this folder.

    So nothing is noted for a solution, nor where the builder or a test runs a lesson: they do it in
    folders of their own. That a disk is full or read-only is no reason to disturb a learner.

    Returns:
        Whether it is noted.
    """
    if exercise in passed(folder):
        return True
    if not any(exercise in lesson.exercises for lesson in lessons(folder)):
        return False
    content = _json(folder / PROGRESS)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    done = content.get("passed", {})
    content["passed"] = {**done, exercise: now} if isinstance(done, dict) else {exercise: now}
    return _write_progress(content, folder)


def chosen_way(folder: Path) -> str | None:
    """The name of the way that the learner has chosen; None: no way, or none that there is."""
    name = _json(folder / PROGRESS).get("way")
    return name if isinstance(name, str) and name in WAYS else None


def choose_way(name: str | None, folder: Path) -> None:
    """Keep the way beside the notebooks; None ends it.

    Raises:
        ValueError: There is no such way.
        OSError: It cannot be written.
    """
    if name is not None and name not in WAYS:
        raise ValueError(suggest.unknown("way", name, WAYS))
    content = _json(folder / PROGRESS)
    content.pop("way", None)
    if name is not None:
        content["way"] = name
    write_atomically(folder / PROGRESS, _as_bytes(content))


def steps(way: Way, known: list[Lesson]) -> list[tuple[Lesson, Section]]:
    """The numbered sections of a way in its order, each with its lesson."""
    by_number = {lesson.number: lesson for lesson in known}
    found = []
    sections = {lesson.number: lesson.sections for lesson in known}
    for stop in stops(way.taken, sections):
        for section in stop.taken:
            if section.number is not None:
                found.append((by_number[stop.number], section))
    return found


def ahead(way: Way, known: list[Lesson], done: set[str]) -> list[tuple[Lesson, Section]]:
    """The sections of a way from where its learner is to the first exercise that is open.

    That is from behind the exercise before it: nobody notes which sections without one were read.
    Where all exercises are done it is what comes after the last of them.
    """
    found = []
    for lesson, section in steps(way, known):
        found.append((lesson, section))
        if not done.issuperset(section.exercises):
            return found
        if section.exercises:
            found = []
    return found


class Follows(NamedTuple):
    """Where a way goes on.

    Args:
        head: "Next on the way ddp: ", or all that is to be said at its end.
        place: "04_topic.ipynb, section 2, Its title (10 min)"; "" at the end.
        address: What leads there from a notebook beside it in JupyterLab.
    """

    head: str
    place: str = ""
    address: str = ""


def what_follows(exercise: str, folder: Path) -> Follows | None:
    """Where the way goes on after the section of an exercise that has passed.

    Args:
        exercise: Number of the exercise, "4.2".
        folder: Folder of the student notebooks.

    Returns:
        The place; None if no way is chosen, the section is not on it, or has an open exercise.
    """
    name = chosen_way(folder)
    if name is None:
        return None
    done = passed(folder)
    taken = steps(WAYS[name], lessons(folder))
    for place, (_, section) in enumerate(taken):
        if exercise not in section.exercises or not done.issuperset(section.exercises):
            continue
        if place + 1 == len(taken):
            return Follows(
                f"This was the last section on the way {name}{_still_open(taken, done)}."
            )
        lesson, follows = taken[place + 1]
        notebook = lesson.notebook.name
        return Follows(
            f"Next on the way {name}: ",
            f"{notebook}, section {follows.number}, {follows.title} ({follows.minutes} min)",
            f"{notebook}#{follows.anchor}",
        )
    return None


def _still_open(taken: list[tuple[Lesson, Section]], done: set[str]) -> str:
    """The exercises of a way that are open: "; still open on it: 1.0, 4.3"; "" is none."""
    still = []
    for _, section in taken:
        still += [exercise for exercise in section.exercises if exercise not in done]
    return f"; still open on it: {', '.join(still)}" if still else ""


def _write_progress(content: dict[str, Any], folder: Path) -> bool:
    """Whether it could be written."""
    with contextlib.suppress(OSError):
        write_atomically(folder / PROGRESS, _as_bytes(content))
        return True
    return False


def _as_bytes(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _json(path: Path) -> dict[str, Any]:
    """What a JSON file holds; {} if there is none, or none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
