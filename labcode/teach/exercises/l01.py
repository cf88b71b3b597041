"""Checks of lesson 01, processes and collectives. The text of each assertion is a hint."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from labcode.comm.counting import Collective, CollectiveSpy
from labcode.perf.alpha_beta import Link, messages, time_s
from labcode.pool.answers import HangError
from labcode.pool.ranks import RankError, Ranks
from labcode.teach.check import Exercise, due

EXERCISES = {
    "1.1": Exercise("ten times eight simultaneous arrivals, no number twice"),
    "1.2": Exercise("three quarters of the tensor sent by each rank, not a byte more"),
    "1.3": Exercise("at share = 1/2 it is p alpha beta, the bend of the curve"),
    "1.4": Exercise("all ranks take part, one of them prints"),
    "1.5": Exercise("two rounds in place of six"),
}

ROUNDS = 10  # one race can go well by luck


class _Traffic(CollectiveSpy):
    """What this rank sends while it is active.

    Attributes:
        sent_bytes: Of each message sent point to point.
        collectives: Names of the collectives called, barriers included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes: list[int] = []
        self.collectives: list[str] = []

    def on_collective(self, call: Collective, start: Callable[[], Any]) -> Any:
        if call.name == "send":
            self.sent_bytes.append(call.num_bytes)
        elif call.name != "recv":
            self.collectives.append(call.name)
        return start()


def _run(ranks: Ranks, fn: Callable[..., Any], *args: Any) -> list:
    """`ranks.run`, with a hint in place of gloo's message when ranks waited in vain."""
    try:
        return ranks.run(fn, *args)
    except RankError as error:
        if not _is_timeout(error):
            raise
        raise AssertionError(
            f"ranks waited {ranks.timeout_s:g} s for a message that never came: "
            "does each send meet a receive, and does every rank get as far as the same call?"
        ) from None


def _is_timeout(error: RankError) -> bool:
    if isinstance(error, HangError):
        return True
    text = str(error)
    return any(sign in text for sign in ("Timed out waiting", "timed out", "wait timeout"))


# ---- 1.1


def _arrive(rank: int, my_rank: Callable[[dist.Store], Any], port: int) -> list[list]:
    """The numbers that this process got, twice in each round."""
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=5))
    numbers = []
    for number in range(ROUNDS):
        fresh = dist.PrefixStore(f"round {number}", store)
        dist.barrier()  # so that all processes arrive at the same time
        first = my_rank(fresh)
        second = my_rank(fresh)
        numbers.append([first, second])
    return numbers


def hand_out(my_rank: Callable[[dist.Store], Any], ranks: Ranks) -> None:
    """The learner's `my_rank(store)`: each process arrives twice, as two processes would."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        results = ranks.run(_arrive, my_rank, store.port)
    except RankError as error:
        assert "timeout" not in str(error), (
            "get waits for a key that nobody has set: "
            "who is the first to set it? `add` starts from 0 by itself"
        )
        raise
    for pairs in zip(*results):  # of one round, a pair from each rank
        numbers = []
        for pair in pairs:
            numbers += due(pair)
        _check_numbers(list(numbers))


def _check_numbers(numbers: list) -> None:
    """The numbers of one round are 0, 1, 2, ..., each given out once."""
    due(*numbers)
    arrivals = len(numbers)
    for number in numbers:
        assert type(number) is int, f"{number!r} is not a whole number"
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    assert not twice, (
        f"{arrivals} arrivals, and number {twice[0]} was given out more than once: "
        "between looking at a number in the store and writing the next one, "
        "another process can come in"
    )
    assert min(numbers) == 0, (
        f"the smallest of {arrivals} numbers is {min(numbers)}: ranks count from 0"
    )
    assert max(numbers) == arrivals - 1, (
        f"{arrivals} arrivals got {sorted(numbers)}: no number may be left out"
    )


# ---- 1.2


def _gather(rank: int, phase: Callable[[list[torch.Tensor]], Any], length: int) -> None:
    p = dist.get_world_size()
    chunks = [torch.full((length,), -1.0) for _ in range(p)]
    own = (rank + 1) % p
    chunks[own] = torch.full((length,), 100.0 + own)  # as the reduce-scatter phase leaves it
    with _Traffic() as traffic:
        reported = due(phase(chunks))
    assert not traffic.collectives, f"{traffic.collectives[0]} does the work for you: use exchange"
    for number, chunk in enumerate(chunks):
        _check_chunk(number, chunk)
    wanted = (p - 1) * 4 * length  # float32
    sent = sum(traffic.sent_bytes)
    assert sent == wanted, f"{sent} bytes were sent where {wanted} are enough"
    assert reported == wanted, f"it returns {reported}, but {wanted} bytes were sent"


def _check_chunk(number: int, chunk: torch.Tensor) -> None:
    """Finished chunk number i holds 100 + i everywhere."""
    found = chunk[0].item()
    assert (chunk == found).all(), f"chunk {number} is a mixture"
    assert found != -1, (
        f"chunk {number} never became complete here: "
        "which chunk did the left neighbour complete last?"
    )
    assert found == 100 + number, (
        f"chunk {number} holds {found:g} and not the finished {100 + number}: "
        "copied or added to, and into which place?"
    )


def all_gather_phase(phase: Callable[[list[torch.Tensor]], Any], ranks: Ranks) -> None:
    """The learner's `all_gather_phase(chunks)`: each rank sends p-1 chunks, and has all of them."""
    for length in (1, 5):
        _run(ranks, _gather, phase, length)


# ---- 1.3

BUCKETS = (  # link, ranks, part of the time that latency may take
    (Link(1e-4, 1e9), 4, 0.5),
    (Link(1e-4, 1e9), 4, 0.1),
    (Link(3e-6, 200e9), 8, 0.2),
    (Link(5e-6, 10e9), 64, 0.02),
)


def bucket(bucket_bytes: Callable[[Link, int, float], Any]) -> None:
    """The learner's `bucket_bytes(link, p, share)`: where latency takes that share of a ring."""
    for link, p, share in BUCKETS:
        size = due(bucket_bytes(link, p, share))
        alpha = f"alpha {link.alpha_s:g} s"
        beta = f"beta {link.beta_bytes_per_s:g} B/s"
        case = f"{alpha}, {beta}, p = {p}: "
        assert size > 0, case + f"a bucket of {size:g} bytes"
        latency_s = messages("all_reduce", p) * link.alpha_s
        found = latency_s / time_s("all_reduce", p, size, link)
        assert abs(found / share - 1) < 1e-6, (
            case + f"in a bucket of {size / 1e6:.3g} MB latency takes {found:.1%} of the time, "
            f"and {share:.0%} were allowed"
        )


# ---- 1.4


def _mean(rank: int, mean_loss: Callable[[int, torch.Tensor], Any]) -> float | None:
    """What the learner's function returns on this rank, whose loss is 10 (rank + 1)."""
    own = 10.0 * (rank + 1)
    loss = torch.tensor(own)
    mean = mean_loss(rank, loss)
    assert loss.item() == own, "the loss that it was given has changed: all_reduce works in place"
    if isinstance(mean, torch.Tensor):
        return mean.item()
    return mean


def mended(mean_loss: Callable[[int, torch.Tensor], Any], ranks: Ranks) -> None:
    """The learner's `mean_loss(rank, loss)`: the mean on rank 0, None elsewhere, nobody waits."""
    first, *others = _run(ranks, _mean, mean_loss)
    expected = 10.0 * (ranks.n + 1) / 2
    total = ranks.n * expected
    assert first is not None, "rank 0 returned nothing"
    for value in others:
        assert value is None, f"another rank returned {value}, not None"
    is_the_sum = abs(first / total - 1) <= 1e-6
    assert not is_the_sum or ranks.n == 1, "that is the sum of the losses, not their mean"
    assert abs(first / expected - 1) < 1e-6, (
        f"rank 0 returned {first:g} and the mean is {expected:g}"
    )


# ---- 1.5


def _quick(rank: int, quick_all_reduce: Callable[[torch.Tensor], Any], length: int) -> int:
    """The number of messages that this rank sent for a correct sum."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-99, 99, (length,), generator=generator).double()
    expected = x.clone()
    dist.all_reduce(expected)
    with _Traffic() as traffic:
        quick_all_reduce(x)
    assert not traffic.collectives, (
        f"{traffic.collectives[0]} does the work for you: use ring.exchange, send and recv"
    )
    assert traffic.sent_bytes, "nothing was sent from here"
    assert torch.equal(x, expected), (
        f"x holds {x[0].item():g} and not the sum {expected[0].item():g}; it is changed in place"
    )
    return len(traffic.sent_bytes)


def quick(quick_all_reduce: Callable[[torch.Tensor], Any], ranks: Ranks) -> None:
    """The learner's `quick_all_reduce(x)` on four ranks: at most two messages sent by each."""
    limit = ranks.n.bit_length() - 1
    for length in (1, 6):
        sent = _run(ranks, _quick, quick_all_reduce, length)
        assert max(sent) <= limit, (
            f"the sum is right, but one rank sends {max(sent)} messages; {limit} are allowed"
        )
