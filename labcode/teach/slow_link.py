"""A slow network that costs no core, for machines whose own network is a copy in memory.

On one machine gloo moves bytes with the cores that also compute, so hiding communication behind computation cannot be seen:
the two take each other's time. A network card does not. Here a bucket's all-reduce runs as always, and then counts as under
way for as long as a link of given alpha and beta would need; whoever waits for it sleeps.
"""

import time

import torch.distributed as dist

from labcode.parallel.data import Bucket, DataParallel
from labcode.perf import comm


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
        self.bucket.work = self.slow_link.carry(self.bucket.work, self.bucket.num_bytes, dist.get_world_size(group))
