"""Shapes of the two models, as frozen dataclasses; no torch."""

from dataclasses import dataclass
from typing import Literal


def positive(config, *names):
    """Each named field is a number above zero, or None where the field allows it."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value}: give a number above 0")


class _Transformer:
    """What the two model configs compute alike."""

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def ffn(self) -> int:
        return self.ffn_size or 4 * self.hidden_size

    def _layer_parameters(self, kv_heads):
        """Of all layers and the final norm, biases included."""
        hidden, ffn = self.hidden_size, self.ffn
        attention = (hidden + 1) * (self.num_heads + 2 * kv_heads) * self.head_size + (
            hidden + 1
        ) * hidden
        return (
            self.num_layers * (attention + (hidden + 1) * ffn + (ffn + 1) * hidden + 4 * hidden)
            + 2 * hidden
        )


@dataclass(frozen=True)
class GPTConfig(_Transformer):
    """Shape of a GPT. Sizes are in features, `context_length` in tokens.

    Source: Radford et al. 2019 (GPT-2) for the architecture; Su et al. 2021 (arXiv:2104.09864) for rotary positions;
        Ainslie et al. 2023 (arXiv:2305.13245) for fewer key/value heads than query heads.
    """

    vocab_size: int | None = None  # None: as many as the tokenizer of the data has
    context_length: int = 128
    num_layers: int = 4
    num_heads: int = 4
    hidden_size: int = 128
    num_kv_heads: int | None = None  # None: as many as query heads
    ffn_size: int | None = None  # None: 4 * hidden_size
    positions: Literal["learned", "rotary"] = "learned"
    tie_embeddings: bool = True
    dropout: float = 0.0

    def __post_init__(self):
        _check_transformer(self)
        positive(self, "vocab_size", "context_length", "num_kv_heads")
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.kv_heads}"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(
                f"rotary positions turn pairs of features: head size {self.head_size} is odd"
            )

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def sequence_length(self) -> int:
        """Tokens that one sample sends through the layers."""
        return self.context_length

    @property
    def num_parameters(self) -> int:
        """Weights and biases of the whole model, exactly; a tied embedding counts once."""
        require(self, "vocab_size")
        embeddings = self.vocab_size * (1 if self.tie_embeddings else 2)
        positions = self.context_length if self.positions == "learned" else 0
        return (embeddings + positions) * self.hidden_size + self._layer_parameters(self.kv_heads)


@dataclass(frozen=True)
class ViTConfig(_Transformer):
    """Shape of a vision transformer that maps a weather state to the next one.

    A state is `[C, Y, X]`: C variables on Y latitudes and X longitudes; it is cut into patches of `patch_size` squared.
    Forcings, such as the height of the sun, are F more fields that go in and are not predicted.
    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), with a pixel-space head in place of the class token.
    """

    num_variables: int | None = None  # None: as the data has them; so are forcings, lat and lon
    num_forcings: int | None = None
    lat: int | None = None
    lon: int | None = None
    patch_size: int = 5
    num_layers: int = 4
    num_heads: int = 4
    hidden_size: int = 128
    ffn_size: int | None = None
    dropout: float = 0.0

    def __post_init__(self):
        _check_transformer(self)
        positive(self, "num_variables", "lat", "lon", "patch_size")
        for name in ("lat", "lon"):
            size = getattr(self, name)
            if size is not None and size % self.patch_size:
                raise ValueError(
                    f"{name}={size} is not a multiple of patch_size={self.patch_size}: choose a patch that divides it"
                )

    @property
    def patch_outputs(self) -> int:
        """Values of a patch that are predicted, `C * P^2`."""
        return self.num_variables * self.patch_size**2

    @property
    def patch_inputs(self) -> int:
        """Values of a patch that go in, `(C + F) * P^2`."""
        return self.patch_outputs + (self.num_forcings or 0) * self.patch_size**2

    @property
    def sequence_length(self) -> int:
        """Patches that one sample sends through the layers."""
        return (self.lat // self.patch_size) * (self.lon // self.patch_size)

    @property
    def num_parameters(self) -> int:
        """Weights and biases of the whole model, exactly."""
        require(self, "num_variables", "lat", "lon")
        hidden = self.hidden_size
        embed_and_head = (self.patch_inputs + 1) * hidden + (hidden + 1) * self.patch_outputs
        return (
            embed_and_head + self.sequence_length * hidden + self._layer_parameters(self.num_heads)
        )


def require(config, *names):
    """Each named field has a value; what may stay None in a recipe must be known before a model is built or counted."""
    for name in names:
        if getattr(config, name) is None:
            raise ValueError(f"{name}=None: set model.{name} to a number, or take it from the data")


def _check_transformer(config):
    positive(config, "num_layers", "num_heads", "hidden_size", "ffn_size")
    if config.hidden_size % config.num_heads:
        raise ValueError(
            f"hidden_size={config.hidden_size} is not a multiple of num_heads={config.num_heads}: the heads share it equally"
        )
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout={config.dropout}: give a probability from 0 to below 1")
