"""docs/versions.md, from what `nox` left in build/matrix: `python -m tools.matrix`.

`make test-matrix` runs both. A version that could not be tested on this machine is a row that says
so: nothing is taken over from an earlier table.
"""

import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from labcode.runtime.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "build" / "matrix"
PAGE = ROOT / "docs" / "versions.md"

# Every PyTorch with the Python that the course is tested with; every Python with the PyTorch that
# the course pins, and the newest Python with the newest PyTorch.
VERSIONS = [
    ("3.11", "2.11.0"),
    ("3.11", "2.12.0"),
    ("3.11", "2.13.0"),
    ("3.11", "2.14.0"),
    ("3.11", "2.15.0"),
    ("3.12", "2.13.0"),
    ("3.13", "2.13.0"),
    ("3.14", "2.13.0"),
    ("3.14", "2.15.0"),
]

# What breaks when PyTorch moves: the collectives, each parallelism against one process, the
# training program and its checkpoints, precision, the profiler, and the checks of exercises, which
# compare with what PyTorch does. The rest does not depend on it.
TESTS = [
    "tests/ranks/test_simulated_is_gloo.py",
    "tests/unit/test_simulated_ranks.py",
    "tests/ranks/test_collectives.py",
    "tests/ranks/test_grid.py",
    "tests/ranks/test_data_parallel.py",
    "tests/ranks/test_gradient_compression.py",
    "tests/ranks/test_parallel_parity.py",
    "tests/ranks/test_tensor.py",
    "tests/ranks/test_context.py",
    "tests/ranks/test_pipeline.py",
    "tests/ranks/test_zero.py",
    "tests/ranks/test_sharding.py",
    "tests/ranks/test_together.py",
    "tests/ranks/test_train_program.py",
    "tests/ranks/test_gpt2_files.py",
    "tests/ranks/test_fp8.py",
    "tests/ranks/test_debug.py",
    "tests/ranks/test_not_finite.py",
    "tests/ranks/test_float16.py",
    "tests/ranks/test_reduce_dtype.py",
    "tests/ranks/test_compile.py",
    "tests/ranks/test_step_profiler.py",
    "tests/ranks/test_activation_bytes.py",
    "tests/ranks/test_training_memory.py",
    "tests/ranks/test_dry_run.py",
    "tests/ranks/test_hang_watch.py",
    "tests/exercises/test_answers.py",
    "tests/unit/test_formats.py",
    "tests/unit/test_fp8_products.py",
    "tests/unit/test_loader.py",
    "tests/unit/test_loss_scale.py",
    "tests/unit/test_models.py",
    "tests/unit/test_optim.py",
    "tests/unit/test_transformer.py",
    "tests/unit/test_memory_timeline.py",
    "tests/unit/test_zero_cut.py",
]

# What breaks when Python moves: how answers are watched while they run, how processes start. For
# the pairs with another Python than the one of constraints.txt.
TESTED_PYTHON = "3.11"
PYTHON_TESTS = [
    "tests/unit/test_in_notebook.py",
    "tests/unit/test_check.py",
    "tests/unit/test_launch.py",
    "tests/unit/test_fork_server.py",
    "tests/unit/test_processes.py",
    "tests/ranks/test_ranks.py",
    "tests/ranks/test_on_ranks.py",
]

INTRODUCTION = """# The versions of Python and PyTorch that were tried

Written by `make test-matrix`, on {machine}. The whole course is tested with the Python and the
PyTorch of constraints.txt (`make test`). The table tests what breaks when PyTorch moves, in a fresh
environment each: the collectives, each parallelism against one process, the training program and
its checkpoints, precision, the profiler, the checks of the exercises ({count} files, listed in
[tools/matrix.py](../tools/matrix.py)). With another Python than {python} also how answers are
watched and how processes start ({python_count} files more).

| Python | PyTorch | passed | failed | skipped | minutes |
|---|---|---:|---:|---:|---:|
"""


class Row(NamedTuple):
    """What came out for one pair of versions; `ran` is False if there is no report of it."""

    python: str
    torch: str
    ran: bool
    passed: int = 0
    failed: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()  # the reason of each
    seconds: float = 0.0


def report_of(python: str, torch: str, folder: Path = REPORTS) -> Path:
    """The report of pytest for one pair of versions.

    Args:
        python: Such as "3.12".
        torch: Such as "2.13.0".
        folder: Folder of the reports.

    Returns:
        Its path.
    """
    return folder / f"python{python}-torch{torch}.xml"


def read(python: str, torch: str, folder: Path = REPORTS) -> Row:
    """The row of one pair of versions.

    Args:
        python: Such as "3.12".
        torch: Such as "2.13.0".
        folder: Folder with the reports of pytest.

    Returns:
        The row.
    """
    report = report_of(python, torch, folder)
    if not report.exists():
        return Row(python, torch, ran=False)
    passed = 0
    failed = []
    skipped = []
    seconds = 0.0
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        seconds += float(suite.get("time", 0))
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("classname", "").rpartition(".")[2] + "::" + case.get("name", "")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif (skip := case.find("skipped")) is not None:
            skipped.append(skip.get("message", "no reason given"))
        else:
            passed += 1
    return Row(python, torch, True, passed, tuple(failed), tuple(skipped), seconds)


def tests_of(python: str) -> list[str]:
    """The files of tests that one Python runs, such as "3.12"."""
    return TESTS if python == TESTED_PYTHON else TESTS + PYTHON_TESTS


def page(rows: list[Row]) -> str:
    """The page.

    Args:
        rows: One for each pair of versions.

    Returns:
        Markdown.
    """
    machine = f"{platform.system()} {platform.machine()}"
    text = INTRODUCTION.format(
        machine=machine, count=len(TESTS), python=TESTED_PYTHON, python_count=len(PYTHON_TESTS)
    )
    for row in rows:
        text += f"| {row.python} | {row.torch} | "
        if row.ran:
            minutes = row.seconds / 60
            text += f"{row.passed} | {len(row.failed)} | {len(row.skipped)} | {minutes:.0f} |\n"
        else:
            text += "not tried: no such Python here, or it could not be installed | | | |\n"
    for row in rows:
        if row.failed:
            text += f"\nFailed with Python {row.python} and PyTorch {row.torch}:\n\n"
            for name in row.failed:
                text += f"- `{name}`\n"
        if row.skipped:
            text += f"\nSkipped with Python {row.python} and PyTorch {row.torch}:\n\n"
            for reason, times in Counter(row.skipped).items():
                text += f"- {reason} (tests: {times})\n"
    return text


def main() -> int:
    """Write the page; returns the exit code."""
    rows = []
    for python, torch in VERSIONS:
        rows.append(read(python, torch))
    if not any(row.ran for row in rows):
        print("no report in build/matrix: run `make test-matrix`", file=sys.stderr)
        return 1
    write_atomically(PAGE, page(rows).encode())
    for row in rows:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
