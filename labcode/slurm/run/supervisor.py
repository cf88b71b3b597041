"""Keeps a job of this machine: `python -m labcode.slurm.run.supervisor PLAN` starts the agents, and leaves nothing behind.

It keeps the time limit, and ends everything when the job is over, cancelled, or (unless it is to be kept) when the process
that submitted it is gone. What it knows stands in a JSON file beside the log. Each rank runs through this file too
(`... supervisor rank MODULE`): it ends itself when its agent or the supervisor is gone, even by SIGKILL.
"""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from labcode.files import write_atomically
from labcode.slurm.run.answers import FINAL

MODULE = "labcode.slurm.run.supervisor"
GRACE_S = 5.0  # how long ranks may take to end after SIGTERM, before they are killed
ASK_AGAIN_S = 2.0  # between two signals that ask for a checkpoint
LAST_WORDS_S = 2.0  # after the first failure, for the other agents to print theirs


@dataclass
class Record:
    """What the file beside the log says of a job.

    Args:
        state: As SLURM would call it.
        reason: Why it ended.
        code: Exit code of the agent that failed first, negative for a signal.
        name, nodes, minutes: Of the job.
        log: Its log.
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


def supervise(plan: dict) -> None:
    """Run the agents to their end; writes how it went into the record."""
    path = Path(plan["record"])
    record, stop = Record.read(path), threading.Event()
    record.pid = os.getpid()
    record.save(path)
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, lambda *_: stop.set())
    signal.signal(
        signal.SIGUSR1, signal.SIG_IGN
    )  # inherited: a rank that is still starting must not die of it
    agents = []
    try:
        with open(record.log, "ab") as log:
            for argv in plan["agents"]:
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                agents.append(subprocess.Popen(argv, start_new_session=True, **streams))
        record.state, record.reason, record.code = _watch(agents, plan, record, stop)
    except OSError as error:
        record.state, record.reason, record.code = "FAILED", str(error), 1
    finally:
        _end(agents)
        if record.state not in FINAL:
            record.state = "FAILED"
        record.ended = time.time()
        record.save(path)


def _watch(agents, plan, record, stop) -> tuple[str, str, int]:
    """Until the job is over: (state, reason, exit code)."""
    began, asked, again = time.monotonic(), False, 0.0
    while True:
        codes = [agent.poll() for agent in agents]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            stop.wait(LAST_WORDS_S)
            return "FAILED", "", failed
        if all(code == 0 for code in codes):
            if asked:
                return "TIMEOUT", "the ranks were asked for a checkpoint before the time limit", 0
            return "COMPLETED", "", 0
        lasted = time.monotonic() - began
        if stop.is_set():
            return "CANCELLED", "", 0
        if plan["owner"] and os.getppid() != plan["owner"]:
            return "CANCELLED", "the process that submitted it is gone", 0
        if lasted > record.minutes * 60:
            return "TIMEOUT", "", 0
        if plan["usr1_s"] is not None and lasted > max(plan["usr1_s"], again):
            asked, again = (
                True,
                lasted + ASK_AGAIN_S,
            )  # a rank that is still starting did not hear it
            for rank in _ranks(agents):
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.send_signal(signal.SIGUSR1)
        stop.wait(0.2)


def _ranks(agents):
    for agent in agents:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield from psutil.Process(agent.pid).children()


def _end(agents):
    """End agents and all below them: ranks lead sessions of their own, which a signal to an agent's group cannot reach."""
    family = []
    for agent in agents:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += [
                *psutil.Process(agent.pid).children(recursive=True),
                psutil.Process(agent.pid),
            ]
    for agent in agents:
        if agent.poll() is None:
            agent.terminate()  # torchrun passes it on
    end = time.monotonic() + GRACE_S
    for agent in agents:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(max(0.1, end - time.monotonic()))
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    for agent in agents:
        agent.wait()


# --------------------------------------------------------------------------------------------------------- each rank


def run_rank(module: str, *args: str) -> None:
    """Run `module` as `__main__` with its arguments, and end with the agent that started it."""
    threading.Thread(target=_follow_agent, args=(os.getppid(),), daemon=True).start()
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _follow_agent(agent):
    group = os.getpgid(agent)  # of its own: it leads a session
    with contextlib.suppress(psutil.NoSuchProcess):
        supervisor = psutil.Process(agent).ppid()
        while os.getppid() == agent and psutil.Process(agent).ppid() == supervisor:
            time.sleep(1.0)
    if os.getppid() == agent:  # the supervisor is gone, and the agent has not noticed
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        run_rank(*sys.argv[2:])
    else:
        supervise(json.loads(sys.argv[1]))
