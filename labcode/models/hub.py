"""Which models of the Hugging Face hub a GPT here is: names, shapes and `config.json`, both ways.

    GPT here                                                       there        model_type
    positions=learned                                              GPT-2        gpt2
    positions=rotary                                               StarCoder2   starcoder2
    positions=rotary norm=rms mlp=swiglu bias=False                Llama        llama
    positions=learned, linear weights as nn.Linear has them        nanoGPT      in its ckpt.pt

They are the same function of the same numbers. Rotary positions turn the features i and i + D/2 in
all of them, so nothing is permuted. Read and written are state dicts and dicts; `transformers` is
not imported:

    hf = transformers.GPT2LMHeadModel.from_pretrained("gpt2")     # or any of the three
    model = load(GPT(gpt_config(hf.config.to_dict())), hf.state_dict())

Source: the modeling and configuration files of these models in transformers 5.23; model.py of
    nanoGPT, whose `model_args` are in its ckpt.pt.
Held by: tests/unit/test_gpt2_weights.py, tests/unit/test_hub_models.py
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from labcode.config import GPTConfig
from labcode.models.gpt import GPT

HEAD = "lm_head.weight"
# What DDP, FSDP, torch.compile and activation checkpointing put into the name of a weight.
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
WRAPPERS |= {"_forward_module"}  # of Fabric
# The models in front of which a head is put.
BASES = ("model", "transformer")
# State dicts of older versions hold these buffers; they are not weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
# {activation there: the MLP here}; the first that fits is written
ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_erf",
    "silu": "swiglu",
    "swish": "swiglu",
}


# {field of a GPTConfig that may be None: what it then is}
OR_DERIVED = {"ffn_size": "ffn", "num_kv_heads": "kv_heads"}


class Piece(NamedTuple):
    """One tensor of a checkpoint: a weight here, or some of its rows.

    Args:
        name: There, bare (`bare_name`).
        first: The first of its rows in the weight here.
        rows: How many; None: all, of whatever length.
        transposed: Whether it is kept as [in, out], as GPT-2's `Conv1D` does.
    """

    name: str
    first: int = 0
    rows: int | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Family:
    """A model of the hub.

    Args:
        model_type: Model type in its config.json.
        title: Title for messages.
        prefix: The prefix of the names in a checkpoint of the model with a head.
        ends: {module here: module there}, of those in no layer.
        layer: The name of a layer, before its number.
        modules: {module of a layer here: the modules there whose rows it has, in this order}.
        shape: {field here: its name in config.json}.
        defaults: What a config.json means by a name that it does not have.
        only: {name in config.json: the values with which it is the function here}.
        fixed: {field here: its value in every model of the family}.
        transposed: Whether linear weights are kept as [in, out].
    """

    model_type: str
    title: str
    prefix: str
    ends: dict[str, str]
    layer: str
    modules: dict[str, tuple[str, ...]]
    shape: dict[str, str]
    defaults: dict[str, Any]
    only: dict[str, tuple]
    fixed: dict[str, Any]
    dropouts: tuple[str, ...] = ()
    activation: str = ""
    transposed: bool = False

    def pieces(self, config: GPTConfig) -> dict[str, list[Piece]]:
        """{weight here: where it is there}; a tied head is where the embedding is."""
        modules: dict[str, tuple[str, ...]] = {}
        for ours, theirs in self.ends.items():
            modules[ours] = (theirs,)
        for number in range(config.num_layers):
            for ours, theirs in self.modules.items():
                names = tuple(f"{self.layer}.{number}.{name}" for name in theirs)
                modules[f"blocks.{number}.{ours}"] = names
        found = {}
        for ours, theirs in modules.items():
            is_norm = ours.rpartition(".")[2].startswith("norm")
            for kind in ("weight", "bias"):
                if kind == "bias" and (not config.bias or ours in ("embed", "positions")):
                    continue
                # GPT-2's Conv1D is its linear layer; embeddings and norms are those of every
                # library.
                linear = ours.startswith("blocks.") and not is_norm and kind == "weight"
                names = [f"{name}.{kind}" for name in theirs]
                found[f"{ours}.{kind}"] = _stacked(
                    names, _rows(ours, config), self.transposed and linear
                )
        found["head.weight"] = found["embed.weight"] if config.tie_embeddings else [Piece(HEAD)]
        return found

    def describe(self, content: Mapping[str, Any]) -> "Described":
        """What a config.json says, in the fields of a GPTConfig.

        Raises:
            ValueError: Something that a GPT here does not do.
        """
        for name, allowed in self.only.items():
            value = content.get(name, allowed[0])
            if value not in allowed:
                choices = " or ".join(map(repr, allowed))
                raise ValueError(f"{name}={value!r}: GPT computes with {choices} only")
        found = Described(self, dict(self.fixed))
        for ours, name in self.shape.items():
            value = content.get(name, self.defaults.get(name))
            if value is None and ours not in ("ffn_size", "num_kv_heads"):
                raise ValueError(f"{name} is missing: it says how large the model is")
            found.put(ours, name, value)
        if self.activation:
            name = content.get(self.activation, self.defaults[self.activation])
            kind = ACTIVATIONS.get(name)
            if kind is None or (kind == "swiglu") != (self.model_type == "llama"):
                known = [key for key, value in ACTIVATIONS.items() if value != "swiglu"]
                if self.model_type == "llama":
                    known = ["silu"]
                raise ValueError(
                    f"{self.activation}={name!r}: GPT computes with "
                    f"{' or '.join(map(repr, known))} only"
                )
            found.put("mlp", self.activation, kind)
            found.theirs["mlp"] = f"{self.activation}={name}"
        # before the angles: they are told of the heads, whose number may not divide the width
        GPTConfig(**found.fields)  # refuses what is no size
        if found.fields["positions"] == "rotary":
            _describe_rotary(content, found)
        return found


@dataclass
class Described:
    """The model that a checkpoint says it is.

    Args:
        family: The family of the model in the hub.
        fields: {field of a GPTConfig: value}.
        theirs: {field: what stands there}, as "n_head=4".
    """

    family: Family
    fields: dict[str, Any]
    theirs: dict[str, str] = field(default_factory=dict)

    def put(self, ours: str, name: str, value: Any) -> None:
        """Note a value, and what stands for it there."""
        self.fields[ours] = value
        self.theirs[ours] = f"{name}={value}"

    def differences(self, config: GPTConfig) -> dict[str, Any]:
        """{field: value there}, where a config of this model would be another function.

        A vocabulary that is not known yet is left out. So is the context of rotary positions,
        which is no shape: a shorter one is the same function. Dropout is a choice of the training.
        """
        whole = GPTConfig(**self.fields)
        differ = {}
        for name in self.fields:
            if name == "context_length" and whole.positions == "rotary":
                continue
            if name == "vocab_size" and config.vocab_size is None:
                continue
            theirs = getattr(whole, name)
            ours = getattr(config, name)
            if theirs == ours:
                continue
            if name == "num_kv_heads" and theirs is None and config.kv_heads == config.num_heads:
                continue
            # None and the number that it stands for are the same model
            if name in OR_DERIVED:
                theirs = getattr(whole, OR_DERIVED[name])
                ours = getattr(config, OR_DERIVED[name])
            if not (theirs == ours or _is_close(theirs, ours)):
                differ[name] = theirs
        return differ


def _is_close(one: Any, other: Any) -> bool:
    """Whether two numbers with a decimal point are the same but for how they are written."""
    return isinstance(one, float) and math.isclose(one, other, rel_tol=1e-6)


def _describe_rotary(content: Mapping[str, Any], found: Described) -> None:
    """The base of the angles, and that they are turned in no other way.

    `transformers` 5 writes `rope_parameters`, older versions `rope_theta` and `rope_scaling`.
    """
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = content.get(name) or {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}={value!r}, where names and values are expected")
        rope |= value
    # "type" is what older versions of transformers call it
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"rope_type={kind!r} stretches the angles of positions: GPT turns by plain ones only"
        )
    part = rope.get("partial_rotary_factor", content.get("partial_rotary_factor", 1.0))
    if part not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor={part}: GPT turns all features of a head")
    # bool is an int in Python; 10000 is what a file without the number means in all of these models
    base = rope.get("rope_theta", content.get("rope_theta")) or 10000.0
    if isinstance(base, bool) or not isinstance(base, int | float):
        raise ValueError(f"rope_theta={base!r} is not a number")
    found.put("rotary_base", "rope_theta", float(base))
    heads = found.fields["num_heads"]
    hidden = found.fields["hidden_size"]
    size = content.get("head_dim")
    if size is not None and size * heads != hidden:
        raise ValueError(
            f"head_dim={size}: GPT's heads have hidden_size/num_attention_heads = {hidden}/{heads} "
            "features"
        )


_GPT2_MODULES = {
    "norm1": ("ln_1",),
    "attention.qkv": ("attn.c_attn",),
    "attention.proj": ("attn.c_proj",),
    "norm2": ("ln_2",),
    "mlp.up": ("mlp.c_fc",),
    "mlp.down": ("mlp.c_proj",),
}
_GPT2_ENDS = {"embed": "wte", "positions": "wpe", "norm": "ln_f"}
GPT2 = Family(
    "gpt2",
    "GPT-2",
    "transformer.",
    _GPT2_ENDS,
    "h",
    _GPT2_MODULES,
    shape={
        "vocab_size": "vocab_size",
        "context_length": "n_positions",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "hidden_size": "n_embd",
        "ffn_size": "n_inner",
        "norm_epsilon": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings",
    },
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "activation_function": "gelu_new",
    },
    only={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    fixed={"positions": "learned", "num_kv_heads": None, "norm": "layer", "bias": True},
    dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    activation="activation_function",
    transposed=True,
)
_LLAMA_SHAPE = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "hidden_size": "hidden_size",
    "ffn_size": "intermediate_size",
    "tie_embeddings": "tie_word_embeddings",
}
_LLAMA_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LLAMA_ENDS = {"embed": "embed_tokens", "norm": "norm"}
STARCODER2 = Family(
    "starcoder2",
    "StarCoder2",
    "model.",
    _LLAMA_ENDS,
    "layers",
    modules={
        "norm1": ("input_layernorm",),
        "attention.qkv": _LLAMA_ATTENTION,
        "attention.proj": ("self_attn.o_proj",),
        "norm2": ("post_attention_layernorm",),
        "mlp.up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
    },
    shape=_LLAMA_SHAPE | {"norm_epsilon": "norm_epsilon"},
    # what newer files leave out: these three are small
    defaults={
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
    # without use_bias its norms have one all the same
    only={"use_bias": (True,), "sliding_window": (None,)},
    fixed={"positions": "rotary", "norm": "layer", "bias": True},
    dropouts=("residual_dropout", "embedding_dropout", "attention_dropout"),
    activation="hidden_act",
)
LLAMA = Family(
    "llama",
    "Llama",
    "model.",
    _LLAMA_ENDS,
    "layers",
    modules={
        "norm1": ("input_layernorm",),
        "attention.qkv": _LLAMA_ATTENTION,
        "attention.proj": ("self_attn.o_proj",),
        "norm2": ("post_attention_layernorm",),
        "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    },
    shape=_LLAMA_SHAPE | {"norm_epsilon": "rms_norm_eps"},
    defaults={
        "vocab_size": 32000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
    },
    only={"attention_bias": (False,), "mlp_bias": (False,)},
    fixed={"positions": "rotary", "norm": "rms", "bias": False},
    dropouts=("attention_dropout",),
    activation="hidden_act",
)
# It names neither its GELU, which is torch's exact one, nor its epsilon, which is layer_norm's.
NANOGPT = Family(
    "nanogpt",
    "nanoGPT",
    "transformer.",
    _GPT2_ENDS,
    "h",
    _GPT2_MODULES,
    shape={
        "vocab_size": "vocab_size",
        "context_length": "block_size",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "hidden_size": "n_embd",
        "bias": "bias",
    },
    defaults={},
    only={},
    fixed={
        "positions": "learned",
        "num_kv_heads": None,
        "ffn_size": None,
        "norm": "layer",
        "norm_epsilon": 1e-5,
        "mlp": "gelu_erf",
        "tie_embeddings": True,
    },
)
FAMILIES = {family.model_type: family for family in (GPT2, STARCODER2, LLAMA)}


def family_of(config: GPTConfig) -> Family:
    """The model of the hub that a GPT is.

    Raises:
        ValueError: The hub has none.
    """
    if config.num_experts:
        raise ValueError(
            f"model.num_experts={config.num_experts}: the mixtures of the hub each have files of "
            "their own, and none of them is written here; the weights are in weights.pt"
        )
    for family in FAMILIES.values():
        fixed = all(getattr(config, name) == value for name, value in family.fixed.items())
        if fixed and config.gated == (family is LLAMA):
            return family
    if config.positions == "learned" and config.kv_heads != config.num_heads:
        raise ValueError(
            f"model.num_kv_heads={config.num_kv_heads}: a GPT-2 has as many key/value heads as "
            "query heads, and its format has no place for fewer"
        )
    if config.positions == "learned" and config.num_kv_heads:  # as many, but said
        return family_of(replace(config, num_kv_heads=None))
    raise ValueError(
        f"a GPT with model.positions={config.positions}, norm={config.norm}, mlp={config.mlp} and "
        f"bias={config.bias} is no model of the hub: GPT-2 has learned, layer, gelu and True, "
        "StarCoder2 rotary, layer, gelu and True, Llama rotary, rms, swiglu and False"
    )


def describe(content: Mapping[str, Any]) -> Described:
    """The model that the content of a config.json describes.

    Raises:
        ValueError: It is no model here, or does something that a GPT here does not do.
    """
    kind = content.get("model_type")
    if kind not in FAMILIES:
        names = ", ".join(f"{family.title} ({name})" for name, family in FAMILIES.items())
        raise ValueError(f"model_type={kind!r}: the models that a GPT can be here are {names}")
    if content.get("quantization_config"):
        raise ValueError("quantization_config: its weights are no plain numbers, take the original")
    return FAMILIES[kind].describe(content)


def gpt_config(content: Mapping[str, Any], **changes: Any) -> GPTConfig:
    """The `GPTConfig` of the same model, from the content of a config.json.

    Args:
        content: Such as `hf.config.to_dict()`.
        **changes: Fields to override, such as `dropout=0.0`.

    Raises:
        ValueError: The config asks for something that GPT does not have.
    """
    described = describe(content)
    dropouts = {name: content.get(name) or 0.0 for name in described.family.dropouts}
    if len(set(dropouts.values())) > 1 and "dropout" not in changes:
        found = ", ".join(f"{name}={value}" for name, value in dropouts.items())
        raise ValueError(f"{found}: GPT has one dropout for all three, pass dropout=...")
    dropout = next(iter(dropouts.values()), 0.0)
    fields: dict[str, Any] = described.fields | {"dropout": dropout} | changes
    return GPTConfig(**fields)


def config_json(config: GPTConfig) -> dict[str, Any]:
    """The content of the `config.json` that describes a GPT, as `transformers` reads it.

    Raises:
        ValueError: The hub has no such model.
    """
    family = family_of(config)
    heads = {"gpt2": "GPT2", "starcoder2": "Starcoder2", "llama": "Llama"}[family.model_type]
    kind = "GPT2LMHeadModel" if family is GPT2 else f"{heads}ForCausalLM"
    found: dict[str, Any] = {"model_type": family.model_type, "architectures": [kind]}
    for ours, theirs in family.shape.items():
        found[theirs] = getattr(config, ours)
    if family is not GPT2:
        found["intermediate_size"] = config.ffn
        found["num_key_value_heads"] = config.kv_heads
        # of transformers 5, and of the versions before it
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rotary_base}
        found["rope_theta"] = config.rotary_base
    activations = [name for name, kind in ACTIVATIONS.items() if kind == config.mlp]
    found[family.activation] = activations[0]
    for name, allowed in family.only.items():
        found[name] = allowed[0]
    found |= dict.fromkeys(family.dropouts, config.dropout)
    # Said, since transformers would fill in those of the family, which need not be tokens of ours.
    return found | {"bos_token_id": None, "eos_token_id": None}


def state_dict(config: GPTConfig, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of the model of the hub that computes the same.

    Args:
        config: The config of the GPT.
        weights: State dict of the model.

    Raises:
        ValueError: The hub has no such model.

    Held by: tests/ranks/test_gpt2_files.py, tests/unit/test_hub_models.py
    """
    family = family_of(config)
    found = {}
    for ours, pieces in family.pieces(config).items():
        if ours == "head.weight" and config.tie_embeddings:
            continue
        # One weight here may be several there: Llama has q, k and v, gate and up in tensors of
        # their own.
        for piece in pieces:
            value = weights[ours]
            if piece.rows is not None:
                value = value.narrow(0, piece.first, piece.rows)
            name = piece.name if piece.name == HEAD else family.prefix + piece.name
            # a copy: parts of one tensor share its memory, which a safetensors file cannot
            value = value.t() if piece.transposed else value
            found[name] = value.clone(memory_format=torch.contiguous_format)
    return found


@torch.no_grad()
def load(model: GPT, state_dict: Mapping[str, torch.Tensor]) -> GPT:
    """Copy the weights of a model of the hub into `model`, whatever its dtype and device.

    Args:
        model: A GPT of the same shape (`gpt_config`).
        state_dict: The state dict of the model with a head. A model with tied embeddings also takes
            that of a model without, such as `GPT2Model`.

    Returns:
        The model.

    Raises:
        ValueError: Missing or unexpected names, a shape that differs, or a head that does not
            match the model's `tie_embeddings`.

    Held by: tests/unit/test_gpt2_weights.py
    """
    pieces = family_of(model.config).pieces(model.config)
    bare = bare_names(state_dict)
    found = {name: value for name, value in bare.items() if not name.endswith(BUFFERS)}
    check_head(model.config, found.get(HEAD), found.get(pieces["embed.weight"][0].name))
    check_names(pieces, found)
    target = dict(model.named_parameters())
    values = {}
    for ours in target:
        # The way back of `state_dict`: all pieces of a weight are transposed, or none is.
        parts = [found[piece.name] for piece in pieces[ours]]
        if pieces[ours][0].transposed:
            parts = [part.t() for part in parts]
        value = torch.cat(parts) if len(parts) > 1 else parts[0]
        if value.shape != target[ours].shape:
            raise ValueError(
                f"{pieces[ours][0].name} gives {ours} the shape {list(value.shape)} "
                f"but the model has {list(target[ours].shape)}: build the GPT from gpt_config"
            )
        values[ours] = value
    # Copied only once all of them fit: an error leaves the model as it was.
    for name, value in values.items():
        target[name].copy_(value)
    return model


def bare_name(name: str) -> str:
    """The name of a weight without what wrappers put into it, and without the base model's."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts and parts[0] in BASES:
        parts = parts[1:]
    return ".".join(parts)


def bare_names(found: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors under their bare names (`bare_name`).

    What all names begin with is the attribute under which a program keeps the model, such as `net`
    of a LightningModule: no model here has all its weights in one module.
    """
    bare = {bare_name(name): value for name, value in found.items()}
    firsts = {name.partition(".")[0] for name in bare}
    # more than one: what a single name begins with is no sign of anything
    if len(bare) > 1 and len(firsts) == 1 and all("." in name for name in bare):
        return bare_names({name.partition(".")[2]: value for name, value in bare.items()})
    return bare


def check_names(pieces: Mapping[str, Iterable[Piece]], found: Iterable[str]) -> None:
    """That a checkpoint has all weights of a model, and no others, by their bare names.

    The first layers of a deeper model are a model too, but not the one that was meant.

    Raises:
        ValueError: It has not.
    """
    expected = set()
    for parts in pieces.values():
        expected.update(piece.name for piece in parts)
    missing = sorted(expected - set(found))
    # the head is judged in `check_head`: with tied embeddings a file may have it or not
    unexpected = sorted(set(found) - expected - {HEAD})
    if missing or unexpected:
        raise ValueError(
            "the weights are not those of a model of this shape: "
            f"missing {_some(missing)}; unexpected {_some(unexpected)}"
        )


def check_head(
    config: GPTConfig, head: torch.Tensor | None, embedding: torch.Tensor | None
) -> None:
    """That a head is tied to the embedding, or not, as the model's is.

    Raises:
        ValueError: It is not.
    """
    if not config.tie_embeddings and head is None:
        # The embedding would fit, but the model would then compute something else.
        raise ValueError(
            f"there is no {HEAD} but this GPT has a head of its own: take the weights of a model "
            "with a head, or give --model.tie_embeddings True"
        )
    if head is None or embedding is None or not config.tie_embeddings:
        return
    if not torch.equal(head, embedding):
        raise ValueError(f"{HEAD} differs from the embedding: give --model.tie_embeddings False")


def _rows(ours: str, config: GPTConfig) -> tuple[int, ...]:
    """Rows of the parts of a weight here; each part may be a tensor of its own there."""
    if ours.endswith("attention.qkv"):
        keys = config.kv_heads * config.head_size
        return (config.num_heads * config.head_size, keys, keys)
    if ours.endswith("mlp.up") and config.gated:
        return (config.ffn, config.ffn)
    return ()


def _stacked(names: Sequence[str], rows: tuple[int, ...], transposed: bool) -> list[Piece]:
    if len(names) == 1:
        return [Piece(names[0], transposed=transposed)]
    first = 0
    pieces = []
    for name, length in zip(names, rows, strict=True):
        pieces.append(Piece(name, first, length, transposed))
        first += length
    return pieces


def _some(names: Sequence[str], most: int = 4) -> str:
    """The first few names of a list, and how many more there are."""
    if not names:
        return "none"
    listed = ", ".join(names[:most])
    if len(names) > most:
        return f"{listed} and {len(names) - most} more"
    return listed
