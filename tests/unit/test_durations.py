"""The page that says where the time of the tests goes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools import durations  # tools/ is not installed

REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_one" time="1.5"/>
<testcase classname="tests.unit.test_a" name="test_two[x|y]" time="2.0"/>
<testcase classname="tests.ranks.test_b" name="test_three" time="6.5"/>
<testcase classname="tests.ranks.test_b" name="test_skipped" time="9.0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_files_and_tests_are_listed_longest_first(tmp_path, capsys):
    report = tmp_path / "test.xml"
    report.write_text(REPORT)
    assert durations.main([str(report)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "## make test: 3 tests, 0.2 minutes of all workers" in lines
    assert [line for line in lines if line.startswith("| ") and "seconds" not in line] == [
        "| tests/ranks/test_b.py | 6.5 | 65% |",
        "| tests/unit/test_a.py | 3.5 | 35% |",
        "| `tests/ranks/test_b.py` test_three | 6.5 | 65% |",
        r"| `tests/unit/test_a.py` test_two[x\|y] | 2.0 | 20% |",
        "| `tests/unit/test_a.py` test_one | 1.5 | 15% |",
    ]


def test_a_missing_report_is_one_line(tmp_path, capsys):
    assert durations.main([str(tmp_path / "test.xml")]) == 1
    assert capsys.readouterr().err == (
        "no test.xml: run `make test` and `make test-release` first\n"
    )
