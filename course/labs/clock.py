"""Emulated time: what a device or a link would need, spent asleep.

Ranks that share two cores wait for a core where they should wait for each other. A sleeping rank
needs no core, so it stands for one whose device or link is busy, and times come out as predicted.

The labs give each piece of work its time on an `EmulatedResource`, which does one after the other,
and sleep where a real rank would wait.
"""

import time


def sleep_until(moment_s: float) -> None:
    """Sleep until `time.perf_counter()` reads `moment_s`; returns at once if it has passed."""
    rest_s = moment_s - time.perf_counter()
    if rest_s > 0:
        time.sleep(rest_s)


class EmulatedResource:
    """A device or a link: it does one thing after another.

        begin = max(when it is asked, when it has done what it was asked before)
        end   = begin + seconds

    Attributes:
        free_at_s: When it has done all that it was asked, in seconds of `time.perf_counter()`.
    """

    def __init__(self) -> None:
        self.free_at_s = 0.0

    def take(self, seconds: float, asked_at_s: float | None = None) -> tuple[float, float]:
        """Add some work; nobody sleeps here.

        Args:
            seconds: What it takes.
            asked_at_s: Time at which it was asked; None for now.

        Returns:
            (begin, end), seconds of `time.perf_counter()`.
        """
        if asked_at_s is None:
            asked_at_s = time.perf_counter()
        begin_s = max(self.free_at_s, asked_at_s)
        self.free_at_s = begin_s + seconds
        return begin_s, self.free_at_s

    def wait(self) -> None:
        """Sleep until it has done what it was asked."""
        sleep_until(self.free_at_s)
