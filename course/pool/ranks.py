"""A pool of ranks that stays alive between cells: n processes with torch.distributed up.

    ranks = Ranks(4)                     # a few seconds, once
    ranks.run(lambda rank: rank ** 2)    # [0, 1, 4, 9], in hundredths of a second

In a notebook `%%px` cells run on the same processes; there `rank`, `world_size`, `device`, `torch`
and `dist` are defined. Both wait for all ranks, print what each printed in rank order, and turn all
failures into one `RankError` with the first.

A call that fails, hangs or is interrupted ends the processes of all its ranks, whatever they do at
that moment, and the next call starts others: forks of a process that has torch imported, which
takes a few tenths of a second. So nothing of a failed call is left, no half-received message, no
thread, no group of which some rank knows more than the others.
"""

import contextlib
import inspect
import itertools
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from IPython.core.getipython import get_ipython

from course.pool import cells, wire
from course.pool.answers import (
    LOST_PEER,
    WAITED_IN_VAIN,
    Answer,
    HangError,
    LateError,
    RankError,
    print_lines,
    raise_first,
    raise_stopped,
    text_of,
    where_ranks_were,
)
from course.pool.fork_server import ForkServer
from course.pool.limits import check_arguments, make_room, time_limit_s
from course.pool.processes import Processes, server
from labcode.runtime.hardware import usable_cores
from labcode.runtime.units import ranks_text
from labcode.runtime.waits import EVERY_RANK, broken_rule

GRACE_S = 1.0  # how long ranks that compute may go on after another one has failed
SAME_MOMENT_S = 0.5  # in which ranks that wait for the same one give up, one after another
COLLECT_S = 0.02  # for which answers are waited for before the pool looks at the ranks
HANG_S = 5.0  # how long ranks may wait for one that does not come, before the pool says so
LOOK_S = 0.5  # between two looks at what the ranks wait for
WHERE_S = 1.0  # how long a rank may take to say where it is
MANY_PER_CORE = 4  # ranks on each core, above which a pool is most likely a slip


def _say_nothing(_text: str) -> None:
    pass


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=5)  # the line that has called `run`


class Ranks:
    """`n` ranks on this machine; in a notebook a new pool closes the one before it.

    They compute on the CPU and use gloo, on every machine: the labs put their tensors there. With
    `device="cuda"` each has a GPU and NCCL where there are enough; else they share GPUs, over gloo.
    After a failure the ranks are new processes: what they have kept in variables is gone.

    Args:
        n: Number of ranks.
        timeout_s: How long a collective waits for a rank that does not come.
        beside: In a notebook, a second pool beside the one that `%%px` uses, which it leaves open.
        device: "cpu", or "cuda" for functions that put their tensors on the GPU themselves.

    Raises:
        ValueError: `n` is no whole number above 0, or more than this machine has memory or files
            for; `timeout_s` is no number of seconds; `device` is unknown.
        RuntimeError: The ranks did not start.
    """

    # Told what takes long, "starting 4 ranks", and "" when it is done; a notebook shows it.
    announce: ClassVar[Callable[[str], None]] = staticmethod(_say_nothing)
    # Told what a user should know of the state of the ranks; a notebook shows it as one plain line.
    warn: ClassVar[Callable[[str], None]] = staticmethod(_warn)

    # The pool that `%%px` uses; weak, so that it ends with its last user.
    _in_notebook: ClassVar["weakref.ref[Ranks] | None"] = None

    def __init__(
        self,
        n: int,
        *,
        timeout_s: float = 30.0,
        beside: bool = False,
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        check_arguments(n, timeout_s)
        if device not in ("cpu", "cuda"):
            raise ValueError(f"Ranks(device={device!r}): give 'cpu' or 'cuda'")
        make_room(n)
        num_cores = len(usable_cores())
        if n > MANY_PER_CORE * num_cores:
            cores = "1 core" if num_cores == 1 else f"{num_cores} cores"
            Ranks.warn(
                f"{n} ranks share {cores} here: they take turns, so results are right and times "
                "are long"
            )
        self.n = n
        self.timeout_s = timeout_s
        self._beside = beside
        self._device = device
        self._turn = threading.RLock()  # one call at a time, whichever thread asks for it
        self._is_open = False
        self._processes: Processes | None = None  # None: closed, or ended by a failure
        self._server: ForkServer | None = None  # of which the processes are forks
        self._end: Callable[[], object] = _do_nothing
        self._cells_ran = False  # `%%px` cells, which may have defined something
        self._call_numbers = itertools.count(1)
        self.start()

    def start(self) -> None:
        """Start the ranks; does nothing while they run."""
        if self._processes is not None:
            return
        shell = None if self._beside else get_ipython()
        if shell:
            self._take_over_notebook()
        Ranks.announce(f"starting {self.n} {'rank' if self.n == 1 else 'ranks'}")
        try:
            self._start_processes()
        finally:
            Ranks.announce("")
        self._is_open = True
        if shell:
            cells.register(shell, self)

    def _start_processes(self) -> Processes:
        self._server = server()
        sees_gpus = self._device == "cuda"
        self._processes = Processes(self._server, self.n, self.timeout_s, sees_gpus)
        self._end = weakref.finalize(self, self._processes.end)
        return self._processes

    def _end_processes(self) -> None:
        self._end()
        self._processes = None

    def _take_over_notebook(self) -> None:
        """One pool per notebook: a second run of the cell with `Ranks(4)` ends the first pool."""
        old = Ranks._in_notebook() if Ranks._in_notebook else None
        if old is not None and old is not self:
            old.close()
        Ranks._in_notebook = weakref.ref(self)

    def close(self) -> None:
        """End the ranks; what cells defined on them is gone.

        In a notebook the next call starts them again, and says so.
        """
        self._end_processes()
        self._is_open = False
        self._server = None

    def restart(self) -> None:
        """New processes in place of the old ones."""
        self._end_processes()
        self.start()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        pass_rank: bool | None = None,
        limit_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank; if it asks for its rank, that comes first.

        A function asks for its rank by naming its first parameter `rank`:

            ranks.run(lambda rank, x: rank + x, 10)     # [10, 11, 12, 13]
            ranks.run(lambda x: x + 1, 10)              # [11, 11, 11, 11]

        Functions and classes travel as code with the globals that they mention, tensors as CPU
        tensors without a graph. Process groups made inside the call are gone after it. Those of a
        `Grid` are kept for the next grid instead.

        Args:
            fn: What to call.
            args, kwargs: Arguments of the function.
            pass_rank: True or False decides whether the rank is passed, whatever the first
                parameter is called.
            limit_s: How long the call may take before its ranks are stopped; None is what
                `limits.limited` says, and forever outside of it.

        Returns:
            The results in rank order.

        Raises:
            RankError: A rank raised, or its process died. The others were ended; the pool can be
                used again.
            LateError: Some ranks, which it names, were still at work after `limit_s`.
            TypeError: `fn` is no function, or it or an argument cannot be sent.
            KeyboardInterrupt: Somebody has interrupted; the text says where the ranks were.
        """
        if not callable(fn):
            given = "None" if fn is None else f"an object of type {type(fn).__name__}"
            raise TypeError(
                f"`run` was given {given} and no function: give the function itself, without (), "
                "and its arguments after it, as in ranks.run(f, x)"
            )
        if pass_rank is None:
            pass_rank = _asks_for_rank(fn)
        payload = wire.pack_call(fn, args, kwargs)
        with self._turn:
            processes = self._ready()
            path = processes.folder / f"call-{next(self._call_numbers)}"
            path.write_bytes(payload)
            request = ("call", str(path), sys.path, pass_rank)
            answers = self._ask(processes, request, time_limit_s(limit_s))
            path.unlink()
            return [_result(rank, answer) for rank, answer in enumerate(answers)]

    def run_cell(self, source: str, name: str) -> None:
        """Run a `%%px` cell on every rank.

        Args:
            source: Text of the code.
            name: Name by which tracebacks know it.

        Raises:
            RankError: As in `run`.
        """
        with self._turn:
            processes = self._ready()
            self._ask(processes, ("cell", source, name), None)
            self._cells_ran = True

    def _ask(
        self, processes: Processes, request: Sequence[Any], limit_s: float | None
    ) -> list[Answer]:
        """What all ranks answer; if one fails, or none can, their processes end here."""
        watch = _Watch(processes, self.n, limit_s)
        is_good = False
        try:
            processes.ask(request)
            stopped = self._wait(processes, watch)
            is_good = stopped is None and not processes.any_failed
            if not is_good:
                processes.ask_where(WHERE_S if stopped else 0.0)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_what_was_interrupted(processes)) from None
        finally:
            for stream_name, stream in (("out", sys.stdout), ("err", sys.stderr)):
                for rank in range(self.n):
                    print_lines(processes.printed(rank, stream_name), rank, stream)
            if not is_good:
                self._end_processes()
        if stopped:
            raise_stopped(*stopped, processes.places, processes.answers)
        raise_first(processes.answers, processes.record.explain)
        return processes.answers

    def _wait(
        self, processes: Processes, watch: "_Watch"
    ) -> tuple[type[RankError], str, int] | None:
        """Wait until every rank has answered, or one has failed and the others cannot go on.

        Returns:
            Why the call is stopped, if that is for no failure of a rank: the kind of error, its
            text, and a rank that it is about.
        """
        stop_at = None
        while len(processes.answered) < self.n:
            processes.collect(COLLECT_S)
            death = processes.death()
            if death:
                why = processes.why()
                raise RankError(f"{death}{why}: the next call starts all ranks anew")
            if processes.any_failed:
                stop_at = stop_at or time.monotonic() + GRACE_S
                if time.monotonic() > stop_at or watch.nobody_works():
                    return None
                continue
            if watch.sees_hang():
                return (HangError, *watch.explanation())
            if watch.is_late():
                return (LateError, *watch.who_is_late())
        return None

    def _ready(self) -> Processes:
        """Before a call: ranks that are alive, in a process group in which nothing is under way."""
        if not self._is_open and get_ipython():
            # somebody goes on after Run All, whose last cell has closed them
            Ranks.warn(f"Ranks({self.n}) was closed: its ranks are started again")
            self.start()
        if not self._is_open:
            raise RuntimeError(
                f"this pool of {self.n} ranks is closed: call restart() on it, or make a new one"
            )
        processes = self._processes
        if processes is not None and processes.owner != os.getpid():
            raise RuntimeError(
                f"this pool of {self.n} ranks belongs to process {processes.owner}, and this "
                "one is a fork of it: make a pool here, with Ranks(n)"
            )
        why = ""
        if processes is not None:
            why = processes.death() or processes.record.left() or ""
            if not why:
                return processes
        gone = "what %%px cells defined is gone" if self._cells_ran else ""
        reasons = "; ".join(filter(None, [why, gone]))
        if reasons:
            Ranks.warn(f"{reasons}: all ranks are started anew")
        self._cells_ran = False
        self._end_processes()
        return self._start_processes()

    def __len__(self) -> int:
        return self.n

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ranks({self.n}, {'running' if self._is_open else 'not running'})"

    def __reduce__(self) -> str:
        raise TypeError("a pool of ranks cannot be used on its own ranks")


def _do_nothing() -> None:
    pass


def _what_was_interrupted(processes: Processes) -> str:
    """Where the ranks are, and that the pool can be used again."""
    with contextlib.suppress(Exception):  # the interrupt may have cut an answer in two
        processes.ask_where(WHERE_S)
    where = where_ranks_were(processes.places, processes.answers)
    if processes.record.waiting():
        where = f"{where} ({processes.record.explain(processes.answered)})"
    return f"you interrupted: {where}; the next call starts all ranks anew"


class _Watch:
    """Looks, while a call runs, whether its ranks wait for one that will never come.

    Args:
        processes: Processes of the pool.
        n: Number of ranks.
        limit_s: How long the call may take; None is forever.
    """

    def __init__(self, processes: Processes, n: int, limit_s: float | None) -> None:
        self._processes = processes
        self._record = processes.record
        self._n = n
        self._limit_s = float("inf") if limit_s is None else limit_s
        self._late_at = time.monotonic() + self._limit_s
        self._look_at = time.monotonic() + LOOK_S
        self._progress: list[tuple[int, int]] = []
        self._since = 0.0
        self._idle_since: float | None = None

    def nobody_works(self) -> bool:
        """After a failure: whether all others wait in calls, or have answered.

        Ranks that wait for the same one in vain give up one after another, and each is to say so.
        One that has lost a connection has lost a process, whose end is about to be told.
        """
        answered = self._processes.answered
        if self._record.n == 0 or self._record.at_work(answered):
            self._idle_since = None
            return False
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        wait_s = 2 * COLLECT_S
        for answer in self._processes.answers:
            message = answer["failure"]["message"] if "failure" in answer else ""
            if LOST_PEER.search(message):
                wait_s = GRACE_S
            elif WAITED_IN_VAIN.search(message):
                wait_s = max(wait_s, SAME_MOMENT_S)
        return now - self._idle_since >= wait_s

    def sees_hang(self) -> bool:
        """Whether nothing has moved for `HANG_S` in a state in which nothing can."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_S
        progress = self._record.progress()
        if progress != self._progress or not self._record.deadlock(self._processes.answered):
            self._progress = progress
            self._since = now
            return False
        return now - self._since >= HANG_S

    def explanation(self) -> tuple[str, int]:
        """What to say of it, and a rank that waits."""
        answered = self._processes.answered
        waiting = next(rank for rank in range(self._n) if rank not in answered)
        rule = EVERY_RANK
        if not answered:
            rule = broken_rule(call.name for call in self._record.waiting())
        return f"{self._record.explain(answered)}: {rule}", waiting

    def is_late(self) -> bool:
        """Whether the call has taken longer than it may."""
        return time.monotonic() > self._late_at

    def who_is_late(self) -> tuple[str, int]:
        """What to say of it, and a rank that is still at work."""
        answered = self._processes.answered
        at_work = self._record.at_work(answered)
        if not at_work:  # they send and receive without an end
            at_work = [rank for rank in range(self._n) if rank not in answered]
        verb = "was" if len(at_work) == 1 else "were"
        text = f"{ranks_text(at_work)} {verb} still at work after {self._limit_s:g} s"
        question = "does each loop come to its end"
        if any(self._sends(rank) for rank in at_work):
            # gloo never gives up a message whose work was thrown away
            question += ", and has each isend and irecv its wait()"
        return f"{text}, and had to be stopped: {question}?", at_work[0]

    def _sends(self, rank: int) -> bool:
        """Whether the last thing that a rank called was a message."""
        last = self._record.last(rank)
        return last is not None and last.name in ("send", "recv")


def _result(rank: int, answer: Answer) -> Any:
    """The result of one rank; to unpickle it may run code of the user's, and fail."""
    try:
        path = Path(answer["result"])
        packed = path.read_bytes()
        path.unlink()
        return wire.loads(packed)
    except (Exception, SystemExit) as error:
        raise RankError(
            f"rank {rank}: the result arrived but cannot be read here: {type(error).__name__}: "
            f"{text_of(error)}: return numbers or tensors",
            rank,
        ) from None


def _asks_for_rank(fn: Callable[..., Any]) -> bool:
    """Whether the first parameter of a function is named `rank`."""
    with contextlib.suppress(TypeError, ValueError):  # a builtin may have no signature
        return next(iter(inspect.signature(fn).parameters), None) == "rank"
    return False
