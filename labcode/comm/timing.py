"""How long a call takes that all ranks make together."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def call_times(
    call: Callable[[torch.Tensor], object],
    num_bytes: int,
    repeats: int = 20,
    device: torch.device | str = "cpu",
) -> list[float]:
    """Seconds of each of `repeats` calls of `call(x)`, as this rank sees them; the ranks begin together.

    The call is over when the slowest rank is done: take the maximum over the ranks, call by call. Noise only adds time, so
    the fastest call shows what the link can do, and the median what one gets.

    Communicates: what `call` does, and a barrier before each.

    Args:
        call: Collective or not; every rank makes it. One more than `repeats` are made, since the first one warms up.
        num_bytes: Size of x, float32 zeros, a multiple of 4.
        repeats: Number of times returned.
        device: Where x lies; on a GPU the queue is waited for.
    Held by: tests/ranks/test_ring.py::test_times_of_a_call
    """
    x, times = torch.zeros(num_bytes // 4, device=device), []
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    for _ in range(repeats + 1):
        wait()
        dist.barrier()
        start = time.perf_counter()
        call(x)
        wait()
        times.append(time.perf_counter() - start)
    return times[1:]
