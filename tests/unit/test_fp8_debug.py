"""The products of an FP8 layer, each switched off or scaled by itself."""

import pytest
import torch
from torch import nn

from labcode.debug.debug_config import BLOCKS, CURRENT, DELAYED, GEMMS
from labcode.debug.fp8_debug import Cast, CastErrors, DebuggedFp8Product, count_errors
from labcode.precision.formats import E4M3, E5M2, cast, scale_for
from labcode.precision.fp8 import BlockScaling, CurrentScaling, DelayedScaling, Fp8Product


def results(multiply):
    """Output, and gradients of input, weight and bias, of one layer of [64] -> [32]."""
    made = torch.Generator().manual_seed(0)
    x = torch.randn(2, 48, 64, generator=made).requires_grad_()
    weight = nn.Parameter(torch.randn(32, 64, generator=made) / 8)
    bias = nn.Parameter(torch.randn(32, generator=made))
    y = multiply(x, weight, bias)
    upstream = torch.randn(y.shape, generator=made) / 64
    (y * upstream).sum().backward()
    return {"y": y.detach(), "dx": x.grad, "dw": weight.grad, "db": bias.grad}


def in_fp8(recipe):
    return Fp8Product("layer", recipe, None)


def debugged(recipe, disabled=(), per_tensor=(), on_cast=None):
    return DebuggedFp8Product(in_fp8(recipe), disabled, dict.fromkeys(per_tensor, 0), on_cast)


def plain(x, weight, bias):
    return nn.functional.linear(x, weight, bias)


@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling(), BlockScaling()])
def test_a_layer_that_is_only_watched_computes_the_same_to_the_last_bit(recipe):
    wanted = results(in_fp8(recipe))
    found = results(debugged(recipe, on_cast=lambda *_: None))
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


OF_GEMM = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}


@pytest.mark.parametrize("gemm", GEMMS)
def test_a_product_without_fp8_is_the_plain_one_and_the_others_stay(gemm):
    right = results(plain)
    eight = results(in_fp8(CurrentScaling()))
    found = results(debugged(CurrentScaling(), disabled=[gemm]))
    for each, name in OF_GEMM.items():
        wanted = right if each == gemm else eight
        torch.testing.assert_close(found[name], wanted[name])
        assert not torch.allclose(right[name], eight[name], rtol=1e-3)


def test_a_layer_without_fp8_is_the_plain_one():
    right = results(plain)
    found = results(debugged(CurrentScaling(), disabled=GEMMS))
    for name in right:
        torch.testing.assert_close(found[name], right[name])


def test_an_operand_with_a_scale_of_its_own_uses_its_own_amax():
    # the history of delayed scaling is empty at first: its scale is 1, and gradients underflow
    delayed = results(debugged(DelayedScaling()))
    current = results(in_fp8(CurrentScaling()))
    every = [(gemm, tensor) for gemm in GEMMS for tensor in ("activation", "weight", "gradient")]
    found = results(debugged(DelayedScaling(), per_tensor=every))
    for name in ("y", "dx", "dw"):
        torch.testing.assert_close(found[name], current[name])
        assert not torch.equal(found[name], delayed[name])
    one = results(debugged(DelayedScaling(), per_tensor=[("dgrad", "gradient")]))
    assert torch.equal(one["y"], delayed["y"])
    assert not torch.equal(one["dx"], delayed["dx"])
    assert torch.equal(one["dw"], delayed["dw"])


def test_what_a_cast_loses_is_counted():
    told = {}

    def keep(tensor, made):
        x = made.before
        errors = made.errors()
        to = E5M2 if tensor == "gradient" else E4M3
        scale = scale_for(x.abs().amax(), to)
        after = cast(x * scale, to) / scale
        lost = ((after == 0) & (x != 0)).double().mean().item()
        told[tensor] = (errors, lost, (after - x).double().square().mean().item(), scale)

    results(debugged(CurrentScaling(), on_cast=keep))
    assert told.keys() == {"activation", "weight", "gradient"}
    for errors, lost, mse, scale in told.values():
        assert errors.statistic("underflows%") == pytest.approx(100 * lost)
        assert errors.statistic("mse") == pytest.approx(mse, rel=1e-5)
        assert errors.statistic("overflows%") == 0
        assert errors.statistic("scale_inv_max") == pytest.approx(1 / scale.item())
    x = torch.tensor([[1.0, 500.0, 1e-9, 0.0]])
    scaling = in_fp8(DelayedScaling()).scalings["input"]
    errors = count_errors(x, scaling.cast(x, record=False), E4M3)
    assert (errors.count, errors.underflows, errors.overflows) == (4, 1, 1)
    assert (errors + errors).statistic("mse") == errors.statistic("mse")
    assert CastErrors(*errors.numbers()) + CastErrors() == errors


def test_another_recipe_is_asked_what_its_cast_would_lose():
    """During delayed-scaling training one may track `fp8_current_scaling_underflows%`."""
    found = {}

    def keep(of_run):
        def on_cast(tensor, made):
            for recipe in ("", CURRENT, BLOCKS):
                found[of_run, tensor, recipe] = made.errors(recipe)

        return on_cast

    results(debugged(DelayedScaling(margin=20), on_cast=keep(DELAYED)))
    results(debugged(CurrentScaling(), on_cast=keep(CURRENT)))
    results(debugged(BlockScaling(), on_cast=keep(BLOCKS)))
    for recipe in (CURRENT, BLOCKS):
        for tensor in ("activation", "weight"):  # gradients differ: so do their upstream products
            of_the_run = found[recipe, tensor, ""]
            assert found[recipe, tensor, recipe] == of_the_run
            assert found[DELAYED, tensor, recipe].underflows == of_the_run.underflows
            assert found[DELAYED, tensor, recipe].squares == pytest.approx(of_the_run.squares)
    x = torch.full((32, 32), 1e-6)
    x[0] = 1.0  # alone in its blocks along rows, and with 31 small values in those along columns
    scaling = in_fp8(DelayedScaling()).scalings["input"]
    made = Cast(x, scaling.cast(x, record=False), scaling)
    assert made.errors(BLOCKS).statistic("underflows%") == 0
    assert made.errors(BLOCKS, columnwise=True).statistic("underflows%") == 100 * 31 / 32
