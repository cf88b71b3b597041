"""Agree on success or failure, so that an error on one rank becomes one message everywhere.

A rank that raises alone leaves the others waiting in the next collective until it times out, and
the log then shows the wrong error first. Here the ranks tell each other whether they
succeeded before any of them continues.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar, TypeVarTuple, cast

import torch.distributed as dist

T = TypeVar("T")
Given = TypeVarTuple("Given")

_WORD = "last word"  # the key of the store under which a rank says why it leaves
PATIENCE_S = 5.0  # if the others come later than this, a rank that failed prints its error itself


class SharedError(Exception):
    """An error that every rank raises, with the same text: one rank may report it for all.

    Classes of errors that are computed from what all ranks know, or that they have agreed on,
    derive from it.
    """


class PeerError(SharedError, RuntimeError):
    """Another rank failed; the message is that rank's."""


def on_every_rank(work: Callable[[*Given], T], *args: *Given) -> T:
    """Run `work` on each rank and return its result, once all ranks have succeeded.

    `work` must not communicate: a rank that fails in it would come here, while the others wait for
    it there.

    Communicates: one all-gather of a short text.

    Args:
        work: What is done.
        args: What it takes.

    Raises:
        Exception: What `work` raised on this rank; `is_shared` says that the others know.
        PeerError: `work` failed on other ranks only; the text of the first of them.
    Held by: tests/ranks/test_together.py::test_an_error_on_one_rank_reaches_all_as_one_message
    """
    result = None
    error = None
    try:
        result = work(*args)
    except Exception as caught:  # not BaseException: Ctrl-C ends this rank without a vote
        error = caught
    _agree(error)
    return cast(T, result)


def agreed(*checks: Callable[[], object]) -> None:
    """Make several checks, in this order, and return once all ranks have passed all of them.

    The error is the one that `on_every_rank` around each of them would give: that of the first
    check that fails on any rank. It costs one agreement in place of one for each check.

    Communicates: one all-gather of a short text. The checks themselves must not.

    Args:
        checks: They raise where something is wrong; what they return is dropped.

    Raises:
        Exception: What the check raised on this rank; `is_shared` says that the others know.
        PeerError: It failed on other ranks only; the text of the first of them.
    Held by: tests/ranks/test_together.py::
        test_of_several_checks_the_first_that_fails_anywhere_is_told
    """
    error = None
    passed = 0
    for check in checks:
        try:
            check()
        except Exception as caught:
            error = caught
            break  # the next check may rely on what this one has found wrong
        passed += 1
    _agree(error, passed)


def on_first_rank(work: Callable[[*Given], T], *args: *Given) -> T:
    """Run `work` on rank 0 alone and return its result on all ranks.

    Communicates: an all-gather of a short text and one broadcast of the pickled result.

    Args:
        work: What is done.
        args: What it takes; those of rank 0 count.

    Raises:
        Exception: What `work` raised, on rank 0.
        PeerError: Rank 0 has failed; raised on the other ranks.
    """
    result = None
    # Both branches are the same collective. After it all ranks know that rank 0 has a result, or
    # all have raised, so that none waits in the broadcast for a result that never comes.
    if dist.get_rank() == 0:
        result = on_every_rank(work, *args)
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
    """Whether every rank knows of an error, so that one may report it for all.

    Args:
        error: What was raised on this rank.
    """
    return isinstance(error, SharedError) or getattr(error, "shared", False)


def leave_word(word: str) -> None:
    """Say why this rank leaves, for those that will find its connections closed.

    Only while the store is there: torch prints lines of its own about one that is not.

    Args:
        word: What `word_left` gives on the other ranks.
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


def _agree(error: Exception | None, number: int = 0) -> None:
    """Tell the other ranks of an error, and raise the first one of all; none: return.

    Communicates: one all-gather of a short text.

    Args:
        error: What this rank has found; None: nothing.
        number: How many checks it has passed before. What fails in an earlier check counts before
            what an earlier rank has found, as if the ranks had agreed on each check.

    Raises:
        Exception: `error`, if no other rank failed in an earlier check.
        PeerError: Otherwise.
    """
    found = _found_by_all(error, number)
    numbers = [failure[0] for failure in found if failure is not None]
    if not numbers:
        return
    first = min(numbers)
    if error is not None and number == first:
        # A mark on the error itself keeps its class, which callers tell apart, and its traceback.
        error.__dict__["shared"] = True
        raise error
    for rank, failure in enumerate(found):
        if failure is not None and failure[0] == first:
            raise PeerError(f"rank {rank}: {failure[1]}")


def _found_by_all(error: Exception | None, number: int) -> list[tuple[int, str] | None]:
    """(How many checks it has passed, what went wrong) of each rank; None where nothing did.

    Args:
        error: What this rank has found; None: nothing.
        number: How many checks it has passed before.

    Raises:
        Exception: `error`, if the others cannot be told.
    """
    found: list[tuple[int, str] | None] = [None] * dist.get_world_size()
    if error is None:
        dist.all_gather_object(found, None)
        return found
    own_text = f"{type(error).__name__}: {error}".removesuffix(": ")
    try:
        with _said_if_others_are_late(own_text):
            dist.all_gather_object(found, (number, own_text))
    except RuntimeError:
        # The others are gone. The reason why this rank failed matters more than that.
        raise error from None
    return found


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
