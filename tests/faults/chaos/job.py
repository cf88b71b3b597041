"""A training under torchrun that is disturbed: its processes, and what it has done so far."""

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from labcode.measure import metrics
from labcode.runtime import launch, processes
from labcode.train.checkpoint.folder import read_about, verify
from labcode.train.checkpoint.tensors import DamagedError

from .. import waiting
from ..disks import Disk

LOOK_S = 0.005  # between two looks at a job
SHUTDOWN_S = 2  # how long torchrun waits for ranks that it ends, such as a stopped one
RESTARTS = 1_000_000  # torchrun's own limit is not what is looked at
_ATTEMPT = re.compile(r"^\d+ ranks? on ", re.MULTILINE)
_RESUMED = re.compile(r"^resuming from .*/step-(\d+)$", re.MULTILINE)
_STEP = re.compile(r"^step (\d+)/", re.MULTILINE)
_DONE = re.compile(r"^\d+ steps are done", re.MULTILINE)


class StuckError(Exception):
    """A job did not do in time what it should have done."""


@dataclass(frozen=True)
class Seen:
    """What lies in the folder of a run while nobody writes to it.

    Args:
        step: The last one with a row of metrics.
        rows: The lines of metrics, by step; validation has lines of its own.
        checkpoints: {step: bytes} of those that are whole.
    """

    step: int
    rows: list[tuple[int, bytes]]
    checkpoints: dict[int, int]


class Job:
    """A training that can be started again and again in the same folder.

    Args:
        args: Arguments of `python -m labcode.train`, without the folder.
        run: Folder of the run, as its ranks name it.
        work: Existing folder for the logs.
        nproc: Number of ranks.
        disk: The disk on which the run lies; None: one that this process sees as well.
        limit_s: Time after which a job that should do something is stuck.
    """

    def __init__(
        self,
        args: Sequence[str],
        run: Path,
        work: Path,
        nproc: int,
        disk: Disk | None,
        limit_s: float,
    ) -> None:
        self.nproc = nproc
        self.limit_s = limit_s
        self.run = run if disk is None else disk.seen(run)
        self.work = work
        self.starts = 0
        self._disk = disk
        self._process: subprocess.Popen | None = None
        options = [
            "--standalone",
            f"--max-restarts={RESTARTS}",
            f"--shutdown-timeout={SHUTDOWN_S}",
            f"--log-dir={work / 'torchrun'}",
        ]
        python, *agent = launch.torchrun(*options, nproc=nproc)
        agent.remove("-m")
        # ends with this process
        watched = [python, "-m", "labcode.runtime.processes", str(os.getpid()), *agent]
        self._command = [*watched, "-m", "labcode.train", *args, f"--train.out={run}"]

    # ---- its processes

    def start(self) -> None:
        """Give the command, as a user or SLURM would."""
        self.starts += 1
        enter = self._disk.enter if self._disk else None
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=enter,
            )

    @property
    def agent(self) -> subprocess.Popen:
        """The torchrun of the last start."""
        assert self._process is not None, "start() comes first"
        return self._process

    @property
    def runs(self) -> bool:
        """Whether torchrun runs."""
        return self._process is not None and self._process.poll() is None

    def ranks(self) -> list[psutil.Process]:
        """The ranks that live, in the order in which they were started."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.agent.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if processes.alive(child) and child.cmdline()[1:4] == RANK_WORDS:
                        found.append(child)
        return sorted(found, key=age)

    def wait_for_ranks(self) -> list[psutil.Process]:
        """All ranks of an attempt, once they are there; fewer if torchrun has ended."""
        self.wait(lambda: len(self.ranks()) == self.nproc or not self.runs, pause_s=0.05)
        return self.ranks()

    def end(self) -> None:
        """End everything."""
        if self._process is not None:
            processes.end([self._process])

    def wait(self, condition: Callable[[], object], pause_s: float = LOOK_S) -> None:
        """Return when something has come true.

        Raises:
            StuckError: It has not, in time.
        """
        if not waiting.comes(condition, self.limit_s, pause_s):
            raise StuckError(f"nothing within {self.limit_s:g} s")

    def wait_until_gone(self, ranks: Sequence[psutil.Process]) -> None:
        """Return when these ranks have ended, whether torchrun starts others or not."""
        self.wait(lambda: not any(map(processes.alive, ranks)))

    # ---- what it says

    @property
    def _log(self) -> Path:
        return self.work / f"start-{self.starts:05d}.log"

    def log(self) -> str:
        """What was written since the last start."""
        return self._log.read_text(errors="replace")

    def attempts(self) -> int:
        """How many attempts have come so far that their ranks had met, since the last start."""
        return len(_ATTEMPT.findall(self.log()))

    def wait_for_attempt(self, attempts: int) -> int | None:
        """The step that an attempt has resumed from, once its first own step is done.

        Args:
            attempts: How many there were before it, since the last start.

        Returns:
            That step; None if torchrun has ended before there was another attempt.
        """
        self.wait(lambda: self._has_begun(attempts) or not self.runs, pause_s=0.02)
        if not self._has_begun(attempts):
            return None
        text = self._of_last_attempt(attempts)
        found = _RESUMED.findall(text)
        return int(found[-1]) if found else 0

    def _of_last_attempt(self, attempts: int) -> str:
        """What it has written; "" as long as there were no more than so many attempts."""
        text = self.log()
        begins = [match.start() for match in _ATTEMPT.finditer(text)]
        return text[begins[-1] :] if len(begins) > attempts else ""

    def _has_begun(self, attempts: int) -> bool:
        text = self._of_last_attempt(attempts)
        return bool(_STEP.search(text) or _DONE.search(text))

    # ---- what it has done

    def step(self) -> int:
        """The last step with a row of metrics; 0 if there is none."""
        try:
            with open(self.run / metrics.FILE_NAME, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 4096))
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return 0
        for line in reversed(lines):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return int(json.loads(line)["step"])
        return 0

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        with contextlib.suppress(OSError):
            return any(name.endswith(".partial") for name in os.listdir(self.run / "checkpoints"))
        return False

    def checkpoints(self) -> list[Path]:
        """Those with their final name, oldest first."""
        return sorted(self.run.glob("checkpoints/step-" + "[0-9]" * 8))

    def is_finished(self) -> bool:
        """Whether the run has come to its end."""
        return (self.run / "result.txt").is_file()

    def rows(self) -> list[tuple[int, bytes]]:
        """The whole lines of metrics, each with its step."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            *lines, _ = (self.run / metrics.FILE_NAME).read_bytes().split(b"\n")
            for line in lines:
                found.append((int(json.loads(line)["step"]), line))
        return found

    def look(self) -> Seen:
        """What lies in the folder; nobody writes to it at this moment."""
        rows = self.rows()
        whole = {}
        for folder in self.checkpoints():
            with contextlib.suppress(DamagedError, OSError):
                about = read_about(folder)
                verify(folder, about.files, about.files)
                whole[about.step] = sum(about.file_bytes.values())
        return Seen(rows[-1][0] if rows else 0, rows, whole)


RANK_WORDS = ["-u", "-m", "labcode.train"]  # of the command line of a rank


def age(process: psutil.Process) -> tuple[float, int]:
    """What sorts processes by the moment of their start."""
    return process.create_time(), process.pid
