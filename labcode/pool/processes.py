"""The processes behind a ranks pool: one ipyparallel controller and n engines."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipyparallel

from labcode import processes
from labcode.pool import family, record

CLOSE_S = 5.0  # how long the connections to the engines may take to close


class Processes:
    """A controller and `n` engines; they end when this process does, however it ends.

    Args:
        n: Number of engines.
        start_timeout_s: How long they may take to start.
        sees_gpus: The engines may use GPUs.
    """

    def __init__(self, n: int, start_timeout_s: int = 120, sees_gpus: bool = False) -> None:
        self.n = n
        self.sees_gpus = sees_gpus
        self.start_timeout_s = start_timeout_s
        self.owner = os.getpid()
        self.folder = Path(tempfile.mkdtemp(prefix="labcode-ranks-"))
        self.killed = False
        self.client: ipyparallel.Client | None = None
        self.names = ["controller of the pool"]
        self.names += [f"process of rank {rank}" for rank in range(n)]
        self.processes: list[subprocess.Popen] = []
        try:
            record.create(self.folder, n)
            self.record = record.Record(self.folder, n)
            self.processes.append(self._spawn("controller"))
            for rank in range(n):
                self.processes.append(self._spawn("engine", str(rank)))
            family.write(self.folder, [process.pid for process in self.processes])
        except BaseException:
            self.kill()
            raise

    def _spawn(self, role: str, *rank: str) -> subprocess.Popen:
        # This process's number: it may have ended before the engine can ask who its parent is.
        arguments = [role, str(self.folder), str(os.getpid()), *rank]
        command = [sys.executable, "-m", "labcode.pool.engine", *arguments]
        variables = []
        if self.n > 1:
            variables.append("OMP_NUM_THREADS=1")  # several ranks share the cores
        if not self.sees_gpus:
            variables.append("CUDA_VISIBLE_DEVICES=")
        # `env` is replaced by the engine, so that no process comes between.
        command = ["env", *variables, *command]
        with open(self._log(len(self.processes)), "wb") as log:
            # A session of its own: Ctrl-C in a terminal and the interrupt of a notebook reach the
            # parent only.
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    def _log(self, index: int) -> Path:
        return self.folder / f"process-{index}.log"

    def connect(self) -> ipyparallel.Client:
        """A client, once every engine has registered; it is closed with the processes.

        Raises:
            RuntimeError: A process died, or not all of them were ready in time.
        """
        deadline = time.monotonic() + self.start_timeout_s
        info = self._wait_for(self._connection_info, deadline)
        client = ipyparallel.Client(
            info, profile_dir=str(self.folder), timeout=self.start_timeout_s
        )
        self.client = client
        self._wait_for(lambda: len(client.ids) == self.n, deadline)
        return client

    def _connection_info(self) -> dict[str, Any] | None:
        path = self.folder / "security" / "ipcontroller-client.json"
        with contextlib.suppress(OSError, ValueError):  # not there yet, or half written
            return json.loads(path.read_text())
        return None

    def _wait_for(self, condition: Callable[[], Any], deadline: float) -> Any:
        """What `condition()` returns, as soon as that is true."""
        while True:
            value = condition()
            if value:
                return value
            death = self.death()
            if death:
                raise RuntimeError(f"the pool of ranks did not start: {death}{self._last_words()}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the pool of ranks did not start: not ready after {self.start_timeout_s} s"
                )
            time.sleep(0.02)

    def _last_words(self) -> str:
        """The last line that the first dead process wrote."""
        for index, process in enumerate(self.processes):
            if process.poll() is not None:
                lines = self._log(index).read_text(errors="replace").strip().splitlines()
                return f": {lines[-1]}" if lines else ""
        return ""

    def death(self) -> str | None:
        """What died: "process of rank 2 died (killed by signal 9)"; None while all live."""
        for name, process in zip(self.names, self.processes):
            code = process.poll()
            if code is not None:
                return f"{name} died ({_reason(code)})"
        return None

    def why(self) -> str:
        """What the ranks called before one of them died: ": rank 0 called ..."; "" is not known."""
        mismatch = self.record.mismatch()
        if mismatch:
            return f": {mismatch}"
        for rank, process in enumerate(self.processes[1:]):
            last = self.record.last(rank)
            if process.poll() == -signal.SIGABRT and last is not None:
                return f": the last that it called is {last}"
        return ""

    def break_off(self, group: int) -> None:
        """Tell every engine to end whatever it does in process group number `group`."""
        for process in self.processes[1:]:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write(b"%d\n" % group)
                process.stdin.flush()

    def kill(self) -> None:
        """End all processes at once and remove their files.

        It does nothing the second time, or in a fork of the owner.
        """
        if self.killed or os.getpid() != self.owner:
            return
        self.killed = True
        processes.end(self.processes)
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        if self.client:
            self._close(self.client)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _close(self, client: ipyparallel.Client) -> None:
        """Close the client; go on without it if one of its threads does not end.

        `close` waits for that thread without a limit. An interrupt at a bad moment, outside of a
        turn, can leave a lock behind for which it waits for ever.
        """

        def close() -> None:
            with contextlib.suppress(Exception):
                client.close(linger=0)

        closing = threading.Thread(target=close, name="close the client of a pool", daemon=True)
        try:
            closing.start()
        except RuntimeError:  # at the end of the program no thread can be started any more
            close()
        else:
            closing.join(CLOSE_S)


def _reason(code: int) -> str:
    """How a process ended: "killed by signal 9", "exit code 3"."""
    if code == -signal.SIGTERM:
        return "told to end by SIGTERM"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
