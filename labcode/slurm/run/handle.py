"""Handle of a submitted job: its state, its log as it grows, its end with the reason.

The same on SLURM and without it.
"""

import contextlib
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from labcode.slurm.run.answers import JobInfo
from labcode.slurm.run.client import Client, UnknownJob, Unreachable
from labcode.slurm.run.outcome import NEVER, Outcome, explain

POLL_S = (0.5, 5.0)  # seconds between two questions to the controller: at first, and after a while
GONE_S = 120.0  # how long a controller may be silent
AGAIN_S = 2.0  # after that a silent one is asked again
CANCEL_S = 60.0  # how long a cancelled job may take to end: SLURM's KillWait is 30 s
QUIET_S = 60.0  # ranks that take no step for so long, and for `QUIET_STEPS` steps, may hang
QUIET_STEPS = 10
_STEP = re.compile(r"^(?:\[[^]\n]*\]:? ?|\s*\d+: )?step \d+/\d+ ", re.MULTILINE)
_OTHER_RANK = re.compile(r"^(?:\[(?:rank |default)?([1-9]\d*)\]:? |\s*([1-9]\d*): )")


class JobFailed(RuntimeError):
    """A job that did not complete; the message says its state and reason, `outcome` has both."""

    def __init__(self, message: str, outcome: Outcome) -> None:
        super().__init__(message)
        self.outcome = outcome


class Handle:
    """One submitted job.

    Args:
        number: Number of the job.
        where: "SLURM cluster ...", or "this machine, no SLURM: ...".
        keep: Leave the job running when the wait for it is interrupted.
        limit_s: How long one attempt may run before `wait` gives up.

    Attributes:
        script: The batch script, as it was submitted; None where there is none.
    """

    def __init__(self, number: str, where: str, keep: bool, limit_s: float) -> None:
        self.number = number
        self.where = where
        self.keep = keep
        self.limit_s = limit_s
        self.script: Path | None = None
        self.outcome: Outcome | None = None
        self._shown = 0  # bytes of the log that were printed
        self._pace = _Pace()
        self._screen: _Screen | None = None  # while somebody waits

    def __repr__(self) -> str:
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
        """What the job has printed until now, all ranks and attempts of it."""
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
            timeout_s: Limit of the whole wait; None is `limit_s` for each attempt of the job.

        Raises:
            JobFailed: It did not complete: "job 17 FAILED: rank 3: killed by SIGKILL ...".
            TimeoutError: The limit of the wait is over. The job is cancelled then, unless it was
                submitted with keep.
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

    def _follow(self, screen: "_Screen", timeout_s: float | None) -> Outcome:
        self._screen = screen
        info = self.info()
        restarts = 0
        pause = POLL_S[0]
        waiting = time.monotonic()  # since when; without a timeout since this attempt began to run
        while True:
            if info.restarts > restarts:
                restarts = info.restarts
                pause = POLL_S[0]
                self._pace = _Pace()
                screen.say(f"job {self.number} was requeued: attempt {restarts + 1}")
                if timeout_s is None:
                    waiting = time.monotonic()
            if info.state == "PENDING" and timeout_s is None:  # nobody knows how long a queue is
                waiting = time.monotonic()
            screen.state(info)
            self._show(info, screen)
            if info.ended or info.reason.split(":")[0] in NEVER:
                time.sleep(POLL_S[0])  # a job about to be requeued may look ended for a moment
                again = self.info()
                if (again.state, again.restarts) == (info.state, info.restarts):
                    return self._end(again, screen)
                info = again
                continue
            self._check_time(info, waiting, self.limit_s if timeout_s is None else timeout_s)
            self._pause(info, pause, screen)
            pause = min(POLL_S[1], pause * 1.2)
            info = self.info()

    def _check_time(self, info: JobInfo, since: float, limit_s: float) -> None:
        if time.monotonic() > since + limit_s:
            end = "it keeps running" if self.keep else "it is cancelled"
            waited = f"job {self.number} is {info.state} after {limit_s:g} s of waiting"
            raise TimeoutError(f"{waited}: {end}")

    def _pause(self, info: JobInfo, seconds: float, screen: "_Screen") -> None:
        """Until the next question; the log is shown more often than the controller is asked."""
        end = time.monotonic() + seconds
        left = seconds
        while left > 0:
            time.sleep(min(0.5, left))
            self._show(info, screen)
            left = end - time.monotonic()

    def _show(self, info: JobInfo, screen: "_Screen") -> None:
        """Shows what is new in the log: whole lines while the job runs, at its end the rest."""
        if info.log is None or not info.log.is_file():
            return
        with open(info.log, "rb") as file:
            file.seek(self._shown)
            new = file.read()
        whole = len(new) if info.ended else new.rfind(b"\n") + 1
        if whole:
            self._shown += whole
            text = new[:whole].decode(errors="replace")
            if _STEP.search(text):
                self._pace.step(time.time())
            screen.log(text)

    def _end(self, info: JobInfo, screen: "_Screen") -> Outcome:
        self._show(info, screen)
        outcome = explain(info, self.log(), self._pace.hang(time.time()))
        if outcome.reason:
            outcome = replace(outcome, reason=self._which(info) + outcome.reason)
        if not info.ended and not self.keep:  # it would stay in the queue forever
            self.cancel()
            outcome = replace(outcome, state="CANCELLED")
        screen.say(f"job {self.number} {outcome}")
        return outcome

    def _which(self, info: JobInfo) -> str:
        """Which of several jobs of this number it is: "task 3 of an array of 8 (21_3): "; or ""."""
        return ""


class _Pace:
    """When the ranks took their steps, as far as their log was seen while it grew."""

    def __init__(self) -> None:
        self.last_s: float | None = None
        self.longest_s = 0.0

    def step(self, now_s: float) -> None:
        """The log has a new step."""
        if self.last_s is not None:
            self.longest_s = max(self.longest_s, now_s - self.last_s)
        self.last_s = now_s

    def hang(self, now_s: float) -> str:
        """What to say of ranks that have taken no step for far too long; "" if they have."""
        if self.last_s is None:
            return ""
        if now_s - self.last_s < max(QUIET_S, QUIET_STEPS * self.longest_s):
            return ""
        since = time.strftime("%H:%M", time.localtime(self.last_s))
        return (
            f"no step since {since}: a rank hangs, and more time would not help; py-spy dump on "
            "its nodes shows where, and a shorter --parallel.collective_timeout_s lets the ranks "
            "that wait say for what"
        )


class _Screen:
    """What the person sees: lines of the log, and what a pending job waits for.

    On a terminal that is one line which moves.
    """

    def __init__(self, echo: bool) -> None:
        self.echo = echo
        self.bar: Any = None
        self.last_reason = ""

    def say(self, text: str) -> None:
        self._close()
        if self.echo:
            print(text, flush=True)

    def log(self, text: str) -> None:
        lines = text.removesuffix("\n").split("\n")
        lines = [line for line in lines if not _OTHER_RANK.match(line)]
        if lines:
            self._close()
        if self.echo:
            for line in lines:  # of a progress bar that was redrawn in place the last state
                print(line.rstrip("\r").rpartition("\r")[2], flush=True)

    def state(self, info: JobInfo) -> None:
        reason = info.reason if info.state == "PENDING" else ""
        if info.state != "PENDING":
            self._close()
        elif self.echo and sys.stderr.isatty():
            if self.bar is None:
                from tqdm import tqdm

                self.bar = tqdm(bar_format="{desc} {elapsed}", leave=False)
            why = f" ({reason})" if reason else ""
            self.bar.set_description_str(f"job {info.id} is pending{why}")
        elif self.echo and reason and reason != self.last_reason:
            print(f"job {info.id} is pending ({reason})", flush=True)
        self.last_reason = reason

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class SlurmHandle(Handle):
    """A job in a real SLURM."""

    def __init__(
        self, client: Client, number: str, keep: bool = False, limit_s: float = 3600.0
    ) -> None:
        super().__init__(number, client.where, keep, limit_s)
        self.client = client
        self._last: JobInfo | None = None
        self._num_tasks = 1  # of its array
        self._is_silent = False  # the controller

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
            except Unreachable as error:
                if time.monotonic() > give_up:
                    raise Unreachable(f"{error}; {self._goes_on()}") from None
                self._say_silence()
                time.sleep(AGAIN_S)
            except UnknownJob:
                if self._last is None or not self._last.ended:
                    raise
                return self._last
            else:
                self._last = _furthest(found)
                self._num_tasks = max(self._num_tasks, len(found))
                self._is_silent = False
                return self._last

    def _goes_on(self) -> str:
        """What somebody needs who can no longer wait here."""
        ask = f"python -m labcode.slurm status {self.number}"
        return (
            f"job {self.number} needs no controller and goes on: `{ask}` asks again, and "
            "cancel in place of status ends it"
        )

    def _say_silence(self) -> None:
        """Tell who waits, once, that the controller is silent; the log is shown all the same."""
        if self._screen is None:
            return
        if not self._is_silent:
            self._screen.say("the controller does not answer, and is asked again and again")
        self._is_silent = True
        if self._last is not None:
            self._show(self._last, self._screen)

    def _which(self, info: JobInfo) -> str:
        if "_" not in info.id:
            return ""
        number = info.id.partition("_")[2]
        return f"task {number} of an array of {self._num_tasks} ({info.id}): "

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
                time.sleep(AGAIN_S)
        with contextlib.suppress(UnknownJob):
            while time.monotonic() < end and not self._left():
                time.sleep(0.3)

    def _left(self) -> bool:
        """Whether no process of it is left: ended, and not COMPLETING."""
        info = self.info()
        return info.ended and "COMPLETING" not in info.fields.get("JobState", "")


def _furthest(jobs: list[JobInfo]) -> JobInfo:
    """The first job of an array that has not ended, else the first that failed."""
    running = [info for info in jobs if not info.ended]
    failed = [info for info in jobs if info.state != "COMPLETED"]
    return (running or failed or jobs)[0]
