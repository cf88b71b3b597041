"""A pool of ranks that stays alive between cells: n processes with torch.distributed up.

    ranks = Ranks(4)                     # about 10 s, once
    ranks.run(lambda rank: rank ** 2)    # [0, 1, 4, 9], in hundredths of a second

In a notebook `%%px` cells run on the same processes; there `rank`, `world_size`, `device`, `torch`
and `dist` are defined. Both wait for all ranks, print what each printed in rank order, and turn all
failures into one `RankError` with the first.
"""

import contextlib
import inspect
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from IPython.core.getipython import get_ipython

from labcode.pool import engine, wire
from labcode.pool.answers import (
    HangError,
    LateError,
    RankError,
    answers_of,
    any_failed,
    print_outputs,
    raise_first,
    raise_stopped,
)
from labcode.pool.limits import check_arguments, in_limited, make_room, time_limit_s
from labcode.pool.processes import Processes
from labcode.pool.record import LastCollective, ranks_text
from labcode.pool.stopping import text_of
from labcode.pool.turn import Turn

GRACE_S = 1.0  # how long the other ranks may go on after a failure before they are told to stop
HANG_S = 5.0  # how long ranks may wait for one that does not come, before the pool says so
LOOK_S = 0.5  # between two looks at what the ranks wait for
PATIENCE_S = 5.0  # how long a rank that was told to stop may take before its process is ended


def _say_nothing(_text: str) -> None:
    pass


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=5)  # the line that has called `run`


class Ranks:
    """`n` ranks on this machine; in a notebook a new pool closes the one before it.

    They compute on the CPU and use gloo, on every machine: the labs put their tensors there. With
    `device="cuda"` each has a GPU and NCCL where there are enough; else they share GPUs, over gloo.
    After a failure all ranks enter a new process group: a group that a `%%px` cell made before is
        of no use any more.

    Args:
        n: Number of ranks.
        timeout_s: How long a collective waits for a rank that does not come.
        beside: In a notebook, a second pool beside the one that `%%px` uses, which it leaves open.
        device: "cpu", or "cuda" for functions that put their tensors on the GPU themselves.

    Raises:
        ValueError: `n` is no whole number above 0, or more than this machine has memory or files
            for; `timeout_s` is no number of seconds; `device` is unknown.
        RuntimeError: The engines did not start.
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
        self.n = n
        self.timeout_s = timeout_s
        self._beside = beside
        self._device = device
        self._turn = Turn()  # one call at a time, whichever thread asks for it
        self._stopped: tuple[type[RankError], str, int] | None = None  # why, and a rank it is about
        self._processes: Processes | None = None
        self._magics: Any = None
        self._everyone: Any = list(range(n))  # ipyparallel's numbers of the engines
        self.start()

    def start(self) -> None:
        """Start the engines; does nothing while they run."""
        if self._processes:
            return
        shell = None if self._beside else get_ipython()
        if shell:
            self._take_over_notebook()
        self._joined = False  # all ranks are in a process group that works
        self._stuck = False  # some rank does not obey: the engines must be replaced
        self._was_told_to_stop = False  # whatever the reason
        self._ran_cells = False  # `%%px` cells, which may have defined something
        self._group = 0  # number of the process group; 0 is none
        try:
            Ranks.announce(f"starting {self.n} {'rank' if self.n == 1 else 'ranks'}")
            self._connect()
            with self._turn:
                self._join()
        except BaseException:
            self.close()
            raise
        finally:
            Ranks.announce("")
        if shell:
            self._register_magics(shell)

    def _take_over_notebook(self) -> None:
        """One pool per notebook: a second run of the cell with `Ranks(4)` ends the first pool."""
        old = Ranks._in_notebook() if Ranks._in_notebook else None
        if old is not None and old is not self:
            old.close()
        Ranks._in_notebook = weakref.ref(self)

    def _register_magics(self, shell: Any) -> None:
        from labcode.pool.px import PxMagics

        if self._magics is None:
            self._magics = PxMagics(shell, self)
        self._magics.view = self._client.direct_view(self._everyone, block=True)
        shell.register_magics(self._magics)

    def _connect(self, attempts: int = 2) -> None:
        """Start processes and reach them; try again, as a port may be taken before they bind it."""
        processes = Processes(self.n, sees_gpus=self._device == "cuda")
        self._processes = processes
        self._end = weakref.finalize(self, processes.kill)
        try:
            self._client = processes.connect()
        except RuntimeError:
            self.close()
            if attempts == 1:
                raise
            self._connect(attempts - 1)
            return
        self._view = self._client.direct_view(self._everyone)

    def close(self) -> None:
        """End the engines; what cells defined on them is gone.

        In a notebook the next call starts them again, and says so.
        """
        if self._processes:
            self._end()
            self._processes = None

    def restart(self) -> None:
        """New engines in place of the old ones."""
        self.close()
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
            args, kwargs: Its arguments.
            pass_rank: True or False decides whether the rank is passed, whatever the first
                parameter is called.
            limit_s: How long the call may take before its ranks are stopped; None is what
                `limits.limited` says, and for ever outside of it.

        Returns:
            The results in rank order.

        Raises:
            RankError: A rank raised, or its process died. The others have been stopped; the pool
                can be used again.
            LateError: Some ranks, which it names, were still at work after `limit_s`.
            TypeError: `fn` or an argument cannot be sent.
        """
        if pass_rank is None:
            pass_rank = _asks_for_rank(fn)
        payload = wire.pack_call(fn, args, kwargs)
        with self._turn:
            return self._run(payload, pass_rank, time_limit_s(limit_s))

    def _run(self, payload: bytes, pass_rank: bool, limit_s: float | None) -> list[Any]:
        self._ready()
        reply = self._view.apply_async(engine.call, payload, sys.path, pass_rank)
        try:
            self._wait(reply, limit_s)
        finally:
            answers = answers_of(reply)
            print_outputs(dict(enumerate(answers)))
            if reply.ready():
                self._client.purge_local_results(reply)
        self._raise(reply)
        if any(answer["groups"] for answer in answers):
            self._drop_groups()
        return [_result(rank, answer) for rank, answer in enumerate(answers)]

    def _raise(self, reply: Any) -> None:
        """The one error of a call, if it has one."""
        assert self._processes is not None
        if self._stopped is not None:
            raise_stopped(reply, *self._stopped)
        raise_first(reply, self._processes.record.explain)

    def last_collectives(self) -> list[LastCollective | None]:
        """What each rank has called last of `torch.distributed`, in rank order.

        None is a rank that has called nothing since the last call of the pool, or cell, began.
        Also after a failure, and after the death of an engine; a restart forgets it. Collectives
        that C++ starts by itself, as those of DDP, are not seen.

            str(ranks.last_collectives()[1])      # "broadcast of float32 [3] from rank 0"

        Held by: tests/ranks/test_pool_collectives.py::test_the_last_collectives_can_be_asked_for
        """
        self._check_open()
        assert self._processes is not None
        return [self._processes.record.last(rank) for rank in range(self.n)]

    def leave_group(self) -> None:
        """Let the next call enter a new process group.

        For after a call that may have left messages behind: nobody who receives later shall get
        them. A call that fails leaves its group by itself.

        Held by: tests/ranks/test_pool_faults.py::test_messages_left_behind_stay_in_their_group
        """
        self._joined = False

    def _drop_groups(self) -> None:
        """Now that all ranks are done with the process groups that a call made: destroy them."""
        reply = self._view.apply_async(engine.drop_groups)
        self._wait(reply)
        self._client.purge_local_results(reply)

    def _ready(self) -> None:
        """Before a call: live engines and a fresh process group, or a clear error."""
        if self._processes is None and get_ipython():
            # somebody goes on after Run All, whose last cell has closed them
            Ranks.warn(f"Ranks({self.n}) was closed: its ranks are started again")
            self.start()
        self._check_open()
        assert self._processes is not None
        self._stopped = None
        death = None if self._stuck else self._processes.death()
        if death and in_limited():
            gone = ": what %%px cells defined is gone" if self._ran_cells else ""
            Ranks.warn(f"{death}, and all ranks are started again{gone}")
            self.restart()
        if not self._stuck:
            self._check_alive()
            left = self._processes.record.left() if self._joined else None
            if left:
                Ranks.warn(f"{left}: all ranks enter a new process group")
                self._joined = False
            if not self._joined:
                try:
                    self._join()
                except RankError:
                    self._check_alive()
                    self._stuck = True
        if self._stuck:
            why = "the ranks took too long to answer (is the machine busy?)"
            if self._was_told_to_stop:
                why = "after the last call some rank did not stop when it was told to"
            gone = "; what %%px cells defined is gone" if self._ran_cells else ""
            Ranks.warn(f"{why}: all ranks were started anew{gone}")
            self.restart()
        self._was_told_to_stop = False

    def _check_open(self) -> None:
        if not self._processes:
            raise RuntimeError(
                f"this pool of {self.n} ranks is closed: call restart() on it, or make a new one"
            )
        if self._processes.owner != os.getpid():
            raise RuntimeError(
                f"this pool of {self.n} ranks belongs to process {self._processes.owner}, and this "
                "one is a fork of it: make a pool here, with Ranks(n)"
            )

    def _check_alive(self) -> None:
        assert self._processes is not None
        death = self._processes.death()
        if death:
            advice = "call ranks.restart()"
            if in_limited():
                advice = "the next check starts the ranks again"
            raise RankError(f"{death}{self._processes.why()}: {advice}")

    def _join(self) -> None:
        """Put all ranks into a new process group: a failed collective makes the old one useless."""
        self._stuck = True  # until it worked
        self._group += 1
        port = self._client[0].apply_async(engine.open_store, self._group)
        self._wait(port)
        raise_first(port)
        joined = self._view.apply_async(
            engine.join, self._group, self.n, port.get(), self.timeout_s
        )
        self._wait(joined)
        raise_first(joined)
        self._joined = True
        self._stuck = False

    def _wait(self, reply: Any, limit_s: float | None = None) -> None:
        """Wait until every rank has answered; after a failure or interrupt stop the others."""
        stop_at = None
        watch = _Watch(self._processes, self.n, limit_s)
        try:
            while not reply.ready():
                self._turn.raise_interrupt()
                self._check_alive()
                reply.wait(0.02)
                if stop_at is None and any_failed(reply):
                    stop_at = time.monotonic() + GRACE_S
                if stop_at is not None and time.monotonic() > stop_at:
                    self._stop(reply)
                    return
                if stop_at is None and watch.sees_hang(reply):
                    self._stopped = (HangError, *watch.explanation(reply))
                    self._stop(reply)
                    return
                if stop_at is None and watch.is_late():
                    self._stopped = (LateError, *watch.who_is_late(reply))
                    self._stop(reply)
                    return
        except KeyboardInterrupt:
            self._stop(reply)
            raise
        if any_failed(reply):
            self._check_alive()
            self._joined = False

    def _stop(self, reply: Any) -> None:
        """End what the ranks do: by an interrupt and cut connections, else by killing them."""
        assert self._processes is not None
        self._joined = False
        self._stuck = True
        self._was_told_to_stop = True
        self._processes.break_off(self._group)
        reply.wait(PATIENCE_S)
        if reply.ready():
            self._stuck = False
        else:
            self._processes.kill()

    def __len__(self) -> int:
        return self.n

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        running = self._processes is not None and not self._processes.death()
        return f"Ranks({self.n}, {'running' if running else 'not running'})"

    def __reduce__(self) -> str:
        raise TypeError("a pool of ranks cannot be used on its own ranks")


class _Watch:
    """Looks, while a call runs, whether its ranks wait for one that will never come.

    Args:
        processes: Of the pool.
        n: Number of ranks.
        limit_s: How long the call may take; None is for ever.
    """

    def __init__(self, processes: Processes | None, n: int, limit_s: float | None) -> None:
        assert processes is not None
        self._record = processes.record
        self._n = n
        self._limit_s = float("inf") if limit_s is None else limit_s
        self._late_at = time.monotonic() + self._limit_s
        self._look_at = time.monotonic() + LOOK_S
        self._progress: list[tuple[int, int]] = []
        self._since = 0.0

    def sees_hang(self, reply: Any) -> bool:
        """Whether nothing has moved for `HANG_S` in a state in which nothing can."""
        now = time.monotonic()
        if now < self._look_at or len(reply) != self._n:
            return False
        self._look_at = now + LOOK_S
        progress = self._record.progress()
        if progress != self._progress or not self._record.deadlock(_answered(reply)):
            self._progress = progress
            self._since = now
            return False
        return now - self._since >= HANG_S

    def explanation(self, reply: Any) -> tuple[str, int]:
        """What to say of it, and a rank that waits."""
        answered = _answered(reply)
        waiting = next(rank for rank in range(self._n) if rank not in answered)
        rule = "every rank that a call needs has to make it"
        calls = {call.name for call in self._record.waiting()}
        if not answered and calls == {"send"}:
            rule = "all of them wait in send, and none receives"
        elif not answered and calls == {"recv"}:
            rule = "all of them wait in recv, and none sends"
        return f"{self._record.explain(answered)}: {rule}", waiting

    def is_late(self) -> bool:
        """Whether the call has taken longer than it may."""
        return time.monotonic() > self._late_at

    def who_is_late(self, reply: Any) -> tuple[str, int]:
        """What to say of it, and a rank that is still at work."""
        answered = _answered(reply)
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


def _answered(reply: Any) -> list[int]:
    """The ranks whose answers have come."""
    return [rank for rank, child in enumerate(reply._children) if child.done()]


def _result(rank: int, answer: dict[str, Any]) -> Any:
    """The result of one rank; to unpickle it may run code of the user's, and fail."""
    try:
        return wire.loads(answer["result"])
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
