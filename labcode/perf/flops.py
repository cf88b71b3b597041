"""How much arithmetic a model needs, from its shape alone."""

from labcode.config import GPTConfig, ViTConfig


def training_flops_per_sample(config: GPTConfig | ViTConfig) -> int:
    """FLOPs of forward and backward for one sample: the matrix products, without recomputation.

        3 * (2 * S * W  +  L * 4 * S^2 * A)       W weights in matrix products, A = heads * head size

    Two FLOPs a multiply-add; backward costs twice the forward; attention counts the full square, masked or not. Token
    lookup costs nothing, the output head does, tied or not.

    Source: Kaplan et al. 2020 (arXiv:2001.08361), section 2.1; Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    Held by: tests/unit/test_flops.py::test_flops_equal_those_that_torch_counts
    """
    tokens, hidden = config.sequence_length, config.hidden_size
    kv_features = getattr(config, "kv_heads", config.num_heads) * config.head_size
    layer = hidden * (2 * hidden + 2 * kv_features) + 2 * hidden * config.ffn
    if isinstance(config, ViTConfig):
        ends = (
            config.patch_inputs + config.patch_outputs
        ) * hidden  # patch embedding and pixel head
    else:
        ends = config.vocab_size * hidden
    weights = config.num_layers * layer + ends
    attention = config.num_layers * 4 * tokens**2 * hidden
    return 3 * (2 * tokens * weights + attention)
