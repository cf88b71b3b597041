"""Checks of lesson 00, start here. The text of each assertion is a hint."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from labcode.pool.ranks import Ranks
from labcode.teach.check import Exercise, due
from labcode.teach.exercises.on_ranks import in_groups

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
        praise="sum and count travel together, one division at the end",
        hints=(
            "The mean over all is the sum of all values, divided by how many there are. Which of "
            "the two does a rank know by itself?",
            "all_reduce adds, place by place: a tensor with two numbers gives two sums.",
        ),
    ),
}


# ---- 0.1

# Items and ranks. Some items are equal, and none says by its value where it stands.
CASES = (
    ([20, 12, 8, 40, 8, 16, 24, 12], 4),
    ([4, 20, 4, 12, 36, 8, 16, 28, 24, 20], 4),
    ([12, 4, 8], 4),
    ([8, 4, 16, 8, 12, 20, 32], 1),
)


def my_share(share: Callable[[list[int], int, int], Any]) -> None:
    """The learner's `share(items, rank, world_size)`: all items dealt out, none twice, evenly."""
    for items, world_size in CASES:
        before = list(items)
        shares = []
        for rank in range(world_size):
            part = due(share(items, rank, world_size))
            assert not isinstance(part, (int, str)) and hasattr(part, "__iter__"), (
                f"rank {rank} gets {part!r}, and it should get a list of items"
            )
            shares.append(list(part))
            assert items == before, "the list of items was changed: other ranks need it too"
        _check_shares(items, shares)


def _check_shares(items: list[int], shares: list[list[int]]) -> None:
    dealt = []
    for part in shares:
        dealt += part
    case = f"{len(items)} items over {len(shares)} ranks"
    strange = [item for item in dealt if item not in items]
    assert not strange, (
        f"{case}: {strange[0]!r} was dealt out, and it is not an item: deal the items themselves, "
        "not their places"
    )
    sizes = [len(part) for part in shares]
    missing = [item for item in items if dealt.count(item) < items.count(item)]
    twice = [item for item in items if dealt.count(item) > items.count(item)]
    assert not twice, f"{case}: item {twice[0]} is on two ranks"
    assert not missing, (
        f"{case}: only {len(dealt)} were dealt out, and item {missing[0]} is on none"
    )
    assert max(sizes) - min(sizes) <= 1, (
        f"{case} gives shares of {sizes}: deal more evenly, by the place of an item and not by "
        "what it is"
    )


# ---- 0.2

FIRST_VALUES = (3.0, 10.0, 40.0, 2.0)  # of each rank, which holds as many values as its number + 1


def _local_values(rank: int) -> torch.Tensor:
    """The values of a rank: rank 0 holds 1 of them, rank 1 holds 2, ..."""
    return torch.arange(float(rank + 1)) + FIRST_VALUES[rank]


def _mean_on_this_rank(group: dist.ProcessGroup, mean: Callable[[torch.Tensor], Any]) -> float:
    """What the learner's function returns here; its argument stays as it was."""
    local = _local_values(group.rank())
    result = due(mean(local))
    assert torch.equal(local, _local_values(group.rank())), (
        "the local values were changed: all_reduce works in place, so give it a tensor of its own"
    )
    if isinstance(result, torch.Tensor):
        assert result.numel() == 1, f"it returned {result.numel()} numbers, and the mean is one"
    return float(result)


def _check_means(results: list[float]) -> None:
    values = [_local_values(rank) for rank in range(len(results))]
    together = torch.cat(values)
    expected = together.mean().item()
    mean_of_means = torch.stack([local.mean() for local in values]).mean().item()
    found = results[0]
    own_means = [local.mean().item() for local in values]
    assert not _close(results, own_means), (
        "each rank returned the mean of its own values: nothing was sent"
    )
    assert _close(results, [found] * len(results)), (
        f"the ranks disagree: they returned {', '.join(f'{result:g}' for result in results)}"
    )
    assert not _close([found], [mean_of_means]), (
        "a mean of means: ranks with few values count too much; "
        "sum and count must travel separately"
    )
    assert not _close([found], [together.sum().item()]), (
        "that is the sum of all values: how many are there?"
    )
    assert not _close([found], [together.sum().item() / len(results)]), (
        "the sum of all values was divided by the number of ranks: how many values are there?"
    )
    assert _close([found], [expected]), f"the mean is {expected:.3f}, yours is {found:.3f}"


def _close(found: list[float], expected: list[float]) -> bool:
    return all(math.isclose(one, other, rel_tol=1e-5) for one, other in zip(found, expected))


def distributed_mean(mean: Callable[[torch.Tensor], Any], ranks: Ranks) -> None:
    """The learner's `mean(local)`: over the values of all ranks, which hold 1, 2, ... of them."""
    everyone = (tuple(range(ranks.n)),)
    in_groups(ranks, everyone, _mean_on_this_rank, mean, judge=_check_means)
