"""Why a job ended, in one line: its state, what SLURM says, and which rank failed first."""

import re
import signal
from dataclasses import dataclass
from typing import NamedTuple

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
# reasons to be pending for ever
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
_TORCHRUN = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+)")
_SRUN = re.compile(r"srun: error: (\S+): tasks? (\d+)[\d,-]*: (.+)")
_PEER = re.compile(r"^(?:\[\w+\]:? ?)?error: .*?\brank (\d+)\b", re.MULTILINE)
_OWN = re.compile(r"^(?:\[(?:rank ?)?(\d+)\]:? )?error: (.+)", re.MULTILINE)
_PYTHON = re.compile(
    r"^(?:\[rank(\d+)\]: )?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Diverged): .+)",
    re.MULTILINE,
)
# what labcode.doctor.hang has found, while the ranks waited and after their time-out
_HANG = re.compile(r"^(?:\[(?:rank ?)?\d+\]:? )?hang: (.+)", re.MULTILINE)
_TIMED_OUT = re.compile(r"^.*\ba collective has timed out: (.+)", re.MULTILINE)
_MISSING = re.compile(r"rank (\d+) (?:has not come|does not answer)")
_OOM = re.compile(
    r"oom[_-]kill|Out Of Memory|DefaultCPUAllocator: (not enough|can't allocate) memory"
    r"|CUDA out of memory|MemoryError",
    re.IGNORECASE,
)
# said of a peer that is gone: not the cause
_CAUSED = re.compile(
    r"Connection (reset|closed|refused)|peer|SignalException|ChildFailedError|Broken pipe"
    r"|RendezvousConn"
)
_SHELL_ADDS = 128
_KILLED = [_SHELL_ADDS + number for number in signal.Signals]
_ENDED_BY_TORCHRUN = (-signal.SIGTERM, -signal.SIGINT)  # to the ranks that had not failed


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
    rank, what = first_failure(_REQUEUED.split(log)[-1])
    # a sentence comes from the supervisor of a local job; SLURM's reasons are one word
    sentence = info.reason if " " in info.reason else ""
    state = info.state
    if state == "FAILED" and _OOM.search(what):
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
    """The rank that failed first in an attempt of a job, from its log.

    torchrun's report names ranks; srun's lines name its tasks, which are ranks unless torchrun runs
    in them; our own error line and Python's last line say why.
    """
    timed_out = _TIMED_OUT.search(log)
    if timed_out:  # those that end with it only waited
        missing = _MISSING.search(timed_out[1])
        rank = int(missing[1]) if missing else None
        return Failure(rank, f"a collective has timed out: {timed_out[1]}")
    failure = _from_torchrun(log) or _from_srun(log)
    if failure is not None:
        return failure
    said = _said(log)
    rank = _named(log)
    if rank is None and len(said) == 1:
        rank = next(iter(said))
    return Failure(rank, said.get(rank) or said.get(None) or "")


def _from_torchrun(log: str) -> Failure | None:
    """What torchrun's report says; None without one."""
    reports = [(int(rank), int(code)) for rank, code in _TORCHRUN.findall(log)]
    if not reports:
        return None
    first = [report for report in reports if report[1] not in _ENDED_BY_TORCHRUN] or reports
    # a killed rank comes before the peers that abort because it is gone
    killed = [report for report in first if report[1] < 0 and report[1] != -signal.SIGABRT]
    rank, code = (killed or first)[0]
    said = _said(log)
    if code < 0:
        return Failure(rank, said.get(rank) or exit_text(0, -code))
    named = _named(log)
    why = said.get(rank) or said.get(None) or exit_text(code)
    return Failure(rank if named is None else named, why)


def _from_srun(log: str) -> Failure | None:
    """What srun says of its tasks; None if it says nothing."""
    tasks = [task for task in _SRUN.findall(log) if "orced" not in task[2]]
    if not tasks:
        return None
    if "torch.distributed" in log or "torchelastic" in log:  # a task is an agent, and no rank
        node, _, what = tasks[0]
        return Failure(None, f"{_plain_end(what)} on {node}")
    # a killed task comes before those that exit because it is gone, or are ended by srun
    killed = [task for task in tasks if _is_killed(task[2])]
    node, number, what = (killed or tasks)[0]
    rank = int(number)
    end = f"{_plain_end(what)} on {node}"
    said = _said(log)
    why = said.get(rank)
    could_speak = "Exited" in what and not _is_killed(what)
    if could_speak:  # then our own line may name another rank
        why = why or said.get(None)
        named = _named(log)
        rank = rank if named is None else named
    return Failure(rank, f"{end}: {why}" if why else end)


def _is_killed(what: str) -> bool:
    """Whether srun's words for the end of a task say that it was killed, and not by srun."""
    if "exit code" not in what:
        return "Exited" not in what and "Terminated" not in what
    return "killed by SIGKILL" in _plain_end(what)


def _plain_end(what: str) -> str:
    """srun's words for the end of a task; "Exited with exit code 137" is a shell's for a kill."""
    exited = re.search(r"exit code (\d+)", what)
    if exited and int(exited[1]) in _KILLED:
        return exit_text(int(exited[1]))
    return what.lower()


def exit_text(code: int, by_signal: int = 0) -> str:
    """ "exit code 2", or "killed by SIGKILL", with its usual cause.

    Args:
        code: The exit code. A shell makes 128 plus the signal of it for a command that was killed
            (POSIX.1-2024, Shell Command Language, 2.8.2, asks for more than 128).
        by_signal: The signal that ended the process; 0 for none.
    """
    if not by_signal and code in _KILLED:
        by_signal = code - _SHELL_ADDS
    if not by_signal:
        return f"exit code {code}"
    if by_signal == signal.SIGKILL:
        return "killed by SIGKILL: by hand, or by the kernel's out-of-memory killer"
    try:
        return f"killed by {signal.Signals(by_signal).name}"
    except ValueError:
        return f"killed by signal {by_signal}"


def _said(log: str) -> dict[int | None, str]:
    """The reason each rank gave; None is the one without a number."""
    found: dict[int | None, str] = {}
    for rank, text in (*_OWN.findall(log), *_PYTHON.findall(log)):
        key = int(rank) if rank else None
        if not _CAUSED.search(text):
            found.setdefault(key, text.strip())
    return found


def _named(log: str) -> int | None:
    """The rank that our own error line speaks of."""
    found = _PEER.search(log)
    return int(found[1]) if found else None
