"""`labcode.precision.fp8` on one process: products, scales, what is kept, and a training."""

import math

import pytest
import torch
from torch import nn

from course.labs import l03_step
from labcode.config import GPTConfig
from labcode.models import gpt
from labcode.parallel.linear import PLAIN_PRODUCT, linear
from labcode.perf.saved_bytes import saved_bytes
from labcode.precision.formats import E4M3, E5M2
from labcode.precision.fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8,
    Scaling,
    dequantize,
    product,
    quantize,
)

ONE = torch.ones(())


def draw(*shape, seed=0, size=1.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("left", "right"), [(E4M3, E4M3), (E5M2, E4M3)])
def test_the_emulated_product_is_that_of_scaled_mm(left, right):
    """Up to the order in which 64 products are added."""
    a = quantize(draw(32, 64), left, torch.tensor(64.0))
    b = quantize(draw(48, 64, seed=1), right, torch.tensor(100.0))
    found = product(a, b, torch.tensor(64.0), torch.tensor(100.0))
    own = torch._scaled_mm(
        a,
        b.T,
        scale_a=torch.tensor(1 / 64),
        scale_b=torch.tensor(1 / 100),
        out_dtype=torch.float32,
    )
    assert torch.allclose(found, own, rtol=1e-6, atol=1e-6 * own.abs().max().item())


def dequantized(x, to):
    scale = to.largest / x.abs().max()
    return dequantize(quantize(x, to, scale), scale)


def test_three_products_of_quantised_operands():
    layer = nn.Linear(32, 48)
    model = Fp8(CurrentScaling(), skip=()).convert(nn.Sequential(layer))
    x = draw(4, 8, 32, seed=2).requires_grad_()
    dy = draw(4, 8, 48, seed=3, size=1e-5)
    y = model(x)
    y.backward(dy)
    x8 = dequantized(x.detach().flatten(0, 1), E4M3)
    w8 = dequantized(layer.weight.detach(), E4M3)
    dy8 = dequantized(dy.flatten(0, 1), E5M2)
    for found, expected in (
        (y.detach().flatten(0, 1), x8 @ w8.T + layer.bias.detach()),
        (x.grad.flatten(0, 1), dy8 @ w8),
        (layer.weight.grad, dy8.T @ x8),
        (layer.bias.grad, dy.flatten(0, 1).sum(0)),
    ):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("tokens", [1, 50])
def test_blocks_take_any_number_of_tokens(tokens):
    """Zeros that fill the last block change nothing."""
    layer = nn.Linear(32, 48, bias=False)
    model = Fp8(BlockScaling(), skip=()).convert(nn.Sequential(layer))
    x = draw(tokens, 32, seed=5)
    dy = draw(tokens, 48, seed=6)
    results = []
    for more in (0, 64 - tokens):
        layer.weight.grad = None
        longer = nn.functional.pad(x, (0, 0, 0, more)).requires_grad_()
        y = model(longer)
        y.backward(nn.functional.pad(dy, (0, 0, 0, more)))
        results.append((y[:tokens], longer.grad[:tokens], layer.weight.grad))
    for found, expected in zip(*results):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(results[0][0], x @ layer.weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling(), BlockScaling()])
def test_an_infinite_activation_is_finite_behind_a_layer_in_fp8(recipe):
    fp8 = Fp8(recipe, skip=())
    layer = fp8.convert(nn.Sequential(nn.Linear(64, 64)))[0]
    for seed in range(3):
        layer(draw(32, 64, seed=seed)).square().mean().backward()
        fp8.finish_step()
    layer.weight.grad = None
    x = draw(32, 64, seed=9)
    x[0, 0] = math.inf
    y = layer(x)
    y.square().mean().backward()
    assert y.isfinite().all()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling()])
def test_backward_keeps_one_byte_for_each_number(recipe):
    model = Fp8(recipe, skip=()).convert(nn.Sequential(nn.Linear(64, 64, bias=False)))
    x = draw(256, 64, seed=4)
    with saved_bytes(model) as saved:
        y = model(x)
        kept = saved.total()
    assert y.requires_grad
    assert kept == 256 * 64 + 64 * 64 + 2 * 4  # and two scales


def test_delayed_scaling_looks_back_so_many_steps_and_no_further():
    scaling = Scaling(DelayedScaling(history_length=3, margin=1), E4M3, None)
    assert scaling.scale == 1
    seen = []
    for amax in (2.0, 1.0, 8.0, 1.0, 1.0, 1.0):
        scaling.cast(torch.tensor([[amax, -amax / 3]]), record=True)
        scaling.push(scaling.amax)
        seen.append(448 / 2 / scaling.scale.item())
    assert seen == [2, 2, 8, 8, 8, 1]


def test_the_most_recent_amax_counts_where_that_is_asked_for():
    scaling = Scaling(DelayedScaling(history_length=3, amax="most_recent"), E5M2, None)
    for amax in (8.0, 2.0):
        scaling.cast(torch.tensor([[amax]]), record=True)
        scaling.push(scaling.amax)
    assert scaling.scale.item() == 57344 / 2


def test_validation_and_a_bad_step_leave_no_trace():
    scaling = Scaling(DelayedScaling(history_length=2), E4M3, None)
    scaling.cast(torch.tensor([[5.0]]), record=False)
    scaling.cast(torch.tensor([[math.inf, 1.0]]), record=True)
    scaling.cast(torch.tensor([[math.nan]]), record=True)
    assert scaling.amax == 0


def test_micro_batches_of_a_step_count_together():
    fp8 = Fp8(DelayedScaling(), skip=())
    model = fp8.convert(nn.Sequential(nn.Linear(4, 4)))
    for size in (1.0, 7.0, 2.0):
        model(torch.full((2, 4), size)).sum().backward()
    fp8.finish_step()
    histories = {name: scaling.history[0].item() for name, scaling in fp8.scalings()}
    assert histories["0.input"] == 7
    assert histories["0.gradient"] == 1


def test_autocast_lasts_as_long_as_the_with():
    fp8 = Fp8(DelayedScaling(), skip=("1",))
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    layers = list(model)
    x = draw(8, 16, seed=7)
    plain = model(x)
    with fp8.autocast(model):
        y = model(x)
    assert list(model) == layers
    assert torch.equal(model(x), plain)
    assert not torch.equal(y, plain)
    y.sum().backward()  # outside, and in FP8 all the same: its gradient was looked at
    grads = [layer.weight.grad.clone() for layer in layers]
    fp8.finish_step()
    histories = dict(fp8.scalings())
    assert all(scaling.history[0] > 0 for scaling in histories.values())
    model.zero_grad()
    always = Fp8(DelayedScaling(), skip=("1",)).convert(model)
    always(x).sum().backward()
    for layer, grad in zip(layers, grads):
        assert torch.equal(layer.weight.grad, grad)


def test_histories_stay_from_one_autocast_to_the_next_and_sharded_layers_get_their_product_back():
    class Sharded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(draw(8, 8))
            self.product = PLAIN_PRODUCT

        def forward(self, x):
            return linear(x, self.weight, None, self.product)

    fp8 = Fp8(DelayedScaling(history_length=3), skip=())
    model = nn.Sequential(Sharded())
    for size in (4.0, 2.0):
        with fp8.autocast(model):
            model(torch.full((2, 8), size)).sum().backward()
        assert model[0].product is PLAIN_PRODUCT
        fp8.finish_step()
    assert dict(fp8.scalings())["0.input"].history.tolist() == [2, 4, 0]
    with pytest.raises(KeyError, match="stop"), fp8.autocast(model):
        raise KeyError("stop")
    assert model[0].product is PLAIN_PRODUCT


def test_what_is_too_large_for_the_scale_saturates():
    for to in (E4M3, E5M2):
        found = quantize(torch.tensor([1e9, -1e9, math.inf]), to, ONE).float()
        assert found.tolist() == [to.largest, -to.largest, to.largest]


def test_a_model_without_layers_to_convert_is_refused():
    with pytest.raises(ValueError, match="no linear layer to compute in FP8"):
        Fp8(CurrentScaling(), skip=("0",)).convert(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="history_length=0"):
        Fp8(DelayedScaling(history_length=0))


def losses(recipe, steps):
    """Losses of a small GPT; None is bfloat16 by autocast."""
    batches = l03_step.Batches()
    model = l03_step.new_model(num_layers=1, hidden_size=32)
    fp8 = None
    if recipe is not None:
        fp8 = Fp8(recipe)
        fp8.convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    found = []
    for step in range(steps):
        tokens, targets = batches(step, 8)
        with torch.autocast("cpu", torch.bfloat16):
            loss = gpt.loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if fp8:
            fp8.finish_step()
        found.append(loss.item())
    return found


RECIPES = {"delayed": DelayedScaling(), "current": CurrentScaling(), "block": BlockScaling()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_gpt_learns_in_fp8_as_in_bfloat16(name):
    """The first 30 steps; tests/ranks/test_fp8.py has the claim for 300."""
    in_bfloat16 = losses(None, 30)
    in_fp8 = losses(RECIPES[name], 30)
    assert in_bfloat16[-1] < in_bfloat16[0] - 0.8
    assert in_fp8 != in_bfloat16
    assert in_fp8[-1] == pytest.approx(in_bfloat16[-1], rel=0.02)


def test_a_misspelt_layer_to_skip_is_refused():
    with torch.device("meta"):
        model = gpt.GPT(GPTConfig(num_layers=2, hidden_size=8, num_heads=2, vocab_size=16))
    for right in ((), ("head",), ("blocks.1.mlp.up", "proj")):
        Fp8(CurrentScaling(), skip=right).check_skipped(model)
    with pytest.raises(ValueError, match=r"unknown layer in fp8\.skip 'haed': did you mean head\?"):
        Fp8(CurrentScaling(), skip=("head", "haed")).check_skipped(model)
    with pytest.raises(ValueError, match=r"unknown layer in fp8\.skip 'p'"):
        Fp8(CurrentScaling(), skip=("p",)).check_skipped(model)  # of "mlp.up" it is no word
