"""When a rank is named as slow, and the clock of a rank's own work."""

import torch
from faults.waiting import pause
from torch import nn

from labcode.train.slow import IN_A_ROW, SlowRanks, WorkClock

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


def test_the_clock_stops_at_the_first_gradient_of_the_last_micro_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    clock = WorkClock(torch.device("cpu"))
    clock.watch(model)
    for _ in range(2):
        clock.begin()
        clock.has_read()
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
        arrived = clock._arrived
        pause(0.01)  # what waits for the others comes later
        clock.end()
        assert clock._arrived == arrived
        assert isinstance(arrived, float) and isinstance(clock._begun, float)
        assert arrived > clock._begun
    assert len(clock._hooks) == 1
    assert clock.take() > 0
    assert clock.take() == 0
