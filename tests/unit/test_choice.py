"""What CI chooses from the release tier: by whose turn it is, and by what a change touches."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import changed
import choice
import pytest
from choice import ITSELF, NOT, THROUGH, Candidate

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import ci  # noqa: E402  (tools/ is not installed)

HOUR = 3600


class SimpleItem:
    """What is asked of a test of pytest's."""

    def __init__(self, nodeid, exercise):
        self.nodeid = nodeid
        self.originalname = nodeid.partition("::")[2].partition("[")[0]
        self.callspec = SimpleNamespace(params={"exercise": exercise})


def tier(touched=()):
    """A hundred tests of ten files, a second to ten seconds each."""
    found = []
    for number in range(100):
        subject = f"file {number % 10}"
        how = THROUGH if subject in touched else NOT
        found.append(Candidate(f"test {number:02}", subject, 1.0 + number % 10, how))
    return found


def seconds(candidates, names):
    return sum(each.seconds for each in candidates if each.name in names)


def test_within_eight_landings_each_test_runs_and_none_takes_much_longer():
    candidates = tier()
    eighth = seconds(candidates, {each.name for each in candidates}) / choice.TURNS
    ran = []
    for turn in range(choice.TURNS):
        names = choice.chosen(candidates, turn, budget_s=0.0)
        assert seconds(candidates, names) < eighth + 10
        ran += names
    assert sorted(ran) == sorted(each.name for each in candidates)
    assert choice.chosen(candidates, choice.TURNS, 0.0) == choice.chosen(candidates, 0, 0.0)


@pytest.mark.parametrize("count", [1, 3, 10])
def test_a_change_of_any_size_is_proved_once_in_each_subject_within_the_budget(count):
    subjects = [f"file {number}" for number in range(count)]
    candidates = tier(subjects)
    in_turn = choice.chosen(tier(), 3, 0.0)
    names = choice.chosen(candidates, 3, budget_s=120.0)
    assert in_turn <= names
    assert seconds(candidates, names - in_turn) <= 120
    proved = {each.subject for each in candidates if each.name in names}
    assert proved >= set(subjects)


def test_what_ran_the_longest_ago_comes_first():
    candidates = tier(["file 3"])
    _, later = choice.in_turn(candidates, 0)
    waiting = [each.name for each in later if each.touched]
    names = choice.chosen(candidates, 0, budget_s=8.0) - choice.chosen(tier(), 0, 0.0)
    assert names == set(waiting[:2])  # they take four seconds each
    turns = []
    for name in waiting:
        turns.append(next(i for i in range(8) if name in choice.chosen(tier(), i, 0.0)))
    assert turns == sorted(turns)


def test_tests_that_share_something_stand_beside_each_other():
    alone = tier()
    beside = [dataclasses.replace(each, beside="book") for each in alone[:7]]
    runs = []
    for turn in range(choice.TURNS):
        names = choice.chosen([*beside, *alone[7:]], turn, 0.0)
        runs.append(len(names & {each.name for each in beside}))
    assert sorted(runs)[-2:] in ([0, 7], [1, 6], [2, 5], [3, 4])


def test_each_subject_has_a_test_where_none_fits_and_what_changed_itself_is_before_the_others():
    candidates = [
        Candidate("a", "one", 50.0, THROUGH),
        Candidate("b", "one", 40.0, THROUGH),
        Candidate("c", "two", 30.0, THROUGH),
        Candidate("d", "two", 30.0, ITSELF),
    ]
    assert choice._touched(candidates, set(), 20.0) == {"b", "d"}
    assert choice._touched(candidates, set(), 70.0) == {"b", "d"}
    assert choice._touched(candidates, {"a"}, 30.0) == {"d"}
    assert choice._touched(candidates, set(), 500.0) == {"a", "b", "c", "d"}


def test_commits_of_one_landing_lie_close_together():
    assert choice.landings([]) == 0
    assert choice.landings([9 * HOUR, 0, 10 * HOUR, 600, 30 * HOUR]) == 3


def test_a_lesson_is_touched_by_its_code_and_quoted_outputs_and_not_by_its_prose(monkeypatch):
    notebook = sorted((ROOT / "solutions").glob("04_*.ipynb"))[0]
    path = notebook.relative_to(ROOT).as_posix()
    before = notebook.read_text()

    def lesson(text):
        monkeypatch.setattr(changed, "git", lambda *_: text.split("\n"))
        return changed.Change({path}, "a commit").lessons["04"]

    assert lesson(before) == NOT
    assert lesson(before.replace("# Recap", "# In short")) == NOT
    assert lesson(before.replace("ranks.close()", "ranks.restart()")) == ITSELF
    assert lesson("") == ITSELF
    assert changed.Change({"course/exercises/l04.py"}).lessons["04"] == THROUGH
    assert changed.Change({"README.md"}).lessons["04"] == NOT


@pytest.mark.parametrize(
    "path", ["check.py", "exercises/expect.py", "exercises/simulated/baton.py"]
)
def test_what_all_checks_stand_on_touches_the_kept_answers(path):
    name = "tests/exercises/test_answers.py::test_a_right_answer_passes[3.5 x]"
    item = SimpleItem(name, "3.5")
    assert changed.Change({f"course/{path}"}).touches(item) == THROUGH
    assert changed.Change({"course/progress.py"}).touches(item) == NOT


def test_what_tests_tell_a_story_of_is_there():
    for tests, subjects in changed.SUBJECTS.items():
        for pattern in (tests, *subjects):
            assert list(ROOT.glob(pattern)), f"no file is {pattern}: correct SUBJECTS"


def collected(*arguments):
    command = [sys.executable, "-m", "pytest", "--collect-only", "tests/unit/test_l16_labs.py"]
    command += [*arguments, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.release
def test_only_tests_marked_release_are_left_to_another_run():
    assert collected() <= collected("-m", "", "--budget=0") <= collected("-m", "")
    assert collected() <= collected("-m", "", "--changed") <= collected("-m", "")


# ---- how long a landing takes

SET_UP_S = 110  # packages of Debian, and a fresh environment
CHECK_S = 40
SHORT_S = 80  # those tests of `make test` that are too short to be listed, and their collection
BY_MAKE_TEST = "test_solution_runs_and_says_what_is_stored[08_"
WORKERS = 2


def test_a_landing_takes_25_minutes_whatever_it_changes():
    """By the times of tests/costs.json, on two quiet cores; `make test` takes ten of them.

    If it does not hold, prove once what is proved twice, at the lowest level that can prove it.
    """
    tiers = json.loads(choice.COSTS.read_text(encoding="utf-8"))
    core_s = (sum(tiers["core"].values()) + SHORT_S) / WORKERS
    in_turn_s = sum(tiers["release"].values()) / choice.TURNS / WORKERS
    lessons_s = sum(tiers["lessons"].values()) / choice.TURNS
    executed_s = sum(each for name, each in tiers["lessons"].items() if BY_MAKE_TEST in name)
    touched_s = 2 * float(ci.TOUCHED_S) + ci.SECOND_TRIES_S
    assert 0 < executed_s < 600 - core_s
    fixed_s = SET_UP_S + CHECK_S + core_s + executed_s
    assert fixed_s + in_turn_s + lessons_s + touched_s < 1500
