"""A recorded profile as rows of a time line: computing, and collectives in their own lane."""

from itertools import pairwise

import torch
from made_traces import MadeTrace
from torch.profiler import ProfilerActivity, profile

from labcode.perf import trace


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


def test_collectives_have_a_lane_of_their_own_and_nested_operations_none():
    made = MadeTrace().operation("aten::view", 0, 1)
    made.operation("aten::scaled_dot_product_attention", 1000, 3000)
    made.operation("aten::bmm", 1500, 2000).collective("gloo:all_reduce", 3000, 5000)
    rows = trace.rows(made.trace(), "rank 1")
    assert rows == [("rank 1", "attention", 0.0, 2.0), ("rank 1, sending", "all-reduce", 2.0, 4.0)]
    assert trace.share(rows, "all-reduce") == 0.5
    assert trace.rows(MadeTrace().trace(), "rank 1") == []
