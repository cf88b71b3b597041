"""What SLURM's commands print, as data: jobs, the queue, the nodes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# states that a job does not leave again (slurm.schedmd.com/squeue.html, job state codes); one that
# is requeued passes through others
FINAL = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}
_TO_LINE_END = {
    "JobName",
    "Command",
    "WorkDir",
    "StdErr",
    "StdIn",
    "StdOut",
    "Comment",
    "AdminComment",
    "SystemComment",
}


@dataclass(frozen=True)
class JobInfo:
    """What SLURM says of a job.

    Args:
        id: Number, "17", or "17_3" for one of an array.
        name: Name of the job.
        state: "PENDING", "RUNNING", "COMPLETED", ...
        reason: Why it is pending, or why it ended; "" for none.
        exit_code: (exit code, signal) of the batch script.
        restarts: How many times it was requeued.
        nodes: Node list as SLURM writes it, "n[1-2]"; "" before it runs.
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


# the free texts come last, so that a "|" in them does no harm
QUEUE_FORMAT = "%i|%u|%P|%T|%M|%D|%R|%j"
NODES_FORMAT = "%R|%T|%D|%c|%m|%G|%l|%N"


def parse_queue(text: str) -> list[Queued]:
    """The lines of `squeue` in our format."""
    jobs = []
    for line in text.splitlines():
        if line.count("|") < 7:  # a warning
            continue
        number, user, partition, state, run_time, nodes, where, name = line.split("|", 7)
        job = Queued(number, name, user, partition, state, run_time, int(nodes), where)
        jobs.append(job)
    return jobs


def parse_nodes(text: str) -> list[NodeGroup]:
    """The lines of `sinfo` in our format; "8+" (at least 8) counts as 8."""
    groups = []
    for line in text.splitlines():
        if line.count("|") < 7:
            continue
        partition, state, count, cpus, memory_mb, gres, limit, names = line.split("|", 7)
        group = NodeGroup(
            partition=partition,
            state=state,
            nodes=names,
            count=_at_least(count),
            cpus=_at_least(cpus),
            memory_mb=_at_least(memory_mb),
            gres=gres,
            time_limit=limit,
        )
        groups.append(group)
    return groups


def _at_least(number: str) -> int:
    return int(number.rstrip("+"))


def parse_jobs(text: str) -> list[JobInfo]:
    """The records of `scontrol show job`."""
    return [_info(_fields(record)) for record in re.split(r"\n\s*\n", text) if "JobId=" in record]


def _fields(record: str) -> dict[str, str]:
    """`Key=value` pairs; names, commands and paths may hold anything and fill their line."""
    fields: dict[str, str] = {}
    for line in record.splitlines():
        rest = line.strip()
        while "=" in rest:
            key, _, rest = rest.partition("=")
            value = rest
            after = re.search(r"\s+(?=[A-Z][\w:/]*=)", rest)
            if after and key not in _TO_LINE_END:
                value = rest[: after.start()]
            fields.setdefault(key, value)
            rest = rest[len(value) :].lstrip()
    return fields


def _info(fields: Mapping[str, str]) -> JobInfo:
    number = fields["JobId"]
    if "ArrayTaskId" in fields:
        number = f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}"
    code, _, by_signal = fields.get("ExitCode", "0:0").partition(":")
    log = _text(fields, "StdOut")
    return JobInfo(
        id=number,
        name=fields.get("JobName", ""),
        state=fields.get("JobState", "UNKNOWN").split()[0],
        reason=_text(fields, "Reason"),
        exit_code=(int(code or 0), int(by_signal or 0)),
        restarts=int(fields.get("Restarts", 0)),
        nodes=_text(fields, "NodeList"),
        run_time=fields.get("RunTime", ""),
        time_limit=fields.get("TimeLimit", ""),
        log=Path(log) if log else None,
        fields=dict(fields),
    )


def _text(fields: Mapping[str, str], name: str) -> str:
    """The field's value; "" for SLURM's words for none."""
    value = fields.get(name, "")
    return "" if value in ("(null)", "None", "N/A") else value
