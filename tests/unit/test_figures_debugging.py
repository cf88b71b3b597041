"""Drawings of precision debugging say in words what they show."""

from course.figures import plot
from labcode.topology import GridShape

ALT = "Four words at least"


def words(axes):
    return [text.get_text() for text in axes.texts]


def test_ranks_of_a_reduction_group_have_the_same_letter():
    shape = GridShape(tp=2, dp=2, pp=2)
    picture = plot.reduction_groups(shape, [("dp",), ()], alt=ALT)
    over_dp, over_none = picture.axes
    said = words(over_dp)
    letters = {rank: said[said.index(f"rank {rank}") + 1] for rank in range(8)}
    assert letters == {0: "A", 2: "A", 1: "B", 3: "B", 4: "C", 6: "C", 5: "D", 7: "D"}
    assert {"stage 0", "stage 1"} <= set(said)
    assert set("ABCDEFGH") <= set(words(over_none))


def test_the_spread_of_all_parts_is_written_beside_them():
    picture = plot.spread_of_parts({"a": [1, 2, 3], "b": [11, 12, 13]}, alt=ALT)
    assert words(picture.axes[0]) == ["mean 2, std 1", "mean 12, std 1", "mean 7, std 5.55"]


def test_a_heatmap_with_long_names_is_wider():
    short = plot.heatmap([[1, 2]], alt=ALT, rows=["a"], columns=["b", "c"])
    long = plot.heatmap([[1, 2]], alt=ALT, rows=["a long name"], columns=["b", "longer names"])
    assert long.figure.get_figwidth() > short.figure.get_figwidth() + 1
