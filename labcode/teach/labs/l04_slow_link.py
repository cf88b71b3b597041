"""Lesson 04: a slow network that costs no core, for machines whose own network is a copy in memory.

On one machine gloo moves bytes with the cores that also compute, so one cannot see communication
hide behind computation: each takes the other's time. A network card takes none. Here an all-reduce
runs as always, and then counts as under way for as long as a link of given alpha and beta would
need; whoever waits for the gradients sleeps until then.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from labcode.comm.counting import Collective, CollectiveSpy
from labcode.parallel.data import DataParallel
from labcode.perf.alpha_beta import Link, time_s
from labcode.teach.labs.clock import EmulatedResource

NO_DELAY = Link(0, math.inf)


class SlowLink(CollectiveSpy):
    """Carries the all-reduces of its block one after the other.

        begin = max(when it is sent, when the one before it has arrived)
        end   = begin + time_s("all_reduce", p, bytes, link)

    `with SlowLink(link) as slow:` around backward and `finish_gradient_sync()`; then `slow.wait()`
    sleeps until the last one has arrived.

    Communicates: what the model does, nothing else; gradients stay the same.
    Held by: tests/ranks/test_slow_link.py

    Args:
        link: alpha and beta; `Link(0, math.inf)` adds no time, and only keeps the log.

    Attributes:
        log: (begin, end) of each all-reduce, in seconds of `time.perf_counter()`.
    """

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link
        self.log: list[tuple[float, float]] = []
        self._wire = EmulatedResource()

    def on_collective(self, call: Collective, start: Callable[[], Any]) -> Any:
        """Start it, and put it behind those that are under way."""
        result = start()
        if call.name == "all_reduce":
            seconds = time_s("all_reduce", len(call.ranks), call.num_bytes, self.link)
            self.log.append(self._wire.take(seconds))
        return result

    def wait(self) -> None:
        """Sleep until all that was sent has arrived."""
        self._wire.wait()


@dataclass(frozen=True)
class Step:
    """When things happened in one step, in seconds since its backward began.

    Args:
        backward_s: Backward returned.
        total_s: Every gradient was averaged.
        sent: (begin, end) of each bucket on the link.
    """

    backward_s: float
    total_s: float
    sent: list[tuple[float, float]]

    @property
    def wait_s(self) -> float:
        """How long the rank did nothing but wait."""
        return self.total_s - self.backward_s

    @property
    def link_s(self) -> float:
        """How long the link was busy."""
        return sum(end - begin for begin, end in self.sent)

    def rows(self, name: str) -> list[tuple[str, str, float, float]]:
        """Two lanes for `plot.timeline`, in milliseconds: what the core does, and the link.

        Args:
            name: Of the run; it becomes a part of the lanes' names.
        """
        core = f"core, {name}"
        link = f"link, {name}"
        rows = [
            (core, "backward", 0.0, self.backward_s * 1e3),
            (core, "wait", self.backward_s * 1e3, self.total_s * 1e3),
        ]
        for number, (begin_s, end_s) in enumerate(self.sent, 1):
            rows.append((link, f"bucket {number}", begin_s * 1e3, end_s * 1e3))
        return rows


def fastest_step(
    model: DataParallel,
    loss: Callable[[], torch.Tensor],
    link: Link,
    overlap: bool,
    repeats: int = 6,
) -> Step:
    """The fastest of some steps of a model over a slow link; every rank calls it.

    Args:
        model: Its buckets travel over the link.
        loss: The forward pass; its time does not count.
        link: See `SlowLink`.
        overlap: Buckets leave during backward; False sends them all after it.
        repeats: Number of steps.
    """
    steps = [_one_step(model, loss, link, overlap) for _ in range(repeats)]
    return min(steps, key=lambda step: step.total_s)


def _one_step(
    model: DataParallel, loss: Callable[[], torch.Tensor], link: Link, overlap: bool
) -> Step:
    model.zero_grad()
    value = loss()
    dist.barrier(model.group)
    begin_s = time.perf_counter()
    with SlowLink(link) as slow:
        with _overlapping(model, overlap):
            value.backward()
        backward_s = time.perf_counter() - begin_s
        model.finish_gradient_sync()
    slow.wait()
    total_s = time.perf_counter() - begin_s
    sent = [(start_s - begin_s, stop_s - begin_s) for start_s, stop_s in slow.log]
    return Step(backward_s, total_s, sent)


@contextlib.contextmanager
def _overlapping(model: DataParallel, overlap: bool) -> Iterator[None]:
    """A backward whose buckets leave at once, or, inside `no_sync`, not before it has ended."""
    with contextlib.nullcontext() if overlap else model.no_sync():
        yield
