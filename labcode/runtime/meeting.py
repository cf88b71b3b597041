"""How the ranks of a job find each other: one store, and a roll call in it.

torch would do it in one call, `TCPStore(host, port, world_size, ...)`. That call waits for as long
as a collective may take, ten minutes, without a word and deaf to Ctrl-C; then it prints the stack
of its C++ code and not who was missing. Here the waiting is done in Python, in three steps:

1. Somebody listens at MASTER_ADDR:MASTER_PORT. Until then the reason is known: the name does not
   resolve, or nobody is there.
2. It is a store of torch, and the store of this job.
3. Each rank writes down that it is here, in the roll call that rank 0 has opened. When rank 0 sees
   that the last one has come, it says so, and all ranks continue.

torchrun may start all ranks again. Its agents do not agree how often: one whose rank has died
counts a restart, and one that is only told to start again does not (torch 2.13). So it is rank 0
that numbers the roll calls. A rank that finds its name in one already, or a verdict, knows that it
was of an attempt before, and waits for the next.

A rank that waits prints what it waits for after ten seconds and then every half minute, one rank of
each node. Giving up comes much later than the first line, because ranks do start at different
times, where containers are loaded or a file system is slow.

What lies in the store, all under the prefix "labcode/":

    job                          whose store this is: "torchrun's job x of 8 ranks"
    opened                       a counter: how many roll calls rank 0 has opened
    roll_call_2/here/5           rank 5 has come to roll call 2, with its host and process
    roll_call_2/complete         all have come
    roll_call_2/verdict          why all of them end instead
    early/here/5                 rank 5 came before any roll call was opened; for messages only

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

from labcode.runtime.agreement import SharedError
from labcode.runtime.place import Place
from labcode.runtime.units import ranks_text

SAY_AFTER_S = 10.0  # of silence, before the first line
SAY_EVERY_S = 30.0
HOPELESS_S = 25.0  # for causes that waiting rarely cures: an unknown name, a stranger at the port
CONNECT_S = 5.0  # for one attempt to reach a port
OPEN_S = 20.0  # for one attempt to speak with the store behind it
MAX_LISTED = 4096  # ranks that are looked up for a message: a request to the store each
READ_S = 1.5  # how long the store stays open for ranks that have yet to read why all end
_COMPLETE = "complete"  # keys of the store
_VERDICT = "verdict"
_OPENED = "opened"
_WAIT_LONGER = "set LABCODE_MEET_TIMEOUT_S to wait longer"


class MeetingError(ValueError):
    """This rank cannot meet the others; they may not know."""


class RollCallError(SharedError, MeetingError):
    """The ranks that have come know that others are missing, or too many."""


class Patience:
    """How long to wait, and when to say so.

    Args:
        place: Where this process stands.
        limit_s: Time after which waiting is given up.
        hopeless_s: Time after which it is given up for a cause that waiting rarely cures.
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
    def waited_text(self) -> str:
        """How long this rank has waited, for the end of a sentence: " within 45 s"."""
        return f" within {self.waited_s:.0f} s"

    def is_over(self, hopeless: bool = False) -> bool:
        """Whether to give up.

        Args:
            hopeless: Waiting rarely cures what this rank has just met.
        """
        # The shorter limit counts from the first of several such causes in a row. Any other result
        # in between resets it: a name may resolve now and then while a node is still booting.
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
        """Sleep before the next look: 20 ms at first, then longer, up to half a second."""
        # Ranks that start together find each other at once. And a thousand ranks that wait for one
        # look into the store, which is one process, 2,000 times a second and not 50,000 times.
        time.sleep(self._pause_s)
        self._pause_s = min(0.5, 1.5 * self._pause_s)


def meet(place: Place, patience: Patience, timeout_s: float) -> dist.Store:
    """The store of a job whose ranks have all come.

    Args:
        place: Where this process stands; it has an address.
        patience: How long to wait for the others.
        timeout_s: How long later requests to the store may take.

    Raises:
        MeetingError: The place to meet cannot be reached, or is no store, or another job's.
        RollCallError: Ranks are missing, or one came twice.
    """
    store = _reach(place, patience, silenced=True)
    number = _hold_roll_call(place, store, patience)
    store.set_timeout(timedelta(seconds=timeout_s))
    # The keys of an earlier attempt are still in the store of torchrun, with the addresses of
    # processes that have ended. A prefix with the number of the roll call hides them.
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
        place: Where this process stands.
        patience: How long to try.
        silenced: Whether stderr is closed during each attempt, because torch writes its stack
            there. This also drops what other threads write: only for a process that starts.
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
            raise MeetingError(f"{trouble}{patience.waited_text}: {advice}, or {_WAIT_LONGER}")
        if patience.is_due():
            patience.say(f"rank 0 of {place.world_size}: {trouble}")
        patience.pause()


def _knock(host: str, port: int) -> None:
    """Connect once, to see whether anything listens at the port.

    A socket can connect to itself: if nothing listens, and the port that the kernel picks for this
    end happens to be the one that is looked for, TCP's simultaneous open succeeds. That counts as
    refused.
    """
    with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
        if connection.getsockname() == connection.getpeername():
            # Lingering for 0 s resets the connection. Closed in order, it would stay in TIME_WAIT
            # for a minute, at the port where rank 0 is about to open its store.
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
        # torch pings the store when it connects. Something else that answers fails the ping, which
        # no waiting cures. A store that has just been closed, or a forwarded port behind which
        # nothing listens yet, closes the connection, and a slow store does not answer in time: both
        # are worth another try.
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

    torch has no time limit for a stranger that accepts the connection and then says nothing. So
    the call runs in a thread of its own, which is left behind in that case. And torch writes its
    stack to stderr, some 20 lines for each attempt, where one line says what is wrong; while a
    process starts, those lines are dropped.
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
        # daemon, so that a thread that is left behind does not keep the process from ending
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
    """Drop everything that this process writes to stderr, until the end of the block.

    The file descriptor is exchanged, because C++ code does not write through `sys.stderr`. Once
    torch is imported there is no other way to keep it quiet. Only for the start of a process, when
    no other thread writes anything yet.
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
                # One request for each rank, so only when a line is due.
                present, missing = call.roll()
                patience.say(
                    f"{ranks_text(missing)} of {place.world_size} at {_where(place)}; "
                    f"here: {ranks_text(present)}"
                )
            patience.pause()
    except RollCallError:
        if place.hosts_store:
            # The store ends with this process. The others look every half second at most.
            time.sleep(READ_S)
        raise
    except dist.DistError:
        raise MeetingError(
            f"rank 0, whose store at {_where(place)} all meet in, has ended before all had come: "
            "look for its own last lines"
        ) from None
    return call.number


class _RollCall:
    """The list of the ranks that have come to the newest roll call that rank 0 has opened.

    Until rank 0 has opened one, the other ranks write their names on a list of early ones, which
    only messages are made of.

    Args:
        place: Where this process stands.
        store: The store of the job, which all its attempts share.

    Attributes:
        number: The number of the roll call that this rank is in, counted from 1; 0: none yet.

    Raises:
        MeetingError: A process that no agent has started finds another one with its rank.
    """

    def __init__(self, place: Place, store: dist.Store) -> None:
        self._place = place
        self._all = store
        self._own = f"on {socket.gethostname()}, process {os.getpid()}"
        self._looked_at = 0  # the newest roll call that this rank has tried to enter
        self.number = 0
        if place.rank == 0:
            # An attempt has one rank 0, and so at most one roll call.
            self._enter(store.add(_OPENED, 1))
        else:
            store.set(f"early/{_here(place.rank)}", self._own)

    def is_complete(self) -> bool:
        """Whether all have come; rank 0 finds it out, and tells the others."""
        # Only rank 0 asks for all names, in one request. If every rank did, n ranks would look up
        # n names each at every look.
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
        """Write down for all ranks that have come why the roll call ends."""
        if self.number:
            self._list.set(_VERDICT, verdict)

    def raise_verdict(self) -> None:
        """Raise RollCallError if another rank has given up."""
        if self.number and _is_set(self._list, _VERDICT):
            raise RollCallError(self._list.get(_VERDICT).decode())

    @property
    def _list(self) -> dist.Store:
        return dist.PrefixStore(f"roll_call_{self.number}", self._all)

    def _enter_newest(self) -> None:
        """Enter the newest roll call, unless this rank has already looked at it."""
        # get() would wait until the key is there, so look first.
        if not _is_set(self._all, _OPENED):
            return
        newest = self._all.add(_OPENED, 0)  # adding 0 reads a counter
        if newest > self._looked_at:
            self._enter(newest)

    def _enter(self, number: int) -> None:
        self._looked_at = number
        names = dist.PrefixStore(f"roll_call_{number}", self._all)
        # compare_set writes if the key is not there yet, in one step on the server, and returns
        # what is there now. So of two processes with the same rank one finds its own name.
        first = names.compare_set(_here(self._place.rank), "", self._own).decode()
        # Under torchrun a name that stands there is that of this rank in an attempt before, and a
        # verdict is over that attempt: the agent ends all ranks once one has given up. Rank 0 of
        # this attempt has yet to open the next roll call, so wait for that. Without an agent there
        # is one attempt only, and a second process with the same rank is a mistake.
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
    """Check that all ranks at one store are of the same job, by its name, or at least its size."""
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
    """The error of a rank that has waited long enough; the other ranks get the same text."""
    present, missing = call.roll()
    are_missing = "has" if len(missing) == 1 else "have"
    are_here = "has" if len(present) == 1 else "have"
    text = (
        f"{ranks_text(missing)} of {place.world_size} {are_missing} not come to {_where(place)}"
        f"{patience.waited_text}, {ranks_text(present)} {are_here}: start every rank with this "
        f"MASTER_ADDR and MASTER_PORT, or {_WAIT_LONGER}; for one process unset RANK and WORLD_SIZE"
    )
    call.pronounce(text)
    # Of an error that all ranks share, rank 0 alone prints the line. If rank 0 is among the missing
    # ones, each rank has to print its own.
    return RollCallError(text) if 0 in present else MeetingError(text)


def _is_set(store: dist.Store, key: str) -> bool:
    """Whether a key was written; torch's stack is not shown if the store has just gone."""
    return _are_set(store, [key])


def _are_set(store: dist.Store, keys: Sequence[str]) -> bool:
    """Whether all these keys were written."""
    with _native_stderr_closed():
        return store.check(list(keys))


def _here(rank: int) -> str:
    return f"here/{rank}"
