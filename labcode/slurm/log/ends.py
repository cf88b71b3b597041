"""How processes ended, as launchers report it: torchrun's table, srun's lines.

exitcode  : -9 (pid: 71)                             torchrun, below the rank and its host
srun: error: n2: task 3: Segmentation fault          srun, whose tasks are ranks
exits with return code = -9                          deepspeed
process 3 terminated with signal SIGKILL             torch.multiprocessing.spawn
process rank 3 with PID 71 on node n2 exited on signal 9     mpirun

Source: torch/distributed/elastic and torch/multiprocessing/spawn.py (2.13); SLURM 25.05, srun;
    deepspeed/launcher/launch.py; lightning/fabric/strategies/launchers/subprocess_script.py.
"""

import re
import signal
from collections.abc import Iterator
from typing import NamedTuple

from labcode.slurm.log.kinds import (
    ABORTED,
    BUS_ERROR,
    BY_NAME,
    CRASHED,
    EXITED,
    HOST_MEMORY,
    KILLED,
    TERMINATED,
    Kind,
)

SHELL_ADDS = 128  # to the number of a signal: POSIX.1-2024, Shell Command Language, 2.8.2
_KILLED = [SHELL_ADDS + number for number in signal.Signals]
_KINDS = {
    signal.SIGKILL: KILLED,
    signal.SIGABRT: ABORTED,
    signal.SIGBUS: BUS_ERROR,
    signal.SIGTERM: TERMINATED,
    signal.SIGINT: TERMINATED,
    signal.SIGHUP: TERMINATED,
}
_SIGNALS = "|".join(signal.Signals.__members__)
_FIELD = re.compile(r"^\s*(time|host|rank|exitcode)\s*: (.+)")
# The ends that stand in one line. What spawn and Lightning count is a rank, on one node; `first` is
# the process that the launcher saw end first.
_IN_ONE_LINE = (
    re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: "),
    # its command is the last that was started, not the one that ended
    re.compile(r"exits with return code = (?P<code>-?\d+)"),
    re.compile(rf"[Pp]rocess (?P<first>\d+) terminated with signal (?P<signal>{_SIGNALS})\b"),
    re.compile(r"[Pp]rocess (?P<first>\d+) terminated with exit code (?P<code>\d+)"),
    re.compile(r"-- Process (?P<first>\d+) terminated with the following error"),
    re.compile(
        r"process rank (?P<first>\d+) with PID \d+ on node (?P<host>\S+) "
        r"exited on signal (?P<number>\d+)"
    ),
    re.compile(r"TERMINATED WITH THE EXIT STRING: .*\(signal (?P<number>\d+)\)"),
    re.compile(r"Process (?P<rank>\d+) exit with status code (?P<code>\d+)"),
    re.compile(r"Child process with PID \d+ terminated with code (?P<code>-?\d+)"),
)
_SRUN = re.compile(r"srun: error: (\S+): tasks? (\d+)([\d,-]*): (.+)")
_WORDS = {  # of srun for the end of a task
    "Killed": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Aborted": signal.SIGABRT,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
}


class End(NamedTuple):
    """The end of one process.

    Args:
        kind: Kind of the failure.
        what: The end in words: "killed by SIGKILL: ...".
        rank: Global; None where only its number on its node is known, or only its node.
        host: None where nobody says it.
        is_first: The launcher saw it end first.
        ranks: All that the line speaks of.
    """

    kind: Kind
    what: str
    rank: int | None
    host: str | None
    is_first: bool = False
    ranks: tuple[int, ...] = ()


class Ends:
    """Takes the lines of one log, and gives the ends that they tell.

    Args:
        is_elastic: Tasks of srun are torchrun's agents, and no ranks.
    """

    def __init__(self, is_elastic: bool) -> None:
        self._is_elastic = is_elastic
        self._fields: dict[str, str] = {}
        self._is_first = False

    def read(self, text: str) -> Iterator[End]:
        """The end that a line tells, if it tells one."""
        if "first observed failure" in text:
            self._is_first = True
        elif text.startswith("Failures:"):
            self._is_first = False
        report = _FIELD.match(text)
        if report:
            self._fields[report[1]] = report[2]
            if report[1] == "exitcode":
                yield from self._reported()
            return
        for pattern in _IN_ONE_LINE:
            found = pattern.search(text)
            if found and found.groupdict().get("code") != "0":
                yield _in_one_line(found.groupdict())
                break
        task = _SRUN.search(text)
        if task and "orced" not in task[4]:
            yield self._of_task(*task.groups())

    def _reported(self) -> Iterator[End]:
        rank = re.match(r"\d+", self._fields.get("rank", ""))
        code = re.match(r"-?\d+", self._fields["exitcode"])
        host = self._fields.get("host")
        self._fields = {}
        if rank and code:
            what = code_text(int(code[0]))
            yield End(_kind(int(code[0])), what, int(rank[0]), host, self._is_first)

    def _of_task(self, node: str, first: str, others: str, words: str) -> End:
        ranks = () if self._is_elastic else tuple(_numbers(first + others))
        rank = ranks[0] if ranks else None
        exited = re.search(r"exit code (\d+)", words)
        code = int(exited[1]) if exited else 0
        if code in _KILLED:
            what = f"{exit_text(code)} on {node}"
            return End(_kind(SHELL_ADDS - code), what, rank, node, ranks=ranks)
        kind = BY_NAME[EXITED]
        if "Out Of Memory" in words:
            kind = BY_NAME[HOST_MEMORY]
        for word, number in _WORDS.items():
            if words.startswith(word):
                kind = _kind(-number)
        return End(kind, f"{words.lower()} on {node}", rank, node, ranks=ranks)


def _in_one_line(named: dict[str, str]) -> End:
    first = named.get("first")
    rank = first or named.get("rank")
    code = int(named.get("code") or 1)
    if named.get("signal"):
        code = -signal.Signals[named["signal"]]
    if named.get("number"):
        code = -int(named["number"])
    rank = int(rank) if rank else None
    return End(_kind(code), code_text(code), rank, named.get("host"), first is not None)


def _numbers(text: str) -> Iterator[int]:
    """ "0-2,5" is 0, 1, 2 and 5."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _kind(code: int) -> Kind:
    """Kind of failure that an exit code means; the code is negative for a signal."""
    if code in _KILLED:
        code = SHELL_ADDS - code
    return BY_NAME[EXITED] if code >= 0 else BY_NAME[_KINDS.get(signal.Signals(-code), CRASHED)]


def code_text(code: int) -> str:
    """ "exit code 2", or of a negative code the signal: "killed by SIGSEGV"."""
    return exit_text(0, -code) if code < 0 else exit_text(code)


def exit_text(code: int, by_signal: int = 0) -> str:
    """ "exit code 2", or "killed by SIGKILL", with its usual cause.

    Args:
        code: The exit code. A shell makes 128 plus the signal of it for a command that was killed.
        by_signal: The signal that ended the process; 0 for none.
    """
    if not by_signal and code in _KILLED:
        by_signal = code - SHELL_ADDS
    if not by_signal:
        return f"exit code {code}"
    if by_signal == signal.SIGKILL:
        return "killed by SIGKILL: by hand, or by the kernel's out-of-memory killer"
    try:
        return f"killed by {signal.Signals(by_signal).name}"
    except ValueError:
        return f"killed by signal {by_signal}"
