"""Supervises a job of this machine: starts the agents, and leaves nothing behind.

    python -m labcode.slurm.run.supervisor PLAN

It keeps the time limit, and ends everything when the job is over, cancelled, or (unless it is to be
kept) when the process that submitted it is gone. What it knows stands in a JSON file beside the
log. Each rank runs through `labcode.runtime.processes`: it ends itself when its agent or the
supervisor is gone, even by SIGKILL.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from labcode.runtime import processes
from labcode.runtime.files import write_atomically
from labcode.slurm.run.answers import FINAL

MODULE = "labcode.slurm.run.supervisor"
OWN_PID = "{supervisor}"  # in an agent's command: stands for the number of the supervisor's process
GRACE_S = 5.0  # how long ranks may take to end after SIGTERM, before they are killed
ASK_AGAIN_S = 2.0  # between two signals that ask for a checkpoint
LAST_WORDS_S = 2.0  # after the first failure, for the other agents to print theirs


@dataclass
class Plan:
    """What a supervisor is to do.

    Args:
        agents: The command of each agent.
        record: The file of the job's `Record`.
        owner: The process whose end ends the job; 0 is none.
        usr1_s: When the ranks are asked for a checkpoint, in seconds after the start; None is
            never.
        stopped: The file that the ranks leave if they have stopped when they were asked, and have
            not come to their end.
    """

    agents: list[list[str]]
    record: str
    owner: int = 0
    usr1_s: float | None = None
    stopped: str = ""


@dataclass
class Record:
    """What the file beside the log says of a job.

    Args:
        state: State as SLURM would call it.
        reason: Why it ended.
        code: Exit code of the agent that failed first, negative for a signal.
        name, nodes, minutes: Name, number of nodes and minutes of the job.
        log: Path of the job's log.
        pid: The supervisor.
        started, ended: Seconds since 1970; 0 is not yet.
    """

    state: str
    name: str
    nodes: int
    minutes: float
    log: str
    reason: str = ""
    code: int = 0
    pid: int = 0
    started: float = 0.0
    ended: float = 0.0

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        write_atomically(path, json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Read it back.

        Raises:
            ValueError: There is no such job.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, TypeError, json.JSONDecodeError):
            raise ValueError(
                f"{path} is not the record of a job: there is no such job on this machine"
            ) from None


def supervise(plan: Plan) -> None:
    """Run the agents to their end; writes how it went into the record."""
    path = Path(plan.record)
    record = Record.read(path)
    record.pid = os.getpid()
    record.save(path)
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, lambda *_: stop.set())
    # Inherited: a rank that is still starting must not die of it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    agents: list[subprocess.Popen] = []
    try:
        with open(record.log, "ab") as log:
            for command in plan.agents:
                agents.append(_start(command, log.fileno()))
        record.state, record.reason, record.code = _watch(agents, plan, record, stop)
    except OSError as error:
        record.state = "FAILED"
        record.reason = str(error)
        record.code = 1
    finally:
        processes.end(agents, ask=signal.SIGTERM, grace_s=GRACE_S)  # torchrun passes it on
        if record.state not in FINAL:
            record.state = "FAILED"
        record.ended = time.time()
        record.save(path)


def _start(command: Sequence[str], log: int) -> subprocess.Popen:
    own_pid = str(os.getpid())
    command = [own_pid if word == OWN_PID else word for word in command]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )


def _watch(
    agents: Sequence[subprocess.Popen], plan: Plan, record: Record, stop: threading.Event
) -> tuple[str, str, int]:
    """Until the job is over: (state, reason, exit code)."""
    began = time.monotonic()
    ask_at = plan.usr1_s
    asked = False
    while True:
        codes = [agent.poll() for agent in agents]
        failed = [code for code in codes if code]
        if failed:
            stop.wait(LAST_WORDS_S)
            return "FAILED", "", failed[0]
        if None not in codes:
            if asked and Path(plan.stopped).is_file():
                return "TIMEOUT", "the ranks were asked for a checkpoint before the time limit", 0
            return "COMPLETED", "", 0
        if stop.is_set():
            return "CANCELLED", "", 0
        if plan.owner and os.getppid() != plan.owner:
            return "CANCELLED", "the process that submitted it is gone", 0
        lasted = time.monotonic() - began
        if lasted > record.minutes * 60:
            return "TIMEOUT", "", 0
        if ask_at is not None and lasted > ask_at:
            _ask_for_checkpoint(agents)
            asked = True
            ask_at = lasted + ASK_AGAIN_S  # a rank that is still starting did not hear it
        stop.wait(0.2)


def _ask_for_checkpoint(agents: Sequence[subprocess.Popen]) -> None:
    """Send SIGUSR1 to the ranks, which are the children of the agents."""
    for agent in agents:
        with contextlib.suppress(psutil.NoSuchProcess):
            for rank in psutil.Process(agent.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.send_signal(signal.SIGUSR1)


if __name__ == "__main__":
    supervise(Plan(**json.loads(sys.argv[1])))
