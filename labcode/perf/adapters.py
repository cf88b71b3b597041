"""What low-rank adapters cost in memory: their weights, and the frozen model beside them.

Beside a layer W [out, in] stand A [r, in] and B [out, r] (LoRA). Under tp the matrix on the side
that is cut is cut as W is, and the other one is whole on each rank:

    column-parallel (qkv, up)    r in      + r out / tp
    row-parallel (proj, down)    r in / tp + r out

What trains has a gradient and an optimizer's state, 16 bytes a weight under AdamW. What is frozen
has its weight alone: 2 bytes in bfloat16, 4 in float32, or 4 bits and its share of two scales:

    4-bit NormalFloat       4 bits + 8 / 64 + 32 / (64 * 256) = 4.127 bits = 0.516 bytes

Each block of 64 weights has a scale of 8 bits, and each 256 of these have one of 32 (double
quantization; with one scale of 32 bits for each block it would be 4.5 bits). The products of the
layers are kept so; embedding, head, norms and biases are not.

Source: Hu et al. 2021 (arXiv:2106.09685), section 4.2; Dettmers et al. 2023 (arXiv:2305.14314),
    section 3, for 4 bits.
Held by: tests/unit/test_adapter_memory.py; against measured bytes by
    tests/ranks/test_lora_memory.py, within 3 %
"""

from labcode.config import GPTConfig, ViTConfig
from labcode.perf.transformer import Transformer

BLOCK = 64  # weights that share a scale of 8 bits
SCALES = 256  # scales that share one of 32 bits
NF4_BYTES = (4 + 8 / BLOCK + 32 / (BLOCK * SCALES)) / 8
# of what is not quantized, and of the one weight that is expanded for its product
EXPANDED_BYTES = 2


def layer_adapters(model: Transformer | GPTConfig | ViTConfig, rank: int, tp: int = 1) -> float:
    """Weights of the adapters of one layer on one rank of tp: beside qkv, proj, up and down.

    q, k and v have one A together, and so have gate and up: the models here multiply by each in one
    product. `peft` gives each of them its own where a model keeps them apart.

    Raises:
        ValueError: A mixture of experts, beside whose MLPs no adapter stands here.
    """
    model = Transformer.of(model)
    if model.experts:
        raise ValueError(
            "a mixture of experts: no adapters stand beside its MLPs here, take a dense model"
        )
    up = model.ffn * (model.mlp_matrices - 1)
    column = 2 * model.hidden_size + (model.qkv + up) / tp
    row = (model.heads_size + model.ffn) / tp + 2 * model.hidden_size
    return rank * (column + row)


def frozen_bytes(weights: float, products: float, *, weight_bytes: float, four_bit: bool) -> float:
    """Bytes of frozen weights.

    Args:
        weights: How many.
        products: Number of those weights by which the layers multiply.
        weight_bytes: Bytes of a weight that is not quantized.
        four_bit: Whether the products are kept in 4 bits.
    """
    if not four_bit:
        return weights * weight_bytes
    return products * NF4_BYTES + (weights - products) * EXPANDED_BYTES
