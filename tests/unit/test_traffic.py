"""Bytes between nodes: the formulas against rings simulated by message, and published ones."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labcode.perf.traffic import across_nodes, ring, step_traffic
from labcode.recipes import gpt_shape
from labcode.topology import AXES, GridShape

ORDERS = ["-".join(order) for order in itertools.permutations(AXES)]
MODEL = gpt_shape("gpt_7b")
SMALL = gpt_shape("gpt_1m", num_layers=8, num_heads=8)
sizes = st.sampled_from((1, 2, 4))
shapes = st.builds(GridShape, dp=sizes, pp=sizes, cp=sizes, tp=sizes, order=st.sampled_from(ORDERS))


def played_all_reduce(group, chunk_bytes):
    """A ring of real messages: (bytes from rank to rank, what each rank holds at the end).

    What a rank holds is a set of summands for each chunk.
    """
    n = len(group)
    sent = Counter()
    held = [[{me} for _ in range(n)] for me in range(n)]
    for step in range(2 * (n - 1)):
        messages = [(me, (me - step) % n, held[me][(me - step) % n]) for me in range(n)]
        for me, chunk, content in messages:
            right = (me + 1) % n
            held[right][chunk] = held[right][chunk] | content
            sent[group[me], group[right]] += chunk_bytes
    return sent, held


@pytest.mark.parametrize("group", [[3], [0, 1], [4, 0, 2], [0, 2, 4, 6, 8, 10, 12, 14]])
def test_a_ring_all_reduce_sends_what_its_messages_add_up_to(group):
    sent, held = played_all_reduce(group, chunk_bytes=48)
    assert all(chunk == set(range(len(group))) for chunks in held for chunk in chunks)
    assert ring("all_reduce", group, 48 * len(group)) == pytest.approx(dict(sent))


def test_an_all_reduce_is_an_all_gather_and_a_reduce_scatter():
    group = [1, 3, 5, 7]
    once = ring("all_gather", group, 400)
    assert once == {(1, 3): 300, (3, 5): 300, (5, 7): 300, (7, 1): 300}
    assert ring("all_reduce", group, 400) == {link: 2 * size for link, size in once.items()}


def test_a_ring_over_two_nodes_crosses_at_two_links():
    traffic = ring("all_reduce", list(range(8)), 80)
    assert across_nodes(traffic, ranks_per_node=8) == 0
    assert across_nodes(traffic, ranks_per_node=4) == 2 * 140
    assert across_nodes(traffic, ranks_per_node=1) == 8 * 140


@given(shapes)
def test_the_order_moves_traffic_between_links_but_does_not_change_its_amount(shape):
    plain = step_traffic(SMALL, replace(shape, order=ORDERS[0]), global_batch=8)
    for axis, traffic in step_traffic(SMALL, shape, global_batch=8).items():
        assert sum(traffic.values()) == pytest.approx(sum(plain[axis].values()))
        assert across_nodes(traffic, 1) == sum(traffic.values())
        assert across_nodes(traffic, shape.world_size) == 0
        assert shape.size(axis) > 1 or axis == "dp" or not traffic


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_rank_sends_what_megatron_s_authors_count_for_tensor_parallelism(tp):
    # 8 b s h (t - 1) / t values per layer, device and micro-batch: Narayanan et al. 2021, sect. 3.2
    traffic = step_traffic(MODEL, GridShape(dp=2, tp=tp), global_batch=6, value_bytes=2)["tp"]
    expected = 2 * MODEL.num_layers * 8 * 3 * 2048 * 4096 * (tp - 1) / tp
    assert set(traffic.values()) == {expected} and len(traffic) == 2 * tp


def test_pipeline_stages_exchange_one_activation_each_way_at_each_boundary():
    traffic = step_traffic(MODEL, GridShape(pp=4), global_batch=5)["pp"]
    activation = 5 * 2048 * 4096 * 2
    links = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    assert traffic == dict.fromkeys(links, activation)


def test_with_sequence_parallelism_a_stage_sends_what_each_rank_of_tp_holds():
    shape = GridShape(pp=3, tp=4, dp=2)
    model = gpt_shape("gpt_7b", num_layers=6)
    whole = step_traffic(model, shape, global_batch=4)
    shared = step_traffic(model, shape, global_batch=4, sequence_parallel=True)
    act = 2 * 2048 * 4096 * 2
    assert set(whole["pp"].values()) == {act}
    assert set(shared["pp"].values()) == {act / 4}
    # a reduce-scatter and an all-gather send what an all-reduce sends
    for axis in ("tp", "cp", "dp"):
        assert shared[axis] == whole[axis]


def test_context_parallel_ranks_pass_on_keys_values_and_their_gradients():
    model = gpt_shape("gpt_7b", num_kv_heads=8)
    shape = GridShape(cp=4, tp=2)
    block = 2 * (2048 // 4) * (8 // 2) * 128 * 2  # K and V of one rank's tokens and heads, in bytes
    gathered = step_traffic(model, shape, global_batch=1, context_attention="all_gather")["cp"]
    assert set(gathered.values()) == {32 * 2 * 3 * block} and len(gathered) == 8
    # the ring is the default: K and V travel twice, and the sums of their gradients in 4 bytes
    in_ring = step_traffic(model, shape, global_batch=1)["cp"]
    assert set(in_ring.values()) == {32 * (2 + 2) * 3 * block} and len(in_ring) == 8
    wide = step_traffic(model, shape, global_batch=1, value_bytes=8)["cp"]
    assert set(wide.values()) == {32 * 3 * 3 * 4 * block}


def test_gradients_are_summed_over_dp_and_cp_and_cut_by_tp_and_pp():
    traffic = step_traffic(
        SMALL, GridShape(dp=2, cp=2, tp=2, pp=2), global_batch=2, gradient_bytes=4
    )["dp"]
    assert len(traffic) == 16
    assert set(traffic.values()) == {2 * 3 / 4 * SMALL.num_parameters / 4 * 4}


def test_experts_send_rows_to_all_ranks_of_ep_and_gradients_to_those_that_copy_them():
    model = replace(SMALL, bias=False, num_experts=4, experts_per_token=2, expert_ffn_size=64)
    shape = GridShape(dp=4, tp=2, pp=2, ep=2)
    found = step_traffic(model, shape, global_batch=8, value_bytes=2)
    act = 2 * model.context_length * model.hidden_size * 2  # of 2 samples
    # four all-to-alls in each of 4 layers, of which half goes to the other rank
    assert set(found["ep"].values()) == {4 * 4 * 2 * act / 2}
    assert set(found["ep"]) == set(itertools.chain(*map(pairs, shape.groups("ep"))))
    whole = step_traffic(model, replace(shape, ep=1), global_batch=8)["dp"]
    others = model.num_parameters - model.num_expert_parameters
    experts = model.num_expert_parameters / 2
    assert sum(whole.values()) == 16 * 2 * 3 / 4 * model.num_parameters / 4 * 4
    # a ring of four ranks, and one of two
    assert sum(found["dp"].values()) == 16 * (2 * 3 / 4 * others + experts) / 4 * 4
    with pytest.raises(ValueError, match="num_experts=4 is not divisible by ep=8"):
        step_traffic(model, GridShape(dp=8, ep=8), global_batch=8)


def pairs(group):
    return itertools.permutations(group, 2)


def crossing(shape, ranks_per_node, **keywords):
    traffic = step_traffic(MODEL, shape, global_batch=256, **keywords)
    return {axis: across_nodes(part, ranks_per_node) for axis, part in traffic.items()}


@pytest.mark.parametrize(
    "order", ["-".join(order) for order in itertools.permutations(("dp", "pp", "tp"))]
)
def test_on_two_nodes_only_the_slowest_axis_crosses_and_tp_is_the_worst(order):
    shape = GridShape(dp=2, pp=2, tp=4, order=f"{order}-cp")
    crossed = {axis for axis, size in crossing(shape, 8).items() if size}
    assert crossed == {order[-2:]}
    inside = crossing(replace(shape, order="tp-cp-dp-pp"), 8)
    assert sum(crossing(shape, 8).values()) > 20 * sum(inside.values()) or order[-2:] != "tp"


@pytest.mark.parametrize(
    ("shape", "batch", "message"),
    [
        (GridShape(dp=3), 8, "global_batch=8 is not divisible by dp=3"),
        (GridShape(pp=3), 8, "num_layers=32 is not divisible by pp=3"),
        (GridShape(tp=3), 8, "num_heads=32 is not divisible by tp=3"),
        (GridShape(cp=3), 8, "context_length=2048 is not divisible by cp=3"),
    ],
)
def test_an_axis_that_cuts_unevenly_is_refused_in_one_line(shape, batch, message):
    with pytest.raises(ValueError, match=message) as caught:
        step_traffic(MODEL, shape, global_batch=batch)
    assert "\n" not in str(caught.value)


def test_an_unknown_way_over_cp_is_refused():
    with pytest.raises(ValueError, match="context_attention='gather': choose ring or all_gather"):
        step_traffic(MODEL, GridShape(), global_batch=1, context_attention="gather")


def test_a_node_without_ranks_is_refused():
    with pytest.raises(ValueError, match="ranks_per_node=0"):
        across_nodes({}, 0)
