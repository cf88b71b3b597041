"""Checks of lesson 11, context parallelism."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.answer import RETURNED_NONE, Exercise, Hint, due
from course.exercises.expect import (
    TOLERANCE,
    Table,
    careless,
    confirm_in_group,
    diagnose,
    distance,
    draw,
    in_groups,
    own_answers,
    refuse,
    tensor,
)
from course.exercises.in_notebook import without
from course.exercises.simulated import Event, Outcome, here
from course.pool.ranks import Ranks
from labcode.parallel import attention_block
from labcode.parallel.attention_block import PLAIN
from labcode.parallel.context import RingAttention
from labcode.recipes import gpt_shape
from labcode.runtime.units import listed

ROUNDED = 1e-5  # what is off by less has been rounded to float32 on its way
OURS = own_answers(RingAttention.forward)
LONG = gpt_shape("gpt_7b", context_length=131072)  # of sections 1 and 8


def _unpacked(returned: Any, *names: str) -> dict[str, Any]:
    """What the learner's function returned, by name."""
    returned = due(returned)
    if not isinstance(returned, (tuple, list)) or len(returned) != len(names):
        number = {2: "two", 3: "three"}[len(names)]
        raise Hint(f"it should return {number} tensors: {', '.join(names)}")
    return dict(zip(names, due(*returned)))


# ---- 11.1

Attended = tuple[Tensor, Tensor]  # out and lse of a block


def _attend(scores: Tensor, v: Tensor) -> Attended:
    """Attention over one block of keys: out [heads, S, D] and lse [heads, S]."""
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def merge(my_merge: Callable[..., Any]) -> None:
    """The learner's merge of attention over two blocks of keys.

    Args:
        my_merge: `my_merge(out_a, lse_a, out_b, lse_b)` -> out and lse of both blocks together.
    """
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(2, 6, 10, generator=generator, dtype=torch.float64)
    v = torch.randn(2, 10, 4, generator=generator, dtype=torch.float64)
    with without(attention_block.merge):
        for shift, keys in ((0.0, 5), (0.0, 2), (3.0, 8)):
            shifted = torch.cat((scores[..., :keys], scores[..., keys:] + shift), -1)
            block_a = _attend(shifted[..., :keys], v[:, :keys])
            block_b = _attend(shifted[..., keys:], v[:, keys:])
            whole = _attend(shifted, v)
            _check_merged(_merged(my_merge, block_a, block_b), block_a, block_b, whole)
        _check_merged_in_hard_cases(my_merge, block_a, block_b, whole)


def _merged(my_merge: Callable[..., Any], block_a: Attended, block_b: Attended) -> Attended:
    """The learner's out and lse; they may write into what they are given."""
    given = [x.clone() for x in (*block_a, *block_b)]
    found = _unpacked(my_merge(*given), "out", "lse")
    for name, x in found.items():
        tensor(x, what=f"{name} is")
    return found["out"], found["lse"]


def _check_merged(found: Attended, block_a: Attended, block_b: Attended, whole: Attended) -> None:
    out, lse = found
    true_out, true_lse = whole
    mistakes: dict[str, Any] = {
        "are the two results swapped? out comes first, then lse": (
            (out.shape, lse.shape) == (true_lse.shape, true_out.shape)
        ),
        f"out is {list(out.shape)}, expected is {list(true_out.shape)}: lse has no dim for D, add "
        "one": out.shape != true_out.shape,
        f"lse is {list(lse.shape)}, expected is {list(true_lse.shape)}": (
            lse.shape != true_lse.shape
        ),
        f"out is {_dtype(out)}, and its inputs are float64": out.dtype != torch.float64,
        f"lse is {_dtype(lse)}, and its inputs are float64": lse.dtype != torch.float64,
    }
    refuse(mistakes)
    out_a, lse_a = block_a
    out_b, lse_b = block_b
    mistakes = {
        "out has nan or inf in it": not out.isfinite().all(),
        "that is the plain mean: a block with larger scores counts for more": (out_a + out_b) / 2,
        "that is the sum: the weights of the two blocks add up to 1": out_a + out_b,
    }
    otherwise = "out is {off:.0%} away: what share of the common denominator has each block?"
    diagnose("", out, true_out, mistakes, otherwise)
    mistakes = {
        "lse is the logarithm of a sum of exponentials; you add the logarithms": lse_a + lse_b,
    }
    otherwise = "out is right, lse is not: the next block needs the denominator of both"
    diagnose("", lse, true_lse, mistakes, otherwise)


def _check_merged_in_hard_cases(
    my_merge: Callable[..., Any], block_a: Attended, block_b: Attended, whole: Attended
) -> None:
    """Large scores and rows without a key, in one block or both, in all rows or some of them."""
    large_a = _shifted(block_a, 5000.0)
    large_b = _shifted(block_b, 5000.0)
    small_a = _shifted(block_a, -5000.0)
    small_b = _shifted(block_b, -5000.0)
    overflowing = {
        "with scores of 5000 it gives nan or inf, because exp(5000) overflows: which number may be "
        "subtracted from both lse first?": (large_a, large_b),
        "with scores of 5000 in the first block alone it gives nan or inf: is what you subtract "
        "right, whichever of the two lse is larger?": (large_a, block_b),
        "with scores of 5000 in the second block alone it gives nan or inf: is what you subtract "
        "right, whichever of the two lse is larger?": (block_a, large_b),
    }
    for hint, blocks in overflowing.items():
        out, lse = _merged(my_merge, *blocks)
        refuse({hint: not (out.isfinite().all() and lse.isfinite().all())})

    rows = torch.arange(block_a[1].shape[-1])
    every_second = 5000.0 * (rows % 2)  # added to all scores of a row, it changes no output
    empty = (torch.zeros_like(block_a[0]), torch.full_like(block_a[1], -math.inf))
    empty_in_a = rows % 3 == 0
    empty_in_b = rows % 3 == 1
    seen_by_one = _replaced(_replaced(whole, empty_in_a, block_b), empty_in_b, block_a)
    wrong = {  # hint: two blocks, and what they are together
        "with scores of 5000 in the first block alone, out and lse should be those of this block: "
        "beside it the other one has no weight": (large_a, block_b, large_a),
        "with scores of 5000 in the second block alone, out and lse should be those of this block: "
        "beside it the other one has no weight": (block_a, large_b, large_b),
        "with scores of 5000 in some rows (queries) and small ones in the others it is wrong: no "
        "row may depend on another one": (
            _shifted(block_a, every_second),
            _shifted(block_b, every_second),
            _shifted(whole, every_second),
        ),
        "a block without any key (lse = -inf) must change nothing, and where it is the second one "
        "it does": (block_a, empty, block_a),
        "a block without any key (lse = -inf) must change nothing, and where it is the first one "
        "it does": (empty, block_b, block_b),
        "beside a block without any key (lse = -inf) scores of -5000 in the first block are lost: "
        "which number is subtracted where one of the two lse is -inf?": (small_a, empty, small_a),
        "beside a block without any key (lse = -inf) scores of -5000 in the second block are lost: "
        "which number is subtracted where one of the two lse is -inf?": (empty, small_b, small_b),
        "where some rows (queries) of a block see no key (lse = -inf) and its other rows do, it is "
        "wrong: no row may depend on another one": (
            _replaced(block_a, empty_in_a, empty),
            _replaced(block_b, empty_in_b, empty),
            seen_by_one,
        ),
    }
    for hint, (one, other, truth) in wrong.items():
        out, lse = _merged(my_merge, one, other)
        off = max(distance(out, truth[0]), distance(lse, truth[1]))
        refuse({hint: off > TOLERANCE})


def _shifted(block: Attended, added: Tensor | float) -> Attended:
    """A block with something added to all scores of a row."""
    out, lse = block
    return out, lse + added


def _replaced(block: Attended, rows: Tensor, other: Attended) -> Attended:
    """A block with these rows of another one."""
    out, lse = other
    return torch.where(rows[:, None], out, block[0]), torch.where(rows, lse, block[1])


def _dtype(found: Tensor) -> str:
    return str(found.dtype).removeprefix("torch.")


# ---- 11.2 and 11.3

HEADS = 2
TOKENS = 4  # of each rank
WIDTH = 16  # features of a head: so wide that K and V of a part are larger than its scores
PART_BYTES = 2 * 8 * HEADS * TOKENS * WIDTH  # K and V of a rank
GRADIENTS = ("dq", "dk", "dv")


class _Memory(TorchDispatchMode):
    """What the learner's code makes on a simulated rank, and what has arrived there.

    Attributes:
        most_arrived: The most bytes of messages that had arrived, or were about to, and were alive
            together while something was computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most_arrived = 0
        self._messages: set[StorageWeakRef] = set()
        self._numels: dict[StorageWeakRef, int] = {}  # of the largest tensor in each memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                memory = StorageWeakRef(made.untyped_storage())
                self._numels[memory] = max(made.numel(), self._numels.get(memory, 0))
        received = here().received
        self._messages.update(received)
        arrived = sum(size for memory, size in received.items() if not memory.expired())
        if not func.is_view and "empty" not in func._schema.name:  # which compute nothing
            self.most_arrived = max(self.most_arrived, arrived)
        return result

    def largest(self) -> int:
        """Elements of the largest tensor, without those that hold messages.

        Two places for messages may well be in one tensor; they count as what has arrived.
        """
        others = [size for memory, size in self._numels.items() if memory not in self._messages]
        return max(others, default=0)


class _Result(NamedTuple):
    """This rank's part of what the learner's function was given and has returned, by name."""

    given: dict[str, Tensor]
    found: dict[str, Tensor]


def _sequence(group: dist.ProcessGroup, seed: int) -> dict[str, Tensor]:
    """q, k and v of the whole sequence, [1, N, S, D]; the same on all ranks of the group."""
    shape = (1, HEADS, TOKENS * group.size(), WIDTH)
    return {name: draw(group, seed + number, *shape) for number, name in enumerate("qkv")}


def _answer_of(
    answer: Callable[..., Any],
    group: dist.ProcessGroup,
    whole: Mapping[str, Tensor],
    names: Sequence[str],
) -> _Result:
    """Call the learner's function with this rank's parts, in their order, and the group.

    Args:
        answer: The function.
        group: Group of the ring.
        whole: What it needs, of the whole sequence.
        names: Names of what it returns.
    """
    before = {}
    for name, x in whole.items():
        before[name] = x.chunk(group.size(), 2)[group.rank()].clone()
    given = {name: x.clone() for name, x in before.items()}
    with here().block("answer"), _Memory() as memory:
        returned = answer(*given.values(), group)
    here().note("memory", (memory.largest(), memory.most_arrived))
    found = _unpacked(returned, *names)
    for name, x in found.items():
        shape = before["q"].shape
        tensor(x, shape[:-1] if name == "lse" else shape, f"{name} is")
    for name, x in given.items():
        text = f"{name} has changed: the caller still needs the tensors that it gave you"
        refuse({text: not torch.equal(x, before[name])})
    return _Result(before, found)


def _joined(results: Sequence[_Result]) -> dict[str, Tensor]:
    """What the ranks of a group were given, of the whole sequence."""
    whole = {}
    for name in results[0].given:
        whole[name] = torch.cat([result.given[name] for result in results], 2)
    return whole


def _parts(names: Sequence[str], whole: Sequence[Tensor], p: int) -> list[dict[str, Tensor]]:
    """The part of each rank of a group, by name."""
    parts = [x.chunk(p, 2) for x in whole]
    return [dict(zip(names, of_rank)) for of_rank in zip(*parts)]


def _calls(outcome: Outcome, rank: int) -> list[Event]:
    """What the learner's code calls; a barrier does no harm."""
    return [one for one in outcome.of(rank) if one.block == "answer" and one.kind != "barrier"]


def _check_messages(case: str, calls: Sequence[Event]) -> None:
    """Sends and receives alone, and somebody waits for each."""
    collectives = [one.kind for one in calls if one.kind not in ("send", "recv")]
    overlaps = any(one.overlaps for one in calls)
    all_arrived = all(one.arrived for one in calls)
    mistakes = {
        f"{', '.join(collectives[:1])} does the work for you: use sends and receives": collectives,
        "a message is received into the very memory that is still being sent: does the sender "
        "still have what it sends?": overlaps and all_arrived,
        **careless(calls),
    }
    refuse(mistakes, case)


def _shortened(name: str, found: Tensor, truth: Tensor, calls: Sequence[Event]) -> Table:
    """Whether the numbers of a wrong result have become shorter."""
    sent = {one.dtype for one in calls if one.kind == "send" and "float" in one.dtype}
    shorter = ", ".join(sorted(sent - {"float64"}))
    off = distance(found, truth)
    return {
        f"{name} is not exact: messages are sent in {shorter}, and all inputs in float64": shorter,
        f"{name} is right to {off:.0e} only: where do the numbers cease to be float64?": (
            off < ROUNDED
        ),
    }


def _sent_bytes(calls: Sequence[Event]) -> int:
    return sum(one.num_bytes for one in calls if one.kind == "send")


def _check_no_more_needed(
    case: str,
    calls: Sequence[Event],
    parts: int,
    largest: int = 0,
    most_arrived: int = 0,
    of: str = "of K and V",
) -> None:
    """A rank sends no more than these parts of K and V, and does not keep more than two."""
    sent_bytes = _sent_bytes(calls)
    mistakes = {
        f"the numbers are right, but {sent_bytes / PART_BYTES:g} parts {of} are sent where {parts} "
        "are enough: who needs all of the last message?": sent_bytes > parts * PART_BYTES,
        "the numbers are right, but somewhere more than one part of K and V is in one tensor: "
        "merge each part when it is here, and let it go": largest > 2 * HEADS * TOKENS * WIDTH,
        f"the numbers are right, but {most_arrived / PART_BYTES:g} parts of K and V that arrived "
        "are in memory together, and two are enough: merge each part when it is here, and let it "
        "go, together with the works that sent it. A slice or a chunk of a part keeps all of it": (
            most_arrived > 2 * PART_BYTES
        ),
    }
    refuse(mistakes, case)


# ---- 11.2


def ring_forward(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `ring_forward(q, k, v, group)`: causal, each rank has one piece in a row."""
    outcome = in_groups(_forward, answer, judge=_judge_forward, ours=OURS)
    return confirm_in_group(ranks, outcome, _forward, answer)


def _forward(group: dist.ProcessGroup, answer: Callable[..., Any]) -> _Result:
    return _answer_of(answer, group, _sequence(group, 1), ("out", "lse"))


def _judge_forward(results: Sequence[_Result], outcome: Outcome, members: Sequence[int]) -> None:
    p = len(members)
    whole = _joined(results)
    names = ("out", "lse")
    truths = _parts(names, PLAIN.forward(**whole, causal=True), p)
    for number, rank in enumerate(members):
        case = f"on rank {rank}: "
        calls = _calls(outcome, rank)
        _check_messages(case, calls)
        _check_sent_to_one(case, calls, {members[(number + 1) % p], members[(number - 1) % p]})
        out, lse = (results[number].found[name] for name in names)
        true_out, true_lse = (truths[number][name] for name in names)
        shortened = _shortened("out", out, true_out, calls)
        missing_bytes = (p - 1) * PART_BYTES - _sent_bytes(calls)
        wrong = _wrong_outputs(out, number, results[number].given, whole, missing_bytes)
        diagnose(case, out, true_out, {**shortened, **wrong})
        otherwise = "out is right and lse is not: is it that of all the keys together?"
        diagnose(case, lse, true_lse, {}, otherwise)
        _check_no_more_needed(case, calls, p - 1, *outcome.of(rank, "memory")[0].value)


def _check_sent_to_one(case: str, calls: Sequence[Event], neighbours: set[int]) -> None:
    """All messages go to one of the two neighbours."""
    receivers = {one.peer for one in calls if one.kind == "send" and one.peer is not None}
    if len(receivers) > 1 or receivers - neighbours:
        word = "ranks" if len(receivers) > 1 else "rank"
        raise Hint(
            f"{case}it sends to {word} {listed(sorted(receivers))}: on a ring each rank sends to "
            "one neighbour only"
        )


def _wrong_outputs(
    out: Tensor,
    number: int,
    own: Mapping[str, Tensor],
    whole: Mapping[str, Tensor],
    missing_bytes: int,
) -> Table:
    """What mistakes give on the rank with this number in its group, and at last what to ask.

    Args:
        out: What it has given.
        number: Number of the rank.
        own: The rank's part of the sequence.
        whole: The sequence.
        missing_bytes: How many more it would have to send.
    """
    return {
        "out has nan or inf in it: is a block merged that nobody can see, or one that has not "
        "arrived yet? Who waits?": not out.isfinite().all(),
        "out is attention over all keys, also over later ones: whose keys may this rank's queries "
        "see?": PLAIN.forward(own["q"], whole["k"], whole["v"], False)[0],
        "out is attention over this rank's own keys alone": PLAIN.forward(**own, causal=True)[0],
        "out is attention over this rank's own keys alone, and without the causal mask": (
            PLAIN.forward(**own, causal=False)[0]
        ),
        f"out is wrong, and {missing_bytes:,} bytes less are sent than all K and V have that the "
        "others need: do keys and values both travel?": missing_bytes > 0,
        "out is wrong, and this rank sees its own keys only: what does it do with the parts that "
        "come by, and is its own block causal?": number == 0,
        "out is wrong: is it the right source's turn in each step, is only the own block causal, "
        "and is each block merged once?": True,
    }


# ---- 11.3


def ring_backward(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `ring_backward(dout, q, k, v, out, lse, group)`: dq, dk and dv of this rank."""
    outcome = in_groups(_backward, answer, judge=_judge_backward, ours=OURS)
    return confirm_in_group(ranks, outcome, _backward, answer)


def _backward(group: dist.ProcessGroup, answer: Callable[..., Any]) -> _Result:
    whole = _sequence(group, 5)
    out, lse = PLAIN.forward(**whole, causal=True)
    dout = draw(group, 9, *out.shape)
    return _answer_of(answer, group, {"dout": dout, **whole, "out": out, "lse": lse}, GRADIENTS)


def _judge_backward(results: Sequence[_Result], outcome: Outcome, members: Sequence[int]) -> None:
    """Rank 0 sees its own keys only, so its dq is right where the others' are wrong.

    Therefore a wrong dq of any rank comes before a wrong dk.
    """
    p = len(members)
    truths = _parts(GRADIENTS, PLAIN.backward(**_joined(results), causal=True), p)
    calls = {rank: _calls(outcome, rank) for rank in members}
    for rank in members:
        _check_messages(f"on rank {rank}: ", calls[rank])
    for name in GRADIENTS:
        for number, rank in enumerate(members):
            found = results[number].found[name]
            truth = truths[number][name]
            if name == "dq":
                wrong = _wrong_dq(number, results)
            else:
                wrong = _wrong_key_gradients(name, number, results[number], truths)
            shortened = _shortened(name, found, truth, calls[rank])
            diagnose(f"on rank {rank}: ", found, truth, {**shortened, **wrong})
    for rank in members:
        # K and V need p - 1 hops, their gradients p at most
        of = f"of K and V or of their gradients ({p - 1} and {p})"
        _check_no_more_needed(f"on rank {rank}: ", calls[rank], 2 * p - 1, of=of)


def _wrong_dq(number: int, results: Sequence[_Result]) -> Table:
    """What mistakes give on the rank with this number in its group, and at last what to ask."""
    own = results[number].given
    each_by_itself = torch.zeros_like(own["q"])
    all_causal = torch.zeros_like(own["q"])
    for source, result in enumerate(results[: number + 1]):
        block = {**own, "k": result.given["k"], "v": result.given["v"]}
        all_causal += PLAIN.backward(**block, causal=True)[0]
        causal = source == number
        out, lse = PLAIN.forward(block["q"], block["k"], block["v"], causal)
        each_by_itself += PLAIN.backward(**{**block, "out": out, "lse": lse}, causal=causal)[0]
    return {
        "dq has the terms of this rank's own keys alone": PLAIN.backward(**own, causal=True)[0],
        "dq is wrong: the terms are those of a softmax over each block by itself. Whose out and "
        "lse does attend_backward get?": each_by_itself,
        "dq is wrong: every block is treated as causal. In which one are some keys hidden?": (
            all_causal
        ),
        "dq is wrong: it stays on its rank and adds up a term for each part of K and V that this "
        "rank can see. Is only the own block causal?": True,
    }


def _wrong_key_gradients(
    name: str, number: int, result: _Result, truths: Sequence[Mapping[str, Tensor]]
) -> Table:
    """What mistakes give as dk or dv, as for dq."""
    truth = truths[number]
    found = result.found
    off_swapped = distance(found["dk"], truth["dv"]) + distance(found["dv"], truth["dk"])
    own_terms = PLAIN.backward(**result.given, causal=True)[GRADIENTS.index(name)]
    of_another = any(distance(found[name], other[name]) < TOLERANCE for other in truths)
    return {
        "dk and dv are swapped: dk is what the keys get": off_swapped < TOLERANCE,
        f"{name} has the terms of this rank's own queries alone: where are the others'?": own_terms,
        f"{name} is the mean over the ranks: the terms add up, and nobody divides": (
            truth[name] / len(truths)
        ),
        f"{name} is complete, but it is that of another rank's keys: how many more hops are there "
        "to its home?": of_another,
        f"dq is right and {name} is wrong: does each sum travel with its own keys, does each rank "
        "add its term once, and does every rank pass on what it does not change?": True,
    }


# ---- 11.4

SIZES = (2, 3, 4)  # of a ring; 3 is no power of two
CHUNK = 3  # tokens


def deal(chunks: Callable[[int, int], Any], block: Callable[[int, int, int], Any]) -> None:
    """The learner's choice of chunks, and what a rank then computes with each rank's keys.

    Args:
        chunks: `chunks(rank, p)`: the two of 2p chunks that a rank holds.
        block: `block(rank, source, tokens)`: (queries, keys, causal), two slices of the `tokens` of
            rank and source; None where nothing is visible.
    """
    held = {}
    for p in SIZES:
        held[p] = [_chunks_of(chunks(rank, p)) for rank in range(p)]
        _check_dealt(held[p], p)
    for p in SIZES:
        _check_computed(block, held[p], p)


def _chunks_of(found: Any) -> list[int]:
    found = due(found)
    if not isinstance(found, (tuple, list)):
        raise Hint(f"my_chunks gives {found!r}, expected are two numbers")
    return sorted(int(chunk) for chunk in found)


def _check_dealt(held: Sequence[Sequence[int]], p: int) -> None:
    """Each chunk has one rank, and all ranks have the same work."""
    dealt = sorted(itertools.chain.from_iterable(held))
    # chunks of keys that the queries of each rank see: all before a chunk, and half of itself
    work = [sum(chunks) + 0.5 * len(chunks) for chunks in held]
    seen = ", ".join(f"{num_chunks:g}" for num_chunks in work)
    mistakes = {
        f"each of the chunks 0 to {2 * p - 1} belongs to exactly one rank": (
            dealt != list(range(2 * p))
        ),
        "every rank holds two chunks, or tokens are shared unevenly": (
            any(len(chunks) != 2 for chunks in held)
        ),
        f"the ranks see {seen} chunks of keys: which two chunks make the same sum everywhere?": (
            max(work) > min(work)
        ),
    }
    refuse(mistakes, f"my_chunks, p={p}: {held}: ")


def _check_computed(block: Callable[..., Any], held: Sequence[Sequence[int]], p: int) -> None:
    """Every visible score is computed and no other, and in each step as many on all ranks."""
    tokens = 2 * CHUNK
    positions = [_positions(chunks) for chunks in held]
    work = torch.zeros(p, p)  # [step, rank] scores
    for rank in range(p):
        for source in range(p):
            found = block(rank, source, tokens)
            call = f"my_block({rank}, {source}, {tokens})"
            visible = positions[rank][:, None] >= positions[source]
            if found is None and source <= rank:  # of later ranks it may mean: nothing is visible
                raise Hint(f"{call}: {RETURNED_NONE}")
            computed = _computed(call, found, tokens)
            missing = int((visible & ~computed).sum())
            beyond = _beyond(found, tokens)
            mistakes = {
                f"computes scores of keys that are later than their queries{beyond}": (
                    (computed & ~visible).any()
                ),
                f"leaves out {missing} of the {int(visible.sum())} scores that it should compute"
                f"{beyond}": missing,
            }
            whose = "its own keys" if rank == source else f"the keys of rank {source}"
            refuse(mistakes, f"my_block, p={p}: with {whose}, rank {rank} ")
            work[(rank - source) % p, rank] = computed.sum()
    for step, scores in enumerate(work):
        text = f"p={p}: in step {step} the ranks compute {scores.tolist()} scores"
        refuse({text: scores.min() < scores.max()})


def _positions(chunks: Sequence[int]) -> Tensor:
    """Positions of the tokens in these chunks."""
    return torch.cat([torch.arange(CHUNK) + CHUNK * chunk for chunk in chunks])


def _beyond(found: Any, tokens: int) -> str:
    """Which slice goes beyond the tokens that are there; "" where none does."""
    for piece in () if found is None else found[:2]:
        if (piece.start or 0) >= tokens or (piece.stop or 0) > tokens:
            return f": {piece} goes beyond the {tokens} tokens of its rank, which are two chunks"
    return ""


def _computed(call: str, found: Any, tokens: int) -> Tensor:
    """Which scores a block computes, [tokens, tokens]."""
    computed = torch.zeros(tokens, tokens, dtype=torch.bool)
    if found is None:
        return computed
    found = due(found)
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        raise Hint(
            f"{call} gives {found!r}, expected are a slice of queries, a slice of keys, and True "
            "or False"
        )
    queries, keys, causal = found
    for piece in (queries, keys):
        if not isinstance(piece, slice):
            raise Hint(f"{call} gives no slices: write slice(start, stop)")
        for edge in (piece.start, piece.stop):
            if edge is not None and not hasattr(edge, "__index__"):
                raise Hint(f"{call} gives {piece}: a slice takes whole numbers, and {edge} is none")
    seen = torch.ones_like(computed[queries, keys])
    if causal and seen.shape[0] != seen.shape[1]:
        raise Hint(
            f"{call} is causal with {seen.shape[0]} queries and {seen.shape[1]} keys: in a causal "
            "block query i sees the keys 0 to i"
        )
    computed[queries, keys] = seen.tril() if causal else seen
    return computed


# ---- 11.5

PACKED = (  # (lengths of the documents, ranks); every length is a multiple of twice the ranks
    ((24,), 3),
    ((64, 16, 16, 16, 16), 4),
    ((16, 48), 2),
    ((24, 12, 36), 3),
)
FAIR = 1.02  # what the busiest rank may compute over a fair share


def deal_documents(shares: Callable[[list[int], int], Any]) -> None:
    """The learner's shares of packed documents: as many tokens and scores for each rank.

    Args:
        shares: `shares(lengths, p)`: for each of p ranks the pieces (start, stop) that it holds.
    """
    for lengths, p in PACKED:
        case = f"documents of {listed(lengths)} tokens on {p} ranks: "
        owners = _owners(shares(list(lengths), p), sum(lengths), p, case)
        # a token sees its document up to itself
        seen = torch.cat([torch.arange(1, length + 1) for length in lengths])
        tokens = [int((owners == rank).sum()) for rank in range(p)]
        scores = [int(seen[owners == rank].sum()) for rank in range(p)]
        busiest = scores.index(max(scores))
        over_fair = p * max(scores) / sum(scores)
        mistakes = {
            f"the ranks hold {listed(tokens)} tokens: their activations are uneven": (
                max(tokens) > min(tokens)
            ),
            f"rank {busiest} computes {over_fair:.2f} times a fair share of the scores; which "
            "tokens of a document see many keys, and which few?": over_fair > FAIR,
        }
        refuse(mistakes, case)


def _owners(found: Any, length: int, p: int, case: str) -> Tensor:
    """The rank that holds each token."""
    found = due(found)
    if not isinstance(found, (tuple, list)) or len(found) != p:
        raise Hint(f"{case}expected is a list of {p} lists, one for each rank, not {found!r:.80}")
    owners = torch.full((length,), -1)
    for rank, pieces in enumerate(found):
        if not isinstance(pieces, (tuple, list)):
            raise Hint(f"{case}for rank {rank} expected is a list of pieces, not {pieces!r:.80}")
        for piece in pieces:
            start, stop = _edges(piece, case)
            if not 0 <= start <= stop <= length:
                raise Hint(
                    f"{case}the piece ({start}, {stop}) of rank {rank} is no part of the tokens 0 "
                    f"to {length - 1}: a piece is (start, stop) in the packed sequence"
                )
            taken = owners[start:stop] >= 0
            if taken.any():
                token = start + int(taken.nonzero()[0])
                raise Hint(f"{case}token {token} is dealt to rank {owners[token]} and rank {rank}")
            owners[start:stop] = rank
    missing = (owners < 0).nonzero()
    if len(missing):
        raise Hint(
            f"{case}{len(missing)} of the {length} tokens belong to no rank, the first of them is "
            f"token {int(missing[0])}"
        )
    return owners


def _edges(piece: Any, case: str) -> tuple[int, int]:
    """Where a piece begins and ends: a pair, or as a range or a slice."""
    is_span = isinstance(piece, (range, slice)) and piece.step in (None, 1)
    edges: Any = (piece.start, piece.stop) if is_span else piece
    is_pair = isinstance(edges, (tuple, list)) and len(edges) == 2
    if not is_pair or not all(hasattr(edge, "__index__") for edge in edges):
        raise Hint(f"{case}a piece is (start, stop), two whole numbers, not {piece!r:.80}")
    return int(edges[0]), int(edges[1])


EXERCISES = {
    "11.1": Exercise(
        check=merge,
        praise="blocks of any size, in any order",
        hints=(
            "The denominator of a block is exp(lse). Which part of the common denominator is it?",
            "torch.logaddexp(a, b) is log(exp(a) + exp(b)), and it never overflows.",
            "out is [.., Q, D] and lse is [.., Q]: what makes them multiply row by row?",
        ),
    ),
    "11.2": Exercise(
        check=ring_forward,
        praise="exact, round the ring, and never more than two parts that have arrived",
        hints=(
            "Write a table for rank 2 of 4: in step 0, 1, 2, 3, whose keys are here?",
            "The next rank waits for a message in each step, whether you look at your part or not.",
            "What arrives must not be written into the memory that is still being sent.",
        ),
    ),
    "11.3": Exercise(
        check=ring_backward,
        praise="every gradient is complete, and each came home",
        hints=(
            "Which of the three gradients of a block belong to this rank, and which to the rank "
            "where the keys come from?",
            "attend_backward takes out and lse over all keys, not over the block.",
            "After the last step the gradients of K and V are one rank away from home.",
        ),
    ),
    "11.4": Exercise(
        check=deal,
        praise="every visible score once, and the same work for all ranks in every step",
        hints=(
            "Of 2p chunks, chunk c sees c + 1/2 chunks of keys. Which two chunks make the same "
            "sum for every rank, whatever p is?",
            "Draw the 8 x 8 mask of p = 4, and colour the rows of rank 1 and the columns of "
            "rank 2. Which tiles are in both, and visible?",
        ),
    ),
    "11.5": Exercise(
        check=deal_documents,
        praise="every token once, and the same tokens and scores for all ranks",
        hints=(
            "With a single document the answer is that of exercise 11.4. What if two documents of "
            "the same length are packed, and each is dealt for itself?",
            "Where in the packed sequence does a document begin? Its chunks begin there as well.",
        ),
    ),
}
