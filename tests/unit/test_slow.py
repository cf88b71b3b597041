"""When a rank is named as slow."""

from labcode.measure.slow import IN_A_ROW, SlowRanks

FOUR = [[0, 1, 2, 3]]
HOSTS = ["n1", "n1", "n2", "n2"]
USUAL = [0.5, 0.55, 0.6, 0.5]
SLOW = [0.5, 0.55, 0.6, 1.32]


def looked(slow, *intervals):
    """The number of lines at each interval."""
    return [len(slow.look(work_s)) for work_s in intervals]


def test_a_rank_that_stays_slow_is_named_once():
    slow = SlowRanks(FOUR, HOSTS, factor=2.0)
    assert looked(slow, *[USUAL] * 3, *[SLOW] * (IN_A_ROW - 1), USUAL) == [0] * (IN_A_ROW + 3)
    assert looked(slow, *[SLOW] * (IN_A_ROW - 1)) == [0] * (IN_A_ROW - 1)
    (line,) = slow.look(SLOW)
    assert line == (
        "rank 3 on n2 is 2.4 times slower than the median of the ranks with the same work "
        "(reading and forward 1.32 s a step against 0.55 s)"
    )
    assert looked(slow, SLOW, SLOW, SLOW, USUAL) == [0] * 4
    # it was well in between
    assert looked(slow, *[SLOW] * IN_A_ROW) == [0] * (IN_A_ROW - 1) + [1]


def test_ranks_are_compared_with_those_that_have_the_same_work():
    # two stages, the second of which waits for the first
    stages = [[0, 1], [2, 3]]
    slow = SlowRanks(stages, HOSTS, factor=2.0)
    assert looked(slow, *[[0.3, 0.3, 0.9, 0.9]] * 5) == [0] * 5
    alone = SlowRanks([[0], [1]], HOSTS[:2], factor=2.0)
    assert looked(alone, *[[0.1, 9.0]] * 5) == [0] * 5


def test_milliseconds_are_not_worth_a_line():
    slow = SlowRanks(FOUR, HOSTS, factor=2.0)
    assert looked(slow, *[[0.01, 0.01, 0.01, 0.055]] * 5) == [0] * 5
