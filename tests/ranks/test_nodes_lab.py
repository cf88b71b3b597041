"""Lesson 08's all-reduces over two nodes: their sums, and that each message takes its time."""

import pytest

from course.labs import l08_nodes as nodes

# seconds in which the busiest adapter sends, by counting: 6, 3 and 2 MB
NETWORK_S = {
    nodes.one_ring: 6e6 / nodes.ADAPTER,
    nodes.two_rings: 3e6 / nodes.ADAPTER,
    nodes.two_levels: 2e6 / nodes.ADAPTER,
}


@pytest.mark.parametrize("way", NETWORK_S, ids=["one ring", "two rings", "two levels"])
def test_the_sum_is_right_and_takes_as_long_as_its_adapter_needs(ranks4, way):
    """A busy machine makes it longer; shorter it can never be."""
    seconds = ranks4.run(nodes.median_s, way, 1)  # which asserts the sum
    assert max(seconds) >= NETWORK_S[way]
