"""In a notebook: short tracebacks with the learner's own lines; a status that leaves nothing."""

import linecache
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from course import tracebacks  # noqa: E402
from labcode.topology import GridShape  # noqa: E402
from tools.notebook_run import ANSI, OwnKernelManager, text_of  # noqa: E402  (not installed)

CELLS = {
    "set-up": """
        from course.check import compare
        from course.progress import following, status
        from labcode.topology import GridShape
    """,
    "an error of the library": """
        def shape():
            return GridShape(dp=3)
        shape().check(8)
    """,
    "an error of the learner's": """
        1 / 0
    """,
    "a cell above has not run": """
        print(ranks)
    """,
    "it is used in a comprehension": """
        print([ranks for _ in range(2)])
    """,
    "the whole traceback": """
        def shape():
            return GridShape(dp=3)
        try:
            shape().check(8)
        except ValueError:
            raise
    """,
    "all of it": "%tb",
    "only a status": """
        for i in range(3):
            status(f"step {i}/3")
        status()
    """,
    "a pool that starts": """
        from course.pool.ranks import Ranks
        print(Ranks.announce is status)
        Ranks.announce("starting 4 ranks")
        Ranks.announce("")
        print(hint.__name__)
    """,
    "printed before": """
        print("before")
        status("busy")
        status()
    """,
    "shown after": """
        status("busy")
        status()
        compare("it", 1, 1, within=1)
    """,
    "a training": """
        with following():
            print("[rank 0] step 1/2 | loss 3.0")
            print("[rank 0] saved")
        print("done")
    """,
}


@pytest.fixture(scope="module")
def ran():
    """The cells by name, after one run in a kernel."""
    cells = {}
    for name, text in CELLS.items():
        lines = [line.removeprefix(" " * 8) for line in text.strip("\n").splitlines()]
        cells[name] = new_code_cell("\n".join(lines).strip())
    client = NotebookClient(
        nbformat.v4.new_notebook(cells=list(cells.values())),
        kernel_manager_class=OwnKernelManager,
        kernel_name="python3",
        allow_errors=True,
        timeout=300,
    )
    client.execute()
    return cells


def error_of(cell):
    (error,) = [output for output in cell.outputs if output.output_type == "error"]
    return ANSI.sub("", "\n".join(error.traceback))


def test_frames_of_the_library_are_hidden(ran):
    text = error_of(ran["an error of the library"])
    assert "----> 3 shape().check(8)" in text
    assert "labcode/" not in text
    assert text.splitlines()[-1].startswith("ValueError: dp*pp*cp*tp = 3*1*1*1 = 3 but")
    assert "----> 1 1 / 0" in error_of(ran["an error of the learner's"])


def test_a_name_of_another_cell_is_told_as_one(ran):
    told = "if a cell above defines `ranks`, run that one first"
    assert error_of(ran["a cell above has not run"]).splitlines()[-1] == told
    assert error_of(ran["it is used in a comprehension"]).splitlines()[-1] == told


def test_the_magic_shows_all_frames(ran):
    assert "labcode/topology.py" in error_of(ran["all of it"])


def test_a_status_leaves_nothing_behind(ran):
    assert ran["only a status"].outputs == []
    assert text_of(ran["a pool that starts"].outputs).split() == ["True", "hint"]
    assert text_of(ran["printed before"].outputs).strip() == "before"
    assert text_of(ran["shown after"].outputs).endswith("right")
    assert len(ran["shown after"].outputs) == 1
    assert text_of(ran["a training"].outputs) == "done"


def test_without_library_keeps_the_frames_of_others():
    with pytest.raises(ValueError, match="WORLD_SIZE") as caught:
        GridShape(dp=3).check(8)
    whole = caught.tb
    short = tracebacks.without_library(whole)
    files = []
    step = short
    while step is not None:
        files.append(Path(step.tb_frame.f_code.co_filename).name)
        step = step.tb_next
    assert files == [Path(__file__).name]
    assert tracebacks.without_library(whole.tb_next) is whole.tb_next  # nothing else to show


def test_a_ranks_traceback_gets_the_lines_of_the_cell(monkeypatch):
    cell = "/tmp/ipykernel_12/34.py"
    code = "def f(rank):\n    raise ValueError('a NaN')\n"
    monkeypatch.setitem(linecache.cache, cell, (len(code), None, code.splitlines(True), cell))
    note = f'Traceback of rank 1 (most recent call last):\n  File "{cell}", line 2, in f\n'
    note += '  File "/usr/lib/x.py", line 3, in g\n    y = z'
    with_lines = tracebacks.with_source(note)
    assert with_lines.splitlines()[1:] == [
        f'  File "{cell}", line 2, in f',
        "    raise ValueError('a NaN')",
        '  File "/usr/lib/x.py", line 3, in g',
        "    y = z",
    ]
    assert tracebacks.with_source(with_lines) == with_lines
