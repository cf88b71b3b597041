"""Named, complete training runs: a recipe is a function that returns a whole `Config`.

The shapes of the GPT-3 family are those of Brown et al. 2020 (arXiv:2005.14165), table 2.1, with
GPT-2's vocabulary.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from labcode.config import (
    Config,
    GPTConfig,
    OptimConfig,
    TextData,
    TrainConfig,
    ViTConfig,
    WeatherData,
)
from labcode.runtime import suggest

# name: (layers, heads, hidden size, context length)
GPT_SHAPES = {
    "gpt_1m": (5, 4, 128, 128),
    "gpt_10m": (6, 6, 384, 256),
    "gpt_124m": (12, 12, 768, 2048),
    "gpt_350m": (24, 16, 1024, 2048),
    "gpt_760m": (24, 16, 1536, 2048),
    "gpt_1b": (24, 16, 2048, 2048),
    "gpt_3b": (32, 32, 2560, 2048),
    "gpt_7b": (32, 32, 4096, 2048),
    "gpt_13b": (40, 40, 5120, 2048),
    "gpt_175b": (96, 96, 12288, 2048),
}


def gpt_shape(name: str, **changes: Any) -> GPTConfig:
    """The model of one row of `GPT_SHAPES`.

    Args:
        name: Name of a row of the table.
        changes: Fields of the model; without `vocab_size` it has GPT-2's vocabulary of 50257.

    Raises:
        ValueError: No such row.
    """
    if name not in GPT_SHAPES:
        raise ValueError(suggest.unknown("model shape", name, GPT_SHAPES))
    num_layers, num_heads, hidden_size, context_length = GPT_SHAPES[name]
    sizes: dict[str, Any] = {
        "num_layers": num_layers,
        "num_heads": num_heads,
        "hidden_size": hidden_size,
        "context_length": context_length,
        "vocab_size": 50257,
    }
    sizes.update(changes)
    return GPTConfig(**sizes)


def gpt_tiny() -> Config:
    """Characters of Shakespeare, far below unigram entropy in 90 s on two cores."""
    return Config(
        "gpt_tiny",
        GPTConfig(
            num_layers=2, num_heads=4, hidden_size=64, context_length=128, positions="rotary"
        ),
        TextData(),
        optim=OptimConfig(lr=1e-2, min_lr=1e-3, warmup_steps=100),
        train=TrainConfig(steps=1500, global_batch=16, eval_every=300),
    )


def gpt_moe_tiny() -> Config:
    """Like gpt_tiny, with 8 experts in each layer, of which a character uses 2."""
    tiny = gpt_tiny()
    model = GPTConfig(
        num_layers=2,
        num_heads=4,
        hidden_size=64,
        context_length=128,
        positions="rotary",
        norm="rms",
        mlp="swiglu",
        bias=False,
        num_experts=8,
        experts_per_token=2,
        expert_ffn_size=96,
    )
    return replace(tiny, name="gpt_moe_tiny", model=model)


def gpt_10m() -> Config:
    """Shakespeare in BPE tokens, 10 M parameters in the layers: meant for a GPU."""
    return Config(
        "gpt_10m",
        gpt_shape("gpt_10m", vocab_size=None, positions="rotary"),
        TextData(tokenizer="bpe"),
        optim=OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=100),
        train=TrainConfig(steps=2000, global_batch=64, micro_batch=8, eval_every=200),
    )


def vit_tiny() -> Config:
    """Real ERA5 at 2 degrees, 7 to 8 hours ahead: beats persistence within 120 s on two cores."""
    return Config(
        "vit_tiny",
        ViTConfig(num_layers=4, num_heads=4, hidden_size=128, patch_size=5),
        WeatherData(roll=True, sun=True),
        optim=OptimConfig(lr=1e-3, min_lr=1e-5, warmup_steps=20),
        train=TrainConfig(steps=300, global_batch=4, eval_every=100, sample_tokens=0),
    )


RECIPES = {recipe.__name__: recipe for recipe in (gpt_tiny, gpt_moe_tiny, gpt_10m, vit_tiny)}


def get(name: str) -> Config:
    """The recipe of that name, built.

    Raises:
        ValueError: No such recipe; the message lists those that exist.
    """
    if name not in RECIPES:
        raise ValueError(suggest.unknown("recipe", name, RECIPES))
    return RECIPES[name]()


# ---- single fields


def field_paths(config: object, prefix: str = "") -> dict[str, object]:
    """All single fields of a config as `{"train.steps": 300, ...}`: what can be overridden."""
    found: dict[str, object] = {}
    for field in fields(config):  # pyright: ignore[reportArgumentType]
        value = getattr(config, field.name)
        path = prefix + field.name
        if is_dataclass(value):
            found.update(field_paths(value, f"{path}."))
        else:
            found[path] = value
    return found


def with_changes(config: Config, changes: Mapping[str, object]) -> Config:
    """A copy with single fields changed, as in `{"train.steps": 20, "parallel.tp": 2}`.

    All changes are made before anything is checked, so that fields which only fit together can be
    changed together: `{"model.num_heads": 5, "model.hidden_size": 35}`.

    Raises:
        ValueError: An unknown field, or values that do not fit.
    """
    exist = field_paths(config)
    tree: dict[str, Any] = {}
    for path, value in changes.items():
        if path not in exist:
            raise ValueError(unknown_field(path, exist))
        *sections, name = path.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[name] = value
    return _replaced(config, tree)


def _replaced(config: Any, tree: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with the values of `tree`, which is nested as the dataclass is."""
    values = {}
    for name, value in tree.items():
        current = getattr(config, name)
        values[name] = _replaced(current, value) if is_dataclass(current) else value
    return replace(config, **values)


# Last parts of names that people know from elsewhere: the field here.
CALLED_HERE = {
    "batch_size": "train.global_batch",
    "bs": "train.global_batch",
    "grad_accum": "train.micro_batch",
    "gradient_accumulation_steps": "train.micro_batch",
    "epochs": "train.steps",
    "max_iters": "train.steps",
    "learning_rate": "optim.lr",
    "optimizer": "optim.name",
    "wd": "optim.weight_decay",
    "grad_clip": "optim.clip_norm",
    "warmup": "optim.warmup_steps",
    "precision": "train.dtype",
    "amp": "train.dtype",
    "bf16": "train.dtype",
    "fp16": "train.dtype",
    "fsdp": "parallel.zero_stage",
    "recompute": "parallel.activation_checkpointing",
    "d_model": "model.hidden_size",
    "n_embd": "model.hidden_size",
    "seq_len": "model.context_length",
    "seq_length": "model.context_length",
    "max_seq_len": "model.context_length",
    "sequence_length": "model.context_length",
    "max_length": "model.context_length",
    "block_size": "model.context_length",
    "num_workers": "loader.workers",
    "save_every": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "output_dir": "train.out",
}
# The same for what no field says.
LAUNCHED = ("device", "devices", "gpus", "num_gpus", "nproc", "nproc_per_node", "ranks")


def unknown_field(path: str, known: Mapping[str, object], dashes: str = "") -> str:
    """The one-line message for a field that does not exist.

    Args:
        path: The field as it was typed, without dashes: "train.step".
        known: The fields of the recipe, as from `field_paths`.
        dashes: "--" on the command line.
    """
    last = path.rpartition(".")[2]
    if last in LAUNCHED:
        return (
            f"unknown field {dashes}{path}: each rank takes a GPU if there is one, and 2 ranks are "
            "started by torchrun --nproc-per-node 2 -m labcode.train RECIPE"
        )
    # What is like no other gets the fields of its section, or the sections.
    section = path.split(".")[0]
    listed = [name for name in known if name.startswith(f"{section}.")]
    if listed and path == section:
        return f"unknown field {dashes}{path}: it is a section, of {', '.join(listed)}"
    if not listed:
        listed = sorted({name.split(".")[0] for name in known})
    spelled = [dashes + name for name in known]
    recipe = known.get("name") or "RECIPE"
    here = CALLED_HERE.get(last)
    instead = f"{dashes}{here}" if here in known else None
    return suggest.unknown(
        "field",
        dashes + path,
        spelled,
        listed=listed,
        quoted=False,
        instead=instead,
        all_in=f"python -m labcode.train {recipe} --help",
    )
