"""How fast a collective is on nodes full of GPUs: the rule of two levels.

An all-reduce of N bytes over n ranks on k nodes can go in two levels: a reduce-scatter inside the
nodes, an all-reduce of N k/n bytes between GPUs of the same place in all nodes, an all-gather
inside. Each adapter then carries 2 (k - 1)/k * N k/n bytes, where a rank of one ring sends
2 (n - 1)/n * N. So each GPU seems to send ("bus bandwidth")

    min(inside, network rate of one GPU * (n - 1) / (k - 1))

and not the rate of its adapter: with 8 GPUs in each of two nodes 15 times that. Rings over all
adapters reach n/k times it: 8 there, and hardly less on many nodes.

An all-to-all has no such rule, because no byte serves twice: of the N bytes of a rank, which has m
ranks of the group in its node, N (n - m)/n go through its own adapter and N (m - 1)/n stay inside.

Source: nccl-tests, doc/PERFORMANCE.md, for bus bandwidth; the rule follows from counting the bytes
    that leave a node.
Held by: tests/unit/test_two_level.py; by messages on paced links, in lesson 08, section 5
"""

import functools
import math
from typing import NamedTuple

from labcode.perf import alpha_beta
from labcode.perf.alpha_beta import Link
from labcode.perf.cluster import Cluster
from labcode.topology import EXPERT_AXES, GridShape


class Placement(NamedTuple):
    """Where the ranks of a group sit.

    Args:
        ranks: Number of ranks of the group.
        per_node: How many of them share a node.
    """

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Nodes that the group touches."""
        return math.ceil(self.ranks / self.per_node)


def placement(shape: GridShape, gpus_per_node: int, *axes: str) -> Placement:
    """How a group along `axes` lies on nodes that ranks fill in order.

    An axis whose neighbours are s ranks apart has min(size, gpus_per_node / s) of them in a node,
    at least one. That is exact where sizes divide each other, as in every grid that fills nodes.

    Held by: tests/unit/test_two_level.py::test_a_placement_is_that_of_the_groups_counted
    """
    stride = 1
    per_node = 1
    walked = shape.axes
    if not set(EXPERT_AXES).isdisjoint(axes):
        # neighbours of dp differ in ep first
        place = walked.index("dp")
        walked = (*walked[:place], *EXPERT_AXES, *walked[place + 1 :])
    for axis in walked:
        size = shape.size(axis)
        if axis in axes:
            per_node *= max(1, min(size, gpus_per_node // stride))
        stride *= size
    return Placement(shape.size(*axes), per_node)


class Places(NamedTuple):
    """Where the groups of a grid are.

    Args:
        tp, cp, pp: Groups along one axis.
        data: Ranks along dp and cp, which share the gradient of a weight.
        ep: Ranks over which experts are divided.
        copies: Ranks along edp and cp, which share the gradient of an expert.
    """

    tp: Placement
    cp: Placement
    pp: Placement
    data: Placement
    ep: Placement
    copies: Placement


@functools.lru_cache(maxsize=65536)
def places(shape: GridShape, gpus_per_node: int) -> Places:
    """All groups of a grid."""
    return Places(
        tp=placement(shape, gpus_per_node, "tp"),
        cp=placement(shape, gpus_per_node, "cp"),
        pp=placement(shape, gpus_per_node, "pp"),
        data=placement(shape, gpus_per_node, "dp", "cp"),
        ep=placement(shape, gpus_per_node, "ep"),
        copies=placement(shape, gpus_per_node, "edp", "cp"),
    )


@functools.lru_cache(maxsize=65536)
def group_link(cluster: Cluster, place: Placement) -> Link:
    """The link that a ring over the group would need between neighbours to be as fast."""
    return link_over(cluster.inside, cluster.between, place)


def link_over(inside: Link, between: Link, place: Placement) -> Link:
    """Like `group_link`, over two links.

    alpha is the mean over the ring: k of its n messages cross the network.
    """
    if place.nodes == 1:
        return inside
    ranks = place.ranks
    crossing = place.nodes / ranks
    alpha_s = (1 - crossing) * inside.alpha_s + crossing * between.alpha_s
    beta = between.beta_bytes_per_s * (ranks - 1) / (place.nodes - 1)
    # one rank a node: its own share of the adapters, and nothing inside
    limit = inside.beta_bytes_per_s if place.per_node > 1 else math.inf
    return Link(alpha_s, min(beta, limit))


@functools.lru_cache(maxsize=65536)
def collective_s(cluster: Cluster, collective: str, place: Placement, num_bytes: float) -> float:
    """Seconds of a collective over the group, 0 for a group of one.

    Large all-reduces over many nodes take a tree instead of a ring where its fewer messages pay:
    2 (ranks in a node - 1) inside and 2 log2(nodes) between.
    """
    if place.ranks == 1:
        return 0.0
    if collective == "all_to_all" and place.nodes > 1:
        return _all_to_all_s(cluster, place, num_bytes)
    link = group_link(cluster, place)
    if place.nodes == 1:
        link = cluster.collectives.get(collective, link)
    ring_s = alpha_beta.time_s(collective, place.ranks, num_bytes, link)
    if collective != "all_reduce" or place.nodes == 1:
        return ring_s
    inside_s = 2 * (place.per_node - 1) * cluster.inside.alpha_s
    between_s = 2 * math.log2(place.nodes) * cluster.between.alpha_s
    sent = alpha_beta.bytes_sent(collective, place.ranks, num_bytes)
    return min(ring_s, inside_s + between_s + sent / link.beta_bytes_per_s)


def _all_to_all_s(cluster: Cluster, place: Placement, num_bytes: float) -> float:
    """Seconds of an all-to-all over several nodes: both levels work at once, the slower one counts.

    Args:
        num_bytes: What each rank has at the beginning: a part for each rank, its own among them.
    """
    part = num_bytes / place.ranks
    inside = place.per_node - 1
    outside = place.ranks - place.per_node
    inside_s = inside * (cluster.inside.alpha_s + part / cluster.inside.beta_bytes_per_s)
    outside_s = outside * (cluster.between.alpha_s + part / cluster.between.beta_bytes_per_s)
    return max(inside_s, outside_s)


def send_s(cluster: Cluster, place: Placement, num_bytes: float) -> float:
    """Seconds of a message to the next rank of a group."""
    if place.ranks == 1:
        return 0.0
    link = cluster.between
    if place.nodes == 1:
        link = cluster.collectives.get("send", cluster.inside)
    return alpha_beta.time_s("send", 2, num_bytes, link)
