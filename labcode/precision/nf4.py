"""NF4: weights in 4 bits, whose 16 values lie where normal numbers do.

    code_i = the value of NF4 nearest to w_i / s,    s = max |w| of a block of 64
    w_i   ~ s * NF4[code_i]

Weights are close to normal, so that each of the 16 values should stand for as many of them as any
other: the values are quantiles of the normal distribution, scaled to [-1, 1]: the zero, 8 above it
and 7 below. So zero is exact, and the largest weight of a block is as exact as its scale.

Two codes make a byte. The scales would add 32 bits to every 64 weights, half a bit each; double
quantization keeps them in 8 bits, relative to their mean, with a scale of their own for each 256:
0.127 bits. Here these are whole numbers from -127 to 127; bitsandbytes has an 8-bit table in their
place that is finer near zero.

Source: Dettmers et al. 2023 (arXiv:2305.14314), section 3 and appendix E for the 16 values;
    bitsandbytes, `create_normal_map`.
Held by: tests/unit/test_nf4.py
"""

from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import nn

BLOCK = 64  # weights that share a scale
SCALES = 256  # scales that share one of their own
LARGEST = 127  # of a scale in 8 bits
# Where the outermost quantile lies. That of 1 is infinite, so the outer bin is cut in half: the
# mean of 1 - 1/(2*15) and 1 - 1/(2*16), because one side has 7 values beside the zero and the other
# 8.
OUTERMOST = 1 - (1 / 30 + 1 / 32) / 2


def values() -> torch.Tensor:
    """The 16 values of NF4, from -1 to 1: [16] float32."""
    positive = _quantiles(8)
    negative = [-value for value in _quantiles(7)]
    table = sorted([*negative, 0.0, *positive])
    return torch.tensor(table, dtype=torch.float64).div(table[-1]).float()


def _quantiles(count: int) -> list[float]:
    """So many quantiles of the normal distribution above its middle, at equal distances."""
    found = []
    for number in range(count):
        share = number / count
        found.append(NormalDist().inv_cdf(OUTERMOST + share * (0.5 - OUTERMOST)))
    return found


class Nf4(NamedTuple):
    """A tensor in 4 bits.

    Args:
        codes: Two of 4 bits in each byte, [ceil(n / 128) * 64] uint8; n numbers of the tensor.
        scales: One of each block, less their mean, [blocks] int8.
        scale_of_scales: What 1 in `scales` stands for, [ceil(blocks / 256)] float32.
        mean: Of the scales, a float32 scalar.
        shape: Of the tensor.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    scale_of_scales: torch.Tensor
    mean: torch.Tensor
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        """Of everything but the shape."""
        tensors = (self.codes, self.scales, self.scale_of_scales, self.mean)
        return sum(tensor.nbytes for tensor in tensors)


def quantize(whole: torch.Tensor) -> Nf4:
    """A tensor of any shape and floating dtype in 4 bits."""
    blocks = _in_rows(whole.detach().float().flatten(), BLOCK)  # [blocks, 64], padded with zeros
    absmax = blocks.abs().amax(1)  # [blocks]
    mean = absmax.mean()
    groups = _in_rows(absmax - mean, SCALES)  # [groups, 256]
    scale_of_scales = groups.abs().amax(1) / LARGEST  # [groups]
    # a group whose scales are all alike has a scale of zero, and nothing to be divided by it
    scales = (groups / _not_zero(scale_of_scales)[:, None]).round().to(torch.int8)
    scales = scales.flatten()[: len(absmax)]
    # Divided by the scale as it will be read, not as it was: so the rounding of the scales costs
    # less. The largest weight may then lie a little outside of [-1, 1], and gets the nearest value.
    read = _scales(scales, scale_of_scales, mean)
    ratios = (blocks / _not_zero(read)[:, None]).flatten()  # [n, padded]
    table = values().to(ratios.device)
    between = (table[1:] + table[:-1]) / 2  # [15]: where the nearest value changes
    codes = torch.bucketize(ratios, between).to(torch.uint8)
    codes = _in_rows(codes, 2)  # [bytes, 2]
    return Nf4(codes[:, 0] << 4 | codes[:, 1], scales, scale_of_scales, mean, whole.shape)


def dequantize(packed: Nf4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The tensor that the codes stand for."""
    codes = torch.stack((packed.codes >> 4, packed.codes & 15), dim=1)  # [bytes, 2]
    numbers = values().to(codes.device)[codes.flatten().long()]  # [n, padded]
    scales = _scales(packed.scales, packed.scale_of_scales, packed.mean)
    whole = (_in_rows(numbers, BLOCK) * scales[:, None]).flatten()
    return whole[: packed.shape.numel()].view(packed.shape).to(dtype)


def _scales(
    scales: torch.Tensor, scale_of_scales: torch.Tensor, mean: torch.Tensor
) -> torch.Tensor:
    """The scale of each block in float32, [blocks]."""
    each = scale_of_scales.repeat_interleave(SCALES)[: len(scales)]
    return scales * each + mean


def _in_rows(flat: torch.Tensor, length: int) -> torch.Tensor:
    """[n] to [ceil(n / length), length], padded with zeros."""
    missing = -len(flat) % length
    return torch.cat((flat, flat.new_zeros(missing))).view(-1, length)


def _not_zero(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 1, scales)


class Nf4Linear(nn.Module):
    """A frozen linear layer whose weight is kept in 4 bits: [.., in] to [.., out].

    The weight is expanded for a product and thrown away after it: in forward, and again in
    backward, which needs it for the gradient of the input. Autograd keeps the codes only. A weight
    in 4 bits has no gradient; what trains is an adapter beside the layer (`models.lora`).

    Args:
        layer: The plain layer.

    Source: Dettmers et al. 2023 (arXiv:2305.14314), equations 5 and 6.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        packed = quantize(layer.weight)
        # buffers, so that they move to a device with the model
        self.register_buffer("codes", packed.codes)
        self.register_buffer("scales", packed.scales)
        self.register_buffer("scale_of_scales", packed.scale_of_scales)
        self.register_buffer("mean", packed.mean)
        bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), False)
        self.bias = bias

    @property
    def packed(self) -> Nf4:
        """The weight in 4 bits."""
        shape = torch.Size((self.out_features, self.in_features))
        tensors: list[Any] = [self.codes, self.scales, self.scale_of_scales, self.mean, shape]
        return Nf4(*tensors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x W^T + bias`, in the dtype of x."""
        y = _Product.apply(x, self.packed)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """`x W^T` with a W that is expanded where it is used."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: Nf4) -> torch.Tensor:
        ctx.packed = packed
        return x @ dequantize(packed, x.dtype).T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad @ dequantize(ctx.packed, grad.dtype), None
