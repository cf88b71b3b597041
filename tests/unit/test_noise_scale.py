"""The estimators of the gradient noise scale, on problems whose answer is known."""

import math

import numpy as np
import pytest

from labcode import recipes
from labcode.runtime import combinations
from labcode.train.noise_scale import estimate

DIM = 20
NOISE = 0.7  # standard deviation of the targets


def squares(rng, small_batch, count):
    """(mean |G_small|^2, |G_big|^2) of one step of linear regression, and the truth.

    One sample is x ~ N(0, I), y = w* x + noise. With d = w - w* its gradient is x (x d) - x noise,
    whose mean is d and whose covariance has the trace (DIM + 1) |d|^2 + DIM noise^2.
    """
    d = np.linspace(0.1, 0.5, DIM)
    x = rng.standard_normal((count * small_batch, DIM))
    noise = NOISE * rng.standard_normal(count * small_batch)
    gradients = x * (x @ d - noise)[:, None]
    of_small = gradients.reshape(count, small_batch, DIM).mean(axis=1)
    big = gradients.mean(axis=0)
    return (of_small**2).sum(axis=1).mean(), (big**2).sum(), d


@pytest.mark.parametrize(("small_batch", "count"), [(1, 16), (4, 4), (8, 4)])
def test_the_estimators_have_no_bias(small_batch, count):
    rng = np.random.default_rng(small_batch + count)
    found = []
    for _ in range(20_000):
        small, big, d = squares(rng, small_batch, count)
        found.append(estimate(small_batch, small, small_batch * count, big))
    square = (d**2).sum()
    variance = (DIM + 1) * square + DIM * NOISE**2
    mean_square = np.mean([one.square for one in found])
    mean_variance = np.mean([one.variance for one in found])
    assert mean_square == pytest.approx(square, rel=0.05)
    assert mean_variance == pytest.approx(variance, rel=0.02)
    assert mean_variance / mean_square == pytest.approx(variance / square, rel=0.05)
    # a mean of ratios is something else, which is why both are smoothed by themselves
    ratios = [one.variance / one.square for one in found]
    assert abs(np.mean(ratios) / (variance / square) - 1) > 0.05


def test_a_gradient_without_noise_has_a_noise_scale_of_zero():
    assert estimate(2, 9.0, 8, 9.0) == (9.0, 0.0)
    assert estimate(2, 9.0, 8, 9.0).noise_scale == 0.0


def test_a_gradient_of_noise_alone_has_no_noise_scale():
    found = estimate(1, 8.0, 8, 1.0)
    assert found.square == 0.0
    assert math.isnan(found.noise_scale)


def test_two_batches_of_one_size_say_nothing():
    with pytest.raises(ValueError, match="small_batch=4 and big_batch=4: two sizes are compared"):
        estimate(4, 1.0, 4, 1.0)


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        ({}, 1, "this run has one micro-batch a step: give a smaller train.micro_batch"),
        ({"parallel.tp": 2}, 4, "train.noise_scale with pp 1, cp 1, tp 2"),
        ({"parallel.zero_stage": 1}, 2, "train.noise_scale with parallel.zero_stage=1"),
        (
            {"train.cuda_graphs": True, "train.micro_batch": 4},
            1,
            "train.noise_scale with train.cuda_graphs",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, world_size, message):
    changes = {"train.noise_scale": True, **changes}
    config = recipes.with_changes(recipes.gpt_tiny(), changes)
    with pytest.raises(ValueError, match=message):
        combinations.check(config, world_size)
