"""What continuous integration runs, and why it is red: `python -m tools.ci`, from `.ci/run`.

Each step is a command of the Makefile or one like it. A test of real processes, of SLURM or of a
browser that fails runs once more, alone, in a new process; if it passes there, it is listed as
flaky and does not decide. Whatever else fails does. The last lines are the list of what failed,
each with the first line of its error.
"""

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
# More failures than these are a defect, and no accident of a busy machine.
MOST_SECOND_TRIES = 8
SECOND_TRY_S = 900

PYTEST = [sys.executable, "-m", "pytest"]
# what this commit touches, and an eighth of the rest of the release tier
CHOSEN = ["-m", "not lesson", "--changed", "--part=commit"]
LESSONS = ["-m", "lesson", "--changed", "--part=commit"]


@dataclass(frozen=True)
class Step:
    """One command of the run.

    Args:
        name: What it is called in the table of times.
        command: What is run.
        report: Where pytest writes its report, if it is pytest.
        threads: Of a process, where not all that it may have.
    """

    name: str
    command: Sequence[str]
    report: Path | None = None
    threads: int | None = None


STEPS = (
    Step("check", ["make", "--no-print-directory", "check"]),
    Step(
        "tests, two at a time",
        [*PYTEST, "tests", *CHOSEN, "-n", "2", "--dist", "loadscope"],
        BUILD / "tests.xml",
        threads=1,
    ),
    Step("lessons, one at a time", [*PYTEST, "tests/notebooks", *LESSONS], BUILD / "lessons.xml"),
    Step("book", ["make", "--no-print-directory", "book"]),
    Step(
        "no answers were committed",
        [sys.executable, "-m", "tools.build_notebooks", "--check", "--strict"],
    ),
)


@dataclass(frozen=True)
class Failure:
    """A test that failed, or a step that is no pytest.

    Args:
        name: Of the test, as pytest takes it, or of the step.
        is_real: It may be tried again.
        error: The line that says what was wrong.
    """

    name: str
    is_real: bool
    error: str


@dataclass(frozen=True)
class Counts:
    """How many tests of a report passed, failed and were skipped."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped
        )


def read(report: Path) -> tuple[list[Failure], Counts]:
    """The failures of a report of pytest, and how many tests it has.

    Args:
        report: A file in the JUnit format; one that is missing or cut off has no tests.
    """
    try:
        root = ElementTree.parse(report).getroot()
    except (OSError, ElementTree.ParseError):
        return [], Counts()
    failures = []
    passed = skipped = 0
    for case in root.iter("testcase"):
        problem = case.find("failure")
        if problem is None:
            problem = case.find("error")
        if problem is not None:
            failures.append(_failure(case, problem))
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return failures, Counts(passed, len(failures), skipped)


def _failure(case: ElementTree.Element, problem: ElementTree.Element) -> Failure:
    known = {each.get("name"): each.get("value", "") for each in case.iter("property")}
    name = known.get("nodeid") or f"{case.get('classname')}::{case.get('name')}"
    return Failure(name, "real" in known, _error(problem))


def _error(problem: ElementTree.Element) -> str:
    """The first line of pytest's text that begins with E, or else of its message.

    The lines below it are how pytest explains an assertion.
    """
    for line in (problem.text or "").splitlines():
        if line.startswith("E  ") and line[1:].strip():
            return line[1:].strip()[:300]
    message = (problem.get("message") or "").strip()
    return message.splitlines()[0][:300] if message else "no message"


def tried_again(
    failures: Sequence[Failure], run_alone: Callable[[str], bool]
) -> tuple[list[Failure], list[Failure]]:
    """Give real tests their second try.

    Args:
        failures: Of the first run.
        run_alone: Runs a test by itself and says whether it passed.

    Returns:
        (those that stay failures, those that passed alone).
    """
    real = [failure for failure in failures if failure.is_real]
    if len(real) > MOST_SECOND_TRIES:
        return list(failures), []
    failed = [failure for failure in failures if not failure.is_real]
    flaky = []
    for failure in real:
        (flaky if run_alone(failure.name) else failed).append(failure)
    return failed, flaky


def run_alone(name: str) -> bool:
    """Whether a test passes in a process of its own."""
    print(f"\n== once more, alone: {name}", flush=True)
    command = [*PYTEST, "-m", "", "-p", "no:cacheprovider", name]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=SECOND_TRY_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main() -> int:
    """Run all steps; returns the exit code."""
    BUILD.mkdir(exist_ok=True)
    failures: list[Failure] = []
    counts = Counts()
    seconds: dict[str, float] = {}
    for step in STEPS:
        print(f"\n== {step.name}", flush=True)
        started = time.monotonic()
        found, counted = _run(step)
        seconds[step.name] = time.monotonic() - started
        failures += found
        counts += counted
    started = time.monotonic()
    failed, flaky = tried_again(failures, run_alone)
    seconds["second tries"] = time.monotonic() - started
    print("\n== where the time went, in seconds")
    for name, each in seconds.items():
        print(f"{each:6.0f}  {name}")
    for failure in flaky:
        print(f"FLAKY {failure.name}: {failure.error} (enter it in tests/flaky.md)")
    for failure in failed:
        print(f"FAILED {failure.name}: {failure.error}")
    still_failed = counts.failed - len(flaky)
    print(f"{counts.passed + len(flaky)} passed, {still_failed} failed, {counts.skipped} skipped")
    print("red" if failed else "green")
    return 1 if failed else 0


def _run(step: Step) -> tuple[list[Failure], Counts]:
    """The failures of a step and how many tests it had."""
    command = list(step.command)
    if step.report:
        step.report.unlink(missing_ok=True)
        command.append(f"--junitxml={step.report}")
    env = dict(os.environ)
    if step.threads:
        env["OMP_NUM_THREADS"] = str(step.threads)
    code = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    if not step.report:
        lines = [] if code == 0 else [Failure(step.name, False, f"exit code {code}, see above")]
        return lines, Counts()
    failures, counts = read(step.report)
    # 5: no tests were chosen, which is right for lessons that nothing touched
    if code not in (0, 5) and not failures:
        failures = [Failure(step.name, False, f"pytest ended with exit code {code}, see above")]
    return failures, counts


if __name__ == "__main__":
    sys.exit(main())
