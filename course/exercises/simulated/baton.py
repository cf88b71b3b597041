"""Which rank runs: each is a thread, and exactly one of them has the baton."""

import contextlib
import functools
import inspect
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import FrameType, MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.multiprocessing.reductions import StorageWeakRef

from course.answer import Hint
from course.exercises.in_notebook import is_library
from course.exercises.simulated.events import DeadEnd, Endless, Event, Outcome

MAX_STEPS = 2_000_000  # bytecodes of the learner's on one rank; they take about 0.2 s
# What torchrun tells each rank.
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Request = Any  # and Sent: of group.py, which stands on this module
Sent = Any
_thread = threading.local()  # .rank, in the thread of a rank


class Own(NamedTuple):
    """What each rank has for itself, and a process once.

    Args:
        generator: The state of torch's.
        python_generator: That of `random`.
        dtype: The default.
        launched: The environment variables of `LAUNCHED`; None where there is none.
    """

    generator: torch.Tensor
    python_generator: Any
    dtype: torch.dtype
    launched: tuple[str | None, ...]


class Ended(BaseException):
    """Ends a rank that waits for what cannot come any more."""


class Rank:
    """One thread; `here()` gives the one that runs.

    Attributes:
        run: The run it belongs to.
        number: Number of the rank in the world.
        ident: Identifier of the rank's thread.
        world: torch.distributed's tables of groups, as this rank has them.
        made: The groups that it has made.
        num_groups: How many of them all ranks make.
        num_calls: How many collectives and messages it has started.
        under_way: Requests whose result has not arrived yet.
        received: The memory into which it has received messages, with its bytes. The references are
            weak: what nobody keeps is `expired()`, and gone when the next message is received.
    """

    def __init__(self, run: "Run", number: int) -> None:
        self.run = run
        self.number = number
        self.ident = 0
        self.made: list[Event] = []
        self.num_groups = 0
        self.num_calls = 0
        self.under_way: list[Request] = []
        self.received: dict[StorageWeakRef, int] = {}
        self.steps = 0
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None  # None: it can go on
        self.waits_for: Request | None = None
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.in_block = ""
        self.world = SimpleNamespace(
            default_pg=None,
            pg_map={},
            pg_names={},
            pg_group_ranks={},
            pg_backend_config={},
            pg_config_info=[],
            pg_to_tag={},
            tags_to_pg={},
            pg_coalesce_state={},
            group_count=1,
            comms=[],
        )

    @contextlib.contextmanager
    def block(self, name: str) -> Iterator[None]:
        """Calls and waits inside are written down with this name."""
        before = self.in_block
        self.in_block = name
        try:
            yield
        finally:
            self.in_block = before

    def note(self, kind: str, value: Any = None) -> None:
        """Write something down among the calls."""
        event = Event(kind, self.number, self.run.tick(), self.in_block, where(), value=value)
        self.run.events.append(event)

    def start(self, request: Request) -> None:
        """A call is under way from now on."""
        for other in self.under_way:
            if _meet(request.writes, other.reads + other.writes):
                request.event.overlaps = True
            if _meet(request.reads, other.writes):
                request.event.overlaps = True
        self.under_way.append(request)

    def wait_until(self, ready: Callable[[], bool], request: Request | None) -> None:
        """Give the baton on until `ready()`, which looks at the state of the run alone."""
        self.ready = ready
        self.waits_for = request
        while not ready():
            self.run.pass_on(self)
        self.ready = None
        self.waits_for = None

    def let_others_go_on(self) -> None:
        """Give the baton on once, and have it back when everybody else waits."""
        self.ready = _always
        if self.run.next_after(self) is not self:
            self.run.pass_on(self)
        self.ready = None

    def wait_for_future(self, future: Any) -> None:
        """Let arrive what this rank has asked a Future of, until this Future is complete."""
        while not future.done():
            pending = [one for one in self.under_way if one.future is not None]
            ready = [one for one in pending if one.is_ready()]
            if ready:
                ready[0].wait()
            else:
                one_is_ready = functools.partial(_any_is_ready, pending)
                self.wait_until(one_is_ready, pending[0] if pending else None)

    def place(self) -> DeadEnd:
        """Where it waits."""
        if self.waits_for is None:
            return DeadEnd(None)
        return DeadEnd(self.waits_for.event, self.waits_for.missing())


class _NoRank:
    """What `here()` gives where no rank is simulated: on real ranks nothing is written down."""

    received: Mapping[StorageWeakRef, int] = MappingProxyType({})

    @contextlib.contextmanager
    def block(self, name: str) -> Iterator[None]:
        yield

    def note(self, kind: str, value: Any = None) -> None:
        pass


def here() -> Rank | _NoRank:
    """The simulated rank that runs."""
    return current() or _NoRank()


def current() -> Rank | None:
    """The rank whose thread this is; None in any other thread."""
    return getattr(_thread, "rank", None)


class Run:
    """All ranks, and what they share."""

    def __init__(self, size: int, max_steps: int, ours: Mapping[Callable[..., Any], str]) -> None:
        self.max_steps = max_steps
        self.ours = {inspect.unwrap(one).__code__: hint for one, hint in ours.items()}
        self.ranks = [Rank(self, number) for number in range(size)]
        self.events: list[Event] = []
        self.clock = 0
        # by name and ranks of the group, and how many collectives of it went before
        self.meetings: dict[tuple[str, tuple[int, ...], int], dict[int, Sent]] = {}
        self.open_messages: list[Request] = []
        self.made: list[tuple[int, ...]] = []  # groups of the whole world, in order
        self.stuck: dict[int, DeadEnd] = {}
        self.is_over = False  # whoever wakes up now ends
        self.is_interrupted = False  # whoever runs now ends
        self.store = dist.HashStore()
        self.store.set_timeout(timedelta(milliseconds=1))  # nobody else runs meanwhile

    def tick(self) -> int:
        """Count one thing that happens."""
        self.clock += 1
        return self.clock

    def next_after(self, rank: Rank) -> Rank | None:
        """Who can go on, in rank order; the rank itself comes last."""
        later = self.ranks[rank.number + 1 :]
        for other in later + self.ranks[: rank.number + 1]:
            if other.is_done:
                continue
            if self.is_over or other.ready is None or other.ready():
                return other
        return None

    def pass_on(self, rank: Rank) -> None:
        """Return when it is this rank's turn again."""
        following = self.next_after(rank) or self._end(rank)
        if following is not rank:
            own = own_state()
            following.turn.release()
            rank.turn.acquire()
            set_own_state(own)
        if self.is_over:
            raise Ended

    def _end(self, rank: Rank) -> Any:
        """Nobody can go on: note where they are, and let them end, one after the other."""
        if not self.is_over:
            self.stuck = {one.number: one.place() for one in self.ranks if not one.is_done}
        self.is_over = True
        return self.next_after(rank)

    def act(self, rank: Rank, join: Callable[[], Any], call: Callable[[], Any], fresh: Own) -> None:
        """What the thread of a rank does."""
        rank.turn.acquire()
        rank.ident = threading.get_ident()
        _thread.rank = rank
        set_own_state(fresh)
        try:
            if not self.is_over:
                join()
                sys.settrace(functools.partial(_trace, rank))
                rank.result = call()
        except Ended:
            pass
        except BaseException as error:
            rank.error = error
        finally:
            sys.settrace(None)
            c10d._unregister_all_process_groups()
            rank.is_done = True
            following = self.next_after(rank) or self._end(rank)
            if following is not None:
                following.turn.release()

    def interrupt(self) -> None:
        """End all ranks, whatever they do."""
        self.is_over = True
        self.is_interrupted = True

    def outcome(self) -> Outcome:
        """What has become of it."""
        results = [rank.result for rank in self.ranks]
        errors = {rank.number: rank.error for rank in self.ranks if rank.error is not None}
        made = [rank.made for rank in self.ranks]
        return Outcome(results, errors, self.stuck, self.events, made)


def own_state() -> Own:
    """What whoever runs has for itself."""
    launched = tuple(os.environ.get(name) for name in LAUNCHED)
    return Own(torch.get_rng_state(), random.getstate(), torch.get_default_dtype(), launched)


def launched_by_torchrun(rank: int, size: int) -> tuple[str, ...]:
    """The values of `LAUNCHED` on a rank of one node."""
    return (str(rank), str(rank), str(size), str(size), "localhost", "29500")


def set_own_state(own: Own) -> None:
    """Put in place what a rank has for itself."""
    torch.set_rng_state(own.generator)
    random.setstate(own.python_generator)
    torch.set_default_dtype(own.dtype)
    for name, value in zip(LAUNCHED, own.launched):
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _always() -> bool:
    return True


def _meet(some: Sequence[range], others: Sequence[range]) -> bool:
    """Whether an address lies in some places and in others."""
    for one in some:
        for other in others:
            if one.start < other.stop and other.start < one.stop:
                return True
    return False


def _any_is_ready(requests: Sequence[Request]) -> bool:
    return any(one.is_ready() for one in requests)


# ---- what the learner's code executes


def _trace(rank: Rank, frame: FrameType, event: str, _: Any) -> Any:
    """Counts the learner's lines and bytecodes; libraries and checks are not slowed down.

    Not lines alone: Python 3.11 reports no new one while `while True: pass` runs. After a
    trace function has raised, Python traces no more, so a loop around a bare `except:` would go on;
    `sys.monitoring`, which begins with Python 3.12, could end it.
    """
    if frame.f_code in rank.run.ours:
        raise Hint(rank.run.ours[frame.f_code])
    if is_library(frame.f_code.co_filename):
        return None

    def on_step(frame: FrameType, event: str, _: Any) -> Any:
        rank.steps += 1
        if rank.run.is_interrupted:
            raise Ended
        if rank.steps > rank.run.max_steps:
            name = frame.f_code.co_name
            raise Endless(f"{name} did not come to an end (line {frame.f_lineno})")
        return on_step

    frame.f_trace = on_step  # first: from Python 3.13 on the next line has no effect without it
    frame.f_trace_opcodes = True
    return on_step


def where() -> str:
    """The learner's function and line that have called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_name}, line {frame.f_lineno}"
