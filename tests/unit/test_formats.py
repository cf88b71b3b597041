"""`labcode.precision.formats` against PyTorch's dtypes, bit for bit, and the laws of rounding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labcode.precision.formats import (
    BLOCK_FORMATS,
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    MXFP8,
    MXFP8_OCP,
    NVFP4,
    TF32,
    cast,
    cast_blocks,
    cast_squares,
    scale_for,
)

WITH_DTYPE = [each for each in FORMATS.values() if each.dtype is not None]
SMALL = [each for each in WITH_DTYPE if each.bits == 8]
ANY = st.floats(width=32, allow_nan=False, allow_infinity=False)


def dense(to):
    """Numbers of a format, the middles between them, their neighbours, and many others."""
    generator = torch.Generator().manual_seed(1)
    low = to.smallest_exponent - to.fraction_bits - 4
    high = math.frexp(to.largest)[1] + 2
    exponents = torch.randint(max(low, -149), min(high, 128), (50_000,), generator=generator)
    some = torch.ldexp(torch.rand(50_000, generator=generator) - 0.5, exponents)
    on_it = cast(some, to)
    middles = on_it + torch.tensor([to.spacing(x) / 2 for x in on_it[:2000].tolist()]).repeat(25)
    special = torch.tensor([0.0, -0.0, to.largest, -to.largest, to.smallest_subnormal])
    infinity = torch.tensor(math.inf)
    around = (torch.nextafter(middles, infinity), torch.nextafter(middles, -infinity))
    return torch.cat([some, on_it, middles, *around, special, special * 1.01, special * 1e3])


def same_bits(found, expected):
    equal = (found == expected) & (torch.signbit(found) == torch.signbit(expected))
    return bool((equal | (found.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("to", WITH_DTYPE, ids=lambda to: to.name)
def test_a_cast_is_pytorchs_in_every_bit(to):
    x = dense(to)
    x = x[x.abs() <= to.largest]
    assert same_bits(cast(x, to), x.to(to.dtype).float())


@pytest.mark.parametrize("to", WITH_DTYPE, ids=lambda to: to.name)
def test_infinities_and_nan(to):
    x = torch.tensor([math.inf, -math.inf, math.nan])
    assert cast(x, to)[:2].tolist() == [to.largest, -to.largest]
    assert cast(x, to)[2].isnan()
    if to.has_infinity:
        assert same_bits(cast(x, to, saturate=False), x.to(to.dtype).float())


def test_what_is_too_large_becomes_infinite_where_pytorch_makes_it_so():
    x = torch.tensor([57344.0, 61439.0, 61440.0, 70000.0, -1e9])
    assert same_bits(cast(x, E5M2, saturate=False), x.to(torch.float8_e5m2).float())
    assert cast(torch.tensor([1000.0]), E4M3, saturate=False).isnan()


@pytest.mark.parametrize("to", SMALL, ids=lambda to: to.name)
def test_all_patterns_of_eight_bits_are_numbers_of_the_format(to):
    values = torch.arange(256, dtype=torch.uint8).view(to.dtype).float()
    finite = values[values.isfinite()]
    assert same_bits(cast(finite, to), finite)
    assert finite.max() == to.largest
    assert finite[finite > 0].min() == to.smallest_subnormal
    for low, high in zip(*(finite[finite >= 0].unique()[i:][:120] for i in (0, 1))):
        assert high - low == to.spacing(low.item())


def test_tf32_keeps_ten_bits_of_the_fraction():
    x = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, 1e38])
    assert cast(x, TF32)[:3].tolist() == [1 + 2**-10, 1.0, 1 + 2**-9]
    assert abs(cast(x, TF32)[3].item() / 1e38 - 1) < 2**-11


def test_e2m1_has_eight_sizes():
    x = torch.linspace(-8, 8, 4001)
    sizes = cast(x, E2M1).abs().unique().tolist()
    assert sizes == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@settings(deadline=None)
@given(st.sampled_from(list(FORMATS.values())), ANY)
def test_a_cast_of_a_cast_is_the_same(to, x):
    once = cast(torch.tensor(x), to)
    assert same_bits(cast(once, to), once)


@settings(deadline=None)
@given(st.sampled_from(list(FORMATS.values())), ANY, ANY)
def test_a_larger_number_does_not_become_a_smaller_one(to, x, y):
    low, high = cast(torch.tensor([min(x, y), max(x, y)]), to)
    assert low <= high


@settings(deadline=None)
@given(st.sampled_from(list(FORMATS.values())), ANY)
def test_the_error_is_at_most_half_a_spacing(to, x):
    if abs(x) <= to.largest:
        error = abs(cast(torch.tensor(x, dtype=torch.float64), to).item() - x)
        assert error <= to.spacing(x) / 2


def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average():
    generator = torch.Generator().manual_seed(0)
    x = torch.full((20_000,), 20.5)  # between 20 and 22 in e4m3
    found = cast(x, E4M3, rounding="stochastic", generator=generator)
    assert found.unique().tolist() == [20, 22]
    # a quarter of them upwards: 5 standard deviations of the mean are 0.031
    assert abs(found.mean().item() - 20.5) < 0.031
    on_it = torch.tensor([20.0, -0.5, 448.0])
    assert torch.equal(cast(on_it, E4M3, rounding="stochastic"), on_it)
    below = torch.full((1000,), -(2.0**-11))  # a quarter of the smallest number
    assert set(cast(below, E4M3, rounding="stochastic").tolist()) == {0.0, -(2.0**-9)}


def test_an_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match="choose nearest or stochastic"):
        cast(torch.ones(1), E4M3, rounding="up")


def test_a_scale_puts_the_largest_number_at_the_end_of_the_range():
    amax = torch.tensor([0.014, 0.0, math.inf, math.nan, 1e-40])
    scale = scale_for(amax, E4M3)
    assert scale[0].item() == pytest.approx(32_000)
    assert scale[1:4].tolist() == [1, 1, 1]
    assert scale[4].isfinite()
    assert scale_for(torch.tensor(2.0), E5M2, margin=3).item() == 57344 / 16


def test_the_scale_of_an_mx_block_is_a_power_of_two_and_blocks_do_not_touch_each_other():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    x[0, :32] *= 1e4
    x[1, 32:] = 0
    found = cast_blocks(x, MXFP8_OCP)
    for row in range(4):
        for block in (slice(0, 32), slice(32, 64)):
            part = x[row, block]
            amax = part.abs().max().item()
            scale = 2.0 ** (math.frexp(amax)[1] - 9) if amax else 1.0
            expected = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            assert torch.equal(found[row, block], expected)


def test_nvfp4_has_one_scale_for_16_numbers():
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(3))
    found = cast_blocks(x, NVFP4)
    for row in range(3):
        for first in (0, 16, 32):
            part = found[row, first : first + 16].abs()
            assert len(part.unique()) <= 8
    assert (found - x).abs().max() < 0.2 * x.abs().max()
    assert torch.equal(cast_blocks(torch.zeros(2, 16), NVFP4), torch.zeros(2, 16))


def test_a_block_that_is_too_small_for_its_scale_becomes_zeros():
    x = torch.ones(2, 16)
    x[1] = 1e-9
    found = cast_blocks(x, NVFP4)
    assert torch.equal(found[1], torch.zeros(16))
    assert torch.allclose(found[0], x[0])


def test_block_formats_count_their_scales():
    bits = {name: each.bits_per_number for name, each in BLOCK_FORMATS.items()}
    assert bits == {"mxfp8": 8.25, "mxfp8_ocp": 8.25, "mxfp4": 4.25, "nvfp4": 4.5}


def test_a_dim_that_is_no_multiple_of_the_block_is_refused():
    with pytest.raises(ValueError, match="40 numbers and a block of mxfp8 has 32"):
        cast_blocks(torch.ones(2, 40), MXFP8)


def block_scaled_numbers():
    """Rows of very different sizes, a block of zeros, and one very large number."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp(1.5 * torch.randn(64, 1, generator=generator))
    x = torch.randn(64, 256, generator=generator) * sizes
    x[3, :32] = 0
    x[5, 40] = 300.0
    return x


@pytest.mark.parametrize(("to", "mode"), [(MXFP8, "RCEIL"), (MXFP8_OCP, "FLOOR")])
def test_mxfp8_is_torchaos_in_every_bit(to, mode):
    tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    mode = tensor.ScaleCalculationMode[mode]
    for size in (1.0, 1e-6, 1e6):
        x = block_scaled_numbers() * size
        scale, data = tensor.to_mx(x, torch.float8_e4m3fn, 32, mode)
        expected = tensor.to_dtype(data, scale, torch.float8_e4m3fn, 32, torch.float32)
        assert torch.equal(cast_blocks(x, to), expected)


def test_a_scale_that_is_rounded_down_lets_the_largest_number_saturate():
    """0.988 is 1.976 * 2**-1, and the largest fraction of e4m3 is 1.75."""
    x = torch.full((1, 32), 0.012)
    x[0, 0] = -0.988
    assert cast_blocks(x, MXFP8_OCP)[0, 0] == -0.875
    assert cast_blocks(x, MXFP8)[0, 0] == pytest.approx(-0.988, rel=1 / 16)


def test_nvfp4_is_torchaos_but_for_numbers_between_two_others():
    """torchao multiplies by a rounded reciprocal where we divide, so that a tie may differ."""
    tensor = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = block_scaled_numbers()
    whole = tensor.per_tensor_amax_to_scale(x.abs().max())
    scales, packed = tensor.nvfp4_quantize(x, 16, whole)
    numbers = tensor.f4_unpacked_to_f32(tensor.unpack_uint4(packed)).view(64, -1, 16)
    expected = (numbers * scales.float().view(64, -1, 1) * whole).flatten(-2)
    found = cast_blocks(x, NVFP4)
    # torchao does not let the scale of a block fall below 2**-6
    large = (scales.float().view(64, -1) > 2**-6).repeat_interleave(16, -1)
    assert large.float().mean() > 0.6
    same = torch.isclose(found[large], expected[large], rtol=1e-6, atol=0)
    assert same.float().mean() > 0.999


def test_squares_are_the_same_for_a_matrix_and_its_transpose():
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(2))
    found = cast_squares(x, NVFP4)
    assert torch.equal(cast_squares(x.T.contiguous(), NVFP4).T, found)
    first = x[:16, :16].reshape(1, 256)  # one square, whose amax decides
    whole = x.abs().max() / (448 * 6)
    scale = cast(first.abs().max() / 6 / whole, E4M3) * whole
    assert torch.allclose(found[:16, :16].reshape(1, 256), cast(first / scale, E2M1) * scale)
    with pytest.raises(ValueError, match="pad both dims"):
        cast_squares(x[:, :40], NVFP4)


def test_blocks_can_be_rounded_by_chance():
    x = torch.full((4000, 16), 1.0)
    x[:, 0] = 24.0  # what is left of 1 to nearest: 0.25 of 6 lies halfway between 0 and 0.5
    generator = torch.Generator().manual_seed(3)
    found = cast_blocks(x, NVFP4, rounding="stochastic", generator=generator)[:, 1:]
    assert set(found.unique().tolist()) == {0.0, 2.0}
    assert abs(found.mean().item() - 1) < 0.02
