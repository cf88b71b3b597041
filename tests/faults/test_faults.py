"""A sample of the trial: nothing lost, nothing hung, nothing wrong, and one line for the rest.

`make test` plays a handful, `make test-release` a hundred; `python -m tests.faults` plays all.
"""

import functools

import pytest
from faults import trial
from faults.categories import NAMES
from faults.verdicts import ANSWERS, FLAGS

SEED = 2
SAMPLE = 100
ONE_LINE = 0.98
# a second each
QUICK = ("output_folder", "resume", "damaged_checkpoints", "kills", "numerics", "full_disk")


@functools.cache
def counts():
    return {name: len(trial.cases_of(name, SEED)) for name in NAMES}


@functools.cache
def played(name):
    """The results of a category's part of the sample."""
    share = max(1, round(SAMPLE * counts()[name] / sum(counts().values())))
    numbers = trial.sample(trial.cases_of(name, SEED), share, SEED)
    return trial.play_all(name, SEED, numbers=numbers)


def told(results):
    """What is not as it should be, for whoever reads the failure."""
    bad = [result for result in results if not result.good]
    return "\n".join(str(result.as_json()) for result in bad)


def test_every_category_has_different_cases_and_the_same_for_the_same_seed():
    for name in NAMES:
        words = [case.what for case in trial.cases_of(name, SEED)]
        assert words == [case.what for case in trial.cases_of(name, SEED)]
        assert len(words) >= 20 or name == "full_disk"  # which needs user namespaces
    assert sum(counts().values()) > 600


@pytest.mark.parametrize("name", QUICK)
def test_a_case_is_answered_as_it_should_be(name):
    cases = trial.cases_of(name, SEED)
    if not cases:
        pytest.skip("a small disk needs user namespaces, which are not allowed here")
    (number,) = trial.sample(cases, 1, SEED)
    results = trial.play_all(name, SEED, numbers=[number])
    assert results[0].good, told(results)


@pytest.mark.release
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_lost_hung_wrong_or_left_behind(name):
    for result in played(name):
        assert result.answer != "hung", told([result])
        assert not any(flag in result.flags for flag in FLAGS), told([result])


@pytest.mark.release
def test_nearly_all_is_answered_in_one_line():
    results = [result for name in NAMES for result in played(name)]
    good = [result for result in results if result.answer in ANSWERS[:2]]
    assert len(results) >= SAMPLE - len(NAMES)
    assert len(good) >= ONE_LINE * len(results), told(results)
