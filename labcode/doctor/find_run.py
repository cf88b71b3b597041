"""From what a user knows of a job to its run, and from a run to its processes on this machine.

    nothing        the one run below runs/ whose lock is held
    a folder       that run
    a number       a process: a rank, or the torchrun above some; else a job of SLURM

A run holds RUN/run.lock open as long as it lives, and says there who it is.

Held by: tests/unit/test_find_run.py
"""

import contextlib
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from labcode.runtime.files import LOCK_NAME, is_held
from labcode.runtime.place import Place
from labcode.slurm.run.client import Client, SlurmError

RUNS = "runs"


def find_run(target: str | None, here: Path) -> Path:
    """The folder of a run that is going on.

    Args:
        target: A folder, a process, or a job of SLURM; None: the run that goes on here.
        here: Folder below which `runs/` lies.

    Raises:
        ValueError: There is none, or more than one; the message says what to give instead.
    """
    if target is None:
        return _only(held_runs(here / RUNS), f"in {here / RUNS}")
    folder = Path(target)
    if folder.is_dir():
        if not is_held(folder):
            raise ValueError(f"{folder}: no process holds this run; it has ended, or is no run")
        return folder
    if not re.fullmatch("[0-9]{1,9}", target):
        going = ", ".join(str(run) for run in held_runs(here / RUNS))
        raise ValueError(
            f"{target} is no folder, no process and no job: give the folder of a run that goes on"
            f"{': ' + going if going else f', and none does in {here / RUNS}'}"
        )
    found = set(runs_of_process(int(target)))
    if found:
        return _only(found, f"of process {target}")
    return _only(set(runs_of_job(target)), f"of process or job {target}")


def held_runs(runs: Path) -> list[Path]:
    """The runs in a folder that processes hold."""
    return [lock.parent for lock in sorted(runs.glob(f"*/{LOCK_NAME}")) if is_held(lock.parent)]


def runs_of_process(pid: int) -> Iterator[Path]:
    """The runs that a process, one below it, or one beside it holds.

    Rank 0 alone holds the lock; the ranks of a node are children of one torchrun.

    Args:
        pid: Number of the process on this machine.
    """
    from labcode.runtime.bootstrap import place_of_process  # which needs torch: mistakes come first

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        parent = process.parent()
        near = [process, *process.children(recursive=True)]
        own = list(_held_by(near))
        if not own and parent is not None and place_of_process(pid) is not None:
            own = list(_held_by(parent.children()))
        yield from own


def runs_of_job(number: str) -> Iterator[Path]:
    """The runs below the working folder of a job of SLURM that say that they belong to it.

    Args:
        number: Number of the job.

    Raises:
        ValueError: SLURM knows no such job, or does not answer.
    """
    try:
        client = Client.find()
        if client is None:
            return
        folder = Path(client.job(number).fields["WorkDir"])
    except SlurmError as error:
        raise ValueError(f"{number} is no process with a run here, and {error}") from None
    for run in held_runs(folder / RUNS):
        if f", job {number}," in (run / LOCK_NAME).read_text(errors="replace"):
            yield run


def processes_of(run: Path, known: Iterable[int]) -> dict[int, psutil.Process]:
    """{rank: its process on this machine}, by the variables with which each was started.

    Args:
        run: Folder of the run, whose holder is one of them.
        known: Numbers of others on this machine.
    """
    from labcode.runtime.bootstrap import place_of_process

    holder = _holder(run)
    pids = [*known, *([holder] if holder else [])]
    places = [place for place in map(place_of_process, pids) if place is not None]
    if not places:
        return {0: psutil.Process(holder)} if holder else {}
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["create_time"]):
        place = place_of_process(process.pid)
        if place is None or not _is_of_job(place, places[0]) or not _is_python(process):
            continue
        # its DataLoader workers have the same variables, and are younger
        other = found.setdefault(place.rank, process)
        if process.info["create_time"] < other.info["create_time"]:
            found[place.rank] = process
    return found


def _holder(run: Path) -> int | None:
    """The process on this machine that holds a run, as it has written into the lock."""
    with contextlib.suppress(OSError):
        text = (run / LOCK_NAME).read_text(errors="replace")
        holder = re.match(r"process (\d+) on ([^,]+)", text)
        if holder and holder[2] == socket.gethostname() and psutil.pid_exists(int(holder[1])):
            return int(holder[1])
    return None


def _is_of_job(place: Place, other: Place) -> bool:
    return (place.address, place.world_size) == (other.address, other.world_size)


def _is_python(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.name().startswith("python")
    return False


def _held_by(processes: Iterable[psutil.Process]) -> Iterator[Path]:
    """The folders whose lock some processes have open."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for file in process.open_files():
                path = Path(file.path)
                if path.name == LOCK_NAME:
                    yield path.parent


def _only(runs: Iterable[Path], where: str) -> Path:
    found = sorted(runs)
    if not found:
        raise ValueError(f"no run goes on {where}: give the folder of one")
    if len(found) > 1:
        names = ", ".join(str(run) for run in found)
        raise ValueError(f"{len(found)} runs go on {where}: give one of {names}")
    return found[0]
