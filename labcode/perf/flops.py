"""How much arithmetic a model needs, from its shape alone."""

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
        model: Its shape.
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
