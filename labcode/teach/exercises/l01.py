"""Checks of lesson 01, processes and collectives. Each assertion's text is a hint."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from labcode.perf import alpha_beta as comm
from labcode.pool.ranks import RankError
from labcode.teach.check import due

ROUNDS = 10  # one race can go well by luck


class Traffic(TorchDispatchMode):
    """Sees every call of this rank to torch.distributed while it is active.

    Attributes:
        sent: Bytes of each tensor sent point to point.
        collectives: Names of the collectives called.
    """

    def __init__(self):
        super().__init__()
        self.sent, self.collectives = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name == "c10d::send":
            self.sent.append(sum(tensor.nbytes for tensor in args[0]))
        elif name.startswith("c10d::") and "recv" not in name:
            self.collectives.append(name.removeprefix("c10d::").strip("_"))
        return func(*args, **(kwargs or {}))


def _run(ranks, fn, *args):
    """`ranks.run`, with a hint in place of the raw message when ranks waited for each other in vain."""
    try:
        return ranks.run(fn, *args)
    except RankError as error:
        if any(sign in str(error) for sign in ("Timed out waiting", "timed out", "wait timeout")):
            raise AssertionError(
                f"ranks waited {ranks.timeout_s:g} s for a message that never came: does each send meet a receive, and does "
                "every rank get as far as the same call?"
            ) from None
        raise


# ---- 1.1


def _arrive(rank, my_rank, port):
    """The numbers that this process got, twice in each round."""
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=5))
    numbers = []
    for number in range(ROUNDS):
        fresh = dist.PrefixStore(f"round {number}", store)
        dist.barrier()  # all of them at the same time
        numbers.append([my_rank(fresh), my_rank(fresh)])
    return numbers


def hand_out(my_rank, ranks) -> None:
    """The learner's `my_rank(store)`: each process arrives twice, as two processes would."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        results = ranks.run(_arrive, my_rank, store.port)
    except RankError as error:
        assert "timeout" not in str(error), (
            "get waits for a key that nobody has set: who is the first to set it? `add` starts from 0 by itself"
        )
        raise
    arrivals = 2 * ranks.n
    for per_rank in zip(*results):
        numbers = [number for pair in per_rank for number in due(pair)]
        due(*numbers)
        assert all(type(number) is int for number in numbers), (
            f"{numbers[0]!r} is not a whole number"
        )
        twice = sorted({number for number in numbers if numbers.count(number) > 1})
        assert not twice, (
            f"{arrivals} arrivals, and number {twice[0]} was given out more than once: between looking at a number in the "
            "store and writing the next one, another process can come in"
        )
        assert min(numbers) == 0, (
            f"the smallest of {arrivals} numbers is {min(numbers)}: ranks count from 0"
        )
        assert max(numbers) == arrivals - 1, (
            f"{arrivals} arrivals got {sorted(numbers)}: no number may be left out"
        )


# ---- 1.2


def _gather(rank, phase, length):
    p = dist.get_world_size()
    chunks = [torch.full((length,), -1.0) for _ in range(p)]
    own = (rank + 1) % p
    chunks[own] = torch.full((length,), 100.0 + own)  # as the reduce-scatter phase leaves it
    with Traffic() as traffic:
        reported = due(phase(chunks))
    assert not traffic.collectives, f"{traffic.collectives[0]} does the work for you: use exchange"
    for number, chunk in enumerate(chunks):
        found = chunk[0].item()
        assert (chunk == found).all(), f"chunk {number} is a mixture"
        assert found != -1, (
            f"chunk {number} never became complete here: which chunk did the left neighbour complete last?"
        )
        assert found == 100 + number, (
            f"chunk {number} holds {found:g} and not the finished {100 + number}: copied or added to, and into which place?"
        )
    wanted = (p - 1) * 4 * length
    assert sum(traffic.sent) == wanted, (
        f"{sum(traffic.sent)} bytes were sent where {wanted} are enough"
    )
    assert reported == wanted, f"it returns {reported}, but {wanted} bytes were sent"


def all_gather_phase(phase, ranks) -> None:
    """The learner's `all_gather_phase(chunks)`: every chunk everywhere, with p-1 chunks sent by each rank."""
    for length in (1, 5):
        _run(ranks, _gather, phase, length)


# ---- 1.3


def bucket(bucket_bytes) -> None:
    """The learner's `bucket_bytes(link, p, share)`: the size at which latency takes that share of a ring all-reduce."""
    for link, p, share in (
        (comm.Link(1e-4, 1e9), 4, 0.5),
        (comm.Link(1e-4, 1e9), 4, 0.1),
        (comm.Link(3e-6, 200e9), 8, 0.2),
        (comm.Link(5e-6, 10e9), 64, 0.02),
    ):
        size = due(bucket_bytes(link, p, share))
        case = f"alpha {link.alpha_s:g} s, beta {link.beta_bytes_per_s:g} B/s, p = {p}: "
        assert size > 0, case + f"a bucket of {size:g} bytes"
        latency = comm.messages("all_reduce", p) * link.alpha_s
        found = latency / comm.time_s("all_reduce", p, size, link)
        assert abs(found / share - 1) < 1e-6, (
            case
            + f"in a bucket of {size / 1e6:.3g} MB latency takes {found:.1%} of the time, and {share:.0%} were allowed"
        )


# ---- 1.4


def _mean(rank, mean_loss):
    loss = torch.tensor(10.0 * (rank + 1))
    mean = mean_loss(rank, loss)
    assert loss.item() == 10.0 * (rank + 1), (
        "the loss that it was given has changed: all_reduce works in place"
    )
    return mean.item() if isinstance(mean, torch.Tensor) else mean


def mended(mean_loss, ranks) -> None:
    """The learner's `mean_loss(rank, loss)`: the mean on rank 0, None elsewhere, and nobody is left waiting."""
    first, *others = _run(ranks, _mean, mean_loss)
    expected = 10.0 * (ranks.n + 1) / 2
    assert first is not None, "rank 0 returned nothing"
    assert all(value is None for value in others), (
        f"another rank returned {next(v for v in others if v is not None)}, not None"
    )
    assert abs(first / (ranks.n * expected) - 1) > 1e-6 or ranks.n == 1, (
        "that is the sum of the losses, not their mean"
    )
    assert abs(first / expected - 1) < 1e-6, (
        f"rank 0 returned {first:g} and the mean is {expected:g}"
    )


# ---- 1.5


def _quick(rank, quick_all_reduce, length):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-99, 99, (length,), generator=generator).double()
    expected = x.clone()
    dist.all_reduce(expected)
    with Traffic() as traffic:
        quick_all_reduce(x)
    assert not traffic.collectives, (
        f"{traffic.collectives[0]} does the work for you: use ring.exchange, send and recv"
    )
    assert traffic.sent or not length, "nothing was sent from here"
    assert torch.equal(x, expected), (
        f"x holds {x[0].item():g} and not the sum {expected[0].item():g}; it is changed in place"
    )
    return len(traffic.sent)


def quick(quick_all_reduce, ranks) -> None:
    """The learner's `quick_all_reduce(x)` on four ranks: any algorithm in which no rank sends more than two messages."""
    for length in (1, 6):
        sent = _run(ranks, _quick, quick_all_reduce, length)
        limit = ranks.n.bit_length() - 1
        assert max(sent) <= limit, (
            f"the sum is right, but one rank sends {max(sent)} messages; {limit} are allowed"
        )
