"""Where the time of a step goes on one rank: its own work by phase, without waiting for others.

    data loading   until the loader has given a batch
    forward        of the module inside DDP: its broadcasts and those before it do not count
    backward       until the last gradient is there: the all-reduce that ends it does not count
    optimizer      its step

A rank that is late makes all others wait, but in none of these phases: what the doctor's own
collectives waited is subtracted where the CPU computes. On a GPU events of CUDA measure all but
data loading, and the device is not waited for.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

PHASES = ("data loading", "forward", "backward", "optimizer")

Moment = float | torch.cuda.Event
Span = float | tuple[torch.cuda.Event, torch.cuda.Event]


class PhaseClock:
    """Seconds of each phase in each step.

    Args:
        device: What the rank computes on.
        waited_s: Says how many seconds collectives have taken so far.
        num_steps: How many steps are noted.

    Held by: tests/ranks/test_doctor_watch.py::test_a_rank_that_is_late_is_named_with_its_phase
    """

    def __init__(self, device: torch.device, waited_s: Callable[[], float], num_steps: int) -> None:
        self.on_gpu = device.type == "cuda"
        self._waited_s = waited_s
        self._num_steps = num_steps
        self._begun: Moment | None = None
        self._last: Moment | None = None
        self._current: dict[str, list[Span]] = {}
        self._steps: list[dict[str, list[Span]]] = []

    @classmethod
    def stopped(cls) -> "PhaseClock":
        """One that takes no time: of what is not looked at."""
        return cls(torch.device("cpu"), float, 0)

    @property
    def is_on(self) -> bool:
        """Whether steps are still noted."""
        return len(self._steps) < self._num_steps

    def _now(self) -> Moment:
        """On a CPU the seconds in which nothing was waited for."""
        if not self.on_gpu:
            return time.perf_counter() - self._waited_s()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """A phase begins that computes."""
        self._last = None
        self._begun = self._now() if self.is_on else None

    def lap(self) -> None:
        """It has come this far; the last lap is its end."""
        if self.is_on:
            self._last = self._now()

    def end(self, phase: str) -> None:
        """It is over, at its last lap."""
        begun = self._begun
        last = self._last
        self._begun = None
        if isinstance(begun, float) and isinstance(last, float):
            self.add(phase, last - begun)
        elif isinstance(begun, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
            self.add(phase, (begun, last))

    def add(self, phase: str, span: Span) -> None:
        """Part of a phase: a step may have several micro-batches."""
        if self.is_on:
            self._current.setdefault(phase, []).append(span)

    def end_step(self) -> None:
        """The optimizer has stepped."""
        if self.is_on:
            self._steps.append(self._current)
        self._current = {}

    def seconds(self) -> dict[str, list[float]]:
        """{phase: seconds in each step}; 0 for what was not seen."""
        found: dict[str, list[float]] = {}
        for phase in PHASES:
            found[phase] = [_total_s(step.get(phase, [])) for step in self._steps]
        return found


def _total_s(spans: list[Span]) -> float:
    total_s = 0.0
    for span in spans:
        if not isinstance(span, tuple):
            total_s += span
            continue
        begun, ended = span
        if ended.query():  # else the device has not come so far
            total_s += begun.elapsed_time(ended) / 1000
    return total_s


class TimedBatches:
    """The iterator of a loader, with the time that each batch takes.

    Args:
        start: Makes the iterator: workers are started then.
        clock: Gets the time.
        before: Called before each batch, with its number.
        came: Called when a batch has come.
        ended: Called when there are no more.
    """

    def __init__(
        self,
        start: Callable[[], Any],
        clock: PhaseClock,
        before: Callable[[int], None],
        came: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._before = before
        self._came = came
        self._ended = ended
        self._number = 0
        began = time.perf_counter()
        self._batches = start()
        clock.add("data loading", time.perf_counter() - began)

    def __iter__(self) -> "TimedBatches":
        return self

    def __next__(self) -> Any:
        self._before(self._number)
        self._number += 1
        began = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._ended()
            raise
        self._clock.add("data loading", time.perf_counter() - began)
        self._came()
        return batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
