"""Checks of lesson 01, processes and collectives. The text of each assertion is a hint."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labcode.comm import ring
from labcode.comm.counting import Collective, CollectiveSpy
from labcode.pool.ranks import Ranks
from labcode.teach.check import Exercise
from labcode.teach.exercises.on_ranks import GROUPS, in_groups, without

EXERCISES = {
    "1.1": Exercise(
        praise="every chunk has all contributions, and each rank sent p - 1 chunks, no more",
        hints=(
            "In step 0 rank r sends chunk r. What did it receive meanwhile, and what will it "
            "send in step 1?",
            "Counted from 0, rank r sends chunk r - step. Its left neighbour is one rank lower: "
            "which chunk does that one send?",
            "`arrived` is only a place to receive into. Where must its numbers go?",
        ),
    ),
    "1.2": Exercise(
        praise="the sum is in x itself, and each rank sent 2 (p - 1)/p of it",
        hints=(
            "After the first half rank r has the finished chunk r + 1. It sends that one first.",
            "In the second half nothing is added: `exchange` can receive straight into "
            "the chunk that comes next.",
            "Is `chunks` a view of x, or a copy? Change a chunk and look at x.",
        ),
    ),
    "1.3": Exercise(
        praise="everybody who has the tensor helps to spread it",
        hints=(
            "For root 0: in the round in which the ranks 0 to k - 1 have the tensor, who sends to "
            "whom?",
            "For another root: number the ranks anew, starting from the root.",
            "If p is not a power of two, some ranks have nobody to send to in the last round.",
        ),
    ),
    "1.4": Exercise(
        praise="all ranks take part, and one of them uses the result",
        hints=(
            "A collective needs all ranks of the group. What may depend on the rank: the call, or "
            "what is done with its result?",
            "all_reduce works in place. On which tensor should it work?",
        ),
    ),
}


class _Traffic(CollectiveSpy):
    """What this rank sends and calls while it is active.

    Attributes:
        messages: (sender, receiver) of each message, as ranks of the world, in order.
        sent_bytes: Of each message that this rank sends.
        collectives: Names of the collectives called, barriers included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[int, ...]] = []
        self.sent_bytes: list[int] = []
        self.collectives: list[str] = []

    def on_collective(self, call: Collective, start: Callable[[], Any]) -> Any:
        if call.name in ("send", "recv"):
            self.messages.append(call.ranks)
        else:
            self.collectives.append(call.name)
        if call.name == "send":
            self.sent_bytes.append(call.num_bytes)
        return start()


def _no_collectives(traffic: _Traffic) -> None:
    assert not traffic.collectives, (
        f"{traffic.collectives[0]} does the work for you: use exchange, send and recv"
    )


def _check_bytes(traffic: _Traffic, wanted: int) -> None:
    sent = sum(traffic.sent_bytes)
    assert sent == wanted, (
        f"the numbers are right, but {sent} bytes were sent in {len(traffic.sent_bytes)} messages, "
        f"and {wanted} are enough: one chunk in each step, and no step too many"
    )


# ---- 1.1

CHUNK = 1_000_000.0  # what tells one chunk's numbers from another's


def _contribution(rank: int, chunk: int, length: int) -> torch.Tensor:
    """What a rank of the group puts into a chunk: a power of ten for each rank, so that a sum
    shows whose numbers are in it.
    """
    return torch.full((length,), 10.0**rank + CHUNK * chunk, dtype=torch.float64)


def _sum_of_chunk(p: int, chunk: int, length: int) -> torch.Tensor:
    total = torch.zeros(length, dtype=torch.float64)
    for rank in range(p):
        total += _contribution(rank, chunk, length)
    return total


def _whose(value: float, chunk: int, p: int) -> str:
    """Which ranks' numbers are in a sum, in words."""
    for count in range(p + 1):
        rest = round(value - CHUNK * chunk * count)
        digits = f"{rest:0{p}d}" if rest >= 0 else ""
        if len(digits) == p and sum(map(int, digits)) == count:
            times = {rank: int(digits[p - 1 - rank]) for rank in range(p)}
            twice = [str(rank) for rank, number in times.items() if number > 1]
            missing = [str(rank) for rank, number in times.items() if number == 0]
            if twice:
                return f"what number {', '.join(twice)} put in, more than once"
            if missing:
                return f"nothing from number {', '.join(missing)} of the group"
    return "a mixture of different chunks: is the chunk that arrives the one you add it to?"


def _reduce_scatter(group: dist.ProcessGroup, half: Callable[..., Any], length: int) -> None:
    rank = group.rank()
    p = group.size()
    tensors = []
    for number in range(p):
        tensors.append(_contribution(rank, number, length))
    chunks = list(tensors)
    library = without(ring.reduce_scatter_phase, ring.all_reduce, ring.star_all_reduce)
    with library, _Traffic() as traffic:
        half(chunks, group)
    _no_collectives(traffic)
    assert traffic.sent_bytes, "nothing was sent: call exchange in each step"
    own = (rank + 1) % p
    _check_in_place(tensors, chunks, own, p)
    _check_finished(tensors, own, p)
    _check_bytes(traffic, (p - 1) * tensors[0].nbytes)


def _check_in_place(
    tensors: Sequence[torch.Tensor], chunks: Sequence[torch.Tensor], own: int, p: int
) -> None:
    """The sum is in the tensor that was in the list at the beginning."""
    expected = _sum_of_chunk(p, own, len(tensors[own]))
    elsewhere = chunks[own] is not tensors[own] and torch.equal(chunks[own], expected)
    assert not elsewhere, (
        f"chunks[{own}] has the right numbers, but it is a new tensor: write into the one that was "
        "there, with += or copy_, or the large tensor of exercise 1.2 will not change"
    )


def _check_finished(tensors: Sequence[torch.Tensor], own: int, p: int) -> None:
    length = len(tensors[own])
    expected = _sum_of_chunk(p, own, length)
    found = tensors[own]
    if torch.equal(found, expected):
        return
    finished = []
    unchanged = True
    for number, tensor in enumerate(tensors):
        if torch.equal(tensor, _sum_of_chunk(p, number, length)):
            finished.append(number)
        unchanged &= torch.equal(tensor, _contribution((own - 1) % p, number, length))
    assert not unchanged, (
        "messages came and went, but all chunks are as they were: add what arrived to a chunk, in "
        "place (`a = a + b` makes a new tensor, `a += b` changes a)"
    )
    assert not finished, (
        f"chunks[{finished[0]}] is finished, and it should be chunks[{own}]: look again at which "
        "chunk a rank sends in its first step"
    )
    assert not torch.equal(p * found, expected), (
        f"chunks[{own}] holds the mean of all contributions, not their sum"
    )
    raise AssertionError(
        f"chunks[{own}] should be finished, but it holds {_whose(found[0].item(), own, p)}"
    )


def reduce_scatter_half(half: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `reduce_scatter_half(chunks, group)`, on all ranks and on three of them."""
    for length in (1, 5):
        in_groups(ranks, GROUPS, _reduce_scatter, half, length)


# ---- 1.2


def _all_reduce(
    group: dist.ProcessGroup, ring_all_reduce: Callable[..., Any], shape: Sequence[int]
) -> None:
    p = group.size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randint(1, 99, tuple(shape), generator=generator).double()
    before = x.clone()
    expected = x.clone()
    dist.all_reduce(expected, group=group)
    library = without(ring.all_reduce, ring.star_all_reduce, ring.all_gather_phase)
    with library, _Traffic() as traffic:
        returned = ring_all_reduce(x, group)
    _no_collectives(traffic)
    _check_sum(x, before, expected, returned, p)
    _check_bytes(traffic, 2 * (p - 1) * x.nbytes // p)
    _check_neighbours(traffic, group)


def _check_sum(
    x: torch.Tensor, before: torch.Tensor, expected: torch.Tensor, returned: Any, p: int
) -> None:
    if torch.equal(x, expected):
        return
    if isinstance(returned, torch.Tensor) and returned.numel() == expected.numel():
        assert not torch.equal(returned.view_as(expected), expected), (
            "what is returned is the sum, but x is not: the sum must be written into x itself"
        )
    assert not torch.equal(x, before), (
        "x is as it was before: the sum must be written into x itself, so the chunks must be views "
        "of x and not copies, and a line `x = ...` only gives the name to another tensor"
    )
    assert not torch.equal(p * x, expected), "x holds the mean over the group, not the sum"
    right = []
    too_large = []
    parts = zip(x.flatten().chunk(p), expected.flatten().chunk(p))
    for number, (found, wanted) in enumerate(parts):
        if torch.equal(found, wanted):
            right.append(str(number))
        elif (found > wanted).all():
            too_large.append(str(number))
    assert not too_large, (
        f"chunk {', '.join(too_large)} of x holds more than the sum: the second half passes "
        "finished chunks on, and adds nothing"
    )
    assert right != [], (
        "no chunk of x holds the sum: does the first half work on views of x, in place, and which "
        "chunk does the second half write over first?"
    )
    raise AssertionError(
        f"only chunk {', '.join(right)} of x holds the sum: which chunk did the left neighbour "
        "finish last, which one does it send next, and is each copied to its own place?"
    )


def _check_neighbours(traffic: _Traffic, group: dist.ProcessGroup) -> None:
    members = dist.get_process_group_ranks(group)
    right = (group.rank() + 1) % group.size()
    for sender, receiver in traffic.messages:
        if sender == dist.get_rank():
            assert receiver == members[right], (
                f"it sent to number {members.index(receiver)} of the group: on a ring it sends to "
                f"its right neighbour only, which is number {right}"
            )


def ring_all_reduce(answer: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `ring_all_reduce(x, group)`, on all ranks and on three of them."""
    for shape in ((12,), (4, 6)):
        in_groups(ranks, GROUPS, _all_reduce, answer, shape)


# ---- 1.3

FIRST = 100.0  # the rank with number r in the group holds 100 + r


class _Spread(NamedTuple):
    """What one rank did to spread a tensor.

    Args:
        holds: The first number of its tensor afterwards.
        messages: (sender, receiver) in its own order, as numbers in the group.
    """

    holds: float
    messages: list[tuple[int, int]]


def _spread(group: dist.ProcessGroup, tree_broadcast: Callable[..., Any], root: int) -> _Spread:
    members = dist.get_process_group_ranks(group)
    x = torch.full((3,), FIRST + group.rank())
    with _Traffic() as traffic:
        returned = tree_broadcast(x, root, group)
    assert not traffic.collectives, (
        f"{traffic.collectives[0]} does the work for you: use send and recv"
    )
    for rank in itertools.chain(*traffic.messages):
        assert rank in members or rank < 0, (
            f"a message went to or from rank {rank} of the world, which is not in the group: use "
            "group_dst and group_src, which count within the group"
        )
    if isinstance(returned, torch.Tensor) and returned.flatten()[0] == FIRST + root:
        assert x[0] == FIRST + root, (
            "what is returned is the root's tensor, but x is not: receive into x itself"
        )
    messages = []
    for sender, receiver in traffic.messages:
        # a receive from any rank does not say from whom
        place = members.index(sender) if sender in members else -1
        messages.append((place, members.index(receiver)))
    return _Spread(x[0].item(), messages)


def tree_broadcast(answer: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `tree_broadcast(x, root, group)`: the rubric of the exercise."""
    for root in (0, 1, 2):
        judge = partial(_check_spread, root=root)
        in_groups(ranks, GROUPS, _spread, answer, root, judge=judge)


def _check_spread(spreads: Sequence[_Spread], root: int) -> None:
    p = len(spreads)
    case = f"in a group of {p} with root {root}, "
    held = {spread.holds for spread in spreads}
    assert root == 0 or held != {FIRST}, (
        f"{case}everybody holds the tensor of number 0 afterwards: what does `root` change?"
    )
    for number, spread in enumerate(spreads):
        source = spread.holds - FIRST
        of = "its own tensor" if source == number else f"the tensor of number {source:g}"
        assert source == root, f"{case}number {number} holds {of} afterwards"
        received = [message for message in spread.messages if message[1] == number]
        wanted = 0 if number == root else 1
        assert len(received) == wanted, (
            f"{case}number {number} received {len(received)} times, and {wanted} is enough"
        )
    least = (p - 1).bit_length()
    took = _rounds(spreads, root)
    assert took <= least, (
        f"{case}it is right, but it takes {took} rounds, and {least} are enough if everybody "
        "who has the tensor sends it on"
    )


def _rounds(spreads: Sequence[_Spread], root: int) -> int:
    """The round in which the last rank gets the tensor, if each sends once in a round."""
    has_since = {root: 0}
    waiting = [root]
    while waiting:
        sender = waiting.pop()
        round_number = has_since[sender]
        for source, to in spreads[sender].messages:
            if source == sender:
                round_number += 1
                has_since[to] = round_number
                waiting.append(to)
    return max(has_since.values())


# ---- 1.4


def _mean(group: dist.ProcessGroup, mean_loss: Callable[..., Any]) -> float | None:
    """What the learner's function returns on this rank, whose loss is 10 (number + 1)."""
    own = 10.0 * (group.rank() + 1)
    loss = torch.tensor(own)
    mean = mean_loss(loss, group)
    assert loss.item() == own, "the loss that it was given has changed: all_reduce works in place"
    if isinstance(mean, torch.Tensor):
        assert mean.numel() == 1, f"it returned {mean.numel()} numbers, and the mean is one"
        return mean.item()
    return mean


def mended(mean_loss: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `mean_loss(loss, group)`: the mean on the group's number 0, None elsewhere."""
    in_groups(ranks, GROUPS, _mean, mean_loss, judge=_check_mean)


def _check_mean(means: Sequence[Any]) -> None:
    first, *others = means
    p = len(means)
    case = f"in a group of {p}, "
    if first is None:
        speakers = [str(number) for number, value in enumerate(means) if value is not None]
        assert not speakers, (
            f"{case}number {speakers[0]} of the group returned the mean, and number 0 should: is "
            "your rank the number within the group?"
        )
        raise AssertionError(
            f"{case}it returned None on every rank, and number 0 should return the mean"
        )
    for number, value in enumerate(others, 1):
        assert value is None, f"{case}number {number} returned {value:g}, and it should be None"
    expected = 10.0 * (p + 1) / 2
    total = p * expected
    assert abs(first / total - 1) > 1e-6, "that is the sum of the losses, not their mean"
    assert abs(first / expected - 1) < 1e-6, (
        f"{case}number 0 returned {first:g}, and the mean of the losses is {expected:g}"
    )
