"""Every lesson runs: the solution under nbval, as stored; the student version to its end.

Solutions run in every `make test`. A student version, with every exercise open, runs once per
change of its code: the builder runs it and keeps the hash of what it ran in the notebook. Where the
hash is another one it runs here. Since then the library may have changed: `make test-full` runs a
third of them again, other ones at other commits, and `make students` all. Nothing depends on what
somebody did with the notebooks of this checkout: tests build their own.

Three lessons run at a time, in the background, as ranks often wait for each other.
"""

import os
import re
import shutil
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import commit_part
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nbval_plugin import MARK  # noqa: E402  (beside this file)

from tools import build_notebooks, fingerprint  # noqa: E402  (tools/ is not installed)
from tools.lesson_source import BEGIN, END, solution_lines  # noqa: E402
from tools.notebook_run import CELL_TIMEOUT_S, CHECK, RunError  # noqa: E402

SOURCES = sorted((ROOT / "solutions").glob("[0-9][0-9]_*.py"))
each_lesson = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
HANG_S = 1200  # for a test that waits for its turn; far above what a lesson takes
SOLUTION_TEST = "test_solution_runs_and_says_what_is_stored"
STUDENT_TEST = "test_student_version_was_run_since_its_code_changed"
STUDENT_TEST_IN_FULL = "test_student_version_runs_to_the_end_with_every_exercise_open"


def student_versions() -> list:
    """Every source, as a parameter; those of this commit's part are run by `make test-full`."""
    part = commit_part.of_this_commit()
    found = []
    for number, source in enumerate(SOURCES):
        marks = [pytest.mark.students]
        if part is None or number % commit_part.PARTS == part:
            marks.append(pytest.mark.full)
        found.append(pytest.param(source, id=source.stem, marks=marks))
    return found


# so that they begin with the first test of this file
pytestmark = pytest.mark.usefixtures("lessons")


def student_version(source: Path) -> nbformat.NotebookNode:
    """The student notebook as its source gives it, whatever lies in `notebooks/`."""
    _, student = build_notebooks.notebooks(source)
    return student


def was_run(source: Path) -> bool:
    """Whether the builder has run the student version with the code that it has now."""
    _, path = build_notebooks.targets(source)
    if not path.exists():
        return False
    recorded = build_notebooks.code_last_run(nbformat.read(path, as_version=4))
    return recorded == fingerprint.of_code(student_version(source))


def run_nbval(notebook: Path, folder: Path):
    """nbval on a copy in `folder`: (exit code, its output, {outcome: number of cells})."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = shutil.copy(notebook, folder)
    report = folder / "report.xml"
    options = [
        "--nbval-lax",
        "--nbval-current-env",
        f"--nbval-cell-timeout={CELL_TIMEOUT_S}",
        f"--nbval-sanitize-with={Path(__file__).with_name('sanitize.cfg')}",
        f"--junitxml={report}",
        "-p",
        "no:cacheprovider",
        "-p",
        "nbval_plugin",  # lies beside this file
        "--color=no",
        f"--rootdir={folder}",
    ]
    command = [sys.executable, "-m", "pytest", *options, Path(copy).name]
    paths = [str(Path(__file__).parent), str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    suite = ElementTree.parse(report).getroot().find("testsuite").attrib
    counts = {key: int(suite[key]) for key in ("tests", "failures", "errors", "skipped")}
    return done.returncode, done.stdout + done.stderr, counts


def run_student(source: Path) -> RunError | None:
    """The error that stopped the student version, if any."""
    try:
        build_notebooks.run_student(student_version(source))
    except RunError as error:
        return error
    return None


@pytest.fixture(scope="session")
def lessons(request, tmp_path_factory):
    """Runs what the selected tests ask for: `lessons(kind, source)` waits for one result."""
    folder = tmp_path_factory.mktemp("lessons")
    with ThreadPoolExecutor(max_workers=3) as pool:
        runs = {}
        for item in request.session.items:
            name = getattr(item, "originalname", "")
            if name == SOLUTION_TEST:
                source = item.callspec.params["source"]
                notebook, _ = build_notebooks.targets(source)
                runs["solution", source] = pool.submit(run_nbval, notebook, folder / source.stem)
            elif name in (STUDENT_TEST, STUDENT_TEST_IN_FULL):
                source = item.callspec.params["source"]
                is_due = name == STUDENT_TEST_IN_FULL or not was_run(source)
                if is_due and ("student", source) not in runs:
                    runs["student", source] = pool.submit(run_student, source)
        yield lambda kind, source: runs[kind, source].result()
        for waiting in runs.values():
            waiting.cancel()


def test_every_student_version_is_run_at_some_commits_and_by_make_students():
    parameters = student_versions()
    assert [each.values[0] for each in parameters] == SOURCES
    for each in parameters:
        assert "students" in [mark.name for mark in each.marks]
    part = commit_part.of_this_commit()
    assert part in (None, *range(commit_part.PARTS))
    in_full = [each.values[0] for each in parameters if len(each.marks) == 2]
    assert in_full == (SOURCES if part is None else SOURCES[part :: commit_part.PARTS])


def test_there_are_lessons():
    assert [path.stem[:2] for path in SOURCES][:1] == ["00"]


def test_the_build_is_up_to_date(capsys):
    code = build_notebooks.main(["--check"])
    assert code == 0, capsys.readouterr().out


@each_lesson
@pytest.mark.waits
@pytest.mark.timeout(HANG_S)
def test_solution_runs_and_says_what_is_stored(source, lessons):
    code, output, counts = lessons("solution", source)
    assert code == 0, output
    for line in output.splitlines():
        if MARK in line:
            warnings.warn(f"{source.stem}: {line.strip()}", stacklevel=1)
    notebook = nbformat.read(build_notebooks.targets(source)[0], as_version=4)
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    assert counts == {"tests": cells, "failures": 0, "errors": 0, "skipped": 0}


@each_lesson
@pytest.mark.waits
@pytest.mark.timeout(HANG_S)
def test_student_version_was_run_since_its_code_changed(source, lessons):
    if not was_run(source):
        assert lessons("student", source) is None


@pytest.mark.parametrize("source", student_versions())
@pytest.mark.waits
@pytest.mark.timeout(HANG_S)
def test_student_version_runs_to_the_end_with_every_exercise_open(source, lessons):
    assert lessons("student", source) is None


@each_lesson
def test_every_lesson_checks_an_exercise(source):
    text = "\n".join(cell.source for cell in student_version(source).cells)
    assert CHECK.findall(text)


def shown_to_students(text: str):
    """The lines outside solutions, predictions and solution-only cells, without the builder."""
    lines = []
    hidden_cell = False
    hidden = False
    for line in text.splitlines():
        if line.startswith("# %%"):
            hidden_cell = "predict" in line or "solution-only" in line
        elif line.strip() in (BEGIN, END):
            hidden = line.strip() == BEGIN
        elif not hidden and not hidden_cell:
            lines.append(line.strip().removeprefix("# ").strip())
    return lines


@each_lesson
def test_no_solution_leaks(source):
    text = source.read_text()
    shown = shown_to_students(text)
    lines = []
    for cell in student_version(source).cells:
        lines += [line.strip() for line in cell.source.splitlines()]
    secrets = {line for line in solution_lines(text) if len(line) > 12}
    assert secrets or "BEGIN SOLUTION" not in text
    assert [line for line in secrets if lines.count(line) > shown.count(line)] == []
    assert not any("SOLUTION" in line for line in lines)


LESSON = """\
# %%
from labcode.teach.figures import plot
print("quoted", 3)

# %% tags=["nbval-check-output"]
print("measured: 41.5 %")

# %% tags=["nbval-check-output"]
plot.bars({"a": 1}, alt="One bar that is one high")

# %% tags=["raises-exception"] raises="ZeroDivisionError: division by zero"
1 / 0
"""


def test_nbval_compares_what_prose_quotes(tmp_path):
    """A stored output that is not what the cell prints fails, in tagged cells alone.

    So does a cell that is broken on purpose and raises another error.
    """
    source = tmp_path / "solutions" / "00_try.py"
    source.parent.mkdir()
    source.write_text(LESSON)
    build_notebooks.build(source)
    path = source.with_suffix(".ipynb")
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    plain, quoted, figure, broken = cells
    plain.outputs[0].text = "something else, not quoted\n"
    html = figure.outputs[0].data["text/html"]
    figure.outputs[0].data["text/html"] = re.sub(
        r'width="\d+"(.*) src="[^"]*', r'width="7"\1 src="data:image/png;base64,AAAA', html
    )
    nbformat.write(notebook, path)
    code, output, counts = run_nbval(path, tmp_path / "same")
    assert (code, counts["tests"], counts["failures"]) == (0, 4, 0), output

    quoted.outputs[0].text = "measured: 41.6 %\n"
    figure.outputs[0].data["text/html"] = html.replace("One bar", "Two bars")
    broken.source = "[][1]"
    nbformat.write(notebook, path)
    code, output, counts = run_nbval(path, tmp_path / "changed")
    assert (code, counts["failures"]) == (1, 3), output
    assert "Cell outputs differ" in output and "41.6 %" in output
    assert "should raise 'ZeroDivisionError: division by zero', but raised ['IndexError" in output
