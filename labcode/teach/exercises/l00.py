"""Checks for lesson 00."""

import math

import torch

from labcode.teach.check import due


def my_share(share) -> None:
    """`share(items, rank, world_size)` deals the items out: all of them, none twice, counts that differ by one at most."""
    for count, world_size in ((8, 4), (10, 4), (3, 4), (7, 1)):
        items = list(range(count))
        parts = [list(due(share(items, rank, world_size))) for rank in range(world_size)]
        dealt = sorted(item for part in parts for item in part)
        assert len(dealt) >= count, (
            f"{count} items over {world_size} ranks: only {len(dealt)} were dealt out"
        )
        assert dealt == items, f"{count} items over {world_size} ranks: some item is on two ranks"
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1, (
            f"{count} items over {world_size} ranks gives shares of {sizes}: deal more evenly"
        )


def distributed_mean(mean, ranks) -> None:
    """`mean(local)` is the mean over the values of all ranks, which need not hold the same number of them."""

    def shares(rank):
        local = torch.arange(float(rank + 1)) + 10 * rank  # 1, 2, 3, 4 values
        kept = local.clone()
        result = mean(local)
        return None if result is None else float(result), bool(torch.equal(local, kept))

    results, untouched = zip(*ranks.run(shares))
    due(*results)
    values = [i + 10 * rank for rank in range(len(ranks)) for i in range(rank + 1)]
    of_means = sum(i / 2 + 10 * i for i in range(len(ranks))) / len(ranks)
    assert all(untouched), (
        "the local values were changed: all_reduce works in place, so give it a tensor of its own"
    )
    assert len(set(results)) == 1, f"the ranks disagree: {results}"
    wrong = "a mean of means: ranks with few values count too much; sum and count must travel separately"
    assert not math.isclose(results[0], of_means, rel_tol=1e-5), wrong
    expected = sum(values) / len(values)
    assert math.isclose(results[0], expected, rel_tol=1e-5), (
        f"the mean is {expected:.3f}, yours is {results[0]:.3f}"
    )


def first_loss(answer) -> None:
    """The loss of an untrained model with GPT-2's vocabulary, in nats."""
    value = float(due(answer))
    assert not math.isclose(value, math.log2(50257), rel_tol=1e-3), (
        "that is in bits: cross-entropy counts in nats, base e"
    )
    assert math.isclose(value, math.log(50257), rel_tol=1e-3), (
        "every token is equally likely: what is -ln(1/50257)?"
    )
