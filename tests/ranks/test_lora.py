"""Adapters on every layout against one process, to 1e-9 in float64, and what a checkpoint has."""

import pytest
from test_parallel_parity import MODELS, assert_same, changes, fit, name_of, plain_run

from labcode import recipes

GPT, LLAMA, _ = MODELS
LORA = {"lora.rank": 3, "lora.alpha": 6.0, "model.num_layers": 2, "optim.clip_norm": 0.002}
OURS = {"parallel.data_parallel": "labcode"}
THEIRS = {"parallel.data_parallel": "ddp"}
SEQUENCE = {"parallel.sequence_parallel": True}
ACCUMULATED = {"train.micro_batch": 2}
ZERO_3 = {"parallel.zero_stage": 3}
LAYOUTS = [  # (dp, pp, cp, tp): the model, and what else is switched on
    ((1, 1, 1, 1), GPT, {}),
    ((2, 1, 1, 1), GPT, THEIRS),
    ((2, 1, 1, 1), LLAMA, {**OURS, **ACCUMULATED, "parallel.bucket_mb": 1e-3}),
    ((2, 1, 1, 1), GPT, {**OURS, "parallel.zero_stage": 1}),
    ((2, 1, 1, 1), GPT, {**OURS, "parallel.zero_stage": 2}),
    ((2, 1, 1, 1), GPT, {**OURS, **ZERO_3}),
    ((2, 1, 1, 1), LLAMA, {**OURS, **ZERO_3, "parallel.activation_checkpointing": "full"}),
    ((2, 1, 1, 1), GPT, {**OURS, **ZERO_3, **ACCUMULATED}),
    ((2, 1, 1, 1), LLAMA, {**THEIRS, **ZERO_3}),
    ((1, 1, 1, 2), GPT, {}),
    ((1, 1, 1, 2), GPT, SEQUENCE),
    ((1, 1, 1, 2), LLAMA, SEQUENCE),
    # two ranks share a key/value head, and the rows of B that go with it
    ((1, 1, 1, 4), LLAMA, {**SEQUENCE, "model.num_kv_heads": 2}),
    ((1, 1, 2, 1), LLAMA, {}),
    ((1, 2, 1, 1), GPT, ACCUMULATED),
    ((1, 2, 1, 1), LLAMA, {**ACCUMULATED, "parallel.pipeline_schedule": "zero_bubble"}),
    ((2, 1, 1, 2), GPT, {**OURS, **ZERO_3}),
    ((2, 1, 1, 2), LLAMA, {**SEQUENCE, "parallel.activation_checkpointing": "full"}),
    ((1, 2, 1, 2), LLAMA, {**ACCUMULATED, **SEQUENCE}),
]


@pytest.fixture(scope="module")
def reference():
    """What one process gets with plain layers, by AdamW alone."""
    made = {}

    def of(config):
        if config not in made:
            made[config] = plain_run(config)
        return made[config]

    return of


def adapted(name, **others):
    return recipes.with_changes(MODELS[name], LORA | others)


@pytest.mark.parametrize(("grid", "name", "extra"), LAYOUTS, ids=name_of)
def test_adapters_train_like_one_process(request, reference, grid, name, extra):
    dp, pp, cp, tp = grid
    pool = request.getfixturevalue(f"ranks{dp * pp * cp * tp}")
    sizes = {field: value for field, value in extra.items() if field.startswith("model.")}
    base = adapted(name, **sizes)
    config = recipes.with_changes(base, changes(dp, cp, tp, **({"parallel.pp": pp} | extra)))
    assert_same(pool.run(fit, config), reference(base))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    "weight", ["attention.qkv.lora_a", "attention.proj.lora_b", "mlp.up.lora_a", "mlp.down.lora_b"]
)
def test_a_sum_over_tp_that_is_forgotten_is_seen(ranks2, reference, weight, sequence):
    base = adapted(LLAMA)
    config = recipes.with_changes(base, changes(1, 1, 2, sequence))
    forgotten = ranks2.run(fit, config, [(f"blocks.1.{weight}", "tp")])
    with pytest.raises(AssertionError):
        assert_same(forgotten, reference(base))


def sharding_of(config):
    """{weight: (axes that cut it, axes over which its gradient is partial, whether it trains)}."""
    from trained import built

    model = built(config).model
    found = {}
    for name, param in model.weights.items():
        sharding = model.shardings[name]
        found[name] = (tuple(sharding.shards), sharding.partial_over, param.requires_grad)
    return found


def test_the_whole_matrix_of_an_adapter_is_partial_and_the_other_one_is_cut(ranks2):
    config = recipes.with_changes(adapted(GPT), changes(1, 1, 2))
    found, _ = ranks2.run(sharding_of, config)
    whole = ((), ("cp", "tp"), True)
    cut = (("tp",), ("cp",), True)
    for layer in ("attention.qkv", "mlp.up"):
        assert found[f"blocks.0.{layer}.lora_a"] == whole
        assert found[f"blocks.0.{layer}.lora_b"] == cut
    for layer in ("attention.proj", "mlp.down"):
        assert found[f"blocks.0.{layer}.lora_a"] == cut
        assert found[f"blocks.0.{layer}.lora_b"] == whole
    trained = [name for name, (_, _, trains) in found.items() if trains]
    assert len(trained) == 2 * 4 * 2
    assert all(".lora_" in name for name in trained)


def narrow_and_wide(config):
    """With the frozen weights in 16 bits and in 32: (losses and norms, weights, their bytes)."""
    from unittest import mock

    import torch.distributed as dist
    from trained import built

    from labcode.run import run
    from labcode.train import build

    found = []
    own_choice = build._base_dtype
    for choose in (own_choice, mock.Mock(return_value=None)):
        with mock.patch.object(build, "_base_dtype", choose):
            training = built(config)
        rows = [(row["loss"], row["grad_norm"]) for row in run.train(training) if "loss" in row]
        wholes = {name: tensor.clone() for name, tensor in training.model.full_state_dict()}
        num_bytes = {}
        for name, param in training.model.weights.items():
            num_bytes[name] = param.nbytes
        found.append((rows, wholes, num_bytes))
        dist.barrier()
    return found


BFLOAT16 = {"train.dtype": "bfloat16", "lora.rank": 2}
NARROW_LAYOUTS = [
    ((2, 1, 1, 1), GPT, THEIRS),
    ((2, 1, 1, 1), GPT, {**OURS, "parallel.zero_stage": 2}),
    ((2, 1, 1, 1), LLAMA, {**OURS, **ZERO_3}),
    ((2, 1, 1, 1), LLAMA, {**THEIRS, **ZERO_3}),
    ((1, 1, 1, 2), GPT, {}),
    ((1, 1, 1, 2), LLAMA, SEQUENCE),
    ((1, 2, 1, 1), LLAMA, ACCUMULATED),
]


@pytest.mark.parametrize(("grid", "name", "extra"), NARROW_LAYOUTS, ids=name_of)
def test_frozen_weights_take_the_bytes_of_the_products_and_change_no_number(
    ranks2, grid, name, extra
):
    dp, pp, cp, tp = grid
    config = recipes.with_changes(
        adapted(name), changes(dp, cp, tp, **({"parallel.pp": pp} | extra))
    )
    config = recipes.with_changes(config, BFLOAT16)
    for narrow, wide in ranks2.run(narrow_and_wide, config):
        assert narrow[0] == wide[0]
        for weight, tensor in narrow[1].items():
            expected = wide[1][weight]
            num_times = 1
            if f"{weight.removesuffix('.weight')}.lora_a" in narrow[1]:  # a frozen product
                expected = expected.bfloat16().float()
                num_times = 2
            assert tensor.equal(expected), weight
            if weight in narrow[2]:
                assert num_times * narrow[2][weight] == wide[2][weight], weight
        assert sum(narrow[2].values()) < 0.75 * sum(wide[2].values())
