"""What a pool needs of this machine, checked before it starts: numbers, memory, open files.

And how long its calls may take, where somebody sets a limit.
"""

import contextlib
import numbers
import resource
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import psutil

from labcode.runtime.hardware import free_memory_bytes
from labcode.runtime.units import binary_bytes

# Memory of one rank, with a DDP model and an optimizer of a few numbers: 12 MiB where ranks are
# forks, and some 120 where each has to import torch. What it computes comes on top.
ENGINE_BYTES = 128 * 2**20
MAX_TIMEOUT_S = 1e6  # gloo counts milliseconds in 32 bits
# Open files of the owner, on top of those that it has: two connections to each rank.
OWN_FILES = 40
OWN_FILES_PER_RANK = 3

_limit_s: ContextVar[float | None] = ContextVar("limit_s", default=None)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Within this block a call that sets no limit of its own may take so long, and no longer.

    It is for checks of code that may do anything.
    """
    token = _limit_s.set(seconds)
    try:
        yield
    finally:
        _limit_s.reset(token)


def time_limit_s(own: float | None) -> float | None:
    """How long a call may take: its own limit, or else that of the block; None is forever."""
    return _limit_s.get() if own is None else own


def check_arguments(n: Any, timeout_s: Any) -> None:
    """See that a pool can have these arguments.

    Raises:
        ValueError: `n` is no whole number above 0, or `timeout_s` no number of seconds.
    """
    called = f"Ranks(n={n!r}, timeout_s={timeout_s!r})"
    if not _is_number(n, numbers.Integral) or not _is_number(timeout_s, numbers.Real):
        raise ValueError(
            f"{called}: the number of ranks is a whole number such as 4, and the time-out a number "
            "of seconds such as 30.0"
        )
    if n < 1 or timeout_s <= 0:
        raise ValueError(f"{called}: a pool needs at least 1 rank and a time-out above 0 s")
    if not timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(
            f"{called}: a time-out is at most {MAX_TIMEOUT_S:.0f} s: leave it out for 30 s"
        )


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def make_room(n: int) -> None:
    """See that the machine holds `n` ranks; raise the limit of open files if that is in the way.

    The limit is that of this process, and of those that it starts: the soft one goes up to what is
    needed, as far as the hard one allows.

    Raises:
        ValueError: The machine has not enough memory for `n` ranks, or allows too few open files.
    """
    needed_bytes = n * ENGINE_BYTES
    free_bytes = free_memory_bytes()
    if needed_bytes > free_bytes:
        raise ValueError(
            f"Ranks(n={n}): a rank takes some {binary_bytes(ENGINE_BYTES)} before it computes "
            f"anything large, {n} of them need {binary_bytes(needed_bytes)}, and this machine has "
            f"{binary_bytes(free_bytes)} free: take at most {free_bytes // ENGINE_BYTES} ranks"
        )
    needed = psutil.Process().num_fds() + OWN_FILES + OWN_FILES_PER_RANK * n
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"Ranks(n={n}): {n} ranks need {needed} open files in one process, and this one may "
            f"have {hard} (ulimit -Hn): raise that limit, or take fewer ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
