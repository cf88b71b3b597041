"""Shapes of transformers: parameters and FLOPs against the configs and against the papers."""

from dataclasses import replace

import pytest
import torch

from labcode.config import GPTConfig, ViTConfig
from labcode.models.gpt import GPT
from labcode.perf.flops import training_flops_per_sample, transformer_flops_per_sample
from labcode.perf.transformer import Transformer, load_model, model_names

GPTS = [
    GPTConfig(vocab_size=97, context_length=32, num_layers=3, num_heads=4, hidden_size=48),
    GPTConfig(
        vocab_size=97, num_heads=4, hidden_size=48, num_kv_heads=2, ffn_size=100, positions="rotary"
    ),
    GPTConfig(vocab_size=50, context_length=16, num_heads=2, hidden_size=32, tie_embeddings=False),
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
    GPTConfig(
        vocab_size=50,
        context_length=16,
        num_heads=4,
        hidden_size=32,
        positions="rotary",
        norm="rms",
        mlp="swiglu",
        bias=False,
        num_experts=6,
        experts_per_token=2,
        expert_ffn_size=24,
        shared_ffn_size=16,
    ),
]
MIXTURES = {
    "shared": GPTS[-1],
    "biases of the router": replace(GPTS[-1], router_bias_rate=0.01, router="sigmoid"),
    "as wide as an MLP": replace(GPTS[-1], expert_ffn_size=None, shared_ffn_size=0),
    "no gate, one expert": replace(GPTS[-1], mlp="gelu", norm="layer", experts_per_token=1),
    "all experts": replace(GPTS[-1], experts_per_token=6, num_kv_heads=1, tie_embeddings=False),
    "a single expert": replace(GPTS[-1], num_experts=1, experts_per_token=1),
}
VIT = ViTConfig(num_variables=3, num_forcings=2, lat=20, lon=40, hidden_size=32, num_layers=2)


@pytest.mark.parametrize("config", [*GPTS, *MIXTURES.values(), VIT])
def test_parameters_are_those_of_the_configs(config):
    assert Transformer.of(config).num_parameters == config.num_parameters
    assert transformer_flops_per_sample(Transformer.of(config)) == training_flops_per_sample(config)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-175b", 174.6),  # Narayanan et al. 2021, table 2
        ("gpt-530b", 529.6),
        ("gpt-1t", 1008.0),
        ("bloom-176b", 176.2),
        ("llama2-13b", 13.0),
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.6),
        ("llama3-405b", 405.9),
    ],
)
def test_published_models_have_their_published_parameters(name, billions):
    assert load_model(name).num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("name", ["gpt-22b", "gpt3-175b", "gpt-1t"])
def test_flops_are_those_of_the_megatron_paper(name):
    """Narayanan et al. 2021, eq. 3: 96 B s L h^2 (1 + s/(6h) + V/(16 L h)), 72 without."""
    model = load_model(name)
    s, h, layers = model.sequence_length, model.hidden_size, model.num_layers
    full = 96 * s * layers * h**2 * (1 + s / (6 * h) + model.outputs / (16 * layers * h))
    none = 72 * s * layers * h**2 * (1 + s / (6 * h) + model.outputs / (12 * layers * h))
    found = transformer_flops_per_sample(model, activation_checkpointing="full")
    assert found == pytest.approx(full, rel=1e-12)
    assert transformer_flops_per_sample(model) == pytest.approx(none, rel=1e-12)


def test_experts_are_weights_for_all_and_products_for_some():
    """Mixtral 8x7B: 46.7 billion weights, 12.9 of them for a token (arXiv:2401.04088, table 1)."""
    mixtral = load_model("mixtral-8x7b")
    assert mixtral.num_parameters / 1e9 == pytest.approx(46.7, rel=2e-3)
    assert mixtral.num_active_parameters / 1e9 == pytest.approx(12.9, rel=2e-3)
    # one expert that all tokens go through is an MLP with a router
    dense = load_model("mistral-7b")
    router = dense.num_layers * dense.hidden_size
    one = replace(dense, experts=1)
    assert one.num_parameters == dense.num_parameters + router
    more_flops = 3 * 2 * dense.sequence_length * router
    assert transformer_flops_per_sample(one) == transformer_flops_per_sample(dense) + more_flops
    with pytest.raises(ValueError, match="active_experts=9 of experts=8"):
        replace(mixtral, active_experts=9)


def test_heads_may_be_wider_than_their_share_of_the_features():
    """Gemma 7B: 16 heads of 256 features on 3072."""
    wide = replace(load_model("llama3-8b"), head_features=256)
    assert wide.heads_size == 2 * wide.hidden_size
    assert wide.qkv == (32 + 2 * 8) * 256
    with pytest.raises(ValueError, match="not a multiple of num_heads=7"):
        replace(load_model("llama3-8b"), num_heads=7, kv_heads=7)
    assert replace(wide, num_heads=7, kv_heads=7).heads_size == 7 * 256


def test_a_causal_mask_halves_attention_alone():
    model = load_model("llama3-8b")
    attention = 3 * model.num_layers * 4 * model.sequence_length**2 * model.hidden_size
    whole = transformer_flops_per_sample(model)
    assert whole - transformer_flops_per_sample(model, causal=True) == attention // 2


def test_what_does_not_exist_is_refused_in_one_line():
    with pytest.raises(ValueError, match="did you mean llama3-70b"):
        load_model("llama3-71b")
    with pytest.raises(ValueError, match="hidden_size=10 is not a multiple of num_heads=3"):
        Transformer(1, 10, 3, 8, 100)
    with pytest.raises(ValueError, match="num_layers=0: give a number above 0"):
        Transformer(0, 8, 2, 8, 100)
    with pytest.raises(ValueError, match="kv_heads=3"):
        Transformer(1, 8, 4, 8, 100, kv_heads=3)
    with pytest.raises(ValueError, match="choose one of none, selective, full"):
        transformer_flops_per_sample(load_model("gpt-22b"), activation_checkpointing="some")
    assert len(model_names()) > 5


@pytest.mark.parametrize("config", MIXTURES.values(), ids=MIXTURES)
def test_a_mixture_has_the_parameters_that_torch_counts_and_uses_those_of_its_chosen_experts(
    config,
):
    with torch.device("meta"):
        model = GPT(config)
    counts = {name: param.numel() for name, param in model.named_parameters()}
    experts = sum(count for name, count in counts.items() if ".experts." in name)
    shape = Transformer.of(config)
    assert shape.num_parameters == config.num_parameters == sum(counts.values())
    assert shape.num_layers * shape.expert_weights == config.num_expert_parameters == experts
    idle = experts * (config.num_experts - config.experts_per_token) // config.num_experts
    assert shape.num_active_parameters == sum(counts.values()) - idle
    assert config.num_active_parameters == shape.num_active_parameters


@pytest.mark.parametrize("config", [GPTS[0], VIT])
def test_a_token_uses_all_of_a_dense_model(config):
    assert Transformer.of(config).num_active_parameters == config.num_parameters
    assert Transformer.of(config).expert_weights == 0
