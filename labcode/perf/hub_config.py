"""The shape of anybody's model, from the config.json that the Hugging Face hub keeps beside it.

    read("Llama-2-7b-hf/config.json")           a file, or the folder that it lies in
    of_config({"model_type": "llama", "hidden_size": 4096, ...}, "my model")

Read are decoders whose layers are alike, dense or of experts. A family has its own names for the
same sizes (`SIZES`), and what its code does the file does not say (`FAMILIES`): whether the MLP has
a gate, whether positions have weights. A family that is not known here counts as a Llama, and the
answer says so. What is no such decoder, an encoder or a state-space model, is refused by what the
file says of itself, in one line.

Biases and norms count as all or none: together they are a thousandth of the weights, and the whole
is within 0.5 % of what the model has.

Source: the configuration and modeling files of transformers 5.23; for what is in no release of it
    (baichuan, chatglm, internlm, qwen, MPT's grouped heads) the code beside the weights on the hub.
Held by: tests/unit/test_hub_config.py, against `transformers` where it is installed
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from labcode.perf.transformer import Transformer
from labcode.runtime.fields import shown
from labcode.runtime.file_kinds import kind_of
from labcode.runtime.units import type_in_words

CONFIG = "config.json"
USUAL_TOKENS = 4096  # of a sequence, where the file allows more and nobody says how many
MOST = 10**8  # of any size: what is larger is a slip
MOST_LAYERS = 10**4
MOST_BYTES = 10**7
# {size: its names, the first that a file has counts}
SIZES = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "ffn_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff"),
    "head_features": ("head_dim", "kv_channels"),
    "outputs": ("vocab_size", "padded_vocab_size"),
    "positions": (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_seq_len",
        "seq_length",
        "model_max_length",
    ),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "active_experts": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k"),
    "expert_size": ("moe_intermediate_size",),
}
# Where the text model of a file that holds several is: images and sound are read by the others.
TEXT = ("text_config", "llm_config", "language_config", "thinker_config")


class Family(NamedTuple):
    """What the code of a family does and its file need not say.

    Args:
        gated: Whether the MLP has a third matrix.
        biases: Whether products and norms have biases.
        learned: Whether positions have weights.
        tied: Whether the head is the embedding, where the file does not say so.
    """

    gated: bool = True
    biases: bool = False
    learned: bool = False
    tied: bool = False


LLAMA = Family()
TIED_LLAMA = Family(tied=True)
GPT = Family(gated=False, biases=True, learned=True, tied=True)
NEOX = Family(gated=False, biases=True)
BLOOM = Family(gated=False, biases=True, tied=True)
FALCON = Family(gated=False, tied=True)
PLAIN = Family(gated=False)
FAMILIES = {
    **dict.fromkeys(("gpt2", "gpt-sw3", "gpt_bigcode", "gpt_neo", "opt", "openai-gpt"), GPT),
    **dict.fromkeys(("gptj", "codegen", "gpt_neox", "phi", "phi-msft", "persimmon", "jais2"), NEOX),
    **dict.fromkeys(("bloom", "starcoder2", "xglm", "gpt_neox_japanese", "ctrl"), BLOOM),
    **dict.fromkeys(("falcon", "RefinedWeb", "RefinedWebModel", "mpt"), FALCON),
    **dict.fromkeys(("apertus", "arcee", "nanochat", "nemotron"), PLAIN),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "cohere", "cohere2"), TIED_LLAMA),
    **dict.fromkeys(("ernie4_5", "granite_swa", "smollm3", "vaultgemma"), TIED_LLAMA),
    "biogpt": GPT,
    **dict.fromkeys(
        (
            *("llama", "mistral", "ministral", "ministral3", "qwen", "qwen2", "qwen3", "phi3"),
            *("stablelm", "olmo", "olmo2", "olmo3", "granite", "glm", "glm4", "chatglm"),
            *("helium", "seed_oss", "exaone", "exaone4", "internlm", "internlm2", "internlm3"),
            *("baichuan", "cwm", "hunyuan_v1_dense", "hyperclovax", "minicpm", "Yi"),
            *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "phimoe", "granitemoe"),
            *("dbrx", "minimax_m2", "llama4"),
            *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
        ),
        LLAMA,
    ),
}
# What a text model inside another file leaves out: the defaults of its class.
LEFT_OUT = {
    "llama": (4096, 32, 32, 32, 11008, None, 32000, 2048),
    "mistral": (4096, 32, 32, 8, 14336, None, 32000, 131072),
    "qwen2": (4096, 32, 32, 32, 22016, None, 151936, 32768),
    "gemma": (3072, 28, 16, 16, 24576, 256, 256000, 8192),
    "gemma2": (2304, 26, 8, 4, 9216, 256, 256000, 8192),
    "gemma3_text": (2304, 26, 8, 4, 9216, 256, 262208, 131072),
}
LEFT_OUT_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
# Families whose heads share one key and value unless the file says otherwise.
MULTI_QUERY = ("falcon", "RefinedWebModel", "gpt_bigcode")
ATTENDS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
NO_ATTENTION = re.compile(r"mamba|rwkv|ssm|xlstm|retnet|hyena|recurrent|jamba|zamba|bamba|lfm2")
STATES = re.compile(
    r"ssm_|mamba_|linear_(num|key|value|conv|attn)|lru_|conv_L|state_size$|d_state$|hybrid_override"
)
ENCODERS = re.compile(r"bert|clip|vit|electra|xlnet|xlm|reformer|^git$|wav2vec")
SEES_OR_HEARS = re.compile(r"For(Masked|PreTraining|Image|Speech|CTC|Audio|Object)|ViT|CLIP")
# Whether some layers have experts and others have none: how many or which have none, ...
WITHOUT_EXPERTS = ("first_k_dense_replace", "mlp_only_layers", "moe_layer_start_index")
# ... and how far those are apart that have some; 1 is every layer.
APART = (
    *("decoder_sparse_step", "interleave_moe_layer_step"),
    *("moe_layer_freq", "expert_layer_period"),
)
# Families in which every token also goes through one more MLP, as large as an expert.
SHARES_ONE = ("llama4",)
# kinds of files (`file_kinds`) beside which a config.json lies
WEIGHTS = ("safetensors", "torch", "old torch", "gguf", "pickle", "npz", "hdf5")
BESIDE = f"give the {CONFIG} that lies beside it"


class NamedModel(NamedTuple):
    """A model and how to speak of it.

    Args:
        title: What it is called.
        shape: Sizes of the model.
        notes: What was taken for granted, each a sentence.
    """

    title: str
    shape: Transformer
    notes: tuple[str, ...] = ()


def read(path: Path, sequence_length: int | None = None) -> NamedModel:
    """The model of a config.json.

    Args:
        path: The file, or the folder that it lies in.
        sequence_length: Tokens of a sample; None: what the file allows, but at most 4096.

    Raises:
        ValueError: It is something else, or a model that is not counted here.
    """
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir())
        if CONFIG not in inside:
            there = ", ".join(inside[:5]) or "nothing"
            raise ValueError(
                f"{path} is a folder without {CONFIG} (it has {there}): give the {CONFIG} of a "
                "model"
            )
        path = path / CONFIG
    return of_config(_json(path), str(path), sequence_length)


def _json(path: Path) -> dict[str, Any]:
    expected = f"the {CONFIG} of a model"
    try:
        kind = kind_of(path)
        if kind.name not in ("text", "json"):
            raise ValueError(kind.is_not(path, expected, dict.fromkeys(WEIGHTS, BESIDE)))
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path} is far larger than {expected}: look at the path")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply for {expected}") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not whole JSON: {error.msg} in line {error.lineno}; get {expected} once "
            "more"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type_in_words(found)}: {expected} is names and values")
    return found


def of_config(
    config: Mapping[str, Any], where: str, sequence_length: int | None = None
) -> NamedModel:
    """The model that a config.json describes.

    Args:
        config: What is in it.
        where: Name of the config, for messages.
        sequence_length: As in `read`.

    Raises:
        ValueError: It describes something else, or a model that is not counted here.
    """
    notes = []
    text = config
    for name in TEXT:
        while isinstance(text.get(name), Mapping):
            text = text[name]
    if text is not config or "vision_config" in config:
        notes.append("only the text model of the file is counted, not what sees or hears")
    if text is not config:
        text = _with_left_out(text)
    if isinstance(text.get("ffn_config"), Mapping):  # DBRX
        text = {**text["ffn_config"], **text}
    _refuse_other_models(text, where)
    kind = str(text.get("model_type", ""))
    if kind not in FAMILIES:
        kind = kind.removesuffix("_text")
    family = FAMILIES.get(kind)
    if family is None:
        family = LLAMA
        called = f"model_type {shown(kind)}" if kind else "a file without model_type"
        notes.append(
            f"{called} is not known here and counts as a Llama, with a gate in the MLP and without "
            "biases: compare the number of weights with what the model's page says"
        )
    sizes: dict[str, Any] = {size: _size(text, size, where) for size in SIZES}
    _fill(text, kind, sizes, where)
    _check_there(text, sizes, family, where)
    _fill_experts(text, kind, sizes, where)
    allowed = sizes.pop("positions")
    tokens = _tokens(allowed, sequence_length, family.learned, where, notes)
    try:
        shape = Transformer(
            **sizes,
            sequence_length=tokens,
            gated=family.gated,
            biases=family.biases,
            learned_positions=family.learned,
            max_positions=allowed if family.learned else None,
            tied=_tied(config, text, family),
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return NamedModel(f"{kind or 'model'} of {where}", shape, tuple(notes))


def _with_left_out(text: Mapping[str, Any]) -> dict[str, Any]:
    values = LEFT_OUT.get(str(text.get("model_type", "")), ())
    return dict(zip(LEFT_OUT_SIZES, values)) | dict(text)


def _refuse_other_models(config: Mapping[str, Any], where: str) -> None:
    """What is no decoder of layers that are alike, by what the file says of itself."""
    kind = str(config.get("model_type", ""))
    architectures = " ".join(map(str, _list(config, "architectures")))
    layer_types = _list(config, "layer_types") or _list(config, "layers_block_type")
    others = sorted({str(one) for one in layer_types} - ATTENDS)
    states = [key for key, value in config.items() if STATES.match(key) and value]
    without = [key for key in WITHOUT_EXPERTS if config.get(key)]
    apart = [key for key in APART if config.get(key) not in (None, 1)]
    reason = ""
    if "peft_type" in config:
        base = config.get("base_model_name_or_path", "the model under it")
        raise ValueError(f"{where} describes an adapter (LoRA): give the {CONFIG} of {base}")
    if "weight_map" in config:
        raise ValueError(f"{where} is the index of files of weights: give the {CONFIG} beside it")
    if "tokenizer_class" in config and "model_type" not in config:
        raise ValueError(f"{where} describes a tokenizer: give the {CONFIG} beside it")
    if {"dim", "n_layers"} <= config.keys():
        raise ValueError(
            f"{where} is a params.json of Meta's own format: give the {CONFIG} of the same model "
            "on the hub, whose name ends in -hf"
        )
    if config.get("is_encoder_decoder") or {"num_decoder_layers", "decoder_layers"} & config.keys():
        reason = "an encoder and a decoder"
    elif (
        ENCODERS.search(kind) or "type_vocab_size" in config or SEES_OR_HEARS.search(architectures)
    ):
        reason = "an encoder"
    elif NO_ATTENTION.search(kind.lower()) or others or states:
        reason = f"layers that are no attention ({', '.join((others or states)[:2]) or kind})"
    elif config.get("kv_lora_rank"):
        reason = "a latent attention (kv_lora_rank)"
    elif config.get("cross_attention_layers") or config.get("add_cross_attention"):
        reason = "layers of cross-attention"
    elif config.get("hidden_size_per_layer_input"):
        reason = "an embedding in each layer (hidden_size_per_layer_input)"
    elif config.get("word_embed_proj_dim", config.get("hidden_size")) != config.get("hidden_size"):
        reason = "an embedding narrower than its layers (word_embed_proj_dim)"
    elif without or apart:
        reason = "layers with experts beside layers without"
    if reason:
        called = kind or architectures or "this model"
        raise ValueError(
            f"{where}: {called} has {reason}, which the planner does not count; it counts decoders "
            "of equal layers such as GPT, Llama and Mixtral. For the stack of such layers in it "
            "give numbers: --layers, --hidden, --heads, --vocab-size, --sequence-length"
        )


def _size(config: Mapping[str, Any], size: str, where: str) -> int | None:
    most = MOST_LAYERS if size == "num_layers" else MOST
    for name in SIZES[size]:
        value = _whole(config, name, where, most)
        if value is not None:
            return value
    return None


def _whole(config: Mapping[str, Any], name: str, where: str, most: int = MOST) -> int | None:
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, list):
        raise ValueError(
            f"{where}: {name} is a list, one for each layer: the planner counts equal layers"
        )
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(
            f"{where}: {name}={shown(value)}, where a whole number up to {most:,} is expected"
        )
    return value


def _list(config: Mapping[str, Any], name: str) -> list[Any]:
    value = config.get(name)
    return value if isinstance(value, list) else []


def _check_there(
    config: Mapping[str, Any], sizes: Mapping[str, Any], family: Family, where: str
) -> None:
    needed = ["num_layers", "hidden_size", "num_heads", "outputs"]
    if family.gated and not sizes["expert_size"]:
        needed.append("ffn_size")  # without a gate it is 4 hidden sizes
    missing = []
    for size in needed:
        if not sizes[size]:
            missing.append(SIZES[size][0])
    if missing:
        there = ", ".join(list(config)[:4]) or "nothing"
        raise ValueError(
            f"{where} lacks {', '.join(missing)} (it begins with {there}): give the {CONFIG} of a "
            "model, or its sizes as numbers, --layers --hidden --heads --vocab-size"
        )


def _fill(config: Mapping[str, Any], kind: str, sizes: dict[str, Any], where: str) -> None:
    """What a family computes from other sizes."""
    attention = config.get("attn_config")
    if isinstance(attention, Mapping):  # MPT, DBRX
        sizes["kv_heads"] = _whole(attention, "kv_n_heads", where)
        if attention.get("attn_type") == "multiquery_attention":
            sizes["kv_heads"] = 1
    if kind in MULTI_QUERY and not config.get("new_decoder_architecture"):
        sizes["kv_heads"] = 1 if config.get("multi_query", True) else None
    if config.get("multi_query_attention"):  # ChatGLM
        sizes["kv_heads"] = _whole(config, "multi_query_group_num", where)
    ratio = _whole(config, "expansion_ratio", where)
    if ratio:
        sizes["ffn_size"] = ratio * (sizes["hidden_size"] or 0)
    if kind == "qwen" and sizes["ffn_size"]:
        sizes["ffn_size"] //= 2  # the two matrices of gate and input together
    for size in ("kv_heads", "ffn_size", "head_features"):
        sizes[size] = sizes[size] or None


def _fill_experts(
    config: Mapping[str, Any],
    kind: str,
    sizes: dict[str, Any],
    where: str,
) -> None:
    expert_size = sizes.pop("expert_size")
    if (sizes["experts"] or 0) < 2:
        del sizes["experts"], sizes["active_experts"]
        return
    if kind not in FAMILIES or not sizes["active_experts"]:
        what = f"model_type {shown(kind)}" if kind not in FAMILIES else "num_experts_per_tok"
        raise ValueError(
            f"{where} has {sizes['experts']} experts, and {what} is not known here: the planner "
            "counts the experts of Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DBRX, gpt-oss, MiniMax-M2 "
            "and Llama 4 Scout"
        )
    sizes["ffn_size"] = expert_size or sizes["ffn_size"]
    sizes["shared_size"] = _whole(config, "shared_expert_intermediate_size", where) or 0
    if kind in SHARES_ONE:
        sizes["shared_size"] = sizes["ffn_size"]


def _tokens(
    allowed: int | None, asked: int | None, learned: bool, where: str, notes: list[str]
) -> int:
    if asked is None:
        if allowed is None and learned:
            raise ValueError(
                f"{where} does not say how long a sequence may be: add --sequence-length"
            )
        if allowed is None:
            notes.append(
                f"sequences have {USUAL_TOKENS:,} tokens here, and the file does not say how many: "
                "say yours with --sequence-length"
            )
            return USUAL_TOKENS
        if allowed > USUAL_TOKENS:
            notes.append(
                f"sequences have {USUAL_TOKENS:,} tokens here, where the file allows {allowed:,}: "
                "say yours with --sequence-length"
            )
        return min(allowed, USUAL_TOKENS)
    if learned and allowed and asked > allowed:
        raise ValueError(
            f"--sequence-length {asked}: {where} has weights for {allowed} positions, and no "
            "sequence can be longer"
        )
    return asked


def _tied(config: Mapping[str, Any], text: Mapping[str, Any], family: Family) -> bool:
    """A file that holds several models says it outside the text model."""
    for place in (text, config):
        if isinstance(place.get("tie_word_embeddings"), bool):
            return place["tie_word_embeddings"]
    return family.tied
