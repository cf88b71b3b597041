"""Compares each collective over the store before it begins, so that a wrong one cannot hang.

With its call each rank says how far it is (`Story`), so that a mismatch is told by what one rank
did otherwise, and not by who happens to wait.
"""

import functools
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from labcode.doctor.facts import Facts, FindingError
from labcode.runtime.units import plural, ranks_text

WATCHED = ("all_reduce", "broadcast", "reduce", "barrier", "all_gather", "all_gather_into_tensor")
WATCHED += ("reduce_scatter_tensor", "all_to_all_single", "gather", "scatter")
WATCHED += ("all_gather_object", "broadcast_object_list", "gather_object")
BACKWARD = "the backward pass of a step"
FORWARD = "the forward pass of a step"
EVALUATION = "a forward pass without gradients that sends buffers"
LEFT = "nothing more"  # the note of a rank that has left the block
KEPT = 2  # calls whose notes stay in the store: a slow rank still reads those of the last


SAME_CALLS = "let every rank make the same calls, in one order, with equal shapes"
TOGETHER = (
    "let the ranks decide together: all-reduce the flag (MAX), and all of them leave it out or none"
)
EVEN_ENDS = (
    "give every rank as many batches (DistributedSampler, or drop_last), or train inside "
    "model.join()"
)
UNWRAPPED = "evaluate with model.module(...), which sends nothing, or on all ranks alike"


@dataclass
class Story:
    """How far a rank is, as it says with each call.

    Args:
        skipped: Forward passes of training that no backward pass followed.
        last_skipped: What the last of them was, in words.
        passes: Begun through a loader.
        batches: Number of batches that the newest of them has given.
        ended: Whether that pass has come to its end.
        error: Error with which the rank has left the block.
    """

    skipped: int = 0
    last_skipped: str = ""
    passes: int = 0
    batches: int = 0
    ended: bool = False
    error: str = ""


@dataclass
class Note:
    """What a rank says: its call, and how far it is."""

    call: str
    story: Story = field(default_factory=Story)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: bytes) -> "Note":
        tree = json.loads(text)
        return cls(tree["call"], Story(**tree["story"]))


class CallCheck:
    """The calls of one rank, compared with those of the others in the group.

    A call costs one note in the store and a wait for the notes of the others. The ranks meet there
    in any case, only somewhat earlier.

    Args:
        store: Store of the job.
        prefix: Prefix of the keys of this block.
        facts: Facts that get what was found.
        group: The ranks of the block.
        limit_s: How long the others may be late.
        tell: Says how far this rank is.
        seen: Gets the name and the arguments of each collective that is over.

    Attributes:
        waited_s: Seconds in collectives of torch.distributed so far, waiting and all.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        facts: Facts,
        group: dist.ProcessGroup | None,
        limit_s: float,
        tell: Callable[[], Story] = Story,
        seen: Callable[..., None] | None = None,
    ) -> None:
        self.store = store
        self.tell = tell
        self.seen = seen
        self.prefix = prefix
        # a connection of its own: one that waits keeps the process group's from everybody else
        self.notes = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self.notes.set_timeout(timedelta(seconds=limit_s))
        self.facts = facts
        self.members = dist.get_process_group_ranks(group)
        self.ranks = list(range(len(self.members)))  # in the group
        self.limit_s = limit_s
        self.count = 0
        self.waited_s = 0.0

    def left_key(self, rank: int) -> str:
        """Where a rank that has left the block leaves its facts."""
        return f"{self.prefix}/{rank}"

    def meet(self, call: str) -> None:
        """Tell the others what comes now and wait for what they say.

        Raises:
            FindingError: A rank does not come, or with another call.
        """
        number = self.count
        self.count += 1
        self.notes.set(self._key(number, self.facts.rank), Note(call, self.tell()).text())
        keys = [self._key(number, rank) for rank in self.ranks]
        try:
            notes = [Note.of(text) for text in self.notes.multi_get(keys)]
        except RuntimeError:
            missing = [rank for rank, key in zip(self.ranks, keys) if not self.notes.check([key])]
            late = f"did not come to {call} within {self.limit_s:g} s"
            self._stop("skipped call", f"{ranks_text(missing)} {late}", missing, SAME_CALLS)
        if len({note.call for note in notes}) > 1:
            self._stop(*mismatch(notes))
        if number >= KEPT:
            self.notes.delete_key(self._key(number - KEPT, self.facts.rank))

    def leave(self) -> None:
        """This rank leaves the block: those that wait for it need not wait any longer."""
        self.notes.set(self._key(self.count, self.facts.rank), Note(LEFT, self.tell()).text())

    def _key(self, number: int, rank: int) -> str:
        return f"{self.prefix}/call/{number}/{rank}"

    def _stop(self, name: str, what: str, ranks: list[int], cure: str) -> NoReturn:
        self.facts.call = [name, what, cure]
        self.facts.differs = ranks
        raise FindingError(f"{name}: {what}")

    def wrapped(self, name: str) -> Callable[..., Any]:
        """A collective of torch.distributed that meets the others first.

        Groups that are not the whole of the block pass unseen: their ranks count other calls.
        """
        original = getattr(dist, name)

        @functools.wraps(original)
        def checked(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or _group_in(args)
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                return original(*args, **kwargs)
            began = time.perf_counter()
            try:
                if dist.get_process_group_ranks(group) == self.members:
                    self.meet(_described(name, args, kwargs))
                result = original(*args, **kwargs)
                if self.seen is not None:
                    self.seen(name, args, kwargs)
                return result
            finally:
                self.waited_s += time.perf_counter() - began

        return checked


def mismatch(notes: list[Note]) -> tuple[str, str, list[int], str]:
    """(Name of the finding, what, the ranks that differ, cure) of calls that are not the same.

    Args:
        notes: Notes of all ranks, in rank order.
    """
    now = _by_call([note.call for note in notes])
    calls = [note.call for note in notes]
    is_skipped = not {LEFT, BACKWARD, FORWARD, EVALUATION}.isdisjoint(calls)
    name = "skipped call" if is_skipped else "calls do not match"

    failed = [rank for rank, note in enumerate(notes) if note.story.error]
    if failed and len(failed) < len(notes):
        first = notes[failed[0]].story.error
        return name, f"{ranks_text(failed)} ended with {first}; {now}", failed, "mend that error"

    least = min(note.story.skipped for note in notes)
    more = [rank for rank, note in enumerate(notes) if note.story.skipped > least]
    if more:
        what = (
            f"{ranks_text(more)} made {notes[more[0]].story.last_skipped} without a backward pass"
        )
        return name, f"{what}, unlike {ranks_text(_others(more, notes))}; {now}", more, TOGETHER

    alone = [rank for rank, call in enumerate(calls) if call == EVALUATION]
    if alone and len(alone) < len(notes):
        return name, now, alone, UNWRAPPED

    ended, longer = _unequal_ends(notes)
    if ended:
        read = [note.story.batches for note in notes]
        what = f"the loader of {ranks_text(ended)} ended after {plural(read[ended[0]], 'batch')}"
        what = f"{what}, {ranks_text(longer)} read {plural(read[longer[0]], 'batch')}; {now}"
        return "skipped call", what, ended, EVEN_ENDS

    gone = [rank for rank, call in enumerate(calls) if call == LEFT]
    differs = _minority(calls)
    if gone and (not differs or differs == gone):
        call = next(call for call in calls if call != LEFT)
        return name, f"{ranks_text(gone)} left the loop before {call}", gone, SAME_CALLS
    return name, now, differs, SAME_CALLS


def _unequal_ends(notes: list[Note]) -> tuple[list[int], list[int]]:
    """(Ranks whose loader has come to its end, ranks whose loader gave more in the same pass)."""
    ended = [rank for rank, note in enumerate(notes) if note.story.ended]
    if not ended:
        return [], []
    first = notes[ended[0]].story
    longer = []
    for rank in _others(ended, notes):
        story = notes[rank].story
        if story.passes == first.passes and story.batches > first.batches:
            longer.append(rank)
    return (ended, longer) if longer else ([], [])


def _by_call(calls: list[str]) -> str:
    """ "rank 0 is at the backward pass of a step, rank 1 calls barrier"."""
    ranks_at: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks_at.setdefault(call, []).append(rank)
    said = []
    for call, ranks in ranks_at.items():
        is_one = len(ranks) == 1
        if call == LEFT:
            does = "left the loop"
        elif call in (BACKWARD, FORWARD, EVALUATION):
            does = f"is at {call}" if is_one else f"are at {call}"
        else:
            does = f"calls {call}" if is_one else f"call {call}"
        said.append(f"{ranks_text(ranks)} {does}")
    return ", ".join(said)


def _minority(calls: list[str]) -> list[int]:
    """The ranks that do not call what most do; none if there is no such majority."""
    (usual, number), *_ = Counter(calls).most_common(1)
    if 2 * number <= len(calls):
        return []
    return [rank for rank, call in enumerate(calls) if call != usual]


def _others(ranks: list[int], notes: list[Note]) -> list[int]:
    return [rank for rank in range(len(notes)) if rank not in ranks]


def _group_in(args: tuple[Any, ...]) -> Any:
    for value in args:
        if isinstance(value, dist.ProcessGroup) or value is dist.GroupMember.NON_GROUP_MEMBER:
            return value
    return None


def _described(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The call with the sizes and types that must be the same on all ranks.

    What each rank sends to each other one may differ; what each of them gathers may not.
    """
    values = [*args, *kwargs.values()]
    lists = [value for value in values if isinstance(value, list)]
    if name == "all_to_all_single" and lists:
        return name
    if name == "all_gather" and lists:
        values = lists[0]
    return f"{name} {_shapes(values)}".strip()


def _shapes(values: list[Any]) -> str:
    """Sizes and types of the tensors of a call, those of several like ones once."""
    seen = []
    for value in values:
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            seen.append(f"{json.dumps(list(value.shape))} {dtype}")
    if len(seen) > 1 and len(set(seen)) == 1:
        return f"{len(seen)} x {seen[0]}"
    return ", ".join(seen)
