"""GPT-2 weights in the names and shapes of `transformers`, without importing it.

Read are a state dict and a config object, written are the same. Usage:

    hf = transformers.GPT2LMHeadModel.from_pretrained("gpt2")     # or any GPT2LMHeadModel
    model = load_gpt2(GPT(gpt2_config(hf.config)), hf.state_dict())
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from labcode.config import GPTConfig
from labcode.models.gpt import GPT

# {name in transformers: name here}
_EMBEDDINGS = {"wte.weight": "embed.weight", "wpe.weight": "positions.weight"}
_HEAD = "lm_head.weight"
_LAYER = {
    "ln_1": "norm1",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.proj",
    "ln_2": "norm2",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}

# State dicts of older versions hold these buffers; they are not weights.
_CAUSAL_MASKS = (".attn.bias", ".attn.masked_bias")

# What a GPT2Config must say for our GPT to be the same function.
_REQUIRED: dict[str, tuple] = {
    "layer_norm_epsilon": (1e-5,),
    # two implementations of the tanh form
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def gpt2_config(hf_config: Any, **changes: Any) -> GPTConfig:
    """Return the `GPTConfig` of the same shape as a `transformers.GPT2Config`.

    Args:
        hf_config: A `GPT2Config`.
        **changes: Fields to override, such as `dropout=0.0`.

    Raises:
        ValueError: The config asks for something that GPT does not have.
    """
    for name, allowed in _REQUIRED.items():
        value = getattr(hf_config, name, allowed[0])
        if value not in allowed:
            choices = " or ".join(map(repr, allowed))
            raise ValueError(f"{name}={value!r}: GPT computes with {choices} only")
    dropouts = {name: getattr(hf_config, name) for name in _DROPOUTS}
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
    return GPTConfig(**(fields | changes))


@torch.no_grad()
def load_gpt2(model: GPT, state_dict: Mapping[str, torch.Tensor]) -> GPT:
    """Copy the weights of a GPT-2 into `model`, whatever its dtype and device, and return it.

    Linear weights are transposed: GPT-2's `Conv1D` keeps them as [in, out], `nn.Linear` as
    [out, in].

    Args:
        model: A GPT of the same shape (`gpt2_config`).
        state_dict: That of a `GPT2LMHeadModel`. A model with tied embeddings also takes that of a
            `GPT2Model`, which has no `lm_head`, and no `transformer.` in front of its names.

    Raises:
        ValueError: Missing or unexpected names, a shape that differs, or a head that does not
            match the model's `tie_embeddings`.

    Held by: tests/unit/test_gpt2_weights.py
    """
    found = _bare_names(state_dict)
    names = _names(model.config.num_layers)
    head = found.pop(_HEAD, None)
    _check_names(names, found)
    if model.config.tie_embeddings:
        # The head is the embedding, which is loaded anyway.
        _check_tied_head(head, found["wte.weight"])
    else:
        found[_HEAD] = _own_head(head)
        names[_HEAD] = "head.weight"

    target = dict(model.named_parameters())
    different = sorted(set(target) ^ set(names.values()))
    if different:
        raise ValueError(
            f"GPT-2 and this GPT do not both have {_some(different)}: "
            "build the GPT from gpt2_config"
        )
    values = {}
    for theirs, ours in names.items():
        value = _as_linear(theirs, found[theirs])
        _check_shape(theirs, value, ours, target[ours])
        values[ours] = value
    # Copied only once all of them fit: an error leaves the model as it was.
    for name, value in values.items():
        target[name].copy_(value)
    return model


def names_in_gpt2(config: GPTConfig) -> dict[str, str]:
    """{name of a weight here: its name in a `GPT2LMHeadModel`}, for all weights of a GPT.

    A head that is tied to the embedding has no name of its own there.

    Raises:
        ValueError: GPT-2 has no place for such a model.
    """
    if config.positions != "learned":
        raise ValueError(
            f"model.positions={config.positions}: a GPT-2 has learned positions, "
            "and its format has no place for others: train with --model.positions learned"
        )
    if config.kv_heads != config.num_heads:
        raise ValueError(
            f"model.num_kv_heads={config.num_kv_heads}: a GPT-2 has as many key/value heads as "
            "query heads, and its format has no place for fewer"
        )
    names = {}
    for theirs, ours in _names(config.num_layers).items():
        names[ours] = f"transformer.{theirs}"
    names["head.weight"] = "transformer.wte.weight" if config.tie_embeddings else _HEAD
    return names


def is_transposed(name: str) -> bool:
    """Whether GPT-2 keeps a weight, by its name there, as [in, out] in place of [out, in]."""
    return ".c_" in name and name.endswith("weight")


def is_causal_mask(name: str) -> bool:
    """Whether a name in a state dict of an older version is that of a buffer, not of a weight."""
    return name.endswith(_CAUSAL_MASKS)


def to_gpt2(config: GPTConfig, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of a `GPT2LMHeadModel` that computes the same.

    Args:
        config: Of the GPT.
        weights: Its state dict.

    Raises:
        ValueError: GPT-2 has no place for such a model.

    Held by: tests/ranks/test_gpt2_files.py
    """
    found = {}
    for ours, theirs in names_in_gpt2(config).items():
        if ours in weights:
            value = weights[ours]
            found[theirs] = (value.t() if is_transposed(theirs) else value).contiguous()
    return found


def to_gpt2_config(config: GPTConfig) -> dict[str, Any]:
    """The content of `config.json` beside those weights."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": config.context_length,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.hidden_size,
        "n_inner": config.ffn_size,
        "tie_word_embeddings": config.tie_embeddings,
        "activation_function": "gelu_pytorch_tanh",
        "layer_norm_epsilon": 1e-5,
        **dict.fromkeys(_DROPOUTS, config.dropout),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _bare_names(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under the names of a `GPT2Model`, without the buffers of older versions."""
    weights = {}
    for name, value in state_dict.items():
        if not is_causal_mask(name):
            weights[name.removeprefix("transformer.")] = value
    return weights


def _names(num_layers: int) -> dict[str, str]:
    """{name in transformers: name here} of all weights but the head."""
    modules = {"ln_f": "norm"}
    for layer in range(num_layers):
        for theirs, ours in _LAYER.items():
            modules[f"h.{layer}.{theirs}"] = f"blocks.{layer}.{ours}"
    names = dict(_EMBEDDINGS)
    for theirs, ours in modules.items():
        for kind in ("weight", "bias"):
            names[f"{theirs}.{kind}"] = f"{ours}.{kind}"
    return names


def _as_linear(name: str, value: torch.Tensor) -> torch.Tensor:
    """A weight in the layout of `nn.Linear`; `c_attn`, `c_proj` and `c_fc` are `Conv1D` modules."""
    return value.t() if is_transposed(name) else value


def _own_head(head: torch.Tensor | None) -> torch.Tensor:
    """The head of a model that does not tie it to the embedding."""
    if head is None:
        # The embedding would fit, but the model would then compute something else.
        raise ValueError(
            f"the state dict has no {_HEAD} but this GPT has a head of its own: "
            "load that of a GPT2LMHeadModel or build the GPT with tie_embeddings=True"
        )
    return head


def _check_tied_head(head: torch.Tensor | None, embedding: torch.Tensor) -> None:
    if head is not None and not torch.equal(head, embedding):
        raise ValueError(
            f"{_HEAD} differs from wte.weight: build the GPT with tie_embeddings=False"
        )


def _check_names(expected: Iterable[str], found: Iterable[str]) -> None:
    missing = sorted(set(expected) - set(found))
    unexpected = sorted(set(found) - set(expected))
    if missing or unexpected:
        raise ValueError(
            "the state dict is not that of a GPT-2 of this shape: "
            f"missing {_some(missing)}; unexpected {_some(unexpected)}"
        )


def _check_shape(theirs: str, value: torch.Tensor, ours: str, target: torch.Tensor) -> None:
    if value.shape != target.shape:
        raise ValueError(
            f"{theirs} gives {ours} the shape {list(value.shape)} "
            f"but the model has {list(target.shape)}: build the GPT from gpt2_config"
        )


def _some(names: Sequence[str], most: int = 4) -> str:
    """The first few names of a list, and how many more there are."""
    if not names:
        return "none"
    listed = ", ".join(names[:most])
    if len(names) > most:
        return f"{listed} and {len(names) - most} more"
    return listed
