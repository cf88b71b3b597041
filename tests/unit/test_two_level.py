"""Collectives on nodes full of GPUs."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labcode.perf.alpha_beta import Link, time_s
from labcode.perf.cluster import load_cluster
from labcode.perf.two_level import Placement, collective_s, group_link, placement, send_s
from labcode.topology import GridShape

POWERS = st.sampled_from([1, 2, 4])
ORDERS = st.permutations(["dp", "pp", "cp", "tp"])


@settings(max_examples=40, deadline=None)
@given(POWERS, POWERS, POWERS, POWERS, ORDERS, st.sampled_from([1, 2, 4, 8]))
def test_a_placement_is_that_of_the_groups_counted(dp, pp, cp, tp, order, node):
    shape = GridShape(dp, pp, cp, tp, "-".join(order))
    for axes in (("tp",), ("cp",), ("pp",), ("dp",), ("dp", "cp")):
        group = shape.groups(*axes)[0]
        nodes = Counter(rank // node for rank in group)
        place = placement(shape, node, *axes)
        assert (place.ranks, place.nodes) == (len(group), len(nodes))
        assert place.per_node == max(nodes.values())


@settings(max_examples=40, deadline=None)
@given(POWERS, POWERS, POWERS, POWERS, ORDERS, st.sampled_from([1, 2, 4, 8]))
def test_experts_are_placed_as_the_groups_of_ep_and_edp(ep, edp, cp, tp, order, node):
    shape = GridShape(ep * edp, 2, cp, tp, "-".join(order), ep=ep)
    for axes in (("ep",), ("edp",), ("edp", "cp"), ("ep", "edp")):
        group = shape.groups(*axes)[0]
        nodes = Counter(rank // node for rank in group)
        place = placement(shape, node, *axes)
        assert (place.ranks, place.nodes) == (len(group), len(nodes))
        assert place.per_node == max(nodes.values())
    assert placement(shape, node, "ep", "edp") == placement(shape, node, "dp")


def test_an_all_to_all_takes_as_long_as_its_slower_level():
    """16 ranks on 2 nodes: of 16 parts 8 leave the node through the rank's own adapter."""
    cluster = load_cluster("selene")
    inside = collective_s(cluster, "all_to_all", Placement(8, 8), 1e9)
    assert inside == time_s("all_to_all", 8, 1e9, cluster.inside)
    across = collective_s(cluster, "all_to_all", Placement(16, 8), 1.6e9)
    adapter = cluster.between
    assert across == pytest.approx(8 * adapter.alpha_s + 0.8e9 / adapter.beta_bytes_per_s)
    # a network that costs nothing leaves the seven parts inside
    fast = replace(cluster, between=Link(0.0, 1e15))
    found = collective_s(fast, "all_to_all", Placement(16, 8), 1.6e9)
    assert found == pytest.approx(time_s("all_to_all", 8, 0.8e9, cluster.inside))
    assert collective_s(cluster, "all_to_all", Placement(1, 1), 1e9) == 0


def test_the_rule_of_two_levels():
    cluster = load_cluster("selene")
    # one GPU in each node: its adapter
    assert group_link(cluster, Placement(16, 1)).beta_bytes_per_s == 25e9
    # two full nodes: 15 adapters' worth, more than NVLink has
    assert group_link(cluster, Placement(16, 8)).beta_bytes_per_s == 220e9
    # many full nodes: nearly 8 adapters' worth
    assert group_link(cluster, Placement(512, 8)).beta_bytes_per_s == pytest.approx(25e9 * 511 / 63)
    assert group_link(cluster, Placement(8, 8)) == cluster.inside


def test_times_of_collectives():
    cluster = load_cluster("selene")
    assert collective_s(cluster, "all_reduce", Placement(1, 1), 1e9) == 0
    inside = collective_s(cluster, "all_reduce", Placement(8, 8), 1e9)
    assert inside == time_s("all_reduce", 8, 1e9, cluster.inside)
    # a tree over 128 nodes has fewer messages than a ring over 1,024 ranks
    place = Placement(1024, 8)
    ring = time_s("all_reduce", 1024, 1e6, group_link(cluster, place))
    assert collective_s(cluster, "all_reduce", place, 1e6) < ring / 10
    assert send_s(cluster, Placement(1, 1), 1e9) == 0
    assert send_s(cluster, Placement(4, 1), 25e9) == pytest.approx(1, rel=1e-3)
    assert send_s(cluster, Placement(4, 4), 220e9) == pytest.approx(1, rel=1e-3)


def test_the_published_all_reduce_over_four_nodes_is_that_of_rings_a_quarter_below_the_rule():
    """4 x 8 B200: 381.8 GB/s at 16 GiB; rings over all adapters would carry 400."""
    cluster = load_cluster("b200-efa")
    beta = group_link(cluster, Placement(32, 8)).beta_bytes_per_s
    rings = 8 * cluster.between.beta_bytes_per_s
    assert rings == pytest.approx(381.8e9, rel=0.05)
    assert beta == pytest.approx(rings * 31 / 3 / 8)
