"""Checks of lesson 01, processes and collectives."""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course.answer import Exercise
from course.exercises.expect import (
    GROUPS,
    careless,
    confirm,
    confirm_in_group,
    diagnose,
    in_groups,
    own_answers,
    refuse,
    run,
)
from course.exercises.simulated import Event, Outcome
from course.pool.ranks import Ranks
from labcode.comm import ring
from labcode.runtime.units import listed


def _message_mistakes(calls: Sequence[Event], use: str) -> dict[str, Any]:
    """The mistakes of code that should do with messages between two ranks, as rows of a table."""
    others = [one.kind for one in calls if one.kind not in ("send", "recv")]
    first = others[0] if others else ""
    return {
        **careless(calls),
        "a barrier makes every rank wait for all others, and none is needed: a message that has "
        "been waited for has arrived": first == "barrier",
        f"{first} does the work for you: use {use}": others,
    }


def _check_ring(
    case: str, sends: Sequence[Event], members: Sequence[int], number: int, enough: int
) -> None:
    """What a rank sends goes to its right neighbour, and is no more than needed.

    Args:
        case: What a hint begins with.
        sends: Messages that this rank sends.
        members: Ranks of the group.
        number: Number of this rank in the group.
        enough: Bytes that are needed.
    """
    sent = sum(one.num_bytes for one in sends)
    right = (number + 1) % len(members)
    receivers = {members.index(one.peer) for one in sends if one.peer is not None}
    other = min(receivers - {right}, default=None)
    mistakes = {
        f"the numbers are right, but {sent} bytes were sent in {len(sends)} messages, and {enough} "
        "are enough: one chunk in each step, and no step too many": sent != enough,
        f"it sent to number {other} of the group: on a ring it sends to its right neighbour only, "
        f"which is number {right}": other is not None,
    }
    refuse(mistakes, case)


def _counted(noun: str, numbers: Sequence[int]) -> str:
    """ "chunk 0", "chunks 0, 1 and 2"."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {listed(numbers)}"


# ---- 1.0

PASSED_ON_BY = (4, 2, 5)  # numbers of ranks: an answer for four of them is refused
Passed = tuple[list[float], Any]


def _pass_on(rank: int, answer: Callable[..., Any]) -> Passed:
    """x afterwards, and what was returned."""
    x = torch.arange(3.0) + 10 * rank
    returned = answer(x, rank, dist.get_world_size())
    return x.tolist(), returned


def pass_on(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `pass_on(x, rank, p)`, on several numbers of ranks."""
    for p in PASSED_ON_BY:
        outcome = run(_pass_on, answer, size=p, case=f"on {p} ranks, ")
        _check_passed_on(outcome, p)
    outcome = run(_pass_on, answer)
    return confirm(ranks, outcome, _pass_on, answer)


def _check_passed_on(outcome: Outcome, p: int) -> None:
    first = [0.0, 1.0, 2.0]
    for rank, (held, returned) in enumerate(outcome.results):
        case = f"on {p} ranks, rank {rank}: "
        own = [number + 10 * rank for number in first]
        senders = {one.peer for one in outcome.of(rank, "recv")}
        in_returned = isinstance(returned, Tensor) and returned.tolist() == first
        mistakes = {
            **_message_mistakes(outcome.of(rank), use="send and recv"),
            "what is returned is rank 0's tensor, but x is not: receive into x itself": (
                held != first and in_returned
            ),
            "x is its own tensor still: receive into x itself, before you send it on": (
                rank > 0 and held == own
            ),
            f"x holds {held} afterwards, and rank 0's tensor was {first}": held != first,
            "it got the tensor from another rank than the one before it: let each rank send to the "
            "next": rank > 0 and senders != {rank - 1},
        }
        refuse(mistakes, case)


# ---- 1.1

CHUNK = 1_000_000.0  # what tells one chunk's numbers from another's


def _contribution(rank: int, chunk: int, length: int) -> Tensor:
    """What a rank of the group puts into a chunk: a power of ten for each rank, so that a sum
    shows whose numbers are in it.
    """
    return torch.full((length,), 10.0**rank + CHUNK * chunk, dtype=torch.float64)


def _sum_of_chunk(p: int, chunk: int, length: int) -> Tensor:
    return torch.stack([_contribution(rank, chunk, length) for rank in range(p)]).sum(0)


def _whose(value: float, chunk: int, p: int) -> str:
    """Which ranks' numbers are in a sum, in words."""
    if not math.isfinite(value):
        return f"{value}, which nobody put in: was something read before it had arrived?"
    for count in range(p + 1):
        rest = round(value - CHUNK * chunk * count)
        digits = f"{rest:0{p}d}" if rest >= 0 else ""
        if len(digits) == p and sum(map(int, digits)) == count:
            times = {rank: int(digits[p - 1 - rank]) for rank in range(p)}
            twice = [rank for rank, number in times.items() if number > 1]
            missing = [rank for rank, number in times.items() if number == 0]
            if twice:
                return f"what {_counted('number', twice)} put in, more than once"
            if missing:
                return f"nothing from {_counted('number', missing)} of the group"
    return "a mixture of different chunks: is the chunk that arrives the one you add it to?"


def _halve(
    group: dist.ProcessGroup, half: Callable[..., Any], length: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that were in the list, and those that are in it afterwards."""
    tensors = []
    for number in range(group.size()):
        tensors.append(_contribution(group.rank(), number, length))
    chunks = list(tensors)
    half(chunks, group)
    return tensors, chunks


def reduce_scatter_half(half: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `reduce_scatter_half(chunks, group)`, on all ranks and on three of them."""
    ours = own_answers(ring.reduce_scatter_phase, ring.all_reduce, ring.star_all_reduce)
    for length in (1, 5):
        outcome = in_groups(_halve, half, length, judge=_check_half, ours=ours)
    return confirm_in_group(ranks, outcome, _halve, half, length)


def _check_half(
    results: list[tuple[list[Tensor], list[Tensor]]], outcome: Outcome, members: Sequence[int]
) -> None:
    p = len(members)
    for number, rank in enumerate(members):
        case = f"on rank {rank}: "
        calls = outcome.of(rank)
        tensors, chunks = results[number]
        own = (number + 1) % p
        length = len(tensors[own])
        right = _sum_of_chunk(p, own, length)
        is_new = chunks[own] is not tensors[own] and torch.equal(chunks[own], right)
        mistakes = {
            **_message_mistakes(calls, use="exchange, send and recv"),
            "nothing was sent: call exchange in each step": not calls,
            f"chunks[{own}] has the right numbers, but it is a new tensor: write into the one that "
            "was there, with += or copy_, or the large tensor of exercise 1.2 will not change": (
                is_new
            ),
        }
        refuse(mistakes, case)
        before = [_contribution(number, chunk, length) for chunk in range(p)]
        sums = [_sum_of_chunk(p, chunk, length) for chunk in range(p)]
        finished = [chunk for chunk in range(p) if torch.equal(tensors[chunk], sums[chunk])]
        first = min(finished, default=None)
        mistakes = {
            "messages came and went, but all chunks are as they were: add what arrived to a chunk, "
            "in place (`a = a + b` makes a new tensor, `a += b` changes a)": (
                torch.equal(torch.stack(tensors), torch.stack(before))
            ),
            f"chunks[{first}] is finished, and it should be chunks[{own}]: look again at which "
            "chunk a rank sends in its first step": finished,
            f"chunks[{own}] holds the mean of all contributions, not their sum": right / p,
        }
        whose = _whose(tensors[own][0].item(), own, p)
        otherwise = f"chunks[{own}] should be finished, but it holds {whose}"
        diagnose(case, tensors[own], right, mistakes, otherwise)
        enough = (p - 1) * tensors[own].nbytes
        _check_ring(case, outcome.of(rank, "send"), members, number, enough)


# ---- 1.2

Reduced = tuple[Tensor, Tensor, Tensor | None]


def _all_reduce(
    group: dist.ProcessGroup, ring_all_reduce: Callable[..., Any], shape: Sequence[int]
) -> Reduced:
    """x before and afterwards, and the tensor that was returned."""
    generator = torch.Generator().manual_seed(group.rank())
    x = torch.randint(1, 99, tuple(shape), generator=generator).double()
    before = x.clone()
    try:
        returned = ring_all_reduce(x, group)
    except IndexError as error:
        text = f"{error}, with x of shape {list(shape)}: into how many chunks was it cut?"
        raise IndexError(text).with_traceback(error.__traceback__) from None
    return before, x, returned if isinstance(returned, Tensor) else None


def ring_all_reduce(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `ring_all_reduce(x, group)`, on all ranks and on three of them."""
    ours = own_answers(ring.all_reduce, ring.star_all_reduce, ring.all_gather_phase)
    for shape in ((12,), (2, 6)):
        outcome = in_groups(_all_reduce, answer, shape, judge=_check_reduced, ours=ours)
    return confirm_in_group(ranks, outcome, _all_reduce, answer, shape)


def _check_reduced(results: list[Reduced], outcome: Outcome, members: Sequence[int]) -> None:
    p = len(members)
    right = torch.stack([before for before, _, _ in results]).sum(0)
    for number, rank in enumerate(members):
        case = f"on rank {rank}: "
        sends = outcome.of(rank, "send")
        before, x, returned = results[number]
        refuse(_message_mistakes(outcome.of(rank), use="exchange, send and recv"), case)
        is_returned = returned is not None and torch.equal(returned.flatten(), right.flatten())
        mistakes = {
            "what is returned is the sum, but x is not: the sum must be written into x itself": (
                is_returned
            ),
            "x is as it was before: the sum must be written into x itself, so the chunks must be "
            "views of x and not copies, and a line `x = ...` only gives the name to another "
            "tensor": before,
            "x holds the mean over the group, not the sum": right / p,
        }
        diagnose(case, x, right, mistakes, _what_chunks_hold(x, right, p, len(sends)))
        _check_ring(case, sends, members, number, enough=2 * (p - 1) * x.nbytes // p)


def _what_chunks_hold(x: Tensor, right: Tensor, p: int, num_sent: int) -> str:
    """Which chunks of x hold the sum, and where to look for the others."""
    finished = []
    too_large = []
    for number, (found, wanted) in enumerate(zip(x.flatten().chunk(p), right.flatten().chunk(p))):
        if torch.equal(found, wanted):
            finished.append(number)
        elif (found > wanted).all():
            too_large.append(number)
    if too_large:
        return (
            f"{_counted('chunk', too_large)} of x {_hold(too_large)} more than the sum: the second "
            "half passes finished chunks on, and adds nothing"
        )
    if not finished:
        return (
            "no chunk of x holds the sum: does the first half work on views of x, in place, and "
            "which chunk does the second half write over first?"
        )
    look = (
        ": which chunk did the left neighbour finish last, which one does it send next, and is "
        "each copied to its own place?"
    )
    if num_sent < p:
        look = f", after {num_sent} messages: that is the first half, and the second one is missing"
    return f"only {_counted('chunk', finished)} of x {_hold(finished)} the sum{look}"


def _hold(numbers: Sequence[int]) -> str:
    return "hold" if len(numbers) > 1 else "holds"


# ---- 1.3

FIRST = 100.0  # the rank with number r in the group holds 100 + r
SIZES = (4, 3, 5, 8, 9, 17)  # more than any list of rounds that somebody writes down

Spread = tuple[float, float]


def _spread(group: dist.ProcessGroup, broadcast: Callable[..., Any], root: int) -> Spread:
    """The first number of x afterwards, and of the tensor that was returned."""
    x = torch.full((3,), FIRST + group.rank())
    returned = broadcast(x, root, group)
    in_returned = returned.flatten()[0].item() if isinstance(returned, Tensor) else 0.0
    return x[0].item(), in_returned


def _spread_in_world(rank: int, broadcast: Callable[..., Any], root: int) -> Spread:
    world = dist.group.WORLD
    assert world is not None
    return _spread(world, broadcast, root)


def tree_broadcast(broadcast: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `tree_broadcast(x, root, group)`: the rubric of the exercise."""
    for p in SIZES:
        for root in sorted({0, 1, 2, p - 1}):
            case = f"in a group of {p} with root {root}, "
            outcome = run(_spread_in_world, broadcast, root, size=p, case=case)
            _check_spread(outcome.results, outcome, range(p), root, case)
    for root in (0, 1, 2):
        judge = partial(_check_spread, root=root, case=f"with root {root}, ")
        outcome = in_groups(_spread, broadcast, root, judge=judge)
    return confirm_in_group(ranks, outcome, _spread, broadcast, root)


def _check_spread(
    results: Sequence[Spread], outcome: Outcome, members: Sequence[int], root: int, case: str
) -> None:
    of_zero = "everybody holds the tensor of number 0 afterwards: what does `root` change?"
    refuse({of_zero: root > 0 and {held for held, _ in results} == {FIRST}}, case)
    for number, rank in enumerate(members):
        held, in_returned = results[number]
        num_received = len(outcome.of(rank, "recv"))
        source = held - FIRST
        of = "its own tensor" if source == number else f"the tensor of number {source:g}"
        is_root = number == root
        mistakes = {
            **_message_mistakes(outcome.of(rank), use="send and recv"),
            "what is returned is the root's tensor, but x is not: receive into x itself": (
                source != root and in_returned == FIRST + root
            ),
            f"number {number} receives nothing": not is_root and num_received == 0,
            f"number {number} holds {of} afterwards": source != root,
            "the root waits for a tensor, and it has one": is_root and num_received > 0,
            f"number {number} received {num_received} times, and once is enough": num_received > 1,
        }
        refuse(mistakes, case)
    least = (len(members) - 1).bit_length()
    took = _num_rounds(outcome, members[root])
    rounds = (
        f"it is right, but it takes {took} rounds, and {least} are enough if everybody who has the "
        "tensor sends it on"
    )
    refuse({rounds: took > least}, case)


def _num_rounds(outcome: Outcome, root: int) -> int:
    """The round in which the last rank gets the tensor, if each sends once in a round."""
    has_since: dict[int, int] = {root: 0}
    waiting = [root]
    while waiting:
        sender = waiting.pop()
        for later, message in enumerate(outcome.of(sender, "send"), 1):
            assert message.peer is not None
            has_since[message.peer] = has_since[sender] + later
            waiting.append(message.peer)
    return max(has_since.values())


# ---- 1.4


def _mean(group: dist.ProcessGroup, mean_loss: Callable[..., Any], losses: Sequence[float]) -> Any:
    """What the learner's function returns on this rank; a number, if it is a tensor."""
    own = losses[group.rank()]
    loss = torch.tensor(own)
    mean = mean_loss(loss, group)
    changed = "the loss that it was given has changed: all_reduce works in place"
    refuse({changed: loss.item() != own})
    if not isinstance(mean, Tensor):
        return mean
    refuse({f"it returned {mean.numel()} numbers, and the mean is one": mean.numel() != 1})
    return mean.item()


def mended(mean_loss: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `mean_loss(loss, group)`: the mean on the group's number 0, None elsewhere."""
    # others each time, in eighths, so that the sum is exact and nobody can know it beforehand
    losses = [random.randrange(8, 400) / 8 for _ in range(max(map(len, GROUPS)))]
    outcome = in_groups(_mean, mean_loss, losses, judge=partial(_check_mean, losses=losses))
    return confirm_in_group(ranks, outcome, _mean, mean_loss, losses)


def _check_mean(
    means: list[Any], outcome: Outcome, members: Sequence[int], losses: Sequence[float]
) -> None:
    for rank in members:
        refuse(careless(outcome.of(rank)), f"on rank {rank}: ")
    first = means[0]
    others = [number for number, mean in enumerate(means) if number > 0 and mean is not None]
    other = min(others, default=0)
    said = f"{means[other]:g}" if isinstance(means[other], float) else repr(means[other])
    mistakes = {
        f"number {other} of the group returned the mean, and number 0 should: is your rank the "
        "number within the group?": first is None and others,
        "it returned None on every rank, and number 0 should return the mean": first is None,
        f"number {other} returned {said}, and not None": others,
        f"number 0 returned {said}, and the mean is a number": not isinstance(first, (int, float)),
        "nothing was sent: number 0 knows no loss but its own": not outcome.events,
    }
    refuse(mistakes)
    assert isinstance(first, (int, float))
    p = len(means)
    right = math.fsum(losses[:p]) / p
    mistakes = {
        f"number 0 returned {first}: what was divided by what, and had it arrived by then?": (
            not math.isfinite(first)
        ),
        "number 0 returned the sum of the losses, not their mean": right * p,
        f"number 0 returned its own loss divided by {p}: what did the others bring?": losses[0] / p,
    }
    otherwise = f"number 0 returned {first:g}, and the mean of the losses is {right:g}"
    diagnose("", first, right, mistakes, otherwise, tolerance=1e-6)


EXERCISES = {
    "1.0": Exercise(
        check=pass_on,
        praise="each rank receives from the one before it and sends to the next",
        hints=(
            "Write down for p = 4 what rank 0, rank 1 and rank 3 do. Which of them receives, and "
            "which sends?",
            "A rank can send on only what it has received.",
        ),
    ),
    "1.1": Exercise(
        check=reduce_scatter_half,
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
        check=ring_all_reduce,
        praise="the sum is in x itself, and each rank sent 2 (p - 1)/p of it",
        hints=(
            "After the first half rank r has the finished chunk r + 1. It sends that one first.",
            "In the second half nothing is added: `exchange` can receive straight into "
            "the chunk that comes next.",
            "Is `chunks` a view of x, or a copy? Change a chunk and look at x.",
        ),
    ),
    "1.3": Exercise(
        check=tree_broadcast,
        praise="everybody who has the tensor helps to spread it",
        hints=(
            "For root 0: in the round in which the ranks 0 to k - 1 have the tensor, who sends to "
            "whom?",
            "For another root: number the ranks anew, starting from the root.",
            "If p is not a power of two, some ranks have nobody to send to in the last round.",
        ),
    ),
    "1.4": Exercise(
        check=mended,
        praise="all ranks take part, and one of them uses the result",
        hints=(
            "A collective needs all ranks of the group. What may depend on the rank: the call, or "
            "what is done with its result?",
            "all_reduce works in place. On which tensor should it work?",
        ),
    ),
}
