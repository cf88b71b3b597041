"""A timer of parts and a loader that reads ahead, as exercises 2.1 to 2.3 ask for them."""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


class StepTimer:
    """Attributes wall time to named parts; each moment counts once, for the innermost part.

    Args:
        clock: Gives seconds.

    Held by: tests/exercises/02.py
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}
        self.running = ["rest"]
        self.last = clock()

    def charge(self) -> None:
        """The time since the last call belongs to what has run meanwhile."""
        now = self.clock()
        part = self.running[-1]
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        self.last = now

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs in the block belongs to `name`."""
        self.charge()
        self.running.append(name)
        try:
            yield
        finally:
            self.charge()
            self.running.pop()

    def shares(self) -> dict[str, float]:
        """{part: its fraction of the time since the timer was made}, "rest" among them."""
        self.charge()
        total = sum(self.seconds.values())
        return {part: seconds / total for part, seconds in self.seconds.items()}


def bytes_read(box: Sequence[tuple[int, int]], chunks: Sequence[int], itemsize: int = 4) -> int:
    """Bytes of all chunks that a box touches, before compression.

    Args:
        box: (start, stop) along each axis.
        chunks: Length of a chunk along each axis.
        itemsize: Bytes of a number.

    Held by: tests/unit/test_l02_labs.py
    """
    num_chunks = 1
    for (start, stop), length in zip(box, chunks, strict=True):
        num_chunks *= (stop - 1) // length - start // length + 1
    return num_chunks * math.prod(chunks) * itemsize


class Prefetcher:
    """What `source` yields, read ahead by a thread.

    Args:
        source: Anything to iterate over; it is read in the thread.
        ahead: Batches that may wait in the queue; the thread may hold one more.

    Held by: tests/exercises/02.py
    """

    def __init__(self, source: Iterable[Any], ahead: int) -> None:
        self.source = source
        self.ahead = ahead

    def __iter__(self) -> Iterator[Any]:
        """The batches in order, then the end or the error of the source."""
        ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=self.ahead)
        stopped = threading.Event()
        reader = threading.Thread(target=self._read, args=(ready, stopped), daemon=True)
        reader.start()
        try:
            while True:
                kind, content = ready.get()
                if kind == "end":
                    return
                if kind == "error":
                    raise content
                yield content
        finally:
            stopped.set()
            reader.join()

    def _read(self, ready: "queue.Queue[tuple[str, Any]]", stopped: threading.Event) -> None:
        """In the thread: read until the end, an error, or until nobody wants more."""
        try:
            for batch in self.source:
                _put(ready, ("batch", batch), stopped)
                if stopped.is_set():
                    return
            _put(ready, ("end", None), stopped)
        except Exception as error:
            _put(ready, ("error", error), stopped)


def _put(
    ready: "queue.Queue[tuple[str, Any]]", item: tuple[str, Any], stopped: threading.Event
) -> None:
    """Put an item into the queue when there is room, unless nobody waits for it any more."""
    while not stopped.is_set():
        try:
            ready.put(item, timeout=0.05)
            return
        except queue.Full:
            continue
