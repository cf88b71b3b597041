"""Agree on success or failure, so that an error on one rank becomes one message everywhere.

A rank that raises alone leaves the others waiting in the next collective until it times out, and
the log then shows the wrong error first. Here the ranks tell each other whether they
succeeded before any of them continues.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")

_WORD = "last word"  # the key of the store under which a rank says why it leaves
PATIENCE_S = 5.0  # if the others come later than this, a rank that failed prints its error itself


class SharedError(Exception):
    """An error that every rank raises, with the same text: one rank may report it for all.

    Classes of errors that are computed from what all ranks know, or that they have agreed on,
    derive from it.
    """


class PeerError(SharedError, RuntimeError):
    """Another rank failed; the message is that rank's."""


def on_every_rank(work: Callable[[], T]) -> T:
    """Run `work` on each rank and return its result, once all ranks have succeeded.

    `work` must not communicate: a rank that fails in it would come here, while the others wait for
    it there.

    Communicates: one all-gather of a short text.

    Raises:
        Exception: What `work` raised on this rank; `is_shared` says that the others know.
        PeerError: `work` failed on other ranks only; the text of the first of them.
    Held by: tests/ranks/test_together.py::test_an_error_on_one_rank_reaches_all_as_one_message
    """
    result = None
    error = None
    try:
        result = work()
    except Exception as caught:  # not BaseException: Ctrl-C ends this rank without a vote
        error = caught
    texts = _texts_of_all(error)
    if error is not None:
        # A mark on the error itself keeps its class, which callers tell apart, and its traceback.
        error.__dict__["shared"] = True
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
        PeerError: Rank 0 has failed; raised on the other ranks.
    """
    result = None
    # Both branches are the same collective. After it all ranks know that rank 0 has a result, or
    # all have raised, so that none waits in the broadcast for a result that never comes.
    if dist.get_rank() == 0:
        result = on_every_rank(work)
    else:
        wait_for_all()
    box = [result]
    dist.broadcast_object_list(box, src=0)
    return cast(T, box[0])


def wait_for_all() -> None:
    """Return once every rank has come here, or to `on_every_rank` without an error.

    Communicates: one all-gather of a short text.

    Raises:
        PeerError: Another rank failed.
    """
    on_every_rank(_nothing)


def is_shared(error: BaseException) -> bool:
    """Whether every rank knows of an error, so that one may report it for all."""
    return isinstance(error, SharedError) or getattr(error, "shared", False)


def leave_word(word: str) -> None:
    """Say why this rank leaves, for those that will find its connections closed.

    Only while the store is there: torch prints lines of its own about one that is not.
    """
    with contextlib.suppress(RuntimeError, ValueError):  # no group, or its store has gone
        dist.distributed_c10d._get_default_store().set(_WORD, word)


def word_left() -> str:
    """What a rank that is gone has said at last; "" if nothing."""
    with contextlib.suppress(RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        if store.check([_WORD]):
            return store.get(_WORD).decode()
    return ""


def _texts_of_all(error: Exception | None) -> list[str | None]:
    """What went wrong on each rank; None where nothing did.

    Raises:
        Exception: `error`, if the others cannot be told.
    """
    texts: list[str | None] = [None] * dist.get_world_size()
    if error is None:
        dist.all_gather_object(texts, None)
        return texts
    own_text = f"{type(error).__name__}: {error}".removesuffix(": ")
    try:
        with _said_if_others_are_late(own_text):
            dist.all_gather_object(texts, own_text)
    except RuntimeError:
        # The others are gone. The reason why this rank failed matters more than that.
        raise error from None
    return texts


@contextlib.contextmanager
def _said_if_others_are_late(text: str) -> Iterator[None]:
    """While this rank waits to tell the others of an error, its log shall say it."""
    line = f"rank {dist.get_rank()} has failed, and waits to tell the other ranks: {text}"
    timer = threading.Timer(PATIENCE_S, print, [line], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _nothing() -> None:
    """The work of ranks that only wait."""
