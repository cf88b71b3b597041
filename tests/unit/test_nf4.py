"""Weights in 4 bits: the published table, what rounding costs, and what a layer keeps of them."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from labcode.models.lora import LoraLinear, QLoraLinear
from labcode.perf.adapters import NF4_BYTES
from labcode.precision import nf4
from labcode.precision.nf4 import Nf4Linear, dequantize, quantize

# Dettmers et al. 2023 (arXiv:2305.14314), appendix E
PUBLISHED = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]


def normal(*shape, seed=0):
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def test_the_values_are_those_of_the_paper():
    torch.testing.assert_close(nf4.values(), torch.tensor(PUBLISHED), rtol=0, atol=1e-6)


def test_each_number_gets_the_nearest_value_of_its_block():
    whole = 0.02 * normal(3, 64)  # a block is a row
    packed = quantize(whole)
    scales = nf4._scales(packed.scales, packed.scale_of_scales, packed.mean)
    # 8 bits of the distance to the mean
    torch.testing.assert_close(scales, whole.abs().amax(1), rtol=0.005, atol=0)
    found = dequantize(packed)
    grid = scales[:, None] * nf4.values()  # [3, 16]
    distances = (whole[..., None] - grid[:, None]).abs()  # [3, 64, 16]
    torch.testing.assert_close((whole - found).abs(), distances.amin(-1), rtol=0, atol=1e-9)


def int4_error(whole):
    """Rounded to -7..7 of the same blocks, with whole scales."""
    blocks = whole.view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True) / 7
    return ((blocks / scales).round() * scales - blocks).view_as(whole)


def test_what_rounding_costs_normal_numbers():
    """About 9 % of their size: less than with 15 values at equal distances."""
    whole = normal(512, 512)
    error = (dequantize(quantize(whole)) - whole).square().mean().sqrt()
    assert 0.08 < error < 0.10
    assert error < 0.9 * int4_error(whole).square().mean().sqrt()


def test_four_bits_and_an_eighth():
    packed = quantize(normal(1024, 1024))
    assert packed.num_bytes / 1024**2 == pytest.approx(NF4_BYTES, rel=1e-4)


@pytest.mark.parametrize("shape", [(1,), (7, 9), (64,), (3, 65)])
def test_any_shape_and_any_size_come_back(shape):
    whole = normal(*shape)
    found = dequantize(quantize(whole))
    assert found.shape == whole.shape
    assert (found - whole).abs().max() < 0.2 * whole.abs().max()


def test_zeros_stay_zeros():
    whole = normal(4, 64)
    whole[1] = 0.0
    whole[2, ::2] = 0.0
    found = dequantize(quantize(whole))
    assert not found[1].any() and not found[2, ::2].any()
    assert torch.equal(dequantize(quantize(torch.zeros(5))), torch.zeros(5))


def layers():
    torch.manual_seed(0)
    plain = nn.Linear(32, 48).double()
    packed = QLoraLinear(LoraLinear(plain, rank=4, alpha=8.0))
    nn.init.normal_(packed.lora_a)
    nn.init.normal_(packed.lora_b)
    return plain, packed


def test_a_layer_computes_with_what_the_codes_stand_for():
    plain, packed = layers()
    whole = dequantize(packed.base.packed, torch.float64)
    x = normal(2, 5, 32).double().requires_grad_()
    expected = x @ (whole + 2.0 * packed.lora_b @ packed.lora_a).T + plain.bias
    found = packed(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    wanted = [x, packed.lora_a, packed.lora_b]
    grads = torch.autograd.grad(found.square().sum(), wanted)
    theirs = torch.autograd.grad(expected.square().sum(), wanted)
    torch.testing.assert_close(grads, theirs, rtol=0, atol=1e-9)
    trained = {name for name, param in packed.named_parameters() if param.requires_grad}
    assert trained == {"lora_a", "lora_b"}


def test_backward_keeps_no_expanded_weight():
    _, packed = layers()
    kept = []

    def keep(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        packed(normal(2, 5, 32).double().requires_grad_())
    assert kept
    assert not {(48, 32), (32, 48)} & set(kept)


def test_it_moves_and_is_saved_with_the_model():
    _, packed = layers()
    state = packed.state_dict()
    assert {"base.codes", "base.scales", "base.scale_of_scales", "base.mean"} <= set(state)
    other = Nf4Linear(nn.Linear(32, 48).double())
    other.load_state_dict({name: state[f"base.{name}"] for name in other.state_dict()})
    assert torch.equal(dequantize(other.packed), dequantize(packed.base.packed))
