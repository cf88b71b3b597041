"""Number formats: what they can hold, how far their numbers are apart, and the rounding to them.

    value = sign * 2**exponent * (1 + fraction)          normal
    value = sign * 2**smallest_exponent * fraction       subnormal: below 2**smallest_exponent

    name        exponent  fraction  largest   smallest  subnormal  source
    float32        8         23     3.4e38    2**-126   2**-149    IEEE 754
    tf32           8         10     3.4e38    2**-126   2**-136    NVIDIA A100 whitepaper
    bfloat16       8          7     3.4e38    2**-126   2**-133
    float16        5         10     65,504    2**-14    2**-24     IEEE 754
    e5m2           5          2     57,344    2**-14    2**-16     arXiv:2209.05433, table 1
    e4m3           4          3     448       2**-6     2**-9      arXiv:2209.05433, table 1
    e2m1           2          1     6         2**0      2**-1      OCP Microscaling 1.0, 5.3.3

`cast` is written in plain arithmetic, so that a lesson can show it. It gives the numbers of the
format in the dtype of its input; where PyTorch has a dtype for the format, both agree in every bit.

Held by: tests/unit/test_formats.py
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Args:
        name: The name in FORMATS.
        exponent_bits: Number of bits of the exponent.
        fraction_bits: Number of bits behind the leading 1.
        largest: The largest finite number.
        has_infinity: What is too large can become infinite.
        dtype: PyTorch's, if it has one.
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    largest: float
    has_infinity: bool = True
    dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        """Bits of a number, with its sign."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def smallest_exponent(self) -> int:
        """The smallest exponent of a normal number."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number."""
        return 2.0 ** (self.smallest_exponent - self.fraction_bits)

    def spacing(self, x: float) -> float:
        """The distance from |x| to the next larger number of the format."""
        exponent = self.smallest_exponent
        if x != 0:
            exponent = max(exponent, math.frexp(x)[1] - 1)
        return 2.0 ** (exponent - self.fraction_bits)


E4M3 = Format("e4m3", 4, 3, 448.0, False, torch.float8_e4m3fn)
E5M2 = Format("e5m2", 5, 2, 57344.0, True, torch.float8_e5m2)
E2M1 = Format("e2m1", 2, 1, 6.0, False)
FLOAT16 = Format("float16", 5, 10, 65504.0, True, torch.float16)
BFLOAT16 = Format("bfloat16", 8, 7, (2 - 2**-7) * 2.0**127, True, torch.bfloat16)
TF32 = Format("tf32", 8, 10, (2 - 2**-10) * 2.0**127)
FLOAT32 = Format("float32", 8, 23, (2 - 2**-23) * 2.0**127, True, torch.float32)
FORMATS = {each.name: each for each in (FLOAT32, TF32, BFLOAT16, FLOAT16, E5M2, E4M3, E2M1)}


def cast(
    x: torch.Tensor,
    to: Format,
    *,
    rounding: Rounding = "nearest",
    saturate: bool = True,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """The numbers of a format that x is rounded to.

    "nearest" takes the nearest number, and the one whose last bit is 0 if two are equally near.
    "stochastic" takes one of the two neighbours by chance, the nearer one more often, so that the
    mean of many casts is x.

    Args:
        x: A tensor of any shape, float32 or float64; other dtypes are computed in float32.
        to: The format.
        rounding: "nearest" or "stochastic".
        saturate: What is too large becomes the largest number; False: infinite, or nan in a format
            without infinities. nan stays nan.
        generator: Source of the random numbers, on the device of x.

    Returns:
        As x; float32 for other dtypes than float32 and float64.

    Raises:
        ValueError: The rounding is unknown.

    Source: IEEE 754-2019, section 4.3.1; Gupta et al. 2015 (arXiv:1502.02551) for stochastic
        rounding.
    Held by: tests/unit/test_formats.py
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding={rounding!r}: choose nearest or stochastic")
    if x.dtype != torch.float64:
        x = x.float()
    _, exponent = torch.frexp(x)  # x = f * 2**exponent with 0.5 <= |f| < 1
    # Below the smallest exponent the spacing stays the same: these are the subnormal numbers.
    exponent = (exponent - 1).clamp(min=to.smallest_exponent)
    spacing = torch.ldexp(torch.ones_like(x), exponent - to.fraction_bits)
    steps = x / spacing  # exact: a division by a power of two
    if rounding == "nearest":
        whole = torch.round(steps)  # to even where two are equally near
    else:
        chance = torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator)
        below = torch.floor(steps)
        rounds_up = chance < steps - below
        whole = torch.where(rounds_up, below + 1, below)
    # a number just below 0 becomes -0.0, as it should
    rounded = torch.copysign(whole * spacing, x)
    if saturate:
        return rounded.clamp(-to.largest, to.largest)
    outside = math.inf if to.has_infinity else math.nan
    too_large = torch.copysign(torch.full_like(x, outside), x)
    return torch.where(rounded.abs() > to.largest, too_large, rounded)


def scale_for(amax: torch.Tensor, to: Format, margin: int = 0) -> torch.Tensor:
    """The scale that puts amax at the end of a format's range: largest / (2**margin * amax).

    Args:
        amax: The largest |x| of what is to be cast; of any shape, one for each scale.
        to: The format.
        margin: Powers of two that are left free for growth.

    Returns:
        float32, of the same shape; 1 where amax is 0 or not finite.

    Source: Transformer Engine, user guide, "FP8 primer" (delayed scaling).
    """
    amax = amax.float()
    scale = to.largest / (2.0**margin * amax)
    # a tiny amax asks for more than float32 has
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    usable = (amax > 0) & amax.isfinite()
    return torch.where(usable, scale, torch.ones_like(scale))


# ---- formats with a scale for each block


@dataclass(frozen=True)
class BlockFormat:
    """Numbers of few bits that share a scale, a block of them at a time.

    Args:
        name: The name in BLOCK_FORMATS.
        elements: The format of the numbers.
        block: How many neighbours along the last dim share a scale.
        scale: The scale of a block is a power of two of 8 bits (E8M0): "up" is the smallest with
            which the largest number of the block fits; "down" puts that number between the last two
            powers of two of the format, where it may saturate. "e4m3" is a number of e4m3, beside
            one float32 for the whole tensor.
    """

    name: str
    elements: Format
    block: int
    scale: Literal["up", "down", "e4m3"]

    @property
    def bits_per_number(self) -> float:
        """With each number's part of its block's scale, but not that of the whole tensor."""
        return self.elements.bits + 8 / self.block


MXFP8 = BlockFormat("mxfp8", E4M3, 32, "up")  # as Transformer Engine has it
MXFP8_OCP = BlockFormat("mxfp8_ocp", E4M3, 32, "down")  # as the standard suggests
MXFP4 = BlockFormat("mxfp4", E2M1, 32, "down")
NVFP4 = BlockFormat("nvfp4", E2M1, 16, "e4m3")
BLOCK_FORMATS = {each.name: each for each in (MXFP8, MXFP8_OCP, MXFP4, NVFP4)}
SMALLEST_E8M0 = -127


def cast_blocks(
    x: torch.Tensor,
    to: BlockFormat,
    *,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Quantise x to a block-scaled format and back: the numbers that the format holds for it.

    Args:
        x: [.., n] in float32; n is a multiple of the block.
        to: The block format.
        rounding: How the numbers are rounded, as in `cast`; the scales are rounded to nearest.
        generator: See `cast`.

    Returns:
        As x.

    Raises:
        ValueError: The last dim is not a multiple of the block.

    Source: OCP Microscaling Formats 1.0, section 6.3 ("down"); Mishra et al. 2025
        (arXiv:2506.08027), which finds that trainings need "up"; NVIDIA, "Introducing NVFP4" (a
        scale in e4m3 for 16 numbers, a scale in float32 for the tensor).
    Held by: tests/unit/test_formats.py
    """
    if x.shape[-1] % to.block:
        raise ValueError(
            f"the last dim has {x.shape[-1]} numbers and a block of {to.name} has {to.block}: pad "
            "it to a multiple"
        )
    blocks = x.float().unflatten(-1, (-1, to.block))  # [.., n / block, block]
    amax = blocks.abs().amax(-1, keepdim=True)  # [.., n / block, 1]
    factor = _e4m3_scale(amax, to) if to.scale == "e4m3" else _power_of_two_scale(amax, to)
    if rounding == "nearest":
        elements = _cast_elements(blocks / factor, to.elements)
    else:
        elements = cast(blocks / factor, to.elements, rounding=rounding, generator=generator)
    # a block whose scale is too small for its format becomes zeros
    return torch.where(factor > 0, elements * factor, torch.zeros_like(blocks)).flatten(-2)


def cast_squares(x: torch.Tensor, to: BlockFormat) -> torch.Tensor:
    """Like `cast_blocks`, with a scale for each square of block x block numbers.

    The transpose of the result is the result for the transpose, so that a weight is the same
    numbers in forward and in backward.

    Args:
        x: [R, C] in float32, both multiples of the block.
        to: The block format.

    Raises:
        ValueError: R or C is not a multiple of the block.

    Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149)
    Held by: tests/unit/test_formats.py
    """
    side = to.block
    if x.dim() != 2 or x.shape[0] % side or x.shape[1] % side:
        raise ValueError(
            f"x has the shape {list(x.shape)}, and squares of {to.name} have {side} x {side} "
            "numbers: pad both dims to a multiple"
        )
    # [R, C] -> [R / side, side, C / side, side] -> [R / side, C / side, side, side], whose last two
    # dims are a square
    squares = x.unflatten(0, (-1, side)).unflatten(2, (-1, side)).transpose(1, 2)
    in_rows = replace(to, block=side * side)
    # [R / side, C * side]: each row has the squares of one band, one after the other
    found = cast_blocks(squares.flatten(1), in_rows).view(squares.shape)
    return found.transpose(1, 2).reshape(x.shape)


def _cast_elements(x: torch.Tensor, to: Format) -> torch.Tensor:
    """Like `cast`, and 30 times faster where PyTorch has the format."""
    if to.dtype is None:
        return cast(x, to)
    return x.clamp(-to.largest, to.largest).to(to.dtype).to(x.dtype)


def _power_of_two_scale(amax: torch.Tensor, to: BlockFormat) -> torch.Tensor:
    """The power of two that a block is divided by."""
    largest = to.elements.largest
    # The two differ by one power of two at most. "down" looks at exponents alone: the largest value
    # may then lie above the largest of the format, by less than a factor of 2, and saturates.
    if to.scale == "up":
        fraction, power = torch.frexp(amax / largest)  # amax / largest = fraction * 2**power
        power = power - (fraction == 0.5).int()  # 0.5 * 2**power is a power of two itself
    else:
        _, exponent = torch.frexp(amax)
        power = exponent - math.frexp(largest)[1]
    scale = torch.ldexp(torch.ones_like(amax), power.clamp(min=SMALLEST_E8M0))
    return torch.where(amax > 0, scale, torch.ones_like(scale))


def _e4m3_scale(amax: torch.Tensor, to: BlockFormat) -> torch.Tensor:
    """A number of e4m3, times one float32 for the tensor, so that the largest block has 448."""
    whole = amax.max() / (E4M3.largest * to.elements.largest)
    if whole == 0:
        return torch.ones_like(amax)
    return cast(amax / to.elements.largest / whole, E4M3) * whole
