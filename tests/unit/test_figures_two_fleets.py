"""The drawings of two fleets: which rank sends which block, and what travels."""

from course.figures import plot

THREE = {rank: (8 * rank, 0, 8, 8) for rank in range(3)}


def words(picture):
    return [text.get_text() for text in picture.axes[0].texts]


def test_a_block_says_who_sends_it():
    targets = {3: [(0, 0, 12, 8)], 4: [(12, 0, 12, 8)]}
    found = words(plot.two_cuts((24, 8), THREE, targets, alt="Four words at least"))
    assert [found.count(f"from {rank}") for rank in range(3)] == [1, 2, 1]
    assert found.count("rank 3") == 1


def test_a_part_of_several_blocks():
    targets = {3: [(0, 0, 4, 8), (16, 0, 4, 8)]}
    found = words(plot.two_cuts((24, 8), THREE, targets, alt="Four words at least"))
    assert [found.count(f"from {rank}") for rank in range(3)] == [1, 0, 1]
    assert found.count("rank 3") == 2


def test_ranks_of_both_fleets_are_named():
    found = words(plot.two_fleets([0, 1], [2, 3], alt="Four words at least"))
    assert "learner\nranks 0, 1" in found
    assert "generator\nranks 2, 3" in found
