"""Who waits for whom: a watch beside the training loop that speaks when nothing moves.

A collective waits for its slowest rank, and one that never comes lets all others wait until the
time-out. The error of that time-out names a rank that waited, which is the wrong one. So each rank
has a thread that looks every few seconds whether its main thread still moves. If one finds that it
does not, all of them tell where they stand, through the store where the ranks have met, which works
while their process groups are blocked; one of them prints

    hang: no progress for 60 s: rank 3 has not come to all_reduce #812 of [1024]: it is in read
    (labcode/data/weather.py, line 88); ranks 0-2 wait in all_reduce #812 of [1024]

in one line. It ends nothing: a rank may be slow and come. `parallel.collective_timeout_s` ends a
run that hangs, and its error repeats that line.

Source: the same idea on NCCL alone is the flight recorder's analyzer in PyTorch (torchfrtrace);
    Jiang et al. 2024 (MegaScale, arXiv:2402.15627), section 5.2.
Held by: tests/unit/test_hang.py, tests/ranks/test_hang_watch.py
"""

import contextlib
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

from labcode.doctor.standing import own_standing, position_of_main_thread
from labcode.runtime.waits import Standing, describe

QUIET_S = 60.0  # after so long without progress the ranks tell where they stand
LOOKS_PER_QUIET = 6  # how often a thread looks in that time
ANSWER_S = 5.0  # for the ranks to answer, beside the time until they look


class HangWatch:
    """Watches one rank; made by all ranks of a job.

    Communicates: one short question to the store every `quiet_s / 6` seconds; no tensor.

    Args:
        timeout_s: How long a collective waits; the watch speaks well before, after a third of it or
            a minute.
    """

    def __init__(self, timeout_s: float) -> None:
        self.quiet_s = min(QUIET_S, timeout_s / 3)
        self._step = 0
        self._step_s = time.monotonic()  # of the last step
        self._moved_s = self._step_s  # when the main thread was last seen at another place
        self._position: tuple[Any, ...] = ()
        self._told = False  # about the standstill that lasts now
        self._episode = 0  # how often all ranks have told where they stand
        self._report = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch from now on; a single process has nobody to wait for."""
        if dist.get_world_size() > 1:
            # a connection of its own: the main thread may block the other one
            shared = dist.distributed_c10d._get_default_store()
            store = shared.clone()  # pyright: ignore[reportAttributeAccessIssue]
            self._thread = threading.Thread(target=self._watch, args=[store], daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Watch no longer; before the process group is left."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def step(self, number: int) -> None:
        """An optimizer step is done.

        Args:
            number: Number of steps done.
        """
        self._step = number
        self._step_s = time.monotonic()
        self._told = False
        self._report = ""

    @property
    def report(self) -> str:
        """Who waits for whom, if that was found since the last step; else ""."""
        return self._report

    def _watch(self, store: dist.Store) -> None:
        # the store goes with the rank or the agent that hosts it; then there is nobody to tell
        with contextlib.suppress(RuntimeError, ValueError):
            while not self._stop.wait(self.quiet_s / LOOKS_PER_QUIET):
                self._look(store)

    def _look(self, store: dist.Store) -> None:
        position = position_of_main_thread()
        if position != self._position:
            self._position = position
            self._moved_s = time.monotonic()
        opened = f"hang/{self._episode}/open"
        if not self._told and self._is_still():
            store.set(opened, "")
        if store.check([opened]):
            self._tell(store)

    def _is_still(self) -> bool:
        """Whether this rank has been at one place, or in one collective, for too long."""
        now_s = time.monotonic()
        if now_s - self._step_s < self.quiet_s:
            return False
        if now_s - self._moved_s >= self.quiet_s:
            return True
        # the main thread of a rank that waits in a collective may turn in a loop of its own
        waits_in = own_standing(self._step).waits_in
        return waits_in is not None and time.time() - waits_in.created_s >= self.quiet_s

    def _tell(self, store: dist.Store) -> None:
        """Tell where this rank stands; the first that does tells what all have said."""
        episode = f"hang/{self._episode}"
        self._episode += 1
        self._told = True
        own = own_standing(self._step)
        store.set(f"{episode}/{own.rank}", own.to_json())
        if store.add(f"{episode}/speakers", 1) == 1:
            standings = self._gather(store, episode)
            self._report = describe(standings, dist.get_world_size())
            line = f"hang: no progress for {self.quiet_s:.0f} s: {self._report}"
            print(line, file=sys.stderr, flush=True)
            store.set(f"{episode}/report", self._report)
            return
        with contextlib.suppress(dist.DistStoreError):
            self._report = _wait_for(store, f"{episode}/report", 2 * self._patience_s, self._stop)

    @property
    def _patience_s(self) -> float:
        """Until all ranks that can have answered: each of them looks once in this time."""
        return self.quiet_s / LOOKS_PER_QUIET + min(ANSWER_S, self.quiet_s)

    def _gather(self, store: dist.Store, episode: str) -> list[Standing]:
        """What the ranks say within the time that they have for it."""
        standings = []
        deadline = time.monotonic() + self._patience_s
        for rank in range(dist.get_world_size()):
            text = _wait_for(store, f"{episode}/{rank}", deadline - time.monotonic(), self._stop)
            if text:
                standings.append(Standing.from_json(text))
        return standings


def _wait_for(store: dist.Store, key: str, limit_s: float, stop: threading.Event) -> str:
    """The value of a key, once it is there; "" after the limit."""
    deadline = time.monotonic() + limit_s
    while True:
        if store.check([key]):
            return store.get(key).decode()
        if time.monotonic() >= deadline or stop.wait(0.05):
            return ""
