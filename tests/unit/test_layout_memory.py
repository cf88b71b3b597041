"""Memory of layouts against the papers, and what must hold of any."""

from dataclasses import replace

import pytest

from labcode.perf.layout_memory import layer_bytes, layout_memory
from labcode.perf.published import rows
from labcode.perf.settings import Settings
from labcode.perf.transformer import Transformer, load_model
from labcode.topology import GridShape

LLAMA = load_model("llama3-8b")


def paper_model(row: dict[str, str]) -> Transformer:
    return Transformer(
        int(row["L"]), int(row["h"]), int(row["a"]), int(row["s"]), 51200, dropout=True
    )


def test_a_layer_keeps_what_the_paper_says():
    """s b h (10 + 24/t + 5 a s/(h t)), and over t under sequence parallelism."""
    model = replace(load_model("gpt-22b"), dropout=True)
    s, h, a, t, b = model.sequence_length, model.hidden_size, model.num_heads, 8, 4
    scores = 5 * a * s / (h * t)
    found = layer_bytes(model, t, 1, b, False, False, 2, "none")
    assert found == pytest.approx(s * b * h * (10 + 24 / t + scores), rel=0.01)
    found = layer_bytes(model, t, 1, b, True, False, 2, "none")
    assert found == pytest.approx(s * b * h * (34 / t + scores), rel=0.01)
    found = layer_bytes(model, t, 1, b, True, False, 2, "selective")
    assert found == pytest.approx(s * b * h * 34 / t, rel=0.01)
    assert layer_bytes(model, t, 1, b, False, False, 2, "full") == 2 * s * b * h


@pytest.mark.parametrize("row", [r for r in rows() if r["source_key"] == "korthikanti22_f7"])
def test_the_shares_in_figure_7_of_the_paper(row):
    """Korthikanti et al. 2022: activations of a layer as a share of those of tp alone."""
    model = paper_model(row)
    batch = int(row["mbs"])
    parallel = row["recompute"].startswith("SP")
    checkpointing = {"SP": "none", "full": "full"}.get(row["recompute"], "selective")
    whole = layer_bytes(model, 8, 1, batch, False, False, 2, "none")
    found = layer_bytes(model, 8, 1, batch, parallel, False, 2, checkpointing)
    assert 100 * found / whole == pytest.approx(float(row["value"]), abs=0.4)


@pytest.mark.parametrize("row", [r for r in rows() if r["source_key"] == "korthikanti22_f1"])
def test_the_bars_in_figure_1_of_the_paper(row):
    """States and activations of four models, read off the figure by others: within 4 %."""
    model = paper_model(row)
    shape = GridShape(pp=int(row["pp"]), tp=8)
    if row["recompute"] == "n/a":
        # the even share of a rank; 2 + 4 + 12 bytes for each weight
        states = 18 * model.num_parameters / shape.world_size
        assert states / 2**30 == pytest.approx(float(row["value"]), rel=0.02)
        return
    settings = Settings(
        global_batch=int(row["gbs"]),
        micro_batch=int(row["mbs"]),
        dtype="float16",
        attention="unfused",
        activation_checkpointing=row["recompute"],
        sequence_parallel=row["sp"] == "1",
        stages_per_rank=int(row["vp"] or 1),
    )
    found = layout_memory(model, shape, settings)
    assert found["activations"] / 2**30 == pytest.approx(float(row["value"]), rel=0.04)


def test_zero_and_checkpointing_never_need_more():
    totals = []
    for stage in (0, 1, 2, 3):
        options = Settings(global_batch=64, zero_stage=stage)
        totals.append(sum(layout_memory(LLAMA, GridShape(dp=64), options).values()))
    assert totals == sorted(totals, reverse=True)
    totals = []
    for checkpointing in ("none", "operators", "full"):
        options = Settings(global_batch=64, activation_checkpointing=checkpointing)
        totals.append(layout_memory(LLAMA, GridShape(dp=64), options)["activations"])
    assert totals == sorted(totals, reverse=True)


def test_a_pipeline_with_zero_3_stays_gathered():
    options = Settings(global_batch=64, zero_stage=3)
    assert layout_memory(LLAMA, GridShape(dp=8, pp=4), options)["gathered"] > 1e9


def test_ep_divides_the_weights_of_experts_and_zero_what_is_left():
    model = load_model("mixtral-8x7b")
    experts = model.num_layers * model.expert_weights
    others = model.num_parameters - experts
    for ep in (1, 2, 8):
        shape = GridShape(dp=16, ep=ep)
        found = layout_memory(model, shape, Settings(64))
        assert found["weights"] == pytest.approx(2 * (others + experts / ep))
        # over dp the one, over dp / ep the other
        sharded = layout_memory(model, shape, Settings(64, zero_stage=1))
        assert sharded["optimizer"] == pytest.approx(12 * (others / 16 + experts / ep / (16 / ep)))
        assert sharded["gradients"] == found["gradients"] == 2 * found["weights"]
        gathered = layout_memory(model, shape, Settings(64, zero_stage=3))["gathered"]
        layer = model.layer_parameters - model.expert_weights * (1 - 1 / ep)
        assert gathered == pytest.approx(8 * layer + 6 * model.end_parameters)
        # as many rows come as go
        assert (
            found["activations"] == layout_memory(model, GridShape(), Settings(64))["activations"]
        )


def test_zero_3_has_two_layers_whole_and_what_is_in_no_layer():
    options = Settings(global_batch=64, zero_stage=3)  # 2 bytes a weight, 4 a gradient
    in_no_layer = 2 * LLAMA.outputs * LLAMA.hidden_size + LLAMA.hidden_size  # norm
    for tp in (1, 4):
        found = layout_memory(LLAMA, GridShape(dp=8, tp=tp), options)["gathered"]
        expected = (2 + 2 + 4) * LLAMA.layer_parameters + (2 + 4) * in_no_layer
        assert found == pytest.approx(expected / tp, rel=1e-4)
