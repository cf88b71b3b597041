"""Which stage of a pipeline has what."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labcode.perf.stages import stage_experts, stage_layers, stage_parameters
from labcode.perf.transformer import Transformer, load_model
from labcode.topology import GridShape


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 64))
def test_every_layer_has_a_stage(layers, pp):
    if pp > layers:
        return
    stages = stage_layers(Transformer(layers, 8, 1, 8, 10), pp)
    assert (len(stages), sum(stages)) == (pp, layers)
    assert max(stages) <= -(-(layers + 2) // pp)


def test_bloom_has_fewer_layers_at_the_ends():
    """BigScience 2022, 70 layers in 12 stages: 5, ten times 6, 5."""
    assert stage_layers(load_model("bloom-176b"), 12) == (5, *[6] * 10, 5)


@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-70b"])
def test_the_stages_have_all_weights_and_tied_ones_twice(name):
    model = load_model(name)
    stages = stage_parameters(model, GridShape(pp=8, tp=2))
    twice = model.head_weights if model.tied else 0
    assert 2 * sum(stages) == pytest.approx(model.num_parameters + twice)
    assert stage_parameters(model, GridShape(tp=2)) == (model.num_parameters / 2,)


def test_ep_divides_the_experts_and_nothing_else():
    model = load_model("mixtral-8x7b")
    experts = model.num_layers * model.expert_weights
    for ep in (1, 2, 8):
        shape = GridShape(dp=8, ep=ep, tp=2, pp=4)
        assert 2 * sum(stage_experts(model, shape)) == experts / ep
        away = experts - experts / ep
        assert 2 * sum(stage_parameters(model, shape)) == model.num_parameters - away
