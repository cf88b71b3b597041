"""The course on the disk: lessons, minutes, what has passed; `python -m labcode`, the picture."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from course import __main__ as command
from course import catalog, progress, show
from course.answer import Exercise
from course.check import check
from course.figures import plot

ROOT = Path(__file__).parents[2]
SOLUTIONS = ROOT / "solutions"


def notebook(folder, stem, *, student=True, **about):
    number = stem[:2].lstrip("0") or "0"
    checks = [f'check("{number}.{i}", x)' for i in (1, 2)]
    cells = [nbformat.v4.new_code_cell(text) for text in checks]
    cells.append(nbformat.v4.new_markdown_cell('check("9.9")'))
    cells.append(
        nbformat.v4.new_markdown_cell("**Time**: long. **Needs**: lessons 00\nand 01. More.")
    )
    lesson = {"built": "abc", **about} if student else about
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata={"lesson": lesson}),
        folder / f"{stem}.ipynb",
    )


@pytest.fixture
def folder(tmp_path):
    """The notebooks of a course of two lessons, and what else may lie there."""
    here = tmp_path / "notebooks"
    here.mkdir()
    notebook(here, "00_start", title="Start here", minutes=30)
    notebook(here, "04_ddp", title="DDP")
    notebook(here, "04_ddp.yours-1", title="Mine")
    notebook(here, "07_solved", student=False)
    (here / "08_broken.ipynb").write_text("{")
    notebook(here, "notes")
    return here


def test_lessons(folder):
    found = catalog.lessons(folder)
    assert [(lesson.number, lesson.title, lesson.minutes) for lesson in found] == [
        ("00", "Start here", 30),
        ("04", "DDP", None),
    ]
    assert found[1].exercises == ("4.1", "4.2")


def test_the_solution_of_an_exercise_is_known_with_its_section(folder):
    assert catalog.solution_of("4.1", folder) is None  # a copy of the course without solutions
    solutions = folder.with_name("solutions")
    solutions.mkdir()
    (solutions / "04_ddp.ipynb").write_text("{}")
    place = "solutions/04_ddp.ipynb"
    assert catalog.solution_of("4.1", folder) == (place, f"../{place}")
    assert catalog.solution_of("9.9", folder) is None


def test_every_exercise_of_the_course_has_a_section_where_it_is_solved():
    folder = ROOT / "notebooks"
    exercises = [name for lesson in catalog.lessons(folder) for name in lesson.exercises]
    assert len(exercises) > 100
    for name in exercises:
        assert ", section " in catalog.solution_of(name, folder).place, name
        calls = catalog.check_calls(name.partition(".")[0], folder)
        assert calls[name].startswith(f'check("{name}", '), name
    topic = "solutions/01_processes_and_collectives.ipynb"
    found = catalog.solution_of("1.1", folder)
    assert found.place == f"{topic}, section 4"
    assert found.address == f"../{topic}#cell-id=section-4"


def test_the_folder_is_found_from_the_course_from_the_notebooks_and_from_elsewhere(
    folder, tmp_path
):
    assert catalog.notebooks_folder(folder) == folder
    assert catalog.notebooks_folder(tmp_path) == folder
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    beside_the_library = catalog.notebooks_folder(elsewhere)
    assert beside_the_library is not None and beside_the_library.name == "notebooks"


def test_what_passes_is_noted_once(folder):
    assert catalog.passed(folder) == set()
    assert catalog.record("4.2", folder)
    first = (folder / catalog.PROGRESS).read_bytes()
    assert catalog.record("4.2", folder)
    assert (folder / catalog.PROGRESS).read_bytes() == first
    assert catalog.record("0.1", folder)
    assert catalog.passed(folder) == {"4.2", "0.1"}


def test_nothing_is_noted_where_no_learner_works(folder, tmp_path):
    """Not for a solution, nor for an unknown exercise, nor where the builder runs a lesson."""
    assert not catalog.record("7.1", folder)
    assert not catalog.record("42.1", folder)
    assert not catalog.record("4.1", tmp_path)
    assert not (folder / catalog.PROGRESS).exists()
    assert not (tmp_path / catalog.PROGRESS).exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"passed": 3}'])
def test_a_damaged_file_counts_as_empty(folder, content):
    (folder / catalog.PROGRESS).write_text(content)
    assert catalog.passed(folder) == set()
    assert catalog.record("4.1", folder)
    assert catalog.passed(folder) == {"4.1"}


def test_a_folder_that_cannot_be_written_disturbs_nobody(folder, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(catalog, "write_atomically", full)
    assert not catalog.record("4.1", folder)


def call(answer):
    return answer()


def test_check_notes_a_pass_in_a_notebook_alone(folder, monkeypatch, capsys):
    known = {number: Exercise(check=call) for number in ("4.1", "4.2")}
    monkeypatch.setattr("course.check._exercises", lambda exercise: known)
    monkeypatch.chdir(folder)
    check("4.1", lambda: None)
    assert catalog.passed(folder) == set()
    monkeypatch.setattr(show, "in_notebook", lambda: True)
    monkeypatch.setattr(show, "display", lambda *_, **__: None)
    check("4.2", lambda: 1 / 0)
    assert catalog.passed(folder) == set()
    check("4.1", lambda: None)
    assert catalog.passed(folder) == {"4.1"}


def test_the_command_prints_lessons_minutes_and_what_comes_next(folder, capsys):
    catalog.record("0.1", folder)
    assert command.main([], folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["lesson", "minutes", "exercises"]
    assert lines[1].split() == ["00", "Start", "here", "30", "1", "of", "2"]
    assert lines[2].split() == ["04", "DDP", "0", "of", "2"]
    assert lines[-3] == "1 of 4 exercises done; all lessons together take 0 h 30 min."
    assert lines[-1] == "Next: exercise 0.2 in 00_start.ipynb"
    for exercise in ("0.2", "4.1", "4.2"):
        catalog.record(exercise, folder)
    assert command.main([], folder) == 0
    assert capsys.readouterr().out.endswith("All exercises are done.\n")


def test_a_way_is_printed_with_its_sections_and_hours(monkeypatch):
    way = catalog.Way("Everything", {"00": (1, 3), "04": ()})
    monkeypatch.setattr(catalog, "WAYS", {"all": way})
    parts = "## 1. A (core, 30 min)\n## 3. B (optional, 45 min)\n## Questions (core, 15 min)"
    known = catalog.sections(parts)
    assert [section.minutes for section in known] == [30, 45, 15]
    lessons = []
    for number in ("00", "04"):
        lessons.append(catalog.Lesson(number, "", None, (), Path(), sections=known))
    told = command.ways(lessons)
    assert told[:2] == ["all: Everything (2.0 hours)", "    00 §1, 3 (75 min) · 04 (45 min)"]


def test_the_ways_of_this_course_are_printed(capsys):
    assert command.main(["ways"], ROOT) == 0
    printed = capsys.readouterr().out
    missing = []
    for name, way in catalog.WAYS.items():
        if f"{name}: {way.goal} (" not in printed:
            missing.append(name)
    assert missing == []


@pytest.fixture
def on_way(tmp_path, monkeypatch):
    """The folder of a course of two lessons of three sections, and a way through it."""
    monkeypatch.setattr(catalog, "WAYS", {"short": catalog.Way("Go", {"00": (1, 2), "04": (1, 3)})})
    for stem in ("00_start", "04_ddp"):
        cells = []
        for section in (1, 2, 3):
            heading = f"## {section}. Part {section} (core, 10 min)"
            cells.append(nbformat.v4.new_markdown_cell(heading))
            if section > 1:
                check = f'check("{int(stem[:2])}.{section}", x)'
                cells.append(nbformat.v4.new_code_cell(check))
        about = nbformat.v4.new_notebook(cells=cells, metadata={"lesson": {"built": "abc"}})
        nbformat.write(about, tmp_path / f"{stem}.ipynb")
    return tmp_path


def printed(words, folder, capsys):
    """The lines that `python -m labcode` prints for these words."""
    assert command.main(words, folder) == 0
    return capsys.readouterr().out.splitlines()


def test_next_follows_the_way_that_was_chosen_from_section_to_section(on_way, capsys):
    by_number = printed([], on_way, capsys)
    assert by_number[-1] == "Next: exercise 0.2 in 00_start.ipynb"
    assert printed(["way"], on_way, capsys)[0].startswith("You are on no way. There are short")
    assert printed(["way", "short"], on_way, capsys)[:3] == [
        "short: Go (`python -m labcode way off` ends it)",
        "    00 §1  Part 1, 10 min",
        "    00 §2  Part 2, 10 min  · 0.2",
    ]
    assert printed([], on_way, capsys)[-3:] == [
        "Next on the way short, up to exercise 0.2:",
        "    00_start.ipynb, section 1: Part 1",
        "    00_start.ipynb, section 2: Part 2",
    ]
    catalog.record("0.2", on_way)
    follows = [
        "Next on the way short, up to exercise 4.3:",
        "    04_ddp.ipynb, section 1: Part 1",
        "    04_ddp.ipynb, section 3: Part 3",
    ]
    assert printed([], on_way, capsys)[-3:] == follows
    assert printed(["way"], on_way, capsys)[2].endswith("✓ 0.2")
    catalog.record("4.3", on_way)
    assert printed([], on_way, capsys)[-1] == "All exercises on the way short are done."
    printed(["way", "off"], on_way, capsys)
    assert printed([], on_way, capsys)[-1] == "Next: exercise 0.3 in 00_start.ipynb"


def test_the_end_of_a_section_says_where_the_way_goes_on(on_way):
    catalog.record("0.2", on_way)
    assert catalog.what_follows("0.2", on_way) is None  # no way is chosen
    catalog.choose_way("short", on_way)
    assert catalog.what_follows("0.2", on_way) == (
        "Next on the way short: ",
        "04_ddp.ipynb, section 1, Part 1 (10 min)",
        "04_ddp.ipynb#cell-id=section-1",
    )
    catalog.record("0.3", on_way)
    assert catalog.what_follows("0.3", on_way) is None  # its section is not on the way
    assert catalog.what_follows("4.3", on_way) is None  # it has not passed
    catalog.record("4.3", on_way)
    end = catalog.what_follows("4.3", on_way)
    assert end == ("This was the last section on the way short.", "", "")


def test_the_end_of_a_way_names_what_is_open_on_it(on_way):
    catalog.choose_way("short", on_way)
    catalog.record("4.3", on_way)
    end = catalog.what_follows("4.3", on_way)
    assert end.head == "This was the last section on the way short; still open on it: 0.2."


def test_in_a_notebook_the_next_section_on_the_way_is_a_link(on_way, monkeypatch):
    shown = []
    monkeypatch.setattr(show, "in_notebook", lambda: True)
    monkeypatch.setattr(show, "display", lambda data, raw: shown.append(data))
    monkeypatch.chdir(on_way)
    catalog.choose_way("short", on_way)
    progress.record("0.2")
    place = "04_ddp.ipynb, section 1, Part 1 (10 min)"
    (data,) = shown
    assert data["text/plain"] == f"Next on the way short: {place}"
    assert f'<a href="04_ddp.ipynb#cell-id=section-1">{place}</a>' in data["text/html"]


def test_a_lesson_marks_the_sections_of_the_way_and_says_where_it_goes_on(on_way, capsys):
    printed(["way", "short"], on_way, capsys)
    told = printed(["4"], on_way, capsys)
    marked = [line.split(",")[0].strip() for line in told if line.endswith("on the way short")]
    assert marked == ["1. Part 1", "3. Part 3"]
    assert "Next on the way short, up to exercise 0.2:" in told


def test_a_way_is_kept_beside_what_has_passed_and_an_unknown_one_is_refused(
    on_way, capsys, monkeypatch
):
    catalog.record("4.2", on_way)
    printed(["way", "short"], on_way, capsys)
    assert catalog.passed(on_way) == {"4.2"}
    catalog.record("4.3", on_way)
    assert catalog.chosen_way(on_way) == "short"
    assert command.main(["way", "shirt"], on_way) == 2
    error = "error: unknown way 'shirt': did you mean short? there are short\n"
    assert capsys.readouterr().err == error
    assert catalog.chosen_way(on_way) == "short"

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(catalog, "write_atomically", full)
    assert command.main(["way", "off"], on_way) == 2
    assert "cannot be kept" in capsys.readouterr().err


@pytest.mark.parametrize("way", ['"gone"', "3", "null", '["ddp"]'])
def test_a_way_that_there_is_not_counts_as_none(on_way, way):
    (on_way / catalog.PROGRESS).write_text(f'{{"way": {way}}}')
    assert catalog.chosen_way(on_way) is None


def test_a_notebook_of_an_older_copy_is_told_what_to_replace():
    with pytest.raises(ImportError, match=r"Replace `labcode\.lab` by"):
        importlib.import_module("labcode.lab")


def test_the_command_without_torch(folder):
    code = (
        "import sys; from labcode import __main__ as m; m.main([]); print('torch' in sys.modules)"
    )
    command_line = [sys.executable, "-c", code]
    done = subprocess.run(command_line, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("module", ["labcode.train", "labcode.slurm", "labcode.run.dry_run"])
def test_a_python_without_the_packages_of_the_course_is_told_in_one_line(module):
    no_packages = [sys.executable, "-S", "-m", module, "gpt_tiny"]
    done = subprocess.run(no_packages, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: this Python has no ")
    assert "source .venv/bin/activate" in done.stderr


def test_the_command_where_there_is_no_course(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(catalog, "notebooks_folder", lambda _: None)
    assert command.main([], tmp_path) == 2
    assert capsys.readouterr().err.startswith("no lesson found: go to the folder")


def test_the_picture_shows_the_lesson_one_is_in_and_the_whole_course(folder):
    catalog.record("4.2", folder)
    picture = plot.progress(folder)
    told = "0 of 2 (lesson 00, Start here), 1 of 4 (all lessons)"
    assert picture.alt == f"Exercises that have passed: {told}"
    words = [text.get_text() for text in picture.axes[0].texts]
    assert words == [
        "lesson 00, Start here",
        "0 of 2 exercises",
        "all lessons",
        "1 of 4 exercises",
    ]
    for exercise in ("0.1", "0.2"):
        catalog.record(exercise, folder)
    assert "1 of 2 (lesson 04, DDP)" in plot.progress(folder).alt
    catalog.record("4.1", folder)
    assert "2 of 2 (lesson 04, DDP), 4 of 4 (all lessons)" in plot.progress(folder).alt


def test_the_picture_shows_the_way_that_is_chosen(on_way):
    catalog.choose_way("short", on_way)
    catalog.record("4.3", on_way)
    catalog.record("4.2", on_way)
    assert plot.progress(on_way).alt.endswith(": 1 of 2 (the way short), 2 of 4 (all lessons)")


def test_the_picture_in_a_folder_without_lessons_is_that_of_the_course(tmp_path):
    """Where the builder runs a lesson, what this machine's learner has done is not shown."""
    picture = plot.progress(tmp_path)
    assert " 0 of 2 (lesson 00, Start here), 0 of " in picture.alt


def test_the_picture_stored_in_lesson_00_is_that_of_the_course(tmp_path):
    """It goes stale when an exercise is added anywhere: then execute lesson 00 again."""
    stored = nbformat.read(SOLUTIONS / "00_start_here.ipynb", as_version=4)
    assert plot.progress(tmp_path).alt in nbformat.writes(stored)


def test_the_file_is_readable(folder):
    catalog.record("4.2", folder)
    content = json.loads((folder / catalog.PROGRESS).read_text())
    assert list(content["passed"]) == ["4.2"]


def test_the_command_shows_one_lesson_by_its_number_with_or_without_the_zero(folder, capsys):
    known = catalog.lessons(folder)[0]
    said = []
    for number in (known.number, str(int(known.number))):
        assert command.main([number], folder) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert said[0].splitlines()[1] == "Needs lessons 00 and 01."
    assert known.title in said[0] and known.notebook.name in said[0]
    assert command.main(["77"], folder) == 2
    assert capsys.readouterr().err.startswith("error: unknown lesson '77'")
    assert command.main(["restart", "4"], folder) == 2
    assert "'restart 4' is no lesson" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--ways", "python -m labcode ways"),
        ("--way ddp", "python -m labcode way ddp"),
        ("--reset 04", "python -m labcode reset 04"),
        ("wyas", "did you mean ways?"),
        ("ways ddp", "python -m labcode way ddp"),
        ("ddp", "python -m labcode way ddp"),
        ("reset", "python -m labcode reset 04"),
        ("lesson 4", "python -m labcode 4"),
        ("train gpt_tiny --parallel.tp 2", "python -m labcode.train gpt_tiny --parallel.tp 2"),
        ("--doctor", "python -m labcode.doctor"),
        ("lab", "make lab"),
        ("next", "python -m labcode"),
        ("--version", "python -m labcode.doctor"),
        ("hint 4.1", "hint('4.1')"),
    ],
)
def test_a_slip_is_one_line_that_says_what_to_type(typed, meant, folder, capsys):
    assert command.main(typed.split(), folder) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")
    assert meant in line
    if "?" not in meant:
        assert line.endswith(f": {meant}")


def test_an_exercise_and_a_notebook_lead_to_their_lesson(folder, capsys):
    known = catalog.lessons(folder)[0]
    for typed in (
        f"{int(known.number)}.1",
        known.notebook.name,
        f"notebooks/{known.notebook.stem}",
    ):
        assert command.main([typed], folder) == 2
        assert capsys.readouterr().err.endswith(f": python -m labcode {known.number}\n")


def test_a_lesson_begins_anew_and_the_old_notebook_is_kept(folder, capsys):
    known = catalog.lessons(folder)[0]
    fresh = known.notebook.read_bytes()
    assert command.main(["reset", known.number], folder) == 2
    assert capsys.readouterr().err.startswith(f"error: git has no copy of {known.notebook.name}")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a course"]):
        subprocess.run([*git, *words], check=True)
    other = {"04.1": "2026-11-25"}
    done = {known.exercises[0]: "2026-11-25", **other}
    (folder / catalog.PROGRESS).write_text(json.dumps({"passed": done}))
    for number in (1, 2):
        mine = fresh.replace(b"\n", b"\n" * (number + 1), 1)
        known.notebook.write_bytes(mine)
        assert command.main(["reset", known.number], folder) == 0
        assert known.notebook.read_bytes() == fresh
        kept = folder / f"{known.notebook.stem}.yours-{number}.ipynb"
        assert kept.read_bytes() == mine and kept.name in capsys.readouterr().out
    assert catalog.passed(folder) == {"04.1"}
    before = set(folder.iterdir())
    assert command.main(["reset", known.number], folder) == 0
    assert f"{known.notebook.name} is as new: you had not" in capsys.readouterr().out
    assert set(folder.iterdir()) == before
