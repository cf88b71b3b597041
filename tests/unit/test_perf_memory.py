"""Activation bytes: the terms counted by hand, the paper's closed forms, its published figure."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labcode.config import GPTConfig, ViTConfig
from labcode.perf.memory import layer_activations, model_activations, paper_layer_bytes
from labcode.topology import GridShape

SMALL = GPTConfig(vocab_size=50, context_length=8, num_layers=3, num_heads=4, hidden_size=16)
PAPER = {"value_bytes": 2, "mask_bytes": 1, "fused_attention": False}
models = st.builds(
    GPTConfig,
    context_length=st.sampled_from((64, 2048)),
    num_heads=st.sampled_from((8, 16)),
    hidden_size=st.sampled_from((128, 1024)),
    dropout=st.just(0.1),
)


def kept_by(norm, x):
    """The tensors of the size of x that a norm keeps for backward, each memory once."""
    kept = {}

    def note(tensor):
        if tensor.numel() == x.numel():
            kept[tensor.data_ptr()] = tensor  # alive, so that no other one gets its memory
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = norm(x)
    assert result.requires_grad
    return list(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_rms_norm_on_a_cpu_keeps_what_it_normalised(dtype):
    x = torch.randn(2, 8, 16, dtype=dtype, requires_grad=True)
    assert len(kept_by(torch.nn.LayerNorm(16, dtype=dtype), x)) == 1
    kept = kept_by(torch.nn.RMSNorm(16, eps=1e-5, dtype=dtype), x)
    assert len(kept) == 2
    wide = x.detach().float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    assert any(torch.allclose(one, normalised) for one in kept if one.dtype == torch.float32)


def test_one_layer_counted_by_hand():
    tokens, hidden = 2 * 8, 16
    assert layer_activations(SMALL, batch=2, value_bytes=4) == {
        "norm inputs": 2 * tokens * hidden * 4,
        "norm statistics": 4 * tokens * 4,
        "linear inputs": 2 * tokens * hidden * 4,
        "q, k, v": 3 * tokens * hidden * 4,
        "log-sum-exp": tokens * 4 * 4,
        "attention output": tokens * hidden * 4,
        "GELU input": tokens * 4 * hidden * 4,
        "GELU output": tokens * 4 * hidden * 4,
    }


def test_fewer_key_value_heads_and_rotary_positions_by_hand():
    grouped = layer_activations(
        replace(SMALL, num_kv_heads=2, positions="rotary"), batch=1, value_bytes=2
    )
    assert grouped["q, k, v"] == 8 * (16 + 2 * 8) * 2
    assert grouped["rotated q, k"] == 8 * (16 + 8) * 2


@given(models, st.sampled_from((1, 2, 4, 8)), st.booleans(), st.integers(1, 4))
def test_the_terms_add_up_to_the_closed_form_of_the_paper(model, tp, sequence_parallel, batch):
    terms = layer_activations(
        model, GridShape(tp=tp), batch=batch, sequence_parallel=sequence_parallel, **PAPER
    )
    statistics = terms.pop("norm statistics")  # "minor" to the paper, which leaves them out
    closed = paper_layer_bytes(model, batch=batch, tp=tp, sequence_parallel=sequence_parallel)
    assert sum(terms.values()) == pytest.approx(closed)
    assert statistics < 0.01 * closed


# Hidden size and heads of the paper's models, and what each way leaves of the bytes with tp = 8,
# in per cent, read off its figure 7.
FIGURE_7 = {
    "22B": ((6144, 64), 66.84, 49.42, 16.18),
    "175B": ((12288, 96), 62.04, 56.53, 18.49),
    "530B": ((20480, 128), 58.31, 62.04, None),
}


@pytest.mark.parametrize("name", FIGURE_7)
def test_the_published_savings_come_out(name):
    (hidden, heads), sequence, selective, both = FIGURE_7[name]
    model = GPTConfig(context_length=2048, num_heads=heads, hidden_size=hidden, dropout=0.1)

    def percent(**options):
        return (
            100
            * paper_layer_bytes(model, batch=1, tp=8, **options)
            / paper_layer_bytes(model, batch=1, tp=8)
        )

    assert percent(sequence_parallel=True) == pytest.approx(sequence, abs=0.2)
    # the scores are computed again, not kept
    assert percent(fused_attention=True) == pytest.approx(selective, abs=0.2)
    if both:
        assert percent(sequence_parallel=True, fused_attention=True) == pytest.approx(both, abs=0.2)


def test_tensor_parallelism_leaves_some_terms_whole_and_sequence_parallelism_none():
    model = replace(SMALL, dropout=0.1)
    whole_under_tp = {"norm inputs", "norm statistics", "linear inputs", "dropout masks"}
    one = layer_activations(model, GridShape(tp=1), batch=2)
    cut = layer_activations(model, GridShape(tp=4), batch=2)
    also = layer_activations(model, GridShape(tp=4), batch=2, sequence_parallel=True)
    for kind in one:
        assert cut[kind] == one[kind] / (1 if kind in whole_under_tp else 4)
        assert also[kind] == one[kind] / 4


def test_a_sequence_over_cp_cuts_everything_but_a_row_of_scores():
    fused, plain = ({"fused_attention": fused} for fused in (True, False))
    for options in (fused, plain):
        one, cut = (layer_activations(SMALL, GridShape(cp=cp), batch=2, **options) for cp in (1, 4))
        assert cut == {kind: size / 4 for kind, size in one.items()}
    long, short = (
        layer_activations(replace(SMALL, context_length=s), batch=1, **plain)["scores"]
        for s in (16, 8)
    )
    assert long == 4 * short


def test_widths_count_where_they_belong():
    narrow, mixed = (layer_activations(SMALL, batch=2, residual_bytes=wide) for wide in (None, 4))
    assert mixed.pop("norm inputs") == 2 * narrow.pop("norm inputs")
    assert mixed == narrow
    wide = layer_activations(SMALL, batch=2, value_bytes=8)
    assert wide["log-sum-exp"] == 2 * 8 * 4 * 8 and wide["norm statistics"] == 4 * 2 * 8 * 8


def test_a_model_is_its_layers_and_its_ends():
    layer, model = layer_activations(SMALL, batch=2), model_activations(SMALL, batch=2)
    assert all(model[kind] == 3 * size for kind, size in layer.items())
    ends = {kind: size for kind, size in model.items() if kind not in layer}
    assert ends == {
        "final norm": 16 * (16 * 2 + 2 * 4),
        "head input": 16 * 16 * 2,
        "loss": 16 * (50 * 4 + 16),
    }
    vit = ViTConfig(num_variables=2, num_forcings=1, lat=10, lon=20, hidden_size=16, num_heads=4)
    whole, half = (
        model_activations(vit, GridShape(tp=tp), batch=1, sequence_parallel=True) for tp in (1, 2)
    )
    assert whole["patches"] == 8 * 3 * 25 * 2 and half["patches"] == whole["patches"] / 2
    assert whole["loss"] == half["loss"] == 2 * 10 * 20 * 4  # every rank has the whole state


def test_the_formula_of_a_layer_asks_for_nothing_but_even_parts():
    """Neither the number of pipeline stages nor a ring's lack of dropout changes its terms."""
    dropped = replace(SMALL, dropout=0.1)
    over_cp = layer_activations(dropped, GridShape(cp=2), batch=2)
    assert over_cp["dropout masks"] == layer_activations(dropped, batch=1)["dropout masks"]
    assert layer_activations(SMALL, GridShape(pp=64), batch=2) == layer_activations(SMALL, batch=2)


def test_sizes_that_do_not_fit_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"num_heads=4 is not divisible by parallel.tp=3"):
        layer_activations(SMALL, GridShape(tp=3), batch=1)
    with pytest.raises(ValueError, match=r"num_kv_heads=2 is not divisible by parallel.tp=4"):
        layer_activations(replace(SMALL, num_kv_heads=2), GridShape(tp=4), batch=1)
    with pytest.raises(ValueError, match=r"context_length=8 is not divisible by parallel.cp=3"):
        layer_activations(SMALL, GridShape(cp=3), batch=1)
    with pytest.raises(ValueError, match=r"context_length=6 is not divisible by cp\*tp"):
        layer_activations(
            replace(SMALL, context_length=6), GridShape(tp=4), batch=1, sequence_parallel=True
        )
