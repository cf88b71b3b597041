"""Named, complete training runs. A recipe is a function that returns a `Config`; there is nothing to inherit from.

The shapes of the GPT-3 family are those of Brown et al. 2020 (arXiv:2005.14165), table 2.1, with GPT-2's vocabulary.
"""

import difflib
from dataclasses import fields, is_dataclass, replace

from labcode.config import (
    Config,
    GPTConfig,
    OptimConfig,
    TextData,
    TrainConfig,
    ViTConfig,
    WeatherData,
)

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


def gpt_shape(name: str, **changes) -> GPTConfig:
    """The model of one row of `GPT_SHAPES`, with GPT-2's vocabulary of 50257 unless `vocab_size` is given.

    Raises:
        ValueError: No such row.
    """
    layers, heads, hidden, context = GPT_SHAPES[_known(name, GPT_SHAPES, "model shape")]
    sizes = {
        "num_layers": layers,
        "num_heads": heads,
        "hidden_size": hidden,
        "context_length": context,
        "vocab_size": 50257,
    }
    return GPTConfig(**sizes | changes)


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
    """Real ERA5 at 2 degrees, 7 to 8 hours ahead: beats persistence on held-out times within 120 s on two cores."""
    return Config(
        "vit_tiny",
        ViTConfig(num_layers=4, num_heads=4, hidden_size=128, patch_size=5),
        WeatherData(roll=True, sun=True),
        optim=OptimConfig(lr=1e-3, min_lr=1e-5, warmup_steps=20),
        train=TrainConfig(steps=300, global_batch=4, eval_every=100, sample_tokens=0),
    )


RECIPES = {recipe.__name__: recipe for recipe in (gpt_tiny, gpt_10m, vit_tiny)}


def get(name: str) -> Config:
    """The recipe of that name, built.

    Raises:
        ValueError: No such recipe; the message lists those that exist.
    """
    return RECIPES[_known(name, RECIPES, "recipe")]()


def field_paths(config, prefix: str = "") -> dict[str, object]:
    """All single fields of a config as `{"train.steps": 300, ...}`: what the command line can override."""
    flat = {}
    for f in fields(config):
        value = getattr(config, f.name)
        flat |= (
            field_paths(value, f"{prefix}{f.name}.")
            if is_dataclass(value)
            else {prefix + f.name: value}
        )
    return flat


def with_changes(config: Config, changes: dict[str, object]) -> Config:
    """A copy with single fields changed: `with_changes(config, {"train.steps": 20, "parallel.dp": 2})`.

    Raises:
        ValueError: An unknown field, or a value that the field does not allow.
    """
    for path, value in changes.items():
        config = _with_change(config, path.split("."), value, path)
    return config


def _with_change(config, path, value, whole_path):
    head, *rest = path
    if not hasattr(config, head) or (
        rest and not hasattr(getattr(config, head), "__dataclass_fields__")
    ):
        raise ValueError(
            f"there is no field {whole_path!r}: {', '.join(config.__dataclass_fields__)} exist there"
        )
    return replace(
        config,
        **{head: _with_change(getattr(config, head), rest, value, whole_path) if rest else value},
    )


def _known(name, table, what):
    if name not in table:
        close = difflib.get_close_matches(name, table, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"unknown {what} {name!r}: {hint}there are {', '.join(table)}")
    return name
