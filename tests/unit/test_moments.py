"""Statistics of parts, combined, are those of the whole."""

import math

import pytest
import torch

from labcode.debug.moments import STATISTICS, Moments, combined, measure

WHOLE = torch.randn(301, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 3


def wanted(x):
    size = x.abs()
    return {
        "min": x.min(),
        "max": x.max(),
        "mean": x.mean(),
        "std": x.std(),
        "l1_norm": x.norm(p=1),
        "l2_norm": x.norm(),
        "cur_amax": size.max(),
        "dynamic_range": size.max().log2() - size[size > 0].min().log2(),
    }


@pytest.mark.parametrize("sizes", [(301,), (1, 300), (100, 0, 201), (7,) * 43])
def test_parts_of_any_size_make_the_whole(sizes):
    found = combined(measure(part) for part in WHOLE.split(sizes))
    assert wanted(WHOLE).keys() == STATISTICS.keys()
    for name, value in wanted(WHOLE).items():
        assert found.statistic(name) == pytest.approx(value.item(), rel=1e-12), name


@pytest.mark.parametrize("name", STATISTICS)
def test_one_statistic_alone_needs_no_other(name):
    parts = [measure(part, [name]) for part in WHOLE.split((100, 201))]
    value = wanted(WHOLE)[name].item()
    assert combined(parts).statistic(name) == pytest.approx(value, rel=1e-12)


def test_a_mean_of_deviations_is_another_number():
    low, high = measure(WHOLE), measure(WHOLE + 100)
    both = low + high
    assert both.statistic("std") > 50
    assert (low.statistic("std") + high.statistic("std")) / 2 < 2


def test_nothing_changes_nothing_and_what_is_not_finite_stays_visible():
    own = measure(WHOLE)
    assert own + Moments() == own
    assert Moments() + own == own
    assert Moments(*own.numbers()) == own
    lost = measure(torch.tensor([1.0, math.inf]))
    assert math.isinf(lost.statistic("cur_amax"))
    assert measure(torch.zeros(3)).statistic("dynamic_range") == 0
