"""Checks of lesson 01: right answers pass, plausible wrong ones get the hint meant for them."""

import time

import pytest
import torch
import torch.distributed as dist

from labcode.comm import ring
from labcode.pool.ranks import RankError, Ranks
from labcode.teach.exercises import l01

# ---- 1.1


def look_then_write(store):
    """The race: between the two lines another process comes in."""
    number = int(store.get("n")) if store.check(["n"]) else 0
    time.sleep(0.05)
    store.set("n", str(number + 1))
    return number


NUMBERS = {  # answer: part of the hint, None for a right answer
    "right": (lambda store: store.add("n", 1) - 1, None),
    "look, then write": (look_then_write, "given out more than once"),
    "from 1": (lambda store: store.add("n", 1), "ranks count from 0"),
    "gaps": (lambda store: 2 * (store.add("n", 1) - 1), "no number may be left out"),
    "a text": (lambda store: str(store.add("n", 1) - 1), "not a whole number"),
}


@pytest.mark.parametrize("answer", NUMBERS)
def test_numbers_handed_out(judged, ranks2, answer):
    fn, hint = NUMBERS[answer]
    assert judged(lambda: l01.hand_out(fn, ranks2), hint)


# ---- 1.2


def exchange(send, receive):
    rank, p = dist.get_rank(), dist.get_world_size()
    ring.exchange(send, (rank + 1) % p, receive, (rank - 1) % p, dist.group.WORLD)
    return send.nbytes


def gathered(chunks, *, first=1, steps=0, add=False):
    """The right phase, or one with a mistake: where it begins, how long it is, what it does."""
    rank, p = dist.get_rank(), dist.get_world_size()
    sent = 0
    for step in range(p - 1 + steps):
        arrived = torch.empty_like(chunks[0])
        sent += exchange(chunks[(rank + first - step) % p], arrived)
        into = chunks[(rank + first - 1 - step) % p]
        if add:
            into += arrived
        else:
            into.copy_(arrived)
    return sent


def with_all_gather(chunks):
    rank, p = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty_like(chunks[0]) for _ in range(p)]
    dist.all_gather(parts, chunks[(rank + 1) % p])
    for source, part in enumerate(parts):
        chunks[(source + 1) % p].copy_(part)
    return 0


def without_count(chunks):
    gathered(chunks)
    return 0


PHASES = {
    "right": (gathered, None),
    "begins with the wrong chunk": (
        lambda chunks: gathered(chunks, first=0),
        "never became complete",
    ),
    "adds": (lambda chunks: gathered(chunks, add=True), "copied or added to"),
    "a step too many": (lambda chunks: gathered(chunks, steps=1), "bytes were sent where"),
    "dist.all_gather": (with_all_gather, "all_gather does the work for you"),
    "does not count": (without_count, "it returns 0"),
}


@pytest.mark.parametrize("answer", PHASES)
def test_second_half_of_the_ring(judged, ranks4, answer):
    fn, hint = PHASES[answer]
    assert judged(lambda: l01.all_gather_phase(fn, ranks4), hint, also=(RankError,))


# ---- 1.3


def bucket_bytes(link, p, share):
    return p * link.alpha_s * link.beta_bytes_per_s * (1 - share) / share


BUCKETS = {
    "right": (bucket_bytes, None),
    "without the share": (
        lambda link, p, share: bucket_bytes(link, p, 0.5),
        "latency takes 50.0% of the time, and 10% were allowed",
    ),
    "bandwidth's share": (
        lambda link, p, share: bucket_bytes(link, p, 1 - share),
        "latency takes 90.0% of the time, and 10% were allowed",
    ),
    "nothing": (lambda link, p, share: 0, "a bucket of 0 bytes"),
}


@pytest.mark.parametrize("answer", BUCKETS)
def test_size_of_buckets(judged, answer):
    fn, hint = BUCKETS[answer]
    assert judged(lambda: l01.bucket(fn), hint)


# ---- 1.4


def summed(loss):
    total = loss.clone()
    dist.all_reduce(total)
    return total


def mean_with_reduce(rank, loss):
    total = loss.clone()
    dist.reduce(total, dst=0)
    return (total / dist.get_world_size()).item() if rank == 0 else None


def in_place(rank, loss):
    dist.all_reduce(loss)
    return loss / dist.get_world_size() if rank == 0 else None


def rank_0_alone(rank, loss):
    return summed(loss) / dist.get_world_size() if rank == 0 else None


def right_mean(rank, loss):
    mean = summed(loss) / dist.get_world_size()
    return mean if rank == 0 else None


def sum_on_rank_0(rank, loss):
    total = summed(loss)
    return total if rank == 0 else None


MEANS = {
    "right": (right_mean, None),
    "with reduce": (mean_with_reduce, None),
    "in place": (in_place, "the loss that it was given has changed"),
    "on all ranks": (lambda rank, loss: summed(loss) / 4, "another rank returned 25.0, not None"),
    "sum": (sum_on_rank_0, "the sum of the losses"),
    "nothing": (lambda rank, loss: None, "rank 0 returned nothing"),
    "own": (lambda rank, loss: loss if rank == 0 else None, "the mean is 25"),
}


@pytest.mark.parametrize("answer", MEANS)
def test_mean_on_rank_0(judged, ranks4, answer):
    fn, hint = MEANS[answer]
    assert judged(lambda: l01.mended(fn, ranks4), hint, also=(RankError,))


def test_ranks_that_wait_in_vain_are_explained(judged):
    with Ranks(2, timeout_s=2) as ranks:
        assert judged(lambda: l01.mended(rank_0_alone, ranks), "a message that never came")


# ---- 1.5


def doubling(x):
    arrived = torch.empty_like(x)
    for distance in (1, 2):
        partner = dist.get_rank() ^ distance
        ring.exchange(x, partner, arrived, partner, dist.group.WORLD)
        x += arrived


def round_the_ring(x):
    rank, p = dist.get_rank(), dist.get_world_size()
    passed = x.clone()
    for _ in range(p - 1):
        arrived = torch.empty_like(x)
        ring.exchange(passed, (rank + 1) % p, arrived, (rank - 1) % p, dist.group.WORLD)
        x += arrived
        passed = arrived


def one_round(x):
    arrived = torch.empty_like(x)
    partner = dist.get_rank() ^ 1
    ring.exchange(x, partner, arrived, partner, dist.group.WORLD)
    x += arrived


QUICK = {
    "right": (doubling, None),
    "round the ring": (round_the_ring, "one rank sends 3 messages; 2 are allowed"),
    "one round": (one_round, "and not the sum"),
    "a copy": (lambda x: doubling(x.clone()), "it is changed in place"),
    "dist.all_reduce": (dist.all_reduce, "all_reduce does the work for you"),
    "nothing": (lambda x: x, "nothing was sent from here"),
}


@pytest.mark.parametrize("answer", QUICK)
def test_quick_all_reduce(judged, ranks4, answer):
    fn, hint = QUICK[answer]
    assert judged(lambda: l01.quick(fn, ranks4), hint, also=(RankError,))
