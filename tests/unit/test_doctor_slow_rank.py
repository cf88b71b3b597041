"""When the doctor calls a rank slow, and when it does not: judged on seconds that are given."""

import pytest

from labcode.doctor.facts import Facts
from labcode.doctor.judge import SLOW_STEPS, judge

STEPS = 8


def facts(rank, forward_s=0.020, backward_s=0.040, loading_s=0.001, steps=STEPS):
    """A rank whose steps all take the same time."""
    seconds = {"data loading": loading_s, "forward": forward_s, "backward": backward_s}
    return Facts(rank, seconds={phase: [value] * steps for phase, value in seconds.items()})


def test_ranks_of_one_speed_are_not_slow():
    assert judge([facts(0), facts(1), facts(2), facts(3)]) == []


def test_a_rank_that_takes_three_times_as_long_is_named_with_phase_and_cure():
    (finding,) = judge([facts(0), facts(1, backward_s=0.120), facts(2)])
    assert (finding.name, finding.ranks) == ("slow rank", (1,))
    assert finding.what == "it spends 120 ms of a step in backward, the others 40 ms"
    assert finding.evidence == pytest.approx(3)
    assert "look at that node" in finding.cure


def test_slow_data_loading_has_its_own_cure():
    (finding,) = judge([facts(0), facts(1, loading_s=0.100)])
    assert "in data loading" in finding.what
    assert "how that rank reads" in finding.cure


def test_of_two_slow_phases_the_one_that_costs_more_is_named():
    (finding,) = judge([facts(0), facts(1, forward_s=0.080, backward_s=0.200)])
    assert "in backward" in finding.what


@pytest.mark.parametrize(
    "late",
    [
        pytest.param({"backward_s": 0.070}, id="less than twice the others' time"),
        pytest.param({"loading_s": 0.009}, id="nine times, but of next to nothing"),
        pytest.param({"loading_s": 0.0115}, id="more than 10 ms, but a sixth of the step"),
    ],
)
def test_a_rank_that_nobody_waits_for_is_not_slow(late):
    assert judge([facts(0), facts(1, **late)]) == []


def test_a_few_slow_steps_do_not_make_a_slow_rank():
    now_and_then = facts(1)
    now_and_then.seconds["forward"][:3] = [0.5, 0.5, 0.5]
    assert judge([facts(0), now_and_then]) == []


def test_too_few_steps_say_nothing():
    few = SLOW_STEPS - 1
    assert judge([facts(0, steps=few), facts(1, forward_s=0.5, steps=few)]) == []
