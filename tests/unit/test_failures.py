"""Young's and Daly's intervals against the model that they approximate, and against its
simulation."""

import statistics

import pytest

from labcode.perf.failures import daly_interval_s, overhead, simulate, young_interval_s

HOUR_S = 3600


def test_a_run_without_failures_works_and_saves():
    story = simulate(100, interval_s=40, save_s=1, restart_s=9, mtbf_s=1e12)
    assert [event.what for event in story.events] == ["work", "save"] * 3
    assert story.seconds("work") == 100
    assert story.total_s == 103


def test_a_simulated_run_has_no_gaps_and_does_all_its_work():
    story = simulate(1000, interval_s=40, save_s=5, restart_s=9, mtbf_s=100, seed=3)
    for event, following in zip(story.events, story.events[1:]):
        assert event.end_s == following.start_s
    assert story.seconds("work") == pytest.approx(1000)
    assert story.seconds("lost") > 0


@pytest.mark.parametrize("interval_s", [300, 1200, 5000])
def test_the_expected_overhead_is_the_mean_of_simulated_ones(interval_s):
    costs = {"save_s": 60, "restart_s": 600, "mtbf_s": 3 * HOUR_S}
    found = []
    for seed in range(40):
        found.append(simulate(200 * HOUR_S, interval_s, **costs, seed=seed).overhead)
    error = statistics.stdev(found) / len(found) ** 0.5
    assert statistics.mean(found) == pytest.approx(overhead(interval_s, **costs), abs=4 * error)


def best_interval_s(save_s, mtbf_s):
    """By trying them out."""
    intervals = [mtbf_s * 1.002**power for power in range(-5000, 500)]
    return min(intervals, key=lambda interval_s: overhead(interval_s, save_s, 0, mtbf_s))


@pytest.mark.parametrize("save_s", [1, 60, 600, 3600])
def test_dalys_interval_is_the_best_one(save_s):
    mtbf_s = 3 * HOUR_S
    best_s = best_interval_s(save_s, mtbf_s)
    assert daly_interval_s(save_s, mtbf_s) == pytest.approx(best_s, rel=0.02)


def test_youngs_interval_is_good_while_saving_is_short_and_too_long_after_that():
    mtbf_s = 3 * HOUR_S
    assert young_interval_s(10, mtbf_s) == pytest.approx(best_interval_s(10, mtbf_s), rel=0.02)
    assert young_interval_s(3600, mtbf_s) > 1.3 * best_interval_s(3600, mtbf_s)


def test_who_saves_longer_than_the_machine_lives_works_for_one_such_life():
    assert daly_interval_s(save_s=100, mtbf_s=10) == 10
