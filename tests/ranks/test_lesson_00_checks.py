"""Checks of lesson 00: right answers pass, plausible wrong ones get the hint meant for them."""

import math

import pytest
import torch
import torch.distributed as dist

from labcode.teach.exercises import l00


def in_a_row(items, rank, world_size):
    first = len(items) * rank // world_size
    stop = len(items) * (rank + 1) // world_size
    return items[first:stop]


SHARES = {  # answer: part of the hint, None for a right answer
    "in turn": (lambda items, rank, world_size: items[rank::world_size], None),
    "in a row": (in_a_row, None),
    "the rest is forgotten": (
        lambda items, rank, world_size: items[
            rank * (len(items) // world_size) : (rank + 1) * (len(items) // world_size)
        ],
        "only 8 were dealt out",
    ),
    "everything to all": (lambda items, rank, world_size: items, "some item is on two ranks"),
    "all to rank 0": (
        lambda items, rank, world_size: items if rank == 0 else [],
        "deal more evenly",
    ),
}


@pytest.mark.parametrize("answer", SHARES)
def test_shares(judged, answer):
    fn, hint = SHARES[answer]
    assert judged(lambda: l00.my_share(fn), hint)


def all_reduced(*numbers):
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return total


def right(local):
    total, count = all_reduced(local.sum(), len(local))
    return total / count


def mean_of_means(local):
    return all_reduced(local.mean())[0] / dist.get_world_size()


def in_place(local):
    mean = right(local)
    local.zero_()
    return mean


MEANS = {
    "right": (right, None),
    "right, as a number": (lambda local: right(local).item(), None),
    "mean of means": (mean_of_means, "mean of means"),
    "own mean": (lambda local: local.mean(), "the ranks disagree"),
    "in place": (in_place, "local values were changed"),
    "sum": (lambda local: all_reduced(local.sum())[0], "the mean is"),
}


@pytest.mark.parametrize("answer", MEANS)
def test_mean_of_all(judged, ranks4, answer):
    fn, hint = MEANS[answer]
    assert judged(lambda: l00.distributed_mean(fn, ranks4), hint)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (math.log(50257), None),
        (10.825, None),
        (math.log2(50257), "in bits"),
        (1 / 50257, "equally likely"),
    ],
)
def test_first_loss(judged, answer, hint):
    assert judged(lambda: l00.first_loss(answer), hint)
