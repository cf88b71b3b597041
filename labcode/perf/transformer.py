"""The shape of any transformer that a plan is made for: GPT, LLaMA (GQA, SwiGLU) or ViT.

The configs of the course's own models (`config.GPTConfig`, `config.ViTConfig`) are two of them:
`Transformer.of(config)`. What they do not have, gated MLPs and layers without biases, is here only.

    weights of a layer     H (2 N D + 2 K D)  +  2 H F             3 H F with a gate
    biases and norms       (N + 2 K) D + H + F + H  +  4 H         none, and 2 H, without biases

H hidden features, N query heads, K key/value heads, D features of a head, F features of the MLP.

Source: Narayanan et al. 2021 (arXiv:2104.04473), eq. 2, for GPT: 12 L H^2 (1 + 13/(12 H) + ...);
    Shazeer 2020 (arXiv:2002.05202) for gated MLPs; Ainslie et al. 2023 (arXiv:2305.13245) for fewer
    key/value heads.
Held by: tests/unit/test_transformer.py
"""

import functools
import tomllib
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from labcode.config import GPTConfig, ViTConfig, require
from labcode.suggest import unknown

HARDWARE_DATA = Path(__file__).parent / "hardware_data"  # package data
MODELS = HARDWARE_DATA / "models.toml"


@dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer; those in features unless it says otherwise.

    Args:
        num_layers, hidden_size, num_heads: As usual.
        sequence_length: Tokens, or patches, of one sample.
        outputs: What the head predicts for a token: the vocabulary, or the values of a patch.
        kv_heads: Key/value heads; None: as many as query heads.
        ffn_size: Inside the MLP; None: 4 * hidden_size.
        gated: Whether the MLP has a third matrix, as SwiGLU has.
        inputs: Values that the first product reads for a token; 0: a token is looked up.
        tied: Whether the head is the embedding.
        learned_positions: Whether there is a weight for each position.
        biases: Whether products and norms have biases.
        causal: Whether a token attends to those before it only.
        dropout: Whether there is any.

    Raises:
        ValueError: A size below 1, or heads that do not divide the features.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int
    outputs: int
    kv_heads: int | None = None
    ffn_size: int | None = None
    gated: bool = False
    inputs: int = 0
    tied: bool = True
    learned_positions: bool = True
    biases: bool = True
    causal: bool = True
    dropout: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "sequence_length", "outputs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give a number above 0")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}: "
                "change one of them"
            )
        if self.num_heads % self.kv:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of kv_heads={self.kv}: "
                "change one of them"
            )

    # a plan looks shapes up in caches many thousand times
    @functools.cached_property
    def _hash(self) -> int:
        return hash(astuple(self))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, model: "Transformer | GPTConfig | ViTConfig") -> "Transformer":
        """The shape of one of the course's own models; a Transformer is returned as it is.

        Raises:
            ValueError: A config that leaves a size to the data.
        """
        if isinstance(model, Transformer):
            return model
        common: dict[str, Any] = {
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "num_heads": model.num_heads,
            "sequence_length": model.sequence_length,
            "ffn_size": model.ffn,
            "dropout": model.dropout > 0,
        }
        if isinstance(model, ViTConfig):
            return cls(
                outputs=model.patch_outputs,
                inputs=model.patch_inputs,
                tied=False,
                causal=False,
                **common,
            )
        require(model, "vocab_size")
        return cls(
            outputs=model.vocab_size or 0,
            kv_heads=model.kv_heads,
            tied=model.tie_embeddings,
            learned_positions=model.positions == "learned",
            **common,
        )

    @functools.cached_property
    def kv(self) -> int:
        """Key/value heads."""
        return self.kv_heads or self.num_heads

    @functools.cached_property
    def ffn(self) -> int:
        """Features inside the MLP."""
        return self.ffn_size or 4 * self.hidden_size

    @functools.cached_property
    def head_size(self) -> int:
        """Features of one head."""
        return self.hidden_size // self.num_heads

    @functools.cached_property
    def qkv(self) -> int:
        """Features of queries, keys and values together."""
        return (self.num_heads + 2 * self.kv) * self.head_size

    @functools.cached_property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP: 2, or 3 with a gate."""
        return 3 if self.gated else 2

    @functools.cached_property
    def layer_products(self) -> int:
        """Weights of a layer that are factors of a matrix product."""
        hidden = self.hidden_size
        return hidden * (self.qkv + hidden) + self.mlp_matrices * hidden * self.ffn

    @functools.cached_property
    def layer_parameters(self) -> int:
        """All weights of a layer."""
        hidden = self.hidden_size
        if not self.biases:
            return self.layer_products + 2 * hidden
        ffn_biases = (self.mlp_matrices - 1) * self.ffn
        return self.layer_products + self.qkv + hidden + ffn_biases + hidden + 4 * hidden

    @functools.cached_property
    def head_weights(self) -> int:
        """Weights of the output head's product."""
        return self.outputs * self.hidden_size

    @functools.cached_property
    def end_parameters(self) -> int:
        """Weights in no layer: embedding, positions, final norm and, unless it is tied, head."""
        hidden = self.hidden_size
        positions = self.sequence_length * hidden if self.learned_positions else 0
        final_norm = 2 * hidden if self.biases else hidden
        if self.inputs:
            embedding = (self.inputs + 1) * hidden
            return embedding + positions + final_norm + self.head_weights + self.outputs
        copies = 1 if self.tied else 2
        return copies * self.head_weights + positions + final_norm

    @functools.cached_property
    def num_parameters(self) -> int:
        """All weights.

        Held by: tests/unit/test_transformer.py::test_parameters_are_those_of_the_configs
        """
        return self.num_layers * self.layer_parameters + self.end_parameters


@functools.cache
def _models() -> dict[str, dict[str, Any]]:
    return tomllib.loads(MODELS.read_text())


def model_names() -> list[str]:
    """Published models by name."""
    return list(_models())


def load_model(name: str) -> Transformer:
    """A published model: `load_model("gpt3-175b")`.

    Raises:
        ValueError: A name that is not in hardware_data/models.toml.
    """
    if name not in _models():
        raise ValueError(unknown("model", name, model_names()))
    sizes = dict(_models()[name])
    del sizes["source"]
    return Transformer(**sizes)
