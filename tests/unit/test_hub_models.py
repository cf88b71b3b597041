"""GPT against StarCoder2, Llama and nanoGPT: the same function of the same numbers."""

import json

import pytest
import torch
import torch.nn.functional as F

from labcode.config import GPTConfig
from labcode.models import hub
from labcode.models.gpt import GPT
from labcode.models.hub import config_json, describe, gpt_config, load

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -e '.[hf]'"
)

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 24,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# {name: (config class, model class, what it has beside the sizes)}
THEIRS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama, grouped": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}),
    "llama, tied": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
    "llama 3's base": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {"num_key_value_heads": 6}),
    "starcoder2, grouped": (
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        {"num_key_value_heads": 3, "tie_word_embeddings": False, "norm_epsilon": 1e-6},
    ),
    "starcoder2, exact gelu": (
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        {"num_key_value_heads": 6, "hidden_act": "gelu"},
    ),
}


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=THEIRS)
def theirs(request):
    """A small model with weights and biases that are all far from zero and from one another."""
    config, model, changes = THEIRS[request.param]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**SIZES, **changes))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made.eval()


def test_the_same_logits_as_transformers(theirs, tokens):
    ours = load(GPT(gpt_config(theirs.config.to_dict())), theirs.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


def test_what_goes_out_is_what_came_in(theirs, tokens):
    config = gpt_config(theirs.config.to_dict())
    ours = load(GPT(config), theirs.state_dict())
    written = hub.state_dict(config, ours.state_dict())
    expected = dict(theirs.state_dict())
    if config.tie_embeddings:
        del expected["lm_head.weight"]
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.items())
    content = json.loads(json.dumps(config_json(config)))
    assert gpt_config(content) == config
    again = type(theirs)(type(theirs.config)(**content)).eval()
    again.load_state_dict(written, strict=False)
    again.tie_weights()
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=0, atol=0)


def test_the_number_of_parameters_is_theirs(theirs):
    config = gpt_config(theirs.config.to_dict())
    assert config.num_parameters == theirs.num_parameters()


def nanogpt_logits(weights, args, tokens):
    """A forward of nanoGPT's model, from its weights: LayerNorms without bias, exact GELU."""

    def w(name):
        return weights.get(f"transformer.{name}")

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w(f"{name}.weight"), w(f"{name}.bias"), 1e-5)

    def linear(x, name):
        return F.linear(x, w(f"{name}.weight"), w(f"{name}.bias"))

    batch, length = tokens.shape
    x = w("wte.weight")[tokens] + w("wpe.weight")[:length]
    mask = torch.full((length, length), -torch.inf).triu(1)
    for number in range(args["n_layer"]):
        layer = f"h.{number}"
        qkv = linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn")
        heads = [
            part.view(batch, length, args["n_head"], -1).transpose(1, 2)
            for part in qkv.split(args["n_embd"], dim=2)
        ]
        scores = heads[0] @ heads[1].transpose(-2, -1) / heads[0].shape[-1] ** 0.5
        mixed = (scores + mask).softmax(-1) @ heads[2]
        x = x + linear(mixed.transpose(1, 2).flatten(2), f"{layer}.attn.c_proj")
        inner = F.gelu(linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc"))
        x = x + linear(inner, f"{layer}.mlp.c_proj")
    return norm(x, "ln_f") @ weights["lm_head.weight"].t()


def nanogpt_weights(args):
    torch.manual_seed(0)
    hidden = args["n_embd"]
    shapes = {"wte": (args["vocab_size"], hidden), "wpe": (args["block_size"], hidden)}
    norms = ["ln_f"]
    for number in range(args["n_layer"]):
        layer = f"h.{number}"
        norms += [f"{layer}.ln_1", f"{layer}.ln_2"]
        shapes[f"{layer}.attn.c_attn"] = (3 * hidden, hidden)
        shapes[f"{layer}.attn.c_proj"] = (hidden, hidden)
        shapes[f"{layer}.mlp.c_fc"] = (4 * hidden, hidden)
        shapes[f"{layer}.mlp.c_proj"] = (hidden, 4 * hidden)
    found = {f"transformer.{name}.weight": torch.randn(shape) / 5 for name, shape in shapes.items()}
    for name in norms:
        found[f"transformer.{name}.weight"] = 1 + torch.randn(hidden) / 5
    if args["bias"]:
        for name in [*norms, *(name for name in shapes if name.startswith("h."))]:
            rows = len(found[f"transformer.{name}.weight"])
            found[f"transformer.{name}.bias"] = torch.randn(rows) / 5
    found["lm_head.weight"] = found["transformer.wte.weight"]
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_the_same_logits_as_nanogpt(bias, tokens):
    args = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "block_size": 24,
        "bias": bias,
        "vocab_size": 61,
    }
    weights = nanogpt_weights(args)
    config = GPTConfig(**hub.NANOGPT.describe(args).fields)
    ours = GPT(config)
    pieces = hub.NANOGPT.pieces(config)
    bare = {hub.bare_name(name): value for name, value in weights.items()}
    hub.check_names(pieces, bare)
    ours.load_state_dict({name: bare[found[0].name] for name, found in pieces.items()})
    with torch.no_grad():
        expected = nanogpt_logits(weights, args, tokens)
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-5)


LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
LLAMA31_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
REFUSED = [
    ({"rope_scaling": LLAMA31_ROPE, "rope_theta": 500000.0}, "rope_type='llama3' stretches"),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type='linear' stretches"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type='yarn' stretches"),
    ({"attention_bias": True}, "attention_bias=True: GPT computes with False only"),
    ({"mlp_bias": True}, "mlp_bias=True: GPT computes with False only"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu': GPT computes with 'silu' only"),
    ({"head_dim": 128}, "head_dim=128: GPT's heads have hidden_size/num_attention_heads"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"quantization_config": {"bits": 4}}, "quantization_config: its weights are no plain numbers"),
    ({"model_type": "qwen2"}, "model_type='qwen2': the models that a GPT can be here are GPT-2"),
    ({"model_type": "gpt_neox"}, "model_type='gpt_neox'"),
    ({"model_type": "starcoder2", "sliding_window": 4096}, "sliding_window=4096"),
    ({"model_type": "starcoder2", "use_bias": False}, "use_bias=False"),
    ({"model_type": "gpt2", "activation_function": "quick_gelu"}, "'quick_gelu'"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_a_gpt_does_not_do_is_refused_by_name(changes, words):
    with pytest.raises(ValueError) as caught:
        describe(LLAMA | changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_published_configs_are_read():
    tinyllama = gpt_config(LLAMA)
    assert tinyllama.num_parameters == 1_100_048_384  # as the hub counts TinyLlama 1.1B
    assert tinyllama.norm_epsilon == 1e-5
    llama3 = gpt_config(
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "pretraining_tp": 1,
        }
    )
    assert llama3.num_parameters == 8_030_261_248
    assert llama3.rotary_base == 500000.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positions": "rotary", "bias": False}, "is no model of the hub"),
        ({"positions": "learned", "mlp": "swiglu"}, "is no model of the hub"),
        ({"positions": "learned", "num_kv_heads": 2}, "a GPT-2 has as many key/value heads"),
    ],
)
def test_a_gpt_that_the_hub_has_not_is_refused(changes, words):
    with pytest.raises(ValueError) as caught:
        config_json(GPTConfig(**({"vocab_size": 61} | changes)))
    assert words in str(caught.value)


def test_wrappers_leave_names():
    names = {
        "_orig_mod.transformer.h.0.ln_1.weight": "h.0.ln_1.weight",
        "module.transformer.h.0.ln_1.weight": "h.0.ln_1.weight",
        "module._orig_mod.model.layers.0.mlp.up_proj.weight": "layers.0.mlp.up_proj.weight",
        "model.transformer.wte.weight": "wte.weight",
        "transformer.h.3._checkpoint_wrapped_module.mlp.c_fc.bias": "h.3.mlp.c_fc.bias",
        "_fsdp_wrapped_module.model.layers.1._fsdp_wrapped_module.mlp.up_proj.weight": (
            "layers.1.mlp.up_proj.weight"
        ),
        "lm_head.weight": "lm_head.weight",
        "h.0.ln_1.weight": "h.0.ln_1.weight",
    }
    for name, bare in names.items():
        assert hub.bare_name(name) == bare
