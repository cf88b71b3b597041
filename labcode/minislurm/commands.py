"""Processes of this machine: run a command to its end, wait for a condition, end a command."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

_GRACE_S = 2.0  # what a command has between the signal to end and being killed
_POLL_S = 0.01


def run(
    command: Sequence[str],
    what: str,
    timeout_s: float,
    input: str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and take its output; if interrupted or late, it is ended.

    Args:
        command: Program and arguments.
        what: What to call it in an error.
        timeout_s: Time it may take.
        input: Text for its standard input.
        env: Environment of the command; None for that of this process.

    Raises:
        TimeoutError: The time is over.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env,
        # No terminal: Ctrl-C reaches this process alone, which then ends the command.
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(input, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(process)
        raise TimeoutError(f"{what} did not end within {timeout_s:g} s") from None
    except BaseException:
        _end(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _end(process: subprocess.Popen[str]) -> None:
    """End a command on a host: tini passes the signal on; a process that ignores it is killed."""
    # Before the signal: once its parent is gone, a process can no longer be found through it.
    family = children(process.pid, recursive=True)
    process.terminate()
    try:
        process.communicate(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.communicate()


def wait(true: Callable[[], object], seconds: float, otherwise: Callable[[], str]) -> None:
    """Return as soon as `true()` is true.

    Raises:
        RuntimeError: It is still false after `seconds`; `otherwise()` says what was found.
    """
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise RuntimeError(otherwise())
        time.sleep(_POLL_S)


def children(pid: int, recursive: bool = False) -> list[psutil.Process]:
    """The processes that `pid` has started, and with `recursive` those that they have started."""
    try:
        return psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not yet fetched by its parent does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
