"""How an engine of a ranks pool stops.

Its own failure frees the ranks that wait for it, and an order of the pool breaks off its work.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

import psutil

from labcode.pool import family

MAX_TEXT = 4000  # characters of an error's message; a data set in it helps nobody
CALLED_EXIT = "exit()"  # in place of the name of an error: the message is the exit code


class CellFailed(Exception):
    """Carries a failure, as JSON, in the reply to a %%px cell."""


class EngineState:
    """What this engine is doing; one per process, never shipped.

    Attributes:
        rank: This engine's rank.
        group: Number of the process group in use; an order to break off an older one is stale.
        busy: In a call or a cell: only then may an interrupt be raised.
        folder: Of the pool.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.group = 0
        self.busy = False
        self.folder = ""
        self._lock = threading.Lock()

    def enter_group(self, group: int) -> None:
        """Before the first connection of a group: orders to break off older ones are stale now."""
        with self._lock:
            self.group = group

    def begin(self) -> None:
        """A call or a cell begins: from here on it may be interrupted."""
        with self._lock:
            self.busy = True

    def finish(self) -> None:
        """It ends: no interrupt comes from here on, so that the reply is not lost."""
        while self.busy:
            with contextlib.suppress(KeyboardInterrupt), self._lock:
                self.busy = False
        # ipykernel puts its own handler back for the next cell. Setting one raises an interrupt
        # that is pending.
        with contextlib.suppress(KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def break_off(self, group: int) -> None:
        """End what this rank does in process group number `group`.

        The interrupt comes before the cut: gloo sometimes hangs when a connection closes at the
            very moment of a send.
        """
        with self._lock:
            if self.busy and group == self.group:
                main_thread = threading.main_thread().ident
                assert main_thread is not None
                signal.pthread_kill(
                    main_thread, signal.SIGINT
                )  # for a rank that computes or sleeps
        time.sleep(0.3)
        with self._lock:
            if group == self.group:
                self.cut()  # for a rank that waits for another

    def fail(self, error: BaseException) -> dict[str, Any]:
        """Free the ranks that wait for this one; returns the exception as plain data.

        The time in it tells the first failure from those that it causes on other ranks.
        """
        failed_at = time.monotonic()
        message = text_of(error)
        if "Timed out" in message:
            time.sleep(0.5)  # those who wait for the same rank time out as well: let them say so
        self.before_cut()
        self.cut()
        frames = []
        for frame in traceback.extract_tb(error.__traceback__):
            if "/labcode/pool/" not in frame.filename and "/IPython/" not in frame.filename:
                frames.append((frame.filename, frame.lineno, frame.name, frame.line))
        name = type(error).__name__
        if isinstance(error, SystemExit) and not isinstance(error.code, str):
            name = CALLED_EXIT
            message = "" if error.code is None else text_of(error)
        return {
            "time": failed_at,
            "rank": self.rank,
            "error": name,
            "message": message,
            "frames": frames,
        }

    def before_cut(self) -> None:
        """What is to be done after a failure, before the other ranks notice it."""

    def cut(self) -> None:
        """Close the connections to the other ranks: every wait on them ends with an error at once.

        Those to a database of the user's, or to the pool, stay: at their other end is no rank.
        destroy_process_group does not do it: gloo's connections stay while anything (a traceback, a
        model) refers to a group.

        Held by: tests/ranks/test_pool_faults.py::
            test_a_failure_leaves_the_connections_of_the_user_open
        """
        ports = family.ports_of_ranks(self.folder)
        for link in psutil.Process().net_connections("tcp"):
            if _is_local(link) and link.raddr.port in ports:
                _shut(link)
        if "torch" in sys.modules:
            from torch.distributed import distributed_c10d

            for group in list(distributed_c10d._world.pg_map):
                with contextlib.suppress(Exception):
                    group.abort()  # frees a rank that waits in NCCL; gloo ignores it


def text_of(error: BaseException) -> str:
    """The message of an error, cut in its middle if it is long.

    `__str__` may be the user's and raise whatever it likes, also what is no Exception.
    """
    try:
        text = str(error)
    except BaseException as broken:
        return f"<no message: its __str__ raised {type(broken).__name__}>"
    left_out = len(text) - MAX_TEXT
    if left_out <= 0:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]} ... [{left_out} characters left out] ... {text[-half:]}"


def _is_local(link: Any) -> bool:
    """Whether a connection goes to this machine and is open."""
    if not link.raddr or link.status != "ESTABLISHED":
        return False
    return link.raddr.ip == link.laddr.ip


def _shut(link: Any) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link.fd)) as twin:
        # The file number may belong to another connection by now.
        if twin.getpeername()[1] == link.raddr.port:
            twin.shutdown(socket.SHUT_RDWR)


def as_cell_failure(failure: dict[str, Any]) -> CellFailed:
    """A failure in the form in which it travels in the reply to a %%px cell."""
    return CellFailed(json.dumps(failure))


def from_cell_failure(text: str) -> dict[str, Any]:
    """The failure in the text of a `CellFailed`."""
    return json.loads(text)
