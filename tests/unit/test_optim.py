"""The optimizer set-up: schedule, decay groups and clipping."""

import math

import pytest
import torch
from torch import nn

from labcode.config import OptimConfig
from labcode.train.optim import clip_gradients, learning_rate, make_optimizer

CONFIG = OptimConfig(lr=1e-2, min_lr=1e-3, warmup_steps=10)


def test_the_rate_warms_up_linearly_then_falls_on_half_a_cosine():
    rates = [learning_rate(step, 101, CONFIG) for step in range(101)]
    assert rates[:10] == pytest.approx([1e-3 * step for step in range(1, 11)])
    assert rates[10] == pytest.approx(1e-2)
    assert rates[55] == pytest.approx((1e-2 + 1e-3) / 2)  # half way down
    assert rates[100] == pytest.approx(1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("steps", [1, 5, 10, 11])
def test_a_run_shorter_than_its_warm_up_has_a_rate_at_every_step(steps):
    assert all(0 < learning_rate(step, steps, CONFIG) <= 1e-2 * (1 + 1e-9) for step in range(steps))


def test_only_matrices_decay_and_frozen_weights_are_left_out():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model[2].requires_grad_(False)
    groups = make_optimizer(model.parameters(), OptimConfig(weight_decay=0.3)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert [p is model[0].weight for p in groups[0]["params"]] == [True]
    assert len(groups[1]["params"]) == 3


def weights_after(implementation, dtype, steps=5):
    """The weights of a small model after some steps with one kind of AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    config = OptimConfig(lr=1e-2, weight_decay=0.3, implementation=implementation)
    optimizer = make_optimizer(model.parameters(), config)
    x = torch.randn(16, 7, dtype=dtype)
    for _ in range(steps):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize("implementation", ["foreach", "for_loop"])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_every_implementation_of_adamw_gives_the_same_weights(implementation, dtype, atol):
    expected = weights_after("fused", dtype)
    found = weights_after(implementation, dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("implementation", "fused", "foreach"),
    [("fused", True, None), ("foreach", None, True), ("for_loop", False, False)],
)
def test_the_implementation_is_the_one_that_was_asked_for(implementation, fused, foreach):
    config = OptimConfig(implementation=implementation)
    (group, _) = make_optimizer(nn.Linear(2, 2).parameters(), config).param_groups
    assert (group["fused"], group["foreach"]) == (fused, foreach)


def test_clipping_scales_the_whole_gradient():
    params = [
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.zeros(1)),
        nn.Parameter(torch.zeros(1)),
    ]
    params[0].grad, params[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    clip_gradients(params, norm=5.0, max_norm=10.0)
    assert params[1].grad.item() == 4.0  # below the limit nothing changes
    clip_gradients(params, norm=5.0, max_norm=0.0)
    assert params[1].grad.item() == 4.0  # 0 turns clipping off
    clip_gradients(params, norm=5.0, max_norm=1.0)
    assert math.hypot(*params[0].grad.tolist(), params[1].grad.item()) == pytest.approx(1.0)
