"""Which steps are bad, and when there are too many of them."""

import math

import pytest
import torch

from labcode import recipes
from labcode.train.finite import Diverged
from labcode.train.guard import FEWEST, WINDOW, Guard

NAN = math.nan


def guard(rule="skip", spike_factor=4.0, in_a_row=3, in_all=5):
    return Guard(rule, spike_factor, in_a_row, in_all)


def judged(one, *norms):
    """Whether each of these steps is bad."""
    return [bool(one.judge(norm)) for norm in norms]


@pytest.mark.parametrize("norm", [NAN, math.inf, -math.inf])
def test_by_default_a_norm_that_is_not_finite_ends_the_run(norm):
    one = guard("stop", 0)
    assert judged(one, 1.0, 1e300) == [False, False]
    with pytest.raises(Diverged, match=rf"^the gradient norm is {norm}: lower optim\.lr, or look"):
        one.judge(norm)
    assert not one.remembers


def test_a_spike_is_a_norm_far_above_the_median_of_the_good_steps_before():
    one = guard()
    assert judged(one, *[1.0] * (FEWEST - 1), 100.0) == [False] * FEWEST  # too few before
    assert judged(one, 4.0, 4.01) == [False, True]
    assert one.judge(50.0) == "the gradient norm is 50, 50 times its median of 1"
    assert one.bad_steps == 2
    # bad ones are no measure: the median stays
    assert judged(one, 4.0) == [False]


def test_a_level_that_stays_higher_becomes_the_measure():
    one = guard(in_all=10**6)
    judged(one, *[1.0] * WINDOW)
    assert judged(one, *[3.0] * WINDOW) == [False] * WINDOW
    assert judged(one, 11.9, 12.1) == [False, True]


def test_without_a_factor_only_what_is_not_finite_is_bad():
    one = guard(spike_factor=0)
    assert judged(one, *[1.0] * 30, 1e9, NAN) == [False] * 31 + [True]


def test_the_rule_stop_holds_for_spikes_too():
    one = guard("stop")
    judged(one, *[1.0] * 20)
    with pytest.raises(Diverged, match=r"^the gradient norm is 9, 9 times its median of 1: lower"):
        one.judge(9.0)


def test_too_many_in_a_row_or_in_all_end_the_run():
    one = guard()
    assert judged(one, NAN, NAN, NAN) == [True] * 3
    with pytest.raises(Diverged, match=r"train\.bad_in_a_row=3 bad steps in a row are over"):
        one.judge(NAN)
    one = guard()
    assert judged(one, NAN, 1.0, NAN, 1.0, NAN, 1.0, NAN, 1.0, NAN, 1.0).count(True) == 5
    with pytest.raises(Diverged, match=r"train\.bad_in_all=5 bad steps in all are over"):
        one.judge(NAN)


def test_what_it_remembers_goes_through_a_checkpoint():
    one = guard()
    judged(one, *[1.0] * 20, NAN, 2.0, NAN)
    other = guard()
    other.state = one.state.clone()
    assert torch.equal(other.state, one.state)
    for norm in (7.0, 3.0, 2.0, NAN, 100.0):
        assert other.judge(norm) == one.judge(norm)
    assert torch.equal(other.state, one.state)


def test_rolling_back_needs_checkpoints():
    changes = {"train.on_bad_step": "rollback"}
    with pytest.raises(ValueError, match=r"^train\.on_bad_step=rollback goes back to a checkpoint"):
        recipes.with_changes(recipes.gpt_tiny(), changes)
    recipes.with_changes(recipes.gpt_tiny(), changes | {"checkpoint.every": 5})
