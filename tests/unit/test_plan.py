"""The search over layouts: all that is legal, nothing that is not, in the right order."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labcode.perf.cluster import load_cluster
from labcode.perf.estimate import estimate
from labcode.perf.plan import Refusal, plan
from labcode.perf.settings import Settings
from labcode.perf.settings import check as check_settings
from labcode.perf.tables import plan_text
from labcode.perf.transformer import Transformer, load_model
from labcode.topology import GridShape

H100 = load_cluster("dgx-h100")
LLAMA = load_model("llama3-8b")
SMALL = Transformer(4, 64, 4, 512, 100)


def with_memory(gib: float):
    return replace(H100, gpu=replace(H100.gpu, memory_bytes=gib * 2**30))


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1, 2, 4, 6, 16]), st.sampled_from([4, 12, 16]))
def test_every_layout_is_legal_and_they_are_sorted(gpus, global_batch):
    try:
        found = plan(SMALL, H100, gpus=gpus, global_batch=global_batch)
    except ValueError:
        assert gpus == 6 or gpus * 4 > global_batch
        return
    for layout in found.ranked:
        assert layout.shape.world_size == gpus
        check_settings(SMALL, layout.shape, layout.settings)
    steps = [layout.step_s for layout in found.ranked]
    assert steps == sorted(steps)
    layouts = [(layout.shape, layout.settings) for layout in found.ranked]
    assert len(set(layouts)) == len(layouts)


def test_the_search_and_the_estimate_agree():
    found = plan(LLAMA, H100, gpus=16, global_batch=32)
    for layout in found.ranked[::200]:
        one = estimate(LLAMA, layout.shape, H100, layout.settings)
        assert one.step_s == pytest.approx(layout.step_s, rel=1e-12)
        assert one.memory_bytes == layout.memory_bytes
        assert layout.estimate(LLAMA, H100).parts == one.parts
        assert layout.interval_s == pytest.approx(one.interval_s)
        assert one.fits


def test_every_grid_that_divides_is_there():
    """8 GPUs, 4 heads, 4 layers, batch 8: tp in 1, 2, 4; cp in 1, 2; pp in 1, 2, 4."""
    found = plan(SMALL, H100, gpus=8, global_batch=8)
    grids = {(x.shape.dp, x.shape.pp, x.shape.cp, x.shape.tp) for x in found.ranked}
    expected = set()
    for tp in (1, 2, 4):
        for cp in (1, 2):
            for pp in (1, 2, 4):
                if 8 % (tp * cp * pp) == 0:
                    expected.add((8 // (tp * cp * pp), pp, cp, tp))
    assert grids == expected
    chunks = {x.settings.stages_per_rank for x in found.ranked if x.shape.pp == 2}
    assert chunks == {1, 2}


def test_every_ep_that_divides_dp_and_the_experts_is_there_and_of_dense_models_none():
    mixture = replace(SMALL, experts=6, active_experts=2)
    found = plan(mixture, H100, gpus=8, global_batch=8)
    sizes = {(layout.shape.dp, layout.shape.ep) for layout in found.ranked}
    assert sizes == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2)}
    dense = plan(SMALL, H100, gpus=8, global_batch=8)
    assert {layout.shape.ep for layout in dense.ranked} == {1}
    for layout in found.ranked[::100]:
        one = estimate(mixture, layout.shape, H100, layout.settings)
        assert one.step_s == pytest.approx(layout.step_s, rel=1e-12)
        assert one.memory_bytes == layout.memory_bytes


def test_what_does_not_fit_is_refused_with_the_number():
    found = plan(LLAMA, H100, gpus=8, global_batch=16)
    assert found.refused
    reasons = {refusal.reason for refusal in found.refused}
    assert all("GiB of 79.1" in reason for reason in reasons)
    assert any(refusal.and_larger for refusal in found.refused)
    for refusal in found.refused:
        assert not estimate(LLAMA, refusal.shape, H100, refusal.settings).fits


def test_more_memory_never_makes_a_layout_impossible():
    fitting = []
    for gib in (20, 40, 80, 160):
        found = plan(LLAMA, with_memory(gib), gpus=8, global_batch=16)
        fitting.append({(layout.shape, layout.settings) for layout in found.ranked})
    for less, more in itertools.pairwise(fitting):
        assert less <= more
    assert len(fitting[0]) < len(fitting[-1])


def test_a_slow_network_keeps_tp_inside_a_node_and_the_best_layout_is_not_a_slow_one():
    found = plan(load_model("llama3-70b"), H100, gpus=64, global_batch=64)
    assert all(layout.shape.tp <= 8 for layout in found.ranked)
    assert found.ranked[0].step_s < found.ranked[len(found.ranked) // 2].step_s / 1.5


def test_settings_that_are_not_searched_are_kept_and_a_factor_scales():
    base = Settings(8, attention="unfused", dtype="float16")
    found = plan(SMALL, load_cluster("selene"), gpus=8, global_batch=8, settings=base)
    assert {layout.settings.attention for layout in found.ranked} == {"unfused"}
    kinds = {layout.settings.activation_checkpointing for layout in found.ranked}
    assert kinds == {"none", "selective", "full"}
    slower = plan(SMALL, H100, gpus=8, global_batch=8, scale=2.0)
    plain = plan(SMALL, H100, gpus=8, global_batch=8)
    assert slower.ranked[0].step_s == pytest.approx(2 * plain.ranked[0].step_s)


def test_what_cannot_be_planned_is_one_line():
    with pytest.raises(ValueError, match="no grid of 7 GPUs divides global_batch=16"):
        plan(SMALL, H100, gpus=7, global_batch=16)
    with pytest.raises(ValueError, match="gpus=0: give at least 1"):
        plan(SMALL, H100, gpus=0, global_batch=16)


@pytest.mark.parametrize(
    ("needed", "limit", "told"),
    [(82.1, 79.1, "82.1 GiB of 79.1"), (39.44, 39.4, "39.44 GiB of 39.40")],
)
def test_a_refusal_has_the_digits_that_tell_its_two_numbers_apart(needed, limit, told):
    refusal = Refusal(GridShape(), Settings(global_batch=1), needed * 2**30, limit * 2**30)
    assert refusal.reason == f"needs {told}"


def test_where_nothing_fits_the_table_says_what_to_try():
    found = plan(LLAMA, with_memory(1), gpus=1, global_batch=1)
    assert not found.ranked
    assert plan_text(found).endswith("try more GPUs (--gpus), or a leaner --state such as bf16")
