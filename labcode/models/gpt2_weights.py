"""GPT-2 weights from `transformers`, without importing it: a state dict and a config object are all that is read.

Usage:

    hf = transformers.GPT2LMHeadModel.from_pretrained("gpt2")     # or any GPT2LMHeadModel
    model = load_gpt2(GPT(gpt2_config(hf.config)), hf.state_dict())
"""

import torch

from labcode.config import GPTConfig
from labcode.models.gpt import GPT

# Name in transformers, and here.
_EMBEDDINGS = {"wte.weight": "embed.weight", "wpe.weight": "positions.weight"}
_LAYER = {
    "ln_1": "norm1",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.proj",
    "ln_2": "norm2",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
_CAUSAL_MASKS = (
    ".attn.bias",
    ".attn.masked_bias",
)  # buffers, not weights, in state dicts of older versions
_REQUIRED = {  # what a GPT2Config must say for our GPT to be the same function
    "layer_norm_epsilon": (1e-5,),
    "activation_function": (
        "gelu_new",
        "gelu_pytorch_tanh",
    ),  # two implementations of the tanh form
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


def gpt2_config(hf_config, **changes) -> GPTConfig:
    """The `GPTConfig` of the same shape as a `transformers.GPT2Config`.

    Args:
        hf_config: A `GPT2Config`.
        **changes: Fields to set otherwise, such as `dropout=0.0`.

    Raises:
        ValueError: The config asks for something that GPT does not have.
    """
    for name, allowed in _REQUIRED.items():
        value = getattr(hf_config, name, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"{name}={value!r}: GPT computes with {' or '.join(map(repr, allowed))} only"
            )
    dropouts = {
        name: getattr(hf_config, name) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    }
    if len(set(dropouts.values())) > 1 and "dropout" not in changes:
        found = ", ".join(f"{name}={value}" for name, value in dropouts.items())
        raise ValueError(f"{found}: GPT has one dropout for all three, pass dropout=...")
    fields = {
        "vocab_size": hf_config.vocab_size,
        "context_length": hf_config.n_positions,
        "num_layers": hf_config.n_layer,
        "num_heads": hf_config.n_head,
        "hidden_size": hf_config.n_embd,
        "ffn_size": hf_config.n_inner,
        "tie_embeddings": hf_config.tie_word_embeddings,
        "dropout": dropouts["resid_pdrop"],
    }
    return GPTConfig(**fields | changes)


@torch.no_grad()
def load_gpt2(model: GPT, state_dict) -> GPT:
    """Copies the weights of a GPT-2 into `model`, whatever its dtype and device, and returns it.

    Linear weights are transposed: GPT-2's `Conv1D` keeps them as [in, out], `nn.Linear` as [out, in].

    Args:
        model: A GPT of the same shape (`gpt2_config`).
        state_dict: Of a `GPT2LMHeadModel` or a `GPT2Model`, which has no `lm_head` and no `transformer.` before its names.

    Raises:
        ValueError: Names that are missing or unexpected, or a shape that differs.
    """
    weights = {
        name: value for name, value in state_dict.items() if not name.endswith(_CAUSAL_MASKS)
    }
    found = {name.removeprefix("transformer."): value for name, value in weights.items()}
    names = _names(model.config.num_layers)
    head = found.pop("lm_head.weight", found.get("wte.weight"))
    _check_names(names, found)
    if not model.config.tie_embeddings:
        found["lm_head.weight"], names["lm_head.weight"] = head, "head.weight"
    elif not torch.equal(head, found["wte.weight"]):
        raise ValueError(
            "lm_head.weight differs from wte.weight: build the GPT with tie_embeddings=False"
        )
    target = dict(model.named_parameters())
    different = sorted(set(target) ^ set(names.values()))
    if different:
        raise ValueError(
            f"GPT-2 and this GPT do not both have {_some(different)}: build the GPT from gpt2_config"
        )
    values = {}
    for name, ours in names.items():
        values[ours] = found[name].t() if ".c_" in name and name.endswith("weight") else found[name]
        if values[ours].shape != target[ours].shape:
            raise ValueError(
                f"{name} gives {ours} the shape {list(values[ours].shape)} but the model has {list(target[ours].shape)}: "
                "build the GPT from gpt2_config"
            )
    for (
        name,
        value,
    ) in values.items():  # only once all of them fit: an error leaves the model as it was
        target[name].copy_(value)
    return model


def _names(num_layers):
    """{name in transformers: name here} for all weights but the head."""
    parts = {"ln_f": "norm"}
    for i in range(num_layers):
        parts |= {f"h.{i}.{theirs}": f"blocks.{i}.{ours}" for theirs, ours in _LAYER.items()}
    kinds = ("weight", "bias")
    return _EMBEDDINGS | {
        f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in parts.items() for kind in kinds
    }


def _check_names(expected, found):
    missing, unexpected = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"the state dict is not that of a GPT-2 of this shape: missing {_some(missing)}; unexpected {_some(unexpected)}"
        )


def _some(names, most=4):
    """The first few names of a list, and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more if names else "none"
