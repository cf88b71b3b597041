"""Lesson 14: runs a batch script that somebody has written by hand, and says how it ended.

    ended = run_script(lab, text)                     # on the lab's cluster, or its stand-in
    ended = run_script(lab, text, signal_at_step=10)  # USR1 to the script, as before a time limit
    ended = run_with_failing_ranks(text)              # what the script makes of ranks that crash

Whatever the script does, it is cancelled after `limit_s`.
"""

import contextlib
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from course.labs.l14_cluster import ENV, Lab, steps
from course.labs.l14_stand_in import FAILED_RANKS, FAILING, StandInJob
from course.progress import status
from labcode.slurm.run.client import Client, SlurmError

POLL_S = 0.2
MAX_RESTARTS = 1  # a job that goes back into the queue more often would do so forever
MEET_S = "30"  # how long ranks wait for each other: most scripts that fail do it there


@dataclass(frozen=True)
class Ended:
    """How a script ended.

    Args:
        state: SLURM's word; "REFUSED" by sbatch, "LATE" after the limit, "AGAIN" if it went back
            into the queue once too often.
        log: What it printed, all attempts of it.
        restarts: How often it was requeued.
        signalled: Whether it was sent the signal.
        early: Whether it asked for a requeue while its ranks still ran.
        number: Number of the job; "" if it was refused.
    """

    state: str
    log: str = ""
    restarts: int = 0
    signalled: bool = False
    number: str = ""
    early: bool = False


class _Job(Protocol):
    """A job on the cluster, or on the stand-in."""

    number: str

    @property
    def early(self) -> bool: ...

    def state(self) -> tuple[str, int]:
        """(state, restarts)"""
        ...

    def log(self) -> str: ...

    def signal_script(self) -> None: ...

    def close(self) -> None: ...


# SLURM does not tell whether a step still ran when its job was requeued, and a step that is
# killed can save all the same if it is quick. So a script finds this program before SLURM's own.
# It looks for an srun in the script's session, as a step that has just ended may still be listed.
_SCONTROL = """\
#!/bin/sh
folder=$(dirname "$0")
case "$1" in requeue*)
    session=$(ps -o sid= -p $$ | tr -d ' ')
    if ps -o stat=,comm= -s "$session" | grep -q '^[^Z][^ ]* *srun$'; then
        touch "$folder/early-$SLURM_JOB_ID"
    fi ;;
esac
PATH=${PATH#"$folder:"} exec scontrol "$@"
"""


class _OnCluster:
    """A job of the lab's cluster.

    Args:
        lab: Lab of the cluster.
        path: Path of the script.
        env: Environment variables of the job.
    """

    def __init__(self, lab: Lab, path: Path, env: dict[str, str]) -> None:
        assert lab.client is not None
        # below the folder of the lab, which all nodes see
        self._folder = Path(tempfile.mkdtemp(prefix="scontrol-", dir="runs")).resolve()
        program = self._folder / "scontrol"
        program.write_text(_SCONTROL)
        program.chmod(0o755)
        words = [f"{name}={value}" for name, value in env.items()]
        in_front = f"{self._folder}:{Path(sys.executable).parent}"
        prefix = (*lab.client.prefix, *_WITH_PATH, in_front, "env", *words)
        self._client = Client(prefix, lab.client.where)
        try:
            self.number = self._client.submit(path)
        except SlurmError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def early(self) -> bool:
        return (self._folder / f"early-{self.number}").exists()

    def state(self) -> tuple[str, int]:
        info = self._client.job(self.number)
        return (info.state if info.ended else "RUNNING"), info.restarts

    def log(self) -> str:
        log = self._client.job(self.number).log
        return log.read_text(errors="replace") if log and log.is_file() else ""

    def signal_script(self) -> None:
        self._client.call("scancel", "--batch", "--signal=USR1", self.number)

    def close(self) -> None:
        self._client.cancel(self.number)
        shutil.rmtree(self._folder, ignore_errors=True)


class _Here:
    """A job of the stand-in."""

    def __init__(self, path: Path, env: dict[str, str]) -> None:
        self._job = StandInJob(path, env)
        self.number = f"{self._job.number} (without SLURM)"

    @property
    def early(self) -> bool:
        return self._job.requeued_early

    def state(self) -> tuple[str, int]:
        return self._job.poll(), self._job.restarts

    def log(self) -> str:
        return self._job.log.read_text(errors="replace")

    def signal_script(self) -> None:
        self._job.signal_script()

    def close(self) -> None:
        self._job.close()


def run_script(
    lab: Lab,
    text: str,
    *,
    limit_s: float = 240.0,
    signal_at_step: int | None = None,
) -> Ended:
    """Submit a script, wait for its end, and return how it ended.

    Args:
        lab: Lab of the lesson; without a cluster the stand-in runs the script.
        text: Text of the script.
        limit_s: Then it is cancelled.
        signal_at_step: Once its log shows this step, the script is sent USR1, alone and once.
    """
    Path("runs").mkdir(exist_ok=True)
    path = Path("runs/yours.sbatch")
    path.write_text(text, encoding="utf-8")
    try:
        job = _start(lab, path)
    except SlurmError as error:
        return Ended("REFUSED", str(error))
    try:
        return _follow(job, time.monotonic() + limit_s, signal_at_step)
    finally:
        job.close()
        status()


FAILING_LIMIT_S = 30.0


def run_with_failing_ranks(text: str) -> Ended | None:
    """How a script ends whose ranks fail at once: on the stand-in, wherever the lab is.

    Args:
        text: Text of the script.

    Returns:
        None if it came to no end in time, or started no ranks.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("runs").mkdir()
        path = Path("runs/failing.sbatch")
        path.write_text(text, encoding="utf-8")
        job = _Here(path, {FAILING: "1"})
        try:
            ended = _follow(job, time.monotonic() + FAILING_LIMIT_S, None)
        finally:
            job.close()
            status()
    return ended if FAILED_RANKS in ended.log and ended.state != "LATE" else None


# a command with folders in front of its PATH: among others that of this Python, with labcode
_WITH_PATH = ("/bin/sh", "-c", 'PATH="$0:$PATH" exec "$@"')


def _start(lab: Lab, path: Path) -> _Job:
    env = {**ENV, "PYTHONUNBUFFERED": "1", "LABCODE_MEET_TIMEOUT_S": MEET_S}
    if lab.client is None:
        return _Here(path, env)
    return _OnCluster(lab, path, env)


def _follow(job: _Job, end_s: float, signal_at_step: int | None) -> Ended:
    signalled = False
    while True:
        state, restarts = job.state()
        log = job.log()
        if restarts > MAX_RESTARTS:
            state = "AGAIN"
        elif state == "RUNNING" and time.monotonic() > end_s:
            state = "LATE"
        if state != "RUNNING" or job.early:  # it would go on for a second attempt
            return Ended(state, log, restarts, signalled, job.number, job.early)
        done = steps(log)
        where = f"step {done[-1][0]}" if done else "waiting for the first step"
        status(f"job {job.number}, attempt {restarts + 1}: {where}")
        reached = signal_at_step is not None and bool(done) and done[-1][0] >= signal_at_step
        if reached and not signalled:
            job.signal_script()
            signalled = True
        time.sleep(POLL_S)
