"""SLURM's commands as functions with a time limit, arguments as lists, and errors of one line.

client = Client.find(site_name="local")      # the cluster of this machine or login node, or None
number = client.submit(Path("train.sbatch"))
client.job(number).state                     # "PENDING", "RUNNING", "COMPLETED", "TIMEOUT", ...
"""

import contextlib
import re
import shutil
import subprocess
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


@dataclass(frozen=True)
class Client:
    """The commands of one cluster.

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
            SlurmError: Its controller does not answer.
        """
        if not shutil.which("sbatch"):
            return None
        try:
            name = re.search(r"ClusterName\s*=\s*(\S+)", cls().call("scontrol", "show", "config"))
        except SlurmError as error:
            if any(text in str(error) for text in _NO_CLUSTER):
                return None
            raise
        return cls(where=f"SLURM cluster {name[1] if name else ''}".rstrip())

    @classmethod
    def find(cls, site_name: str | None = None, cluster_name: str | None = None) -> "Client | None":
        """The cluster to submit to.

        For the site "local" it is the one on this machine, else that of this login node.

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
        return cls.of(cluster) if cluster else None

    def call(self, *argv: str) -> str:
        """Run one command and return what it printed.

        Raises:
            SlurmError: It failed, is not there, or did not end in time.
        """
        program = argv[0]
        try:
            done = subprocess.run(
                [*self.prefix, *argv],
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
        answer = self.call("sbatch", "--parsable", *options, "--", str(script)).strip()
        number = re.match(r"\d+", answer.splitlines()[-1] if answer else "")
        if not number:
            raise SlurmError(f"sbatch answered {answer!r} and no job number")
        return number[0]

    def test(self, script: Path, *options: str) -> None:
        """Ask whether sbatch would accept a script; nothing is submitted.

        Raises:
            SlurmError: It would not.
        """
        self.call("sbatch", "--test-only", *options, "--", str(script))

    def jobs(self, number: str) -> list[JobInfo]:
        """What SLURM says of a job; of an array each of its jobs.

        Raises:
            UnknownJob: There is none of that number, or no longer.
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
