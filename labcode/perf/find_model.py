"""The model that a user means: a published one, a recipe of the course, a file, or numbers.

    find_model("llama2-7b")                        hardware_data/models.toml
    find_model("gpt_10m", vocab_size=1000)         recipes
    find_model("my_model/config.json")             hub_config
    from_numbers({"layers": 32, "hidden": 4096, "heads": 32}, vocab_size=32000)

A name that is not known is answered with the nearest one in size, if the name tells the size.

Held by: tests/unit/test_find_model.py
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from labcode import recipes
from labcode.config import GPTConfig
from labcode.perf import hub_config
from labcode.perf.hub_config import FAMILIES, NamedModel
from labcode.perf.nearest import nearest, unknown_model
from labcode.perf.transformer import Transformer, load_model, model_names, published_sizes
from labcode.recipes import RECIPES
from labcode.runtime.suggest import unknown

# {option: (its name in a config.json, what it is)}
NUMBERS = {
    "layers": ("num_hidden_layers", "how many"),
    "hidden": ("hidden_size", "features of a token"),
    "heads": ("num_attention_heads", "query heads"),
    "kv_heads": ("num_key_value_heads", "key/value heads, if fewer"),
    "ffn": ("intermediate_size", "features inside the MLP, if unusual"),
    "head_size": ("head_dim", "features of a head, if not hidden / heads"),
}
NEEDED = ("layers", "hidden", "heads")
LIKE = "llama"
OTHER_WAYS = (
    "or give the path of a config.json of the hub, or numbers: --layers, --hidden, --heads, "
    "--vocab-size, --sequence-length"
)


def find_model(
    name: str, *, vocab_size: int | None = None, sequence_length: int | None = None
) -> NamedModel:
    """A published model, the model of a recipe, or that of a config.json.

    Args:
        name: Name of one of the first two, or the path of the last, or of its folder.
        vocab_size: Another vocabulary; of a recipe, one that it takes from its data.
        sequence_length: Tokens of a sample, if other than the model's own.

    Raises:
        ValueError: There is no such model, or the sizes are not possible.
    """
    if name in RECIPES:
        found = _of_recipe(name, vocab_size)
        return replaced(found, None, sequence_length)
    if name in model_names():
        found = NamedModel(name, load_model(name))
        return replaced(found, vocab_size, sequence_length)
    path = Path(name)
    if path.exists():
        return replaced(hub_config.read(path, sequence_length), vocab_size, None)
    sizes = published_sizes() | dict.fromkeys(RECIPES)
    if name.endswith(".json") or (path.parent.is_dir() and path.parent != Path()):
        raise ValueError(
            f"there is no file {name}: give the path of a config.json of the hub, or one of the "
            f"names {', '.join(sizes)}"
        )
    if "/" not in name:
        raise ValueError(f"{unknown_model(name, sizes)}; {OTHER_WAYS}")
    meant = nearest(name.rpartition("/")[2], sizes)
    hint = f", or name one of nearly its size, {meant}" if meant else ""
    raise ValueError(
        f"{name} is no file here, and the hub is not asked: download its config.json and give the "
        f"path{hint}"
    )


def from_numbers(
    numbers: Mapping[str, int | None],
    *,
    like: str = LIKE,
    vocab_size: int | None,
    sequence_length: int | None,
) -> NamedModel:
    """A model from its sizes.

    Args:
        numbers: {option of `NUMBERS`: value}; None: not given.
        like: The family of the hub whose layers it has.
        vocab_size, sequence_length: Its others; both are needed.

    Raises:
        ValueError: One is missing, or they are not possible.
    """
    if like not in FAMILIES:
        raise ValueError(unknown("family", like, FAMILIES))
    given = {name: value for name, value in numbers.items() if value is not None}
    needed: dict[str, int | None] = {name: numbers.get(name) for name in NEEDED}
    needed |= {"vocab-size": vocab_size, "sequence-length": sequence_length}
    missing = [f"--{name}" for name, value in needed.items() if value is None]
    if missing:
        raise ValueError(
            f"a model in numbers also needs {', '.join(missing)}; --kv-heads, --ffn and "
            "--head-size only where they are unusual"
        )
    config: dict[str, object] = {}
    for name, value in given.items():
        config[NUMBERS[name][0]] = value
    config |= {"model_type": like, "vocab_size": vocab_size}
    config["max_position_embeddings"] = sequence_length
    if FAMILIES[like].gated and "ffn" not in given:
        # three matrices with as many weights as two of 4 H (arXiv:2302.13971, section 2.2)
        config["intermediate_size"] = 256 * math.ceil(8 * given["hidden"] / 3 / 256)
    found = hub_config.of_config(config, "the numbers", sequence_length)
    return found._replace(title=f"a model like {like}")


def replaced(found: NamedModel, vocab_size: int | None, sequence_length: int | None) -> NamedModel:
    """The model with another vocabulary or other sequences; None: as it is.

    Raises:
        ValueError: There are weights for fewer positions than the sequence has.
    """
    shape = found.shape
    if vocab_size is not None:
        shape = replace(shape, outputs=vocab_size)
    if sequence_length is not None:
        if shape.learned_positions and sequence_length > shape.sequence_length:
            raise ValueError(
                f"--sequence-length {sequence_length}: {found.title} has weights for "
                f"{shape.sequence_length} positions, and no sequence can be longer"
            )
        shape = replace(shape, sequence_length=sequence_length, max_positions=shape.sequence_length)
    return found._replace(shape=shape)


def _of_recipe(name: str, vocab_size: int | None) -> NamedModel:
    model = recipes.get(name).model
    if isinstance(model, GPTConfig) and vocab_size is not None:
        model = replace(model, vocab_size=vocab_size)
    try:
        return NamedModel(name, Transformer.of(model))
    except ValueError as error:
        missing = str(error).partition("=")[0]
        cure = "add --vocab-size" if missing == "vocab_size" else "name another model"
        raise ValueError(f"{name} takes {missing} from its data: {cure}") from None


def described(found: NamedModel) -> str:
    """A model in one line: what it is called, how large it is, how long its sequences are."""
    shape = found.shape
    weights = f"{in_words(shape.num_parameters)} weights"
    if shape.experts:
        weights += f", {in_words(shape.num_active_parameters)} of them for each token"
    return f"{found.title}: {weights}, sequences of {shape.sequence_length:,} tokens"


def in_words(weights: float) -> str:
    """A number of weights: 6738415616 is "6.74 billion"."""
    if weights < 1e6:
        return f"{weights:,.0f}"
    for size, name in ((1e6, "million"), (1e9, "billion"), (1e12, "trillion")):
        if weights < 999.5 * size:
            return f"{weights / size:.3g} {name}"
    return f"{weights / 1e12:,.0f} trillion"
