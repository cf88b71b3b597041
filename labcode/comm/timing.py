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
    """Seconds that each of `repeats` calls of `call(x)` takes, as this rank sees them.

    All ranks start together. The call is over when the slowest rank is done: take the maximum over
    the ranks, call by call. Noise only adds time, so the fastest call shows what the link can do,
    and the median what one usually gets.

    Communicates: what `call` does, and a barrier before each.

    Args:
        call: Collective or not; every rank makes it. It is made once more than `repeats`, to warm
            up.
        num_bytes: Size of x, float32 zeros, a multiple of 4.
        repeats: Number of times returned.
        device: Where x is; on a GPU each call is waited for.
    Held by: tests/ranks/test_ring.py::test_times_of_a_call
    """
    x = torch.zeros(num_bytes // 4, device=device)  # float32 has 4 bytes
    times = []
    for _ in range(repeats + 1):
        # Work that is still in the queue of a GPU would be counted as part of this call.
        _wait_for_device(x)
        dist.barrier()
        start = time.perf_counter()
        call(x)
        _wait_for_device(x)
        times.append(time.perf_counter() - start)
    return times[1:]  # the first call opens connections and allocates


def _wait_for_device(x: torch.Tensor) -> None:
    """A GPU works through a queue: what was called may not have happened yet."""
    if x.is_cuda:
        torch.cuda.synchronize()
