"""Weights that are not numbers any more are found, and named, before they reach a disk."""

import pytest

from labcode import recipes

CONFIG = recipes.with_changes(
    recipes.gpt_tiny(),
    {
        "model.num_layers": 4,
        "model.num_heads": 2,
        "model.hidden_size": 16,
        "model.context_length": 16,
        "train.global_batch": 4,
        "train.micro_batch": 1,
        "train.eval_batches": 1,
        "train.steps": 2,
    },
)


def found(changes, damage):
    """What `check` says on each rank after one step and the `damage` of (rank, name, key, value).

    The value goes into the first three places of a weight, or of what the optimizer keeps for it.
    """
    import torch.distributed as dist
    from trained import built

    from labcode.train import finite
    from labcode.train.step import TrainStep

    rank = dist.get_rank()
    config = recipes.with_changes(CONFIG, changes)
    training = built(config)
    step = TrainStep(training)
    step()
    params = dict(training.model.module.named_parameters())
    for where, name, key, value in damage:
        if where == rank:
            tensor = (
                params[name].data if key is None else training.optimizer.state[params[name]][key]
            )
            tensor.view(-1)[:3] = value
    texts = []
    for optimizer in (None, training.optimizer):
        try:
            finite.check(training.model, optimizer)
        except finite.Diverged as error:
            texts.append(str(error))
        else:
            texts.append(None)
    return texts


def test_a_healthy_run_passes(ranks2):
    assert ranks2.run(found, {}, []) == [[None, None]] * 2


def test_values_whose_squares_overflow_are_finite(ranks2):
    damage = [(0, "blocks.1.mlp.up.weight", None, 3e38)]
    assert ranks2.run(found, {}, damage) == [[None, None]] * 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_every_rank_names_the_weight_its_rank_and_its_stage(ranks2, value):
    changes = {"parallel.pp": 2, "parallel.pipeline_schedule": "1f1b"}
    text = (
        "blocks.2.mlp.up.weight has 3 values that are not finite on rank 1, pipeline stage 1: "
        "lower optim.lr, or look at the data"
    )
    damage = [(1, "blocks.2.mlp.up.weight", None, value)]
    assert ranks2.run(found, changes, damage) == [[text, text]] * 2


def test_the_first_rank_that_has_one_is_named_and_a_stage_by_its_number_not_its_rank(ranks2):
    changes = {
        "parallel.pp": 2,
        "parallel.stages_per_rank": 2,
        "parallel.pipeline_schedule": "interleaved",
    }
    damage = [(0, "blocks.2.norm1.weight", None, float("nan"))]
    damage.append((1, "blocks.1.norm1.weight", None, float("nan")))
    for weights, both in ranks2.run(found, changes, damage):
        assert weights.startswith("blocks.2.norm1.weight has 3 values")
        assert "on rank 0, pipeline stage 2" in weights
        assert both == weights


def test_the_state_of_the_optimizer_is_looked_at_where_it_is_given(ranks2):
    damage = [(1, "embed.weight", "exp_avg_sq", float("inf"))]
    (weights, both), _ = ranks2.run(found, {"parallel.tp": 2}, damage)
    assert weights is None
    assert both.startswith("exp_avg_sq of embed.weight has 3 values that are not finite on rank 1:")


def test_a_loss_is_called_as_in_the_metrics():
    from labcode.train.finite import Diverged, check_loss

    check_loss("val_loss", 2.5)
    with pytest.raises(Diverged, match=r"val_loss is nan: lower optim\.lr"):
        check_loss("val_loss", float("nan"))
