"""A process group of any size in one process, which writes messages down and sends none.

    played = play(5, number=2, act=lambda group: answer(x, root, group))
    played        # [(0, 2), (2, 4)]: sender and receiver of each message, in the order of number 2

A pool has four ranks. Whether a function keeps to its plan in a group of eight can be seen by
playing each of its eight parts, one after the other.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

OTHERS = 20  # what the other members' ranks in the world are said to be, from this number on
MAX_MESSAGES = 100

Message = tuple[int, int]


class _Done:
    """The request of a message that is no message."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _NoBackend:
    supports_coalescing = False


class PretendedGroup(dist.ProcessGroup):
    """What `torch.distributed` takes for a group of `size` ranks, in which this is one.

    Args:
        number: Of this rank in the group.
        size: Of the group.
        sent: What `recv` gives: the value of every number that it receives.

    Attributes:
        messages: (sender, receiver) as numbers in the group, in order.
    """

    def __init__(self, number: int, size: int, sent: float) -> None:
        super().__init__(number, size)  # pyright: ignore  (its stub knows one way of two)
        self.messages: list[Message] = []
        self._number = number
        self._sent = sent

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        return self._note((self._number, to))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        with torch.no_grad():
            tensors[0].fill_(self._sent)
        return self._note((source, self._number))

    def _get_backend(self, device: torch.device) -> Any:
        return _NoBackend()

    def _note(self, message: Message) -> _Done:
        self.messages.append(message)
        assert len(self.messages) <= MAX_MESSAGES, (
            f"it has made more than {MAX_MESSAGES} messages and goes on: does your loop end?"
        )
        return _Done()


def play(
    size: int, number: int, act: Callable[[dist.ProcessGroup], Any], sent: float = 0.0
) -> list[Message]:
    """The messages that `act(group)` makes as one number of a group, without sending any.

    Args:
        size: Of the group.
        number: Which part to play.
        act: Called with the group; of its calls only messages between two ranks are played.
        sent: The value of all numbers that it receives.

    Raises:
        AssertionError: It calls for a message in another group.
    """
    group = PretendedGroup(number, size, sent)
    here = dist.get_rank()
    numbers = {}
    for other in range(size):
        numbers[here if other == number else OTHERS + other] = other
    world: Any = distributed_c10d._world
    world.pg_group_ranks[group] = numbers
    world.pg_map[group] = ("gloo", None)
    world.pg_names[group] = f"pretended, of {size}"
    try:
        with _no_messages():
            act(group)
    finally:
        for known in (world.pg_group_ranks, world.pg_map, world.pg_names):
            del known[group]
    return group.messages


@contextlib.contextmanager
def _no_messages() -> Iterator[None]:
    """Within this block a message of a real group fails: it would wait for other ranks."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a message was called for in another group than the one it was given")

    originals = {}
    for name in ("send", "recv", "recv_anysource"):
        originals[name] = getattr(dist.ProcessGroup, name)
        setattr(dist.ProcessGroup, name, refuse)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)
