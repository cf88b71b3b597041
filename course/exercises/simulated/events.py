"""What a simulated run leaves behind: calls, results, errors, and where ranks are stuck."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from labcode.runtime.units import ranks_text


class Mismatch(RuntimeError):
    """Two ranks do not mean the same call; the text says who called what."""


class Stuck(RuntimeError):
    """No rank can go on; the text says where each of them waits."""


class Endless(RuntimeError):
    """A loop does not end."""


@dataclass
class Event:
    """One call of torch.distributed, or what a check has noted with `here().note()`.

    Args:
        kind: "all_reduce", "send" and so on; of a note, its name.
        rank: Who called, as rank of the world.
        at: How many things had happened before, on all ranks.
        block: Inside which `here().block("backward")` of the check it happened.
        where: The learner's function and line.
        group: The ranks of the group, as ranks of the world.
        group_name: torch's name for it; two groups may have the same ranks.
        peer: The other rank of a message.
        root: The root of a broadcast, reduce, scatter or gather, as rank of the world.
        op: "SUM" and so on, of a collective that adds.
        shape: Shape of this rank's tensor.
        dtype: Dtype of this rank's tensor, "float32".
        num_bytes: Bytes of the whole tensor, as in `labcode.comm.counting`.
        asynchronous: Whether the caller was given a request.
        waits: For each wait for the request, its time and its block.
        arrived: Whether somebody waited, and that came to an end.
        touched: Whether the tensor was written to between the start and then.
        overlaps: Whether it started with memory that another call of this rank was using, where one
            of the two writes to it.
        in_thread: Whether it was called outside of the rank's own thread; then nothing was sent.
        requires_grad: Whether the tensor does; who keeps the call's handle keeps its graph.
        value: Value of a note.
    """

    kind: str
    rank: int
    at: int
    block: str = ""
    where: str = ""
    group: tuple[int, ...] = ()
    group_name: str = ""
    peer: int | None = None
    root: int | None = None
    op: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    num_bytes: int = 0
    asynchronous: bool = False
    waits: list[tuple[int, str]] = field(default_factory=list)
    arrived: bool = False
    touched: bool = False
    overlaps: bool = False
    in_thread: bool = False
    requires_grad: bool = False
    value: Any = None

    @property
    def numel(self) -> int:
        """Elements of this rank's tensor."""
        return torch.Size(self.shape).numel()

    @property
    def caller(self) -> str:
        """The learner's line, for the end of a hint; in backward it may be autograd that calls."""
        by = self.where or ("autograd, in backward" if self.block == "backward" else "")
        return f" ({by})" if by else ""

    def __str__(self) -> str:
        details = "" if self.kind == "barrier" else f" of {self.dtype} {list(self.shape)}"
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        if self.kind == "send":
            details += f" to {peer}"
        if self.kind == "recv":
            details += f" from {peer}"
        if self.root is not None:
            details += f" with root {self.root}"
        if self.op not in ("", "SUM"):
            details += f" with {self.op}"
        return self.kind + details


@dataclass
class DeadEnd:
    """Where a rank waits for what cannot come.

    Args:
        event: In which call; None for a Future that nothing completes.
        missing: For whose calls; None stands for a message from any rank.
    """

    event: Event | None
    missing: tuple[int | None, ...] = ()

    def told(self, finished: set[int]) -> str:
        """The call; and for whom it waits, unless these have finished."""
        if self.event is None:
            return "a Future that nothing completes"
        others = ""
        if self.event.kind not in ("send", "recv") and not finished.issuperset(self.missing):
            others = f" for {_named(self.missing)}"
        return f"{self.event}{others}{self.event.caller}"


@dataclass
class Outcome:
    """What became of a run.

    Args:
        results: What each rank returned; None where it did not come to its end.
        errors: {rank: its error}.
        stuck: {rank: where it waits}, if nobody could go on.
        events: Events of all ranks, in the order in which they happened.
        made: The groups that each rank has made with the others, in order, of the kind "new_group".
            One that all ranks make has a number as its name; others are made by their members.
    """

    results: list[Any]
    errors: dict[int, BaseException]
    stuck: dict[int, DeadEnd]
    events: list[Event]
    made: list[list[Event]]

    def of(self, rank: int, *kinds: str) -> list[Event]:
        """What one rank did; without kinds, everything."""
        return [one for one in self.events if one.rank == rank and (one.kind in kinds or not kinds)]

    def parts(self, rank: int, note: str) -> list[list[Event]]:
        """What one rank did after each `here().note(note)`, up to the next one."""
        found: list[list[Event]] = []
        for one in self.of(rank):
            if one.kind == note:
                found.append([])
            elif found:
                found[-1].append(one)
        return found

    def finished(self) -> set[int]:
        """The ranks that came to their end."""
        return set(range(len(self.results))) - set(self.stuck) - set(self.errors)

    def why(self) -> str:
        """Where the ranks wait that cannot go on, and which have finished."""
        finished = self.finished()
        waiting: dict[str, list[int]] = {}  # ranks by where they wait
        for rank, place in sorted(self.stuck.items()):
            waiting.setdefault(place.told(finished), []).append(rank)
        said = []
        for place, ranks in waiting.items():
            said.append(f"{_named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {place}")
        if finished:
            verb = "has" if len(finished) == 1 else "have"
            said.append(f"{_named(sorted(finished))} {verb} finished")
        return ", ".join(said)

    def raise_first(self) -> None:
        """Raise the error of the lowest rank that has one; else say where the ranks are stuck."""
        if self.errors:
            raise self.errors[min(self.errors)]
        if self.stuck:
            raise Stuck(self.why())


def _named(ranks: Sequence[int | None]) -> str:
    """ "rank 2", "ranks 1-3", "any rank"."""
    known = [rank for rank in ranks if rank is not None]
    return ranks_text(known) if len(known) == len(ranks) else "any rank"
