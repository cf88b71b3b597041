"""Why a job ended, in one line: its state, what SLURM says, and which rank failed first, from what the log says."""

import re
import signal
from dataclasses import dataclass

_STATES = {  # state: what it means, and what to do
    "TIMEOUT": "the time limit of {limit} was reached: give more minutes, or let it go on with requeue",
    "OUT_OF_MEMORY": "a process took more memory than the job has: lower train.micro_batch, or ask for more memory",
    "NODE_FAIL": "a node of {nodes} failed: submit again; to go on, give its --train.out and --checkpoint.resume",
    "CANCELLED": "it was cancelled",
    "PREEMPTED": "a job with more priority took its nodes",
    "DEADLINE": "its deadline passed",
    "BOOT_FAIL": "a node of {nodes} did not start",
}
# reasons to be pending for ever
NEVER = {
    "DependencyNeverSatisfied": "the job that it waits for failed: submit that one again",
    "BadConstraints": "no node has what the job asks for: change constraint or GPUs of the site's profile",
    "PartitionTimeLimit": "the partition does not allow this time limit: give fewer minutes",
    "PartitionNodeLimit": "the partition does not have that many nodes: give fewer nodes",
    "JobHoldMaxRequeue": "it was requeued too often: look for the cause in the log",
    "launch_failed_requeued_held": "it could not be launched: look at the folder of the log and at the node",
}

_LIFE = re.compile(
    r"slurmstepd\S*: error: \*\*\* JOB .* DUE TO (?:JOB REQUEUE|NODE FAILURE).*\n"
)  # between two lives
_TORCHRUN = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+)")
_SRUN = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.+)")
_PEER = re.compile(r"^(?:\[\w+\]:? ?)?error: .*?\brank (\d+)\b", re.MULTILINE)
_OWN = re.compile(r"^(?:\[(?:rank ?)?(\d+)\]:? )?error: (.+)", re.MULTILINE)
_PYTHON = re.compile(
    r"^(?:\[rank(\d+)\]: )?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Diverged): .+)",
    re.MULTILINE,
)
_OOM = re.compile(
    r"oom[_-]kill|Out Of Memory|DefaultCPUAllocator: (not enough|can't allocate) memory|CUDA out of memory|MemoryError",
    re.IGNORECASE,
)
# said of a peer that is gone: not the cause
_CAUSED = re.compile(
    r"Connection (reset|closed|refused)|peer|SignalException|ChildFailedError|Broken pipe|RendezvousConn"
)


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Args:
        state: SLURM's word: "COMPLETED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "CANCELLED", ...
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

    def __str__(self):
        lives = (
            f" after {self.restarts} restart{'s' if self.restarts > 1 else ''}"
            if self.restarts
            else ""
        )
        return f"{self.state}{lives}" + (f": {self.reason}" if self.reason else "")


def explain(info, log: str) -> Outcome:
    """The outcome of a job that has ended, or never will begin.

    Args:
        info: A `client.JobInfo`.
        log: What the job printed, all lives of it.
    """
    rank, fault = first_failure(_LIFE.split(log)[-1])
    state, more = info.state, {"restarts": info.restarts}
    own = (
        info.reason if " " in info.reason else ""
    )  # a sentence of our supervisor; SLURM's reasons are one word
    if state == "COMPLETED":
        return Outcome(state, **more)
    never = next((text for reason, text in NEVER.items() if info.reason.startswith(reason)), None)
    if never:
        return Outcome(state, f"{info.reason}: {never}", **more)
    if state == "FAILED" and _OOM.search(fault):
        state = "OUT_OF_MEMORY"
    if state in _STATES:
        text = own or _STATES[state].format(
            limit=info.time_limit or "the job", nodes=info.nodes or "the job"
        )
        if state == "OUT_OF_MEMORY" and rank is not None:
            text = f"rank {rank}: {fault}; {text}"
        return Outcome(state, text, rank if state == "OUT_OF_MEMORY" else None, **more)
    if rank is not None:
        return Outcome(state, f"rank {rank}: {fault}", rank, **more)
    return Outcome(state, own or fault or exit_text(*info.exit_code), **more)


def first_failure(log: str) -> tuple[int | None, str]:
    """(rank, what happened to it) of the rank that failed first in the job's last life; (None, "") if none is named.

    torchrun's report names ranks; srun's lines name its tasks, which are ranks unless torchrun runs in them; our own error
    line and Python's last line say why.
    """
    said = _said(log)
    reports = [(int(rank), int(code)) for rank, code in _TORCHRUN.findall(log)]
    ended = [
        (rank, code) for rank, code in reports if code not in (-signal.SIGTERM, -signal.SIGINT)
    ] or reports
    if ended:
        killed = [
            pair for pair in ended if pair[1] < 0 and pair[1] != -signal.SIGABRT
        ]  # a crash comes before what it causes
        rank, code = (killed or ended)[0]
        why = said.get(rank) or (said.get(None) if code > 0 else None)
        return (_named(log) if code > 0 and _named(log) is not None else rank), why or exit_text(
            *_code(code)
        )
    tasks = [
        (node, _first(numbers), what)
        for node, numbers, what in _SRUN.findall(log)
        if "orced" not in what
    ]
    if tasks and "torch.distributed" not in log and "torchelastic" not in log:
        killed = [task for task in tasks if "Exited" not in task[2] and "Terminated" not in task[2]]
        node, rank, what = (killed or tasks)[0]
        why = said.get(rank) or (said.get(None) if "Exited" in what else None)
        named = _named(log) if "Exited" in what else None
        return (rank if named is None else named), f"{what.lower()} on {node}" + (
            f": {why}" if why else ""
        )
    if tasks:
        return None, f"{tasks[0][2].lower()} on {tasks[0][0]}"
    rank = _named(log)
    if rank is None and len(said) == 1:
        rank = next(iter(said))
    return rank, said.get(rank) or said.get(None) or ""


def exit_text(code: int, by_signal: int = 0) -> str:
    """ "exit code 2", or "killed by SIGKILL", with its usual cause."""
    if by_signal:
        try:
            name = signal.Signals(by_signal).name
        except ValueError:
            name = f"signal {by_signal}"
        return f"killed by {name}" + (
            ": by hand, or by the kernel for want of memory" if name == "SIGKILL" else ""
        )
    return f"exit code {code}"


def _said(log) -> dict[int | None, str]:
    """The reason each rank gave; None is the one without a number."""
    found: dict[int | None, str] = {}
    for pattern in (_OWN, _PYTHON):
        for rank, text in pattern.findall(log):
            key = int(rank) if rank else None
            if not _CAUSED.search(text):
                found.setdefault(key, text.strip())
    return found


def _named(log) -> int | None:
    """The rank that our own error line speaks of."""
    found = _PEER.search(log)
    return int(found[1]) if found else None


def _code(code):
    return (0, -code) if code < 0 else (code, 0)


def _first(numbers):
    return int(re.match(r"\d+", numbers)[0])
