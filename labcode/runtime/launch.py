"""Run a module under torchrun from Python: one call, one labelled output, one error.

    launch.run("labcode.train", "gpt_tiny", "--train.steps", "20", nproc=2)

A bare `!torchrun ...` in a notebook cannot fail: a non-zero exit is no error there, and Ctrl-C may
leave ranks behind. What runs on each rank is in `labcode.runtime.launch_rank`. A job without SLURM
(`labcode.slurm.run.local`) starts its agents with `torchrun` below, too.
"""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labcode.runtime import hardware, processes
from labcode.runtime.units import plural

GRACE_S = 5.0  # how long ranks may take to end after an interrupt, before they are killed
MAX_NPROC = 512
# In torchrun's account of a failure.
_REPORT = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+)")
# How the ranks end that torchrun ends because another one failed.
_ENDED_BY_TORCHRUN = (0, -signal.SIGTERM, -signal.SIGINT)


class LaunchError(RuntimeError):
    """A launched module failed: "rank 1 failed after 3.2 s: ValueError: ...".

    That rank's traceback is a note of the error.

    Args:
        message: The line above.
        rank: The rank that failed first; None when no single rank did.
        output: What all ranks printed until then.
    """

    def __init__(self, message: str, rank: int | None = None, output: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.output = output


@dataclass(frozen=True)
class Completed:
    """A launch that succeeded.

    Args:
        output: What all ranks printed, each line as "[rank 1] ...".
        seconds: Wall time, start-up included.
    """

    output: str
    seconds: float


def run(
    module: str,
    *args: Any,
    nproc: int = 2,
    timeout_s: float = 600.0,
    restarts: int = 0,
    env_extra: dict[str, str] | None = None,
    echo: bool = True,
) -> Completed:
    """Run `python -m module args` on `nproc` ranks of this machine and wait for them.

    Where it has fewer GPUs than that, but some, none of the ranks sees one: NCCL refuses two ranks
    on one GPU, and so they compute on the CPU, over gloo.

    Args:
        module: Dotted name, as after `python -m`.
        args: Command line of the module; each is turned into a string.
        nproc: Number of ranks.
        timeout_s: Time after which all ranks are ended.
        restarts: How often torchrun starts all ranks again after one of them has failed.
        env_extra: Environment variables to add.
        echo: Print each line as it comes.

    Raises:
        LaunchError: A rank failed, or the time is over. No process is left then, nor after Ctrl-C.
        ValueError: `nproc`, `timeout_s`, `restarts` or `module` is no number of ranks, no time, no
            number of restarts, or no name.
    """
    _check(module, nproc, timeout_s, restarts)
    with tempfile.TemporaryDirectory(
        prefix="labcode-launch-", ignore_cleanup_errors=True
    ) as folder:
        command = _ending_with_this_process(
            torchrun(
                "--standalone",
                f"--log-dir={folder}",
                f"--max-restarts={restarts}",
                nproc=nproc,
            ),
            folder,
        )
        # torchrun fills in the rank.
        command += ["-m", "labcode.runtime.launch_rank", str(os.getpid()), folder, "${local_rank}"]
        command += [module, *map(str, args)]
        started = time.monotonic()
        process = _start(command, Path(folder), _on_the_cpu(nproc) | (env_extra or {}))
        output = _Output(process, echo)
        try:
            in_time = output.follow(started + timeout_s)
        finally:
            processes.end([process], ask=signal.SIGINT, grace_s=GRACE_S)
            output.drain()
        seconds = time.monotonic() - started
        if not in_time:
            raise LaunchError(
                f"{module} did not end within {timeout_s:g} s: all {nproc} ranks were ended",
                None,
                output.text,
            )
        if process.returncode:
            raise _error(Path(folder), process.returncode, seconds, restarts, output.text)
        return Completed(output.text, seconds)


def torchrun(*options: str, nproc: int) -> list[str]:
    """The command of one torchrun agent with `nproc` ranks; what they run is to be appended."""
    agent = [sys.executable, "-m", "torch.distributed.run"]
    return [*agent, *options, f"--nproc-per-node={nproc}"]


def _check(module: str, nproc: int, timeout_s: float, restarts: int) -> None:
    """Raises ValueError for arguments that cannot be meant."""
    if isinstance(nproc, bool) or not isinstance(nproc, int):
        raise ValueError(f"nproc={nproc!r}: it is the number of ranks, such as 2")
    if nproc < 1:
        raise ValueError(f"nproc={nproc}: launch at least 1 rank")
    if nproc > MAX_NPROC:
        raise ValueError(f"nproc={nproc}: launch at most {MAX_NPROC} ranks on one machine")
    # not "<= 0", which nan is not either; and no thread can wait forever
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise ValueError(f"timeout_s={timeout_s!r}: it is a time in seconds, above 0, such as 600")
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
        raise ValueError(f"restarts={restarts!r}: it is a number of restarts, 0 or more")
    if not isinstance(module, str) or not all(map(str.isidentifier, module.split("."))):
        raise ValueError(f"module={module!r}: it is a dotted name, such as 'labcode.train'")


def _ending_with_this_process(agent: list[str], folder: str) -> list[str]:
    """The command of an agent of torchrun that does not outlive this process.

    The ranks see to that too, once they run; that takes torchrun some seconds.
    """
    python, _m, module, *options = agent
    watched = ["-m", "labcode.runtime.processes", "--remove", folder, str(os.getpid())]
    return [python, *watched, module, *options]


def _on_the_cpu(nproc: int) -> dict[str, str]:
    """Environment variables that hide the GPUs from more ranks than there are GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        num_gpus = hardware.gpus_of_driver()
    else:
        num_gpus = len([word for word in visible.split(",") if word.strip()])
    return {"CUDA_VISIBLE_DEVICES": ""} if 0 < num_gpus < nproc else {}


def _start(command: Sequence[str], folder: Path, env_extra: dict[str, str]) -> subprocess.Popen:
    with open(folder / "torchrun.log", "wb") as log:
        return subprocess.Popen(
            command,
            env=os.environ | env_extra,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # of the ranks alone: torchrun itself writes to stderr
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the others
        )


class _Output:
    """The lines that a process writes, collected and echoed as they come."""

    def __init__(self, process: subprocess.Popen, echo: bool) -> None:
        self.process = process
        self.echo = echo
        self.lines: list[str] = []
        self.incoming: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.open = True
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self.incoming.put(line.decode(errors="replace").rstrip("\n"))
        self.incoming.put(None)

    def _next(self, timeout_s: float) -> bool:
        """Take one line; False if none came."""
        try:
            line = self.incoming.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if line is None:
            self.open = False
            return False
        self.lines.append(line)
        if self.echo:
            print(line, flush=True)
        return True

    def follow(self, deadline: float) -> bool:
        """Until the process ends; False if the deadline comes first."""
        while self.open or self.process.poll() is None:
            if time.monotonic() > deadline:
                return False
            came = self._next(0.1)
            if not came and self.process.poll() is not None:
                break
            if not self.open:
                time.sleep(0.05)
        return True

    def drain(self) -> None:
        """What is still in the pipe; a stray grandchild that keeps it open is not waited for."""
        while self.open and self._next(1.0):
            pass


# ---- why it failed


def _error(folder: Path, code: int, seconds: float, restarts: int, output: str) -> LaunchError:
    """The first failure of the last attempt, from what its ranks noted and torchrun's report."""
    log = ""
    with contextlib.suppress(FileNotFoundError):  # somebody tidied up the folder
        log = (folder / "torchrun.log").read_text(errors="replace")
    notes = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    notes += _crashes(log, {note["rank"] for note in notes})
    if not notes:
        lines = [line for line in log.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {code}"
        if code < 0:
            reason = f"killed by signal {-code}"
        return LaunchError(f"torchrun failed after {seconds:.1f} s: {reason}", None, output)
    earliest = min(notes, key=lambda note: note["time"])
    # When all ranks fail with the same message the text should not vary: the lowest one is named.
    same = [note for note in notes if note["error"] == earliest["error"]]
    first = min(same, key=lambda note: note["rank"])
    rank = first["rank"]
    when = f"after {seconds:.1f} s"
    if restarts:
        when += f" and {plural(restarts, 'restart')}"
    error = LaunchError(f"rank {rank} failed {when}: {first['error']}", rank, output)
    if first["traceback"]:
        error.add_note(f"on rank {rank}: {first['traceback'].rstrip()}")
    return error


def _crashes(log: str, noted: set[int]) -> list[dict[str, Any]]:
    """Notes for the ranks that could not write one themselves, out of torchrun's report."""
    notes = []
    for match in _REPORT.findall(log):
        rank = int(match[0])
        exit_code = int(match[1])
        if rank in noted or exit_code in _ENDED_BY_TORCHRUN:
            continue
        reason = f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        # A crash comes before the errors that it causes elsewhere. An abort may be caused itself,
        # by NCCL's watchdog.
        when = time.time() if exit_code == -signal.SIGABRT else 0.0
        notes.append({"rank": rank, "time": when, "error": reason, "traceback": ""})
    return notes
