"""Why a job ended, in one line: its state, what SLURM says, and which rank failed first."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from labcode.slurm.log import story
from labcode.slurm.log.ends import exit_text
from labcode.slurm.log.kinds import GPU_MEMORY, HOST_MEMORY
from labcode.slurm.log.story import Event
from labcode.slurm.run.answers import JobInfo

_STATES = {  # state: what it means, and what to do
    "TIMEOUT": "the time limit of {limit} was reached: "
    "give more minutes, or let it resume with requeue",
    "OUT_OF_MEMORY": "a process took more memory than the job has: "
    "lower train.micro_batch, or ask for more memory",
    "NODE_FAIL": "a node of {nodes} failed: "
    "submit again; to resume, give its --train.out and --checkpoint.resume",
    "CANCELLED": "it was cancelled",
    "PREEMPTED": "a job with more priority took its nodes",
    "DEADLINE": "its deadline passed",
    "BOOT_FAIL": "a node of {nodes} did not start",
}
_NO_CHECKPOINT = (
    "the time limit of {limit} was reached before a checkpoint was written: "
    "let the signal come earlier, with more --signal-s, or give more minutes"
)
# reasons to be pending forever
NEVER = {
    "DependencyNeverSatisfied": "the job that it waits for failed: submit that one again",
    "BadConstraints": "no node has what the job asks for: "
    "change constraint or GPUs of the site's profile",
    "PartitionTimeLimit": "the partition does not allow this time limit: give fewer minutes",
    "PartitionNodeLimit": "the partition does not have that many nodes: give fewer nodes",
    "JobHoldMaxRequeue": "it was requeued too often: look for the cause in the log",
    "launch_failed_requeued_held": "it could not be launched: "
    "look at the folder of the log and at the node",
}

# what stands between two attempts
_REQUEUED = re.compile(
    r"slurmstepd\S*: error: \*\*\* JOB .* DUE TO (?:JOB REQUEUE|NODE FAILURE).*\n"
)
# what labcode.doctor.hang has found, while the ranks waited
_HANG = re.compile(r"^(?:\[(?:rank ?)?\d+\]:? )?hang: (.+)", re.MULTILINE)
_MEMORY = (HOST_MEMORY, GPU_MEMORY)


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Args:
        state: SLURM's word: "COMPLETED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", ...
        reason: Why, in one line; "" for a job that completed.
        rank: The rank that failed first; None when no single rank is known to have.
        restarts: How many times it was requeued.
    """

    state: str
    reason: str = ""
    rank: int | None = None
    restarts: int = 0

    @property
    def ok(self) -> bool:
        """Whether the job did what it should."""
        return self.state == "COMPLETED"

    def __str__(self) -> str:
        text = self.state
        if self.restarts:
            text += f" after {self.restarts} restart"
        if self.restarts > 1:
            text += "s"
        return f"{text}: {self.reason}" if self.reason else text


class Failure(NamedTuple):
    """Which rank failed first, as far as the log tells, and what happened to it."""

    rank: int | None = None
    what: str = ""


def explain(info: JobInfo, log: str, hang: str = "") -> Outcome:
    """The outcome of a job that has ended, or never will begin.

    Args:
        info: What SLURM says of it.
        log: What the job printed, all attempts of it.
        hang: What was seen of ranks that hung, a sentence; it matters if the time limit ended them.
    """
    if info.state == "COMPLETED":
        return Outcome("COMPLETED", restarts=info.restarts)
    for reason, advice in NEVER.items():
        if info.reason.startswith(reason):
            return Outcome(info.state, f"{info.reason}: {advice}", restarts=info.restarts)
    first = _first(_REQUEUED.split(log)[-1])
    rank, what = _failure(first)
    # a sentence comes from the supervisor of a local job; SLURM's reasons are one word
    sentence = info.reason if " " in info.reason else ""
    state = info.state
    if state == "FAILED" and first is not None and first.kind.name in _MEMORY:
        state = "OUT_OF_MEMORY"
    if state not in _STATES:
        reason = _of_rank(rank, what) if rank is not None else sentence or what
        return Outcome(state, reason or exit_text(*info.exit_code), rank, info.restarts)
    limit = info.time_limit or "the job"
    reason = sentence or _STATES[state].format(limit=limit, nodes=info.nodes or "the job")
    if state == "TIMEOUT" and hang:
        found = _HANG.findall(log)  # better than what can be seen from outside
        hang = found[-1] if found else hang
        reason = f"{hang} (the time limit of {limit} ended it)"
    elif state == "TIMEOUT" and info.fields.get("Requeue") == "1" and not sentence:
        reason = _NO_CHECKPOINT.format(limit=limit)
    if state != "OUT_OF_MEMORY":  # whatever the ranks say, they were ended from outside
        return Outcome(state, reason, restarts=info.restarts)
    if rank is not None:
        reason = f"{_of_rank(rank, what)}; {reason}"
    return Outcome(state, reason, rank, info.restarts)


def _of_rank(rank: int, what: str) -> str:
    """ "rank 3: killed ...", once: our own lines may name the rank already."""
    named = what.startswith(f"rank {rank}: ") or f": rank {rank} " in what
    return what if named else f"rank {rank}: {what}"


def first_failure(log: str) -> Failure:
    """The rank that failed first in an attempt of a job, from its log: `slurm.log.story`."""
    return _failure(_first(log))


def _failure(first: Event | None) -> Failure:
    return Failure() if first is None else Failure(first.rank, first.what)


def _first(log: str) -> Event | None:
    return story.read({"": log}).first
