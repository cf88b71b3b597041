"""LAMB and LARS in a run: every grid that is allowed, and after a restart."""

import pytest
import torch
from test_noise_scale_runs import BASE

from labcode import recipes

CONFIG = recipes.with_changes(
    recipes.gpt_tiny(),
    BASE
    | {
        "model.num_layers": 2,
        "optim.weight_decay": 0.3,
        "train.noise_scale": False,
        "checkpoint.every": 2,
        "checkpoint.keep": 9,
    },
)
OPTIMIZERS = {
    "lamb": {"optim.name": "lamb", "optim.lr": 1e-2},
    "lars": {"optim.name": "lars", "optim.lr": 1.0, "optim.beta1": 0.9},
}
GRIDS = {
    "dp 2": {},
    "pp 2, tied weights on both": {"parallel.pp": 2, "train.micro_batch": 1},
    "cp 2": {"parallel.cp": 2},
}


def fit(config, out, start=None):
    """(Loss and gradient norm of each step, the final weights) of one run in this pool."""
    from trained import built

    from labcode.run import run

    training = built(config, start)
    rows = [(row["loss"], row["grad_norm"]) for row in run.train(training, out) if "loss" in row]
    return rows, {name: tensor.clone() for name, tensor in training.model.full_state_dict()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_grid_that_is_allowed_trains_like_one_process(ranks1, ranks2, tmp_path, name):
    config = recipes.with_changes(CONFIG, OPTIMIZERS[name])
    for folder in ("whole", *GRIDS):
        (tmp_path / folder).mkdir()
    ((rows, weights),) = ranks1.run(fit, config, tmp_path / "whole")
    assert rows[0][0] > rows[-1][0] + 1e-3  # it learns
    assert max(norm for _, norm in rows) > config.optim.clip_norm  # and is clipped
    for grid, changes in GRIDS.items():
        found = ranks2.run(fit, recipes.with_changes(config, changes), tmp_path / grid)
        for own_rows, own_weights in found:
            assert torch.tensor(own_rows) == pytest.approx(torch.tensor(rows), abs=1e-9)
            torch.testing.assert_close(own_weights, weights, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restart_changes_no_bit(ranks2, tmp_path, name):
    config = recipes.with_changes(CONFIG, OPTIMIZERS[name])
    (rows, weights), _ = ranks2.run(fit, config, tmp_path)
    start = tmp_path / "checkpoints" / "step-00000002"
    (again, restarted), _ = ranks2.run(fit, config, tmp_path, start)
    assert again == rows[2:]
    torch.testing.assert_close(restarted, weights, rtol=0, atol=0)
