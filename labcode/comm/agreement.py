"""Agree on success or failure, so that an error on one rank becomes one message everywhere.

A rank that raises alone leaves the others waiting in the next collective until it times out, and
whoever reads the log finds the wrong error first. Here the ranks tell each other whether they
succeeded before any of them continues.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


class SharedError(Exception):
    """An error that every rank raises, with the same text: one rank may report it for all.

    Classes of errors that are computed from what all ranks know, or that they have agreed on,
    derive from it.
    """


class PeerError(SharedError, RuntimeError):
    """Another rank failed; the message is that rank's."""


def on_every_rank(work: Callable[[], T]) -> T:
    """Run `work` on each rank and return its result, once all ranks have succeeded.

    Communicates: one all-gather of a short text.

    Raises:
        Exception: What `work` raised on this rank.
        PeerError: `work` failed on other ranks only; the text of the first of them.
    Held by: tests/ranks/test_together.py::test_an_error_on_one_rank_reaches_all_as_one_message
    """
    result = None
    error = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    own_text = None if error is None else f"{type(error).__name__}: {error}"
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, own_text)
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise PeerError(f"rank {rank}: {text}")
    return cast(T, result)


def on_first_rank(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 alone and return its result on all ranks.

    Communicates: an all-gather of a short text and one broadcast of the pickled result.

    Raises:
        Exception: What `work` raised, on rank 0.
        PeerError: The same on the other ranks.
    """
    result = None
    if dist.get_rank() == 0:
        result = on_every_rank(work)
    else:
        on_every_rank(_nothing)
    box = [result]
    dist.broadcast_object_list(box, src=0)
    return cast(T, box[0])


def _nothing() -> None:
    """What the ranks do that only wait for the first one."""
