"""A job without SLURM: one torchrun agent for each emulated node of this machine.

The agents meet over TCP on 127.0.0.1.

`start` begins a `supervisor` process, which starts the agents and ends them; the handle reads what
it writes down.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import asdict
from pathlib import Path

import psutil

from labcode.runtime import launch, processes
from labcode.runtime.hardware import gpus_of_driver, usable_cores
from labcode.runtime.units import plural
from labcode.slurm.run.answers import FINAL, JobInfo
from labcode.slurm.run.handle import Handle
from labcode.slurm.run.supervisor import GRACE_S, MODULE, OWN_PID, Plan, Record
from labcode.slurm.script.job import Job
from labcode.slurm.script.site import Site


class LocalHandle(Handle):
    """A job on this machine."""

    def __init__(
        self,
        record: Path,
        where: str,
        keep: bool,
        limit_s: float,
        process: subprocess.Popen | None = None,
    ) -> None:
        super().__init__(record.stem.rpartition("-")[2], where, keep, limit_s)
        self.record = record
        self.process = process

    def info(self) -> JobInfo:
        """What the supervisor wrote down; a supervisor that was killed is a failure."""
        alive = self._alive()
        record = Record.read(self.record)  # after the question, so that what it wrote last counts
        if record.state not in FINAL and not alive:
            record.state = "FAILED"
            record.reason = "the supervisor of the job was killed"
        seconds = 0
        if record.started:
            seconds = int((record.ended or time.time()) - record.started)
        return JobInfo(
            id=self.number,
            name=record.name,
            state=record.state,
            reason=record.reason,
            exit_code=(0, -record.code) if record.code < 0 else (record.code, 0),
            restarts=0,
            nodes=f"{record.nodes} emulated",
            run_time=_clock(seconds),
            time_limit=_clock(int(record.minutes * 60)),
            log=Path(record.log),
            fields={name: str(value) for name, value in asdict(record).items()},
        )

    def _alive(self) -> bool:
        if self.process is not None:
            return self.process.poll() is None
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(Record.read(self.record).pid)
            return processes.alive(supervisor) and MODULE in supervisor.cmdline()
        return False

    def cancel(self) -> None:
        """Ask the supervisor to end the job, and wait until no process of it is left."""
        end = time.monotonic() + 3 * GRACE_S
        while self._alive() and time.monotonic() < end:
            pid = self.process.pid if self.process else Record.read(self.record).pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.2)


def start(job: Job, site: Site, folder: Path, keep: bool = False) -> LocalHandle:
    """Start a job on this machine and return at once.

    Args:
        job: What to run; `nodes` are emulated.
        site: Site, which names the folder of the runs.
        folder: Folder of the log and the record.
        keep: The job outlives this process.

    Raises:
        ValueError: The job is an array, which needs SLURM.
    """
    if job.array or job.dependency:
        what = "an array" if job.array else "an order among jobs"
        raise ValueError(f"{what} needs SLURM: slurm/cluster up 2 starts one here")
    number = f"here{uuid.uuid4().hex[:6]}"
    base = folder.absolute() / f"{job.name}-{number}"
    record = base.with_name(base.name + ".json")
    log = base.with_name(base.name + ".log")
    out = f"{scratch_here(site)}/{job.name}-{number}"
    gpus = gpus_of_driver() if site.gpus.per_node else 0
    port = _free_port()
    plan = Plan(
        agents=[_agent(job, node, number, port, out, gpus) for node in range(job.nodes)],
        record=str(record),
        owner=0 if keep else os.getpid(),
        usr1_s=job.minutes * 60 - job.signal_s if job.resumes else None,
        stopped=f"{job.folder(out)}/stopped" if job.resumes else "",
    )
    log.touch()
    Record("RUNNING", job.name, job.nodes, job.minutes, str(log), started=time.time()).save(record)
    with open(log, "ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, json.dumps(asdict(plan))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            # Ctrl-C reaches the submitting process alone, which then cancels the job.
            start_new_session=True,
        )
    nodes = plural(job.nodes, "emulated node")
    device = f", {gpus} GPUs" if gpus >= job.world_size else ""
    where = f"this machine, no SLURM: {nodes} x {plural(job.ranks_per_node, 'rank')}{device}"
    return LocalHandle(record, where, keep, job.minutes * 60 + 60.0, process)


def scratch_here(site: Site) -> str:
    """The site's folder for runs, or `runs` where this machine does not set a variable in it."""
    for name in re.findall(r"\$\{?(\w+)", site.scratch):
        if not os.environ.get(name):
            return "runs"
    return os.path.expandvars(site.scratch.rstrip("/"))


def find(number: str, folder: Path) -> LocalHandle:
    """The job of that number, started by another process.

    Raises:
        ValueError: There is no job in this folder.
    """
    record = next(iter(folder.glob(f"*-{number}.json")), folder / f"{number}.json")
    Record.read(record)
    return LocalHandle(record.absolute(), "this machine, no SLURM", True, 3600.0)


def _agent(job: Job, node: int, number: str, port: int, out: str, gpus: int) -> list[str]:
    """The command line of the agent of one emulated node."""
    env = _environment(job, node, gpus)
    torchrun = launch.torchrun(
        f"--nnodes={job.nodes}",
        f"--rdzv-id={number}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-conf=is_host={1 if node == 0 else 0}",
        "--local-addr=127.0.0.1",
        nproc=job.ranks_per_node,
    )
    settings = [f"{name}={value}" for name, value in env.items()]
    rank = ["-m", "labcode.runtime.processes", OWN_PID, job.module, *job.arguments(out)]
    return ["env", *settings, *torchrun, *rank]


def _environment(job: Job, node: int, gpus: int) -> dict[str, str]:
    """The environment variables of one emulated node."""
    cores = max(1, len(usable_cores()) // job.world_size)
    env = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(cores),
        "GLOO_SOCKET_IFNAME": _loopback(),
        **job.env,
    }
    if gpus >= job.world_size:
        first = node * job.ranks_per_node
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + job.ranks_per_node)))
    else:  # NCCL refuses two ranks on one GPU: all compute on the CPU, over gloo
        env["CUDA_VISIBLE_DEVICES"] = ""
    if job.nccl_debug:
        env["NCCL_DEBUG"] = job.nccl_debug
    return env


def _loopback() -> str:
    for _, name in socket.if_nameindex():
        if name.startswith("lo"):
            return name
    return "lo"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _clock(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}"
