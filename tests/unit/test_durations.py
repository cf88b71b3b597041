"""How long tests take: the costs that CI chooses by, and the page that says so."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools import durations  # tools/ is not installed


def case(name, seconds, tier=None, skipped=False):
    tiers = f'<property name="tier" value="{tier}"/>' if tier else ""
    inside = "<skipped/>" if skipped else ""
    return f"""<testcase time="{seconds}"><properties>
<property name="nodeid" value="{name}"/>{tiers}</properties>{inside}</testcase>"""


REPORT = f"""<testsuites><testsuite>
{case("tests/a.py::test_one", 1.54)}
{case("tests/a.py::test_two[x|y]", 2.0)}
{case("tests/a.py::test_short", 0.04)}
{case("tests/b.py::test_three", 6.5, "release")}
{case("tests/b.py::test_short", 0.04, "release")}
{case("tests/b.py::test_skipped", 9.0, "release", skipped=True)}
{case("tests/c.py::test_lesson", 40.0, "lessons")}
</testsuite></testsuites>"""
NAMES = {
    "tests/a.py::test_one",
    "tests/a.py::test_two[x|y]",
    "tests/a.py::test_short",
    "tests/b.py::test_three",
    "tests/b.py::test_short",
    "tests/b.py::test_skipped",
    "tests/b.py::test_other",
    "tests/c.py::test_lesson",
}


def test_what_was_measured_replaces_what_was_known_and_what_is_gone_is_left_out(tmp_path):
    report = tmp_path / "test.xml"
    report.write_text(REPORT)
    before = {
        "core": {"tests/a.py::test_one": 9.0, "tests/a.py::test_gone": 4.0},
        "release": {"tests/b.py::test_skipped": 8.0, "tests/b.py::test_other": 7.0},
    }
    assert durations.updated(before, durations.read(report), NAMES) == {
        "core": {"tests/a.py::test_one": 1.5, "tests/a.py::test_two[x|y]": 2.0},
        "release": {
            "tests/b.py::test_other": 7.0,
            "tests/b.py::test_short": 0.0,
            "tests/b.py::test_skipped": 8.0,
            "tests/b.py::test_three": 6.5,
        },
        "lessons": {"tests/c.py::test_lesson": 40.0},
    }


def test_a_test_that_moves_to_another_tier_stands_in_that_one_alone(tmp_path):
    report = tmp_path / "test.xml"
    report.write_text(REPORT)
    before = {"core": {"tests/b.py::test_three": 6.0}}
    found = durations.updated(before, durations.read(report), NAMES)
    assert "tests/b.py::test_three" not in found["core"]


def test_files_and_tests_are_listed_longest_first():
    rows = {"tests/a.py::test_one": 1.5, "tests/a.py::test_two[x|y]": 2.0, "tests/b.py::test": 6.5}
    lines = durations.page({"core": rows, "release": {}, "lessons": {}}).splitlines()
    assert (
        "## `make test`, but for the lesson that it executes: 0.2 minutes of all workers" in lines
    )
    assert [line for line in lines if line.startswith("| ") and "seconds" not in line] == [
        "| tests/b.py | 6.5 | 65% |",
        "| tests/a.py | 3.5 | 35% |",
        "| `tests/b.py::test` | 6.5 | 65% |",
        r"| `tests/a.py::test_two[x\|y]` | 2.0 | 20% |",
        "| `tests/a.py::test_one` | 1.5 | 15% |",
    ]


def test_both_files_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(durations, "COSTS", tmp_path / "costs.json")
    monkeypatch.setattr(durations, "PAGE", tmp_path / "durations.md")
    monkeypatch.setattr(durations, "existing", lambda: NAMES)
    report = tmp_path / "test.xml"
    report.write_text(REPORT)
    assert durations.main([str(report), str(tmp_path / "none.xml")]) == 0
    assert capsys.readouterr().out == "6 tests of 1 reports: wrote costs.json and durations.md\n"
    assert json.loads((tmp_path / "costs.json").read_text())["lessons"] == {
        "tests/c.py::test_lesson": 40.0
    }
    assert "test_three" in (tmp_path / "durations.md").read_text()


def test_without_a_report_nothing_is_written(tmp_path, capsys):
    assert durations.main([str(tmp_path / "test.xml")]) == 1
    assert capsys.readouterr().err == (
        "no reports in build/: run `make test` or `make test-release` first\n"
    )
