"""The reference runs are those of the recipes as they are: their first steps, done again."""

import json

import pytest
from trained import built

from labcode import recipes
from labcode.run import reference_runs
from labcode.train.step import TrainStep

pytestmark = pytest.mark.release

MOST_BYTES = 100_000


def first_losses(rank, name, steps):
    config = recipes.get(name)
    training = built(config)
    step = TrainStep(training)
    return [step().loss.item() for _ in range(steps)]


@pytest.mark.parametrize(("name", "steps"), [("gpt_tiny", 30), ("vit_tiny", 10)])
def test_its_first_steps_give_the_same_losses_today(ranks1, name, steps):
    rows = [row for row in reference_runs.rows(name) if "loss" in row and row["step"] <= steps]
    (losses,) = ranks1.run(first_losses, name, steps)
    assert rows
    for row in rows:
        # float32: threads and processors add up in another order
        assert losses[row["step"] - 1] == pytest.approx(row["loss"], rel=1e-3), (
            f"{name} is not what it was: python -m tools.reference_runs {name}"
        )


@pytest.mark.parametrize("name", reference_runs.names())
def test_it_is_small_and_whole(name):
    config = recipes.get(name)
    rows = reference_runs.rows(name)
    assert {row["step"] for row in rows} >= {10, config.train.steps}
    assert {key for row in rows for key in row} == set(reference_runs.KEPT)
    validations = [row["val_loss"] for row in rows if "val_loss" in row]
    assert validations[-1] < validations[0] < rows[0]["loss"]
    about = json.loads((reference_runs.folder(name) / "about.json").read_text())
    assert about["config"]["train"]["steps"] == config.train.steps
    (log,) = reference_runs.folder(name).glob("tensorboard/*")
    for path in (log, reference_runs.folder(name) / "metrics.jsonl"):
        assert path.stat().st_size < MOST_BYTES
    assert b"loss" in log.read_bytes()


def test_a_recipe_without_one_is_named():
    with pytest.raises(ValueError, match="unknown reference run 'gpt_10m'"):
        reference_runs.folder("gpt_10m")
