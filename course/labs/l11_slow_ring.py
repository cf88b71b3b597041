"""Lesson 11: a ring whose blocks and messages take as long as they are told, and cost no core.

Four ranks on two cores can show no overlap: what sends and what computes share the same cores. Here
real ranks pass real parts of K and V round, and each block of attention and each message counts as
under way for a given time. Whoever has to wait for it sleeps.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from course.figures.style import Picture
from course.figures.timeline import TimelineRow, timeline
from course.labs import l11_by_hand
from course.labs.clock import sleep_until
from course.pool.ranks import Ranks
from labcode.models.layers import CoreAttention
from labcode.parallel.attention_block import PLAIN, Kernel
from labcode.parallel.context import RingAttention

TOKENS = 4  # of a rank: what is computed really should take no time
WIDTH = 4
REPEATS = 3

Row = tuple[str, float, float]  # "block" or "message", begin and end in milliseconds


class _LateWork:
    """The work of a message that arrives when the emulated link has carried it."""

    def __init__(self, work: dist.Work, arrives_s: float) -> None:
        self.work = work
        self.arrives_s = arrives_s

    def wait(self) -> None:
        self.work.wait()
        sleep_until(self.arrives_s)


class _Pace:
    """Gives blocks and messages of this process their times, and writes down when they ran.

    A message counts from the moment at which this rank has asked for it. That is right for a rank
    whose neighbours are never behind it: the last one, which has a block in every step.
    """

    def __init__(self, block_s: float, message_s: float) -> None:
        self.block_s = block_s
        self.message_s = message_s
        self.log: list[Row] = []

    def block(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """`compute`, which takes the time of a block."""

        @functools.wraps(compute)
        def paced(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.perf_counter()
            result = compute(*args, **kwargs)
            sleep_until(begin_s + self.block_s)
            self.log.append(("block", begin_s, time.perf_counter()))
            return result

        return paced

    @contextlib.contextmanager
    def messages(self) -> Iterator[None]:
        """Inside, an exchange of messages takes the time of one, since links work both ways."""
        start = dist.batch_isend_irecv

        def paced(operations: list[dist.P2POp]) -> list[_LateWork]:
            begin_s = time.perf_counter()
            arrives_s = begin_s + self.message_s
            self.log.append(("message", begin_s, arrives_s))
            return [_LateWork(work, arrives_s) for work in start(operations)]

        with mock.patch.object(dist, "batch_isend_irecv", paced):
            yield


def _one_forward(overlapped: bool, block_ms: float, message_ms: float) -> list[Row]:
    group = dist.group.WORLD
    assert group is not None
    pace = _Pace(block_ms / 1e3, message_ms / 1e3)
    q, k, v = torch.randn(3, 1, 1, TOKENS, WIDTH, dtype=torch.float64)
    kernel = Kernel("paced", pace.block(PLAIN.forward), PLAIN.backward)
    core = CoreAttention(causal=True)
    ring = RingAttention(core, group, "contiguous", kernel=kernel)
    ring.length = TOKENS * group.size()
    attend = mock.patch.object(l11_by_hand, "attend", pace.block(l11_by_hand.attend))
    dist.barrier()
    begin_s = time.perf_counter()
    with torch.no_grad(), pace.messages(), attend:
        if overlapped:
            ring(q, k, v)
        else:
            l11_by_hand.ring_forward(q, k, v, group)
    rows = []
    for kind, start_s, stop_s in pace.log:
        rows.append((kind, 1e3 * (start_s - begin_s), 1e3 * (stop_s - begin_s)))
    return rows


def _fastest_forward(rank: int, overlapped: bool, block_ms: float, message_ms: float) -> list[Row]:
    tries = [_one_forward(overlapped, block_ms, message_ms) for _ in range(REPEATS)]
    return min(tries, key=total_ms)


def forward(ranks: Ranks, overlapped: bool, block_ms: float, message_ms: float) -> list[Row]:
    """One forward of the ring under a causal mask, contiguous, as the last rank sees it.

    Held by: tests/ranks/test_slow_ring.py

    Args:
        ranks: Real ranks.
        overlapped: labcode's ring, which passes a part on before it computes with it. False: the
            solution of exercise 11.2, which waits for a part and then computes.
        block_ms: What each block of attention takes.
        message_ms: What the link needs to pass one part on.

    Returns:
        When each block and each message was under way.
    """
    return ranks.run(_fastest_forward, overlapped, block_ms, message_ms)[-1]


def total_ms(rows: Sequence[Row]) -> float:
    """How long the forward took."""
    return max(stop_ms for _, _, stop_ms in rows)


def draw(waiting: Sequence[Row], overlapped: Sequence[Row], title: str) -> Picture:
    """The two ways below each other, each with a lane for the rank and one for its link."""
    lanes: list[TimelineRow] = []
    for name, rows in (("waits", waiting), ("overlaps", overlapped)):
        for lane, kind in (("rank", "block"), ("link", "message")):
            of_kind = [row for row in rows if row[0] == kind]
            for number, (_, start_ms, stop_ms) in enumerate(of_kind):
                lanes.append((f"{name}: {lane}", f"{kind} {number}", start_ms, stop_ms))
    return timeline(
        lanes,
        xlabel="ms since the last rank began",
        title=title,
        alt=f"A ring that waits takes {total_ms(waiting):.0f} ms; one that sends while it "
        f"computes takes {total_ms(overlapped):.0f} ms",
    )
