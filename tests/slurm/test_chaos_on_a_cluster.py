"""A training on the nodes of a real cluster: the network is cut, a rank is killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults.chaos import account

SMALL = (
    "--model.num_layers=2",
    "--model.hidden_size=32",
    "--model.num_heads=2",
    "--model.context_length=32",
    "--train.global_batch=4",
    "--train.steps=40",
)


@pytest.mark.release
@pytest.mark.timeout(900)
def test_a_training_whose_network_is_cut_ends_as_the_one_that_nobody_disturbed(
    breakable2, tmp_path
):
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.faults", "chaos", "gpt_tiny", *SMALL]
    command += [f"--cluster={breakable2.name}", f"--result={result}", "--faults=2", "--seed=2"]
    done = subprocess.run(
        [*command, "--kinds", "cut", "kill"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = account.read(result)
    assert sorted(outcome.kind for outcome in found.outcomes) == ["cut", "kill"]
    assert found.complaints() == [] and found.rounds_equal == found.rounds >= 1
    assert breakable2.exec(["squeue", "--noheader"]).stdout == ""
