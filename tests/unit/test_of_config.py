"""Runs of the course as the planner sees them."""

import pytest

from labcode import recipes
from labcode.perf.cluster import load_gpu
from labcode.perf.layout_memory import layout_memory
from labcode.perf.of_config import SHIPPED_GRID, SHIPPED_TOKENS, model_of, settings_of
from labcode.perf.training_memory import training_memory
from labcode.topology import GridShape


def test_the_shipped_data_has_the_sizes_that_are_planned_for():
    from labcode.train.tasks import make_task

    text = recipes.get("gpt_tiny")
    assert make_task(text).model_config.vocab_size == SHIPPED_TOKENS
    assert model_of(text).outputs == SHIPPED_TOKENS
    weather = recipes.with_changes(recipes.get("vit_tiny"), {"data.sun": True})
    sized = make_task(weather).model_config
    assert (sized.lat, sized.lon) == SHIPPED_GRID
    assert model_of(weather).num_parameters == sized.num_parameters


def test_the_settings_are_those_of_the_run():
    changes = {"parallel.zero_stage": 1, "train.dtype": "bfloat16", "train.micro_batch": 2}
    config = recipes.with_changes(recipes.get("gpt_10m"), changes)
    found = settings_of(config, GridShape(dp=4), load_gpu("a100-40gb"))
    assert (found.micro_batch, found.zero_stage, found.dtype) == (2, 1, "bfloat16")
    assert (found.weight_bytes, found.optimizer_bytes) == (4, 8)
    assert found.global_batch == config.train.global_batch


def test_auto_is_what_the_gpu_has():
    config = recipes.get("gpt_10m")
    assert config.train.dtype == "auto"
    for gpu, dtype in (("a100-40gb", "bfloat16"), ("v100-32gb", "float32")):
        assert settings_of(config, GridShape(dp=4), load_gpu(gpu)).dtype == dtype


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_kept_for_backward_is_that_of_the_training(dtype, checkpointing):
    """Under autocast too, with wide residuals."""
    changes = {
        "model.vocab_size": 50257,
        "model.hidden_size": 1024,
        "model.num_layers": 24,
        "model.num_heads": 16,
        "model.context_length": 1024,
        "model.dropout": 0.0,
        "train.global_batch": 8,
        "train.dtype": dtype,
        "parallel.activation_checkpointing": checkpointing,
    }
    config = recipes.with_changes(recipes.get("gpt_tiny"), changes)
    settings = settings_of(config, GridShape(), load_gpu("a100-80gb"))
    planned = layout_memory(model_of(config), GridShape(), settings)
    kept = training_memory(
        config.model,
        dtype=dtype,
        micro_batch=settings.micro_batch,
        activation_checkpointing=checkpointing,
    )
    assert planned["activations"] == pytest.approx(kept.activations, rel=0.02)
