"""The optimizer set-up: schedule, decay groups and clipping."""

import math
import sys

import pytest
import torch
from torch import nn

from labcode import recipes
from labcode.config import GPTConfig, OptimConfig
from labcode.models.gpt import GPT
from labcode.models.layers import freeze
from labcode.runtime import combinations
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


def test_a_rank_without_a_gradient_has_nothing_to_clip():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    clip_gradients(frozen.parameters(), norm=5.0, max_norm=1.0)
    assert all(param.grad is None for param in frozen.parameters())


def test_a_frozen_model_says_what_can_be_frozen_and_leaves_something_to_train():
    config = GPTConfig(7, 8, num_layers=2, num_heads=2, hidden_size=8)
    model = GPT(config)
    with pytest.raises(ValueError, match="its weights are in embed, positions, blocks"):
        freeze(model, ["nose"])
    freeze(model, ["blocks.*.mlp", "head.weight"])
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    # the head is the embedding, under another name
    assert {"embed.weight", "blocks.0.mlp.up.weight", "blocks.1.mlp.down.bias"} <= frozen
    assert len(frozen) == 1 + 2 * 4
    with pytest.raises(ValueError, match="leaves nothing to train"):
        freeze(model, ["*"])


# ---- batch and rate


@pytest.mark.parametrize(
    ("rule", "batch", "factor"),
    [("linear", 64, 4.0), ("square_root", 64, 2.0), ("linear", 4, 0.25), ("square_root", 16, 1.0)],
)
def test_the_rate_follows_the_batch_by_its_rule(rule, batch, factor):
    config = OptimConfig(lr=1e-2, min_lr=1e-3, warmup_steps=10, lr_rule=rule, reference_batch=16)
    scaled = config.for_batch(batch)
    assert scaled.lr == pytest.approx(1e-2 * factor)
    rates = [learning_rate(step, 101, scaled) for step in range(101)]
    expected = [factor * learning_rate(step, 101, CONFIG) for step in range(101)]
    assert rates == pytest.approx(expected)  # with its warm-up and its end


def test_without_a_rule_the_rate_is_that_of_the_config():
    assert CONFIG.for_batch(1024) == CONFIG


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr_rule": "linear"}, "name that one with optim.reference_batch"),
        ({"reference_batch": 8}, "optim.reference_batch=8 changes nothing"),
        ({"lr_rule": "cubic"}, "optim.lr_rule"),
        ({"lr_rule": "linear", "reference_batch": 0}, "optim.reference_batch=0"),
    ],
)
def test_a_rule_that_says_too_little_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        OptimConfig(**fields)


# ---- LAMB and LARS


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def steps_of(config, steps=3):
    """(The weights before, after), and the gradients of each step, of a small model."""
    model = small_model()
    optimizer = make_optimizer(model.parameters(), config)
    x = torch.randn(16, 7, dtype=torch.float64)
    before = [param.detach().clone() for param in model.parameters()]
    gradients = []
    for _ in range(steps):
        (model(x) - 1).square().sum().backward()
        gradients.append([param.grad.clone() for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return before, [param.detach() for param in model.parameters()], gradients


@pytest.mark.parametrize("implementation", ["fused", "for_loop"])
def test_lamb_is_that_of_the_paper(implementation):
    config = OptimConfig("lamb", lr=1e-2, weight_decay=0.3, implementation=implementation)
    weights, after, gradients = steps_of(config)
    for place, weight in enumerate(weights):
        m, v = torch.zeros_like(weight), torch.zeros_like(weight)
        for own in gradients:
            m = config.beta1 * m + (1 - config.beta1) * own[place]
            v = config.beta2 * v + (1 - config.beta2) * own[place] ** 2
            update = m / (v.sqrt() + 1e-6)
            if weight.dim() >= 2:
                update = update + config.weight_decay * weight
                update = update * weight.norm() / (update.norm() + 1e-6)
            weight = weight - config.lr * update
        torch.testing.assert_close(after[place], weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("implementation", ["fused", "for_loop"])
def test_lars_is_that_of_the_paper(implementation):
    config = OptimConfig("lars", lr=0.02, weight_decay=0.3, implementation=implementation)
    weights, after, gradients = steps_of(config)
    for place, weight in enumerate(weights):
        momentum = torch.zeros_like(weight)
        for own in gradients:
            gradient = own[place]
            if weight.dim() >= 2:
                length = gradient.norm() + config.weight_decay * weight.norm()
                trust = 1e-3 * weight.norm() / length
                gradient = trust * (gradient + config.weight_decay * weight)
            momentum = config.beta1 * momentum + gradient
            weight = weight - config.lr * momentum
        torch.testing.assert_close(after[place], weight, rtol=0, atol=1e-12)


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    monkeypatch.delitem(sys.modules, "labcode.train.layerwise", raising=False)
    monkeypatch.delattr("labcode.train.layerwise", raising=False)
    with pytest.raises(ValueError, match=r"pip install 'labcode\[optimizers\]', or use"):
        make_optimizer(nn.Linear(2, 2).parameters(), OptimConfig("lamb"))


@pytest.mark.parametrize("name", ["lamb", "lars"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel.tp": 2}, "with tp 2, which cuts weights"),
        ({"parallel.zero_stage": 1}, "with parallel.zero_stage=1, which cuts weights"),
        (
            {"parallel.zero_stage": 3, "parallel.data_parallel": "labcode"},
            "with parallel.zero_stage=3",
        ),
    ],
)
def test_norms_of_cut_weights_are_refused(name, changes, message):
    config = recipes.with_changes(recipes.gpt_tiny(), {"optim.name": name, **changes})
    with pytest.raises(ValueError, match=f"optim.name={name} {message}"):
        combinations.check(config, 2)
