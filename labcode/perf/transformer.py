"""The shape of any transformer that a plan is made for: GPT, LLaMA (GQA, SwiGLU) or ViT.

The configs of the course's own models (`config.GPTConfig`, `config.ViTConfig`) are two of them:
`Transformer.of(config)`.

    weights of a layer     H (2 N D + 2 K D)  +  2 H F             3 H F with a gate
    biases and norms       (N + 2 K) D + H + F + H  +  4 H         none, and 2 H, without biases
    of E experts           E times the MLP, and H E of the router (and E, if it has biases); a token
                           uses k of them and the whole router

H hidden features, N query heads, K key/value heads, D features of a head, F features of the MLP, or
of one expert.

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
from labcode.perf.nearest import unknown_model

HARDWARE_DATA = Path(__file__).parent / "hardware_data"  # package data
MODELS = HARDWARE_DATA / "models.toml"


@dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer; those in features unless it says otherwise.

    Args:
        num_layers, hidden_size, num_heads: The usual sizes of a transformer.
        sequence_length: Tokens, or patches, of one sample.
        outputs: What the head predicts for a token: the vocabulary, or the values of a patch.
        kv_heads: Key/value heads; None: as many as query heads.
        ffn_size: Width inside the MLP; None: 4 * hidden_size.
        gated: Whether the MLP has a third matrix, as SwiGLU has.
        inputs: Values that the first product reads for a token; 0: a token is looked up.
        tied: Whether the head is the embedding.
        learned_positions: Whether there is a weight for each position.
        biases: Whether products and norms have biases.
        causal: Whether a token attends to those before it only.
        dropout: Whether there is any.
        head_features: Features of one head; None: hidden_size / num_heads.
        max_positions: How many positions have a weight, if more than a sequence has; None: as many.
        experts: MLPs of a layer between which a router chooses; 0: one for all tokens, no router.
        active_experts: How many of them a token goes through.
        shared_size: Width inside one more MLP beside them that every token goes through.
        router_biases: Whether each expert has a bias by which the load is kept even.

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
    head_features: int | None = None
    max_positions: int | None = None
    experts: int = 0
    active_experts: int = 1
    shared_size: int = 0
    router_biases: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "sequence_length", "outputs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give a number above 0")
        if self.head_features is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}: "
                "change one of them"
            )
        if self.num_heads % self.kv:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of kv_heads={self.kv}: "
                "change one of them"
            )
        if self.experts and not 1 <= self.active_experts <= self.experts:
            raise ValueError(
                f"active_experts={self.active_experts} of experts={self.experts}: a token goes "
                "through 1 to all of them"
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
        if model.num_experts:
            common["ffn_size"] = model.expert_ffn
        return cls(
            outputs=model.vocab_size or 0,
            kv_heads=model.kv_heads,
            tied=model.tie_embeddings,
            learned_positions=model.positions == "learned",
            gated=model.gated,
            biases=model.bias,
            experts=model.num_experts,
            active_experts=model.experts_per_token if model.num_experts else 1,
            shared_size=model.shared_ffn_size if model.num_experts else 0,
            router_biases=model.num_experts > 0 and model.router_bias_rate > 0,
            **common,
        )

    @functools.cached_property
    def kv(self) -> int:
        """Key/value heads."""
        return self.kv_heads or self.num_heads

    @functools.cached_property
    def ffn(self) -> int:
        """Features inside the MLP, or inside one expert."""
        return self.ffn_size or 4 * self.hidden_size

    @functools.cached_property
    def active_ffn(self) -> int:
        """Features inside all MLPs that a token goes through."""
        if not self.experts:
            return self.ffn
        return self.active_experts * self.ffn + self.shared_size

    @functools.cached_property
    def head_size(self) -> int:
        """Features of one head."""
        return self.head_features or self.hidden_size // self.num_heads

    @functools.cached_property
    def heads_size(self) -> int:
        """Features of all query heads together, which the projection after them reads."""
        return self.num_heads * self.head_size

    @functools.cached_property
    def qkv(self) -> int:
        """Features of queries, keys and values together."""
        return (self.num_heads + 2 * self.kv) * self.head_size

    @functools.cached_property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP: 2, or 3 with a gate."""
        return 3 if self.gated else 2

    @functools.cached_property
    def sums_over_tp(self) -> int:
        """Partial sums of a layer that tp adds up forward: after attention and after each MLP."""
        return 3 if self.experts and self.shared_size else 2

    @functools.cached_property
    def layer_products(self) -> int:
        """Weights of a layer by which a token is multiplied."""
        hidden = self.hidden_size
        attention = hidden * (self.qkv + self.heads_size)
        return attention + self.mlp_matrices * hidden * self.active_ffn + hidden * self.experts

    @functools.cached_property
    def idle_expert_weights(self) -> int:
        """Weights of a layer's experts through which a token does not go."""
        if not self.experts:
            return 0
        return self.expert_weights * (self.experts - self.active_experts) // self.experts

    @functools.cached_property
    def expert_weights(self) -> int:
        """Weights of all experts of a layer, which ep divides; those of a shared one are not."""
        return self.experts * self.mlp_matrices * self.hidden_size * self.ffn

    @functools.cached_property
    def layer_parameters(self) -> int:
        """All weights of a layer."""
        hidden = self.hidden_size
        products = self.layer_products + self.idle_expert_weights
        if self.router_biases:
            products += self.experts
        if not self.biases:
            return products + 2 * hidden
        ffn_biases = (self.mlp_matrices - 1) * self.ffn
        return products + self.qkv + hidden + ffn_biases + hidden + 4 * hidden

    @functools.cached_property
    def head_weights(self) -> int:
        """Weights of the output head's product."""
        return self.outputs * self.hidden_size

    @functools.cached_property
    def end_parameters(self) -> int:
        """Weights in no layer: embedding, positions, final norm and, unless it is tied, head."""
        hidden = self.hidden_size
        positions = 0
        if self.learned_positions:
            positions = (self.max_positions or self.sequence_length) * hidden
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

    @functools.cached_property
    def num_active_parameters(self) -> int:
        """Those of `num_parameters` that one token uses; of a dense model all."""
        return self.num_parameters - self.num_layers * self.idle_expert_weights

    def check_ep(self, ep: int) -> None:
        """Refuse experts that cannot be divided over that many ranks.

        Raises:
            ValueError: One line that says what does not fit.
        """
        if ep > 1 and not self.experts:
            raise ValueError(f"ep={ep} divides experts, and this model has none: leave ep at 1")
        if self.experts % ep:
            raise ValueError(
                f"experts={self.experts} is not divisible by ep={ep}: choose a divisor of their "
                "number"
            )


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
        raise ValueError(unknown_model(name, published_sizes()))
    return _published(name)


@functools.cache
def _published(name: str) -> Transformer:
    sizes = dict(_models()[name])
    del sizes["source"]
    return Transformer(**sizes)


def published_sizes() -> dict[str, float | None]:
    """{published model: its weights}."""
    return {name: _published(name).num_parameters for name in model_names()}
