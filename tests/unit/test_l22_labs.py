"""The emulations of lesson 22: sums of few bits, tiles, and a linear layer in four bits."""

import math

import pytest
import torch

from course.labs import l22_four_bits as lab


def test_a_short_sum_is_exact_where_nothing_hangs_over():
    a = torch.randint(-4, 5, (3, 64)).float()
    b = torch.randint(-4, 5, (5, 64)).float()
    assert torch.equal(lab.short_product(a, b), a.double() @ b.double().T)


def test_the_error_of_a_short_sum_grows_with_its_length_and_pieces_stop_it():
    errors = {}
    for length in (512, 4096):
        a, b = lab.numbers("positive", length)
        truth = a.double() @ b.double().T
        errors[length] = lab.relative_distance(lab.short_product(a, b), truth)
        in_pieces = lab.relative_distance(lab.short_product(a, b, 128), truth)
        assert in_pieces < 1e-3
    assert errors[4096] > 6 * errors[512]


@pytest.mark.parametrize("tile", [(1, 128), (128, 128), (256, 512)])
def test_tiles_keep_what_fits_the_range(tile):
    x = lab.with_massive_numbers(100.0)
    found = lab.through_tiles(x, *tile)
    assert ((found - x).abs() <= x.abs() / 16 + 100 / 448 * 2**-10).all()
    _, scale = lab.quantize_tiles(x, *tile)
    assert scale.shape == (256 // tile[0], 512 // tile[1])


def test_a_turn_cancels_in_a_product_and_changes_no_length():
    a, b = torch.randn(2, 20, 64)
    assert lab.rotated(a).norm() == pytest.approx(float(a.norm()), rel=1e-6)
    product = lab.rotated(a) @ lab.rotated(b).T
    assert lab.relative_distance(product, a @ b.T) < 1e-6
    spike = torch.zeros(1, 16)
    spike[0, 3] = 8.0
    assert lab.rotated(spike).abs().tolist() == [[2.0] * 16]


def test_squares_of_the_transpose_are_the_transpose_of_the_squares():
    w = torch.randn(40, 70)  # no multiple of 16
    one = lab.to_nvfp4(w, square=True)
    assert torch.equal(lab.to_nvfp4(w.T.contiguous(), square=True).T, one)
    assert lab.relative_distance(one, w) < 0.15


def test_the_layer_of_a_training_makes_the_products_of_the_exercise():
    x = torch.randn(2, 16, 32, requires_grad=True)
    w = torch.randn(48, 32, requires_grad=True)
    dy = torch.randn(2, 16, 48)
    chance = torch.Generator().manual_seed(5)
    y = lab._FourBits.apply(x, w, lab.Recipe(), chance)
    y.backward(dy)
    again = torch.Generator().manual_seed(5)

    def quantize(matrix, **how):
        return lab.to_nvfp4(matrix, generator=again, **how)

    rows, grads = x.detach().flatten(0, 1), dy.flatten(0, 1)
    found = lab.products(rows, w.detach(), grads, quantize, lab.rotated)
    assert torch.allclose(y.flatten(0, 1), found[0])
    assert torch.allclose(x.grad.flatten(0, 1), found[1])
    assert torch.allclose(w.grad, found[2])


def test_gradients_of_the_logits_lose_their_sum_to_nearest_and_keep_it_by_stochastic_rounding():
    gradient = torch.full((1, 57), 1 / 57)
    gradient[0, 3] -= 1
    assert lab.to_nvfp4(gradient).sum().item() == pytest.approx(-15 / 57, rel=1e-3)
    many = gradient.repeat(4000, 1)
    chance = torch.Generator().manual_seed(1)
    found = lab.to_nvfp4(many, stochastic=True, generator=chance)
    assert abs(found.sum(1).mean().item()) < 5 * found.sum(1).std().item() / math.sqrt(4000) + 5e-3


def test_only_the_layers_of_the_recipe_are_changed():
    model = lab.l18_gpt.new_model()
    lab.in_four_bits(model, lab.Recipe(head_too=False))
    changed = [name for name, module in model.named_modules() if isinstance(module, lab._Linear)]
    assert len(changed) == 8 and not any("head" in name for name in changed)
    with pytest.raises(KeyError):
        lab.trained("no such run", 0, 1)
