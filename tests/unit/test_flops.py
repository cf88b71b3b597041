"""The FLOP formula against torch's own counter, for both models."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from labcode.config import GPTConfig, ViTConfig
from labcode.models.gpt import GPT
from labcode.models.layers import freeze
from labcode.models.vit import ViT
from labcode.perf.flops import frozen_flops_per_sample, training_flops_per_sample

GPTS = [
    GPTConfig(vocab_size=97, context_length=32, num_layers=3, num_heads=4, hidden_size=48),
    GPTConfig(
        vocab_size=97,
        context_length=32,
        num_layers=2,
        num_heads=4,
        hidden_size=48,
        num_kv_heads=2,
        ffn_size=100,
    ),
    GPTConfig(
        vocab_size=50,
        context_length=16,
        num_heads=2,
        hidden_size=32,
        positions="rotary",
        tie_embeddings=False,
    ),
    GPTConfig(
        vocab_size=50,
        context_length=16,
        num_heads=4,
        hidden_size=32,
        num_kv_heads=2,
        ffn_size=48,
        positions="rotary",
        norm="rms",
        mlp="swiglu",
        bias=False,
    ),
]


MIXTURE = replace(
    GPTS[-1],
    num_experts=6,
    experts_per_token=2,
    expert_ffn_size=24,
    shared_ffn_size=16,
)
MIXTURES = {
    "shared": MIXTURE,
    "top-1, no gate": replace(
        MIXTURE, experts_per_token=1, mlp="gelu", norm="layer", shared_ffn_size=0
    ),
    "top-3, all losses": replace(
        MIXTURE, experts_per_token=3, router="sigmoid", router_bias_rate=0.1, router_z_loss=0.1
    ),
}


def counted(model, *inputs):
    """FLOPs of forward and backward, with SDPA as two plain matrix products."""
    with FlopCounterMode(display=False) as counter:
        model(*inputs).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("config", [*GPTS, *MIXTURES.values()])
def test_flops_equal_those_that_torch_counts(config):
    batch = 2
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        total = counted(GPT(config), torch.zeros(batch, config.context_length, dtype=torch.long))
    assert total == batch * training_flops_per_sample(config)


FROZEN = {
    "embedding": ["embed"],
    "first layers": ["embed", "positions", "blocks.0"],
    "MLPs": ["blocks.*.mlp"],
    "all but the head": ["embed", "positions", "blocks", "norm"],
    "all but the norms": ["embed", "blocks.*.attention", "blocks.*.mlp"],
}


@pytest.mark.parametrize("names", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("config", [GPTS[0], replace(GPTS[0], tie_embeddings=False), MIXTURE])
def test_frozen_weights_spare_what_torch_does_not_count(config, names):
    model = GPT(config)
    named = dict(model.named_parameters(remove_duplicate=False))
    there = [name for name in names if any(one.startswith(name.split(".")[0]) for one in named)]
    if config.tie_embeddings and len(there) > 2 and "norm" in there:
        there.remove("embed")  # it is the head
    freeze(model, there)
    weights = [(name, one.shape, one.requires_grad) for name, one in model.named_parameters()]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        total = counted(model, torch.zeros(2, config.context_length, dtype=torch.long))
    expected = training_flops_per_sample(config) - frozen_flops_per_sample(config, weights)
    assert total == 2 * expected


def test_flops_of_the_vit_equal_those_that_torch_counts_but_for_the_input_gradient():
    config = ViTConfig(num_variables=3, lat=20, lon=40, hidden_size=32, num_layers=2)
    # with it the patch embedding has both halves of its backward
    state = torch.zeros(2, 3, 20, 40, requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert counted(ViT(config), state) == 2 * training_flops_per_sample(config)


def test_forcings_go_in_and_are_not_predicted():
    config = ViTConfig(
        num_variables=3, num_forcings=2, lat=20, lon=40, hidden_size=32, num_layers=2
    )
    model = ViT(config)
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters
    state = torch.randn(2, 5, 20, 40, requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert counted(model, state) == 2 * training_flops_per_sample(config)
    assert torch.equal(model(state), state[:, :3])  # untrained it is persistence
