"""Processes that are forked from one which has imported what they need, in hundredths of a second.

    server = ForkServer(["torch", "course.pool.engine"], folder)
    child = server.start("course.pool.engine:main", rank, n, fds=[channel], log=path)
    child.poll()                  # as of a `subprocess.Popen`

`import torch` takes seconds, on each core that does it. The server does it once, in a process of
its own that has never computed anything and has no threads, and every request is a fork of it. It
lives as long as somebody holds the `ForkServer`; when its owner ends, however it ends, it ends its
children, removes its folder and ends as well.

    owner       ->  server   one byte, with descriptors: status, task, log, those of the caller
    server      ->  owner    over "status": the number of the process, and in the end its exit code
    owner       ->  child    over "task": the function, its arguments, the environment

macOS does not promise that a program can be forked once it has loaded frameworks, so there each
child is a Python of its own, which takes longer and is the same in all else.

Held by: tests/unit/test_fork_server.py
"""

import contextlib
import gc
import importlib
import os
import pickle
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from labcode.runtime import processes

LOOK_S = 1.0  # between two looks whether the owner is still there
NUMBER = struct.Struct("q")  # of a process, or its exit code
MOST_FDS = 16  # of a request
FORKS = sys.platform == "linux"


class Child:
    """A process of a `ForkServer`, with the methods of `subprocess.Popen`.

    Args:
        status: Channel over which the server says what becomes of it.
    """

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self._lock = threading.RLock()  # of several threads that ask, one takes the word
        self._pid: int | None = None
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Its number; waits until it is there.

        Raises:
            RuntimeError: The server ended before it could make it.
        """
        with self._lock:
            if self._pid is None:
                self._pid = self._word()
            if self._pid is None:
                raise RuntimeError("the process that starts the others has ended")
            return self._pid

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        with self._lock:
            # one look for each word: the number may come while the exit code is looked for
            while self.returncode is None and self._has_word(0):
                word = self._word()
                if word is None:  # the server has ended, and its children with it
                    self.returncode = -signal.SIGKILL
                elif self._pid is None:
                    self._pid = word
                else:
                    self.returncode = word
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            code = self.poll()
            if code is not None:
                return code
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self._has_word(left_s)

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing happens if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _has_word(self, timeout: float | None) -> bool:
        return bool(select.select([self._status], [], [], timeout)[0])

    def _word(self) -> int | None:
        data = b""
        while len(data) < NUMBER.size:
            part = self._status.recv(NUMBER.size - len(data))
            if not part:
                return None
            data += part
        return NUMBER.unpack(data)[0]


class ForkServer:
    """A process that has imported modules, and forks.

    Args:
        preload: Modules to import before the first fork.
        folder: Folder that goes with the server; it exists.
        env: The variables of the server; None: those of this process.
        forks: Whether children are forks; False: each imports for itself.
    """

    def __init__(
        self,
        preload: Sequence[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        forks: bool = FORKS,
    ) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._control, theirs = socket.socketpair()
        words = [str(theirs.fileno()), str(folder)]
        words += ["fork", *preload] if forks else ["spawn"]
        with theirs, open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "course.pool.fork_server", *words],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=env,
            )
        self.close = weakref.finalize(self, _close, self._control, self._process, self._owner)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def is_there(self) -> bool:
        """Whether it can be asked: it runs, and this process has started it."""
        return self._owner == os.getpid() and self._process.poll() is None

    @property
    def _log(self) -> Path:
        return self.folder / "server.log"

    def start(
        self,
        target: str,
        *args: Any,
        log: Path,
        fds: Sequence[int] = (),
        env: Mapping[str, str | None] | None = None,
    ) -> Child:
        """Start a process; returns before it is there.

        Args:
            target: "module:function", called with the descriptors and `args`. An int that it
                returns is the exit code.
            args: What can be pickled.
            log: A file for its stdout and stderr.
            fds: Descriptors of this process that it gets, under other numbers.
            env: Variables that differ from those of the server; None removes one.

        Raises:
            RuntimeError: The server has ended; with its last words.
        """
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe()
        with theirs, open(log, "ab") as file, self._lock:
            try:
                passed = [theirs.fileno(), reader, file.fileno(), *fds]
                socket.send_fds(self._control, [b"f"], passed)
            except OSError:
                os.close(writer)
                ours.close()
                raise RuntimeError(self._last_words()) from None
            finally:
                os.close(reader)
        task = (target, args, dict(env or {}), list(sys.path), os.getcwd())
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(task, pipe)
        return Child(ours)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"the process that starts the others has ended: {lines[-1] if lines else ''}"


def _close(control: socket.socket, process: subprocess.Popen, owner: int) -> None:
    """End a server, as the end of its owner does; nothing in a fork of the owner."""
    if os.getpid() == owner:
        control.close()
        process.wait()


# ---- in the server


class _Server:
    """Starts children when asked, until its owner ends.

    Args:
        control: Channel over which requests come.
        start: `_forked` or `_spawned`.
    """

    def __init__(self, control: socket.socket, start: Callable[..., int]) -> None:
        self.control = control
        self.start = start
        self.children: dict[int, socket.socket] = {}  # whom to tell what becomes of each
        self.wake, self.signalled = os.pipe()

    def serve(self) -> None:
        """Until the owner ends."""
        os.set_blocking(self.signalled, False)
        signal.set_wakeup_fd(self.signalled)
        signal.signal(signal.SIGCHLD, _note)
        owner = os.getppid()
        while os.getppid() == owner:
            ready, _, _ = select.select([self.control, self.wake], [], [], LOOK_S)
            if self.wake in ready:
                os.read(self.wake, 4096)
                self._reap()
            if self.control in ready and not self._take_request():
                return

    def _take_request(self) -> bool:
        """Start a child; False if the owner has gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self.control, 1, MOST_FDS)
        except ConnectionError:
            return False
        if not data:
            return False
        status, task, log, *rest = fds
        not_its = [self.control.fileno(), self.wake, self.signalled, status]
        not_its += [other.fileno() for other in self.children.values()]
        pid = self.start(task, log, rest, not_its)
        self.children[pid] = socket.socket(fileno=status)
        with contextlib.suppress(OSError):
            self.children[pid].sendall(NUMBER.pack(pid))
        for descriptor in (task, log, *rest):
            os.close(descriptor)
        return True

    def _reap(self) -> None:
        """Say of each child that has ended how it did."""
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self.children.pop(pid) as told, contextlib.suppress(OSError):
                told.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def serve(control: socket.socket, folder: str, way: str, *preload: str) -> None:
    """Be a server until the owner ends; then end all children and remove the folder.

    Args:
        control: Channel over which requests come.
        folder: Folder that goes with the server.
        way: "fork" or "spawn".
        preload: Names of modules.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # whatever the thread that starts it had blocked
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # a module that asks for GPUs as it is imported must not start CUDA: no fork could use it then
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for module in preload:
        importlib.import_module(module)
    gc.freeze()  # or a collection in each child would copy what all of them share
    try:
        _Server(control, _forked if way == "fork" else _spawned).serve()
    finally:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _note(_number: int, _frame: object) -> None:
    """Signals wake `select`; there is nothing else to do."""


def _forked(task: int, log: int, fds: Sequence[int], not_its: Sequence[int]) -> int:
    """Start a child that is a fork of this process; returns its number."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor in not_its:
            os.close(descriptor)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        code = run_child(server, task, fds)
    finally:
        os._exit(code)  # nothing of the server's comes after it


def _spawned(task: int, log: int, fds: Sequence[int], _not_its: Sequence[int]) -> int:
    """Start a child that is a Python of its own; returns its number."""
    words = [str(number) for number in (os.getpid(), task, *fds)]
    command = [sys.executable, "-m", "course.pool.fork_server", "child", *words]
    for descriptor in (task, *fds):
        os.set_inheritable(descriptor, True)
    to_log = [(os.POSIX_SPAWN_DUP2, log, stream) for stream in (1, 2)]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=to_log)


def run_child(server: int, task: int, fds: Sequence[int]) -> int:
    """What a child does; returns its exit code."""
    os.setsid()
    if FORKS:  # without a thread: a process that has one enters no namespaces
        processes.end_at_once_with_parent(server)
    else:
        processes.end_with_parents(parent=server)
    try:
        with os.fdopen(task, "rb") as pipe:
            target, args, env, path, folder = pickle.load(pipe)
        for name, value in env.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        sys.path[:] = path
        os.chdir(folder)
        _draw_anew()
        module, _, name = target.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function(*fds, *args) or 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _draw_anew() -> None:
    """Forks would all draw the same numbers where they set no seed, as processes do not."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _main(words: Sequence[str]) -> int:
    if words[0] == "child":
        server, task, *fds = map(int, words[1:])
        return run_child(server, task, fds)
    number, *rest = words
    serve(socket.socket(fileno=int(number)), *rest)
    return 0


if __name__ == "__main__":
    # the module that others import, not this copy of it
    from course.pool import fork_server

    sys.exit(fork_server._main(sys.argv[1:]))
