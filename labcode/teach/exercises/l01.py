"""Checks of lesson 01, processes and collectives. The text of each assertion is a hint."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labcode.comm import ring
from labcode.comm.counting import BARRIER, Collective
from labcode.pool.ranks import Ranks
from labcode.pool.record import listed
from labcode.teach import tracebacks
from labcode.teach.check import Exercise, is_stub
from labcode.teach.exercises.on_ranks import GROUPS, in_groups, without
from labcode.teach.exercises.pretended import Message, play
from labcode.teach.exercises.requests import Requests

EXERCISES = {
    "1.1": Exercise(
        praise="every chunk has all contributions, and each rank sent p - 1 chunks, no more",
        hints=(
            "Follow one rank through the picture. The thick frame is the chunk that it has "
            "received in a step. Which one does it send in the next?",
            "From step to step the number of the chunk that a rank sends goes down by one. Its "
            "left neighbour is one rank lower: which chunk does that one send?",
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


class _Traffic(Requests):
    """What this rank sends and calls while it is active, and for which requests nobody waits.

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
        return super().on_collective(call, start)


def _no_collectives(traffic: _Traffic, use: str = "exchange, send and recv") -> None:
    if not traffic.collectives:
        return
    name = traffic.collectives[0]
    assert name != BARRIER, (
        "a barrier makes every rank wait for all others, and none is needed: a message that has "
        "been waited for has arrived"
    )
    raise AssertionError(f"{name} does the work for you: use {use}")


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
    if not math.isfinite(value):
        return f"{value}, which nobody put in: was something read before it had arrived?"
    for count in range(p + 1):
        rest = round(value - CHUNK * chunk * count)
        digits = f"{rest:0{p}d}" if rest >= 0 else ""
        if len(digits) == p and sum(map(int, digits)) == count:
            times = {rank: int(digits[p - 1 - rank]) for rank in range(p)}
            twice = [str(rank) for rank, number in times.items() if number > 1]
            missing = [str(rank) for rank, number in times.items() if number == 0]
            if twice:
                return f"what {_counted('number', twice)} put in, more than once"
            if missing:
                return f"nothing from {_counted('number', missing)} of the group"
    return "a mixture of different chunks: is the chunk that arrives the one you add it to?"


def _counted(noun: str, numbers: Sequence[str]) -> str:
    """ "chunk 0", "chunks 0, 1 and 2"."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {listed(numbers)}"


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
    traffic.check_waited()
    _no_collectives(traffic)
    assert traffic.sent_bytes, "nothing was sent: call exchange in each step"
    own = (rank + 1) % p
    _check_in_place(tensors, chunks, own, p)
    _check_finished(tensors, own, p)
    _check_bytes(traffic, (p - 1) * tensors[0].nbytes)
    _check_neighbours(traffic, group)


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
        try:
            returned = ring_all_reduce(x, group)
        except IndexError as error:
            text = f"{error}, with x of shape {list(shape)}: into how many chunks was it cut?"
            raise IndexError(text).with_traceback(error.__traceback__) from None
    traffic.check_waited()
    _no_collectives(traffic)
    _check_sum(x, before, expected, returned, p, len(traffic.sent_bytes))
    _check_bytes(traffic, 2 * (p - 1) * x.nbytes // p)
    _check_neighbours(traffic, group)


def _check_sum(
    x: torch.Tensor,
    before: torch.Tensor,
    expected: torch.Tensor,
    returned: Any,
    p: int,
    num_sent: int,
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
        f"{_counted('chunk', too_large)} of x {_hold(too_large)} more than the sum: the second "
        "half passes finished chunks on, and adds nothing"
    )
    assert right != [], (
        "no chunk of x holds the sum: does the first half work on views of x, in place, and which "
        "chunk does the second half write over first?"
    )
    holds = f"only {_counted('chunk', right)} of x {_hold(right)} the sum"
    assert num_sent >= p, (
        f"{holds}, after {num_sent} messages: that is the first half, and the second one is missing"
    )
    raise AssertionError(
        f"{holds}: which chunk did the left neighbour finish last, which one does it send next, "
        "and is each copied to its own place?"
    )


def _hold(numbers: Sequence[str]) -> str:
    return "hold" if len(numbers) > 1 else "holds"


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
    for shape in ((12,), (2, 6)):
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
    traffic.check_waited()
    _no_collectives(traffic, use="send and recv")
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
    everyone = GROUPS[:1]
    for root in (0, 1, 2):
        judge = partial(_check_spread, root=root)
        in_groups(ranks, everyone, _spread, answer, root, judge=judge)
    # played on one rank first: what fails there fails for the size, not for the ranks' numbers
    in_groups(ranks, everyone, _play_on_the_first, answer, judge=_check_no_hint)
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
    _check_rounds(spreads, root)


def _check_rounds(spreads: Sequence[_Spread], root: int) -> None:
    p = len(spreads)
    least = (p - 1).bit_length()
    took = _rounds(spreads, root)
    case = f"in a group of {p} with root {root}, "
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


SIZES = (3, 5, 8)  # of groups that are played on one rank, without sending


def _play_on_the_first(group: dist.ProcessGroup, answer: Callable[..., Any]) -> str:
    """A hint, or ""."""
    if group.rank() != 0:
        return ""
    try:
        for p in SIZES:
            for root in (0, p - 1):
                played = []
                for number in range(p):
                    played.append(_play(p, number, answer, root))
                _check_played(played, root)
    except AssertionError as error:
        return str(error)
    return ""


def _check_no_hint(hints: Sequence[str]) -> None:
    assert not hints[0], hints[0]


def _play(p: int, number: int, answer: Callable[..., Any], root: int) -> list[Message]:
    x = torch.full((3,), FIRST + number)
    try:
        return play(p, number, partial(answer, x, root), sent=FIRST + root)
    except Exception as error:
        if is_stub(error):
            raise
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, AssertionError):
            text = str(error)
        elif "is not part of group" in text:
            text = (
                "a message goes to or from a rank of the world which is not in the group: use "
                "group_dst and group_src, which count within the group"
            )
        place = tracebacks.place_in_cells(error)
        raise AssertionError(f"in a group of {p} with root {root}, {text}{place}") from None


def _check_played(played: Sequence[Sequence[Message]], root: int) -> None:
    """The messages of all numbers of a group belong together, and the root's tensor gets round."""
    p = len(played)
    case = f"in a group of {p} with root {root}, "
    for number, messages in enumerate(played):
        sources = [source for source, to in messages if to == number]
        if number == root:
            assert not sources, f"{case}the root waits for a tensor, and it has one"
            continue
        assert sources, f"{case}number {number} receives nothing"
        assert len(sources) == 1, (
            f"{case}number {number} waits for {len(sources)} tensors, and one is enough"
        )
        source = sources[0]
        assert source in range(p) and (source, number) in played[source], (
            f"{case}number {number} waits for a tensor from number {source}, which sends it none"
        )
        assert messages[0] == (source, number), (
            f"{case}number {number} sends before it has received the tensor"
        )
    for number, messages in enumerate(played):
        for source, to in messages:
            is_taken = source != number or (to in range(p) and (source, to) in played[to])
            assert is_taken, (
                f"{case}number {number} sends to number {to}, which does not wait for it"
            )
    _check_rounds([_Spread(FIRST + root, list(messages)) for messages in played], root)


# ---- 1.4


class _Told(NamedTuple):
    """What the learner's function did on one rank.

    Args:
        mean: What it returned.
        num_calls: How many calls to the other ranks it made.
    """

    mean: Any
    num_calls: int


def _mean(
    group: dist.ProcessGroup, mean_loss: Callable[..., Any], losses: Sequence[float]
) -> _Told:
    """What the learner's function returns on this rank."""
    own = losses[group.rank()]
    loss = torch.tensor(own)
    with Requests() as requests:
        mean = mean_loss(loss, group)
    requests.check_waited()
    assert loss.item() == own, "the loss that it was given has changed: all_reduce works in place"
    if isinstance(mean, torch.Tensor):
        assert mean.numel() == 1, f"it returned {mean.numel()} numbers, and the mean is one"
        mean = mean.item()
    return _Told(mean, len(requests.names))


def mended(mean_loss: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `mean_loss(loss, group)`: the mean on the group's number 0, None elsewhere."""
    # others each time, in eighths, so that the sum is exact and nobody can know it beforehand
    losses = [random.randrange(8, 400) / 8 for _ in range(ranks.n)]
    judge = partial(_check_mean, losses=losses)
    in_groups(ranks, GROUPS, _mean, mean_loss, losses, judge=judge)


def _check_mean(told: Sequence[_Told], losses: Sequence[float]) -> None:
    p = len(told)
    case = f"in a group of {p}, "
    first, *others = [one.mean for one in told]
    if first is None:
        speakers = [str(number) for number, value in enumerate(others, 1) if value is not None]
        assert not speakers, (
            f"{case}number {speakers[0]} of the group returned the mean, and number 0 should: is "
            "your rank the number within the group?"
        )
        raise AssertionError(
            f"{case}it returned None on every rank, and number 0 should return the mean"
        )
    for number, value in enumerate(others, 1):
        assert value is None, f"{case}number {number} returned {_short(value)}, and not None"
    assert isinstance(first, (int, float)), (
        f"{case}number 0 returned {first!r}, and the mean is a number"
    )
    assert any(one.num_calls for one in told), (
        f"{case}nothing was sent: number 0 knows no loss but its own"
    )
    _check_value(first, losses[:p], case)


def _check_value(found: float, losses: Sequence[float], case: str) -> None:
    p = len(losses)
    total = math.fsum(losses)
    assert math.isfinite(found), (
        f"{case}number 0 returned {found}: what was divided by what, and had it arrived by then?"
    )
    assert not math.isclose(found, total, rel_tol=1e-6), (
        "that is the sum of the losses, not their mean"
    )
    assert not math.isclose(found, losses[0] / p, rel_tol=1e-6), (
        f"{case}number 0 returned its own loss divided by {p}: what did the others bring?"
    )
    assert math.isclose(found, total / p, rel_tol=1e-6), (
        f"{case}number 0 returned {found:g}, and the mean of the losses is {total / p:g}"
    )


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)
