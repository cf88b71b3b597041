"""How much arithmetic a model needs, from its shape alone."""

from labcode.config import GPTConfig, ViTConfig, require


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
    tokens = config.sequence_length
    hidden = config.hidden_size
    if isinstance(config, ViTConfig):
        kv_heads = config.num_heads
        patch_embedding = config.patch_inputs * hidden
        head = hidden * config.patch_outputs
        ends = patch_embedding + head
    else:
        require(config, "vocab_size")
        assert config.vocab_size is not None
        kv_heads = config.kv_heads
        ends = config.vocab_size * hidden
    attention_layer = hidden * (2 * hidden + 2 * kv_heads * config.head_size)
    mlp = 2 * hidden * config.ffn
    weights = config.num_layers * (attention_layer + mlp) + ends
    attention = config.num_layers * 4 * tokens**2 * hidden
    return 3 * (2 * tokens * weights + attention)
