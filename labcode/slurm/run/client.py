"""SLURM's commands as functions with a time limit, arguments as lists, and errors of one line.

client = Client.find(site_name="local")      # the cluster of this machine or login node, or None
number = client.submit(Path("train.sbatch"))
client.job(number).state                     # "PENDING", "RUNNING", "COMPLETED", "TIMEOUT", ...
"""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from labcode.slurm.run.answers import (
    NODES_FORMAT,
    QUEUE_FORMAT,
    JobInfo,
    NodeGroup,
    Queued,
    parse_jobs,
    parse_nodes,
    parse_queue,
)

if TYPE_CHECKING:
    from labcode.minislurm import Cluster

_BUSY = (
    "Socket timed out",
    "Unable to contact slurm controller",
    "Connection refused",
    "temporarily unavailable",
    "Zero Bytes",
)
_UNKNOWN = ("Invalid job id", "No such job", "does not exist")
# said by the shell that would run a command on a host of `labcode.minislurm`, when it is gone
_LEFT = re.compile(r".*: cannot open .*/on: No such file")
# What a job of SLURM finds set. A program that is in a job, as a notebook on most clusters is, must
# not hand it down to the job that it submits: sbatch and srun take options from there, above those
# of the script, and with --export=ALL the new job has them too.
_OF_A_JOB = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC|PMI|PMI2|PMIX)_")
# which cluster it is and who asks, and how times are printed
_KEPT = (
    "SLURM_CONF",
    "SLURM_CONF_SERVER",
    "SLURM_CLUSTERS",
    "SBATCH_CLUSTERS",
    "SLURM_JWT",
    "SLURM_TIME_FORMAT",
)
# what a user sets once for all jobs; it counts where the script says nothing of its own
_DEFAULTS = {
    "SBATCH_ACCOUNT": re.compile(r"^#SBATCH\b.*\s(--account\b|-A)", re.MULTILINE),
    "SBATCH_PARTITION": re.compile(r"^#SBATCH\b.*\s(--partition\b|-p)", re.MULTILINE),
    "SBATCH_QOS": re.compile(r"^#SBATCH\b.*\s(--qos\b|-q)", re.MULTILINE),
    "SBATCH_RESERVATION": re.compile(r"^#SBATCH\b.*\s--reservation\b", re.MULTILINE),
}
# SLURM's commands are installed, and nothing says which cluster they are for
_NO_CLUSTER = (
    "configuration source",
    "Unable to open",
    "No such file",
    "DNS SRV",
    "dns_srv",
    "not find",
)


class SlurmError(RuntimeError):
    """A command of SLURM failed; the message is one line with what it said."""


class Unreachable(SlurmError):
    """The controller does not answer now; the same command may work in a moment."""


class UnknownJob(SlurmError):
    """SLURM has no such job, or has forgotten it.

    Finished jobs are kept for MinJobAge, 5 minutes on most clusters.
    """


def outside_a_job(env: Mapping[str, str]) -> dict[str, str]:
    """An environment without what SLURM has set for the job that this process is in.

    Args:
        env: The environment variables.

    Held by: tests/unit/test_slurm_client.py, tests/slurm/test_submit_inside_a_job.py
    """
    stays = {name for name in env if name in (*_KEPT, *_DEFAULTS) or not _OF_A_JOB.match(name)}
    return {name: value for name, value in env.items() if name in stays}


@dataclass(frozen=True)
class Client:
    """The commands of one cluster, called as from outside any job.

    Args:
        prefix: Words before each command, that run it on a head node elsewhere.
        where: What this cluster is called in messages.
        timeout_s: Limit of one command.
    """

    prefix: tuple[str, ...] = ()
    where: str = "SLURM cluster"
    timeout_s: float = 30.0

    @classmethod
    def of(cls, cluster: "Cluster") -> "Client":
        """The client of a `labcode.minislurm.Cluster`."""
        return cls(tuple(cluster.exec_prefix), f"SLURM cluster {cluster.name!r} on this machine")

    @classmethod
    def own(cls) -> "Client | None":
        """The cluster that this machine is a login node of, if it is one.

        Raises:
            SlurmError: The controller does not answer.
        """
        settings = cls._settings()
        if settings is None:
            return None
        return cls(where=f"SLURM cluster {settings.get('ClusterName', '')}".rstrip())

    @classmethod
    def _settings(cls) -> dict[str, str] | None:
        """What the cluster of this machine says of itself; None if there is none."""
        if not shutil.which("sbatch"):
            return None
        try:
            said = cls().call("scontrol", "show", "config")
        except SlurmError as error:
            if any(text in str(error) for text in _NO_CLUSTER):
                return None
            raise
        return dict(re.findall(r"^(\w+)\s*=\s*(\S+)", said, re.MULTILINE))

    @classmethod
    def find(cls, site_name: str | None = None, cluster_name: str | None = None) -> "Client | None":
        """The cluster to submit to.

        For the site "local" it is the one on this machine, else that of this login node. A job of
        the one on this machine finds it too.

        Args:
            site_name: Name of the site's profile.
            cluster_name: Which of the clusters on this machine, if there are several.

        Returns:
            None if there is neither.

        Raises:
            SlurmError: This machine belongs to a cluster whose controller does not answer.
        """
        from labcode.minislurm import running

        if site_name != "local" and not cluster_name:
            own = cls.own()
            if own is not None:
                return own
        cluster = running(cluster_name)
        return cls.of(cluster) if cluster else cls._around(cluster_name)

    @classmethod
    def _around(cls, cluster_name: str | None) -> "Client | None":
        """The cluster of `labcode.minislurm` on one of whose hosts this process runs.

        It has process numbers of its own there, so that `running` cannot find it.
        """
        from labcode.minislurm.place import base

        settings = cls._settings() or {}
        folder = Path(settings.get("SLURM_CONF", "/")).parents[1:2]
        if not folder or folder[0].parent != base():
            return None
        if cluster_name not in (None, folder[0].name):
            return None
        return cls(where=f"SLURM cluster {folder[0].name!r} on this machine")

    def call(self, *argv: str, unset: tuple[str, ...] = ()) -> str:
        """Run one command and return what it printed.

        Args:
            argv: The command.
            unset: Variables that it is not to see.

        Raises:
            SlurmError: It failed, is not there, or did not end in time.
        """
        program = argv[0]
        env = outside_a_job(os.environ)
        for name in unset:
            env.pop(name, None)
        try:
            done = subprocess.run(
                [*self.prefix, *argv],
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.timeout_s,
                start_new_session=True,  # Ctrl-C is for the caller, who may have to cancel the job
            )
        except subprocess.TimeoutExpired:
            limit = f"{self.timeout_s:g} s"
            raise Unreachable(f"{program} did not answer within {limit}") from None
        except FileNotFoundError:
            missing = (self.prefix or argv)[0]
            way_out = "log in to a node of the cluster"
            raise SlurmError(f"{missing} is not on this machine: {way_out}") from None
        if done.returncode:
            raise _error(program, done.stderr or done.stdout, done.returncode)
        return done.stdout

    def submit(self, script: Path, *options: str) -> str:
        """Hand a script to sbatch; returns the job's number.

        Raises:
            SlurmError: It was refused.
        """
        words = ("sbatch", "--parsable", *options, "--", str(script))
        answer = self.call(*words, unset=_said_by(script)).strip()
        number = re.match(r"\d+", answer.splitlines()[-1] if answer else "")
        if not number:
            raise SlurmError(f"sbatch answered {answer!r} and no job number")
        return number[0]

    def test(self, script: Path, *options: str) -> None:
        """Ask whether sbatch would accept a script; nothing is submitted.

        Raises:
            SlurmError: It would not.
        """
        words = ("sbatch", "--test-only", *options, "--", str(script))
        self.call(*words, unset=_said_by(script))

    def jobs(self, number: str) -> list[JobInfo]:
        """What SLURM says of a job; of an array each of its jobs.

        Raises:
            UnknownJob: There is no job of that number, or no longer.
        """
        try:
            found = parse_jobs(self.call("scontrol", "show", "job", str(number)))
        except UnknownJob:
            found = []
        if not found:
            raise UnknownJob(
                f"no job {number} on {self.where}: SLURM forgets a job some minutes after its "
                "end; status without a number lists those that wait or run"
            )
        return found

    def job(self, number: str) -> JobInfo:
        """What SLURM says of one job; see `jobs`."""
        return self.jobs(number)[0]

    def queue(self) -> list[Queued]:
        """All jobs that wait or run."""
        return parse_queue(self.call("squeue", "--noheader", f"--format={QUEUE_FORMAT}"))

    def nodes(self) -> list[NodeGroup]:
        """The nodes of each partition by their state."""
        return parse_nodes(self.call("sinfo", "--noheader", f"--format={NODES_FORMAT}"))

    def cancel(self, number: str, signal: str | None = None) -> None:
        """End a job, or send a signal to its ranks; fine for one that has ended already."""
        options = [f"--signal={signal}"] if signal else []
        with contextlib.suppress(UnknownJob):
            self.call("scancel", *options, str(number))


def _said_by(script: Path) -> tuple[str, ...]:
    """The variables of sbatch that would overrule what a script says itself."""
    text = script.read_text(encoding="utf-8", errors="replace")
    return tuple(name for name, option in _DEFAULTS.items() if option.search(text))


def _error(program: str, said: str, code: int) -> SlurmError:
    """The error for what a command printed: the last line that says why."""
    lines = []
    for line in said.splitlines():
        text = re.sub(rf"^({program}|slurm_\w+): (error: )?", "", line).strip()
        if text and not text.startswith("Batch job submission failed: Unspecified"):
            lines.append(text)
    failed = [line for line in lines if "failed:" in line or "rror" in line]
    reasons = failed or lines or [f"exit code {code}"]
    if any(_LEFT.match(line) for line in lines):
        return SlurmError(f"{program}: the cluster on this machine was taken down meanwhile")
    kind = SlurmError
    if any(text in said for text in _UNKNOWN):
        kind = UnknownJob
    if any(text in said for text in _BUSY):
        kind = Unreachable
    return kind(f"{program}: {reasons[-1]}")
