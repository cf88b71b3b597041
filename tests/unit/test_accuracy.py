"""The harness: its headline numbers as bounds, and its arithmetic on made-up times."""

import statistics
from dataclasses import replace

import pytest

from labcode.perf import accuracy
from labcode.perf.estimate import INTERVAL
from labcode.perf.published import published_runs, rows, why_left_out

RUNS = published_runs()


def test_step_times_are_as_near_as_the_table_says():
    plain = accuracy.spread(accuracy.ratios(RUNS))
    calibrated = accuracy.spread(accuracy.calibrated_ratios(RUNS))
    assert plain.count == 415
    assert (plain.median, plain.p90) < (0.09, 0.23)
    assert plain.p90 < 0.23
    assert calibrated.median < 0.055
    assert calibrated.p90 < 0.195


@pytest.mark.parametrize(("source", "most"), [("vtrain_single", 0.03), ("bigscience", 0.07)])
def test_the_layout_that_is_chosen_is_nearly_the_best(source, most):
    sweep = [run for run in RUNS if run.source_key == source]
    assert statistics.mean(accuracy.regrets(sweep)) < most


def test_memory_is_as_near_as_the_table_says():
    found = accuracy.memory_accuracy(RUNS)
    assert found.calibrated.median < 0.05
    assert found.calibrated_verdicts.found >= 5
    assert found.calibrated_verdicts.out_of_memory == 6
    assert found.calibrated_verdicts.refused <= 0.05 * found.calibrated_verdicts.fitting


def test_the_estimate_beats_the_rule_of_thumb():
    ours = accuracy.spread(accuracy.ratios(RUNS))
    theirs = accuracy.spread(accuracy.ratios(RUNS, accuracy.rule_of_thumb_s))
    assert ours.median < theirs.median
    assert ours.p90 < theirs.p90


def test_the_interval_is_that_of_the_published_runs():
    times = sorted(1 / ratio for ratio in accuracy.ratios(RUNS))
    tenth = times[len(times) // 10]
    ninetieth = times[9 * len(times) // 10]
    assert pytest.approx((tenth, ninetieth), abs=0.02) == INTERVAL


def test_a_factor_is_fitted_on_the_other_runs_alone():
    """Three runs of one stack: the first is calibrated by the other two."""
    stack = [run for run in RUNS if run.source_key == "mtnlg530"]
    made = [replace(run, step_s=s) for run, s in zip(stack, (10.0, 20.0, 40.0), strict=True)]
    found = accuracy.calibrated_ratios(made, lambda run: 10.0)
    # factors 3, 2.5 and 1.5
    assert found == pytest.approx([3.0, 1.25, 0.375])


def test_regret_is_the_time_lost_by_the_choice():
    stack = [run for run in RUNS if run.source_key == "vtrain_single"]
    one = replace(stack[0], step_s=1.0)
    two = replace(stack[0], step_s=1.5)
    assert accuracy.regrets([one, two], lambda run: -(run.step_s or 0)) == [0.5]
    assert accuracy.regrets([one, two], lambda run: run.step_s or 0) == [0.0]
    assert accuracy.regrets([one]) == []


def test_every_row_is_a_run_or_says_why_not():
    reasons = [why_left_out(row) for row in rows()]
    assert reasons.count(None) == len(RUNS)
    assert len(reasons) == 480
    assert all(run.source for run in RUNS)
