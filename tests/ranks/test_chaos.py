"""Trainings under torchrun that are disturbed, by a short plan and by one with every fault."""

import subprocess
import sys

import pytest

from labcode.train.chaos import account
from labcode.train.chaos.plan import KINDS

pytestmark = pytest.mark.release

SMALL = (
    "--model.num_layers=2",
    "--model.hidden_size=32",
    "--model.num_heads=2",
    "--model.context_length=32",
    "--train.global_batch=4",
)


def played(tmp_path, *words):
    """The account of a chaos run that lost nothing, with what it printed."""
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "labcode.train.chaos", "gpt_tiny", *SMALL, *words]
    done = subprocess.run(
        [*command, f"--result={result}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = account.read(result)
    assert account.table(found) in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    return found


def check(found, count):
    assert len(found.outcomes) == count
    assert all(outcome.survived for outcome in found.outcomes)
    assert max(outcome.steps_lost for outcome in found.outcomes) <= found.every
    assert sum(outcome.bytes_lost for outcome in found.outcomes) == 0
    assert found.rounds_equal == found.rounds >= 1


def test_a_training_that_is_killed_and_damaged_ends_as_the_one_that_nobody_disturbed(tmp_path):
    kinds = ("kill_saving", "corrupt", "starve")
    check(played(tmp_path, "--faults=3", "--train.steps=40", "--kinds", *kinds), 3)


@pytest.mark.release
def test_every_kind_of_fault_is_survived(tmp_path):
    found = played(tmp_path, f"--faults={len(KINDS)}", "--seed=7")
    left_out = [line for line in found.left_out if line.partition(":")[0] in KINDS]
    check(found, len(KINDS))
    assert len({outcome.kind for outcome in found.outcomes}) == len(KINDS) - len(left_out)
