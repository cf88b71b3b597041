"""Lesson 05: a slow network that costs no core, for machines whose own network is a copy in memory.

On one machine gloo moves bytes with the cores that also compute, so one cannot see communication
hide behind computation: each takes the other's time. A network card takes none. Here an all-reduce
runs as always, and then counts as under way for as long as a link of given alpha and beta would
need; whoever waits for the gradients sleeps until then.

`schedule` is the same on paper: a step whose pieces all take a given time.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course.figures.overlap import StepLanes, overlap
from course.figures.style import Picture
from course.labs.clock import EmulatedResource
from labcode.comm.counting import Collective, CollectiveSpy
from labcode.perf.alpha_beta import Link, time_s

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
    def exposed_s(self) -> float:
        """How long the link was busy after backward had returned."""
        return sum(max(0.0, end - max(begin, self.backward_s)) for begin, end in self.sent)

    @property
    def link_s(self) -> float:
        """How long the link was busy."""
        return sum(end - begin for begin, end in self.sent)

    def lanes(self) -> StepLanes:
        """For `plot.overlap`: what the core does, and the link."""
        sent = [(begin_s * 1e3, end_s * 1e3) for begin_s, end_s in self.sent]
        return StepLanes([(0.0, self.backward_s * 1e3)], sent)


class Way(NamedTuple):
    """A model, and what averages its gradients.

    Args:
        module: It has the gradients.
        finish: Called after backward; when it returns, every gradient is the mean over the group.
    """

    module: nn.Module
    finish: Callable[[], object]


class BothWays(NamedTuple):
    """A step over a link, once with all buckets sent after backward, and once with overlap."""

    after: Step
    overlapped: Step


def fastest_steps(
    after: Way,
    overlapped: Way,
    loss: Callable[[nn.Module], torch.Tensor],
    group: dist.ProcessGroup,
    links: Sequence[Link],
    repeats: int = 6,
) -> list[BothWays]:
    """For each link the fastest of some steps of two ways; every rank of the group calls it.

    The ways take turns, so that a moment in which the machine is busy hits both alike.

    Args:
        after: It sends when backward has ended.
        overlapped: It sends during backward.
        loss: The forward pass of a model; its time does not count.
        group: Group over which the gradients are averaged.
        links: See `SlowLink`.
        repeats: Number of steps of each way.
    """
    found = []
    for link in links:
        steps_after = []
        steps_overlapped = []
        for _ in range(repeats):
            steps_after.append(_one_step(after, loss, group, link))
            steps_overlapped.append(_one_step(overlapped, loss, group, link))
        found.append(BothWays(_fastest(steps_after), _fastest(steps_overlapped)))
    return found


def _fastest(steps: Sequence[Step]) -> Step:
    return min(steps, key=lambda step: step.total_s)


def _one_step(
    way: Way, loss: Callable[[nn.Module], torch.Tensor], group: dist.ProcessGroup, link: Link
) -> Step:
    way.module.zero_grad()
    value = loss(way.module)
    dist.barrier(group)
    begin_s = time.perf_counter()
    with SlowLink(link) as slow:
        value.backward()
        backward_s = time.perf_counter() - begin_s
        way.finish()
    slow.wait()
    total_s = time.perf_counter() - begin_s
    sent = [(start_s - begin_s, stop_s - begin_s) for start_s, stop_s in slow.log]
    return Step(backward_s, total_s, sent)


# ---- on paper


def schedule(num_pieces: int, compute_ms: float, send_ms: float, overlapped: bool) -> StepLanes:
    """When backward computes each piece, and when the link carries it.

    Args:
        num_pieces: Number of pieces into which the gradients are cut.
        compute_ms: Backward of one piece.
        send_ms: What the link needs for one piece; it carries one at a time.
        overlapped: A piece leaves when it is ready; False: when backward has ended.
    """
    backward = []
    sent = []
    free_ms = 0.0
    for piece in range(num_pieces):
        ready_ms = (piece + 1) * compute_ms
        backward.append((ready_ms - compute_ms, ready_ms))
        may_leave_ms = ready_ms if overlapped else num_pieces * compute_ms
        begin_ms = max(may_leave_ms, free_ms)
        free_ms = begin_ms + send_ms
        sent.append((begin_ms, free_ms))
    return StepLanes(backward, sent)


def step_ms(num_pieces: int, compute_ms: float, send_ms: float, overlapped: bool) -> float:
    """How long a step of `schedule` takes."""
    return schedule(num_pieces, compute_ms, send_ms, overlapped).total_ms


def draw_overlap(num_pieces: int, compute_ms: float, send_ms: float, title: str) -> Picture:
    """The two schedules below each other."""
    after = schedule(num_pieces, compute_ms, send_ms, overlapped=False)
    during = schedule(num_pieces, compute_ms, send_ms, overlapped=True)
    return overlap(
        {"sent after backward": after, "sent during backward": during},
        title=title,
        alt=f"Sent after backward, a step of {num_pieces} pieces takes {after.total_ms:.0f} ms; "
        f"sent while backward runs, it takes {during.total_ms:.0f} ms",
    )
