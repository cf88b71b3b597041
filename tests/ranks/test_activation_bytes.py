"""What ranks really keep for backward, against the formulas of labcode.perf.memory: within 2 %."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig, ViTConfig
from labcode.models import gpt, vit
from labcode.models.parallelize import parallelize
from labcode.perf.memory import model_activations
from labcode.perf.saved_bytes import saved_bytes
from labcode.topology import GridShape

GPT = GPTConfig(vocab_size=64, context_length=64, num_layers=2, num_heads=8, hidden_size=64)
ROTARY = replace(GPT, positions="rotary", num_kv_heads=4)
MIXTURE = replace(
    GPT,
    bias=False,
    mlp="swiglu",
    num_experts=8,
    experts_per_token=2,
    expert_ffn_size=96,
    shared_ffn_size=32,
)
VIT = ViTConfig(
    num_variables=3, num_forcings=1, lat=20, lon=40, hidden_size=64, num_layers=2, num_heads=8
)
BATCH = 2


def example(config, batch=BATCH):
    if isinstance(config, GPTConfig):
        tokens = torch.randint(config.vocab_size, (batch, config.context_length + 1))
        return tokens[:, :-1], tokens[:, 1:]
    state = torch.randn(batch, config.num_variables + config.num_forcings, config.lat, config.lon)
    return state, state[:, : config.num_variables].clone()


def build(config):
    return gpt.GPT(config) if isinstance(config, GPTConfig) else vit.ViT(config)


def kept_alone(config, batch=BATCH, dtype=torch.float32, autocast=False):
    """Bytes that one process keeps, and those of its modules."""
    model, (inputs, targets) = build(config).to(dtype), example(config, batch)
    inputs, targets = (x.to(dtype) if x.is_floating_point() else x for x in (inputs, targets))
    loss = gpt.loss if isinstance(config, GPTConfig) else vit.loss
    with saved_bytes(model) as saved, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(model(inputs), targets)
    before = saved.total(), saved.by_module()
    value.backward()
    assert saved.total() == 0  # autograd let go of all of it
    return before


def kept_by_rank(rank, config, shape, sequence_parallel, checkpointing="none", fused=True):
    from torch.nn.attention import SDPBackend, sdpa_kernel  # they cannot be sent to the ranks

    parallel = ParallelConfig(
        sequence_parallel=sequence_parallel, activation_checkpointing=checkpointing
    )
    model = parallelize(build(config), Grid.create(shape), parallel)
    inputs, targets = example(config)
    kernels = contextlib.nullcontext() if fused else sdpa_kernel(SDPBackend.MATH)
    with saved_bytes(model.module) as saved, kernels:
        loss = model.loss(model(inputs), targets)
        found = saved.total()
        loss.backward()
    assert saved.total() == 0  # what was computed again is gone as well
    return found


@pytest.mark.parametrize("config", [GPT, ROTARY, MIXTURE, VIT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_process_keeps_what_the_formula_says(config, dtype):
    predicted = sum(model_activations(config, batch=BATCH, value_bytes=dtype.itemsize).values())
    assert kept_alone(config, dtype=dtype)[0] == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("config", [replace(GPT, dropout=0.1), replace(VIT, dropout=0.1)])
def test_with_dropout_a_cpu_keeps_the_scores_and_wide_masks(config):
    terms = model_activations(
        config, batch=BATCH, value_bytes=4, mask_bytes=4, fused_attention=False
    )
    assert kept_alone(config)[0] == pytest.approx(sum(terms.values()), rel=0.01)


def test_under_autocast_the_residuals_stay_wide():
    # one sample more: the copies of weights that autocast makes for the pass do not depend on the
    # number of samples
    found = kept_alone(GPT, batch=3, autocast=True)[0] - kept_alone(GPT, batch=2, autocast=True)[0]
    terms = model_activations(GPT, batch=1, value_bytes=2, residual_bytes=4)
    assert found == pytest.approx(sum(terms.values()), rel=0.01)


def test_memories_are_counted_once_under_the_module_that_keeps_them():
    _, by_module = kept_alone(GPT)
    number = BATCH * GPT.context_length * GPT.hidden_size * 4
    for layer in ("blocks.0", "blocks.1"):
        assert by_module[f"{layer}.attention.qkv"] == by_module[f"{layer}.mlp.up"] == number
        # GELU's input, its output
        assert by_module[f"{layer}.mlp"] == by_module[f"{layer}.mlp.down"] == 4 * number
        # it reads what the attention keeps anyway
        assert f"{layer}.attention.proj" not in by_module
    assert by_module[""] >= BATCH * GPT.context_length * GPT.vocab_size * 4  # the loss


def test_what_is_computed_again_is_not_kept():
    layer = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    x = torch.randn(4, 8, requires_grad=True)
    with saved_bytes(layer) as kept:
        y = layer(x)
    with saved_bytes(layer) as recomputed:
        z = checkpoint(layer, x, use_reentrant=False)
    assert kept.total() == 4 * (8 + 32 + 32) * 4 and recomputed.total() < kept.total()
    assert torch.equal(y, z)


LAYOUTS = {
    "tp": (GridShape(tp=4), False),
    "tp + sequence": (GridShape(tp=4), True),
    "ring": (GridShape(cp=4), False),
    "ring, tp + sequence": (GridShape(cp=2, tp=2), True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", [GPT, ROTARY, VIT], ids=["gpt", "rotary, fewer kv heads", "vit"])
def test_each_rank_keeps_what_the_formula_says(ranks4, config, layout):
    shape, sequence_parallel = LAYOUTS[layout]
    terms = model_activations(
        config, shape, batch=BATCH, value_bytes=4, sequence_parallel=sequence_parallel
    )
    for found in ranks4.run(kept_by_rank, config, shape, sequence_parallel):
        assert found == pytest.approx(sum(terms.values()), rel=0.02)


@pytest.mark.parametrize(
    ("shape", "sequence_parallel"),
    [
        (GridShape(dp=4, ep=4), False),
        (GridShape(dp=2, ep=2, tp=2), False),
        (GridShape(dp=2, ep=2, tp=2), True),
        (GridShape(tp=4), True),
        (GridShape(dp=2, ep=2, cp=2), False),
    ],
    ids=str,
)
def test_ranks_keep_the_rows_of_their_experts_as_the_formula_says(ranks4, shape, sequence_parallel):
    """On average: a rank whose experts get more rows keeps more."""
    terms = model_activations(
        MIXTURE, shape, batch=BATCH, value_bytes=4, sequence_parallel=sequence_parallel
    )
    found = ranks4.run(kept_by_rank, MIXTURE, shape, sequence_parallel)
    assert sum(found) / 4 == pytest.approx(sum(terms.values()), rel=0.02)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_each_rank_keeps_its_part_of_dropout_masks_and_scores(ranks4, sequence_parallel):
    config, shape = replace(GPT, dropout=0.1), GridShape(tp=4)
    options = {"mask_bytes": 4, "fused_attention": False}  # as torch does it on a CPU
    terms = model_activations(
        config, shape, batch=BATCH, value_bytes=4, sequence_parallel=sequence_parallel, **options
    )
    for found in ranks4.run(kept_by_rank, config, shape, sequence_parallel):
        assert found == pytest.approx(sum(terms.values()), rel=0.02)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain attention"])
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize(
    "config", [GPT, ROTARY, VIT, replace(GPT, dropout=0.1)], ids=["gpt", "rotary", "vit", "dropout"]
)
def test_what_is_computed_again_is_not_in_the_formula_either(ranks1, config, checkpointing, fused):
    """Within 3 %; "none" beside it, so that the difference is seen to be there."""
    is_fused = fused and not config.dropout  # a CPU has no fused kernel with dropout
    options = {"value_bytes": 4, "mask_bytes": 4, "fused_attention": is_fused}
    for kind in ("none", checkpointing):
        terms = model_activations(config, batch=BATCH, activation_checkpointing=kind, **options)
        (found,) = ranks1.run(kept_by_rank, config, GridShape(), False, kind, fused)
        assert found == pytest.approx(sum(terms.values()), rel=0.03), kind


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_a_rank_of_a_grid_keeps_as_little(ranks4, layout, checkpointing):
    shape, sequence_parallel = LAYOUTS[layout]
    terms = model_activations(
        GPT,
        shape,
        batch=BATCH,
        value_bytes=4,
        sequence_parallel=sequence_parallel,
        activation_checkpointing=checkpointing,
    )
    for found in ranks4.run(kept_by_rank, GPT, shape, sequence_parallel, checkpointing):
        assert found == pytest.approx(sum(terms.values()), rel=0.03)
