"""The processes behind a ranks pool, and how the pool talks to them.

A request is a small message over the channel of each rank; what is large, the function with its
arguments and the results, lies in files of the pool's folder, and so does what the ranks print.
So a rank that is stopped holds up nobody who writes to it, and what a rank has printed is there
whatever becomes of the rank.
"""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import tempfile
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from course.pool import record
from course.pool.fork_server import Child, ForkServer
from labcode.runtime import processes

# What an optimizer and DDP import when they are made is here as well: once, not on each rank.
PRELOAD = ("course.pool.engine", "torch._dynamo", "torch.nn.parallel.distributed")
START_S = 120.0  # how long the ranks may take to be there and to meet

# {process: its server}; a fork has none yet. A server ends with its last pool.
_servers: "weakref.WeakValueDictionary[int, ForkServer]" = weakref.WeakValueDictionary()
_pool_numbers = itertools.count(1)


def server() -> ForkServer:
    """The process of which the ranks of all pools of this process are forks.

    It ends when nobody holds it any more.
    """
    running = _servers.get(os.getpid())
    if running is None or not running.is_there():
        folder = Path(tempfile.mkdtemp(prefix="labcode-ranks-"))
        running = ForkServer(PRELOAD, folder)
        _servers[os.getpid()] = running
    return running


class Processes:
    """`n` ranks; they end when this process does, however it ends.

    Args:
        server: Server that they are forks of.
        n: Number of ranks.
        timeout_s: How long a collective waits for a rank that does not come.
        sees_gpus: They may use GPUs.

    Raises:
        RuntimeError: They did not start, or did not meet.
    """

    def __init__(
        self, server: ForkServer, n: int, timeout_s: float, sees_gpus: bool = False
    ) -> None:
        self.n = n
        self.owner = os.getpid()
        self.answers: list[dict[str, Any]] = [{} for _ in range(n)]  # to the current request
        self.places: list[dict[str, Any]] = [{} for _ in range(n)]  # where ranks are, if asked
        self.children: list[Child] = []
        self._ended = False
        self._channels: list[Connection] = []
        self._printed: dict[Path, int] = {}  # how much of each file has been shown
        self._server = server
        self.folder = self._server.folder / f"pool-{next(_pool_numbers)}"
        self.folder.mkdir()
        try:
            record.create(self.folder, n)
            self.record = record.Record(self.folder, n)
            # open before anybody looks for it, and to nobody but this machine
            with socket.create_server(("127.0.0.1", 0)) as listener:
                for rank in range(n):
                    self._start(rank, timeout_s, listener, sees_gpus)
            self._meet()
        except BaseException:
            self.end()
            raise

    def _start(self, rank: int, timeout_s: float, listener: socket.socket, sees_gpus: bool) -> None:
        ours, theirs = socket.socketpair()
        env = {"OMP_NUM_THREADS": "1" if self.n > 1 else None}  # several ranks share the cores
        if not sees_gpus:
            env["CUDA_VISIBLE_DEVICES"] = ""
        self._channels.append(Connection(ours.detach()))
        with theirs:
            child = self._server.start(
                "course.pool.engine:main",
                *(rank, self.n, str(self.folder), timeout_s, listener.getsockname()),
                fds=[theirs.fileno(), listener.fileno()],
                log=self.folder / f"rank-{rank}.log",
                env=env,
            )
        self.children.append(child)

    def _meet(self) -> None:
        """Wait until all ranks are in one process group."""
        deadline = time.monotonic() + START_S
        while not all(self.answers):
            self.collect(0.05)
            death = self.death()
            if death:
                raise RuntimeError(f"the pool of ranks did not start: {death}{self._last_words()}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the pool of ranks did not start: not ready after {START_S:.0f} s"
                )
        for answer in self.answers:
            if "failure" in answer:
                failure = answer["failure"]
                raise RuntimeError(
                    f"the pool of ranks did not start: {failure['error']}: {failure['message']}"
                )

    def _last_words(self) -> str:
        """The last line that the first dead process wrote."""
        for rank, child in enumerate(self.children):
            if child.poll() is not None:
                log = (self.folder / f"rank-{rank}.log").read_text(errors="replace")
                lines = log.strip().splitlines()
                return f": {lines[-1]}" if lines else ""
        return ""

    # ---- requests

    def ask(self, request: Sequence[Any]) -> None:
        """Send a request to all ranks; their answers come with `collect`."""
        self.answers = [{} for _ in range(self.n)]
        for channel in self._channels:
            with contextlib.suppress(OSError):  # a rank that died is seen by `death`
                channel.send(request)

    def ask_where(self, within_s: float) -> None:
        """Fill `places` with where the ranks are that have not answered, as far as they say so."""
        self.places = [{} for _ in range(self.n)]
        asked = [rank for rank, answer in enumerate(self.answers) if not answer]
        for rank in asked:
            with contextlib.suppress(OSError):
                self._channels[rank].send(("where",))
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if all(self.places[rank] or self.answers[rank] for rank in asked):
                return
            self.collect(0.02)

    def collect(self, within_s: float) -> None:
        """Take what the ranks have sent; wait for it for so long."""
        for channel in wait(self._channels, within_s):
            assert isinstance(channel, Connection)
            rank = self._channels.index(channel)
            with contextlib.suppress(EOFError, OSError):  # `death` tells
                while channel.poll():
                    message = channel.recv()
                    kind = "places" if "where" in message else "answers"
                    getattr(self, kind)[rank] = message

    @property
    def answered(self) -> list[int]:
        """The ranks that have answered."""
        return [rank for rank, answer in enumerate(self.answers) if answer]

    @property
    def any_failed(self) -> bool:
        """Whether a rank has answered with a failure."""
        return any("failure" in answer for answer in self.answers)

    def printed(self, rank: int, name: str) -> str:
        """What a rank has printed since this was asked last.

        Args:
            rank: Rank in the pool.
            name: "out" or "err".
        """
        path = self.folder / f"{name}-{rank}"
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            file.seek(self._printed.get(path, 0))
            text = file.read()
            self._printed[path] = file.tell()
            return text.decode(errors="replace")
        return ""

    # ---- the end

    def death(self) -> str | None:
        """What died: "process of rank 2 died (killed by signal 9)"; None while all live."""
        for rank, child in enumerate(self.children):
            code = child.poll()
            if code is not None:
                return f"process of rank {rank} died ({_reason(code)})"
        return None

    def why(self) -> str:
        """What the ranks called before one of them died: ": rank 0 called ..."; "" is not known."""
        mismatch = self.record.mismatch()
        if mismatch:
            return f": {mismatch}"
        for rank, child in enumerate(self.children):
            last = self.record.last(rank)
            if child.poll() == -signal.SIGABRT and last is not None:
                return f": the last that it called is {last}"
        return ""

    def end(self) -> None:
        """End all ranks at once, with all that they have started, and remove their files.

        It does nothing the second time, or in a fork of the owner.
        """
        if self._ended or os.getpid() != self.owner:
            return
        self._ended = True
        with contextlib.suppress(RuntimeError):  # the server has ended, and its children with it
            processes.end(self.children)
        for channel in self._channels:
            channel.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _reason(code: int) -> str:
    """How a process ended: "killed by signal 9", "exit code 3"."""
    if code == -signal.SIGTERM:
        return "told to end by SIGTERM"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
