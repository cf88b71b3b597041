"""The paced ring of lesson 11: blocks and messages take their time, and results stay the same."""

import pytest

from course.labs import l11_slow_ring as slow_ring

BLOCK_MS = 20


@pytest.mark.parametrize("message_ms", [10, 40])
def test_a_ring_that_waits_adds_up_and_one_that_overlaps_takes_the_longer(ranks4, message_ms):
    waiting = slow_ring.forward(ranks4, False, BLOCK_MS, message_ms)
    overlapped = slow_ring.forward(ranks4, True, BLOCK_MS, message_ms)
    added_ms = 4 * BLOCK_MS + 3 * message_ms
    longer_ms = 3 * max(BLOCK_MS, message_ms) + BLOCK_MS
    # sleeping is never shorter than it was told, so the order of the two does not depend on load
    assert slow_ring.total_ms(waiting) >= added_ms - 1
    assert slow_ring.total_ms(overlapped) >= longer_ms - 1
    for rows in (waiting, overlapped):
        assert [kind for kind, _, _ in rows].count("block") == 4
        assert [kind for kind, _, _ in rows].count("message") == 3
    assert _runs_beside(overlapped) == 3 and _runs_beside(waiting) == 0


def _runs_beside(rows):
    """How many messages are under way while a block is computed."""
    blocks = [row for row in rows if row[0] == "block"]
    beside = 0
    for kind, begin_ms, end_ms in rows:
        if kind == "message":
            beside += any(start < end_ms and begin_ms < stop for _, start, stop in blocks)
    return beside


def outputs():
    """The ring of exercise 11.2 in the paced patches, and without them."""
    import torch
    import torch.distributed as dist

    from course.labs import l11_by_hand
    from course.labs.l11_slow_ring import _Pace

    group = dist.group.WORLD
    draw = torch.Generator().manual_seed(dist.get_rank())
    q, k, v = torch.randn(3, 1, 1, 4, 4, dtype=torch.float64, generator=draw)
    plain = l11_by_hand.ring_forward(q, k, v, group)
    with _Pace(0, 0.001).messages():
        paced = l11_by_hand.ring_forward(q, k, v, group)
    return [torch.equal(one, other) for one, other in zip(plain, paced)]


def test_the_numbers_are_those_without_the_pace(ranks4):
    assert ranks4.run(outputs) == [[True, True]] * 4


def test_the_drawing_has_two_lanes_for_each_way():
    rows = [("block", 0.0, 20.0), ("message", 20.0, 35.0), ("block", 35.0, 55.0)]
    picture = slow_ring.draw(rows, rows, title="A title")
    lanes = [label.get_text() for label in picture.axes[0].get_yticklabels()]
    assert lanes == ["waits: rank", "waits: link", "overlaps: rank", "overlaps: link"]
