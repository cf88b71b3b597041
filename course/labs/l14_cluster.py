"""Lessons 14 and 15: a small SLURM on this machine, or the reason why there is none.

    lab = open_lab("lesson14")               # says what is there
    lab.sh("srun", "--nodes=2", "hostname")  # prints the command and its output
    lab.close()

Where SLURM cannot be had nothing here raises: commands are shown and not run, and `lab.submit` runs
the job without it.
"""

import atexit
import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from course.labs.l14_faults import FAULTS
from labcode.minislurm import Cluster, Unavailable
from labcode.minislurm.commands import alive
from labcode.minislurm.place import base
from labcode.slurm.run.client import Client
from labcode.slurm.run.handle import Handle
from labcode.slurm.run.submit import submit
from labcode.slurm.script.job import Job
from labcode.slurm.script.site import load

# The ranks of a lab are on the CPU, also where the machine has a GPU: those of the nodes are
# emulated.
ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
NOT_RUN = "(not run: there is no cluster here)\n"
POLL_S = 0.1
WRITTEN = "metrics, weights and TensorBoard files: "  # a training says so at its end
REPOSITORY = Path(__file__).resolve().parents[2]


class Lab:
    """The cluster of a lesson.

    Args:
        cluster: It, or None.
        missing: Why there is none.

    Attributes:
        client: Client for `submit`; None without a cluster.
        said: What the last command printed.
    """

    def __init__(self, cluster: Cluster | None, missing: str = "") -> None:
        self.cluster = cluster
        self.missing = missing
        self.client = Client.of(cluster) if cluster else None
        self.said = ""
        self._jobs: list[Handle] = []

    def sh(
        self,
        *argv: object,
        node: str | None = None,
        env: Mapping[str, object] | None = None,
        timeout_s: float = 120,
    ) -> None:
        """Run a command and print it with its output, which `said` keeps.

        Args:
            argv: Program and arguments.
            node: Node to run on; None is the head node, from which one submits.
            env: More environment variables.
            timeout_s: Then the command is ended, and the output says so.
        """
        words = [str(word) for word in argv]
        print(f"{node or 'head'}$ {shlex.join(words)}")
        if self.cluster is None:
            print(NOT_RUN, end="")
        else:
            print(self._run(self.cluster, words, node, env, timeout_s), end="")

    def _run(
        self,
        cluster: Cluster,
        argv: Sequence[str],
        node: str | None = None,
        env: Mapping[str, object] | None = None,
        timeout_s: float = 120.0,
    ) -> str:
        """The output of a command, and how it ended if that was not well."""
        variables = {**ENV, **(env or {})}
        words = [f"{name}={value}" for name, value in variables.items()]
        command = ["env", *words, *argv]
        try:
            done = cluster.exec(command, node=node, timeout_s=timeout_s, check=False)
        except TimeoutError:
            self.said = f"(no end after {timeout_s:g} s)\n"
            return self.said
        self.said = done.stdout + done.stderr
        if done.returncode:
            return self.said + f"(exit code {done.returncode})\n"
        return self.said

    def batch(
        self,
        script: str,
        *options: str,
        words: Sequence[str] = (),
        env: Mapping[str, object] | None = None,
        timeout_s: float = 120,
    ) -> str:
        """Submit a script, wait until it has ended, and print its log.

        Args:
            script: Path of the script.
            options: Options of sbatch.
            words: The script's own arguments.
            env: Environment variables of the shell that submits.
            timeout_s: Seconds after which the log is printed as it is, with a word on the job.

        Returns:
            The log; "" without a cluster.
        """
        settings = [f"{name}={value}" for name, value in (env or {}).items()]
        before = ["env", *settings] if settings else []
        self.sh(*before, "sbatch", *options, script, *words)
        number = re.search(r"batch job (\d+)", self.said)
        client = self.client
        if client is None or not number:
            return ""
        has_ended = self.until(lambda: client.job(number[1]).ended, timeout_s)
        info = client.job(number[1])
        text = ""
        if info.log and info.log.is_file():
            text = info.log.read_text()
        log = "The log says:"
        if not has_ended:
            log = (
                f"It has not ended, and goes on: `squeue` and `scancel {number[1]}` are yours. "
                "The log so far:"
            )
        print(f"{info.state} after {info.run_time}. {log}\n{text}", end="")
        return text

    def until(self, true: Callable[[], object], timeout_s: float = 120) -> bool:
        """Wait until `true()` holds.

        Returns:
            Whether it came to that; False at once without a cluster.
        """
        end_s = time.monotonic() + timeout_s
        while self.cluster and time.monotonic() < end_s:
            if true():
                return True
            time.sleep(POLL_S)
        return False

    def submit(self, job: Job) -> Handle:
        """The job on the cluster of the lab, or on this machine without SLURM; says which."""
        site = dataclasses.replace(load("local"), logs="runs")
        here = self.client is None
        handle = submit(job, site, client=self.client, here=here, echo=False)
        where = f"job {handle.number}: {handle.where}"
        if not here:
            where = f"job {handle.number} runs on the lab's nodes"
        print(where)
        self._jobs.append(handle)
        return handle

    def script(
        self, path: str, *argv: object, env: Mapping[str, object] | None = None
    ) -> list[Path]:
        """Run a script that submits trainings, from this machine, and print how its jobs went.

        Args:
            path: Path in the repository, such as "slurm/weak_scaling".
            argv: Its arguments; where the jobs go is added to them.
            env: More environment variables.

        Returns:
            The folders that the trainings have named, in their order.
        """
        folders = []
        settings = [f"{name}={value}" for name, value in (env or {}).items()]
        of_the_lab = [f"{name}={value}" for name, value in ENV.items()]
        words = [str(word) for word in argv]
        print(f"$ {shlex.join([*settings, path, *words])}")
        where = ["--cluster", self.cluster.name] if self.cluster else ["--here"]
        # the script's `python` is that of the notebook
        python_first = ["sh", "-c", 'PATH="$0:$PATH" exec "$@"', str(Path(sys.executable).parent)]
        process = subprocess.Popen(
            ["env", *of_the_lab, *settings, *python_first, str(REPOSITORY / path), *words, *where],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with process:
            for line in process.stdout or ():
                written = line.partition(WRITTEN)[2].rstrip()
                if written:
                    folders.append(Path(written))
                elif line.startswith(("job ", "error: ", "usage: ")):
                    print(line.partition("; log: ")[0].rstrip(), flush=True)
        return folders

    def hello(
        self,
        wait_s: float = 60,
        port: int = 20017,
        interface: str | None = "eth0",
        kill: bool = True,
    ) -> None:
        """Run runs/hello.py with one rank on n1 and one on n2; print what each rank said last.

        Args:
            wait_s: How long a rank waits for the other, when they meet and in the all-reduce.
            port: Port at which they meet on n1.
            interface: For GLOO_SOCKET_IFNAME; None leaves it to gloo.
            kill: Whether the first rank that fails ends the other, as a job should.
        """
        env: dict[str, object] = {"MASTER_ADDR": "n1", "MASTER_PORT": port}
        if interface:
            env["GLOO_SOCKET_IFNAME"] = interface
        env["LABCODE_MEET_TIMEOUT_S"] = wait_s
        print(" ".join(f"{name}={value}" for name, value in env.items()))
        if self.cluster is None:
            print(NOT_RUN, end="")
            return
        srun = ["srun", "--nodelist=n1,n2", "--ntasks-per-node=1", "--label"]
        srun.append(f"--kill-on-bad-exit={int(kill)}")
        self._run(self.cluster, [*srun, sys.executable, "runs/hello.py", str(wait_s)], env=env)
        print(told(self.said) or self.said)

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """Break the cluster for a while.

        Args:
            name: "name", "port" or "code": see `l14_faults`.

        Raises:
            ValueError: An unknown fault.
        """
        if name not in FAULTS:
            raise ValueError(f"there is no fault {name!r}: choose one of {', '.join(FAULTS)}")
        with FAULTS[name](self.cluster) if self.cluster else contextlib.nullcontext():
            yield

    def close(self) -> None:
        """Cancel what still runs and remove the cluster; harmless if there is none."""
        if self.client is None:
            for handle in self._jobs:
                _cancel(handle)
        if self.cluster:
            self.cluster.down()  # with every process on it
            print("the cluster is gone, with every process on it")
        self.cluster = None
        self.client = None
        self.missing = "the lab is closed"


def _cancel(handle: Handle) -> None:
    # the processes of a job without SLURM end with this one in any case, so no error matters here
    with contextlib.suppress(Exception):
        if handle.outcome is None:
            handle.cancel()


# ---- starting a lab


def open_lab(name: str, nodes: int = 3) -> Lab:
    """Start the lab's cluster, remove what a killed notebook left behind, and print what there is.

    Args:
        name: Number of the lesson; each process has a cluster of its own.
        nodes: n1, n2, ..., each with 4 CPUs and 2 emulated GPUs.
    """
    _remove_old(name)
    Path("runs").mkdir(exist_ok=True)
    settings = {"FirstJobId": _first_job_number(Path("runs"))}
    try:
        cluster = Cluster.up(nodes=nodes, name=f"{name}-{os.getpid()}", settings=settings)
    except (Unavailable, RuntimeError) as error:
        print(f"no SLURM here: {error}")
        print(
            "The commands of this lesson are shown and not run; "
            "the training jobs run on this machine without SLURM."
        )
        return Lab(None, str(error))
    lab = Lab(cluster)
    atexit.register(cluster.down)
    print(f"a SLURM cluster of {nodes} nodes: {', '.join(cluster.spec.names())}")
    return lab


def _remove_old(name: str) -> None:
    """Remove the clusters of this lesson whose process is gone, and this process's own.

    This process has one if its set-up cell is run again.
    """
    for folder in base().glob(f"{name}-*"):
        pid = folder.name.rpartition("-")[2]
        if not pid.isdigit():
            continue
        owner = int(pid)
        if owner == os.getpid() or not alive(owner):
            Cluster(folder.name).down()


def _first_job_number(runs: Path) -> int:
    """One above the jobs whose logs are there, so that no job finds the log of another one."""
    last = 0
    for path in runs.iterdir():
        number = re.search(r"-(\d+)(\.log)?$", path.name)
        if number:
            last = max(last, int(number[1]))
    return last + 1


# ---- what ranks say

_ERROR = re.compile(r"^(?:\[rank\d+\]: )?(?:\w+\.)*(\w*Error: .+|what\(\): +.+)$")
_ABORTED = re.compile(r"^terminate called after throwing an instance of '(.+)'$")
_PLACE = re.compile(r"\[(?:enforce fail at )?/\S+:\d+\]\s*")


def told(said: str) -> str:
    """What the ranks said in the output of `srun --label`, in the order of ranks.

    Of a traceback this is the last line, without places in sources.

    Args:
        said: The output.
    """
    errors = {}
    lines = []
    for line in said.splitlines():
        rank, colon, text = line.partition(": ")
        if not colon or not rank.isdigit():
            continue
        error = _ERROR.match(text.strip())
        aborted = _ABORTED.match(text.strip())
        if error:
            message = _PLACE.sub("", error[1]).strip()
            errors[int(rank)] = message.partition(". This is typically")[0]
        elif aborted:
            # srun may end before what(), which is the next line, has come through
            errors.setdefault(int(rank), f"aborted by {aborted[1]}")
        elif text.startswith("rank "):
            lines.append(text)
    lines += [f"rank {rank}: {text}" for rank, text in errors.items()]
    return "\n".join(sorted(lines))


# ---- step times

StepLine = tuple[int, float, float]  # step, loss, seconds

_STEP = re.compile(r"step (\d+)/\d+ \| loss ([\d.]+) .*?([\d.]+) s/step")


def steps(log: str) -> list[StepLine]:
    """(step, loss, seconds) of each line of a training log that tells them."""
    return [(int(step), float(loss), float(seconds)) for step, loss, seconds in _STEP.findall(log)]


def at_rates(
    lab: Lab, handle: Handle, rates: Sequence[str], count: int = 6, timeout_s: float = 200
) -> dict[str, list[StepLine]]:
    """Change the link of n2 under a running job.

    Args:
        lab: Lab that it runs in.
        handle: A job that trains and logs each step.
        rates: Rates as `tc` writes them, such as "100mbit"; "off" is the link as it is.
        count: Steps at each rate. The one under way while the rate changes, and the next, are left
            out.
        timeout_s: Limit for each rate.

    Returns:
        {rate: steps at that rate}; without a cluster {"off": all steps of the job but two}.

    Raises:
        JobFailed: The job ended, or did not make its steps in time.
    """
    cluster = lab.cluster
    if cluster is None:
        handle.wait(echo=False)
        return {"off": steps(handle.log())[2:]}

    found = {}
    _reached(3, lab, handle, timeout_s)
    try:
        for rate in rates:
            cluster.slow("n2", rate)
            first = len(steps(handle.log())) + 2
            so_far = _reached(first + count, lab, handle, timeout_s)
            found[rate] = so_far[first : first + count]
    finally:
        cluster.slow("n2", "off")
    return found


def sent_per_step(
    lab: Lab, handle: Handle, node: str, count: int, timeout_s: float = 200
) -> float | None:
    """Bytes that leave a node in a step, by the count of its network interface.

    Args:
        lab: Lab that the job runs in.
        handle: A job that trains and logs each step.
        node: Node whose interface is read.
        count: Steps between the two readings. Either may fall into the midst of a step, so the
            result is uncertain by 1/count.
        timeout_s: Limit for that many steps.

    Returns:
        None without a cluster.

    Raises:
        JobFailed: The job ended, or did not make its steps in time.

    Held by: tests/slurm/test_slurm_lab.py
    """
    if lab.cluster is None:
        return None
    first = len(_reached(3, lab, handle, timeout_s))
    before = _sent_bytes(lab.cluster, node)
    last = len(_reached(first + count, lab, handle, timeout_s))
    return (_sent_bytes(lab.cluster, node) - before) / (last - first)


def _reached(number: int, lab: Lab, handle: Handle, timeout_s: float) -> list[StepLine]:
    """The steps of a job, once there are `number` of them."""
    lab.until(lambda: len(steps(handle.log())) >= number or handle.info().ended, timeout_s)
    found = steps(handle.log())
    if len(found) < number:
        handle.cancel()
        handle.wait(echo=False)  # raises, with the reason
    return found


def _sent_bytes(cluster: Cluster, node: str) -> int:
    """What has left a node over eth0 since it was started: the ninth number of its line."""
    interfaces = cluster.node(node, ["cat", "/proc/net/dev"]).stdout
    numbers = interfaces.partition("eth0:")[2].split()
    return int(numbers[8])
