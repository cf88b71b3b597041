"""A linear layer with an adapter: what it computes, what it begins with, and merging."""

import math

import pytest
import torch

from labcode import recipes
from labcode.config import GPTConfig, LoraConfig
from labcode.models.gpt import GPT
from labcode.models.layers import freeze, initialize
from labcode.models.lora import LoraLinear, add_adapters, is_adapter, merged
from labcode.runtime import combinations

CONFIG = GPTConfig(
    vocab_size=19, context_length=8, num_layers=2, num_heads=2, hidden_size=12, ffn_size=20
)
LORA = LoraConfig(rank=3, alpha=6.0)
EXPERTS = {
    "model.num_experts": 4,
    "model.bias": False,
    "model.norm": "rms",
    "model.mlp": "swiglu",
    "model.expert_ffn_size": 8,
}
TOKENS = torch.arange(16).reshape(2, 8)


def adapted(*, trained=False):
    model = add_adapters(initialize(GPT(CONFIG), 0), LORA, seed=0).double()
    if trained:
        generator = torch.Generator().manual_seed(1)
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.lora_b.data.normal_(generator=generator)
    return model


def test_the_layer_is_the_equation():
    layer = LoraLinear(torch.nn.Linear(5, 7).double(), rank=2, alpha=3.0)
    torch.nn.init.normal_(layer.lora_a)
    torch.nn.init.normal_(layer.lora_b)
    x = torch.randn(4, 5, dtype=torch.float64)
    weight = layer.weight + 3.0 / 2 * layer.lora_b @ layer.lora_a
    torch.testing.assert_close(layer(x), x @ weight.T + layer.bias, rtol=0, atol=1e-12)


def test_it_begins_as_the_model_that_is_frozen():
    model = adapted()
    assert torch.equal(model(TOKENS), initialize(GPT(CONFIG), 0).double()(TOKENS))
    layer = model.blocks[1].mlp.down
    assert not layer.lora_b.any()
    bound = 1 / math.sqrt(20)  # of its 20 inputs
    assert 0.8 * bound < layer.lora_a.abs().max() <= bound
    # each layer, and not each run, has numbers of its own
    assert not torch.equal(layer.lora_a, model.blocks[0].mlp.down.lora_a)
    assert torch.equal(layer.lora_a, adapted().blocks[1].mlp.down.lora_a)


def test_adapters_alone_train_and_all_other_names_stay():
    model = adapted()
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)}
    assert len(trained) == 2 * 4 * 2  # layers, linear layers, A and B
    assert set(model.state_dict()) - trained == set(GPT(CONFIG).state_dict())
    model(TOKENS).sum().backward()
    assert all((param.grad is not None) == is_adapter(name) for name, param in named(model))


def named(model):
    return list(model.named_parameters())


def test_targets_choose_the_layers():
    lora = LoraConfig(rank=2, targets=("qkv",))
    model = add_adapters(GPT(CONFIG), lora)
    found = {name.rpartition(".")[0] for name, _ in named(model) if is_adapter(name)}
    assert found == {"blocks.0.attention.qkv", "blocks.1.attention.qkv"}


def test_merging_changes_no_output_and_can_be_undone():
    model = adapted(trained=True)
    before = model(TOKENS)
    weights = {name: param.detach().clone() for name, param in named(model)}
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.merge()
        layer.merge()  # once is enough
    assert not torch.equal(model.blocks[0].mlp.up.weight, weights["blocks.0.mlp.up.weight"])
    torch.testing.assert_close(model(TOKENS), before, rtol=0, atol=1e-12)
    for layer in layers:
        layer.unmerge()
        layer.unmerge()
    torch.testing.assert_close(dict(named(model)), weights, rtol=0, atol=1e-12)
    torch.testing.assert_close(model(TOKENS), before, rtol=0, atol=1e-12)


def test_a_merged_state_dict_is_that_of_a_plain_model():
    model = adapted(trained=True)
    plain = GPT(CONFIG).double()
    plain.load_state_dict(merged(model.state_dict(), LORA))
    torch.testing.assert_close(plain(TOKENS), model(TOKENS), rtol=0, atol=1e-12)


def test_freezing_may_leave_out_adapters_as_well():
    model = adapted()
    freeze(model, ["blocks.0"])
    trained = [name for name, param in named(model) if param.requires_grad]
    assert trained and all(name.startswith("blocks.1.") for name in trained)
    with pytest.raises(ValueError, match="leaves nothing to train"):
        freeze(model, ["blocks.*"])


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        ("gpt_tiny", {"lora.rank": -1}, "lora.rank=-1: must not be negative"),
        ("gpt_tiny", {"lora.alpha": 0.0}, "lora.alpha=0.0: give a number above 0"),
        ("gpt_tiny", {"lora.targets": ("head",)}, "lora.targets=.head.: choose qkv or proj or"),
        ("gpt_tiny", {"lora.targets": ()}, "lora.targets is empty"),
        ("gpt_tiny", {"lora.rank": 65}, "lora.rank=65: the smallest layer .* give at most 64"),
        ("vit_tiny", {"lora.rank": 2}, "lora.rank=2 with a ViT"),
        ("gpt_tiny", {"lora.rank": 2, **EXPERTS}, "the experts of a layer are one"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(recipe, changes, words):
    with pytest.raises(ValueError, match=words) as caught:
        combinations.check(recipes.with_changes(getattr(recipes, recipe)(), changes), 1)
    assert "\n" not in str(caught.value)
