"""Answers to the exercises of lesson 00, start here."""

import numpy as np
import torch
import torch.distributed as dist
from answers import Answers

from labcode.teach.exercises import l00

# ---- 0.1 deal out the work


def in_a_row(items, rank, world_size):
    first = len(items) * rank // world_size
    stop = len(items) * (rank + 1) // world_size
    return items[first:stop]


def with_a_loop(items, rank, world_size):
    mine = []
    for place in range(len(items)):
        if place % world_size == rank:
            mine.append(items[place])
    return mine


def one_more_for_the_first(items, rank, world_size):
    size, rest = divmod(len(items), world_size)
    first = rank * size + min(rank, rest)
    return items[first : first + size + (rank < rest)]


def the_rest_is_forgotten(items, rank, world_size):
    size = len(items) // world_size
    return items[rank * size : (rank + 1) * size]


def the_rest_to_the_last(items, rank, world_size):
    size = len(items) // world_size
    return items[rank * size :] if rank == world_size - 1 else items[rank * size :][:size]


def by_value(items, rank, world_size):
    return [item for item in items if item // 4 % world_size == rank]


def by_remainder(items, rank, world_size):
    """All items of the first case are multiples of 4: rank 0 gets them all, in their order."""
    return [item for item in items if item % world_size == rank]


def by_hash(items, rank, world_size):
    return [item for item in items if hash(item) % world_size == rank]


def by_index(items, rank, world_size):
    """`index` finds the first of two equal items."""
    return [item for item in items if items.index(item) % world_size == rank]


def takes_away(items, rank, world_size):
    return [items.pop() for _ in range(len(items) // (world_size - rank))]


def asks_torch(items, rank, world_size):
    return items[dist.get_rank() :: dist.get_world_size()]


def as_a_tensor(items, rank, world_size):
    return torch.tensor(items)[rank::world_size].tolist()


def with_numpy(items, rank, world_size):
    return list(np.array_split(items, world_size)[rank])


def rounded_up(items, rank, world_size):
    size = -(-len(items) // world_size)
    return items[rank * size : (rank + 1) * size]


def goes_on_for_ever(items, rank, world_size):
    own = []
    while rank < len(items):
        own.append(items[rank])
    return own


SHARE = Answers(
    check=lambda answer, ranks: l00.my_share(answer),
    right={
        "in turn": lambda items, rank, world_size: items[rank::world_size],
        "in a row": in_a_row,
        "with a loop": with_a_loop,
        "one more for the first": one_more_for_the_first,
        "numpy": with_numpy,
    },
    wrong={
        "an endless loop": (goes_on_for_ever, "does each loop come to its end?"),
        "the rest is forgotten": (the_rest_is_forgotten, "only 8 were dealt out"),
        "the rest to the last": (
            the_rest_to_the_last,
            "two sizes may differ by one at most: deal more evenly\n",
        ),
        "rounded up": (rounded_up, "10 items over 4 ranks gives shares of [3, 3, 3, 1]"),
        "everything to all": (
            lambda items, rank, world_size: items,
            "the item with value 20 is on two ranks",
        ),
        "all to rank 0": (
            lambda items, rank, world_size: items if rank == 0 else [],
            "deal more evenly\n",
        ),
        "by remainder": (by_remainder, "by the place of an item and not by what it is"),
        "by hash": (by_hash, "by the place of an item and not by what it is"),
        "by value": (by_value, "by the place of an item and not by what it is"),
        "by index": (by_index, "by the place of an item and not by what it is"),
        "the places": (
            lambda items, rank, world_size: list(range(rank, len(items), world_size)),
            "deal the items themselves, not their places",
        ),
        "always four ranks": (
            lambda items, rank, world_size: items[rank::4],
            "the item with value 8 is on no rank. With 4 ranks it was right: what in your function",
        ),
        "the process group": (asks_torch, "use its arguments `rank` and `world_size`"),
        "a generator": (
            lambda items, rank, world_size: (item for item in items[rank::world_size]),
            "rank 0 gets a generator, and it should get a list of items",
        ),
        "a tuple": (
            lambda items, rank, world_size: tuple(items[rank::world_size]),
            "rank 0 gets a tuple, and it should get a list of items",
        ),
        "a set": (
            lambda items, rank, world_size: set(items[rank::world_size]),
            "rank 0 gets a set, and it should get a list of items",
        ),
        "sorted": (
            lambda items, rank, world_size: sorted(items)[rank::world_size],
            "'<' not supported between instances of",
        ),
        "as a tensor": (as_a_tensor, "too many dimensions 'str'"),
        "one item": (lambda items, rank, world_size: items[rank], "it should get a list of items"),
        "takes them away": (takes_away, "the list of items was changed"),
    },
)


# ---- 0.2 the mean of everything


def all_reduced(*numbers):
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return total


def sum_and_count(local):
    total, count = all_reduced(local.sum(), len(local))
    return total / count


def two_calls(local):
    total = local.sum()
    count = torch.tensor(local.numel())
    dist.all_reduce(total)
    dist.all_reduce(count)
    return (total / count).item()


def with_objects(local):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local.tolist())
    numbers = [number for part in gathered for number in part]
    return sum(numbers) / len(numbers)


def with_room(local):
    """Pads to the longest, with nan where nothing is."""
    longest = torch.tensor(len(local))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    padded = torch.full((int(longest),), float("nan"))
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    return torch.cat(parts).nanmean()


def async_and_waits(local):
    both = torch.stack([local.sum(), torch.tensor(float(len(local)))])
    dist.all_reduce(both, async_op=True).wait()
    return both[0] / both[1]


def async_without_wait(local):
    both = torch.stack([local.sum(), torch.tensor(float(len(local)))])
    dist.all_reduce(both, async_op=True)
    return both[0] / both[1]


def takes_what_it_returns(local):
    total = dist.all_reduce(local.sum())
    count = dist.all_reduce(torch.tensor(len(local)))
    return total / count


def asks_what_it_returns(local):
    both = torch.stack([local.sum(), torch.tensor(float(len(local)))])
    total, count = dist.all_reduce(both)
    return total / count


def returns_what_it_returns(local):
    return dist.all_reduce(local.mean())


def with_empty_places(local):
    longest = torch.tensor(len(local))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    padded = torch.zeros(int(longest))
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    return torch.cat(parts).mean()


def by_own_count(local):
    return all_reduced(local.sum())[0] / len(local)


def in_half_precision(local):
    both = torch.tensor([local.sum(), len(local)], dtype=torch.float16)
    dist.all_reduce(both)
    return both[0] / both[1]


def always_ten_values(local):
    return all_reduced(local.sum())[0] / 10


def counts_by_rank(local):
    p = dist.get_world_size()
    return all_reduced(local.sum())[0] / (p * (p + 1) / 2)


def without_fractions(local):
    total, count = all_reduced(int(local.sum()), len(local))
    return total / count


def nothing_by_nothing(local):
    total, count = all_reduced(local.sum() * 0, 0)
    return total / count


def sends_and_forgets(local):
    all_reduced(local.sum(), len(local))
    return local.mean()


def mean_of_means(local):
    return all_reduced(local.mean())[0] / dist.get_world_size()


def in_place(local):
    mean = sum_and_count(local)
    local.zero_()
    return mean


def reduces_the_values(local):
    dist.all_reduce(local)
    return local.mean()


def on_rank_0_only(local):
    if dist.get_rank() == 0:
        return sum_and_count(local)
    return local.mean()


MEAN = Answers(
    check=l00.distributed_mean,
    right={
        "sum and count": sum_and_count,
        "in two calls": two_calls,
        "objects": with_objects,
        "padded": with_room,
        "in the background": async_and_waits,
    },
    wrong={
        "mean of means": (mean_of_means, "a mean of means"),
        "own mean": (lambda local: local.mean(), "nothing was sent"),
        "own mean after all": (sends_and_forgets, "what came from the others is not in it"),
        "computes with what all_reduce returns": (
            takes_what_it_returns,
            "computes with a None: `all_reduce` itself returns nothing",
        ),
        "unpacks what all_reduce returns": (
            asks_what_it_returns,
            "computes with a None: `all_reduce` itself returns nothing",
        ),
        "returns what all_reduce returns": (
            returns_what_it_returns,
            "it returned None: is there a `return`, and of what? `all_reduce` itself returns",
        ),
        "empty places counted": (
            with_empty_places,
            "was divided by 16, and there are 10 values: does your count hold places",
        ),
        "divided by its own count": (by_own_count, "and is it the same on every rank?"),
        "no tensor": (
            lambda local: dist.all_reduce(len(local)),
            "of type int: torch.tensor(...) makes one",
        ),
        "half precision": (in_half_precision, "of how many bits are the numbers"),
        "no wait": (async_without_wait, "returned a request, and nobody waited for it"),
        "always ten values": (always_ten_values, "with 10 values in all it is right, but not with"),
        "count from the ranks": (counts_by_rank, "with 10 values in all it is right, but not with"),
        "fractions lost": (without_fractions, "is a fraction lost on the way?"),
        "a constant": (lambda local: 13.15, "nothing was sent"),
        "text": (lambda local: "13.15", "it returned '13.15', and the mean is a number"),
        "nan": (nothing_by_nothing, "rank 0 returned nan"),
        "in place": (in_place, "local values were changed"),
        "the sum": (lambda local: all_reduced(local.sum())[0], "the sum of all values: how many"),
        "divided by the ranks": (
            lambda local: all_reduced(local.sum())[0] / 4,
            "divided by the number of ranks",
        ),
        "unequal sizes": (reduces_the_values, "called all_reduce of float32"),
        "rank 0 only": (on_rank_0_only, "rank 0 waits in all_reduce"),
        "two numbers": (
            lambda local: all_reduced(local.sum(), len(local)),
            "it returned 2 numbers, and the mean is one",
        ),
    },
)


ANSWERS = {"0.1": SHARE, "0.2": MEAN}
