"""What each fault does to a running job. Each returns when the processes that it ends have gone."""

import contextlib
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from labcode.runtime import processes

from .. import damage, waiting
from .job import Job
from .plan import KINDS, Fault
from .slurm_job import SlurmJob

STARVED_S = 1.5
STOPPED_S = 0.1  # the longest of the bursts in which a rank is starved
STARTING_S = 3.0  # in which ranks import torch, meet and set up
QUOTA_BYTES = 16 * 1024  # beyond the largest file that is appended to
FILLER = "filler"  # takes the whole rest of a disk


def inject(fault: Fault, job: Job) -> None:
    """Let a fault happen.

    Raises:
        StuckError: What should have ended has not.
    """
    _INJECT[fault.kind](fault, job)


def _kill(fault: Fault, job: Job) -> None:
    ranks = job.ranks()
    _send(signal.SIGKILL, ranks[fault.rank : fault.rank + 1])
    job.wait_until_gone(ranks)


def _kill_all(_fault: Fault, job: Job) -> None:
    ranks = job.ranks()
    _send(signal.SIGKILL, ranks)
    job.wait_until_gone(ranks)


def _kill_saving(fault: Fault, job: Job) -> None:
    job.wait(lambda: job.is_saving() or not job.runs, pause_s=0.001)
    _kill(fault, job)


def _kill_starting(fault: Fault, job: Job) -> None:
    _kill(fault, job)
    job.wait_for_ranks()
    waiting.pause(fault.draw * STARTING_S)
    _kill(fault, job)


def _kill_torchrun(_fault: Fault, job: Job) -> None:
    ranks = job.ranks()
    job.agent.kill()
    job.agent.wait()
    job.wait_until_gone(ranks)


def _hang(fault: Fault, job: Job) -> None:
    ranks = job.ranks()
    _send(signal.SIGSTOP, ranks[fault.rank : fault.rank + 1])
    job.wait_until_gone(ranks)


def _starve(fault: Fault, job: Job) -> None:
    rng = random.Random(fault.draw)
    starved = job.ranks()[fault.rank : fault.rank + 1]
    deadline = time.monotonic() + STARVED_S
    while time.monotonic() < deadline:
        _send(signal.SIGSTOP, starved)
        waiting.pause(STOPPED_S * rng.random())
        _send(signal.SIGCONT, starved)
        waiting.pause(STOPPED_S * rng.random() / 3)


def _ask_usr1(fault: Fault, job: Job) -> None:
    _send(signal.SIGUSR1, job.ranks()[fault.rank : fault.rank + 1])
    job.wait(lambda: not job.runs)


def _ask_term(_fault: Fault, job: Job) -> None:
    ranks = job.ranks()
    job.agent.send_signal(signal.SIGTERM)
    job.wait(lambda: not job.runs)
    job.wait_until_gone(ranks)


def _damage_newest(how: Callable[[Path], object], fault: Fault, job: Job) -> None:
    _ask_usr1(fault, job)
    if job.is_finished():
        return
    newest = job.checkpoints()[-1]
    files = sorted(newest.iterdir())
    how(random.Random(fault.draw).choice(files))


def _truncate(fault: Fault, job: Job) -> None:
    _damage_newest(partial(damage.cut, fault.draw), fault, job)


def _corrupt(fault: Fault, job: Job) -> None:
    _damage_newest(partial(damage.flip, fault.draw), fault, job)


def _full_disk(_fault: Fault, job: Job) -> None:
    ranks = job.ranks()
    filler = job.run.parent / FILLER
    try:
        # what is freed meanwhile, such as an old checkpoint, is taken too
        job.wait(lambda: _fill(filler) or not any(map(processes.alive, ranks)), pause_s=0.02)
    finally:
        filler.unlink(missing_ok=True)


def _fill(path: Path) -> None:
    """Write to a file until the disk is full."""
    with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
        block = bytes(65536)
        while file.write(block) == len(block):
            pass


def _quota(_fault: Fault, job: Job) -> None:
    ranks = job.ranks()
    appended = [len(job.log().encode()), (job.run / "metrics.jsonl").stat().st_size]
    limit_bytes = max(appended) + QUOTA_BYTES
    if sys.platform == "linux":
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(rank.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (limit_bytes, hard))
    job.wait_until_gone(ranks)


def _cut(fault: Fault, job: Job) -> None:
    assert isinstance(job, SlurmJob), "one machine has no network to cut"
    job.cut(fault.rank)


def _send(number: int, ranks: list[psutil.Process]) -> None:
    """Send a signal to those that are still there."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, number)


_INJECT: dict[str, Callable[[Fault, Job], None]] = {
    "kill": _kill,
    "kill_all": _kill_all,
    "kill_saving": _kill_saving,
    "kill_starting": _kill_starting,
    "kill_torchrun": _kill_torchrun,
    "hang": _hang,
    "starve": _starve,
    "ask_usr1": _ask_usr1,
    "ask_term": _ask_term,
    "truncate": _truncate,
    "corrupt": _corrupt,
    "full_disk": _full_disk,
    "quota": _quota,
    "cut": _cut,
}
assert _INJECT.keys() == KINDS.keys()
