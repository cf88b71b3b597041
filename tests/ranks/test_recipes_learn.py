"""The recipes learn what they promise, run as people run them."""

import re
import subprocess
import sys

import pytest

from labcode.config import TextData
from labcode.data import text
from labcode.train import metrics


def train(recipe, cwd, *changes):
    command = [sys.executable, "-m", "labcode.train", recipe, "--train.out", "run", *changes]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return metrics.read(cwd / "run"), (cwd / "run" / "result.txt").read_text()


@pytest.mark.slow
def test_gpt_tiny_falls_far_below_unigram_entropy_and_writes_in_the_layout_of_a_play(tmp_path):
    rows, sample = train("gpt_tiny", tmp_path, "--train.sample_tokens", "1000")  # in 300 there may be no speaker
    unigram = text.load(TextData(), 128).train.unigram_entropy()
    assert rows[-1]["val_loss"] < 0.6 * unigram
    lines = sample.splitlines()
    assert len(sample) > 200
    assert sum(re.fullmatch(r"[A-Z][A-Z' .]+[:.]?", line) is not None for line in lines) >= 1, sample  # a speaker
    assert max(map(len, lines)) < 90  # verse and speech are broken into lines
    assert sum(character.islower() or character == " " for character in sample) > 0.6 * len(sample)


@pytest.mark.slow
def test_vit_tiny_beats_persistence_on_held_out_times(tmp_path):
    _, table = train("vit_tiny", tmp_path)
    rows = re.findall(r"(\w+) +([\d.]+) +([\d.]+)\n", table)
    assert [name for name, _, _ in rows] == ["t2m", "u10", "v10", "msl"]
    assert all(float(model) < float(persistence) for _, model, persistence in rows), table
