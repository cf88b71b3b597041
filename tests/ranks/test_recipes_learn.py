"""The recipes learn what they promise, run as people run them.

Both train in the background, on one core each, and give way to all other tests.
"""

import os
import re
import subprocess
import sys

import pytest

from labcode.config import TextData
from labcode.data import text
from labcode.train import metrics

RUNS = {
    "gpt_tiny": ("--train.sample_tokens", "1000"),  # in 300 tokens there may be no speaker
    "vit_tiny": (),
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.usefixtures("runs")]


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """{recipe: (process, its folder)}."""
    running = {}
    for recipe, changes in RUNS.items():
        folder = tmp_path_factory.mktemp(recipe)
        command = [
            "nice",
            "-n",
            "19",
            sys.executable,
            "-m",
            "labcode.train",
            recipe,
            "--train.out",
            "run",
            *changes,
        ]
        with open(folder / "said", "w") as said:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            running[recipe] = (
                subprocess.Popen(command, cwd=folder, env=env, stdout=said, stderr=said),
                folder,
            )
    yield running
    for process, _ in running.values():
        process.kill()
        process.wait()


def trained(runs, recipe):
    process, folder = runs[recipe]
    assert process.wait(timeout=1400) == 0, (folder / "said").read_text()
    return metrics.read(folder / "run"), (folder / "run" / "result.txt").read_text()


def test_both_begin(runs):
    assert [process.poll() for process, _ in runs.values()] in ([None, None], [0, 0])


@pytest.mark.waits
def test_gpt_tiny_falls_far_below_unigram_entropy_and_writes_in_the_layout_of_a_play(runs):
    rows, sample = trained(runs, "gpt_tiny")
    unigram = text.load(TextData(), 128).train.unigram_entropy()
    assert rows[-1]["val_loss"] < 0.6 * unigram
    lines = sample.splitlines()
    assert len(sample) > 200
    # a speaker
    assert sum(re.fullmatch(r"[A-Z][A-Z' .]+[:.]?", line) is not None for line in lines) >= 1, (
        sample
    )
    assert max(map(len, lines)) < 90  # verse and speech are broken into lines
    assert sum(character.islower() or character == " " for character in sample) > 0.6 * len(sample)


@pytest.mark.waits
def test_vit_tiny_beats_persistence_on_held_out_times(runs):
    _, table = trained(runs, "vit_tiny")
    rows = re.findall(r"(\w+) +([\d.]+) +([\d.]+)\n", table)
    assert [name for name, _, _ in rows] == ["t2m", "u10", "v10", "msl"]
    assert all(float(model) < float(persistence) for _, model, persistence in rows), table
