"""What a run measures of itself: seconds a step, and memory."""

import contextlib
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch


class StepClock:
    """Mean seconds of the steps since it was started; validation and checkpoints do not count."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget the steps so far."""
        self._steps = 0
        self._started = time.perf_counter()

    def count(self) -> None:
        """Note that a step is done."""
        self._steps += 1

    def seconds_per_step(self) -> float:
        """Mean over the steps counted; at least one was."""
        return (time.perf_counter() - self._started) / self._steps

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside the block belongs to no step."""
        before = time.perf_counter()
        yield
        self._started += time.perf_counter() - before


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes in use so far: by the allocator of a GPU, or resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # on Linux ru_maxrss also counts the process that started this one, /proc does not
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        if found:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB
