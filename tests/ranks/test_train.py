"""The training loop over several ranks against one process: the same recipe, the same numbers."""

import numpy as np
import pytest
import torch

from labcode import recipes

GPT = recipes.with_changes(
    recipes.gpt_tiny(),
    {
        "model.num_layers": 2,
        "model.num_heads": 2,
        "model.hidden_size": 16,
        "model.context_length": 32,
        "optim.warmup_steps": 2,
        "optim.clip_norm": 0.5,  # below the norms of the first steps, so that clipping happens
        "train.steps": 6,
        "train.global_batch": 8,
        "train.dtype": "float64",
        "train.eval_every": 3,
        "train.eval_batches": 2,
        "train.log_every": 1,
    },
)
VIT = recipes.with_changes(
    recipes.vit_tiny(),
    {
        "model.num_layers": 1,
        "model.num_heads": 2,
        "model.hidden_size": 16,
        "model.patch_size": 30,
        "optim.warmup_steps": 2,
        "optim.clip_norm": 0.003,
        "train.steps": 6,
        "train.global_batch": 4,
        "train.dtype": "float64",
        "train.eval_every": 3,
        "train.log_every": 1,
    },
)
CONFIGS = {"gpt": GPT, "gpt with rotary positions": recipes.with_changes(GPT, {"model.positions": "rotary"}), "vit": VIT}


def fit(config):
    """(loss, gradient norm and rate of each step; validation losses; final weights) of one run in this pool."""
    import torch.distributed as dist

    from labcode.comm.bootstrap import World
    from labcode.comm.grid import Grid
    from labcode.train.loop import Trainer
    from labcode.train.tasks import make_task

    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    torch.manual_seed(rank)  # ranks are seeded differently: nothing may depend on it
    trainer = Trainer(config, world, Grid.create(config.check(size)), make_task(config), out=None)
    rows = trainer.fit()
    steps = np.array([(row["loss"], row["grad_norm"], row["lr"]) for row in rows if "loss" in row])
    validation = [row["val_loss"] for row in rows if "val_loss" in row]
    return steps, validation, {name: p.detach() for name, p in trainer.model.module.named_parameters()}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_dp_size_trains_like_one_process(ranks1, ranks2, ranks4, name):
    config = CONFIGS[name]
    steps, validation, weights = ranks1.run(fit, config)[0]
    assert len(steps) == 6 and len(validation) == 2
    assert max(norm for _, norm, _ in steps) > config.optim.clip_norm
    assert len(set(steps[:, 0])) == 6
    variants = [(ranks1, {"train.micro_batch": 2})]
    for pool in (ranks2, ranks4):
        variants += [(pool, {"train.micro_batch": 1}), (pool, {"train.data_parallel": "labcode", "train.bucket_mb": 1e-3})]
    for pool, changes in variants:
        for other_steps, other_validation, other_weights in pool.run(fit, recipes.with_changes(config, changes)):
            torch.testing.assert_close(torch.tensor(other_steps), torch.tensor(steps), rtol=0, atol=1e-9)
            torch.testing.assert_close(other_validation, validation, rtol=0, atol=1e-9)
            torch.testing.assert_close(other_weights, weights, rtol=0, atol=1e-9)


def diverge(config):
    from labcode.train.loop import Diverged

    try:
        fit(config)
    except Diverged as error:
        return str(error)
    return None


def test_a_run_that_diverges_stops_on_every_rank_with_one_line(ranks2):
    wild = recipes.with_changes(GPT, {"optim.lr": 1e300, "optim.min_lr": 1e300, "optim.clip_norm": 0})
    messages = set(ranks2.run(diverge, wild))
    assert len(messages) == 1
    assert "lower optim.lr" in messages.pop()
