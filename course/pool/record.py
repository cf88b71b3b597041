"""What each rank of a pool has called last, in files that outlive the engines; and what went wrong.

Every engine writes one file in the folder of its pool (`recorder`); the other engines and the
notebook read it. It is to the pool what the flight recorder of NCCL is to a job: it answers "who is
missing?" and "who called something else?" when ranks wait for a call that never comes, or when
gloo has ended a process.

    file of a rank
        header    how many calls, when the current call of the pool began, what it waits in
        counts    (key, count) of each process group, or of each pair of sender and receiver
        calls     the latest calls, each in the place that follows from its key and number

The same call of the same group has the same place in the files of all its ranks, so that one look
compares it.
"""

import mmap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from labcode.runtime.units import ranks_text

MAX_RANKS = 64  # the members of a group are bits of one word
MAX_DIMS = 6  # longer shapes are cut
NUM_PLACES = 512
NUM_COUNTS = 256

# A file is a row of words of 64 bits: nothing is written and read faster from Python.
WORD_BYTES = 8
NUM_CALLS = 0  # calls since the process group was made
CALLS_BEFORE = 1  # those before the current call of the pool
LAST_PLACE = 2  # of the latest call, plus 1
WAITS_IN = 3  # place of the call that it waits in, plus 1; 0 is none
COUNTS_USED = 4
LEAVES = 5  # one of the three below: what the last call of the pool left
WORLD_CALLS = 6  # calls of the group of all ranks by its end
COUNTS_AT = 8  # pairs of key and count
PLACES_AT = COUNTS_AT + 2 * NUM_COUNTS
# In a place: first what all ranks of a call must agree on.
KEY = 0
NUMBER = 1
NUMEL = 2
AGREED = 3  # name, dtype << 8, (root + 1) << 16
MEMBERS = 4  # as bits
OWN = 5  # name, number of dims << 8, (other rank of a message + 1) << 16, dtype << 32
DIMS = 6
STATE = DIMS + MAX_DIMS  # one of the two below
PLACE_WORDS = STATE + 1
FILE_BYTES = WORD_BYTES * (PLACES_AT + NUM_PLACES * PLACE_WORDS)

IS_WHOLE = 0
IS_GONE = 1
IS_IN_USE = 2

IS_CALLED = 0  # torch may have it already, and may still refuse it
HAS_STARTED = 1

# Numbers of names and dtypes are positions in these lists; 0 is "not compared".
NAMES = ["", "message", "send", "recv", "all_reduce", "broadcast", "reduce", "all_gather"]
NAMES += ["gather", "scatter", "reduce_scatter", "all_to_all", "barrier", "new_group"]
WITHOUT_TENSOR = ("barrier", "new_group")
DTYPES = ["", "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8"]
DTYPES += ["uint8", "bool", "complex64", "complex128"]
OTHER_DTYPE = 255


class LastCollective(NamedTuple):
    """One call of `torch.distributed`, as a rank made it; `str()` puts it as one would say it.

    Args:
        name: all_reduce, broadcast, send, recv, barrier, new_group ...
        dtype: Dtype of the tensor that this rank passed: "float32"; "" for a barrier.
        shape: Shape of that tensor.
        peer: Global rank of the root, or of the other end of a message; None where there is none.
        group: Global ranks that take part.
        number: The how-maniest call of this group it is, from 1; of messages, between these two.
        waits: Whether the rank waits in it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    peer: int | None
    group: tuple[int, ...]
    number: int
    waits: bool

    def __str__(self) -> str:
        return f"{self.name}{self.details()}"

    def details(self) -> str:
        """All but the name: " of float32 [3] from rank 0"."""
        if self.name in WITHOUT_TENSOR:
            return ""
        text = f" of {self.dtype} {list(self.shape)}"
        if self.peer is not None:
            to = "to" if self.name in ("send", "reduce", "gather") else "from"
            text += f" {to} rank {self.peer}"
        elif self.name == "recv":
            text += " from any rank"
        return text


class _Call(NamedTuple):
    key: int
    number: int
    seen: LastCollective


class Record:
    """The files of all ranks of a pool, to read.

    Args:
        folder: Folder of the pool.
        n: Number of ranks; beyond `MAX_RANKS` nothing is recorded.
    """

    def __init__(self, folder: str | Path, n: int) -> None:
        self.n = n if n <= MAX_RANKS else 0
        self.files = [words_of(folder, rank) for rank in range(self.n)]

    def last(self, rank: int) -> LastCollective | None:
        """What a rank has called last since the current call of the pool began; None is nothing."""
        call = self._last(rank)
        return None if call is None else call.seen

    def progress(self) -> list[tuple[int, int]]:
        """A value that changes whenever a rank gets on with its communication."""
        states = []
        for file in self.files:
            states.append((file[NUM_CALLS], file[WAITS_IN]))
        return states

    def left(self) -> str | None:
        """What the last call has left that the next one would trip over; None is nothing."""
        for rank, file in enumerate(self.files):
            if file[LEAVES] == IS_GONE:
                return f"rank {rank} has destroyed its process group"
            if file[LEAVES] == IS_IN_USE:
                waiting = self._waiting(rank)
                where = f"in {waiting.seen}" if waiting else "in a call"
                return f"rank {rank} has left a thread {where}"
        by_calls: dict[int, list[int]] = {}
        for rank, file in enumerate(self.files):
            by_calls.setdefault(file[WORLD_CALLS], []).append(rank)
        if len(by_calls) < 2:
            return None
        words = []
        for calls, ranks in sorted(by_calls.items(), reverse=True):
            words.append(f"{ranks_text(ranks)} {calls}")
        return f"not all ranks have made the same number of collectives: {', '.join(words)}"

    def mismatch(self) -> str | None:
        """Two ranks that called different things in one place of a group; None if none did."""
        for rank in range(self.n):
            call = self._last(rank)
            if call is not None:
                text = self.mismatch_at(_place(call.key, call.number))
                if text:
                    return text
        return None

    def mismatch_at(self, place: int) -> str | None:
        """Like `mismatch`, for one place in the files."""
        at = PLACES_AT + place * PLACE_WORDS
        parties: dict[tuple[int, ...], list[int]] = {}
        for rank, file in enumerate(self.files):
            parties.setdefault(tuple(file[at : at + MEMBERS]), []).append(rank)
        by_call: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for agreed in parties:
            if agreed[KEY]:
                by_call.setdefault(agreed[: NUMBER + 1], []).append(agreed)
        for different in by_call.values():
            if len(different) > 1:
                return self._compared(place, [parties[agreed] for agreed in different])
        return None

    def _compared(self, place: int, parties: Sequence[list[int]]) -> str | None:
        """ "rank 0 called all_reduce of float32 [3], rank 1 of float32 [4]"; None: one has gone."""
        words = []
        name = None
        for members in parties:
            call = self._at(members[0], place)
            if call is None:
                return None
            said = str(call.seen) if call.seen.name != name else call.seen.details().strip()
            verb = "called " if call.seen.name != name else ""
            name = call.seen.name
            words.append(f"{ranks_text(members)} {verb}{said}")
        return ", ".join(words)

    def deadlock(self, answered: Collection[int]) -> bool:
        """Whether some rank waits for one that will never come.

        A rank that waits in a call is stuck if one of those that it waits for has answered the pool
        already, or is stuck itself.

        Args:
            answered: Ranks that do nothing any more.
        """
        waits_for: dict[int, set[int]] = {}
        for rank in range(self.n):
            call = self._waiting(rank)
            if rank not in answered and call is not None:
                waits_for[rank] = self._missing(call)
        while True:
            stuck = {*answered, *waits_for}
            free = [rank for rank, missing in waits_for.items() if not missing & stuck]
            if not free:
                return bool(waits_for)
            for rank in free:
                del waits_for[rank]

    def at_work(self, answered: Collection[int]) -> list[int]:
        """The ranks that neither wait in a call nor have answered the pool."""
        working = []
        for rank in range(self.n):
            if rank not in answered and self._waiting(rank) is None:
                working.append(rank)
        return working

    def waiting(self) -> list[LastCollective]:
        """The calls in which ranks wait, in rank order."""
        calls = []
        for rank in range(self.n):
            call = self._waiting(rank)
            if call is not None:
                calls.append(call.seen)
        return calls

    def explain(self, answered: Collection[int]) -> str:
        """What each rank does: "rank 0 waits in barrier, ranks 1 and 2 have finished"."""
        doing: dict[str, list[int]] = {}
        for rank in range(self.n):
            doing.setdefault(self._doing(rank, rank in answered), []).append(rank)
        words = []
        for text, ranks in doing.items():
            words.append(f"{ranks_text(ranks)} {text.format(s='s' if len(ranks) == 1 else '')}")
        return ", ".join(words).replace("haves", "has")

    def _doing(self, rank: int, has_answered: bool) -> str:
        """ "wait{s} in barrier"; the verb ends as the number of ranks asks."""
        call = self._last(rank)
        if has_answered:
            return "have{s} finished" + ("" if call else " without a call")
        waiting = self._waiting(rank)
        if waiting is not None:
            return f"wait{{s}} in {waiting.seen}{self._of_group(waiting.seen)}"
        return "called none" if call is None else f"called {call.seen} last"

    def _of_group(self, seen: LastCollective) -> str:
        if seen.name in ("send", "recv") or len(seen.group) in (0, self.n):
            return ""
        return f" with {ranks_text(seen.group)}"

    def _last(self, rank: int) -> _Call | None:
        if rank >= self.n:
            return None
        file = self.files[rank]
        if file[NUM_CALLS] == file[CALLS_BEFORE] or file[LAST_PLACE] == 0:
            return None
        return self._at(rank, file[LAST_PLACE] - 1)

    def _waiting(self, rank: int) -> _Call | None:
        place = self.files[rank][WAITS_IN]
        return None if place == 0 else self._at(rank, place - 1)

    def _at(self, rank: int, place: int) -> _Call | None:
        file = self.files[rank]
        at = PLACES_AT + place * PLACE_WORDS
        key, number, _, agreed, members, own, *dims = file[at : at + STATE]
        if key == 0:
            return None
        name = own & 0xFF
        num_dims = own >> 8 & 0xFF
        dtype = own >> 32
        other = (
            max(agreed >> 16, own >> 16 & 0xFFFF) - 1
        )  # the root, or the other end; only one is there
        seen = LastCollective(
            name=NAMES[name],
            dtype="other" if dtype == OTHER_DTYPE else DTYPES[dtype],
            shape=tuple(dims[:num_dims]),
            peer=None if other < 0 else other,
            group=ranks_of(members),
            number=number,
            waits=file[WAITS_IN] == place + 1,
        )
        return _Call(key, number, seen)

    def _missing(self, call: _Call) -> set[int]:
        """The ranks that have not come to a call; one about which nothing is known has come."""
        missing = set()
        for rank in call.seen.group:
            if self._count(rank, call.key) < call.number:
                missing.add(rank)
        return missing

    def _count(self, rank: int, key: int) -> float:
        file = self.files[rank]
        used = file[COUNTS_USED]
        for index in range(min(used, NUM_COUNTS)):
            if file[COUNTS_AT + 2 * index] == key:
                return file[COUNTS_AT + 2 * index + 1]
        return 0 if used <= NUM_COUNTS else float("inf")


def path_of(folder: str | Path, rank: int) -> Path:
    """The file of one rank."""
    return Path(folder, f"collectives-{rank}.bin")


def create(folder: str | Path, n: int) -> None:
    """Empty files for all ranks, before the engines start."""
    for rank in range(min(n, MAX_RANKS)):
        path_of(folder, rank).write_bytes(bytes(FILE_BYTES))


def words_of(folder: str | Path, rank: int, access: int = mmap.ACCESS_READ) -> memoryview:
    """The file of one rank in memory, shared by all that look at it."""
    with open(path_of(folder, rank), "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), FILE_BYTES, access=access)).cast("Q")


def _place(key: int, number: int) -> int:
    return (key + number) % NUM_PLACES


def ranks_of(members: int) -> tuple[int, ...]:
    """The global ranks whose bits are set."""
    return tuple(rank for rank in range(MAX_RANKS) if members >> rank & 1)
