"""SLURM's commands as functions with a time limit, arguments as lists, and errors of one line.

client = Client.find(site_name="local")      # the cluster on this machine, or the one this login node belongs to; or None
number = client.submit(Path("train.sbatch"))
client.job(number).state                     # "PENDING", "RUNNING", "COMPLETED", "TIMEOUT", ...
"""

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

# states that a job does not leave again (slurm.schedmd.com/squeue.html, job state codes); a requeue is told by REQUEUED etc.
FINAL = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
_TO_LINE_END = {"JobName", "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment", "SystemComment"}
_BUSY = (
    "Socket timed out",
    "Unable to contact slurm controller",
    "Connection refused",
    "temporarily unavailable",
    "Zero Bytes",
)
_UNKNOWN = ("Invalid job id", "No such job", "does not exist")
_NO_CLUSTER = ("configuration source", "Unable to open", "No such file", "DNS SRV", "not find")


class SlurmError(RuntimeError):
    """A command of SLURM failed; the message is one line with what it said."""


class Unreachable(SlurmError):
    """The controller does not answer now; the same command may work in a moment."""


class UnknownJob(SlurmError):
    """SLURM has no such job, or has forgotten it: finished jobs are kept for MinJobAge, 5 minutes on most clusters."""


@dataclass(frozen=True)
class JobInfo:
    """What SLURM says of a job.

    Args:
        id: Number, "17", or "17_3" for one of an array.
        name: Its name.
        state: "PENDING", "RUNNING", "COMPLETED", ...
        reason: Why it is pending, or why it ended; "" for none.
        exit_code: (exit code, signal) of the batch script.
        restarts: How many times it was requeued.
        nodes: As SLURM writes them, "n[1-2]"; "" before it runs.
        run_time: "00:01:23".
        time_limit: "00:10:00".
        log: The file that its output goes to.
        fields: All fields.
    """

    id: str
    name: str
    state: str
    reason: str
    exit_code: tuple[int, int]
    restarts: int
    nodes: str
    run_time: str
    time_limit: str
    log: Path | None
    fields: dict[str, str] = field(repr=False, default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether it will not run again."""
        return self.state in FINAL


@dataclass(frozen=True)
class Queued:
    """One line of the queue."""

    id: str
    name: str
    user: str
    partition: str
    state: str
    run_time: str
    nodes: int
    where: str  # the nodes, or the reason why it waits


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of a partition that are in one state."""

    partition: str
    state: str
    nodes: str
    count: int
    cpus: int
    memory_mb: int
    gres: str
    time_limit: str


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
    def of(cls, cluster) -> "Client":
        """The client of a `labcode.slurm.cluster.Cluster`."""
        return cls(tuple(cluster.exec_prefix), f"SLURM cluster {cluster.name!r} on this machine")

    @classmethod
    def find(cls, site_name: str | None = None, cluster_name: str | None = None) -> "Client | None":
        """The cluster to submit to: for the site "local" the one on this machine, else this login node's own.

        Args:
            site_name: Name of the site's profile.
            cluster_name: Which of the clusters on this machine, if there are several.

        Returns:
            None if there is neither.

        Raises:
            SlurmError: This machine belongs to a cluster whose controller does not answer.
        """
        if site_name != "local" and not cluster_name and shutil.which("sbatch"):
            client = cls()
            try:
                name = re.search(r"ClusterName\s*=\s*(\S+)", client.call("scontrol", "show", "config"))
                return cls(where=f"SLURM cluster {name[1] if name else ''}".rstrip())
            except SlurmError as error:
                if not any(text in str(error) for text in _NO_CLUSTER):
                    raise
        from labcode.slurm.cluster import running

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
            raise Unreachable(f"{program} did not answer within {self.timeout_s:g} s") from None
        except FileNotFoundError:
            raise SlurmError(f"{(self.prefix or argv)[0]} is not on this machine: log in to a node of the cluster") from None
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
        found = parse_jobs(self.call("scontrol", "show", "job", str(number)))
        if not found:
            raise UnknownJob(f"SLURM has no job {number}")
        return found

    def job(self, number: str) -> JobInfo:
        """What SLURM says of one job; see `jobs`."""
        return self.jobs(number)[0]

    def queue(self) -> list[Queued]:
        """All jobs that wait or run."""
        return parse_queue(self.call("squeue", "--noheader", f"--format={_QUEUE}"))

    def nodes(self) -> list[NodeGroup]:
        """The nodes of each partition by their state."""
        return parse_nodes(self.call("sinfo", "--noheader", f"--format={_NODES}"))

    def cancel(self, number: str, signal: str | None = None) -> None:
        """End a job, or send a signal to its ranks; fine for one that has ended already."""
        try:
            self.call("scancel", *([f"--signal={signal}"] if signal else []), str(number))
        except UnknownJob:
            return


# the free texts come last, so that a "|" in them does no harm
_QUEUE = "%i|%u|%P|%T|%M|%D|%R|%j"
_NODES = "%R|%T|%D|%c|%m|%G|%l|%N"


def parse_queue(text: str) -> list[Queued]:
    """The lines of `squeue` in our format."""
    rows = (line.split("|", 7) for line in text.splitlines() if line.count("|") >= 7)
    return [
        Queued(i, name, user, partition, state, run_time, int(nodes), where)
        for i, user, partition, state, run_time, nodes, where, name in rows
    ]


def parse_nodes(text: str) -> list[NodeGroup]:
    """The lines of `sinfo` in our format; "8+" (at least 8) counts as 8."""
    groups = []
    for line in text.splitlines():
        if line.count("|") >= 7:
            partition, state, count, cpus, memory_mb, gres, limit, names = line.split("|", 7)
            numbers = [int(number.rstrip("+")) for number in (count, cpus, memory_mb)]
            groups.append(NodeGroup(partition, state, names, *numbers, gres, limit))
    return groups


def parse_jobs(text: str) -> list[JobInfo]:
    """The records of `scontrol show job`."""
    return [_info(_fields(record)) for record in re.split(r"\n\s*\n", text) if "JobId=" in record]


def _fields(record: str) -> dict[str, str]:
    """`Key=value` pairs; names, commands and paths may hold anything and go to the end of their line."""
    fields = {}
    for line in record.splitlines():
        rest = line.strip()
        while "=" in rest:
            key, _, rest = rest.partition("=")
            after = re.search(r"\s+(?=[A-Z][\w:/]*=)", rest) if key not in _TO_LINE_END else None
            value, rest = (rest[: after.start()], rest[after.end() :]) if after else (rest, "")
            fields.setdefault(key, value)
    return fields


def _info(fields) -> JobInfo:
    number = fields["JobId"]
    if "ArrayTaskId" in fields:
        number = f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}"
    code, _, by_signal = fields.get("ExitCode", "0:0").partition(":")
    none = ("(null)", "None", "N/A", "")
    log = fields.get("StdOut", "")
    return JobInfo(
        id=number,
        name=fields.get("JobName", ""),
        state=fields.get("JobState", "UNKNOWN").split()[0],
        reason="" if fields.get("Reason") in none else fields.get("Reason", ""),
        exit_code=(int(code or 0), int(by_signal or 0)),
        restarts=int(fields.get("Restarts", 0)),
        nodes="" if fields.get("NodeList") in none else fields.get("NodeList", ""),
        run_time=fields.get("RunTime", ""),
        time_limit=fields.get("TimeLimit", ""),
        log=None if log in none else Path(log),
        fields=fields,
    )


def _error(program: str, said: str, code: int) -> SlurmError:
    """The error for what a command printed: the last line that says why, without the program's name before it."""
    lines = [re.sub(rf"^({program}|slurm_\w+): (error: )?", "", line).strip() for line in said.splitlines()]
    lines = [line for line in lines if line and not line.startswith("Batch job submission failed: Unspecified")]
    failed = [line for line in lines if "failed:" in line or "rror" in line]
    why = (failed or lines or [f"exit code {code}"])[-1]
    kind = UnknownJob if any(text in said for text in _UNKNOWN) else SlurmError
    kind = Unreachable if any(text in said for text in _BUSY) else kind
    return kind(f"{program}: {why}")
