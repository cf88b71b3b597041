"""What CI says of a red run, and which tests it tries again."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools import ci  # tools/ is not installed

REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_one" time="1.5">
  <properties><property name="nodeid" value="tests/unit/test_a.py::test_one"/></properties>
</testcase>
<testcase classname="tests.unit.test_a" name="test_two" time="2.0">
  <properties><property name="nodeid" value="tests/unit/test_a.py::test_two"/></properties>
  <failure message="AssertionError: assert 1 == 2&#10; +  where">
    def test_two():
&gt;       assert one() == 2
E       AssertionError: assert 1 == 2
E        +  where 1 = one()

tests/unit/test_a.py:3: AssertionError</failure>
</testcase>
<testcase classname="tests.ranks.test_b" name="test_three[a b]" time="6.5">
  <properties>
    <property name="nodeid" value="tests/ranks/test_b.py::test_three[a b]"/>
    <property name="real" value="yes"/>
  </properties>
  <error message="failed on setup">E   OSError: no port</error>
</testcase>
<testcase classname="tests.ranks.test_b" name="test_skipped" time="0"><skipped/></testcase>
</testsuite></testsuites>"""

TWO = ci.Failure("tests/unit/test_a.py::test_two", False, "AssertionError: assert 1 == 2")
THREE = ci.Failure("tests/ranks/test_b.py::test_three[a b]", True, "OSError: no port")


def test_a_report_gives_each_failure_with_the_first_line_of_its_error(tmp_path):
    report = tmp_path / "tests.xml"
    report.write_text(REPORT)
    assert ci.read(report) == ([TWO, THREE], ci.Counts(passed=1, failed=2, skipped=1))


def test_a_report_that_is_missing_or_cut_off_has_no_tests(tmp_path):
    assert ci.read(tmp_path / "none.xml") == ([], ci.Counts())
    (tmp_path / "cut.xml").write_text(REPORT[:300])
    assert ci.read(tmp_path / "cut.xml") == ([], ci.Counts())


def test_only_real_tests_are_tried_again_and_those_that_fail_twice_stay():
    tried = []

    def passes(name, within_s):
        assert 0 < within_s <= 60
        tried.append(name)
        return "three" in name

    again = ci.Failure("tests/slurm/test_c.py::test_four", True, "late")
    assert ci.tried_again([TWO, THREE, again], passes, 60.0) == ([TWO, again], [THREE])
    assert tried == [THREE.name, again.name]


def test_many_failures_are_a_defect_and_nothing_is_tried_again():
    many = [ci.Failure(f"tests/ranks/test_b.py::test[{i}]", True, "late") for i in range(9)]
    assert ci.tried_again(many, lambda *_: True, 60.0) == (many, [])


def test_what_has_no_time_left_for_a_second_try_stays_a_failure():
    assert ci.tried_again([THREE], lambda *_: True, 0.0) == ([THREE], [])


def step(tmp_path, text, code):
    """A step that writes a report and ends with an exit code; None: it writes none."""
    report = tmp_path / "made.xml"
    write = f"open({str(report)!r}, 'w').write({text!r})" if text is not None else ""
    return ci.Step("made", [sys.executable, "-c", f"{write}\nraise SystemExit({code})"], [report])


def test_a_step_that_fails_without_a_failed_test_is_named(tmp_path):
    failures, counts = ci._run(step(tmp_path, "", 3))
    assert failures == [ci.Failure("made", False, "exit code 3, see above")]
    assert counts == ci.Counts()
    assert ci._run(step(tmp_path, "<testsuites/>", 5)) == ([], ci.Counts())
    assert ci._run(step(tmp_path, REPORT, 1))[0] == [TWO, THREE]
    lost = ci.Failure("made", False, "exit code 0, and no made.xml: see above")
    assert ci._run(step(tmp_path, None, 0))[0] == [lost]
    plain = ci.Step("plain", [sys.executable, "-c", "raise SystemExit(2)"])
    assert ci._run(plain)[0] == [ci.Failure("plain", False, "exit code 2, see above")]


def test_the_last_lines_say_what_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ci, "BUILD", tmp_path)
    monkeypatch.setattr(ci, "STEPS", (step(tmp_path, REPORT, 1),))
    monkeypatch.setattr(ci, "run_alone", lambda *_: True)
    assert ci.main() == 1
    assert capsys.readouterr().out.splitlines()[-4:] == [
        f"FLAKY {THREE.name}: {THREE.error} (enter it in tests/flaky.md)",
        f"FAILED {TWO.name}: {TWO.error}",
        "2 passed, 1 failed, 1 skipped",
        "red",
    ]
