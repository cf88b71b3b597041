"""How the checks run a learner's code on ranks: whatever goes wrong there becomes one plain line.

    results = in_groups(ranks, GROUPS, _what_it_does, answer)

runs `_what_it_does(group, answer)` on all ranks, and then on some of them. A hang, an error or an
endless loop in the learner's code ends as an AssertionError that says in which group it was, and
where in it; so does an assertion of the check's own, whose text therefore names no rank.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from labcode.comm.counting import counted
from labcode.comm.grid import group_of
from labcode.pool.ranks import RankError, Ranks
from labcode.pool.record import listed
from labcode.teach.check import is_stub, reason

LIMIT_S = 20.0  # what the code of an exercise takes is far below a second
IMPORT_LIMIT_S = 300.0  # a second or two, once, on a machine that has nothing else to do

# All ranks, and three of them in which a rank of the group is not the rank of the world.
GROUPS = ((0, 1, 2, 3), (1, 2, 3))

STILL_THE_WORLD = (
    "What in your code still speaks of all of them: a call without the group, a rank of the world, "
    "a fixed number?"
)


def in_groups(
    ranks: Ranks,
    groups: Sequence[Sequence[int]],
    work: Callable[..., Any],
    *args: Any,
    judge: Callable[[list[Any]], None] | None = None,
    limit_s: float | None = None,
) -> list[list[Any]]:
    """What `work(group, *args)` returns on the ranks of each group, in the order of the group.

    Args:
        ranks: The pool.
        groups: Ranks of the world; each group is made anew. All ranks come first, so that a fault
            that only a part of them shows is known to be one.
        work: Called on the ranks of a group. It may assert; the text needs to name no rank.
        args: What else it is given.
        judge: Given the results of a group, in its order; it may assert.
        limit_s: How long the code may take in one group; None is `LIMIT_S`.

    Raises:
        AssertionError: Anything went wrong in a group: the text says in which and where.
        RankError: The exercise is not done yet.
    """
    found = []
    if limit_s is None:
        limit_s = LIMIT_S
    ranks.run(_import_what_counts, limit_s=IMPORT_LIMIT_S)
    for number, members in enumerate(groups):
        try:
            results = _in_group(ranks, members, work, args, limit_s)
            if judge is not None:
                judge(results)
        except AssertionError as error:
            if number == 0:
                raise
            text = str(error)
            stop = "" if text.endswith((".", "?", "!")) else "."
            raise AssertionError(
                f"with ranks {listed(groups[0])} it is right; {text}{stop} {STILL_THE_WORLD}"
            ) from None
        found.append(results)
    return found


def _import_what_counts() -> None:
    """Let the ranks import what counting collectives needs, in time that is not the learner's.

    An import that is broken off in its middle leaves half a module, and no call works any more.
    """
    with counted():
        torch.ones(1).add_(1)


def _in_group(
    ranks: Ranks, members: Sequence[int], work: Callable[..., Any], args: tuple, limit_s: float
) -> list[Any]:
    everyone = len(members) == ranks.n
    where = "" if everyone else f"in the group of ranks {listed(members)}"
    try:
        of_ranks = ranks.run(_on_member, members, work, args, limit_s=limit_s)
    except RankError as error:
        if is_stub(error):
            raise
        text = reason(error)
        if not everyone and error.rank in members:
            text = text.replace(f"on rank {error.rank}: ", _on(members.index(error.rank)), 1)
        raise AssertionError(f"{where}: {text}" if where else text) from None
    results = []
    for number, member in enumerate(members):
        result, wrong = of_ranks[member]
        if wrong is not None:
            place = f"on rank {member}: " if everyone else f"{where}, {_on(number)}"
            raise AssertionError(f"{place}{wrong}")
        results.append(result)
    return results


def _on(number: int) -> str:
    return f"on the rank with number {number} in the group: "


def _on_member(
    members: Sequence[int], work: Callable[..., Any], args: tuple
) -> tuple[Any, str | None]:
    """What `work` returns on this rank, or the text of its assertion.

    An assertion is carried as text: raised, it would stop the other ranks, and chance would decide
    whose assertion is the first. Ranks outside of the group are done at once; they wait for nobody.
    """
    group = group_of(members)
    if group is None:
        return None, None
    try:
        return work(group, *args), None
    except AssertionError as error:
        return None, str(error)


@contextlib.contextmanager
def without(*functions: Callable[..., Any]) -> Iterator[None]:
    """Within this block none of these functions may be called, by whatever name or detour.

    It is for finished solutions of an exercise, labcode's own and PyTorch's.

    Args:
        functions: Written in Python.

    Raises:
        AssertionError: At the end of the block, if one was called.
    """
    forbidden: dict[CodeType, str] = {}
    for function in functions:
        module = function.__module__.rpartition(".")[2]
        # a decorator such as torch.no_grad() has one wrapper for all functions
        own: Any = inspect.unwrap(function)
        whose = "labcode's own" if function.__module__.startswith("labcode.") else "PyTorch's"
        forbidden[own.__code__] = f"{module}.{function.__name__} is {whose}"
    called = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in forbidden:
            called.append(forbidden[frame.f_code])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
    assert not called, f"{called[0]} answer to this exercise: write yours"
