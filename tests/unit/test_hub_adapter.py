"""Adapters under the names of `peft`: the same products beside the weights of `transformers`."""

import json

import pytest
import torch
from safetensors.torch import save_file

from labcode.config import GPTConfig, LoraConfig
from labcode.models import hub
from labcode.models.gpt import GPT
from labcode.models.hub_adapter import PREFIX, adapter_config, adapter_state_dict
from labcode.models.layers import initialize
from labcode.models.lora import add_adapters, is_adapter, merged

GPT_2 = GPTConfig(vocab_size=50, context_length=16, num_layers=2, num_heads=4, hidden_size=32)
LLAMA = GPTConfig(
    vocab_size=50,
    context_length=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    hidden_size=32,
    ffn_size=88,
    positions="rotary",
    norm="rms",
    mlp="swiglu",
    bias=False,
)
LORA = LoraConfig(rank=3, alpha=6.0)


def adapted(config):
    model = add_adapters(initialize(GPT(config), 0), LORA, seed=0).double()
    weights = model.state_dict()
    generator = torch.Generator().manual_seed(1)
    for name in weights:
        if name.endswith("lora_b"):
            weights[name].normal_(generator=generator)
    return weights, {name: value for name, value in weights.items() if is_adapter(name)}


def layers_of(adapter):
    """{layer in transformers: (A, B)}."""
    found = {}
    for name, lora_a in adapter.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            found[layer.removeprefix(PREFIX)] = (lora_a, adapter[f"{layer}.lora_B.weight"])
    return found


@pytest.mark.parametrize("config", [GPT_2, LLAMA])
def test_added_to_their_weights_they_give_the_merged_model(config):
    weights, adapters = adapted(config)
    plain = {name: value for name, value in weights.items() if not is_adapter(name)}
    theirs = hub.state_dict(config, plain)
    turned = adapter_config(config, LORA, None)["fan_in_fan_out"]
    assert turned == (config is GPT_2)
    for layer, (lora_a, lora_b) in layers_of(adapter_state_dict(config, adapters)).items():
        product = LORA.alpha / LORA.rank * lora_b @ lora_a
        theirs[f"{layer}.weight"] += product.T if turned else product
    expected = hub.state_dict(config, merged(weights, LORA))
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-12)


def test_names_and_shapes():
    _, adapters = adapted(LLAMA)
    found = adapter_state_dict(LLAMA, adapters)
    shapes = {name: tuple(value.shape) for name, value in found.items() if ".layers.0." in name}
    layer = "base_model.model.model.layers.0"
    assert shapes == {
        f"{layer}.self_attn.q_proj.lora_A.weight": (3, 32),
        f"{layer}.self_attn.q_proj.lora_B.weight": (32, 3),
        f"{layer}.self_attn.k_proj.lora_A.weight": (3, 32),
        f"{layer}.self_attn.k_proj.lora_B.weight": (16, 3),
        f"{layer}.self_attn.v_proj.lora_A.weight": (3, 32),
        f"{layer}.self_attn.v_proj.lora_B.weight": (16, 3),
        f"{layer}.self_attn.o_proj.lora_A.weight": (3, 32),
        f"{layer}.self_attn.o_proj.lora_B.weight": (32, 3),
        f"{layer}.mlp.gate_proj.lora_A.weight": (3, 32),
        f"{layer}.mlp.gate_proj.lora_B.weight": (88, 3),
        f"{layer}.mlp.up_proj.lora_A.weight": (3, 32),
        f"{layer}.mlp.up_proj.lora_B.weight": (88, 3),
        f"{layer}.mlp.down_proj.lora_A.weight": (3, 88),
        f"{layer}.mlp.down_proj.lora_B.weight": (32, 3),
    }
    names = adapter_state_dict(GPT_2, adapted(GPT_2)[1])
    assert "base_model.model.transformer.h.1.attn.c_attn.lora_A.weight" in names
    assert len(names) == 2 * 4 * 2


def test_the_config_names_the_layers():
    found = adapter_config(LLAMA, LoraConfig(rank=3, alpha=6.0, targets=("qkv", "down")), "DIR")
    assert found["target_modules"] == [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.down_proj",
    ]
    assert (found["r"], found["lora_alpha"], found["base_model_name_or_path"]) == (3, 6.0, "DIR")


# peft asks transformers 5 for a property that it is about to rename
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("config", [GPT_2, LLAMA])
def test_peft_reads_them(config, tmp_path):
    peft = pytest.importorskip("peft", reason="pip install -e '.[hf]'")
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[hf]'")
    weights, adapters = adapted(config)
    plain = {name: value for name, value in weights.items() if not is_adapter(name)}

    def in_transformers(name, whole):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(hub.config_json(config)))
        save_file(hub.state_dict(config, whole), folder / "model.safetensors")
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load(folder, dtype=torch.float64).eval()

    base = in_transformers("base", plain)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    content = adapter_config(config, LORA, str(tmp_path / "base"))
    (adapter / "adapter_config.json").write_text(json.dumps(content))
    save_file(adapter_state_dict(config, adapters), adapter / "adapter_model.safetensors")
    tokens = torch.arange(20).reshape(2, 10)
    without = base(tokens).logits
    theirs = peft.PeftModel.from_pretrained(base, adapter).double().eval()
    # against the merged weights in transformers, whose rotary angles are float32 and ours are not
    expected = in_transformers("merged", merged(weights, LORA))(tokens).logits
    torch.testing.assert_close(theirs(tokens).logits, expected, rtol=0, atol=1e-12)
    assert (without - expected).abs().max() > 1e-3
