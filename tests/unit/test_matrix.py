"""The table of versions says what passed, what failed by name, and what could not be tried."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import matrix  # noqa: E402  (tools/ is not installed)

REPORT = """<testsuites><testsuite time="120">
<testcase classname="tests.ranks.test_zero" name="test_a" time="1"/>
<testcase classname="tests.ranks.test_zero" name="test_b" time="1"><failure/></testcase>
<testcase classname="tests.ranks.test_zero" name="test_c" time="1"><error/></testcase>
<testcase classname="tests.ranks.test_zero" name="test_d"><skipped message="too old"/></testcase>
</testsuite></testsuites>"""


def test_the_table_says_what_passed_what_failed_and_what_was_not_tried(tmp_path):
    matrix.report_of("3.11", "2.15.0", tmp_path).write_text(REPORT)
    tried = matrix.read("3.11", "2.15.0", tmp_path)
    absent = matrix.read("3.14", "2.15.0", tmp_path)
    text = matrix.page([tried, absent])
    assert "| 3.11 | 2.15.0 | 1 | 2 | 1 | 2 |\n" in text
    assert "| 3.14 | 2.15.0 | not tried" in text
    assert "- `test_zero::test_b`\n- `test_zero::test_c`\n" in text
    assert "- too old (tests: 1)\n" in text


def test_the_matrix_has_every_version_that_the_project_promises_and_files_that_exist():
    assert all((ROOT / name).is_file() for name in matrix.tests_of("3.12"))
    promised = (ROOT / "pyproject.toml").read_text()
    assert '"torch>=2.11,<2.16"' in promised and 'requires-python = ">=3.11"' in promised
    assert {torch for _, torch in matrix.VERSIONS} == {f"2.{minor}.0" for minor in range(11, 16)}
    assert {python for python, _ in matrix.VERSIONS} >= {"3.11", "3.12", "3.13", "3.14"}
    pinned = (ROOT / "constraints.txt").read_text().split("\ntorch==")[1].split("\n")[0]
    assert ("3.11", pinned) in matrix.VERSIONS
