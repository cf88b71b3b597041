"""Play a plan: trainings that are disturbed, each held to the one that nobody disturbed."""

import contextlib
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from labcode.config import Config
from labcode.minislurm.cluster import Cluster

from .. import disks, fixtures
from .account import Account, Outcome, bytes_lost
from .inject import inject
from .job import Job, StuckError
from .plan import (
    DAMAGES,
    KINDS,
    NEEDS_CLUSTER,
    NEEDS_DISK,
    NEEDS_TORCHRUN,
    Fault,
    plan,
)
from .slurm_job import SlurmJob

DISK_MB = 256
Say = Callable[[str], None]


@dataclass(frozen=True)
class Chaos:
    """What is played.

    Args:
        args: Arguments of `python -m labcode.train`, the recipe first; without a folder.
        shown: What the user has typed of it.
        config: The same as `args`, parsed.
        ranks: On how many.
        faults: How many.
        seed: Seed of the plan.
        kinds: Kinds of faults; empty: all that this machine allows.
        limit_s: Time after which a job that should go on, or end, is stuck.
        cluster: A local SLURM cluster on whose nodes the ranks run; None: under torchrun, here.
    """

    args: Sequence[str]
    shown: str
    config: Config
    ranks: int
    faults: int
    seed: int
    kinds: Sequence[str]
    limit_s: float
    cluster: Cluster | None = None


def play(chaos: Chaos, say: Say, keep: Callable[[Account], object]) -> Account:
    """Play all faults of a plan.

    Args:
        chaos: What.
        say: Is told what happens, line by line.
        keep: Is given the account of all faults so far, after each training.

    Raises:
        ValueError: An unknown kind of fault.
        StuckError: The training does not even run undisturbed.
    """
    has_disk = chaos.cluster is None and disks.allowed()
    kinds, left_out = _possible(chaos, has_disk)
    every = chaos.config.checkpoint.every
    faults = plan(chaos.seed, chaos.faults, kinds=kinds, every=every, ranks=chaos.ranks)
    with _work(has_disk) as (work, disk):
        rounds = _Rounds(chaos, work, disk, say)
        rounds.train_undisturbed()
        while faults:
            rounds.play_one(faults)
            keep(_account(chaos, rounds, left_out))
    return _account(chaos, rounds, left_out)


def _possible(chaos: Chaos, has_disk: bool) -> tuple[list[str], list[str]]:
    """The kinds of faults that can be played, and of each other one the reason why not."""
    impossible = {}
    if chaos.cluster is not None:
        for kind in NEEDS_TORCHRUN:
            impossible[kind] = "on the cluster srun starts the ranks, and no torchrun"
        for kind in NEEDS_DISK:
            impossible[kind] = "the nodes of the cluster share the disk of this machine"
    else:
        for kind in NEEDS_CLUSTER:
            impossible[kind] = "one machine has no network to cut; give --cluster NAME"
        if not has_disk:
            for kind in NEEDS_DISK:
                impossible[kind] = "this machine lets nobody but root mount a disk"
    kinds = []
    left_out = []
    for kind in chaos.kinds or KINDS:
        if kind in impossible:
            left_out.append(f"{kind}: {impossible[kind]}")
        else:
            kinds.append(kind)
    if not kinds:
        raise ValueError("; ".join(left_out))
    return kinds, left_out


def _account(chaos: Chaos, rounds: "_Rounds", left_out: list[str]) -> Account:
    return Account(
        recipe=chaos.shown,
        ranks=chaos.ranks,
        seed=chaos.seed,
        every=chaos.config.checkpoint.every,
        rounds=rounds.number,
        rounds_equal=rounds.equal,
        unplanned=rounds.unplanned,
        left_out=left_out,
        outcomes=list(rounds.outcomes),
        versions={"python": platform.python_version(), "torch": torch.__version__},
        nodes=len(chaos.cluster.spec.names()) if chaos.cluster is not None else 0,
    )


@contextlib.contextmanager
def _work(has_disk: bool) -> Iterator[tuple[Path, disks.Disk | None]]:
    """A folder for the logs, and a small disk in it for the runs, where one can be had."""
    with tempfile.TemporaryDirectory(prefix="labcode-chaos-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        if not has_disk:
            yield work, None
            return
        with disks.small_disk(work / "disk", f"size={DISK_MB}m") as disk:
            yield work, disk


class _Rounds:
    """Trainings one after another, with as many faults in each as come before its end.

    Attributes:
        number: Trainings that came to their end.
        equal: Those that ended as the undisturbed one.
        reference: The undisturbed one.
        unplanned: Attempts that ended without a planned fault.
        outcomes: Outcomes of the faults so far.
    """

    def __init__(self, chaos: Chaos, work: Path, disk: disks.Disk | None, say: Say) -> None:
        self.chaos = chaos
        self.work = work
        self.disk = disk
        self.say = say
        self.number = 0
        self.equal = 0
        self.unplanned = 0
        self.outcomes: list[Outcome] = []
        self._damaged: set[tuple[str, int]] = set()
        self.reference = self._job("reference")

    def train_undisturbed(self) -> None:
        """The training that all others are held to.

        Raises:
            StuckError: It fails.
        """
        started = time.monotonic()
        try:
            self.reference.start()
            self.reference.wait(lambda: not self.reference.runs)
        finally:
            self.reference.end()
        if not self.reference.is_finished():
            lines = self.reference.log().strip().splitlines()
            raise StuckError(f"the undisturbed training failed: {lines[-1] if lines else ''}")
        self.say(f"undisturbed: {time.monotonic() - started:.1f} s")

    def _job(self, name: str) -> Job:
        chaos = self.chaos
        if chaos.cluster is not None:
            where = self.work / name
            return SlurmJob(chaos.args, where, self.work, chaos.ranks, chaos.cluster, chaos.limit_s)
        place = self.work if self.disk is None else self.disk.place
        return Job(
            self.chaos.args,
            place / name,
            self.work,
            self.chaos.ranks,
            self.disk,
            self.chaos.limit_s,
        )

    def play_one(self, waiting: list[Fault]) -> None:
        """One training, until its end; the faults that happen in it are taken off the list."""
        self.number += 1
        job = self._job(f"round-{self.number}")
        try:
            job.start()
            resumed = job.wait_for_attempt(0) or 0
            while waiting and self._comes(waiting[0], resumed, job):
                fault = waiting.pop(0)
                resumed = self._play_one(fault, job)
            self._go_to_end(job)
        finally:
            job.end()
        difference = fixtures.differs(job.run, self.reference.run)
        self.equal += not difference
        self.say(f"training {self.number}: {difference or 'ended as the undisturbed one'}")
        shutil.rmtree(job.run, ignore_errors=True)

    def _comes(self, fault: Fault, resumed: int, job: Job) -> bool:
        """Wait for the moment of a fault; False if the training ends before."""
        due = resumed + fault.after_steps
        if due >= self.chaos.config.train.steps:
            return False
        job.wait(lambda: job.step() >= due or not job.runs)
        if fault.kind in DAMAGES:
            # one that may be damaged, and one to go on from
            job.wait(lambda: len(job.checkpoints()) >= 2 or not job.runs)
        return job.runs and not job.is_finished()

    def _play_one(self, fault: Fault, job: Job) -> int:
        """Let a fault happen, start the run again if need be, and see what it has cost.

        Returns:
            The step that the run went on from.
        """
        before = self._complete(job)
        attempts = job.attempts()
        starts = job.starts
        started = time.monotonic()
        why = ""
        try:
            inject(fault, job)
        except StuckError as error:
            why = f"what it should have ended has not ended: {error}"
            job.end()
        goes_on = fault.kind == "starve" and job.attempts() == attempts and job.runs
        if goes_on:
            seconds = time.monotonic() - started
            return self._note(fault, job, job.step(), job.step(), 0, seconds, why)
        after = job.look()
        if fault.kind in DAMAGES:
            before = {}
        for folder in job.checkpoints():
            if int(folder.name.removeprefix("step-")) not in after.checkpoints:
                self._damaged.add(_identity(folder))
        if not job.runs and not job.is_finished():
            job.start()
        if job.starts > starts:
            attempts = 0
        resumed = self._wait_until_it_goes_on(job, attempts)
        seconds = time.monotonic() - started
        if resumed is None:
            if not job.is_finished():
                why = why or "the run did not go on"
            resumed = after.step
        lost_bytes = bytes_lost(before, after, resumed, job.rows())
        return self._note(fault, job, after.step, resumed, lost_bytes, seconds, why)

    def _complete(self, job: Job) -> dict[int, int]:
        """{step: bytes} of the checkpoints that are complete, without those damaged on purpose."""
        found = {}
        for folder in job.checkpoints():
            with contextlib.suppress(FileNotFoundError):  # an old one is removed at this moment
                if _identity(folder) not in self._damaged:
                    size = sum(path.stat().st_size for path in folder.iterdir())
                    found[int(folder.name.removeprefix("step-"))] = size
        return found

    def _wait_until_it_goes_on(self, job: Job, attempts: int) -> int | None:
        """The step that the run has resumed from; None if it does not go on."""
        try:
            return job.wait_for_attempt(attempts)
        except StuckError:
            job.end()
            job.start()
            with contextlib.suppress(StuckError):
                job.wait_for_attempt(0)
            return None

    def _note(
        self,
        fault: Fault,
        job: Job,
        step: int,
        resumed: int,
        lost_bytes: int,
        seconds: float,
        why: str,
    ) -> int:
        outcome = Outcome(
            number=fault.number,
            kind=fault.kind,
            round=self.number,
            survived=not why,
            step=step,
            resumed_from=resumed,
            steps_lost=max(0, step - resumed),
            bytes_lost=lost_bytes,
            seconds=round(seconds, 2),
            why=why,
        )
        self.outcomes.append(outcome)
        self.say(
            f"fault {fault.number}: {KINDS[fault.kind]}, after step {step}: "
            + (why or f"went on from step {resumed}")
            + f", {seconds:.1f} s"
        )
        return resumed

    def _go_to_end(self, job: Job) -> None:
        """Let the training finish; one that fails without a fault is started again, and counted."""
        for _ in range(3):
            with contextlib.suppress(StuckError):
                job.wait(lambda: not job.runs, pause_s=0.05)
            if job.is_finished():
                return
            self.unplanned += 1
            job.end()
            job.start()


def _identity(folder: Path) -> tuple[str, int]:
    """A folder, told from a later one of the same name."""
    return folder.name, folder.stat().st_ino
