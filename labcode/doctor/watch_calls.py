"""Compares each collective over the store before it begins, so that a wrong one cannot hang."""

import functools
import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from labcode.doctor.facts import Facts, FindingError

WATCHED = ("all_reduce", "broadcast", "reduce", "barrier", "all_gather", "all_gather_into_tensor")
WATCHED += ("reduce_scatter_tensor", "all_to_all_single", "gather", "scatter")
WATCHED += ("all_gather_object", "broadcast_object_list", "gather_object")
FORWARD = "the forward pass of a step"
LEFT = "nothing more"  # the note of a rank that has left the block
KEPT = 2  # calls whose notes stay in the store: a slow rank still reads those of the last


class CallCheck:
    """The calls of one rank, compared with those of the others in the group.

    A call costs one note in the store and a wait for the notes of the others. The ranks meet there
    in any case, only somewhat earlier.

    Args:
        store: Of the job.
        prefix: Of the keys of this block.
        facts: Gets what was found.
        group: The ranks of the block.
        limit_s: How long the others may be late.

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
    ) -> None:
        self.store = store
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
        self.notes.set(self._key(number, self.facts.rank), call)
        keys = [self._key(number, rank) for rank in self.ranks]
        try:
            calls = [note.decode() for note in self.notes.multi_get(keys)]
        except RuntimeError:
            missing = [rank for rank, key in zip(self.ranks, keys) if not self.notes.check([key])]
            late = f"did not come to {call} within {self.limit_s:g} s"
            self._stop("skipped call", f"{_names(missing)} {late}")
        gone = [rank for rank, other in zip(self.ranks, calls) if other == LEFT]
        if gone:
            self._stop("skipped call", f"{_names(gone)} left the loop before {call}")
        if len(set(calls)) > 1:
            pairs = zip(self.ranks, calls)
            said = ", ".join(f"rank {rank} calls {other}" for rank, other in pairs)
            # a rank that is at its next step already has left out what the others call
            is_ahead = FORWARD in calls
            self._stop("skipped call" if is_ahead else "calls do not match", said)
        if number >= KEPT:
            self.notes.delete_key(self._key(number - KEPT, self.facts.rank))

    def leave(self) -> None:
        """This rank leaves the block: whoever is waiting for it need not wait any longer."""
        self.notes.set(self._key(self.count, self.facts.rank), LEFT)

    def _key(self, number: int, rank: int) -> str:
        return f"{self.prefix}/call/{number}/{rank}"

    def _stop(self, name: str, what: str) -> NoReturn:
        self.facts.call = [name, what]
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
                return original(*args, **kwargs)
            finally:
                self.waited_s += time.perf_counter() - began

        return checked


def _names(ranks: list[int]) -> str:
    return "rank " + ", ".join(str(rank) for rank in ranks)


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
