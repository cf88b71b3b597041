"""A small SLURM for a lesson: three nodes on this machine, or the reason why there are none; its faults, made and cured.

    lab = open_lab("lesson12")               # says what is there
    lab.sh("srun", "--nodes=2", "hostname")  # prints the command and what it says
    lab.close()

Where SLURM cannot be had nothing here raises: commands are shown and not run, and `lab.submit` runs the job without it.
"""

import atexit
import contextlib
import dataclasses
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from labcode.files import write_atomically
from labcode.minislurm import Cluster, Unavailable
from labcode.minislurm.place import base
from labcode.minislurm.processes import alive
from labcode.slurm.run.client import Client
from labcode.slurm.run.handle import Handle
from labcode.slurm.run.submit import submit
from labcode.slurm.script.job import Job
from labcode.slurm.script.site import load

CLOSED = "20000-29999"  # the ports that the fault "port" closes
# the ranks of a lab are on the CPU, also where the machine has a GPU: its nodes only emulate them
ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?(?:\w+\.)*(\w*Error: .+|what\(\): +.+)$")
_SOURCE = re.compile(r"\[(?:enforce fail at )?/\S+:\d+\]\s*")


class Lab:
    """The cluster of a lesson.

    Args:
        cluster: It, or None.
        missing: Why there is none.

    Attributes:
        client: For `submit`; None without a cluster.
        said: What the last command printed.
    """

    def __init__(self, cluster: Cluster | None, missing: str = ""):
        self.cluster, self.missing = cluster, missing
        self.client = Client.of(cluster) if cluster else None
        self.said = ""
        self._jobs: list[Handle] = []

    def sh(self, *argv, node: str | None = None, env=None, timeout_s: float = 120) -> None:
        """Run a command on the head node or on `node`; print both, and keep what it said in `said`.

        Args:
            argv: Program and arguments.
            node: Where; None is the head node, from which one submits.
            env: More environment variables.
            timeout_s: Then it is ended, and the output says so.
        """
        print(f"{node or 'head'}$ {shlex.join(map(str, argv))}")
        print(
            self._run(argv, node, env, timeout_s)
            if self.cluster
            else "(not run: there is no cluster here)\n",
            end="",
        )

    def _run(self, argv, node=None, env=None, timeout_s=120.0) -> str:
        words = [f"{name}={value}" for name, value in {**ENV, **(env or {})}.items()]
        try:
            done = self.cluster.exec(
                ["env", *words, *argv], node=node, timeout_s=timeout_s, check=False
            )
        except TimeoutError:
            self.said = ""
            return f"(no end after {timeout_s:g} s)\n"
        self.said = done.stdout + done.stderr
        return self.said + (f"(exit code {done.returncode})\n" if done.returncode else "")

    def batch(self, script: str, *options: str) -> str:
        """Submit a script, wait for its end, print its log; returns the log."""
        self.sh("sbatch", *options, script)
        number = re.search(r"batch job (\d+)", self.said)
        if not number:
            return ""
        self.until(lambda: self.client.job(number[1]).ended)
        info = self.client.job(number[1])
        text = info.log.read_text() if info.log and info.log.is_file() else ""
        print(f"{info.state} after {info.run_time}. The log says:\n{text}", end="")
        return text

    def until(self, true: Callable[[], bool], timeout_s: float = 120) -> bool:
        """Wait until `true()`; returns whether it came to that. At once False without a cluster."""
        end = time.monotonic() + timeout_s
        while self.cluster and time.monotonic() < end:
            if true():
                return True
            time.sleep(0.1)
        return False

    def submit(self, job: Job) -> Handle:
        """The job on the cluster of the lab, or without SLURM on this machine; says which."""
        site = dataclasses.replace(load("local"), logs="runs")
        handle = submit(job, site, client=self.client, here=self.client is None, echo=False)
        print(
            f"job {handle.number}: {'SLURM, on nodes of the lab' if self.client else handle.where}"
        )
        self._jobs.append(handle)
        return handle

    def hello(
        self,
        wait_s: float = 60,
        port: int = 20017,
        interface: str | None = "eth0",
        kill: bool = True,
    ) -> None:
        """Run runs/hello.py with one rank on n1 and one on n2; print what they said, or the error of each.

        Args:
            wait_s: How long a rank waits for the other.
            port: Where they meet on n1.
            interface: For GLOO_SOCKET_IFNAME; None leaves it to gloo.
            kill: Whether the first rank that fails ends the other, as a job should.
        """
        env = {"MASTER_ADDR": "n1", "MASTER_PORT": port} | (
            {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        )
        print(" ".join(f"{name}={value}" for name, value in env.items()))
        srun = [
            "srun",
            "--nodelist=n1,n2",
            "--ntasks-per-node=1",
            f"--kill-on-bad-exit={int(kill)}",
            "--label",
        ]
        if self.cluster:
            self._run([*srun, sys.executable, "runs/hello.py", str(wait_s)], env=env)
        print(told(self.said) if self.cluster else "(not run: there is no cluster here)")

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """Break the cluster for a while.

        Args:
            name: "name": each node's /etc/hosts has its own name at 127.0.1.1, as Debian installs it. "port": n1 answers
                on no port from 20000 to 29999. "code": n2 has another runs/hello.py, of 96 numbers.

        Raises:
            ValueError: An unknown fault.
        """
        if name not in _FAULTS:
            raise ValueError(f"there is no fault {name!r}: choose one of {', '.join(_FAULTS)}")
        with _FAULTS[name](self.cluster) if self.cluster else contextlib.nullcontext():
            yield

    def close(self) -> None:
        """Cancel what still runs and remove the cluster; fine if there is none."""
        for handle in self._jobs:
            with contextlib.suppress(Exception):  # the next line ends everything in any case
                if handle.outcome is None and self.client is None:
                    handle.cancel()
        if self.cluster:
            self.cluster.down()
            print("the cluster is gone, with every process on it")
        self.cluster = self.client = None
        self.missing = "the lab is closed"


def open_lab(name: str, nodes: int = 3) -> Lab:
    """Start the lab's cluster, and remove what a killed notebook left behind; prints what there is.

    Args:
        name: Of the lesson; each process has a cluster of its own.
        nodes: n1, n2, ..., each with 4 CPUs and 2 emulated GPUs.
    """
    for folder in base().glob(f"{name}-*"):
        with contextlib.suppress(ValueError):
            owner = int(folder.name.rpartition("-")[2])
            if owner == os.getpid() or not alive(
                owner
            ):  # the set-up cell is run again, or its kernel was killed
                Cluster(folder.name).down()
    Path("runs").mkdir(exist_ok=True)
    numbers = [re.search(r"-(\d+)(\.log)?$", path.name) for path in Path("runs").iterdir()]
    first = 1 + max(
        (int(number[1]) for number in numbers if number), default=0
    )  # no job finds the log of another
    try:
        cluster = Cluster.up(
            nodes=nodes, name=f"{name}-{os.getpid()}", settings={"FirstJobId": first}
        )
    except (Unavailable, RuntimeError) as error:
        print(f"no SLURM here: {error}")
        print(
            "The commands of this lesson are shown and not run; the training jobs run on this machine without SLURM."
        )
        return Lab(None, str(error))
    lab = Lab(cluster)
    atexit.register(cluster.down)
    print(f"a SLURM cluster of {nodes} nodes: {', '.join(cluster.spec.names())}")
    return lab


def told(said: str) -> str:
    """Of `srun --label` the lines of the ranks in their order; of a traceback its last line, without places in sources."""
    errors, lines = {}, []
    for line in said.splitlines():
        rank, colon, text = line.partition(": ")
        if not (colon and rank.isdigit()):
            continue
        if error := _ERROR.match(text.strip()):
            errors[int(rank)] = (
                _SOURCE.sub("", error[1]).strip().partition(". This is typically")[0]
            )
        elif text.startswith("rank "):
            lines.append(text)
    lines += [f"rank {rank}: {text}" for rank, text in errors.items()]
    return "\n".join(sorted(lines))


# ------------------------------------------------------------------------------------------------------------ faults


@contextlib.contextmanager
def _own_name_is_local(cluster):
    files = {node: cluster.folder / node / "hosts" for node in cluster.spec.names()}
    before = {node: file.read_text() for node, file in files.items()}
    for (
        node,
        file,
    ) in files.items():  # written in place: the file is bound over the node's /etc/hosts
        file.write_text(f"127.0.1.1 {node}\n{before[node]}")
    try:
        yield
    finally:
        for node, file in files.items():
            file.write_text(before[node])


@contextlib.contextmanager
def _closed_ports(cluster):
    cluster.block("n1", CLOSED)
    try:
        yield
    finally:
        cluster.unblock("n1", CLOSED)


@contextlib.contextmanager
def _other_code(cluster):
    program, other = Path("runs/hello.py").resolve(), Path("runs/hello-old.py").resolve()
    write_atomically(other, program.read_text().replace("HIDDEN = 64", "HIDDEN = 96").encode())
    cluster.exec(["mount", "--bind", str(other), str(program)], node="n2", root=True)
    try:
        yield
    finally:
        cluster.exec(["umount", str(program)], node="n2", root=True)


_FAULTS = {"name": _own_name_is_local, "port": _closed_ports, "code": _other_code}


# -------------------------------------------------------------------------------------------------------- step times

_STEP = re.compile(r"step (\d+)/\d+ \| loss ([\d.]+) .*?([\d.]+) s/step")


def steps(log: str) -> list[tuple[int, float, float]]:
    """(step, loss, seconds) of each line of a training log that tells them."""
    return [(int(step), float(loss), float(seconds)) for step, loss, seconds in _STEP.findall(log)]


def at_rates(
    lab: Lab, handle: Handle, rates, count: int = 6, timeout_s: float = 200
) -> dict[str, list]:
    """Change the link of n2 under a running job: {rate: steps at that rate}; without a cluster all steps of the job.

    Args:
        handle: A job that trains and logs each step.
        rates: As `tc` writes them, such as "100mbit"; "off" is the link as it is.
        count: Steps at each rate. The one under way while the rate changes, and the next, are left out.
        timeout_s: Limit for each rate.

    Raises:
        JobFailed: The job ended, or did not make its steps in time.
    """
    if not lab.cluster:
        handle.wait(echo=False)
        return {"off": steps(handle.log())[2:]}
    found = {}

    def reached(number):
        lab.until(lambda: len(steps(handle.log())) >= number or handle.info().ended, timeout_s)
        if len(steps(handle.log())) < number:
            handle.cancel()
            handle.wait(echo=False)  # raises, with the reason

    reached(3)
    try:
        for rate in rates:
            lab.cluster.slow("n2", rate)
            first = len(steps(handle.log())) + 2
            reached(first + count)
            found[rate] = steps(handle.log())[first : first + count]
    finally:
        lab.cluster.slow("n2", "off")
    return found
