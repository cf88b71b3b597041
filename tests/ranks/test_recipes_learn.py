"""The recipes learn what they promise, run as people run them: minutes each."""

import re
import subprocess
import sys

import pytest

from labcode.config import TextData
from labcode.data import text
from labcode.measure import metrics

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]


def train(recipe, folder):
    """Run a recipe as it is, with the command that the README names."""
    command = [sys.executable, "-m", "labcode.train", recipe, "--train.out", "run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_gpt_tiny_falls_far_below_unigram_entropy(tmp_path):
    train("gpt_tiny", tmp_path)
    unigram = text.load(TextData(), 128).train.unigram_entropy()
    assert metrics.read(tmp_path / "run")[-1]["val_loss"] < 0.6 * unigram


def test_gpt_moe_tiny_does_so_too_with_all_of_its_experts(tmp_path):
    train("gpt_moe_tiny", tmp_path)
    unigram = text.load(TextData(), 128).train.unigram_entropy()
    rows = metrics.read(tmp_path / "run")
    assert rows[-1]["val_loss"] < 0.6 * unigram
    # 4 would be the collapse to the same 2 of 8 experts for all characters
    last = [row["expert_load"] for row in rows if "expert_load" in row][-10:]
    assert sum(last) / len(last) < 2.5


def test_vit_tiny_beats_persistence_on_held_out_times(tmp_path):
    train("vit_tiny", tmp_path)
    table = (tmp_path / "run" / "result.txt").read_text()
    rows = re.findall(r"(\w+) +([\d.]+) +([\d.]+)\n", table)
    assert [name for name, _, _ in rows] == ["t2m", "u10", "v10", "msl"]
    assert all(float(model) < float(persistence) for _, model, persistence in rows), table
