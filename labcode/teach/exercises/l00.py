"""Checks of lesson 00, start here. The text of each assertion is a hint."""

import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from labcode.pool.ranks import Ranks
from labcode.teach.check import Exercise, due
from labcode.teach.exercises.in_notebook import bounded
from labcode.teach.exercises.on_ranks import in_groups
from labcode.teach.exercises.requests import Requests

EXERCISES = {
    "0.1": Exercise(
        praise="every item on exactly one rank, also when they do not divide evenly",
        hints=(
            "Write down who gets what for 10 items and 4 ranks. How far apart are the places of "
            "one rank's items, if they are dealt out like cards?",
            "A slice of a list has three parts: where it begins, where it ends, and its step.",
        ),
    ),
    "0.2": Exercise(
        praise="the mean over all values, the same on every rank",
        hints=(
            "The mean over all is the sum of all values, divided by how many there are. What part "
            "of each does a rank know?",
            "all_reduce adds, place by place: a tensor with two numbers gives two sums.",
        ),
    ),
}


# ---- 0.1

# Items and ranks. Some items are equal, none says by its value where it stands, and the last cannot
# be sorted or computed with.
CASES = (
    ([20, 12, 8, 40, 8, 16, 24, 12], 4),
    ([4, 20, 4, 12, 36, 8, 16, 28, 24, 20], 4),
    ([12, 4, 8], 4),
    ([8, 4, 16, 8, 12, 20, 32], 1),
    (["she", None, "sells", "sea", None, "shells", "by"], 3),
)


def my_share(share: Callable[[list[Any], int, int], Any]) -> None:
    """The learner's `share(items, rank, world_size)`: all items dealt out, none twice, evenly."""
    right_with = []  # numbers of ranks
    for items, world_size in CASES:
        shares = _shares(share, items, world_size)
        only_with = right_with[0] if len(set(right_with)) == 1 else world_size
        _check_dealt(items, shares, only_with)
        _check_sizes(items, shares, share)
        right_with.append(world_size)


def _shares(share: Callable[..., Any], items: list[Any], world_size: int) -> list[list[Any]]:
    """What each rank gets of the items."""
    before = list(items)
    shares = []
    for rank in range(world_size):
        part = due(_share_of(share, items, rank, world_size))
        assert isinstance(part, list), (
            f"rank {rank} gets {_kind_of(part)}, and it should get a list of items"
        )
        shares.append(part)
        assert items == before, "the list of items was changed: other ranks need it too"
    return shares


def _share_of(share: Callable[..., Any], items: list[Any], rank: int, world_size: int) -> Any:
    try:
        return bounded("does each loop come to its end?", share, items, rank, world_size)
    except ValueError as error:
        assert "process group has not been initialized" not in str(error), (
            "`share` runs in this notebook, which is no rank: use its arguments `rank` and "
            "`world_size`"
        )
        raise


def _kind_of(part: Any) -> str:
    if isinstance(part, (int, str)):
        return repr(part)
    return f"a {type(part).__name__}"


def _case(items: list[Any], shares: list[list[Any]]) -> str:
    ranks = "1 rank" if len(shares) == 1 else f"{len(shares)} ranks"
    return f"{len(items)} items over {ranks}"


def _check_dealt(items: list[Any], shares: list[list[Any]], only_with: int) -> None:
    """See that each item was dealt out once.

    Args:
        items: What was to be dealt out.
        shares: Of each rank.
        only_with: With this many ranks it was right so far, and no other number was tried.
    """
    dealt = []
    for part in shares:
        dealt += part
    case = _case(items, shares)
    strange = [item for item in dealt if item not in items]
    assert not strange, (
        f"{case}: {strange[0]!r} was dealt out, and it is not an item: deal the items themselves, "
        "not their places"
    )
    missing = [item for item in items if dealt.count(item) < items.count(item)]
    twice = [item for item in items if dealt.count(item) > items.count(item)]
    assert not twice, f"{case}: the item with value {twice[0]!r} is on two ranks"
    why = ""
    if only_with != len(shares):
        why = (
            f". With {only_with} ranks it was right: what in your function holds for {only_with} "
            "alone?"
        )
    assert not missing, (
        f"{case}: only {len(dealt)} were dealt out, and the item with value {missing[0]!r} is on "
        f"no rank{why}"
    )


def _check_sizes(
    items: list[Any], shares: list[list[Any]], share: Callable[[list[Any], int, int], Any]
) -> None:
    """See that no rank has more than one item more than another."""
    sizes = [len(part) for part in shares]
    if max(sizes) - min(sizes) <= 1:
        return
    # As many other items: who deals by the place gives shares of the same sizes.
    of_others = _shares(share, list(range(len(items))), len(shares))
    is_by_place = sizes == [len(part) for part in of_others]
    why = "" if is_by_place else ", by the place of an item and not by what it is"
    raise AssertionError(
        f"{_case(items, shares)} gives shares of {sizes}, and two sizes may differ by one at most: "
        f"deal more evenly{why}"
    )


# ---- 0.2

RETURNS_NOTHING = (
    "`all_reduce` itself returns nothing, as the sum is put into the tensor that it is given"
)
# An error below this part of the mean is too small for a lost fraction of a value.
ROUNDING = 0.005

# Two sets of values, of each rank: with fractions, and not equally many in all.
VALUES = (
    ((3.5, 10.25, 12.5, 2.75), (40.25,), (7.75, 0.5, 21.25), (2.25, 30.5)),
    ((0.75, 5.25), (61.5, 2.25, 9.75, 1.5, 0.25), (33.25,), (4.5, 8.25, 16.75)),
)


def _mean_on_this_rank(
    group: dist.ProcessGroup, mean: Callable[[torch.Tensor], Any], number: int
) -> tuple[float, int]:
    """What the learner's function returns here, and how many calls it made of the other ranks."""
    values = VALUES[number][group.rank()]
    local = torch.tensor(values)
    with Requests() as requests:
        result = _mean_of(mean, local, requests)
    requests.check_waited()
    assert torch.equal(local, torch.tensor(values)), (
        "the local values were changed: work on a tensor of your own (all_reduce writes into the "
        "one that it is given)"
    )
    if isinstance(result, torch.Tensor):
        assert result.numel() == 1, f"it returned {result.numel()} numbers, and the mean is one"
        result = result.item()
    assert isinstance(result, numbers.Real), f"it returned {result!r}, and the mean is a number"
    return float(result), len(requests.names)


def _mean_of(mean: Callable[[torch.Tensor], Any], local: torch.Tensor, requests: Requests) -> Any:
    """What the learner's function returns, if it did not compute with what all_reduce returns."""
    try:
        result = mean(local)
    except (TypeError, AttributeError) as error:
        is_of_none = "NoneType" in str(error) and requests.names[-1:] == ["all_reduce"]
        assert not is_of_none, f"your function computes with a None: {RETURNS_NOTHING}"
        raise
    assert result is not None or not requests.names, (
        f"it returned None: is there a `return`, and of what? {RETURNS_NOTHING}"
    )
    return due(result)


def _check_means(answers: Sequence[tuple[float, int]], number: int) -> None:
    results = [result for result, _ in answers]
    num_calls = sum(calls for _, calls in answers)
    own = VALUES[number]
    together = list(itertools.chain.from_iterable(own))
    total = math.fsum(together)
    expected = total / len(together)
    own_means = [math.fsum(values) / len(values) for values in own]
    found = results[0]

    assert num_calls > 0, (
        "nothing was sent: what a rank returns then holds its own values at most, and not those of "
        "the others"
    )
    for rank, result in enumerate(results):
        assert math.isfinite(result), (
            f"rank {rank} returned {result}: what was divided by what, and had it arrived by then?"
        )
    assert not _close(results, own_means), (
        "each rank returned the mean of its own values: what came from the others is not in it"
    )
    own_counts = [len(values) for values in own]
    by_own_count = _close(results, [total / count for count in own_counts])
    why = ". What do you divide by, and is it the same on every rank?" if by_own_count else ""
    assert _close(results, [found] * len(results)), (
        f"the ranks disagree: they returned {', '.join(f'{result:g}' for result in results)}{why}"
    )
    assert not _close([found], [math.fsum(own_means) / len(own)]), (
        "a mean of means: a rank with one value counts as much as a rank with four"
    )
    assert not _close([found], [total]), "that is the sum of all values: how many are there?"
    assert not _close([found], [total / len(results)]), (
        "the sum of all values was divided by the number of ranks: how many values are there?"
    )
    for other in VALUES[:number]:
        before = sum(map(len, other))
        assert not _close([found], [total / before]), (
            f"with {before} values in all it is right, but not with {len(together)}: what in your "
            f"function holds for {before} alone?"
        )
    places = len(results) * max(own_counts)
    assert not _close([found], [total / places]), (
        f"the sum of all values was divided by {places}, and there are {len(together)} values: "
        "does your count hold places that no rank had a value for?"
    )
    why = ""
    if abs(found - expected) < ROUNDING * expected:
        why = ": of how many bits are the numbers that you compute with?"
    elif abs(found - expected) < 1:
        why = ": is a fraction lost on the way?"
    assert _close([found], [expected]), f"the mean is {expected:.3f}, yours is {found:.3f}{why}"


def _close(found: list[float], expected: list[float]) -> bool:
    return all(math.isclose(one, other, rel_tol=1e-5) for one, other in zip(found, expected))


def distributed_mean(mean: Callable[[torch.Tensor], Any], ranks: Ranks) -> None:
    """The learner's `mean(local)`: over the values of all ranks, which hold unequally many."""
    everyone = (tuple(range(ranks.n)),)
    for number in range(len(VALUES)):

        def judge(answers: Sequence[tuple[float, int]], number: int = number) -> None:
            _check_means(answers, number)

        in_groups(ranks, everyone, _mean_on_this_rank, mean, number, judge=judge)
