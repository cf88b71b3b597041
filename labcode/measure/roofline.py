"""Operations whose FLOPs and bytes are known, timed on this device: dots for a roofline.

Lesson 03 sets them on the roof of a learner's device, and beside it those of a GPU, which
`benchmarks/on_a_gpu.py` has measured.

Source: Williams et al. 2009 (doi:10.1145/1498765.1498785)
Held by: tests/unit/test_l03_labs.py
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from labcode.measure.device_speed import median_s

WIDTH = {"cpu": 4096, "cuda": 8192}  # of the layer: more weights than the caches hold
TOKENS = {
    "cpu": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "cuda": (1, 4, 16, 64, 128, 256, 512, 1024, 4096, 16384),
}
LONG_ENOUGH_S = 0.01  # for a clock; shorter work is repeated
KERNELS = {
    "plain": SDPBackend.MATH,
    "fused": SDPBackend.FLASH_ATTENTION,
    "fused, memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Dot:
    """One operation on the roof.

    Args:
        name: Name of the operation.
        flops: FLOPs that it computes.
        num_bytes: Bytes that it reads and writes at least: each operand once.
        seconds: Measured.
    """

    name: str
    flops: float
    num_bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs for each byte."""
        return self.flops / self.num_bytes

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds


def seconds_of_one(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of some work, repeated so often that a clock can tell; the median of 5."""
    calls = 1
    seconds = median_s(device, work)
    if seconds < LONG_ENOUGH_S:
        calls = 1 + int(LONG_ENOUGH_S / seconds)

    def repeated() -> None:
        for _ in range(calls):
            work()

    return median_s(device, repeated) / calls


@torch.no_grad()
def linear_layer(tokens: int, device: torch.device, dtype: torch.dtype) -> Dot:
    """x @ W for x [tokens, n] and W [n, n]: 2 tokens n^2 FLOPs on n^2 + 2 tokens n numbers."""
    width = WIDTH[device.type]
    x = torch.randn(tokens, width, device=device).to(dtype)
    weight = torch.randn(width, width, device=device).to(dtype)
    out = torch.empty_like(x)
    seconds = seconds_of_one(device, lambda: torch.mm(x, weight, out=out))
    numbers = width**2 + 2 * tokens * width
    flops = 2.0 * tokens * width**2
    return Dot(f"linear layer, {tokens} tokens", flops, numbers * x.element_size(), seconds)


@torch.no_grad()
def addition(device: torch.device, dtype: torch.dtype) -> Dot:
    """x + y of two large tensors: one FLOP for two numbers that are read and one written."""
    size = WIDTH[device.type] ** 2
    x = torch.ones(size, device=device, dtype=dtype)
    y = torch.ones(size, device=device, dtype=dtype)
    out = torch.empty_like(x)
    seconds = seconds_of_one(device, lambda: torch.add(x, y, out=out))
    return Dot("addition", float(size), 3 * size * x.element_size(), seconds)


def dots(device: torch.device, dtype: torch.dtype) -> list[Dot]:
    """An addition, and a linear layer on more and more tokens; about 3 s on one core."""
    found = [addition(device, dtype)]
    for tokens in TOKENS[device.type]:
        found.append(linear_layer(tokens, device, dtype))
    return found


def attention_s(
    kernel: str,
    shape: tuple[int, int, int, int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    backward: bool = False,
) -> float:
    """Seconds of the attention core, without a mask.

    Args:
        kernel: One of `KERNELS`.
        shape: Batch, heads, tokens, size of a head.
        device: Device on which it runs.
        dtype: Dtype of q, k and v.
        backward: Forward and backward, instead of forward alone.
    """
    q, k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    for tensor in (q, k, v):
        tensor.requires_grad_(backward)
    ones = torch.ones(shape, device=device, dtype=dtype)

    def work() -> None:
        with sdpa_kernel(KERNELS[kernel]):
            out = F.scaled_dot_product_attention(q, k, v)
        if backward:
            out.backward(ones)

    return seconds_of_one(device, work)
