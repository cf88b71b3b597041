"""The handout holds no answers, and its lessons run from where it was unpacked."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbformat.v4 import new_code_cell

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import (  # noqa: E402  (tools/ is not installed)
    build_notebooks,
    check_links,
    course_map,
    fingerprint,
    handout,
    lesson_source,
    notebook_run,
)

FEW_LINES = 3  # a shorter answer, such as `loss = loss / 4`, also stands in examples


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    asked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=False)
    if asked.returncode != 0:
        pytest.skip("no checkout that git reads: the handout holds what git knows")
    folder = tmp_path_factory.mktemp("handout")
    zipped = handout.write(folder / "out")
    with zipfile.ZipFile(zipped) as packed:
        packed.extractall(folder / "unpacked")
    return folder / "unpacked" / handout.NAME


@pytest.fixture(scope="module")
def texts(unpacked):
    """{path: its lines, without indentation and empty ones}; of a notebook, those of all cells."""
    found = {}
    for path in sorted(unpacked.rglob("*")):
        if path.is_file() and path.suffix not in (".png", ".npz", ".gz", ".zst", ".safetensors"):
            text = path.read_text(errors="ignore")
            if path.suffix == ".ipynb":
                text = "\n".join(cell.source for cell in nbformat.reads(text, 4).cells)
            found[path.relative_to(unpacked).as_posix()] = squeezed(text)
    return found


def squeezed(text):
    """The lines that hold anything, each stripped, with a line end on both sides."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join(["", *lines, ""])


def answers():
    """(lesson, what a solution or a predict cell holds, whether it is a prediction)."""
    for path in sorted((ROOT / "solutions").glob("[0-9][0-9]*_*.py")):
        for cell in jupytext.reads(path.read_text(), fmt="py:percent").cells:
            if "predict" in cell.metadata.get("tags", []):
                yield path.stem, squeezed(cell.source), True
            for block in cell.source.split(lesson_source.BEGIN)[1:]:
                yield path.stem, squeezed(block.partition(lesson_source.END)[0]), False


def test_no_answer_is_in_it(texts):
    given_away = set()
    for lesson, answer, is_prediction in answers():
        if is_prediction:
            assert answer not in texts[f"notebooks/{lesson}.ipynb"]
        if answer.count("\n") - 1 >= FEW_LINES:
            assert answer not in texts[f"notebooks/{lesson}.ipynb"]
            given_away |= {Path(name).name for name, text in texts.items() if answer in text}
    # later cells of a lesson use these in the place of the learner's functions
    others = [name for name in given_away if not name.endswith("_by_hand.py")]
    assert others == []


def test_nothing_of_the_instructors_is_in_it(texts):
    assert not [name for name in texts if name.startswith(("solutions", "tests", "benchmarks"))]
    assert not [name for name in texts if name.upper().startswith("INSTRUCTORS")]
    assert not [name for name, text in texts.items() if "For the instructor" in text]
    assert not [name for name, text in texts.items() if "Solution of this lesson" in text]


def test_a_learner_finds_what_is_needed(unpacked, texts):
    lessons = course_map.lessons()
    assert {lesson.notebook for lesson in lessons} <= set(texts)
    broken = []
    for path in check_links.documents(unpacked):
        broken += check_links.broken(path, unpacked)
    assert broken == []
    # `make test` hands its own options and level to a make below it, which then prints where it is
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    listed = subprocess.run(
        ["make"], cwd=unpacked, env=alone, capture_output=True, text=True, check=True
    )
    names = [line.split()[1] for line in listed.stdout.splitlines()]
    assert names == ["help", "setup", "lab", "shell"]
    command = [sys.executable, "-m", "labcode"]
    done = subprocess.run(command, cwd=unpacked, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "Next: exercise 0.1 in 00_start_here.ipynb"


def test_its_pages_ask_for_nothing_that_a_learner_lacks(texts):
    """No git, and no lesson anew from it; the guide comes without links to tests and benchmarks."""
    assert "git" not in texts["COURSE.md"] and "labcode reset" not in texts["COURSE.md"]
    assert texts["COURSE.md"].count("**Begin a lesson anew.**") == 1
    assert "A cell does not end" in texts["COURSE.md"]
    for name in handout.GUIDE:
        assert "](../../" not in texts[f"book/guide/{name}.md"]


def test_programs_are_still_programs(unpacked):
    with zipfile.ZipFile(unpacked.parents[1] / "out.zip") as packed:
        mode = packed.getinfo(f"{handout.NAME}/slurm/cluster").external_attr >> 16
    assert mode & 0o111


def test_its_notebooks_are_those_of_the_course_but_for_one_link(unpacked):
    course = build_notebooks.headlines(ROOT)
    source = sorted((ROOT / "solutions").glob("04_*.py"))[0]
    _, built = lesson_source.notebooks_of(source.read_text(), source.name, course)
    handed = nbformat.read(unpacked / "notebooks" / f"{source.stem}.ipynb", as_version=4)
    assert not fingerprint.is_edited(handed)
    differ = []
    for ours, theirs in zip(built.cells, handed.cells, strict=True):
        if ours.source != theirs.source:
            differ.append(theirs.source)
    assert len(differ) == 2  # the first and the last cell have the links
    for source_text in differ:
        assert "solutions/" not in source_text and " &nbsp;|&nbsp; [05 DDP" in source_text


def test_a_folder_that_is_no_checkout_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"^git ls-files failed in .*: make the handout in a che"):
        handout.files(tmp_path)


@pytest.mark.release
def test_lesson_00_runs_in_it(unpacked, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(unpacked))
    notebook = nbformat.read(next((unpacked / "notebooks").glob("00_*.ipynb")), as_version=4)
    notebook.cells.append(new_code_cell("os.path.samefile(labcode.__path__[0], '../labcode')"))
    done = notebook_run.run(notebook, folder=str(unpacked / "notebooks"))
    assert notebook_run.open_exercise_problems(done) == []
    assert notebook_run.text_of(done.cells[-1].outputs) == "True"
