"""The drawings of tensor parallelism say what they should."""

import torch

from course.figures import plot
from course.figures.tensor_flow import LAYOUTS, NUMBERS

ALT = "Four words at least"


def texts(picture):
    return [text.get_text() for text in picture.axes[0].texts]


def test_the_way_through_an_mlp():
    found = texts(plot.tensor_parallel_mlp(alt=ALT))
    assert "forward:\ncopy" in found and "backward:\nsum over ranks" in found  # f
    assert "forward:\nsum over ranks" in found and "backward:\ncopy" in found  # g
    assert [name for name in ("A0", "B0", "A1", "B1") if name not in found] == []


def test_columns_then_rows():
    found = texts(plot.column_then_row(alt=ALT))
    assert found.count("rank 0") == found.count("rank 1") == 4


def test_each_layout_is_that_of_the_tensor():
    whole = torch.tensor(NUMBERS)
    for name, of_ranks in LAYOUTS.items():
        parts = []
        for rows in of_ranks:
            parts.append(torch.tensor([[number or 0 for number in row] for row in rows]))
        if name == "Replicate()":
            assert all(torch.equal(part, whole) for part in parts)
        else:
            assert torch.equal(torch.stack(parts).sum(0), whole), name
    assert set(LAYOUTS) <= set(texts(plot.layouts(alt=ALT)))
