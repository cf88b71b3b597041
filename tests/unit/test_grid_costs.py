"""What lesson 08 says a grid costs: its three formulas, by hand."""

import pytest

from labcode.recipes import gpt_shape
from labcode.teach.labs.l08_costs import INFINIBAND, NVLINK, cheapest, costs, table
from labcode.topology import GridShape

MODEL = gpt_shape("gpt_13b")


def test_memory_links_and_idle_stages_by_hand():
    found = costs(MODEL, GridShape(dp=4, pp=8, tp=2), batch=512)
    assert found.memory_bytes == 16 * MODEL.num_parameters / 16
    act = 128 * 2048 * 5120 * 2
    # a ring of two sends its tensor once: 4 all-reduces in each of 5 layers
    assert found.link_s["tp"] == pytest.approx(20 * act / NVLINK)
    assert found.link_s["pp"] == pytest.approx(act / INFINIBAND)
    assert found.link_s["dp"] == pytest.approx(1.5 * MODEL.num_parameters / 16 * 4 / NVLINK)
    assert found.leaves_node == {"tp": False, "cp": False, "pp": True, "dp": False}
    assert found.idle_s == pytest.approx(7 / 128 * found.compute_s)
    assert found.lost_s == pytest.approx(sum(found.link_s.values()) + found.idle_s)


def test_the_table_names_every_axis_that_sends():
    text = table(costs(MODEL, GridShape(dp=8, tp=8), batch=512))
    assert "links of tp" in text and "stays inside the node" in text
    assert "links of dp" in text and "leaves the node" in text
    assert "links of pp" not in text


def test_with_more_gpus_for_one_batch_the_best_tp_grows():
    best = []
    for num_gpus in (64, 1024):
        lost = {}
        for tp in (1, 2, 4, 8):
            grid, found = cheapest(MODEL, num_gpus, 512, tp, 60e9)
            assert grid.world_size == num_gpus and grid.tp == tp and found.memory_bytes <= 60e9
            lost[tp] = found.lost_s
        best.append(min(lost, key=lambda tp: lost[tp]))
    assert best == [2, 8]
    with pytest.raises(AssertionError, match="has room"):
        cheapest(MODEL, 64, 512, 1, 1e9)
