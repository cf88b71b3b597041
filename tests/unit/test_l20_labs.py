"""What lesson 20 computes by hand, against labcode.perf and against a real model."""

import math
from dataclasses import replace

import pytest

from course.labs import l20_plan as lab
from labcode.perf import accuracy
from labcode.perf.cluster import load_cluster
from labcode.perf.estimate import BUSY_WITH_COLLECTIVES, estimate
from labcode.perf.flops import transformer_flops_per_sample
from labcode.perf.plan import plan
from labcode.perf.published import published_runs
from labcode.perf.two_level import Placement, group_link

SELENE = lab.cluster("selene")
LAYOUTS = {
    "tp": (lab.GPT3, lab.Layout(dp=8, tp=8), 64),
    "pipeline": (lab.GPT3, lab.Layout(8, 16, 8, 0, 1, "full"), 1536),
    "ZeRO-1 and all axes": (lab.GPT_13B, lab.Layout(16, 4, 4, 1, 2, "none"), 1536),
    "checkpointing": (lab.GPT_13B, lab.Layout(16, 1, 2, 1, 4, "full"), 128),
}


def test_weights_and_flops_are_those_of_a_real_model_and_of_labcode():
    for shape in (lab.SMALL, lab.GPT_7B):
        assert lab.parameters(shape) == lab.count_weights(shape)
        assert lab.parameters(shape) == lab.transformer(shape).num_parameters
        assert lab.products(shape) == lab.transformer(shape).layer_products
    assert lab.flops(lab.SMALL, 2) == lab.count_flops(lab.SMALL, 2)
    for causal in (False, True):
        for kind in ("none", "full"):
            expected = transformer_flops_per_sample(
                lab.transformer(lab.SMALL), causal=causal, activation_checkpointing=kind
            )
            assert lab.flops(lab.SMALL, 1, causal=causal, checkpointing=kind) == expected


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_is_that_of_labcode_within_two_percent(name):
    shape, layout, batch = LAYOUTS[name]
    found = lab.memory(shape, layout, batch) + lab.RESERVED_BYTES
    _, expected = lab.by_labcode(shape, layout, batch, load_cluster("selene"))
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_parts_of_a_step_are_those_of_labcode(name):
    shape, layout, batch = LAYOUTS[name]
    ours = lab.step_parts(shape, layout, batch, lab.cluster("selene"))
    how = lab.settings(layout, batch)
    theirs = estimate(lab.transformer(shape), lab.grid(layout), load_cluster("selene"), how).parts
    # labcode has the sums of embedding, head and loss besides: twice the layers show what is theirs
    deeper = replace(lab.transformer(shape), num_layers=2 * shape.layers)
    twice = estimate(deeper, lab.grid(layout), load_cluster("selene"), how).parts
    assert ours["tp"] == pytest.approx(twice["tp"] - theirs["tp"], rel=0.01)
    assert ours["pp"] == pytest.approx(theirs["pp"], rel=0.01)
    assert ours["bubble"] == pytest.approx(theirs["bubble"], rel=0.15)
    products_s = theirs["product"] + theirs["checkpointing"] + theirs["attention"]
    assert ours["product"] == pytest.approx(products_s, rel=0.2)
    assert sum(ours.values()) == pytest.approx(lab.step_s(shape, layout, batch, SELENE))


@pytest.mark.parametrize(("ranks", "stride"), [(8, 1), (16, 8), (64, 1), (512, 1), (16, 4), (2, 8)])
def test_the_rule_of_two_levels_is_labcodes(ranks, stride):
    place = Placement(ranks, min(ranks, max(1, 8 // stride)))
    expected = group_link(load_cluster("selene"), place).beta_bytes_per_s
    assert lab.bus_bytes_per_s(SELENE, ranks, stride) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["selene", "jean-zay-a100"])
def test_what_zero_3_hides_costs_a_little_and_the_rest_costs_all(name):
    """On the slower network some of it does not hide."""
    where = lab.cluster(name)
    layout = lab.Layout(dp=64, zero=3)
    found = lab.step_parts(lab.GPT_13B, layout, 128, where)
    weights = 2 * lab.parameters(lab.GPT_13B)
    travel = 1.5 * lab.all_reduce_s(where, 64, 1, weights)
    compute = found["product"] / 2
    hidden = min(travel, compute)
    assert (travel > compute) == (name == "jean-zay-a100")
    assert found["fsdp"] / 2 == pytest.approx(travel - (1 - BUSY_WITH_COLLECTIVES) * hidden)
    assert found["dp"] == 0


@pytest.mark.parametrize("name", ["selene", "jean-zay-a100"])
def test_the_last_backward_hides_gradients_and_not_the_gather_of_new_weights(name):
    where = lab.cluster(name)
    travel = lab.all_reduce_s(where, 64, 1, 2 * lab.parameters(lab.GPT_13B))
    for zero, can_hide in ((0, travel), (1, travel / 2)):
        found = lab.step_parts(lab.GPT_13B, lab.Layout(dp=64, zero=zero), 128, where)
        hidden = min(can_hide, found["product"] / 2 * 2 / 3)
        assert found["dp"] == pytest.approx(travel - (1 - BUSY_WITH_COLLECTIVES) * hidden)


@pytest.mark.parametrize(("cluster", "gpus", "batch"), [("selene", 16, 32), ("perlmutter", 12, 24)])
def test_the_search_has_the_grids_of_labcodes_and_picks_nothing_slower(cluster, gpus, batch):
    """All grids but those with context parallelism or with stages of two lengths."""
    where = load_cluster(cluster)
    theirs = plan(
        lab.transformer(lab.GPT_7B),
        where,
        gpus=gpus,
        global_batch=batch,
        settings=lab.settings(lab.Layout(), batch),
    )
    grids = set()
    for layout in (*theirs.ranked, *theirs.refused):
        shape = layout.shape
        if shape.cp == 1 and lab.GPT_7B.layers % shape.pp == 0:
            grids.add((shape.dp, shape.pp, shape.tp))
    legal = lab.legal(lab.GPT_7B, lab.cluster(cluster), gpus, batch)
    assert {layout[:3] for layout in legal} == grids
    ours = lab.search(lab.GPT_7B, lab.cluster(cluster), gpus, batch)
    assert ours == sorted(ours)
    step_s, _ = lab.by_labcode(lab.GPT_7B, ours[0].layout, batch, where)
    assert step_s < 1.1 * theirs.ranked[0].step_s


def test_a_real_model_keeps_what_the_formulas_say():
    shape = lab.Shape(layers=2, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=64, tokens=64)
    found = lab.measured_bytes(shape, samples=4)
    assert found["states"] == 16 * lab.parameters(shape)
    assert found["activations"] == pytest.approx(2 * 2 * 32 * 4 * 64 * 128, rel=0.02)


def test_the_table_of_errors_has_both_predictors_before_and_after_calibration():
    errors = lab.errors()
    plain = errors["labcode.perf"]
    rule = errors["45 % of the peak"]
    assert plain.runs == rule.runs > 400
    assert plain.median < rule.median and plain.p90 < rule.p90 and plain.regret < rule.regret
    assert errors["labcode.perf, one factor a stack"].median < plain.median


def test_the_run_that_was_out_of_memory_is_predicted_to_be():
    small, large = lab.attempts_on_v100()
    limit = load_cluster("dgx-1").gpu.memory_bytes / 2  # 16 GB
    assert not small.out_of_memory and sum(small.parts.values()) < limit
    assert large.out_of_memory and sum(large.parts.values()) > limit


def test_the_worst_picks_come_first():
    regrets = sorted(accuracy.regrets(published_runs()), reverse=True)
    lines = lab.worst_picks(3)
    shares = [line.split("%")[0].strip() for line in lines]
    assert shares == [f"{regret:.0%}".rstrip("%") for regret in regrets[:3]]
    assert " in place of " in lines[0]


def test_the_latencies_of_single_gathers_explain_the_order_of_two_runs_but_not_the_time():
    runs = lab.zero3_of_2021()
    assert runs.predicted_s < runs.other_s < runs.predicted_s + runs.latency_s
    assert runs.predicted_s + runs.latency_s < runs.measured_s / 2
    alpha_s = runs.latency_s / (96 * 2 * 4 * 1535)
    assert 5e-6 < alpha_s < 7e-6


def test_what_the_layers_of_a_vit_keep_under_autocast():
    """Two wide inputs of norms and the rest in two bytes, of which tp divides 12 numbers."""
    for run in lab.vit_runs():
        by_hand = 12 * 16 * 4050 * 1024 * (2 * 4 + 2 * 2 + 12 * 2 / run.tp)
        assert run.parts["activations"] == pytest.approx(by_hand, rel=0.05)
        assert sum(run.parts.values()) < run.memory_bytes
        assert run.predicted_s < run.step_s


def test_limits_of_scaling_are_named():
    weak = lab.scaling(lab.GPT_39B, lab.cluster("jean-zay-a100"), [4, 8, 64], lambda gpus: 2 * gpus)
    assert [point.gpus for point in weak] == [8, 64]  # nothing fits on 4
    assert [point.limit for point in weak] == ["memory", "dp"]
    lost = lab.losses(lab.GPT_39B, weak[0].layout, 16, lab.cluster("jean-zay-a100"))
    assert math.isclose(lost["memory"], max(lost.values()))
