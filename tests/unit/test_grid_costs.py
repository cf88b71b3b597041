"""What lesson 08 says a grid costs: its formulas, by hand."""

import pytest

from course.labs.l08_costs import cheapest, costs, h100_nodes, table
from labcode.recipes import gpt_shape
from labcode.topology import GridShape

MODEL = gpt_shape("gpt_13b")
INSIDE = 365e9
ADAPTER = 50e9


def test_the_rates_are_those_of_the_table():
    cluster = h100_nodes()
    assert cluster.inside.beta_bytes_per_s == INSIDE
    assert cluster.between.beta_bytes_per_s == ADAPTER
    assert cluster.gpu.layer_flops_per_s("bfloat16") == pytest.approx(692e12, rel=1e-3)


def test_memory_links_and_idle_stages_by_hand():
    found = costs(MODEL, GridShape(dp=4, pp=8, tp=2), batch=512)
    parameters = MODEL.num_parameters / 16
    assert found.memory_bytes == pytest.approx((4 + 12 / 4) * parameters)
    act = 128 * 2048 * 5120 * 2
    # a ring of two sends its tensor once: 4 all-reduces in each of 5 layers
    assert found.link_s["tp"] == pytest.approx(20 * act / INSIDE)
    # each rank of tp sends its tokens alone, forward and back
    assert found.link_s["pp"] == pytest.approx(2 * act / 2 / ADAPTER)
    # a reduce-scatter and an all-gather over four ranks of one node, 2 bytes for each parameter
    assert found.link_s["dp"] == pytest.approx(2 * 0.75 * parameters * 2 / INSIDE)
    assert found.leaves_node == {"tp": False, "cp": False, "pp": True, "dp": False}
    assert found.idle_s == pytest.approx(7 / 128 * found.compute_s)
    assert found.lost_s == pytest.approx(sum(found.link_s.values()) + found.idle_s)


def test_a_group_that_fills_nodes_is_as_fast_as_inside_and_one_gpu_a_node_is_not():
    full = costs(MODEL, GridShape(dp=64), batch=512).link_s["dp"]
    sent = 2 * 63 / 64 * MODEL.num_parameters * 2
    assert full == pytest.approx(sent / INSIDE)  # 50 GB/s * 63/7 = 450 GB/s are more than inside
    spread = costs(MODEL, GridShape(dp=8, tp=8), batch=512).link_s["dp"]
    sent = 2 * 7 / 8 * MODEL.num_parameters / 8 * 2
    assert spread == pytest.approx(sent / ADAPTER)


def test_what_is_shared_out():
    nothing, optimizer, everything = (
        costs(MODEL, GridShape(dp=64), 512, sharded)
        for sharded in ("nothing", "optimizer", "everything")
    )
    parameters = MODEL.num_parameters
    assert nothing.memory_bytes == 16 * parameters
    assert optimizer.memory_bytes == pytest.approx((4 + 12 / 64) * parameters)
    assert everything.memory_bytes == pytest.approx(16 / 64 * parameters)
    assert nothing.link_s == optimizer.link_s
    assert everything.link_s["dp"] == pytest.approx(1.5 * optimizer.link_s["dp"])
    with pytest.raises(ValueError, match="pp=2 and everything sharded"):
        costs(MODEL, GridShape(dp=32, pp=2), 512, "everything")


def test_the_ring_of_keys_and_values_has_one_link_between_two_nodes():
    inside = costs(MODEL, GridShape(dp=32, cp=2), batch=512).link_s["cp"]
    spread = costs(MODEL, GridShape(dp=32, cp=2, order="tp-dp-cp-pp"), batch=512).link_s["cp"]
    assert spread / inside == pytest.approx(INSIDE / ADAPTER)


def test_the_table_names_every_axis_that_sends():
    text = table(costs(MODEL, GridShape(dp=8, tp=8), batch=512))
    assert "links of tp" in text and "stays inside the node" in text
    assert "links of dp" in text and "leaves the node" in text
    assert "links of pp" not in text


def test_with_more_gpus_for_one_batch_the_best_tp_grows():
    best = []
    for num_gpus in (64, 256, 1024):
        lost = {}
        for tp in (1, 2, 4, 8):
            grid, found = cheapest(MODEL, num_gpus, 512, tp, 30e9)
            assert grid.world_size == num_gpus and grid.tp == tp and found.memory_bytes <= 30e9
            lost[tp] = found.lost_s
        best.append(min(lost, key=lambda tp: lost[tp]))
    assert best == [1, 2, 4]
    with pytest.raises(AssertionError, match="has room"):
        cheapest(MODEL, 64, 512, 1, 1e9)
