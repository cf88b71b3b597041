"""A slow network that costs no core, for machines whose own network is a copy in memory.

On one machine gloo moves bytes with the cores that also compute, so hiding communication behind computation cannot be seen:
the two take each other's time. A network card does not. Here a bucket's all-reduce runs as always, and then counts as under
way for as long as a link of given alpha and beta would need; whoever waits for it sleeps.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labcode.parallel.data import Bucket, DataParallel
from labcode.perf import alpha_beta as comm


class SlowLink:
    """Carries the buckets of a model one after the other, each for as long as the alpha-beta model says.

        begin = max(when it is sent, when the one before it has arrived)
        end   = begin + time_s("all_reduce", p, bytes, link)

    Communicates: what the model does, nothing else; gradients stay the same.
    Held by: tests/ranks/test_slow_link.py

    Args:
        model: Its buckets are sent over this link from now on.
        link: alpha and beta; `Link(0, math.inf)` adds no time, and only keeps the log.

    Attributes:
        log: (begin, end) of each bucket sent, seconds of `time.perf_counter()`; the owner empties it.
    """

    def __init__(self, model: DataParallel, link: comm.Link):
        self.link, self.free_at, self.log = link, 0.0, []
        for bucket in model.buckets:
            bucket.send = _Sender(self, bucket)

    def carry(self, work: dist.Work, num_bytes: int, p: int) -> "Delayed":
        """Put a message that was sent just now behind those under way."""
        begin = max(self.free_at, time.perf_counter())
        self.free_at = begin + comm.time_s("all_reduce", p, num_bytes, self.link)
        self.log.append((begin, self.free_at))
        return Delayed(work, self.free_at)


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
        """Two lanes for `plot.timeline`, in milliseconds: what the core does, and what is on the link."""
        core = [("backward", 0.0, self.backward_s), ("wait", self.backward_s, self.total_s)]
        link = [
            (f"bucket {number}", begin, end) for number, (begin, end) in enumerate(self.sent, 1)
        ]
        lanes = {f"core, {name}": core, f"link, {name}": link}
        return [
            (lane, label, a * 1e3, b * 1e3) for lane, bars in lanes.items() for label, a, b in bars
        ]


def fastest_step(
    model: DataParallel,
    loss: Callable[[], torch.Tensor],
    link: comm.Link,
    overlap: bool,
    repeats: int = 6,
) -> Step:
    """The fastest of some steps of a model over a slow link; every rank calls it.

    Args:
        model: Its buckets travel over the link from now on.
        loss: The forward pass; its time does not count.
        link: See `SlowLink`.
        overlap: Buckets leave during backward; False sends them all after it.
        repeats: Number of steps.
    """
    log, steps = SlowLink(model, link).log, []
    for _ in range(repeats):
        model.zero_grad()
        value = loss()
        log.clear()
        dist.barrier(model.group)
        begin = time.perf_counter()
        with (
            contextlib.nullcontext() if overlap else model.no_sync()
        ):  # there the hooks send nothing
            value.backward()
        backward_s = time.perf_counter() - begin
        model.finish_gradient_sync()
        total_s = time.perf_counter() - begin
        steps.append(
            Step(backward_s, total_s, [(start - begin, end - begin) for start, end in log])
        )
    return min(steps, key=lambda step: step.total_s)


class Delayed:
    """Work that is done when the real one is, but not before `until`."""

    def __init__(self, work: dist.Work, until: float):
        self.work, self.until = work, until

    def wait(self) -> None:
        """Wait for both."""
        self.work.wait()
        time.sleep(max(0.0, self.until - time.perf_counter()))


class _Sender:
    """Stands in for a bucket's `send`."""

    def __init__(self, slow_link: SlowLink, bucket: Bucket):
        self.slow_link, self.bucket, self.send = slow_link, bucket, bucket.send

    def __call__(self, group):
        self.send(group)
        self.bucket.work = self.slow_link.carry(
            self.bucket.work, self.bucket.num_bytes, dist.get_world_size(group)
        )
