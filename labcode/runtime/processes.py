"""Families of processes: end one, or end with one's parents.

The launcher, the pool and local jobs share this one way.

`python -m labcode.runtime.processes [--remove FOLDER] SUPERVISOR MODULE ARGS` runs a module that
ends with the process that started it, and with the process of number SUPERVISOR; before such an end
it removes FOLDER.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Protocol

import psutil

GRACE_S = 5.0  # how long processes may take to end after a signal, before they are killed
CHECK_S = 1.0  # between two looks whether the parents are still there
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Started(Protocol):
    """A process that was started here: a `subprocess.Popen`, or one like it."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        ...

    def send_signal(self, number: int, /) -> None:
        """Send it a signal, unless it has ended."""
        ...


class Ending:
    """A process that ends in one moment when its work is done; made before other modules are
    imported.

    At its end Python takes its modules apart while threads of torch and gloo still run. One that
    is touched by it in that moment aborts the process ("terminate called without an active
    exception", seen on a busy machine), and a job whose results are all written counts as failed.
    With a code, the process ends before that, after all handlers of `atexit`: those that are
    registered later than this one run earlier. What was written to files that are still open is
    in them then. After an error, which has no code, Python ends as it always does.

    Held by: tests/unit/test_processes.py::
        test_a_process_that_has_done_its_work_ends_before_anything_can_abort_it
    """

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._end)

    def with_code(self, code: int) -> int:
        """The exit code of this process, for `sys.exit`."""
        self._code = code
        return code

    def _end(self) -> None:
        if self._code is None:
            return
        for stream in (*_open_files(), sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # its reader has gone
                stream.flush()
        os._exit(self._code)


def _open_files() -> list[IO]:
    """The file objects of this process that may hold something which is not written yet."""
    found = []
    for thing in gc.get_objects():
        # by its own type: an object of somebody else's may answer isinstance() with anything
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            found.append(thing)
    return found


def family(pids: Iterable[int]) -> list[psutil.Process]:
    """Some processes and all below them; those that have ended are left out."""
    members: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            members.append(process)
            members.extend(process.children(recursive=True))
    return members


def alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie, which only waits for its parent to look, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(
    processes: Sequence[Started],
    ask: signal.Signals | None = None,
    grace_s: float | None = None,
) -> None:
    """End processes and all below them, and return when they have ended.

    The family is looked up, because a signal to a process group does not reach all: ranks lead
        sessions of their own.

    Args:
        processes: Each was started with `start_new_session=True`.
        ask: A signal that tells the processes to end by themselves first, so that ranks may close
            their files; torchrun passes it on. None kills at once.
        grace_s: How long they may take then; None is `GRACE_S`.
    """
    running = _running(processes)
    members = family(running)  # looked up now, before children lose their parents
    try:
        if ask is not None:
            _ask(processes, ask, GRACE_S if grace_s is None else grace_s)
    finally:
        # Again, for what was started meanwhile.
        members += family(_running(processes))
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        for process in processes:
            # Children of a process that died before: they are no longer below it, but still in its
            # process group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()


def _running(processes: Sequence[Started]) -> list[int]:
    """The numbers of those that have not ended."""
    pids = []
    for process in processes:
        if process.poll() is None:
            pids.append(process.pid)
    return pids


def _ask(processes: Sequence[Started], ask: signal.Signals, grace_s: float) -> None:
    """Send a signal to some processes and give them time to obey it."""
    for process in processes:
        process.send_signal(ask)  # which does nothing where the process has ended
    deadline = time.monotonic() + grace_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))


def end_with_parents(
    *others: int,
    before_end: Callable[[], object] | None = None,
    at_once: bool = False,
    parent: int | None = None,
) -> None:
    """From now on this process ends when its parent ends, or one of `others`, even by SIGKILL.

    It ends by SIGKILL together with all that it started. If one of `others` ends before the parent,
    the parent is killed as well: it is torchrun then, whose launcher is gone, and which may wait
    for minutes for agents that never come.

    A thread looks each second. A process that is stopped (SIGSTOP) cannot look, and would stay for
    ever: with `at_once` the kernel ends it, on Linux, in the moment in which its parent ends. But
    the kernel takes the end of the *thread* that started this process for that of its parent
    (prctl(2), PR_SET_PDEATHSIG), and a notebook or a test may start processes from any thread. So
    that is for parents of whom it is known that their main thread starts processes, as torchrun
    does; and it is an addition, because it reaches neither `others` nor what this process has
    started itself.

    Args:
        others: Numbers of further processes, such as the one that started the parent.
        before_end: Called before the end; not if the kernel is faster. Others of the family may end
            this process in the middle of it: files are removed with `remove_from_outside`.
        at_once: The main thread of the parent started this process.
        parent: Number of the process that started this one, where that was asked earlier: it may
            have ended since, while this process imported torch. None asks now.

    Held by: tests/unit/test_processes.py
    """
    parent = parent or os.getppid()
    if at_once and sys.platform == "linux":
        end_at_once_with_parent(parent)
    watch = threading.Thread(target=_watch, args=(parent, others, before_end), daemon=True)
    watch.start()


def end_at_once_with_parent(parent: int) -> None:
    """From now on the kernel ends this process in the moment in which its parent ends; Linux only.

    Args:
        parent: Number of the process that started this one, by its main thread; it may have ended
            since.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int, others: Sequence[int], before_end: Callable[[], object] | None) -> None:
    watched = []
    for pid in others:
        with contextlib.suppress(psutil.NoSuchProcess):
            watched.append(psutil.Process(pid))
    all_there = len(watched) == len(others)
    while all_there and os.getppid() == parent:
        time.sleep(CHECK_S)
        all_there = all(alive(process) for process in watched)
    try:
        if before_end is not None:
            before_end()
    finally:
        _end_own_family(parent)


def remove_from_outside(folder: str | Path) -> None:
    """Remove a folder by a process that belongs to no family, and return at once.

    The processes of a family that has lost its parent end each other within a second. One of them
    that removed the folder itself would be ended in the middle of it. The shell below is nobody's
    child: the one that started it has ended when this returns. It removes the folder for some
    seconds, because others may still write to it.

    Held by: tests/unit/test_processes.py::
        test_a_folder_is_removed_although_the_process_that_wants_it_is_ended
    """
    remove = '(for _ in 1 2 3 4 5; do rm -rf -- "$1"; sleep 1; done) &'
    subprocess.run(
        ["sh", "-c", remove, "sh", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
    )


def _end_own_family(parent: int) -> None:
    doomed = psutil.Process().children(recursive=True)
    if os.getppid() == parent:
        with contextlib.suppress(psutil.NoSuchProcess):
            doomed.append(psutil.Process(parent))
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    # The leader of a process group takes along those that lost their parents. A process that shares
    # its group, with a shell or a pipeline of commands, must not end those.
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _main(arguments: Sequence[str]) -> None:
    """Run a module as `__main__`, in a process that ends with its parent and a supervisor."""
    rest = list(arguments)
    before_end = None
    if rest[0] == "--remove":
        before_end = functools.partial(remove_from_outside, rest[1])
        del rest[:2]
    supervisor, module, *rest = rest
    end_with_parents(int(supervisor), before_end=before_end)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
