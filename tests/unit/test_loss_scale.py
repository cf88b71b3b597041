"""The loss scale of float16: when it changes, against `torch.amp.GradScaler`."""

import math
import random

import pytest
import torch
from torch import nn

from labcode.train.loss_scale import LossScaler


def scales_of_torch(overflows, first, growth_interval):
    """The scale after each step, as GradScaler chooses it."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=growth_interval)
    found = []
    for overflowed in overflows:
        factor = math.inf if overflowed else 1.0
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("first", "interval"), [(2.0**16, 3), (2.0**10, 1), (2.0**126, 2)])
def test_the_scale_is_that_of_grad_scaler(seed, first, interval):
    draw = random.Random(seed)
    overflows = [draw.random() < 0.2 for _ in range(60)]
    ours = LossScaler(first, interval)
    found = []
    for overflowed in overflows:
        ours.update(overflowed)
        found.append(ours.scale)
    assert found == scales_of_torch(overflows, first, interval)
    assert ours.overflows == sum(overflows)


def test_the_defaults_are_those_of_grad_scaler():
    ours = LossScaler()
    theirs = torch.amp.GradScaler("cpu")
    assert ours.scale == theirs.get_scale()
    assert ours.growth_interval == theirs.get_growth_interval()


def test_gradients_are_divided_by_the_scale_unless_they_have_overflowed():
    weight = nn.Parameter(torch.zeros(2))
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    scaler = LossScaler(4.0)
    weight.grad = torch.tensor([12.0, 16.0])
    assert scaler.unscale([weight, frozen], 20.0) == 5.0
    assert weight.grad.tolist() == [3.0, 4.0]
    weight.grad = torch.tensor([math.inf, 16.0])
    assert scaler.unscale([weight], math.inf) == math.inf
    assert weight.grad.tolist() == [math.inf, 16.0]


@pytest.mark.parametrize(
    ("norm", "loss", "scale", "can_cure"),
    [
        (math.inf, 2.0, 8.0, True),
        (math.nan, 2.0, 8.0, True),
        (3.0, 2.0, 8.0, False),  # nothing is wrong
        (math.nan, math.nan, 8.0, False),  # forward has overflowed, which no scale changes
        (math.nan, math.inf, 8.0, False),
        (math.nan, 2.0, 1.0, False),  # the scale is not the reason
    ],
)
def test_a_smaller_scale_cures_an_overflow_of_backward_alone(norm, loss, scale, can_cure):
    assert LossScaler(scale).can_cure(norm, loss) == can_cure


def test_a_gradient_that_is_always_nan_is_left_to_the_guard_after_16_halvings():
    scaler = LossScaler()
    halvings = 0
    while scaler.can_cure(math.nan, 2.0):
        scaler.update(overflowed=True)
        halvings += 1
    assert (halvings, scaler.scale) == (16, 1.0)


def test_its_state_brings_everything_back():
    one = LossScaler(growth_interval=3)
    for overflowed in (True, False, False):
        one.update(overflowed)
    other = LossScaler(growth_interval=3)
    other.state = one.state
    assert (other.scale, other.overflows) == (2.0**15, 1)
    other.update(overflowed=False)
    assert other.scale == 2.0**16
