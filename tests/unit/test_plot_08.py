"""The drawings of lesson 08: who holds which stripe of a weight, and a recorded profile as rows of a time line."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from labcode.parallel.sharding import Split
from labcode.perf import trace
from labcode.teach.figures.weights import cuts, owners

ALT = "Four words at least"


def stripes(picture):
    """{(left, bottom, width, height): text} of all rectangles."""
    return {
        tuple(round(v, 6) for v in p.get_bbox().bounds): p.get_gid()
        for p in picture.axes[0].patches
    }


def test_stripes_are_those_of_the_split():
    assert owners(Split(0), 6, 2) == [(0, 0, 3), (1, 3, 6)]
    assert owners(Split(1), 5, 3) == [(0, 0, 2), (1, 2, 4), (2, 4, 5)]
    assert owners(Split(0, (4, 2, 2)), 8, 2) == [
        (0, 0, 2),
        (1, 2, 4),
        (0, 4, 5),
        (1, 5, 6),
        (0, 6, 7),
        (1, 7, 8),
    ]


def test_a_matrix_is_drawn_to_scale_and_cut_where_the_split_says():
    rows = stripes(cuts({"w": ((6, 4), Split(0))}, 2, alt=ALT))
    assert [(width, height) for _, _, width, height in rows] == [(4, 3), (4, 3)] and list(
        rows.values()
    ) == ["0", "1"]
    columns = stripes(cuts({"w": ((6, 4), Split(1))}, 4, alt=ALT))
    assert [(width, height) for _, _, width, height in columns] == [(1, 6)] * 4


def test_whole_weights_vectors_and_sections():
    picture = cuts(
        {"w": ((9, 3), Split(0, (3, 3, 3))), "b": ((9,), Split(0, (3, 3, 3))), "n": ((4, 4), None)},
        3,
        alt=ALT,
    )
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert texts.count("q") == texts.count("k") == texts.count("v") == 1  # beside the matrix alone
    assert texts.count("all") == 1 and texts.count("0") == 3
    assert len(stripes(picture)) == 9 + 9 + 1
    with pytest.raises(ValueError, match="alt"):
        cuts({"w": ((2, 2), None)}, 2, alt="")


def test_a_profile_becomes_rows():
    layer, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch.nn.functional.gelu(layer(x)).sum().backward()
    rows = trace.rows(recorded, "rank 0")
    assert [label for _, label, *_ in rows] == [
        "matrix product",
        "elementwise",
        "elementwise",
        "matrix product",
    ]
    assert {lane for lane, *_ in rows} == {"rank 0"} and rows[0][2] == 0
    assert all(start <= stop for *_, start, stop in rows)
    assert all(before[3] <= after[2] for before, after in pairwise(rows))


def event(name, start, end, parent=None):
    return SimpleNamespace(
        name=name, cpu_parent=parent, time_range=SimpleNamespace(start=start, end=end)
    )


def test_collectives_have_a_lane_of_their_own_and_nested_operations_none():
    outer = event("aten::scaled_dot_product_attention", 1000, 3000)
    events = [
        event("gloo:all_reduce", 3000, 5000),
        outer,
        event("aten::bmm", 1500, 2000, outer),
        event("aten::view", 0, 1),
    ]
    rows = trace.rows(SimpleNamespace(events=lambda: events), "rank 1")
    assert rows == [("rank 1", "attention", 0.0, 2.0), ("rank 1, sending", "all-reduce", 2.0, 4.0)]
    assert trace.share(rows, "all-reduce") == 0.5
    assert trace.rows(SimpleNamespace(events=list), "rank 1") == []
