"""How much arithmetic a model needs, from its shape alone."""

import math
from collections.abc import Iterable, Sequence

from labcode.config import GPTConfig, ViTConfig
from labcode.perf.transformer import Transformer


def training_flops_per_sample(config: GPTConfig | ViTConfig) -> int:
    """FLOPs of forward and backward for one sample, without activation checkpointing.

        3 * (2 * S * W  +  L * 4 * S^2 * A)     W weights in matrix products, A heads * head size

    Counted are the matrix products: two FLOPs a multiply-add; backward costs twice the forward.
    Attention counts the full square, masked or not. Token lookup costs nothing; the output head
    does, tied or not.

    Source: Kaplan et al. 2020 (arXiv:2001.08361), section 2.1; Chowdhery et al. 2022
        (arXiv:2204.02311), appendix B.
    Held by: tests/unit/test_flops.py::test_flops_equal_those_that_torch_counts
    """
    return transformer_flops_per_sample(Transformer.of(config))


def transformer_flops_per_sample(
    model: Transformer, *, causal: bool = False, activation_checkpointing: str = "none"
) -> int:
    """FLOPs of forward and backward for one sample of any transformer.

        none         3 forward                                             72 B s L h^2 (...)
        selective    3 forward + the core of attention once more
        full         4 forward of the layers, 3 of the head                96 B s L h^2 (...)

    Args:
        model: Shape of the model.
        causal: Whether only the half of attention's square counts that a causal mask leaves.
        activation_checkpointing: What is computed again counts as well: these are the hardware's
            FLOPs; without it they are the model's.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), eq. 3, and its appendix; Korthikanti et al.
        2022 (arXiv:2205.05198), appendix A.
    Held by: tests/unit/test_flops.py
    """
    tokens = model.sequence_length
    attention = model.num_layers * 4 * tokens**2 * model.heads_size
    if causal:
        attention //= 2
    layers = 2 * tokens * model.num_layers * model.layer_products + attention
    ends = 2 * tokens * (model.head_weights + model.inputs * model.hidden_size)
    again = {"none": 0, "selective": attention, "full": layers}
    if activation_checkpointing not in again:
        raise ValueError(
            f"activation_checkpointing={activation_checkpointing!r}: choose one of "
            f"{', '.join(again)}"
        )
    return 3 * (layers + ends) + again[activation_checkpointing]


def frozen_flops_per_sample(
    config: GPTConfig | ViTConfig, weights: Iterable[tuple[str, Sequence[int], bool]]
) -> int:
    """Those of `training_flops_per_sample` that frozen weights spare.

    A product with W weights has 2 S W FLOPs forward, 2 S W for the gradient of its weights, which a
    frozen one does not need, and 2 S W for that of its input, which nothing needs before the first
    weight that trains. Experts count as if the router came before them in a row.

    Args:
        config: The shape of the model.
        weights: (name, shape, whether it trains) of each, in the order of forward, as
            `named_parameters` of the model gives them.

    Held by: tests/unit/test_flops.py::test_frozen_weights_spare_what_torch_does_not_count
    """
    model = Transformer.of(config)
    tokens = model.sequence_length
    looked_up = {"positions.weight"} if model.inputs else {"positions.weight", "embed.weight"}
    embedding_trains = True
    reached = False  # whether a gradient is wanted of what the next product reads
    spared = 0
    for name, shape, trains in weights:
        if name == "embed.weight":
            embedding_trains = trains
        if name.endswith("attention.proj.weight") and not reached:
            spared += 2 * 4 * tokens**2 * model.heads_size  # backward of attention's core
        if len(shape) > 1 and name not in looked_up:
            flops = 2 * tokens * math.prod(shape)
            if ".experts." in name:
                flops = flops * model.active_experts // model.experts
            if not trains:
                spared += flops
            # the formula has a gradient of the data itself, which is never computed
            if not reached and name != "embed.weight":
                spared += flops
        reached = reached or trains
    if model.tied and not embedding_trains:
        spared += 2 * tokens * model.head_weights
    return spared
