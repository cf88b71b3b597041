"""Answers to the exercises of lesson 00, start here."""

import numpy as np
import torch
import torch.distributed as dist
from answers import Answers, changed

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


def with_numpy(items, rank, world_size):
    return list(np.array_split(items, world_size)[rank])


def the_rest_to_the_last(items, rank, world_size):
    size = len(items) // world_size
    return items[rank * size :] if rank == world_size - 1 else items[rank * size :][:size]


def goes_on_for_ever(items, rank, world_size):
    own = []
    while rank < len(items):
        own.append(items[rank])
    return own


SHARE = "items[rank::world_size]"
BY_PLACE = "by the place of an item and not by what it is"

SHARES = Answers(
    solves="share",
    takes_ranks=False,
    right={
        "in a row": in_a_row,
        "with a loop": with_a_loop,
        "one more for the first": one_more_for_the_first,
        "numpy": with_numpy,
    },
    wrong={
        "an endless loop": (goes_on_for_ever, "does each loop come to its end?"),
        "the rest is forgotten": (
            changed(
                f"{SHARE} => items[rank * (len(items) // world_size) :][: len(items) // world_size]"
            ),
            "only 8 were dealt out",
        ),
        "the rest to the last": (
            the_rest_to_the_last,
            "[2, 2, 2, 4], and two sizes may differ by one at most: deal more evenly",
        ),
        "rounded up": (
            changed(
                f"return {SHARE} => size = -(-len(items) // world_size)\n"
                "    return items[rank * size : (rank + 1) * size]"
            ),
            "10 items over 4 ranks gives shares of [3, 3, 3, 1]",
        ),
        "everything to all": (
            changed(f"{SHARE} => items"),
            "the item with value 20 is on two ranks",
        ),
        "all to rank 0": (
            changed(f"{SHARE} => items if rank == 0 else []"),
            "gives shares of [8, 0, 0, 0], and two sizes may differ by one",
        ),
        "by remainder": (
            changed(f"{SHARE} => [item for item in items if item % world_size == rank]"),
            BY_PLACE,
        ),
        "by hash": (
            changed(f"{SHARE} => [item for item in items if hash(item) % world_size == rank]"),
            BY_PLACE,
        ),
        "by index": (  # which finds the first of two equal items
            changed(
                f"{SHARE} => [item for item in items if items.index(item) % world_size == rank]"
            ),
            BY_PLACE,
        ),
        "the places": (
            changed(f"{SHARE} => list(range(rank, len(items), world_size))"),
            "deal the items themselves, not their places",
        ),
        "always four ranks": (
            changed("world_size] => 4]"),
            "the item with value 8 is on no rank. With 4 ranks it was right: what in your function",
        ),
        "the process group": (
            changed(f"{SHARE} => items[dist.get_rank() :: dist.get_world_size()]"),
            "use its arguments `rank` and `world_size`",
        ),
        "a generator": (
            changed(f"{SHARE} => (item for item in {SHARE})"),
            "rank 0 gets a generator, and it should get a list of items",
        ),
        "a tuple": (
            changed(f"{SHARE} => tuple({SHARE})"),
            "rank 0 gets a tuple, and it should get a list of items",
        ),
        "sorted": (
            changed(f"{SHARE} => sorted(items)[rank::world_size]"),
            "'<' not supported between instances of",
        ),
        "as a tensor": (
            changed(f"{SHARE} => torch.tensor(items)[rank::world_size].tolist()"),
            "too many dimensions 'str'",
        ),
        "one item": (changed(f"{SHARE} => items[rank]"), "it should get a list of items"),
        "takes them away": (
            changed(f"{SHARE} => [items.pop() for _ in range(len(items) // (world_size - rank))]"),
            "the list of items was changed",
        ),
    },
)

# ---- 0.2 the mean of everything


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


def with_room(local, nothing=float("nan")):
    """Pads to the longest, with nan where nothing is."""
    longest = torch.tensor(len(local))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    padded = torch.full((int(longest),), nothing)
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    return torch.cat(parts).nanmean()


def with_empty_places(local):
    return with_room(local, nothing=0.0)


def takes_what_it_returns(local):
    total = dist.all_reduce(local.sum())
    count = dist.all_reduce(torch.tensor(len(local)))
    return total / count


SEND = "dist.all_reduce(both)"
MEAN = "both[0] / both[1]"
COUNT = "count = torch.tensor(float(len(local)))"

MEANS = Answers(
    solves="mean_over_ranks",
    right={
        "in two calls": two_calls,
        "objects": with_objects,
        "padded": with_room,
        "in the background": changed(f"{SEND} => dist.all_reduce(both, async_op=True).wait()"),
    },
    wrong={
        "mean of means": (
            changed("local.sum() => local.mean()", f"{COUNT} => count = torch.tensor(1.0)"),
            "a mean of means",
        ),
        "own mean": (changed(f"{SEND} => pass"), "nothing was sent"),
        "own mean after all": (
            changed(f"return {MEAN} => return local.mean()"),
            "what came from the others is not in it",
        ),
        "computes with what all_reduce returns": (
            takes_what_it_returns,
            "`all_reduce` itself returns nothing, as the result is put into what it is given",
        ),
        "unpacks what all_reduce returns": (
            changed(f"{SEND} => total, count = {SEND}"),
            "`all_reduce` itself returns nothing",
        ),
        "returns what all_reduce returns": (
            changed(f"return {MEAN} => return dist.all_reduce(local.mean())"),
            "it returned None: is there a `return`? `all_reduce` itself returns nothing",
        ),
        "empty places counted": (
            with_empty_places,
            "was divided by 16, and there are 10 values: does your count hold places",
        ),
        "divided by its own count": (
            changed(f"{MEAN} => both[0] / len(local)"),
            "and is it the same on every rank?",
        ),
        "no tensor": (
            changed(f"{SEND} => dist.all_reduce(len(local))"),
            "of type int: torch.tensor(...) makes one",
        ),
        "half precision": (
            changed("torch.stack([total, count]) => torch.stack([total, count]).half()"),
            "of how many bits are the numbers",
        ),
        "no wait": (
            changed(f"{SEND} => dist.all_reduce(both, async_op=True)"),
            "1 all-reduce started and 0 waited for",
        ),
        "always ten values": (
            changed(f"{MEAN} => both[0] / 10"),
            "with 10 values in all it is right, but not with",
        ),
        "count from the ranks": (
            changed(f"{COUNT} => count = torch.tensor(dist.get_rank() + 1.0)"),
            "with 10 values in all it is right, but not with",
        ),
        "fractions lost": (
            changed("total = local.sum() => total = torch.tensor(float(int(local.sum())))"),
            "is a fraction lost on the way?",
        ),
        "a constant": (changed(f"{SEND} => return 13.15"), "nothing was sent"),
        "text": (changed(f"{MEAN} => '13.15'"), "it returned '13.15', and the mean is a number"),
        "nan": (changed(f"{SEND} => both *= 0; {SEND}"), "rank 0 returned nan"),
        "in place": (changed(f"{SEND} => {SEND}; local.zero_()"), "local values were changed"),
        "the sum": (changed(f"{MEAN} => both[0]"), "the sum of all values: how many"),
        "divided by the ranks": (
            changed(f"{MEAN} => both[0] / dist.get_world_size()"),
            "divided by the number of ranks",
        ),
        "unequal sizes": (
            changed(f"{SEND} => dist.all_reduce(local)"),
            "rank 1 calls all_reduce of float32 [1]",
        ),
        "rank 0 only": (
            changed(f"{SEND} => if dist.get_rank() == 0: {SEND}"),
            "rank 0 waits in all_reduce",
        ),
        "two numbers": (
            changed(f"return {MEAN} => return both"),
            "it returned 2 numbers, and the mean is one",
        ),
    },
)

ANSWERS = {"0.1": SHARES, "0.2": MEANS}
