"""A job without SLURM: one torchrun agent for each emulated node of this machine, rendezvous over TCP on 127.0.0.1.

`start` begins a `supervisor` process, which starts the agents and ends them; the handle reads what it writes down.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import asdict
from pathlib import Path

import psutil

from labcode.slurm.run.answers import FINAL, JobInfo
from labcode.slurm.run.handle import Handle
from labcode.slurm.run.supervisor import GRACE_S, MODULE, Record
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
    ):
        super().__init__(record.stem.rpartition("-")[2], where, keep, limit_s)
        self.record, self.process = record, process

    def info(self) -> JobInfo:
        """What the supervisor wrote down; a supervisor that was killed is a failure."""
        alive = self._alive()
        record = Record.read(self.record)  # after the question, so that what it wrote last counts
        if record.state not in FINAL and not alive:
            record.state, record.reason = "FAILED", "the supervisor of the job was killed"
        code = (0, -record.code) if record.code < 0 else (record.code, 0)
        seconds = int((record.ended or time.time()) - record.started) if record.started else 0
        return JobInfo(
            id=self.number,
            name=record.name,
            state=record.state,
            reason=record.reason,
            exit_code=code,
            restarts=0,
            nodes=f"{record.nodes} emulated",
            run_time=_clock(seconds),
            time_limit=_clock(int(record.minutes * 60)),
            log=Path(record.log),
            fields=asdict(record),
        )

    def _alive(self):
        if self.process is not None:
            return self.process.poll() is None
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(Record.read(self.record).pid)
            return supervisor.status() != psutil.STATUS_ZOMBIE and MODULE in supervisor.cmdline()
        return False

    def cancel(self) -> None:
        """Ask the supervisor to end the job, and wait until no process of it is left."""
        end = time.monotonic() + 3 * GRACE_S
        while self._alive() and time.monotonic() < end:
            with contextlib.suppress(ProcessLookupError):
                os.kill(
                    self.process.pid if self.process else Record.read(self.record).pid,
                    signal.SIGTERM,
                )
            time.sleep(0.2)


def start(job: Job, site: Site, folder: Path, keep: bool = False) -> LocalHandle:
    """Start a job on this machine and return at once.

    Args:
        job: What to run; `nodes` are emulated.
        site: For the folder of the runs.
        folder: Where log and record lie.
        keep: The job outlives this process.

    Raises:
        ValueError: The job is an array, which needs SLURM.
    """
    if job.array or job.dependency:
        raise ValueError(
            f"an {'array' if job.array else 'order among jobs'} needs SLURM: slurm/cluster up 2 starts one here"
        )
    number = f"here{uuid.uuid4().hex[:6]}"
    base = folder.absolute() / f"{job.name}-{number}"
    record, log = base.with_name(base.name + ".json"), base.with_name(base.name + ".log")
    out = os.path.expandvars(f"{site.scratch.rstrip('/')}/{job.name}-{number}")
    gpus = _gpus() if site.gpus.per_node else 0
    plan = {
        "agents": [
            _agent(job, node, number, port, out, gpus)
            for port in [_free_port()]
            for node in range(job.nodes)
        ],
        "record": str(record),
        "owner": 0 if keep else os.getpid(),
        "usr1_s": job.minutes * 60 - job.signal_s if job.resumes else None,
    }
    log.touch()
    Record("RUNNING", job.name, job.nodes, job.minutes, str(log), started=time.time()).save(record)
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, json.dumps(plan)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=open(log, "ab"),  # noqa: SIM115 (handed to the child)
        start_new_session=True,  # Ctrl-C reaches the submitting process alone, which then cancels
    )
    device = "" if gpus < job.world_size else f", {gpus} GPUs"
    where = f"this machine, no SLURM: {_count(job.nodes, 'emulated node')} x {_count(job.ranks_per_node, 'rank')}{device}"
    return LocalHandle(record, where, keep, job.minutes * 60 + 60.0, process)


def find(number: str, folder: Path) -> LocalHandle:
    """The job of that number, started by another process.

    Raises:
        ValueError: There is none in this folder.
    """
    record = next(iter(folder.glob(f"*-{number}.json")), folder / f"{number}.json")
    Record.read(record)
    return LocalHandle(record.absolute(), "this machine, no SLURM", True, 3600.0)


def _agent(job, node, number, port, out, gpus):
    """The command line of the agent of one emulated node."""
    cores = max(1, (os.cpu_count() or 1) // job.world_size)
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
    torchrun = [
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.ranks_per_node}",
        f"--rdzv-id={number}",
    ]
    torchrun += [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-conf=is_host={int(node == 0)}",
    ]
    torchrun += ["--local-addr=127.0.0.1", "-m", MODULE, "rank", job.module, *job.arguments(out)]
    return [
        "env", *(f"{name}={value}" for name, value in env.items()), sys.executable, "-m", "torch.distributed.run", *torchrun
    ]  # fmt: skip


def _loopback():
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _gpus() -> int:
    """How many GPUs the driver knows."""
    if not shutil.which("nvidia-smi"):
        return 0
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def _count(number, what):
    return f"{number} {what}{'' if number == 1 else 's'}"


def _clock(seconds):
    return f"{seconds // 3600:02}:{seconds % 3600 // 60:02}:{seconds % 60:02}"
