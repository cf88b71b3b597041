"""What continuous integration runs, and why it is red: `python -m tools.ci`, from `.ci/run`.

Each step is a command of the Makefile or one like it: the checks, `make test`, and of the release
tier what the change touches and what has its turn, as much as there is time for (tests/choice.py).
A test of real processes, of SLURM or of a browser that fails runs once more, alone, in a new
process, while there is time; if it passes there, it is listed as flaky and does not decide.
Whatever else fails does. The last lines are what failed, each with the first line of its error.
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
SECOND_TRIES_S = 150.0  # all of them together
# What a change touches has this much of the clock, beside what has its turn.
TOUCHED_S = "120"

MAKE = ["make", "--no-print-directory", "--keep-going"]
PYTEST = [sys.executable, "-m", "pytest"]
NOTHING_CHOSEN = 5
TWO_WORKERS = ["-n", "2", "--dist", "loadscope", "--no-loadscope-reorder"]


@dataclass(frozen=True)
class Step:
    """One command of the run.

    Args:
        name: What it is called in the table of times.
        command: What is run.
        reports: What pytest writes, if it is pytest or a `make` that calls it.
        threads: Number of threads of a process, where it is not to have all.
    """

    name: str
    command: Sequence[str]
    reports: Sequence[Path] = ()
    threads: int | None = None


def chosen(tests: str, which: str, report: str) -> list[str]:
    """Pytest on what this run has time for."""
    marks = ["-m", which, f"--budget={TOUCHED_S}"]
    return [*PYTEST, tests, *marks, f"--junitxml={BUILD / report}"]


STEPS = (
    Step("make check", [*MAKE, "check"]),
    Step("make test", [*MAKE, "test"], [BUILD / "test.xml", BUILD / "test-lessons.xml"]),
    Step(
        "of the release tier, two at a time",
        [*chosen("tests", "release and not lesson", "chosen.xml"), *TWO_WORKERS],
        [BUILD / "chosen.xml"],
        threads=1,
    ),
    Step(
        "lessons, one at a time",
        chosen("tests/notebooks", "release and lesson", "chosen-lessons.xml"),
        [BUILD / "chosen-lessons.xml"],
    ),
    Step(
        "no answers were committed",
        [sys.executable, "-m", "tools.build_notebooks", "--check", "--strict"],
    ),
)


@dataclass(frozen=True)
class Failure:
    """A test that failed, or a step that is no pytest.

    Args:
        name: Name of the test, as pytest takes it, or of the step.
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
    failures: Sequence[Failure], run_alone: Callable[[str, float], bool], within_s: float
) -> tuple[list[Failure], list[Failure]]:
    """Give real tests their second try, while there is time.

    Args:
        failures: Failures of the first run.
        run_alone: Runs a test by itself, for a limited number of seconds; says whether it passed.
        within_s: The time that all of them have.

    Returns:
        (those that stay failures, those that passed alone).
    """
    real = [failure for failure in failures if failure.is_real]
    if len(real) > MOST_SECOND_TRIES:
        return list(failures), []
    failed = [failure for failure in failures if not failure.is_real]
    flaky = []
    end = time.monotonic() + within_s
    for failure in real:
        left_s = end - time.monotonic()
        passed = left_s > 0 and run_alone(failure.name, left_s)
        (flaky if passed else failed).append(failure)
    return failed, flaky


def run_alone(name: str, within_s: float) -> bool:
    """Whether a test passes in a process of its own, within some seconds."""
    print(f"\n== once more, alone, within {within_s:.0f} s: {name}", flush=True)
    command = [*PYTEST, "-m", "", "-p", "no:cacheprovider", name]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=within_s, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main() -> int:
    """Run all steps; returns the exit code."""
    BUILD.mkdir(exist_ok=True)
    failures: list[Failure] = []
    counts = Counts()
    seconds = {"packages and make setup": float(os.environ.get("SETUP_S", "0"))}
    for step in STEPS:
        print(f"\n== {step.name}", flush=True)
        started = time.monotonic()
        found, counted = _run(step)
        seconds[step.name] = time.monotonic() - started
        failures += found
        counts += counted
    started = time.monotonic()
    failed, flaky = tried_again(failures, run_alone, SECOND_TRIES_S)
    seconds["second tries"] = time.monotonic() - started
    print("\n== where the time went, in seconds")
    for name, each in seconds.items():
        print(f"{each:6.0f}  {name}")
    print(f"{sum(seconds.values()):6.0f}  together")
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
    for report in step.reports:
        report.unlink(missing_ok=True)
    env = dict(os.environ)
    if step.threads:
        env["OMP_NUM_THREADS"] = str(step.threads)
    code = subprocess.run(step.command, cwd=ROOT, env=env, check=False).returncode
    failures: list[Failure] = []
    counts = Counts()
    for report in step.reports:
        found, counted = read(report)
        if not report.exists():
            error = f"exit code {code}, and no {report.name}: see above"
            found = [Failure(step.name, False, error)]
        failures += found
        counts += counted
    # 5: of what pytest found it has chosen nothing
    may_be_empty = step.reports and code == NOTHING_CHOSEN
    if code != 0 and not may_be_empty and not failures:
        failures = [Failure(step.name, False, f"exit code {code}, see above")]
    return failures, counts


if __name__ == "__main__":
    sys.exit(main())
