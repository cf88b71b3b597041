"""How long each test takes: `make durations` writes tests/costs.json and tests/durations.md.

    python -m tools.durations REPORT.xml ...

The reports are pytest's (`--junitxml`), one for each run; a test that none of them has keeps its
old time. tests/choice.py chooses by these seconds what a run of CI has time for. The time of a test
includes its fixtures, so the first test that asks for a shared fixture pays for it. Two workers run
tests at the same time: half of a sum passes on the clock.
"""

import json
import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COSTS = ROOT / "tests" / "costs.json"
PAGE = ROOT / "tests" / "durations.md"
FILES = 20
TESTS = 20
# Tests of `make test` that take less are not listed: there are thousands.
SHORTEST_S = 0.1

Costs = dict[str, dict[str, float]]  # {tier: {name of a test: seconds}}
TIERS = {
    "core": "`make test`, but for the lesson that it executes",
    "release": "The release tier without lessons",
    "lessons": "Lessons that are executed, one at a time",
}


class Test(NamedTuple):
    """One test of a report."""

    name: str
    tier: str
    seconds: float


def read(report: Path) -> list[Test]:
    """The tests of a report, those that were skipped left out."""
    found = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        known = {each.get("name"): each.get("value", "") for each in case.iter("property")}
        if case.find("skipped") is None and "nodeid" in known:
            tier = known.get("tier", "core")
            found.append(Test(known["nodeid"], tier, float(case.get("time", 0))))
    return found


def updated(costs: Costs, tests: list[Test], exist: set[str]) -> Costs:
    """The costs with what was measured anew.

    Args:
        costs: Costs before the update.
        tests: What the reports say.
        exist: The names of all tests; others are left out.
    """
    merged: Costs = {tier: {} for tier in TIERS}
    measured = {test.name for test in tests}
    for tier, rows in costs.items():
        for name, seconds in rows.items():
            if name in exist and name not in measured:
                merged[tier][name] = seconds
    for test in tests:
        if test.name in exist and (test.tier != "core" or test.seconds >= SHORTEST_S):
            merged[test.tier][test.name] = round(test.seconds, 1)
    return {tier: dict(sorted(rows.items())) for tier, rows in merged.items()}


def table(heading: str, rows: list[tuple[str, float]], total: float) -> list[str]:
    """A table of the slowest, longest first."""
    lines = [f"| {heading} | seconds | share |", "|---|---:|---:|"]
    for name, seconds in sorted(rows, key=by_seconds):
        text = name.replace("|", "\\|")
        lines.append(f"| {text} | {seconds:.1f} | {seconds / total:.0%} |")
    return lines


def by_seconds(row: tuple[str, float]) -> float:
    """The key that puts the longest first."""
    return -row[1]


def section(heading: str, rows: dict[str, float]) -> list[str]:
    """The part of the page that one tier fills."""
    total = sum(rows.values()) or 1.0
    files: dict[str, float] = defaultdict(float)
    for name, seconds in rows.items():
        files[name.partition("::")[0]] += seconds
    slowest_files = sorted(files.items(), key=by_seconds)[:FILES]
    named = [(f"`{name}`", seconds) for name, seconds in rows.items()]
    slowest_tests = sorted(named, key=by_seconds)[:TESTS]
    return [
        f"## {heading}: {total / 60:.1f} minutes of all workers",
        "",
        *table("file", slowest_files, total),
        "",
        *table("test", slowest_tests, total),
        "",
    ]


def page(costs: Costs) -> str:
    """The costs as Markdown."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    lines = ["# Where the time of the tests goes", "", f"By `make durations`: {machine}.", ""]
    for tier, heading in TIERS.items():
        lines += section(heading, costs[tier])
    return "\n".join(lines)


def existing() -> set[str]:
    """The names of all tests."""
    command = [sys.executable, "-m", "pytest", "tests", "-m", "", "--collect-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


def main(reports: list[str]) -> int:
    """Write both files; returns the exit code."""
    paths = [Path(report) for report in reports if Path(report).exists()]
    if not paths:
        print("no reports in build/: run `make test` or `make test-release` first", file=sys.stderr)
        return 1
    tests = []
    for path in paths:
        tests += read(path)
    before = json.loads(COSTS.read_text(encoding="utf-8")) if COSTS.exists() else {}
    costs = updated(before, tests, existing())
    COSTS.write_text(f"{json.dumps(costs, indent=0)}\n", encoding="utf-8")
    PAGE.write_text(page(costs), encoding="utf-8")
    print(f"{len(tests)} tests of {len(paths)} reports: wrote {COSTS.name} and {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
