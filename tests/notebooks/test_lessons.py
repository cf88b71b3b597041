"""Every lesson runs: the solution under nbval, as stored; the student version to its end.

Each runs alone, with nothing beside it: a lesson measures, and its cells have a limit. In the
execution of a solution every check must say that the answer is right. A student version, with every
exercise open, is run by the builder, which keeps the hash of what it ran in the notebook; where the
hash is another one it runs here. Nothing depends on what somebody did with the notebooks of this
checkout: tests build their own.
"""

import os
import re
import shutil
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nbval_plugin import MARK  # noqa: E402  (beside this file)

from tools import build_notebooks, fingerprint  # noqa: E402  (tools/ is not installed)
from tools.lesson_source import BEGIN, END, solution_lines  # noqa: E402
from tools.notebook_run import CELL_TIMEOUT_S, CHECK, RunError  # noqa: E402

SOURCES = sorted((ROOT / "solutions").glob("[0-9][0-9]*_*.py"))
each_lesson = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
HANG_S = 1200  # far above what a lesson takes
IN_EVERY_RUN = (
    "08"  # the lesson that `make test` executes: it has all that others have, and is short
)
each_solution = pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=[] if path.stem.startswith(IN_EVERY_RUN) else [pytest.mark.release],
        )
        for path in SOURCES
    ],
)


def student_version(source: Path) -> nbformat.NotebookNode:
    """The student notebook as its source gives it, whatever lies in `notebooks/`."""
    _, student = build_notebooks.notebooks(source)
    return student


def assert_student_version_runs(source: Path) -> None:
    """Fails with the builder's words: a cell that failed, or a check of an open exercise that did
    not say that it is not done yet.
    """
    problem = None
    try:
        build_notebooks.run_student(student_version(source))
    except RunError as error:
        problem = str(error)
    assert problem is None, problem


def was_run(source: Path) -> bool:
    """Whether the builder has run the student version with the code that it has now."""
    _, path = build_notebooks.targets(source)
    if not path.exists():
        return False
    recorded = build_notebooks.code_last_run(nbformat.read(path, as_version=4))
    return recorded == fingerprint.of_code(student_version(source))


def run_nbval(notebook: Path, folder: Path):
    """nbval on a copy in `folder`: (exit code, its output, {outcome: number of cells}).

    A FutureWarning is an error, in the kernel and in all that it starts (ranks, torchrun): PyTorch
    gives one for each name that it is about to take away.
    """
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
    env["PYTHONWARNINGS"] = "error::FutureWarning"
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    suite = ElementTree.parse(report).getroot().find("testsuite").attrib
    counts = {key: int(suite[key]) for key in ("tests", "failures", "errors", "skipped")}
    return done.returncode, done.stdout + done.stderr, counts


def test_there_are_lessons():
    assert [path.stem for path in SOURCES][:1] == ["00_start_here"]


def test_the_build_is_up_to_date(capsys):
    code = build_notebooks.main(["--check"])
    assert code == 0, capsys.readouterr().out


@each_solution
@pytest.mark.lesson
@pytest.mark.timeout(HANG_S)
def test_solution_runs_and_says_what_is_stored(source, tmp_path):
    """It runs to its end, quoted outputs are the stored ones, and every check says `[v]`."""
    path, _ = build_notebooks.targets(source)
    code, output, counts = run_nbval(path, tmp_path / source.stem)
    assert code == 0, output
    for line in output.splitlines():
        if MARK in line:
            warnings.warn(f"{source.stem}: {line.strip()}", stacklevel=1)
    notebook = nbformat.read(path, as_version=4)
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    assert counts == {"tests": cells, "failures": 0, "errors": 0, "skipped": 0}


@each_lesson
@pytest.mark.lesson
@pytest.mark.timeout(HANG_S)
def test_student_version_was_run_since_its_code_changed(source):
    if not was_run(source):
        assert_student_version_runs(source)


@each_lesson
@pytest.mark.lesson
@pytest.mark.release
@pytest.mark.timeout(HANG_S)
def test_student_version_runs_to_the_end_with_every_exercise_open(source):
    assert_student_version_runs(source)


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
from course.figures import plot
print("quoted", 3)

# %% tags=["nbval-check-output"]
print("measured: 41.5 %")

# %% tags=["nbval-check-output"]
plot.bars({"a": 1}, alt="One bar that is one high")

# %% tags=["raises-exception"] raises="ZeroDivisionError: division by zero"
1 / 0
"""


@pytest.mark.release
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


@pytest.mark.parametrize(("mark", "code"), [("v", 0), ("x", 1)])
def test_a_check_that_does_not_say_right_fails_the_solution(tmp_path, mark, code):
    cell = nbformat.v4.new_code_cell(f'print("[{mark}] 0.1 said")  # in place of check("0.1", ...)')
    path = tmp_path / "00_try.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    found, output, _ = run_nbval(path, tmp_path / "run")
    assert found == code, output
    assert ("check 0.1 does not say [v]" in output) == (code == 1)


OLD_NAME = """\
import warnings
from course.pool.ranks import Ranks

def calls_an_old_name():
    warnings.warn("`torch.distributed.old` is deprecated", FutureWarning, stacklevel=1)

"""
ON_A_RANK = "with Ranks(1) as ranks:\n    ranks.run(calls_an_old_name)"


@pytest.mark.parametrize("call", ["calls_an_old_name()", ON_A_RANK], ids=["kernel", "rank"])
def test_a_name_that_is_about_to_go_fails_the_solution(tmp_path, call):
    path = tmp_path / "00_try.ipynb"
    cell = nbformat.v4.new_code_cell(OLD_NAME + call)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    code, output, _ = run_nbval(path, tmp_path / "run")
    assert code == 1
    assert "`torch.distributed.old` is deprecated" in output
