"""Checks of lesson 00, start here."""

import itertools
import math
import numbers
from collections.abc import Callable
from typing import Any

import torch

from course.answer import RETURNED_NONE, Exercise, Hint, due
from course.exercises.expect import careless, confirm, diagnose, plural, refuse, settle
from course.exercises.in_notebook import bounded
from course.exercises.simulated import Outcome, simulate
from course.pool.ranks import Ranks
from labcode.runtime.units import type_in_words


def _kind_of(value: Any) -> str:
    """What a function returned, in words."""
    if isinstance(value, (int, str)):
        return repr(value)
    return type_in_words(value)


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
    right_with: set[int] = set()  # numbers of ranks
    for items, world_size in CASES:
        case = f"{len(items)} items over {plural(world_size, 'rank')}"
        shares = _shares(share, items, world_size)
        why = ""
        if len(right_with) == 1 and world_size not in right_with:
            (only,) = right_with
            why = f". With {only} ranks it was right: what in your function holds for {only} alone?"
        _check_dealt(case, items, shares, why)
        _check_even(case, items, shares, share)
        right_with.add(world_size)


def _shares(share: Callable[..., Any], items: list[Any], world_size: int) -> list[list[Any]]:
    """What each rank gets of the items."""
    before = list(items)
    shares = []
    for rank in range(world_size):
        part = due(_share_of(share, items, rank, world_size))
        mistakes = {
            f"rank {rank} gets {_kind_of(part)}, and it should get a list of items": (
                not isinstance(part, list)
            ),
            "the list of items was changed: other ranks need it too": items != before,
        }
        refuse(mistakes)
        shares.append(part)
    return shares


def _share_of(share: Callable[..., Any], items: list[Any], rank: int, world_size: int) -> Any:
    try:
        return bounded("does each loop come to its end?", share, items, rank, world_size)
    except ValueError as error:
        if "process group has not been initialized" not in str(error):
            raise
        raise Hint(
            "`share` runs in this notebook, which is no rank: use its arguments `rank` and "
            "`world_size`"
        ) from None


def _check_dealt(case: str, items: list[Any], shares: list[list[Any]], why: str) -> None:
    """Each item is dealt out once.

    Args:
        case: What was dealt out to how many.
        items: What was to be dealt out.
        shares: The share of each rank.
        why: What to ask if an item is missing.
    """
    dealt = []
    for part in shares:
        dealt += part
    for item in dealt:
        if item not in items:
            raise Hint(
                f"{case}: {item!r} was dealt out, and it is not an item: deal the items "
                "themselves, not their places"
            )
    for item in items:
        if dealt.count(item) > items.count(item):
            raise Hint(f"{case}: the item with value {item!r} is on two ranks")
    for item in items:
        if dealt.count(item) < items.count(item):
            raise Hint(
                f"{case}: only {len(dealt)} were dealt out, and the item with value {item!r} is "
                f"on no rank{why}"
            )


def _check_even(
    case: str, items: list[Any], shares: list[list[Any]], share: Callable[..., Any]
) -> None:
    """No rank has more than one item more than another."""
    sizes = [len(part) for part in shares]
    if max(sizes) - min(sizes) <= 1:
        return
    # As many other items: who deals by the place gives shares of the same sizes.
    of_others = _shares(share, list(range(len(items))), len(shares))
    is_by_place = sizes == [len(part) for part in of_others]
    why = "" if is_by_place else ", by the place of an item and not by what it is"
    raise Hint(
        f"{case} gives shares of {sizes}, and two sizes may differ by one at most: deal more "
        f"evenly{why}"
    )


# ---- 0.2

ROUNDED = 1e-5  # float32
# An error below this part of the mean is too small for a lost fraction of a value.
LOST = 0.005

# Two sets of values, of each rank: with fractions, and not equally many in all.
VALUES = (
    ((3.5, 10.25, 12.5, 2.75), (40.25,), (7.75, 0.5, 21.25), (2.25, 30.5)),
    ((0.75, 5.25), (61.5, 2.25, 9.75, 1.5, 0.25), (33.25,), (4.5, 8.25, 16.75)),
)


def _mean_on(rank: int, mean: Callable[[torch.Tensor], Any], number: int) -> float | None:
    """What the learner's function returns on a rank."""
    local = torch.tensor(VALUES[number][rank])
    before = local.clone()
    result = mean(local)
    mistakes = {
        "the local values were changed: work on a tensor of your own (all_reduce writes into the "
        "one that it is given)": not torch.equal(local, before)
    }
    refuse(mistakes)
    if result is None:
        return None
    if isinstance(result, torch.Tensor):
        if result.numel() != 1:
            raise Hint(f"it returned {result.numel()} numbers, and the mean is one")
        result = result.item()
    if not isinstance(due(result), numbers.Real):
        raise Hint(f"it returned {_kind_of(result)}, and the mean is a number")
    return float(result)


def distributed_mean(mean: Callable[[torch.Tensor], Any], ranks: Ranks | None = None) -> str:
    """The learner's `mean(local)`: over the values of all ranks, which hold unequally many."""
    for number in range(len(VALUES)):
        outcome = simulate(len(VALUES[number]), _mean_on, mean, number)
        settle(outcome)
        _check_mean(outcome, number)
    return confirm(ranks, outcome, _mean_on, mean, number)


def _check_mean(outcome: Outcome, number: int) -> None:
    """All ranks have returned the mean of all values."""
    if None in outcome.results:
        raise Hint(RETURNED_NONE)
    for rank, result in enumerate(outcome.results):
        refuse(careless(outcome.of(rank)), f"on rank {rank}: ")
        hint = (
            f"rank {rank} returned {result}: what was divided by what, and had it arrived by then?"
        )
        refuse({hint: not math.isfinite(result)})
    of_ranks = VALUES[number]
    together = list(itertools.chain.from_iterable(of_ranks))
    total = math.fsum(together)
    truth = total / len(together)
    own_counts = torch.tensor([len(values) for values in of_ranks])
    own_means = torch.tensor([math.fsum(values) / len(values) for values in of_ranks])
    found = torch.tensor(outcome.results)
    returned = ", ".join(f"{result:g}" for result in outcome.results)
    mistakes = {
        "nothing was sent: what a rank returns then holds its own values at most, and not those "
        "of the others": not outcome.events,
        "each rank returned the mean of its own values: what came from the others is not in it": (
            own_means
        ),
        f"the ranks disagree: they returned {returned}. What do you divide by, and is it the same "
        "on every rank?": total / own_counts,
        f"the ranks disagree: they returned {returned}. Does every rank get each number that it "
        "computes with from all of them?": (not torch.allclose(found, found[0], ROUNDED, 0)),
    }
    refuse(mistakes, "", found, ROUNDED)
    num_places = len(of_ranks) * int(own_counts.max())
    mistakes = {
        "a mean of means: a rank with one value counts as much as a rank with four": (
            own_means.mean()
        ),
        "that is the sum of all values: how many are there?": total,
        "the sum of all values was divided by the number of ranks: how many values are there?": (
            total / len(of_ranks)
        ),
        f"the sum of all values was divided by {num_places}, and there are {len(together)} values: "
        "does your count hold places that no rank had a value for?": total / num_places,
    }
    for others in VALUES[:number]:
        before = sum(map(len, others))
        hint = (
            f"with {before} values in all it is right, but not with {len(together)}: what in your "
            f"function holds for {before} alone?"
        )
        mistakes[hint] = total / before
    why = ""
    if abs(found[0] - truth) < LOST * truth:
        why = ": of how many bits are the numbers that you compute with?"
    elif abs(found[0] - truth) < 1:
        why = ": is a fraction lost on the way?"
    otherwise = f"the mean is {truth:.3f}, yours is {found[0]:.3f}{why}"
    diagnose("", found[0], truth, mistakes, otherwise, ROUNDED)


EXERCISES = {
    "0.1": Exercise(
        check=my_share,
        praise="every item on exactly one rank, also when they do not divide evenly",
        hints=(
            "Write down who gets what for 10 items and 4 ranks. How far apart are the places of "
            "one rank's items, if they are dealt out like cards?",
            "A slice of a list has three parts: where it begins, where it ends, and its step.",
        ),
    ),
    "0.2": Exercise(
        check=distributed_mean,
        praise="the mean over all values, the same on every rank",
        hints=(
            "The mean over all is the sum of all values, divided by how many there are. What part "
            "of each does a rank know?",
            "all_reduce adds, place by place: a tensor with two numbers gives two sums.",
        ),
    ),
}
