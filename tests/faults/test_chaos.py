"""A training run that is disturbed: plan, account and command line, and a run of three faults."""

import collections
import json

import pytest
from faults.chaos import account, inject
from faults.chaos.account import Account, Outcome, bytes_lost
from faults.chaos.command import main
from faults.chaos.job import Seen
from faults.chaos.plan import KINDS, plan
from faults.chaos.small import disturbed


def test_a_seed_gives_its_faults_and_every_kind_comes_equally_often():
    faults = plan(3, 100, kinds=list(KINDS), every=5, ranks=4)
    assert faults == plan(3, 100, kinds=list(KINDS), every=5, ranks=4)
    assert faults != plan(4, 100, kinds=list(KINDS), every=5, ranks=4)
    assert [fault.number for fault in faults] == list(range(1, 101))
    counts = collections.Counter(fault.kind for fault in faults)
    assert counts.keys() == KINDS.keys()
    assert max(counts.values()) - min(counts.values()) <= 1
    assert {fault.rank for fault in faults} == {0, 1, 2, 3}
    assert {fault.after_steps for fault in faults} == set(range(1, 11))


def test_every_kind_can_be_done_and_an_unknown_one_is_refused():
    assert inject._INJECT.keys() == KINDS.keys()
    with pytest.raises(ValueError, match=r"^unknown kind of fault 'kil': did you mean kill"):
        plan(1, 1, kinds=["kil"], every=5, ranks=1)


ROWS = [(step, b'{"step": %d}' % step) for step in range(1, 8)]


@pytest.mark.parametrize(
    ("before", "whole", "resumed", "now", "lost"),
    [
        ({5: 100}, {5: 100}, 5, ROWS[:5], 0),
        ({5: 100}, {}, 0, [], 100),  # it was there, and is gone
        ({}, {5: 100}, 0, [], 100),  # it is there, and was not resumed from
        ({5: 100}, {5: 100, 7: 90}, 7, ROWS, 0),
        ({5: 100}, {5: 100, 7: 90}, 5, ROWS[:5], 90),
        ({5: 100, 3: 80}, {5: 100}, 5, ROWS[:5], 0),  # an old one was removed by checkpoint.keep
        ({5: 100}, {5: 100}, 5, ROWS[:3], 2 * len(ROWS[0][1])),  # rows of steps 4 and 5
        ({5: 100}, {5: 100}, 5, [*ROWS[:4], (5, b"other")], len(ROWS[0][1])),
    ],
)
def test_bytes_are_lost_with_a_checkpoint_and_with_a_row_of_metrics(
    before, whole, resumed, now, lost
):
    assert bytes_lost(before, Seen(7, ROWS, whole), resumed, now) == lost


def outcome(kind, steps_lost=0, bytes_lost=0, why=""):
    return Outcome(1, kind, 1, not why, 9, 9 - steps_lost, steps_lost, bytes_lost, 1.0, why)


def an_account(*outcomes, rounds_equal=2):
    return Account("gpt_tiny", 2, 1, 5, 2, rounds_equal, 0, [], list(outcomes), {"torch": "2"})


def test_an_account_is_good_if_nothing_is_lost_beyond_one_interval():
    assert an_account(outcome("kill", steps_lost=5)).good
    bad = [
        (an_account(outcome("kill", steps_lost=6)), "fault 1 (kill, at step 9) cost 6 steps"),
        (an_account(outcome("kill", bytes_lost=3)), "fault 1 (kill, at step 9) cost 3 bytes"),
        (an_account(outcome("kill", why="x")), "fault 1 (kill, at step 9) was not survived: x"),
        (an_account(rounds_equal=1), "1 of 2 trainings ended otherwise than undisturbed"),
    ]
    for found, complaint in bad:
        assert not found.good
        assert found.complaints() == [complaint]


def test_the_table_has_a_row_for_each_kind_and_is_read_back_from_its_file(tmp_path):
    outcomes = [outcome("kill", 4), outcome("hang", 1, 2), outcome("kill", 3, why="it hung")]
    written = an_account(*outcomes)
    written.write(tmp_path / "a.json")
    found = account.read(tmp_path / "a.json")
    assert found == written
    *_, kill, hang, everything = account.table(found).splitlines()
    assert kill == "| SIGKILL to a rank | 2 | 1 | 7 | 4 | 0 |"
    assert hang.endswith("| 1 | 1 | 1 | 1 | 2 |")
    assert everything == "| **all** | 3 | 2 | 8 | 4 | 2 |"
    (tmp_path / "b.json").write_text(json.dumps({"seed": 1}))
    with pytest.raises(ValueError, match=r"b\.json is no account of faults"):
        account.read(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt_tin"], "unknown recipe 'gpt_tin'"),
        (["gpt_tiny", "--train.stepz=3"], "unknown field --train.stepz"),
        (["gpt_tiny", "--train.out=x"], "--train.out=x is chosen by chaos itself: leave it out"),
        (["gpt_tiny", "--checkpoint.keep=1"], "a run that is disturbed needs"),
        (["gpt_tiny", "--train.steps=10"], "train.steps=10 leaves no room for faults"),
        (["gpt_tiny", "--kinds", "kil"], "unknown kind of fault 'kil': did you mean kill"),
        (["gpt_tiny", "--faults=0"], "--faults and --ranks are counts"),
        (["gpt_tiny", "--ranks=3"], "global_batch=16 is not a multiple of"),
        (["gpt_tiny", "--cluster=none-such"], "no cluster 'none-such' is up on this machine"),
        (["gpt_tiny", "--kinds", "cut"], "cut: one machine has no network to cut; give --cluster"),
    ],
)
def test_what_cannot_be_played_is_one_line(words, message, capsys):
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith(f"error: {message}")


@pytest.mark.release
def test_a_training_that_is_killed_and_damaged_ends_as_the_one_that_nobody_disturbed(tmp_path):
    faults = ["--faults=3", "--kinds", "kill_saving", "corrupt", "starve"]
    found, said = disturbed(faults, tmp_path)
    assert account.table(found) in said
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert len(found.outcomes) == 3 and found.complaints() == []
    assert found.rounds_equal == found.rounds >= 1
