"""The reference runs are those of the recipes as they are: their first steps, done again."""

import json
import sys
from pathlib import Path

import pytest
from trained import built

from labcode import recipes
from labcode.measure import metrics
from labcode.train.step import TrainStep

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools import reference_runs  # tools/ is not installed

pytestmark = pytest.mark.release

MOST_BYTES = 100_000


def first_losses(rank, name, steps):
    config = recipes.get(name)
    training = built(config)
    step = TrainStep(training)
    return [step().loss.item() for _ in range(steps)]


@pytest.mark.parametrize(("name", "steps"), [("gpt_tiny", 30), ("vit_tiny", 10)])
def test_its_first_steps_give_the_same_losses_today(ranks1, name, steps):
    rows = [
        row
        for row in metrics.read(reference_runs.FOLDER / name)
        if "loss" in row and row["step"] <= steps
    ]
    (losses,) = ranks1.run(first_losses, name, steps)
    assert rows
    for row in rows:
        # float32: threads and processors add up in another order
        assert losses[row["step"] - 1] == pytest.approx(row["loss"], rel=1e-3), (
            f"{name} is not what it was: python -m tools.reference_runs {name}"
        )


@pytest.mark.parametrize("name", reference_runs.RECIPES)
def test_it_is_small_and_whole(name):
    config = recipes.get(name)
    folder = reference_runs.FOLDER / name
    rows = metrics.read(folder)
    assert {row["step"] for row in rows} >= {10, config.train.steps}
    assert {key for row in rows for key in row} == set(reference_runs.KEPT)
    validations = [row["val_loss"] for row in rows if "val_loss" in row]
    assert validations[-1] < validations[0] < rows[0]["loss"]
    about = json.loads((folder / "about.json").read_text())
    assert about["config"]["train"]["steps"] == config.train.steps
    (log,) = folder.glob("tensorboard/*")
    for path in (log, folder / "metrics.jsonl"):
        assert path.stat().st_size < MOST_BYTES
    assert b"loss" in log.read_bytes()
