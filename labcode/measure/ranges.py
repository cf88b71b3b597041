"""Where the time of a step goes: seconds by named part, noted by the training loop itself.

ranges = StepRanges()
for batch in batches:
    with ranges("forward"):
        loss = model(batch)
    with ranges("backward"):
        loss.backward()
    ranges.end_step()
ranges.take()              # {"forward": 0.034, "backward": 0.071}: mean seconds a step

On a CPU the clock of the process measures the parts. A GPU works on after the lines of Python that
queue its work are through, so that this clock would measure the queueing. There each moment is an
event of CUDA, which the device notes when it comes to it, and no step waits for that: what counts
is the time in which the device had got to a part. Data that is read while the device still works on
the step before then counts only from the moment the device has nothing left to do.
"""

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

OUTSIDE = ""  # what runs when no part does

Moment = Any  # seconds of the clock on a CPU, torch.cuda.Event on a GPU


class StepRanges:
    """Seconds of the parts of a step; each counts once, for the innermost part that runs.

    Args:
        on_gpu: Whether the work is queued on a GPU; then events of CUDA are the clock.

    Attributes:
        marked: Whether each part is named to a profiler too, torch.profiler and, on a GPU, Nsight
            Systems (NVTX): only while one records, as it takes some microseconds.

    Held by: tests/unit/test_ranges.py
    """

    def __init__(self, on_gpu: bool = False) -> None:
        self.marked = False
        self._on_gpu = on_gpu
        self._running = [OUTSIDE]
        self._moments: deque[tuple[str, Moment]] = deque()  # what has run until when
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._steps = 0

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """What runs in the block belongs to `part`."""
        self._note()
        self._running.append(part)
        try:
            with marked(part, self._on_gpu) if self.marked else contextlib.nullcontext():
                yield
        finally:
            self._note()
            self._running.pop()

    def end_step(self) -> None:
        """A step is done; those of its parts that the device has passed are added up."""
        self._steps += 1
        self._add_up()

    def take(self) -> dict[str, float]:
        """Mean seconds a step of each part, over the steps since this was last asked."""
        _wait_for(self._moments)
        self._add_up()
        self._seconds.pop(OUTSIDE, None)
        means = {part: seconds / max(1, self._steps) for part, seconds in self._seconds.items()}
        self._seconds.clear()
        self._steps = 0
        return means

    def _note(self) -> None:
        """Until now the innermost part has run."""
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            return  # a CUDA graph is recorded, and nothing runs yet
        self._moments.append((self._running[-1], _now(self._on_gpu)))

    def _add_up(self) -> None:
        """Add up the moments that the device has passed, and keep those to come."""
        while len(self._moments) > 1 and _is_past(self._moments[1][1]):
            _, begin = self._moments.popleft()
            part, end = self._moments[0]
            self._seconds[part] += _seconds_between(begin, end)


def _now(on_gpu: bool) -> Moment:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _is_past(moment: Moment) -> bool:
    return not isinstance(moment, torch.cuda.Event) or moment.query()


def _wait_for(moments: Sequence[tuple[str, Moment]]) -> None:
    """Until the device has passed the last of them."""
    if moments and isinstance(moments[-1][1], torch.cuda.Event):
        moments[-1][1].synchronize()


def _seconds_between(begin: Moment, end: Moment) -> float:
    """Seconds between two moments of the same clock."""
    if isinstance(begin, torch.cuda.Event):
        return begin.elapsed_time(end) / 1e3  # CUDA counts in milliseconds
    return end - begin


@contextlib.contextmanager
def marked(part: str, on_gpu: bool) -> Iterator[None]:
    """Name a part to the profilers that may be recording."""
    if on_gpu:
        torch.cuda.nvtx.range_push(part)
    try:
        with torch.profiler.record_function(part):
            yield
    finally:
        if on_gpu:
            torch.cuda.nvtx.range_pop()
