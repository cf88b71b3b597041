"""The drawing of expert parallelism has the right rows in the right places."""

from course.figures import plot
from course.figures.row_exchange import stages

CHOICES = [{"a": (2, 0), "b": (0, 3), "c": (1, 0)}, {"d": (2, 3), "e": (2, 3), "f": (2, 1)}]


def test_rows_are_sorted_then_sent_then_sorted_again():
    stand, by_expert, arrived, again = stages(CHOICES, experts_per_rank=2)
    for of_ranks in (stand, by_expert, arrived, again):
        assert len(set(of_ranks[0] + of_ranks[1])) == 12, "a row is lost or there twice"
    for rank, rows in enumerate(by_expert):
        assert {row.source for row in rows} == {rank}
        assert [row.expert for row in rows] == sorted(row.expert for row in stand[rank])
    for rank, rows in enumerate(arrived):
        assert {row.expert // 2 for row in rows} == {rank}
        assert [row.source for row in rows] == sorted(row.source for row in rows)
        assert [row.expert for row in again[rank]] == sorted(row.expert for row in rows)
    assert [len(rows) for rows in arrived] == [5, 7]


def test_each_row_is_drawn_in_each_stage():
    picture = plot.row_exchange(CHOICES, experts_per_rank=2, alt="Four words at least")
    found = [text.get_text() for text in picture.axes[0].texts]
    for row in ("a 2", "c 0", "f 1"):
        assert found.count(row) == 4
    assert "expert 3" in found
