"""A submitted job in the hand: its state, its log as it grows, its end with the reason. The same on SLURM and without it."""

import contextlib
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

from labcode.slurm.run.answers import JobInfo
from labcode.slurm.run.client import Client, UnknownJob, Unreachable
from labcode.slurm.run.outcome import NEVER, Outcome, explain

POLL_S = (0.5, 5.0)  # seconds between two questions to the controller: at first, and after a while
GONE_S = 120.0  # how long a controller may be silent
CANCEL_S = 60.0  # how long a cancelled job may take to end: SLURM's KillWait is 30 s
_OTHER_RANK = re.compile(r"^(?:\[(?:rank |default)?([1-9]\d*)\]:? |\s*([1-9]\d*): )")


class JobFailed(RuntimeError):
    """A job that did not complete; the message is its state and the reason, `outcome` the same as data."""

    def __init__(self, message: str, outcome: Outcome):
        super().__init__(message)
        self.outcome = outcome


class Handle:
    """One submitted job.

    Args:
        number: Of the job.
        where: "SLURM cluster ...", or "this machine, no SLURM: ...".
        keep: Leave the job running when the wait for it is interrupted.
        limit_s: How long one life of it may last, pending included, before `wait` gives up.

    Attributes:
        script: The batch script, as it was submitted; None where there is none.
    """

    def __init__(self, number: str, where: str, keep: bool, limit_s: float):
        self.number, self.where, self.keep, self.limit_s = number, where, keep, limit_s
        self.script: Path | None = None
        self.outcome: Outcome | None = None
        self._shown = 0  # bytes of the log that were printed

    def __repr__(self):
        return f"<job {self.number} on {self.where}: {self.outcome or self.state}>"

    def info(self) -> JobInfo:
        """What is known of the job now."""
        raise NotImplementedError

    def cancel(self) -> None:
        """End the job, and return when it has ended; fine for one that has."""
        raise NotImplementedError

    @property
    def state(self) -> str:
        """ "PENDING", "RUNNING", "COMPLETED", "FAILED", ..."""
        return self.info().state

    @property
    def path(self) -> Path | None:
        """The file of the log; it may not be there yet."""
        return self.info().log

    def log(self) -> str:
        """What the job has printed until now, all ranks and lives of it."""
        path = self.path
        if path is None or not path.is_file():
            return ""
        return path.read_text(encoding="utf-8", errors="replace")

    def wait(
        self, *, echo: bool = True, check: bool = True, timeout_s: float | None = None
    ) -> Outcome:
        """Follow the job to its end, through requeues; what rank 0 prints is shown as it comes.

        Ctrl-C cancels the job, unless it was submitted with keep.

        Args:
            echo: Show the log and what the job waits for.
            check: Raise if the job does not complete.
            timeout_s: Limit of the whole wait; None is `limit_s` for each life of the job.

        Raises:
            JobFailed: It did not complete: "job 17 FAILED: rank 3: killed by SIGKILL ...".
            TimeoutError: The limit of the wait is over. The job is cancelled then, unless it was submitted with keep.
        """
        if self.outcome is None:
            try:
                self.outcome = self._follow(_Screen(echo), timeout_s)
            except (KeyboardInterrupt, TimeoutError):
                if not self.keep:
                    self.cancel()
                    self.outcome = Outcome("CANCELLED", "the wait for it was given up")
                raise
        if check and not self.outcome.ok:
            raise JobFailed(f"job {self.number} {self.outcome}", self.outcome)
        return self.outcome

    def _follow(self, screen, timeout_s) -> Outcome:
        started = begun = time.monotonic()
        info, pause, lives = self.info(), POLL_S[0], 0
        while True:
            if info.restarts > lives:
                lives, begun, pause = info.restarts, time.monotonic(), POLL_S[0]
                screen.say(f"job {self.number} was requeued: life {lives + 1}")
            if info.state == "PENDING":
                begun = (
                    time.monotonic()
                )  # nobody knows how long a queue is: the limit is for a job that runs
            screen.state(info)
            self._show(info, screen)
            if info.ended or info.reason.split(":")[0] in NEVER:
                time.sleep(POLL_S[0])  # a job about to be requeued may look ended for a moment
                again = self.info()
                if (again.state, again.restarts) == (info.state, info.restarts):
                    return self._end(again, screen)
                info = again
                continue
            now = time.monotonic()
            if now > (started + timeout_s if timeout_s is not None else begun + self.limit_s):
                limit = timeout_s if timeout_s is not None else self.limit_s
                left = "it goes on" if self.keep else "it is cancelled"
                raise TimeoutError(
                    f"job {self.number} is {info.state} after {limit:g} s of waiting: {left}"
                )
            self._pause(info, pause, screen)
            pause = min(POLL_S[1], pause * 1.2)
            info = self.info()

    def _pause(self, info, seconds, screen):
        """Until the next question; the log is shown more often than the controller is asked."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(0.5, left))
            self._show(info, screen)

    def _show(self, info, screen):
        if info.log is None or not info.log.is_file():
            return
        with open(info.log, "rb") as file:
            file.seek(self._shown)
            new = file.read()
        whole = new.rfind(b"\n") + 1 if not info.ended else len(new)
        if whole:
            self._shown += whole
            screen.log(new[:whole].decode(errors="replace"))

    def _end(self, info, screen) -> Outcome:
        self._show(info, screen)
        outcome = explain(info, self.log())
        if not info.ended and not self.keep:  # it would stay in the queue for ever
            self.cancel()
            outcome = replace(outcome, state="CANCELLED")
        screen.say(f"job {self.number} {outcome}")
        return outcome


class _Screen:
    """What the person sees: lines of the log, and while the job is pending one line that moves, on a terminal alone."""

    def __init__(self, echo):
        self.echo, self.bar, self.last = echo, None, None

    def say(self, text):
        self._close()
        if self.echo:
            print(text, flush=True)

    def log(self, text):
        lines = [
            line for line in text.removesuffix("\n").split("\n") if not _OTHER_RANK.match(line)
        ]
        if lines:
            self._close()
        if self.echo:
            for line in lines:  # of a progress bar that was redrawn in place the last state
                print(line.rstrip("\r").rpartition("\r")[2], flush=True)

    def state(self, info):
        if info.state != "PENDING":
            self._close()
        elif self.echo and sys.stderr.isatty():
            if self.bar is None:
                from tqdm import tqdm

                self.bar = tqdm(bar_format="{desc} {elapsed}", leave=False)
            self.bar.set_description_str(
                f"job {info.id} is pending{f' ({info.reason})' if info.reason else ''}"
            )
        elif self.echo and info.reason and self.last != info.reason:
            print(f"job {info.id} is pending ({info.reason})", flush=True)
        self.last = info.reason if info.state == "PENDING" else None

    def _close(self):
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class SlurmHandle(Handle):
    """A job in a real SLURM."""

    def __init__(self, client: Client, number: str, keep: bool = False, limit_s: float = 3600.0):
        super().__init__(number, client.where, keep, limit_s)
        self.client = client
        self._last: JobInfo | None = None

    def info(self) -> JobInfo:
        """What SLURM says of the job; of an array the job that is furthest from its end, or failed.

        Raises:
            UnknownJob: SLURM has never had this job, or forgot it before it was asked.
            Unreachable: The controller has been silent for two minutes.
        """
        give_up = time.monotonic() + GONE_S
        while True:
            try:
                found = self.client.jobs(self.number)
            except Unreachable:
                if time.monotonic() > give_up:
                    raise
                time.sleep(2.0)
            except UnknownJob:
                if self._last is None or not self._last.ended:
                    raise
                return self._last
            else:
                open_jobs = [info for info in found if not info.ended]
                failed = [info for info in found if info.state != "COMPLETED"]
                self._last = (open_jobs or failed or found)[0]
                return self._last

    def cancel(self) -> None:
        """scancel, again if the controller does not answer, and wait until the job is gone.

        Raises:
            Unreachable: The controller has been silent for `CANCEL_S`; the job may still be there.
        """
        end = time.monotonic() + CANCEL_S
        while True:
            try:
                self.client.cancel(self.number)
                break
            except Unreachable:
                if time.monotonic() > end:
                    raise
                time.sleep(2.0)
        with contextlib.suppress(UnknownJob):
            while time.monotonic() < end and not self._left():
                time.sleep(0.3)

    def _left(self):
        """Whether no process of it is left: ended, and not COMPLETING."""
        info = self.info()
        return info.ended and "COMPLETING" not in info.fields.get("JobState", "")
