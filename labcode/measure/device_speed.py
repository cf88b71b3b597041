"""How fast this device is at what a training step does, measured: the peak that can be achieved.

A datasheet states a rate that no program reaches, and a CPU has none. What is measured here is what
large operations of PyTorch get on this device as it is now, with these threads and whatever else
runs on it.
"""

import functools
import statistics
import time
from collections.abc import Callable

import torch

from labcode.perf.step import DeviceSpeed

# rows and columns: large enough to reach the rate of the device
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
# A product that takes this long is large enough. A CPU without float16 emulates it: 1024 rows and
# columns would take it seconds.
LONG_ENOUGH_S = 0.005
# numbers in each of three tensors: more than the caches hold
STREAM_SIZE = {"cpu": 2**24, "cuda": 2**27}
CHAIN = 50  # links of a chain of small operations
FEW = 8  # features in it
REPEATS = 5


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that a large square matrix product reaches: 2 n^3 / seconds, the median of 5.

    Takes about 0.1 s; measured once in a process for each dtype, number of threads and precision of
    float32. Of the sizes 128, 256, ... up to `MATMUL_SIZE` the first is taken whose product takes
    `LONG_ENOUGH_S`.

    Args:
        device: Device on which it runs.
        dtype: Dtype of the factors and the product.

    Held by: tests/unit/test_device_speed.py
    """
    threads = torch.get_num_threads()
    return _matmul_flops_per_s(device, dtype, threads, torch.get_float32_matmul_precision())


@functools.cache
def _matmul_flops_per_s(
    device: torch.device, dtype: torch.dtype, threads: int, precision: str
) -> float:
    size = MATMUL_SIZE[device.type] if device.type == "cuda" else 128
    seconds = _product_s(size, device, dtype)
    while size < MATMUL_SIZE[device.type] and seconds < LONG_ENOUGH_S:
        size *= 2
        seconds = _product_s(size, device, dtype)
    if device.type == "cuda":
        # the peak that a run reports is its own
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * size**3 / seconds


@torch.no_grad()
def _product_s(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """Median seconds of the product of two square matrices."""
    left = _random(size, device, dtype)
    right = _random(size, device, dtype)
    product = torch.empty_like(left)
    return median_s(device, lambda: torch.mm(left, right, out=product))


def device_speed(device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """The three numbers from which `perf.step.device_step` predicts a step; about a second.

    Args:
        device: Device on which it runs.
        dtype: Dtype of the matrix products.

    Held by: tests/unit/test_device_speed.py
    """
    return DeviceSpeed(
        flops_per_s=matmul_flops_per_s(device, dtype),
        bytes_per_s=stream_bytes_per_s(device),
        launch_s=launch_s(device),
    )


def stream_bytes_per_s(device: torch.device) -> float:
    """Bytes/s that the sum of two large float32 tensors reads and writes.

    Source: McCalpin 1995, STREAM, whose kernel "add" it is.
    """
    size = STREAM_SIZE[device.type]
    left = torch.ones(size, device=device)
    right = torch.ones(size, device=device)
    total = torch.empty_like(left)
    seconds = median_s(device, lambda: torch.add(left, right, out=total))
    return 3 * left.element_size() * size / seconds


def launch_s(device: torch.device) -> float:
    """Seconds of one operation of a training on next to nothing, in forward or backward.

    It is the time of Python, autograd and the allocator; on a GPU that of the launch besides. A
    chain of norm, product, GELU and sum, the operations of an MLP, is timed.
    """
    norm = torch.nn.LayerNorm(FEW, device=device)
    product = torch.nn.Linear(FEW, FEW, device=device)
    start = torch.ones(1, FEW, device=device)

    def chain() -> None:
        x = start
        for _ in range(CHAIN):
            x = x + torch.nn.functional.gelu(product(norm(x)))
        x.sum().backward()

    operations_of_a_link = 4 + 8  # forward, and twice as many in backward
    return median_s(device, chain) / (CHAIN * operations_of_a_link)


def median_s(device: torch.device, work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median seconds of some work, after one time that does not count.

    Args:
        device: What is waited for after each time.
        work: What to do.
        repeats: How many times.
    """
    work()
    found = []
    for _ in range(repeats):
        found.append(run_s(device, work))
    return statistics.median(found)


def run_s(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of some work, done once.

    Args:
        device: What is waited for before and after.
        work: What to do.
    """
    _wait_for(device)
    started = time.perf_counter()
    work()
    _wait_for(device)
    return time.perf_counter() - started


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _random(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[size, size]; zeros would be quicker on a GPU, which then draws less power.

    The generators of the process are left as they are.
    """
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(size, size, device=device, generator=generator).to(dtype)
