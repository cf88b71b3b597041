"""How the ranks of a job find each other: one store, and a roll call in it.

torch would do it in one call, `TCPStore(host, port, world_size, ...)`. That call waits for as long
as a collective may take, ten minutes, without a word and deaf to Ctrl-C; then it prints the stack
of its C++ code and not who was missing. Here the waiting is done in Python, in three steps:

1. Somebody listens at MASTER_ADDR:MASTER_PORT. Until then the reason is known: the name does not
   resolve, or nobody is there.
2. It is a store of torch, and the store of this job.
3. Each rank writes down that it is here, in the roll call that rank 0 has opened; all go on when
   rank 0 sees that the last one has come.

torchrun may start all ranks again. Its agents do not agree how often: one whose rank has died
counts a restart, and one that is only told to start again does not (torch 2.13). So it is rank 0
that numbers the roll calls. A rank that finds its name in one already, or a verdict, knows that it
was of an attempt before, and waits for the next.

Who waits says so after ten seconds and then from time to time, once for each node. Ranks do start
at different times, where containers are loaded or a file system is slow: so the last word comes
much later than the first.

Held by: tests/faults/test_meeting.py
"""

import contextlib
import errno
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from labcode.comm.agreement import SharedError
from labcode.comm.place import Place
from labcode.units import ranks_text

SAY_AFTER_S = 10.0  # of silence, before the first line
SAY_EVERY_S = 30.0
HOPELESS_S = 25.0  # for what waiting hardly ever cures: an unknown name, a stranger at the port
CONNECT_S = 5.0  # for one attempt to reach a port
OPEN_S = 20.0  # for one attempt to speak with the store behind it
MAX_LISTED = 4096  # ranks that a message looks at; each costs a request to the store
READ_S = 1.5  # how long the store stays open, for ranks that have yet to read why all end
_COMPLETE = "complete"  # keys of the store
_VERDICT = "verdict"
_OPENED = "opened"  # how many roll calls there were
_WAIT_LONGER = "set LABCODE_MEET_TIMEOUT_S to wait longer"


class MeetingError(ValueError):
    """This rank cannot meet the others; they may not know."""


class RollCallError(SharedError, MeetingError):
    """The ranks that have come know that others are missing, or too many."""


class Patience:
    """How long to wait, and when to say so.

    Args:
        place: Of this process.
        limit_s: Time after which waiting is given up.
        hopeless_s: The same for what waiting hardly ever cures.
    """

    def __init__(self, place: Place, limit_s: float, hopeless_s: float = HOPELESS_S) -> None:
        self.limit_s = limit_s
        self.hopeless_s = min(limit_s, hopeless_s)
        self._started = time.monotonic()
        self._hopeless_since_s: float | None = None
        self._next_word_s = SAY_AFTER_S
        self._pause_s = 0.02
        # Rank 0 may be the one who is missing: then rank 1 speaks for its node.
        self._speaks = place.local_rank == 0 or place.rank == 1

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def in_vain(self) -> str:
        return f" within {self.waited_s:.0f} s"

    def is_over(self, hopeless: bool = False) -> bool:
        """Whether to give up.

        Args:
            hopeless: What this rank has just met is hardly ever cured by waiting.
        """
        if not hopeless:
            self._hopeless_since_s = None
        elif self._hopeless_since_s is None:
            self._hopeless_since_s = self.waited_s
        elif self.waited_s - self._hopeless_since_s >= self.hopeless_s:
            return True
        return self.waited_s >= self.limit_s

    def is_due(self) -> bool:
        """Whether it is time for another line that says what this rank waits for."""
        return self._speaks and self.waited_s >= self._next_word_s

    def say(self, what: str) -> None:
        """Tell what this rank waits for."""
        self._next_word_s = self.waited_s + SAY_EVERY_S
        line = f"waiting for {what} ({self.waited_s:.0f} s so far, {self.limit_s:g} s at most)"
        print(line, file=sys.stderr, flush=True)

    def pause(self) -> None:
        """Sleep before the next look: short at first, then longer, for the sake of the store."""
        time.sleep(self._pause_s)
        self._pause_s = min(0.5, 1.5 * self._pause_s)


def meet(place: Place, patience: Patience, timeout_s: float) -> dist.Store:
    """The store of a job whose ranks have all come.

    Args:
        place: Of this process; it has an address.
        patience: How long to wait for the others.
        timeout_s: How long later requests to the store may take.

    Raises:
        MeetingError: The place to meet cannot be reached, or is no store, or another job's.
        RollCallError: Ranks are missing, or one came twice.
    """
    store = _reach(place, patience, silenced=True)
    number = _hold_roll_call(place, store, patience)
    store.set_timeout(timedelta(seconds=timeout_s))
    return dist.PrefixStore(f"labcode/met_{number}", store)


def store_of_agent(place: Place, timeout_s: float) -> dist.Store:
    """The store of a job whose ranks have an agent, without waiting for the other ranks.

    Raises:
        MeetingError: It cannot be reached.
    """
    return dist.PrefixStore(f"labcode/attempt_{place.attempt}", _ask(place, timeout_s))


def store_of_job(place: Place, timeout_s: float) -> dist.Store | None:
    """What the attempts of a job that torchrun restarts share; None where they share nothing.

    The store of torchrun outlives an attempt, the one that rank 0 opens does not.

    Raises:
        MeetingError: It cannot be reached.

    Held by: tests/faults/test_meeting.py::
        test_lines_of_other_threads_are_not_lost_while_a_run_asks_its_job
    """
    if not place.has_agent or place.hosts_store or place.address is None:
        return None
    return dist.PrefixStore("labcode/all_attempts", _ask(place, timeout_s))


def _ask(place: Place, timeout_s: float) -> dist.TCPStore:
    """The store of a job, for a few questions in the middle of a run."""
    store = _reach(place, Patience(place, timeout_s), silenced=False)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _reach(place: Place, patience: Patience, silenced: bool) -> dist.TCPStore:
    """The store at MASTER_ADDR:MASTER_PORT, opened by rank 0 if no agent has done so.

    Args:
        place: Of this process.
        patience: How long to try.
        silenced: Whether torch's words about each attempt are dropped, with all that other threads
            write meanwhile: only while a process starts.
    """
    while True:
        _find(place, patience)
        if place.hosts_store:
            return _open_own(place, silenced)
        store = _connect(place, patience, silenced)
        if store is not None:
            return store
        patience.pause()


# ---- 1. somebody listens


def _find(place: Place, patience: Patience) -> None:
    """Wait until the name of the host resolves and, but for rank 0, somebody listens there."""
    host, port = _address(place)
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            if not place.hosts_store:
                _knock(host, port)
            return
        except (socket.gaierror, UnicodeError) as error:
            trouble = (
                f"MASTER_ADDR={host} does not resolve on {socket.gethostname()} "
                f"({_without_number(error)})"
            )
            advice = "set it to the host of rank 0"
            hopeless = True
        except OSError as error:
            trouble = f"nobody answers at {_where(place)} ({_without_number(error)})"
            advice = "start rank 0, which is to open it, with this MASTER_ADDR and MASTER_PORT"
            if place.has_agent:
                advice = "torchrun, which is to open it, has gone: start the job again"
            hopeless = False
        if patience.is_over(hopeless):
            raise MeetingError(f"{trouble}{patience.in_vain}: {advice}, or {_WAIT_LONGER}")
        if patience.is_due():
            patience.say(f"rank 0 of {place.world_size}: {trouble}")
        patience.pause()


def _knock(host: str, port: int) -> None:
    """Connect once. Where nobody listens, TCP may connect a socket with itself, if the port that it
    was given at random is the one it looks for: that is nobody, and must not keep the port.
    """
    with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
        if connection.getsockname() == connection.getpeername():
            at_once = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _without_number(error: Exception) -> str:
    """The text of an error of the network: "connection refused"."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error).splitlines()[0]


def _address(place: Place) -> tuple[str, int]:
    assert place.address is not None, "a single process has nobody to meet"
    return place.address


def _where(place: Place) -> str:
    """The place to meet, with what its name stands for: "n1:29500 (10.0.0.1)"."""
    host, port = _address(place)
    addresses: list[str] = []
    with contextlib.suppress(OSError, UnicodeError):
        for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            address = str(found[4][0])
            if address not in (*addresses, host):
                addresses.append(address)
    return f"{host}:{port}" + (f" ({', '.join(addresses)})" if addresses else "")


# ---- 2. it is a store, and this job's


def _open_own(place: Place, silenced: bool) -> dist.TCPStore:
    """On rank 0, where no agent has done so: open the store."""
    try:
        return _make_store(place, silenced)
    except _NoStoreError as error:
        if "eaddrinuse" in error.reason.lower() or "already in use" in error.reason.lower():
            host, port = _address(place)
            reason = "the port is in use: set MASTER_PORT to another one"
            raise MeetingError(
                f"rank 0 cannot meet the others at {host}:{port}: {reason}, "
                "and RANK=0 for one process only"
            ) from None
        raise MeetingError(
            f"rank 0 runs on {socket.gethostname()}, and cannot reach the port that it opened "
            f"as {_where(place)} ({error.reason}): set MASTER_ADDR to the host of rank 0"
        ) from None


def _connect(place: Place, patience: Patience, silenced: bool) -> dist.TCPStore | None:
    """Connect to a store where somebody listens; None if it is worth another try."""
    try:
        return _make_store(place, silenced)
    except _NoStoreError as error:
        # A store that has just been closed, or a forwarded port behind which nobody listens yet,
        # closes the connection; a store that is only slow does not answer in time.
        is_stranger = "ping failed" in error.reason.lower()
        if is_stranger or patience.is_over(hopeless=True):
            raise MeetingError(
                f"what listens at {_where(place)} is not rank 0 of this job, nor any store of "
                f"PyTorch ({error.reason}): set MASTER_PORT to a port that nobody else uses"
            ) from None
        return None


class _NoStoreError(Exception):
    """torch could not open a store, or connect with one.

    Args:
        reason: Its first words about it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _make_store(place: Place, silenced: bool) -> dist.TCPStore:
    """A store or a client of one, within `OPEN_S`.

    torch waits for a silent stranger without any limit, so a thread of its own does it, which may
    be left behind. And torch writes its stack to stderr, some 20 lines for each attempt, where our
    one line says what is wrong: while a process starts, that is dropped.
    """
    host, port = _address(place)
    answers: queue.SimpleQueue[dist.TCPStore | Exception] = queue.SimpleQueue()

    def make() -> None:
        try:
            store = dist.TCPStore(
                host,
                port,
                None,  # any number of ranks: they are counted in the roll call
                place.hosts_store,
                timedelta(seconds=OPEN_S / 2),
                wait_for_workers=False,
            )
        except Exception as error:
            answers.put(error)
        else:
            answers.put(store)

    with _native_stderr_closed() if silenced else contextlib.nullcontext():
        threading.Thread(target=make, daemon=True).start()
        try:
            answer = answers.get(timeout=OPEN_S)
        except queue.Empty:
            raise _NoStoreError("it accepts the connection and says nothing") from None
    if isinstance(answer, Exception):
        raise _NoStoreError(str(answer).splitlines()[0]) from None
    return answer


@contextlib.contextmanager
def _native_stderr_closed() -> Iterator[None]:
    """Send what this process writes to stderr nowhere, until the end of the block.

    torch has no other way to be quiet once it is imported. It is for the start of a process alone,
    where no thread has anything to say yet.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # closed already
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


# ---- 3. the roll call


def _hold_roll_call(place: Place, tcp_store: dist.TCPStore, patience: Patience) -> int:
    """Return the number of the roll call when all ranks have come to it."""
    try:
        store = dist.PrefixStore("labcode", tcp_store)
        _check_job(place, store)
        call = _RollCall(place, store)
        while not call.is_complete():
            call.raise_verdict()
            if patience.is_over():
                raise _give_up(place, call, patience)
            if patience.is_due():
                present, missing = call.roll()
                patience.say(
                    f"{ranks_text(missing)} of {place.world_size} at {_where(place)}; "
                    f"here: {ranks_text(present)}"
                )
            patience.pause()
    except RollCallError:
        if place.hosts_store:
            time.sleep(READ_S)
        raise
    except dist.DistError:
        raise MeetingError(
            f"rank 0, whose store at {_where(place)} all meet in, has ended before all had come: "
            "look for its own last lines"
        ) from None
    return call.number


class _RollCall:
    """The list of those who have come, of the newest roll call that rank 0 has opened.

    Until it has opened one, the others write their names on a list that only messages are made of.

    Args:
        place: Of this process.
        store: Of the job, for all its attempts.

    Attributes:
        number: Of the roll call that this rank is in, counted from 1; 0: in none yet.

    Raises:
        MeetingError: A process that no agent has started finds another one with its rank.
    """

    def __init__(self, place: Place, store: dist.Store) -> None:
        self._place = place
        self._all = store
        self._own = f"on {socket.gethostname()}, process {os.getpid()}"
        self._looked_at = 0
        self.number = 0
        if place.rank == 0:
            self._enter(store.add(_OPENED, 1))
        else:
            store.set(f"early/{_here(place.rank)}", self._own)

    def is_complete(self) -> bool:
        """Whether all have come; rank 0 finds it out, and tells the others."""
        if self._place.rank > 0:
            self._enter_newest()
            return self.number > 0 and _is_set(self._list, _COMPLETE)
        if not _are_set(self._list, [_here(rank) for rank in range(self._place.world_size)]):
            return False
        self._list.set(_COMPLETE, "")
        return True

    def roll(self) -> tuple[list[int], list[int]]:
        """The ranks that have come and those that have not, of the first `MAX_LISTED`."""
        names = self._list if self.number else dist.PrefixStore("early", self._all)
        present = []
        missing = []
        for rank in range(min(self._place.world_size, MAX_LISTED)):
            if _is_set(names, _here(rank)):
                present.append(rank)
            else:
                missing.append(rank)
        return present, missing

    def pronounce(self, verdict: str) -> None:
        """Tell all that have come why they end."""
        if self.number:
            self._list.set(_VERDICT, verdict)

    def raise_verdict(self) -> None:
        """Raises RollCallError if another rank has given up."""
        if self.number and _is_set(self._list, _VERDICT):
            raise RollCallError(self._list.get(_VERDICT).decode())

    @property
    def _list(self) -> dist.Store:
        return dist.PrefixStore(f"roll_call_{self.number}", self._all)

    def _enter_newest(self) -> None:
        """Enter the newest roll call, unless this rank's name stands there: it is an old one."""
        if not _is_set(self._all, _OPENED):
            return
        newest = self._all.add(_OPENED, 0)
        if newest > self._looked_at:
            self._enter(newest)

    def _enter(self, number: int) -> None:
        self._looked_at = number
        names = dist.PrefixStore(f"roll_call_{number}", self._all)
        first = names.compare_set(_here(self._place.rank), "", self._own).decode()
        # an agent ends all ranks once one has given up, so that who still comes is of a later one
        is_of_an_attempt_before = first != self._own or _is_set(names, _VERDICT)
        if is_of_an_attempt_before and self._place.has_agent:
            return
        self.number = number
        if first != self._own:
            rank = self._place.rank
            text = f"two processes have rank {rank} of {self._place.world_size}: {first}, and "
            text += f"{self._own} at {_where(self._place)}: give each a RANK of its own"
            self.pronounce(text)
            raise MeetingError(text)


def _check_job(place: Place, store: dist.Store) -> None:
    """All ranks at one store are of the same job: it has a name, or at least a size."""
    own = f"{place.job or 'a job'} of {place.world_size} ranks"
    if place.hosts_store or place.has_agent:
        found = store.compare_set("job", "", own).decode()
    else:
        found = store.get("job").decode()  # the store is rank 0's, and so is the first word
    if found != own:
        raise MeetingError(
            f"at {_where(place)} meet the ranks of {found}, and this is rank {place.rank} of "
            f"{own}: "
            "set MASTER_PORT to another port for each job, and WORLD_SIZE alike for its ranks"
        )


def _give_up(place: Place, call: _RollCall, patience: Patience) -> MeetingError:
    """The error of whoever has waited long enough; the others are told the same."""
    present, missing = call.roll()
    are_missing = "has" if len(missing) == 1 else "have"
    are_here = "has" if len(present) == 1 else "have"
    text = (
        f"{ranks_text(missing)} of {place.world_size} {are_missing} not come to {_where(place)}"
        f"{patience.in_vain}, {ranks_text(present)} {are_here}: start every rank with this "
        f"MASTER_ADDR and MASTER_PORT, or {_WAIT_LONGER}; for one process unset RANK and WORLD_SIZE"
    )
    call.pronounce(text)
    # rank 0 reports what all know
    return RollCallError(text) if 0 in present else MeetingError(text)


def _is_set(store: dist.Store, key: str) -> bool:
    """Whether somebody wrote a key; torch's stack is not shown if the store has just gone."""
    return _are_set(store, [key])


def _are_set(store: dist.Store, keys: Sequence[str]) -> bool:
    """Whether all these keys were written."""
    with _native_stderr_closed():
        return store.check(list(keys))


def _here(rank: int) -> str:
    return f"here/{rank}"
