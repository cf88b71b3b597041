"""Checks of lesson 00, start here. The text of each assertion is a hint."""

import math
from collections.abc import Callable
from typing import Any

import torch

from labcode.pool.ranks import Ranks
from labcode.teach.check import Exercise, due

EXERCISES = {
    "0.1": Exercise("every item on exactly one rank, also when they do not divide evenly"),
    "0.2": Exercise("sum and count travel together, one division at the end"),
    "0.3": Exercise(),
}

VOCAB_SIZE = 50257  # GPT-2's


# ---- 0.1

SIZES = ((8, 4), (10, 4), (3, 4), (7, 1))  # items, ranks


def my_share(share: Callable[[list[int], int, int], Any]) -> None:
    """The learner's `share(items, rank, world_size)`: all items dealt out, none twice, evenly."""
    for count, world_size in SIZES:
        items = list(range(count))
        dealt = []
        sizes = []
        for rank in range(world_size):
            part = list(due(share(items, rank, world_size)))
            dealt += part
            sizes.append(len(part))
        dealt.sort()
        case = f"{count} items over {world_size} ranks"
        assert len(dealt) >= count, f"{case}: only {len(dealt)} were dealt out"
        assert dealt == items, f"{case}: some item is on two ranks"
        assert max(sizes) - min(sizes) <= 1, f"{case} gives shares of {sizes}: deal more evenly"


# ---- 0.2


def _local_values(rank: int) -> torch.Tensor:
    """The values of a rank: rank 0 holds 1 of them, rank 1 holds 2, ..."""
    return torch.arange(float(rank + 1)) + 10 * rank


def _mean_on_this_rank(rank: int, mean: Callable[[torch.Tensor], Any]) -> tuple[float | None, bool]:
    """(what the learner's function returned, whether it left its argument as it was)."""
    local = _local_values(rank)
    result = mean(local)
    untouched = torch.equal(local, _local_values(rank))
    if result is None:
        return None, untouched
    return float(result), untouched


def distributed_mean(mean: Callable[[torch.Tensor], Any], ranks: Ranks) -> None:
    """The learner's `mean(local)`: over the values of all ranks, which hold 1, 2, ... of them."""
    answers = ranks.run(_mean_on_this_rank, mean)
    results = tuple(due(result) for result, _ in answers)
    found = results[0]
    values = [_local_values(rank) for rank in range(ranks.n)]
    expected = torch.cat(values).mean().item()
    means = [local.mean() for local in values]
    mean_of_means = torch.stack(means).mean().item()

    assert all(untouched for _, untouched in answers), (
        "the local values were changed: all_reduce works in place, so give it a tensor of its own"
    )
    assert len(set(results)) == 1, f"the ranks disagree: {results}"
    assert not math.isclose(found, mean_of_means, rel_tol=1e-5), (
        "a mean of means: ranks with few values count too much; "
        "sum and count must travel separately"
    )
    assert math.isclose(found, expected, rel_tol=1e-5), (
        f"the mean is {expected:.3f}, yours is {found:.3f}"
    )


# ---- 0.3


def first_loss(answer: float | None) -> None:
    """The loss of an untrained model with GPT-2's vocabulary, in nats."""
    value = float(due(answer))
    assert not math.isclose(value, math.log2(VOCAB_SIZE), rel_tol=1e-3), (
        "that is in bits: cross-entropy counts in nats, base e"
    )
    assert math.isclose(value, math.log(VOCAB_SIZE), rel_tol=1e-3), (
        f"every token is equally likely: what is -ln(1/{VOCAB_SIZE})?"
    )
