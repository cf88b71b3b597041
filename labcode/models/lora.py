"""LoRA: the model is frozen, and beside its linear layers stand two thin matrices that train.

    y = W x + (alpha / r) B A x        W [out, in] frozen, A [r, in], B [out, r]

B is zero at first, so that training begins at the frozen model. A layer of in = out = 4096 has 16.8
million weights, and its adapter of rank 8 has 65 536: only these have a gradient and an optimizer's
state. `merge` adds the product to W, after which the layer costs what it did without an adapter.

The adapters are two weights of the layer, `lora_a` and `lora_b`, so that all others keep their
names. What becomes of them under tp stands in `parallel.lora`.

Source: Hu et al. 2021 (arXiv:2106.09685), section 4.1. The layers and names are those of
    torchtitan's `components/lora.py`; as there and in `peft`, A is drawn by `kaiming_uniform_` with
    a = sqrt(5), which is uniform within 1 / sqrt(in).
Held by: tests/unit/test_lora_layers.py
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from labcode.config import GPTConfig, LoraConfig, ViTConfig
from labcode.models.layers import LORA_A, LORA_B, Model, initial_value
from labcode.precision.nf4 import Nf4Linear


class LoraLinear(nn.Linear):
    """A linear layer with an adapter; it takes the weights of the plain one over and freezes them.

    Args:
        layer: The plain layer, [out, in]; on any device, also meta.
        rank: r
        alpha: The adapter counts alpha / r times.

    Attributes:
        is_merged: The adapter is in `weight`; it does not train then.
    """

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        # on meta: its own weights are thrown away at once
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight.requires_grad_(False)
        self.bias = layer.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.lora_a = nn.Parameter(layer.weight.new_zeros(rank, layer.in_features))
        self.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        self.scale = alpha / rank
        self.is_merged = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[.., in] to [.., out]; the product B A, which is as large as W, is made nowhere."""
        y = F.linear(input, self.weight, self.bias)
        if self.is_merged:
            return y
        return y + self.scale * F.linear(F.linear(input, self.lora_a), self.lora_b)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the weight: W + (alpha / r) B A."""
        if not self.is_merged:
            self.weight += self.scale * self.lora_b @ self.lora_a
            self.is_merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take the adapter out of the weight again, up to rounding."""
        if self.is_merged:
            self.weight -= self.scale * self.lora_b @ self.lora_a
            self.is_merged = False


class QLoraLinear(nn.Module):
    """A layer with an adapter whose frozen weight is kept in 4 bits (QLoRA); on one process.

    Args:
        layer: A layer with its adapter, which is taken over; the rounding of W is not made good.

    Source: Dettmers et al. 2023 (arXiv:2305.14314), equation 5.
    Held by: tests/unit/test_nf4.py
    """

    def __init__(self, layer: LoraLinear) -> None:
        super().__init__()
        self.base = Nf4Linear(layer)
        self.lora_a = layer.lora_a
        self.lora_b = layer.lora_b
        self.scale = layer.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., in] to [.., out]"""
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_adapters(model: Model, lora: LoraConfig, seed: int | None = None) -> Model:
    """Freeze a whole model, and put an adapter beside the linear layers of its blocks, in place.

    Args:
        model: A GPT or ViT; on the meta device nothing is drawn.
        lora: Which layers, and how wide the adapters are.
        seed: Of the adapters' values; None draws from torch's global generator.

    Raises:
        ValueError: An adapter would be wider than its layer.
    """
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.startswith("blocks.") and name.rpartition(".")[2] in lora.targets:
            assert isinstance(module, nn.Linear), f"{name} is no linear layer"
            layer = LoraLinear(module, lora.rank, lora.alpha)
            model.set_submodule(name, layer)
            if not layer.lora_a.is_meta:
                draw_adapter(layer, name, model.config, seed)  # pyright: ignore[reportArgumentType]
    return model


@torch.no_grad()
def draw_adapter(
    layer: LoraLinear, name: str, config: GPTConfig | ViTConfig, seed: int | None
) -> None:
    """Give the adapter of a layer its first values: A at random, B zero."""
    for kind, param in ((LORA_A, layer.lora_a), (LORA_B, layer.lora_b)):
        param.copy_(initial_value(f"{name}.{kind}", param.shape, config, seed))


def is_adapter(name: str) -> bool:
    """Whether a weight of this name is a part of an adapter."""
    return name.rpartition(".")[2] in (LORA_A, LORA_B)


def merged(weights: Mapping[str, torch.Tensor], lora: LoraConfig) -> dict[str, torch.Tensor]:
    """The state dict of the plain model: whole weights with the adapters added to them.

    Args:
        weights: {name: whole weight}, adapters among them, or none.
        lora: How wide they are, and how much they count.
    """
    plain = {name: weight for name, weight in weights.items() if not is_adapter(name)}
    for name, lora_b in weights.items():
        layer, _, kind = name.rpartition(".")
        if kind == LORA_B:
            lora_a = weights[f"{layer}.{LORA_A}"]
            weight = plain[f"{layer}.weight"]
            plain[f"{layer}.weight"] = weight + lora.alpha / lora.rank * lora_b @ lora_a
    return plain
