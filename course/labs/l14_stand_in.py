"""Lesson 14: what runs a hand-written batch script on a machine without SLURM.

It knows as much of SLURM as such a script needs: directives, `srun` (every task is a process of
this machine), `scontrol show hostnames`, `scontrol requeue`, and `scancel` with and without a
signal. A script finds these three programs in front of its PATH.

    job = StandInJob(Path("runs/mine.sbatch"))
    job.poll()             # "RUNNING", "COMPLETED", "FAILED"; starts the next attempt of the job
    job.signal_script()    # what SLURM does shortly before the time limit

Held by: tests/unit/test_slurm_stand_in.py
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from labcode.slurm.lint.model import BatchJob
from labcode.slurm.lint.options import SHORT, WITH_VALUE

PROGRAMS = ("srun", "scontrol", "scancel")
ADDRESS = "127.0.0.1"  # of each of the nodes
FOLDER = "LABCODE_STAND_IN"  # names the folder of the job to the three programs
FAILING = "LABCODE_STAND_IN_FAILS"  # if it is set, srun fails where it would start a training
FAILED_RANKS = "srun: error: n1: task 0: Exited with exit code 1"
POLL_S = 0.05
GRACE_S = 5.0  # how long a script may run on after it has asked for a requeue


class StandInJob:
    """One job: the attempts of one script, one after the other.

    Args:
        script: The batch script.
        env: More environment variables.
    """

    def __init__(self, script: Path, env: dict[str, str] | None = None) -> None:
        self.path = script
        self.script = BatchJob(script.read_text(encoding="utf-8"))
        self.restarts = 0
        # ports that scripts derive from it should not meet those of another program
        self.number = str(os.getpid())
        self.folder = Path(tempfile.mkdtemp(prefix="labcode-stand-in-"))
        self.log = Path(self._log_name())
        self._env = env or {}
        self._asked_s: float | None = None  # when the script asked for a requeue
        _write_programs(self.folder)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._process = self._start()

    def _log_name(self) -> str:
        name = self.script.first.value("job-name") or self.path.name
        pattern = self.script.first.value("output") or "slurm-%j.out"
        return pattern.replace("%x", name).replace("%j", self.number)

    def _start(self) -> subprocess.Popen:
        nodes = self.script.first.number("nodes") or 1
        tasks = self.script.first.number("ntasks-per-node") or 1
        cpus = self.script.first.value("cpus-per-task")
        own_python = str(Path(sys.executable).parent)
        before = os.environ.get("PATH", os.defpath)
        env = {
            **os.environ,
            **self._env,
            "PATH": os.pathsep.join((str(self.folder), own_python, before)),
            FOLDER: str(self.folder),
            "SLURM_JOB_ID": self.number,
            "SLURM_JOB_NAME": self.script.first.value("job-name") or self.path.name,
            "SLURM_JOB_NODELIST": f"n[1-{nodes}]" if nodes > 1 else "n1",
            "SLURM_NNODES": str(nodes),
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_NTASKS": str(nodes * tasks),
            "SLURM_NTASKS_PER_NODE": str(tasks),
            "SLURM_SUBMIT_DIR": os.getcwd(),
            "SLURM_RESTART_COUNT": str(self.restarts),
        }
        if cpus:
            env["SLURM_CPUS_PER_TASK"] = cpus
        append = self.restarts and self.script.first.value("open-mode") == "append"
        with open(self.log, "ab" if append else "wb") as log:
            return subprocess.Popen(
                ["bash", str(self.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def poll(self) -> str:
        """The state of the job; a requeued one is started again."""
        code = self._process.poll()
        requeued = (self.folder / "requeue").exists()
        if code is None and requeued:
            now_s = time.monotonic()
            self._asked_s = self._asked_s or now_s
            if now_s - self._asked_s > GRACE_S:
                self._process.kill()
        if code is None:
            return "RUNNING"
        end_tasks(self.folder)
        if requeued:
            (self.folder / "requeue").unlink()
            self._asked_s = None
            self.restarts += 1
            self._process = self._start()
            return "RUNNING"
        if (self.folder / "cancelled").exists():
            return "CANCELLED"
        return "FAILED" if code else "COMPLETED"

    @property
    def requeued_early(self) -> bool:
        """Whether the script has asked for a requeue while tasks of it still ran."""
        return (self.folder / "early").exists()

    def signal_script(self) -> None:
        """Send USR1 to the script alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)

    def close(self) -> None:
        """End what still runs and remove the job's folder; fine at any time."""
        end_tasks(self.folder)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _write_programs(folder: Path) -> None:
    for name in PROGRAMS:
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {__spec__.name} {name} "$@"\n')
        program.chmod(0o755)


# ---- the tasks of a step, as their process numbers in a file


def _tasks(folder: Path) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in (folder / "tasks").read_text().split()]
    return []


def _runs(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, 0)
        return True
    return False


def signal_tasks(folder: Path, number: int) -> None:
    """Send a signal to each task that runs, with what it has started."""
    for pid in _tasks(folder):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def end_tasks(folder: Path) -> None:
    """Kill each task that runs."""
    signal_tasks(folder, signal.SIGKILL)
    (folder / "tasks").unlink(missing_ok=True)


# ---- the three programs


def srun(words: Sequence[str], folder: Path) -> int:
    """Start the tasks of a step and wait for them."""
    options, command = split_options(words)
    nodes = int(options.get("nodes") or os.environ["SLURM_NNODES"])
    per_node = options.get("ntasks-per-node")
    if per_node is None and "ntasks" in options:
        size = int(options["ntasks"])
        nodes = min(nodes, size)
    else:
        size = nodes * int(per_node or os.environ["SLURM_NTASKS_PER_NODE"])
    if not command:
        print("srun: fatal: No command given to execute.", file=sys.stderr)
        return 1
    if os.environ.get(FAILING) and "labcode.train" in " ".join(command):
        print(FAILED_RANKS, file=sys.stderr)
        return 1
    local_size = -(-size // nodes)
    processes = []
    for rank in range(size):
        env = {
            **os.environ,
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % local_size),
            "SLURM_NODEID": str(rank // local_size),
            "SLURM_NTASKS": str(size),
            "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_STEP_TASKS_PER_NODE": f"{local_size}(x{nodes})",
        }
        try:
            task = subprocess.Popen(command, env=env, start_new_session=True)
        except OSError as error:
            print(f"slurmstepd: error: execve(): {command[0]}: {error.strerror}", file=sys.stderr)
            return 2
        processes.append(task)
        with open(folder / "tasks", "a") as tasks:
            tasks.write(f"{task.pid}\n")
    return _wait(processes, folder, options.get("kill-on-bad-exit") not in (None, "0"))


def _wait(processes: list[subprocess.Popen], folder: Path, kill_on_bad_exit: bool) -> int:
    """Wait for all tasks; returns the worst exit code, as srun does."""
    worst = 0
    killed = False  # whether the others were ended because one has failed
    running = dict(enumerate(processes))
    while running:
        for rank, task in list(running.items()):
            code = task.poll()
            if code is None:
                continue
            del running[rank]
            if code and not killed:
                said = f"Exited with exit code {code}" if code > 0 else "Killed"
                print(f"srun: error: n1: task {rank}: {said}", file=sys.stderr, flush=True)
                worst = max(worst, code if code > 0 else 128 - code)
                if kill_on_bad_exit:
                    signal_tasks(folder, signal.SIGKILL)
                    killed = True
        time.sleep(POLL_S)
    return worst


def split_options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """({option: value}, the command) of a command line of srun."""
    rest = list(words)
    options: dict[str, str] = {}
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and name in WITH_VALUE and rest:
                value = rest.pop(0)
        elif word.startswith("-K"):
            name = "kill-on-bad-exit"
            value = word[2:] or "1"
        else:
            name = SHORT.get(word[1], word[1])
            value = word[2:]
            if not value and name in WITH_VALUE and rest:
                value = rest.pop(0)
        options[name] = value or "1"
    return options, rest


def scontrol(words: Sequence[str], folder: Path) -> int:
    """`scontrol show hostnames` and `scontrol requeue`."""
    if list(words[:2]) == ["show", "hostnames"]:
        # in one piece: whoever reads only the first line closes the pipe after it
        sys.stdout.write(f"{ADDRESS}\n" * int(os.environ["SLURM_NNODES"]))
        return 0
    if list(words[:1]) == ["requeue"] and _is_this_job(words[-1]):
        if any(_runs(pid) for pid in _tasks(folder)):
            (folder / "early").touch()
        (folder / "requeue").touch()
        return 0
    print(f"scontrol: error: the stand-in knows no {' '.join(words)}", file=sys.stderr)
    return 1


def scancel(words: Sequence[str], folder: Path) -> int:
    """`scancel [--signal=NAME] JOB`."""
    name = None
    rest = list(words)
    jobs = []
    while rest:
        word = rest.pop(0)
        told = re.fullmatch(r"(?:--signal|-s)(?:=?(\w+))?", word)
        if told:
            name = told[1] or (rest.pop(0) if rest else "")
        elif not word.startswith("-"):
            jobs.append(word)
    if not any(_is_this_job(job) for job in jobs):
        print("scancel: error: Invalid job id specified", file=sys.stderr)
        return 1
    if name is None:
        (folder / "cancelled").touch()
        end_tasks(folder)
        return 0
    number = int(name) if name.isdigit() else signal.Signals[f"SIG{name.removeprefix('SIG')}"]
    signal_tasks(folder, number)
    return 0


def _is_this_job(word: str) -> bool:
    return word.partition(".")[0] == os.environ["SLURM_JOB_ID"]


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    run = {"srun": srun, "scontrol": scontrol, "scancel": scancel}[program]
    sys.exit(run(arguments, Path(os.environ[FOLDER])))
