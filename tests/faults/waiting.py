"""Waiting in tests: the one place where they sleep until something is true, or take a port."""

import atexit
import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HANG_S = 120.0  # a test that hangs; not for a busy machine, which needs seconds


def until(true: Callable[[], object], within_s: float = HANG_S, every_s: float = 0.02) -> None:
    """Wait until something is true.

    Args:
        true: Asked again and again.
        within_s: Time after which the test fails.
        every_s: Between two questions.
    """
    assert comes(true, within_s, every_s), "it did not become true"


def comes(true: Callable[[], object], within_s: float, every_s: float = 0.02) -> bool:
    """Whether something becomes true in time, for those who go on in either case."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def pause(seconds: float) -> None:
    """Let time pass, where the moment itself is drawn by a test, and decides nothing."""
    time.sleep(seconds)


# Below those that the system hands out by itself (ip(7), ip_local_port_range), so that no
# connection of another program takes one between here and the moment in which it is opened.
PORTS = range(10_000, 20_000)
_locks: dict[int, int] = {}


def free_port() -> int:
    """A port of this machine that nobody listens at, and no other test asks for.

    It is this process's until it ends: a lock says so to the tests of other processes.
    """
    folder = Path(tempfile.gettempdir()) / "labcode-test-ports"
    folder.mkdir(exist_ok=True)
    for step in range(len(PORTS)):
        port = PORTS[(os.getpid() * 37 + step) % len(PORTS)]
        if port not in _locks and _is_ours(folder / str(port), port):
            return port
    raise RuntimeError("no port is free")


def _is_ours(lock: Path, port: int) -> bool:
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        os.close(descriptor)
        return False
    _locks[port] = descriptor
    return True


@atexit.register
def _give_back() -> None:
    for descriptor in _locks.values():
        os.close(descriptor)
