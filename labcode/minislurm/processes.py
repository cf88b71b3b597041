"""Processes of this machine: run one to its end, wait for something to become true, find out who is whose child."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path


def run(
    command, what: str, timeout_s: float, input: str | None = None, env=None
) -> subprocess.CompletedProcess:
    """Run a command to its end and take its output; interrupted or late, it is ended.

    Args:
        command: Program and arguments.
        what: How to call it in an error.
        timeout_s: Time it may take.
        input: Text for its standard input.
        env: Its environment; None for that of this process.

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
        start_new_session=True,  # no terminal: Ctrl-C reaches this process, which ends the command
    )
    try:
        out, err = process.communicate(input, timeout=timeout_s)
    except BaseException as error:
        _end(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"{what} did not end within {timeout_s:g} s") from None
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _end(process):
    """End a command on a host: tini passes the signal on; what does not listen is killed."""
    family = below(process.pid)
    process.terminate()
    try:
        process.communicate(timeout=2)
    except subprocess.TimeoutExpired:
        for member in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        process.communicate()


def wait(true, seconds: float, otherwise) -> None:
    """Return as soon as `true()` is true.

    Raises:
        RuntimeError: It is still false after `seconds`; `otherwise()` says what was found.
    """
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise RuntimeError(otherwise())
        time.sleep(0.01)


def parents() -> dict[int, int]:
    """`{pid: pid of its parent}` of all processes that can be seen."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return found


def below(pid: int) -> list[int]:
    """The processes that `pid` started, and those that they started."""
    family, tree = [pid], parents()
    for member in family:
        family += [child for child, parent in tree.items() if parent == member]
    return family[1:]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet fetched by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False
