"""Every lesson runs: the solution under nbval, as stored; the student version to its end, with every exercise still open.

A lesson is executed twice here and nowhere else in the suite. Three run at a time, as ranks often wait for each other; a
test waits for its own.
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

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from stderr_plugin import MARK  # noqa: E402  (beside this file)
from tools import build_notebooks  # noqa: E402  (tools/ is not installed)
from tools.lesson_source import BEGIN, END, solution_lines  # noqa: E402
from tools.notebook_run import CELL_TIMEOUT_S, RunError, run  # noqa: E402

SOURCES = sorted((ROOT / "solutions").glob("[0-9][0-9]_*.py"))
each_lesson = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
HANG_S = 1200  # for a test that waits for its turn; far above what a lesson takes


def run_nbval(notebook: Path, folder: Path):
    """nbval on a copy in `folder`, as a pytest of its own: (exit code, its output, {outcome: number of cells})."""
    folder.mkdir(parents=True, exist_ok=True)
    copy, report = shutil.copy(notebook, folder), folder / "report.xml"
    options = ["--nbval-lax", "--nbval-current-env", f"--nbval-cell-timeout={CELL_TIMEOUT_S}", f"--junitxml={report}"]
    options += [f"--nbval-sanitize-with={Path(__file__).with_name('sanitize.cfg')}", "-p", "no:cacheprovider", "--color=no"]
    options += ["-p", "stderr_plugin"]  # lies beside this file
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={folder}", Path(copy).name]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=HANG_S)
    suite = ElementTree.parse(report).getroot().find("testsuite").attrib
    return (
        done.returncode,
        done.stdout + done.stderr,
        {key: int(suite[key]) for key in ("tests", "failures", "errors", "skipped")},
    )


def run_student(notebook: Path):
    """The executed student notebook, or the error that stopped it."""
    try:
        return run(nbformat.read(notebook, as_version=4))
    except RunError as error:
        return error


@pytest.fixture(scope="session")
def lessons(request, tmp_path_factory):
    """Results of all runs that the selected tests ask for: `lessons(kind, source)` waits for one."""
    folder = tmp_path_factory.mktemp("lessons")
    with ThreadPoolExecutor(max_workers=3) as pool:
        runs = {}
        for item in request.session.items:
            kind, source = (
                getattr(item, "originalname", ""),
                getattr(getattr(item, "callspec", None), "params", {}).get("source"),
            )
            solution, student = build_notebooks.targets(source) if source else (None, None)
            if kind == "test_solution_runs_and_says_what_is_stored":
                runs[kind, source] = pool.submit(run_nbval, solution, folder / source.stem)
            elif kind == "test_student_version_runs_to_the_end_with_every_exercise_open":
                runs[kind, source] = pool.submit(run_student, student)
        yield lambda kind, source: runs[kind, source].result()
        for waiting in runs.values():
            waiting.cancel()


def test_there_are_lessons(lessons):
    assert [path.stem[:2] for path in SOURCES][:1] == ["00"]


def test_the_build_is_up_to_date(capsys):
    code = build_notebooks.main(["--check"])
    assert code == 0, capsys.readouterr().out


@each_lesson
@pytest.mark.timeout(HANG_S)
def test_solution_runs_and_says_what_is_stored(source, lessons, request):
    code, output, counts = lessons(request.node.originalname, source)
    assert code == 0, output
    for line in output.splitlines():
        if MARK in line:
            warnings.warn(f"{source.stem}: {line.strip()}", stacklevel=1)
    notebook = nbformat.read(build_notebooks.targets(source)[0], as_version=4)
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    assert counts == {"tests": cells, "failures": 0, "errors": 0, "skipped": 0}


@each_lesson
@pytest.mark.timeout(HANG_S)
def test_student_version_runs_to_the_end_with_every_exercise_open(source, lessons, request):
    notebook = lessons(request.node.originalname, source)
    assert not isinstance(notebook, RunError), f"{source.stem}: {notebook}"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    checked = 0
    for cell in code:
        numbers = re.findall(r"\bcheck\(\s*[\"']([\w.]+)[\"']", cell.source)
        if numbers:
            text = "".join(output.get("text", "") for output in cell.outputs)
            verdicts = [line for line in text.splitlines() if re.match(r"\[.\] ", line)]
            assert verdicts == [f"[ ] {number} not done yet" for number in numbers], f"{source.stem}: {text}"
            checked += len(numbers)
    assert checked >= 1


def shown_to_students(text: str):
    """The lines of a source outside solutions, predictions and solution-only cells, read without the builder."""
    lines, hidden_cell, hidden = [], False, False
    for line in text.splitlines():
        if line.startswith("# %%"):
            hidden_cell = "predict" in line or "solution-only" in line
        elif line.strip() in (BEGIN, END):
            hidden = line.strip() == BEGIN
        elif not hidden and not hidden_cell:
            lines.append(line.removeprefix("# ").strip())
    return lines


@each_lesson
def test_no_solution_leaks(source):
    text = source.read_text()
    shown, student = shown_to_students(text), build_notebooks.targets(source)[1]
    lines = [line.strip() for cell in nbformat.read(student, as_version=4).cells for line in cell.source.splitlines()]
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
"""


def test_nbval_compares_what_prose_quotes(tmp_path):
    """The comparison bites: a stored output that is not what the cell prints fails, in tagged cells alone."""
    source = tmp_path / "solutions" / "00_try.py"
    source.parent.mkdir()
    source.write_text(LESSON)
    build_notebooks.build(source)
    path = source.with_suffix(".ipynb")
    notebook = nbformat.read(path, as_version=4)
    plain, quoted, figure = notebook.cells
    plain.outputs[0].text = "something else, not quoted\n"
    html = figure.outputs[0].data["text/html"]
    figure.outputs[0].data["text/html"] = re.sub(
        r'width="\d+" src="[^"]*', 'width="7" src="data:image/png;base64,AAAA', html
    )
    nbformat.write(notebook, path)
    code, output, counts = run_nbval(path, tmp_path / "same")
    assert (code, counts["tests"], counts["failures"]) == (0, 3, 0), output

    quoted.outputs[0].text = "measured: 41.6 %\n"
    figure.outputs[0].data["text/html"] = html.replace("One bar", "Two bars")
    nbformat.write(notebook, path)
    code, output, counts = run_nbval(path, tmp_path / "changed")
    assert (code, counts["failures"]) == (1, 2), output
    assert "Cell outputs differ" in output and "41.6 %" in output
