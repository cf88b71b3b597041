"""The processes of a pool know one another, so that those that still run can end the rest."""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

SAME_START_S = 2.0  # the time of a start is reckoned from that of the machine, which is adjusted
_FILE = "processes.json"


def write(folder: str | Path, pids: Iterable[int]) -> None:
    """Write down the processes of a pool, the controller first, with the time of their start:
    numbers are used again.
    """
    started = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            started[pid] = psutil.Process(pid).create_time()
    Path(folder, _FILE).write_text(json.dumps(started))


def read(folder: str | Path) -> dict[int, float]:
    """The processes of a pool and when each was started; none if the folder is gone."""
    with contextlib.suppress(OSError, ValueError):
        return {int(pid): at for pid, at in json.loads(Path(folder, _FILE).read_text()).items()}
    return {}


def ports_of_ranks(folder: str | Path) -> set[int]:
    """The ports of this machine at which the ranks of a pool have a socket, open or listening."""
    ports = set()
    for pid in list(read(folder))[1:]:
        with contextlib.suppress(psutil.Error):  # it has died, and its connections with it
            links = psutil.Process(pid).net_connections("tcp")
            ports.update(link.laddr.port for link in links if link.laddr)
    return ports


def kill_others(members: Mapping[int, float]) -> None:
    """Kill the other processes of the pool and what they have started, whatever state they are in.

    Args:
        members: What `read` returned.

    Held by: tests/ranks/test_pool_faults.py::test_a_stopped_engine_ends_with_its_owner
    """
    for pid, created in members.items():
        if pid != os.getpid():
            _kill(pid, created)


def _kill(pid: int, created: float) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if abs(process.create_time() - created) > SAME_START_S:
            return
        for member in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
