"""The labs of lesson 24: numbers of a layer of experts beside one process, and three patients."""

import pytest

from course.labs import l24_by_hand as by_hand
from course.labs import l24_experts as lab
from labcode.comm.collectives import all_gather, copy_to, reduce_scatter


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("load", lab.LOADS)
def test_the_layer_of_the_lesson_is_that_of_one_process(ranks4, load, ep):
    truth = lab.alone(by_hand.layer_alone, load)
    found = lab.joined(ranks4.run(lab.step, by_hand.expert_layer, ep, load), ep)
    assert max(lab.relative_error(found[name], truth[name]) for name in truth) < 1e-12


def test_one_expert_can_get_nothing_or_everything(ranks4):
    sent = ranks4.run(lab.rows_sent, "all choose expert 3 first", 1)
    assert sent == [[0, lab.TOKENS, 0, 0]] * 4
    up = lab.alone(by_hand.layer_alone, "expert 3 gets nothing")["up"]
    assert [lab.kind_of(grad) for grad in up] == ["other"] * 3 + ["zeros"] + ["other"] * 4


def test_each_patient_has_what_the_table_says(ranks4):
    charts = {}
    for load in (lab.LOADS[0], lab.LOADS[2]):
        truth = lab.alone(by_hand.layer_alone, load, 1)
        for name in lab.PATIENTS:
            results = ranks4.run(lab.patient, name, by_hand.expert_layer, load)
            charts[name, load] = lab.chart(results, truth)
    assert all(chart["loss"] < 1e-12 for chart in charts.values())
    told = {}
    for who, chart in charts.items():
        told[who] = [lab.told(chart[name]) for name in ("router", "up", "down")]
    assert told["A", lab.LOADS[0]] == ["1", "2", "2"]
    assert told["B", lab.LOADS[0]] == ["none", "1", "1"]
    assert told["C", lab.LOADS[0]] == ["1", "1", "1"]
    assert told["C", lab.LOADS[2]] == ["1", *["1 | none | 1 | none"] * 2]
    assert told["A", lab.LOADS[2]] == ["1", *["2 | 0 | 2 | 0"] * 2]


def before_the_gate(x, router, up, down, k, tp):
    weights, chosen = by_hand.route(x, router, k)
    entered = [all_gather(each, tp, 0) for each in (x, weights, chosen)]
    return reduce_scatter(by_hand.sum_of_all(*entered, up, down), tp, 0)


def behind_the_gate(x, router, up, down, k, tp, enter=lambda weights, tp: weights):
    x = all_gather(x, tp, 0)
    weights, chosen = by_hand.route(x, router, k)
    return reduce_scatter(by_hand.sum_of_all(x, enter(weights, tp), chosen, up, down), tp, 0)


def behind_with_copy_to(*args):
    return behind_the_gate(*args, enter=copy_to)


def test_the_router_on_tp(ranks4):
    """The weights pass one operator that sums their gradient over tp, and no second one."""
    truth = lab.alone(by_hand.layer_alone)
    for layer in (before_the_gate, behind_the_gate):
        for found in ranks4.run(lab.errors_on_tp, layer, truth):
            assert found["router is off"] < 1e-12 and found["x is off"] < 1e-12
    for found in ranks4.run(lab.errors_on_tp, behind_with_copy_to, truth):
        assert found["router"] == 2 and found["x is off"] > 0.1


def test_where_the_weights_live(ranks4):
    found = ranks4.run(lab.placements, "ep 2 x tp 2")[0]
    assert found["blocks.0.mlp.experts.down"] == ("Shard(0) over ep, Shard(2) over tp", "nothing")
    assert found["blocks.0.mlp.router.weight"] == ("replicated", "dp and tp")
    found = ranks4.run(lab.placements, "ep 2 x ZeRO-3")[0]
    assert found["blocks.0.mlp.experts.up"] == ("Shard(0) over ep, Shard(0) over edp", "edp")


def test_weights_that_travel_send_the_same_whatever_the_tokens(ranks4):
    weights = 4 * lab.FFN * lab.HIDDEN * 3 * 4  # four experts, three matrices, float32
    for tokens in (8, 100):
        sent = ranks4.run(lab.bytes_of, "weights travel", tokens)[0]
        assert sent["all_gather"] + sent["reduce_scatter"] == 3 * weights
