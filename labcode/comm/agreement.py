"""Do something on one rank or on all of them, so that an error anywhere becomes one message everywhere.

A rank that raises alone leaves the others waiting in the next collective until it times out, and whoever reads the log
finds the wrong error first. Here the ranks tell each other how it went before any of them goes on.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class PeerError(RuntimeError):
    """Another rank failed; the message is that rank's."""


def on_every_rank(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `work` on each rank and return its result, once all ranks have succeeded.

    Communicates: one all-gather of a short text.
    Raises:
        The rank's own exception where `work` failed; PeerError with the text of the first failing rank elsewhere.
    Held by: tests/ranks/test_together.py::test_an_error_on_one_rank_reaches_all_as_one_message
    """
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    texts = [None] * dist.get_world_size(group)
    dist.all_gather_object(
        texts, None if error is None else f"{type(error).__name__}: {error}", group=group
    )
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise PeerError(f"rank {rank}: {text}")
    return result


def on_first_rank(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `work` on the group's first rank alone and return its result on all.

    Communicates: one broadcast of the pickled result.
    Raises:
        The exception of `work` on the first rank, PeerError elsewhere.
    """
    first = dist.get_rank(group) == 0
    result = on_every_rank(work if first else lambda: None, group)
    box = [result]
    dist.broadcast_object_list(
        box, src=dist.get_global_rank(group or dist.group.WORLD, 0), group=group
    )
    return box[0]
