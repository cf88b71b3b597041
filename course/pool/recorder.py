"""An engine's flight recorder: it writes down each call of `torch.distributed` before it starts.

While it writes it compares. The rank that comes second to a collective finds what the first one
called there, and raises `CollectiveMismatch` before gloo gets two sizes for one message, which ends
the process.

It stands in the methods of `ProcessGroup`, through which all Python functions of
`torch.distributed` go, however they were imported. Collectives that C++ starts by itself (DDP's
buckets, DTensor) are not seen. `comm.counting.CollectiveSpy` sees those too, but is a dispatch
mode: it makes *every* operation of the process some microseconds slower, which a lesson may pay
inside a block, and not always. The spy sees what a recorded call starts, as without a recorder.

One call costs 5 to 10 microseconds, and gloo's smallest all-reduce between two busy cores some 100:
20 % more of that, less of all that is larger. TORCH_DISTRIBUTED_DEBUG=DETAIL compares shapes as
well, but puts a collective of its own before each one, which takes several times as long as what a
lesson measures; and whoever does not come is found only by a time-out.

Held by: tests/ranks/test_pool_collectives.py, tests/unit/test_pool_recorder.py
"""

import array
import functools
import hashlib
import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from course.pool import record
from course.pool.record import Record

MAX_WORDS = 1000  # descriptions of calls that a group keeps
CONFIRM_S = 0.02  # before ranks are named: time for the others to come as well
LOOK_S = 0.001  # between two looks at a call that torch has not answered yet
ANSWER_S = 1.0  # torch refuses a call within it, or waits for the other ranks before it answers

_DTYPES = {getattr(torch, name): number for number, name in enumerate(record.DTYPES) if name}
_NAMES = {name: number for number, name in enumerate(record.NAMES)}


_RULE = "all ranks of a group make the same calls in the same order, with one size and dtype"


class CollectiveMismatch(RuntimeError):
    """Two ranks call different collectives, or pass tensors that do not belong together."""


class _Watched(NamedTuple):
    """Where a method of ProcessGroup has what counts; None where it has none.

    Args:
        name: Name as in `torch.distributed`.
        tensor: Number of the argument with this rank's tensor, or a list of it.
        root: Number of the argument with the options that hold the root.
        parts: Number of the argument with the list of all ranks' tensors. If they differ in size,
            sizes are not compared: that is allowed.
        compared: Whether ranks must pass tensors of one size and dtype.
    """

    name: str
    tensor: int | None = 0
    root: int | None = None
    parts: int | None = None
    compared: bool = True


_METHODS = {
    "allreduce": _Watched("all_reduce"),
    "allreduce_coalesced": _Watched("all_reduce", compared=False),
    "broadcast": _Watched("broadcast", root=1),
    "reduce": _Watched("reduce", root=1),
    "allgather": _Watched("all_gather", tensor=1, parts=0),
    "_allgather_base": _Watched("all_gather", tensor=1),
    "all_gather_single": _Watched("all_gather", tensor=1),
    "gather": _Watched("gather", tensor=1, root=2),
    "scatter": _Watched("scatter", root=2),
    "reduce_scatter": _Watched("reduce_scatter", parts=1),
    "_reduce_scatter_base": _Watched("reduce_scatter"),
    "reduce_scatter_single": _Watched("reduce_scatter"),
    "alltoall": _Watched("all_to_all", tensor=1, compared=False),
    "alltoall_base": _Watched("all_to_all", tensor=1, compared=False),
    "all_to_all_single": _Watched("all_to_all", tensor=1, compared=False),
    "barrier": _Watched("barrier", tensor=None),
    "monitored_barrier": _Watched("barrier", tensor=None),
}
_MESSAGES = {"send": 2, "recv": 2, "recv_anysource": None}  # number of the argument with the tag


class _Group:
    """What stands for a process group, or for a pair of sender and receiver, in the files.

    Args:
        key: Number of the group, the same on all ranks.
        ranks: Global ranks.
    """

    def __init__(self, key: int, ranks: Sequence[int]) -> None:
        self.key = key
        self.ranks = ranks
        self.members = 0  # as bits
        for rank in ranks:
            if rank >= 0:  # -1 stands for any rank
                self.members |= 1 << rank
        self.count = 0  # calls so far
        self.cell = -1  # where the count stands in the file; -1 is nowhere
        self.pairs: dict[tuple[Any, ...], _Group] = {}
        # What describes a call in the file, by all that it depends on: most are made many times.
        self.words: dict[tuple[Any, ...], tuple[int, int, memoryview]] = {}


class Recorder:
    """Writes the calls of this rank and compares them with those of the others.

    Args:
        folder: Folder of the pool.
        rank: This rank.
        n: Number of ranks.
    """

    def __init__(self, folder: str, rank: int, n: int) -> None:
        self.rank = rank
        self.record = Record(folder, n)
        self.others = [file for other, file in enumerate(self.record.files) if other != rank]
        self.file = record.words_of(folder, rank, mmap.ACCESS_WRITE)
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new process group begins."""
        self.file[:] = memoryview(bytes(record.FILE_BYTES)).cast("Q")
        self.calls = 0
        self.waiting: set[object] = set()  # one for each thread that waits
        self.worlds = 0
        self.groups: dict[str, _Group] = {}
        self.in_cells: list[_Group | None] = [None] * record.NUM_COUNTS
        self.cells_used = 0
        # the place of a call, by its Work
        self.started: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        """A call of the pool, or a cell, begins."""
        self.file[record.CALLS_BEFORE] = self.calls
        self.file[record.WAITS_IN] = 0

    def finish(self) -> None:
        """It ends: write down what it leaves."""
        leaves = record.IS_WHOLE
        calls = 0
        world = distributed_c10d.GroupMember.WORLD
        if world is None:
            leaves = record.IS_GONE
        else:
            calls = self.group(world).count
        if self.waiting:
            leaves = record.IS_IN_USE
        self.file[record.LEAVES] = leaves
        self.file[record.WORLD_CALLS] = calls

    # ---- write

    def group(self, group: Any) -> _Group:
        """What stands for a process group."""
        name = group.group_name
        known = self.groups.get(name)
        if known is None:
            ranks = tuple(dist.get_process_group_ranks(group))
            known = _Group(_key(self.worlds, name, ranks), ranks)
            self.groups[name] = known
        return known

    def new_world(self) -> None:
        """The process group of all ranks is made or destroyed: names of groups begin anew."""
        self.worlds += 1
        self.groups = {}

    def pair(self, group: _Group, sender: int, receiver: int, tag: int) -> _Group:
        """What stands for the messages from one rank to another."""
        known = group.pairs.get((sender, receiver, tag))
        if known is None:
            known = _Group(_key(group.key, sender, receiver, tag), (sender, receiver))
            group.pairs[sender, receiver, tag] = known
        return known

    def enter(
        self,
        group: _Group,
        name: int,
        tensor: torch.Tensor | None,
        compared: bool = True,
        root: int = -1,
        peer: int = -1,
    ) -> int:
        """Write down a call, and compare it with what other ranks have called in its place.

        Returns:
            The place.

        Raises:
            CollectiveMismatch: They do not belong together.
        """
        what = (name, root, peer, compared)
        if tensor is not None:
            what = (*what, tensor.dtype, tensor.shape)
        words = group.words.get(what)
        if words is None:
            words = _describe(group, name, tensor, compared, root, peer)
            if len(group.words) < MAX_WORDS:
                group.words[what] = words
        numel, agreed, rest = words
        group.count += 1
        key = group.key
        number = group.count
        place = (key + number) % record.NUM_PLACES
        at = record.PLACES_AT + place * record.PLACE_WORDS
        file = self.file
        file[at] = 0  # nobody reads it half written
        file[at + record.NUMBER] = number
        file[at + record.NUMEL] = numel
        file[at + record.AGREED] = agreed
        file[at + record.MEMBERS : at + record.STATE] = rest
        file[at + record.STATE] = record.IS_CALLED
        file[at] = key
        self._count(group)
        self.calls += 1
        file[record.NUM_CALLS] = self.calls
        file[record.LAST_PLACE] = place + 1
        file[record.WAITS_IN] = place + 1
        # Write first, then look: of two ranks that come at the same time at least one sees the
        # other.
        for other in self.others:
            if other[at] != key or other[at + record.NUMBER] != number:
                continue
            if other[at + record.AGREED] != agreed or other[at + record.NUMEL] != numel:
                self._wait_for_answer(group, place)
                break
        return place

    def _wait_for_answer(self, group: _Group, place: int) -> None:
        """Return when all calls that do not go with this one have been refused by torch.

        Raises:
            CollectiveMismatch: Torch has taken one of them, or does not answer, as when the other
                rank waits here for an answer about this call. This call is not made.
        """
        state = record.PLACES_AT + place * record.PLACE_WORDS + record.STATE
        end = time.monotonic() + ANSWER_S
        while unlike := self._unlike(place):
            states = [self.record.files[rank][state] for rank in unlike]
            if record.HAS_STARTED not in states and time.monotonic() < end:
                time.sleep(LOOK_S)
                continue
            time.sleep(CONFIRM_S)
            text = self.record.mismatch_at(place)
            if text:
                self.take_back(group, place)
                raise CollectiveMismatch(f"{text}: {_RULE}")

    def _unlike(self, place: int) -> list[int]:
        """The ranks that have called something else in a place."""
        at = record.PLACES_AT + place * record.PLACE_WORDS
        own = self.file[at : at + record.MEMBERS].tolist()
        unlike = []
        for rank, file in enumerate(self.record.files):
            other = file[at : at + record.MEMBERS].tolist()
            if other != own and other[: record.NUMEL] == own[: record.NUMEL]:
                unlike.append(rank)
        return unlike

    def _count(self, group: _Group) -> None:
        if group.cell < 0 or self.in_cells[group.cell] is not group:
            # The oldest count makes room. Of a rank whose count is not there nothing is assumed.
            group.cell = self.cells_used % record.NUM_COUNTS
            self.in_cells[group.cell] = group
            self.cells_used += 1
            self.file[record.COUNTS_AT + 2 * group.cell] = group.key
            self.file[record.COUNTS_USED] = self.cells_used
        self.file[record.COUNTS_AT + 2 * group.cell + 1] = group.count

    def take_back(self, group: _Group, place: int) -> None:
        """A call has not started: torch has refused it."""
        group.count -= 1
        self._count(group)
        self.file[record.PLACES_AT + place * record.PLACE_WORDS] = 0
        self.file[record.WAITS_IN] = 0

    def has_started(self, work: Any, place: int) -> None:
        """Torch has taken a call; whoever waits for `work` waits in it."""
        self.file[record.PLACES_AT + place * record.PLACE_WORDS + record.STATE] = record.HAS_STARTED
        self.file[record.WAITS_IN] = 0
        if work is not None:
            self.started[work] = place


def _describe(
    group: _Group, name: int, tensor: torch.Tensor | None, compared: bool, root: int, peer: int
) -> tuple[int, int, memoryview]:
    """A call in the words of a file: number of elements, what is agreed on, and the rest."""
    dtype = 0
    numel = 0
    dims: list[int] = []
    if tensor is not None:
        dtype = _DTYPES.get(tensor.dtype, record.OTHER_DTYPE)
        dims = list(tensor.shape[: record.MAX_DIMS])
        numel = tensor.numel() if compared else 0
    # Both ends of a message are one call. Their tensors are not compared: a message that an earlier
    # call of the pool left unreceived would set all later ones of the pair against each other.
    is_message = record.NAMES[name] in ("send", "recv")
    agreed = _NAMES["message"] if is_message else name | dtype << 8 | (root + 1) << 16
    if is_message:
        numel = 0
    own = name | len(dims) << 8 | (peer + 1) << 16 | dtype << 32
    padding = [0] * (record.MAX_DIMS - len(dims))
    rest = array.array("Q", [group.members, own, *dims, *padding])
    return numel, agreed, memoryview(rest)


def _key(*parts: Any) -> int:
    """Key of the group, the same number on all ranks; never 0."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1


# ---- in place of torch's methods

_recorders: list[Recorder] = []  # of this engine: one, or none in a fork of it


def start(folder: str, rank: int, n: int) -> None:
    """Record the calls of this engine from now on; before a new process group, forget the old."""
    if n > record.MAX_RANKS:
        return
    if _recorders:
        _recorders[0].reset()
        return
    _watch_methods()
    # A process that a rank forks has calls of its own, which would be taken for those of the rank.
    os.register_at_fork(after_in_child=_recorders.clear)
    _recorders.append(Recorder(folder, rank, n))


def begin() -> None:
    """A call of the pool, or a cell, begins."""
    for recorder in _recorders:
        recorder.begin()


def finish() -> None:
    """It ends: write down what state it leaves the process group in."""
    for recorder in _recorders:
        recorder.finish()


def _watch_methods() -> None:
    for method, watched in _METHODS.items():
        _replace(dist.ProcessGroup, method, functools.partial(_collective, watched))
    for method, tag in _MESSAGES.items():
        _replace(dist.ProcessGroup, method, functools.partial(_message, method[:4], tag))
    _replace(dist.Work, "wait", _wait)
    _replace(distributed_c10d, "_new_group_with_tag", _new_group)
    _replace(distributed_c10d, "_update_default_pg", _new_world)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name, None)
    if original is not None:  # torch of another version may not have it
        setattr(owner, name, functools.wraps(original)(make(original)))


def _collective(watched: _Watched, original: Any) -> Any:
    name = _NAMES[watched.name]

    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not _recorders:
            return original(group, *args, **kwargs)
        recorder = _recorders[0]
        known = recorder.group(group)
        tensor = None
        compared = watched.compared
        root = -1
        try:
            if watched.tensor is not None:
                tensor = _first(args[watched.tensor])
            if watched.root is not None:
                root = known.ranks[args[watched.root].rootRank]
            if watched.parts is not None:
                compared = _equal_sizes(args[watched.parts])
        except (LookupError, AttributeError, TypeError):
            # Called in another way than torch's own functions do: it is known by its name alone.
            compared = False
        place = recorder.enter(known, name, tensor, compared, root)
        try:
            work = original(group, *args, **kwargs)
        except Exception as error:
            _refused(recorder, known, place, error)
            raise
        recorder.has_started(work, place)
        return work

    return method


def _message(kind: str, tag: int | None, original: Any) -> Any:
    name = _NAMES[kind]

    def method(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not _recorders or kwargs:
            return original(group, tensors, *args, **kwargs)
        recorder = _recorders[0]
        known = recorder.group(group)
        peer = -1
        if tag is None:
            # The sender is not known: nothing is compared, and nobody is missing.
            pair = recorder.pair(known, -1, recorder.rank, 0)
        else:
            peer = known.ranks[args[0]]
            ends = (recorder.rank, peer) if kind == "send" else (peer, recorder.rank)
            pair = recorder.pair(known, *ends, args[tag - 1])
        place = recorder.enter(pair, name, _first(tensors), peer=peer)
        try:
            work = original(group, tensors, *args)
        except Exception as error:
            _refused(recorder, pair, place, error)
            raise
        recorder.has_started(work, place)
        return work

    return method


def _refused(recorder: Recorder, group: _Group, place: int, error: Exception) -> None:
    """A call has raised. One that waited in vain has started, and leaves a sign of where it was."""
    if "imed out" not in str(error):
        recorder.take_back(group, place)


def _wait(original: Any) -> Any:
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        if not _recorders:
            return original(work, *args, **kwargs)
        recorder = _recorders[0]
        place = recorder.started.pop(work, None)
        if place is None:
            return original(work, *args, **kwargs)
        recorder.file[record.WAITS_IN] = place + 1
        waiting = recorder.waiting  # of this process group: a reset makes a new one
        me = object()
        waiting.add(me)
        try:
            done = original(work, *args, **kwargs)  # if it fails, the sign of where it waited stays
        finally:
            waiting.discard(me)
        recorder.file[record.WAITS_IN] = 0
        return done

    return wait


def _new_group(original: Any) -> Any:
    name = _NAMES["new_group"]

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Each rank makes every group, also those that it is not in. Which ranks make one alone,
        # with use_local_synchronization, is no business of the others.
        if not _recorders or kwargs.get("use_local_synchronization"):
            return original(ranks, *args, **kwargs)
        recorder = _recorders[0]
        world = recorder.group(dist.group.WORLD)
        everyone = recorder.pair(world, -1, -1, -1)
        everyone.members = world.members
        recorder.enter(everyone, name, None)
        group = original(ranks, *args, **kwargs)  # if it fails, the sign stays
        recorder.file[record.WAITS_IN] = 0
        return group

    return new_group


def _new_world(original: Any) -> Any:
    def update_default_pg(group: Any) -> Any:
        for recorder in _recorders:
            recorder.new_world()
        return original(group)

    return update_default_pg


def _first(tensors: Any) -> torch.Tensor:
    # isinstance of a tensor takes 2 microseconds: torch.Tensor answers it in Python.
    return tensors[0] if type(tensors) in (list, tuple) else tensors


def _equal_sizes(lists: Any) -> bool:
    parts = lists[0]
    if type(parts) not in (list, tuple):
        parts = lists
    size = parts[0].numel()
    return all(part.numel() == size for part in parts)
