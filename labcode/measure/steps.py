"""What a run measures of itself: seconds a step, and memory."""

import contextlib
import gc
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from labcode.parallel.model import ParallelModel


class StepClock:
    """Mean seconds of the steps since it was asked last; what is between two does not count."""

    def __init__(self) -> None:
        self._steps = 0
        self._total_s = 0.0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        before = time.perf_counter()
        yield
        self._total_s += time.perf_counter() - before
        self._steps += 1

    def take(self) -> float:
        """The mean, over at least one step."""
        mean_s = self._total_s / self._steps
        self._steps = 0
        self._total_s = 0.0
        return mean_s


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


class HeldBytes(NamedTuple):
    """What a rank keeps for a model, in bytes; each memory counts once.

    Args:
        weights: Weights of the module, and this rank's rows of them.
        gradients: Gradients of both.
        optimizer: What the optimizer keeps for each weight.
    """

    weights: int
    gradients: int
    optimizer: int


def held_bytes(model: ParallelModel, optimizer: torch.optim.Optimizer) -> HeldBytes:
    """Weights, gradients and optimizer state that are in this rank's memory now.

    Call it between `forward_backward` and the optimizer's step, when all three are there.

    Held by: tests/ranks/test_zero_memory.py
    """
    params = [*model.module.parameters(), *model.weights.values()]
    grads = [param.grad for param in params if param.grad is not None]
    state = []
    for values in optimizer.state.values():
        for value in values.values():
            if isinstance(value, torch.Tensor):
                state.append(value)
    return HeldBytes(_storage_bytes(params), _storage_bytes(grads), _storage_bytes(state))


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind some tensors, that of views of one memory once."""
    sizes = {}
    for tensor in tensors:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = own.untyped_storage()
        if storage.nbytes():
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


class Allocated(NamedTuple):
    """What some work took of the memory for tensors, in bytes above what was there before.

    Args:
        peak: The most at any moment.
        left: What is still held after it.
    """

    peak: int
    left: int


def allocated_bytes(work: Callable[[], object], device: torch.device) -> Allocated:
    """Do some work, and count what tensors take meanwhile, temporary ones too.

    On a CPU the profiler sees each allocation, so that the work takes longer; on a GPU the
    allocator counts anyway. What libraries take for themselves is not among them. The profiler
    does not see what another thread frees: a thread of gloo may be the last one that lets go of a
    message, which then counts to the end.

    Held by: tests/ranks/test_training_memory.py
    """
    gc.collect()  # else what was left over before may be freed meanwhile
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        peak = torch.cuda.max_memory_allocated(device)
        gc.collect()
        return Allocated(peak - before, torch.cuda.memory_allocated(device) - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
        gc.collect()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events: Any = profiler.profiler.kineto_results.events()  # its types lack what is read here
    changes = []
    for event in events:
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
    changes.sort()
    live = 0
    peak = 0
    for _, num_bytes in changes:
        live += num_bytes
        peak = max(peak, live)
    return Allocated(peak, live)
