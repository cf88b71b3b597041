"""Checks of lesson 11, context parallelism. The text of each assertion is a hint."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from labcode.parallel import attention_block
from labcode.parallel.attention_block import PLAIN
from labcode.parallel.context import RingAttention
from labcode.perf.flops import training_flops_per_sample
from labcode.perf.memory import model_activations
from labcode.pool.ranks import Ranks
from labcode.pool.record import listed
from labcode.recipes import gpt_shape
from labcode.teach.check import RETURNED_NONE, Exercise, due
from labcode.teach.exercises.on_ranks import GROUPS, in_groups, without
from labcode.teach.exercises.requests import Requests
from labcode.teach.exercises.watch import Watch, draw, far, import_on, own_part, run_trial
from labcode.topology import GridShape
from labcode.units import si

EXERCISES = {
    "11.1": Exercise(
        praise="blocks of any size, in any order",
        hints=(
            "The denominator of a block is exp(lse). Which part of the common denominator is it?",
            "torch.logaddexp(a, b) is log(exp(a) + exp(b)), and it never overflows.",
            "out is [.., Q, D] and lse is [.., Q]: what makes them multiply row by row?",
        ),
    ),
    "11.2": Exercise(
        praise="exact, round the ring, and never more than two parts that have arrived",
        hints=(
            "Write a table for rank 2 of 4: in step 0, 1, 2, 3, whose keys are here?",
            "The next rank waits for a message in each step, whether you look at your part or not.",
            "What arrives must not be written into the memory that is still being sent.",
        ),
    ),
    "11.3": Exercise(
        praise="every gradient is complete, and each came home",
        hints=(
            "Which of the three gradients of a block belong to this rank, and which to the rank "
            "where the keys come from?",
            "attend_backward takes out and lse over all keys, not over the block.",
            "After the last step the gradients of K and V are one rank away from home.",
        ),
    ),
    "11.4": Exercise(
        praise="every visible score once, and the same work for all ranks in every step",
        hints=(
            "Of 2p chunks, chunk c sees c + 1/2 chunks of keys. Which two chunks make the same "
            "sum for every rank, whatever p is?",
            "Draw the 8 x 8 mask of p = 4, and colour the rows of rank 1 and the columns of "
            "rank 2. Which tiles are in both, and visible?",
        ),
    ),
    "11.5": Exercise(
        praise="it fits, and most of the time is spent computing",
        hints=(
            "What does each axis divide: weights, activations, sequences?",
            "l11.costs(shape) prints what a grid costs. Look at the larger of the two seconds.",
            "Which axis should run fastest, so that its groups lie inside a node?",
        ),
    ),
}

TOLERANCE = 1e-9
ROUNDED = 1e-5  # what is off by less has been rounded to float32 on its way

# ---- 11.1

Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _attend(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over one block of keys: out [heads, S, D] and lse [heads, S]."""
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def merge(my_merge: Merge) -> None:
    """The learner's merge of attention over two blocks of keys.

    Args:
        my_merge: `my_merge(out_a, lse_a, out_b, lse_b)` -> out and lse of both blocks together.
    """
    draw = torch.Generator().manual_seed(5)
    scores = torch.randn(2, 6, 10, generator=draw, dtype=torch.float64)
    v = torch.randn(2, 10, 4, generator=draw, dtype=torch.float64)
    with without(attention_block.merge):
        for shift, keys in ((0.0, 5), (0.0, 2), (3.0, 8)):
            shifted = torch.cat((scores[..., :keys], scores[..., keys:] + shift), -1)
            block_a = _attend(shifted[..., :keys], v[:, :keys])
            block_b = _attend(shifted[..., keys:], v[:, keys:])
            whole = _attend(shifted, v)
            _check_merged(my_merge, block_a, block_b, whole)
        _check_large_scores(my_merge, block_a, block_b)
        _check_large_rows(my_merge, block_a, block_b, whole)
        _check_empty_block(my_merge, block_a, block_b)
        _check_empty_rows(my_merge, block_a, block_b, whole)


Attended = tuple[Tensor, Tensor]  # out and lse of a block


def _call(my_merge: Merge, block_a: Attended, block_b: Attended) -> Attended:
    """The learner's out and lse; they may write into what they are given."""
    given = [x.clone() for x in (*block_a, *block_b)]
    return _two(my_merge(*given))


def _check_merged(
    my_merge: Merge, block_a: Attended, block_b: Attended, expected: Attended
) -> None:
    out_a, lse_a = block_a
    out_b, lse_b = block_b
    true_out, true_lse = expected
    out, lse = _call(my_merge, block_a, block_b)
    assert (out.shape, lse.shape) != (true_lse.shape, true_out.shape), (
        "are the two results swapped? out comes first, then lse"
    )
    assert out.shape == true_out.shape, (
        f"out is {list(out.shape)}, should be {list(true_out.shape)}: lse has no dim for D, add one"
    )
    assert lse.shape == true_lse.shape, (
        f"lse is {list(lse.shape)}, should be {list(true_lse.shape)}"
    )
    for name, found, given in (("out", out, out_a), ("lse", lse, lse_a)):
        assert found.dtype == given.dtype, (
            f"{name} is {_dtype(found)}, and its inputs are {_dtype(given)}"
        )
    assert not torch.allclose(out, (out_a + out_b) / 2), (
        "that is the plain mean: a block with larger scores counts for more"
    )
    assert not torch.allclose(out, out_a + out_b), (
        "that is the sum: the weights of the two blocks add up to 1"
    )
    assert not torch.allclose(lse, lse_a + lse_b), (
        "lse is the logarithm of a sum of exponentials; you add the logarithms"
    )
    off = (out - true_out).abs().max().item()
    assert off < TOLERANCE, (
        f"out is off by {off:.2g}: what share of the common denominator has each block?"
    )
    assert torch.allclose(lse, true_lse), (
        "out is right, lse is not: the next block needs the denominator of both"
    )


def _check_large_scores(my_merge: Merge, block_a: Attended, block_b: Attended) -> None:
    """In both blocks, in the first alone and in the second alone."""
    out_a, lse_a = block_a
    out_b, lse_b = block_b
    out, lse = _call(my_merge, (out_a, lse_a + 5000), (out_b, lse_b + 5000))
    assert torch.isfinite(out).all() and torch.isfinite(lse).all(), (
        "with scores of 5000 it gives nan or inf, because exp(5000) overflows: which number may be "
        "subtracted from both lse first?"
    )
    large_a = (out_a, lse_a + 5000)
    large_b = (out_b, lse_b + 5000)
    for name, large, blocks in (
        ("first", large_a, (large_a, block_b)),
        ("second", large_b, (block_a, large_b)),
    ):
        out, lse = _call(my_merge, *blocks)
        true_out, true_lse = large
        assert torch.isfinite(out).all() and torch.isfinite(lse).all(), (
            f"with scores of 5000 in the {name} block alone it gives nan or inf: is what you "
            "subtract right, whichever of the two lse is larger?"
        )
        assert torch.allclose(out, true_out) and torch.allclose(lse, true_lse), (
            f"with scores of 5000 in the {name} block alone, out and lse should be those of this "
            "block: beside it the other one has no weight"
        )


def _check_empty_block(my_merge: Merge, block_a: Attended, block_b: Attended) -> None:
    """The second block has no key that is visible, then the first one."""
    out_b, lse_b = block_b
    empty = (torch.zeros_like(out_b), torch.full_like(lse_b, -math.inf))
    for name, seen, blocks in (
        ("second", block_a, (block_a, empty)),
        ("first", block_b, (empty, block_b)),
    ):
        out, lse = _call(my_merge, *blocks)
        true_out, true_lse = seen
        assert torch.allclose(out, true_out) and torch.allclose(lse, true_lse), (
            f"a block without any key (lse = -inf) must change nothing, and where it is the {name} "
            "one it does"
        )


def _check_large_rows(
    my_merge: Merge, block_a: Attended, block_b: Attended, whole: Attended
) -> None:
    """Rows with large scores beside rows with small ones."""
    out_a, lse_a = block_a
    out_b, lse_b = block_b
    true_out, true_lse = whole
    # every second row; what is added to all scores of a row does not change its output
    added = 5000.0 * (torch.arange(lse_a.shape[-1]) % 2)
    out, lse = _call(my_merge, (out_a, lse_a + added), (out_b, lse_b + added))
    assert torch.allclose(out, true_out) and torch.allclose(lse, true_lse + added), (
        "with scores of 5000 in some rows (queries) and small ones in the others it is wrong: no "
        "row may depend on another one"
    )


def _check_empty_rows(
    my_merge: Merge, block_a: Attended, block_b: Attended, whole: Attended
) -> None:
    """Some rows see no key of the first block, others none of the second, and others both."""
    kind = torch.arange(block_a[1].shape[-1]) % 3
    empty_a = kind == 0
    empty_b = kind == 1
    out, lse = _call(my_merge, _emptied(block_a, empty_a), _emptied(block_b, empty_b))
    true_out, true_lse = (x.clone() for x in whole)
    for rows, (seen_out, seen_lse) in ((empty_a, block_b), (empty_b, block_a)):
        true_out[:, rows] = seen_out[:, rows]
        true_lse[:, rows] = seen_lse[:, rows]
    assert torch.allclose(out, true_out) and torch.allclose(lse, true_lse), (
        "where some rows (queries) of a block see no key (lse = -inf) and its other rows do, it is "
        "wrong: no row may depend on another one"
    )


def _emptied(block: Attended, rows: Tensor) -> Attended:
    """A block of which these rows see no key."""
    out, lse = (x.clone() for x in block)
    out[:, rows] = 0.0
    lse[:, rows] = -math.inf
    return out, lse


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _two(pair: Any) -> Attended:
    pair = due(pair)
    assert isinstance(pair, (tuple, list)) and len(pair) == 2, "return two tensors: out, lse"
    assert all(isinstance(x, Tensor) for x in due(*pair)), "return two tensors: out, lse"
    return pair[0], pair[1]


# ---- 11.2 and 11.3

HEADS = 2
TOKENS = 4  # of each rank
WIDTH = 16  # features of a head: so wide that K and V of a part are larger than its scores


def _sequence(group: dist.ProcessGroup, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of the whole sequence, [1, N, S, D]; the same on all ranks of the group."""
    shape = (1, HEADS, TOKENS * group.size(), WIDTH)
    return (
        draw(group, seed, *shape),
        draw(group, seed + 1, *shape),
        draw(group, seed + 2, *shape),
    )


def ring_forward(answer: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `ring_forward(q, k, v, group)`: causal, each rank has one piece in a row.

    Args:
        answer: Returns out [B, N, S/p, D] and lse [B, N, S/p] of this rank's queries.
        ranks: Four.
    """
    run_trial(ranks, _try_forward, answer)


def _try_forward(group: dist.ProcessGroup, answer: Callable[..., Any]) -> str:
    p = group.size()
    q, k, v = _sequence(group, 1)
    true_out, true_lse = PLAIN.forward(q, k, v, True)
    own = [own_part(x, group, 2) for x in (q, k, v)]
    before = [x.clone() for x in own]
    with Watch() as watch, Requests() as requests, without(RingAttention.forward):
        pair = answer(*own, group)
    if pair is ... or pair is None:
        return RETURNED_NONE
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return "it should return two tensors: out, lse"
    requests.check_waited()
    if requests.mixed:
        return MIXED
    out, lse = pair
    expected = own_part(true_out, group, 2)
    if not isinstance(out, Tensor) or out.shape != expected.shape:
        return f"out is {_shape_of(out)}, and q is {list(own[0].shape)}: they have one shape"
    for name, now, then in zip("qkv", own, before):
        if far(now, then):
            return f"{name} has changed: the caller still needs the tensors that it gave you"
    if watch.collectives():
        return f"{watch.collectives()[0]} does the work for you: use sends and receives"
    members = dist.get_process_group_ranks(group)
    neighbours = {members[(group.rank() + 1) % p], members[(group.rank() - 1) % p]}
    receivers = watch.receivers()
    if len(receivers) > 1 or receivers - neighbours:
        word = "ranks" if len(receivers) > 1 else "rank"
        return (
            f"it sends to {word} {listed(sorted(receivers))}: on a ring each rank sends to one "
            "neighbour only"
        )
    if far(out, expected):
        lost = _precision_hint("out", out, expected, requests)
        return lost or _output_hint(out, q, k, v, group)
    if not isinstance(lse, Tensor) or lse.shape != expected.shape[:-1]:
        return f"lse is {_shape_of(lse)} and should be {list(expected.shape[:-1])}"
    if far(lse, own_part(true_lse, group, 2)):
        return "out is right and lse is not: is it that of all the keys together?"
    part_bytes = own[1].nbytes + own[2].nbytes
    hint = _sent_hint(watch, (p - 1) * part_bytes, part_bytes)
    if hint:
        return hint
    # two places for messages may well be in one tensor; they count below
    if watch.largest_without_messages() > 2 * own[1].numel():
        return (
            "the numbers are right, but somewhere more than one part of K and V is in one tensor: "
            "merge each part when it is here, and let it go"
        )
    if watch.most_arrived > 2 * part_bytes:
        return (
            f"the numbers are right, but {watch.most_arrived / part_bytes:g} parts of K and V that "
            "arrived are in memory together, and two are enough: merge each part when it is here, "
            "and let it go, together with the works that sent it"
        )
    return ""


MIXED = (
    "a message is received into the very memory that is still being sent: does the sender still "
    "have what it sends?"
)


def _precision_hint(name: str, found: Tensor, expected: Tensor, requests: Requests) -> str:
    """Where a wrong result comes from numbers that have become shorter; "" where it does not."""
    given = _dtype(expected)
    shorter = []
    for dtype in requests.sent_dtypes:
        if dtype.is_floating_point and dtype.itemsize < expected.dtype.itemsize:
            shorter.append(str(dtype).removeprefix("torch."))
    if shorter:
        return (
            f"{name} is not exact: messages are sent in {min(shorter)}, and all inputs in {given}"
        )
    off = (found - expected).abs().max().item()
    if off < ROUNDED:
        return f"{name} is right to {off:.0e} only: where do the numbers cease to be {given}?"
    return ""


def _shape_of(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else repr(value)[:40]


def _output_hint(out: Tensor, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> str:
    """What a wrong output is instead."""
    if not torch.isfinite(out).all():
        return (
            "out has nan or inf in it: is a block merged that nobody can see, or one that has not "
            "arrived yet? Who waits?"
        )
    own_q, own_k, own_v = (own_part(x, group, 2) for x in (q, k, v))
    everything = PLAIN.forward(own_q, k, v, False)[0]
    if not far(out, everything):
        return (
            "out is attention over all keys, also over later ones: whose keys may this rank's "
            "queries see?"
        )
    if not far(out, PLAIN.forward(own_q, own_k, own_v, True)[0]):
        return "out is attention over this rank's own keys alone"
    if not far(out, PLAIN.forward(own_q, own_k, own_v, False)[0]):
        return "out is attention over this rank's own keys alone, and without the causal mask"
    if group.rank() == 0:
        return (
            "out is wrong, and this rank sees its own keys only: what does it do with the parts "
            "that come by, and is its own block causal?"
        )
    return (
        "out is wrong: is it the right source's turn in each step, is only the own block causal, "
        "and is each block merged once?"
    )


def _sent_hint(watch: Watch, most_bytes: int, part_bytes: int) -> str:
    """Whether this rank has sent more than it needs to."""
    sent = watch.sent_bytes()
    if sent > most_bytes:
        return (
            f"the numbers are right, but {sent / part_bytes:g} parts of K and V are sent where "
            f"{most_bytes / part_bytes:g} are enough: is the last message needed?"
        )
    return ""


class _Finding(NamedTuple):
    """What a rank has found in a trial: what is wrong, and how early that should be said.

    Args:
        stage: 0 for what is no result at all, then the gradients in their order, then messages.
        hint: "" where all is right.
    """

    stage: int
    hint: str


GRADIENTS = ("dq", "dk", "dv")
MESSAGES = 1 + len(GRADIENTS)


def ring_backward(answer: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `ring_backward(dout, q, k, v, out, lse, group)`: dq, dk and dv of this rank.

    Rank 0 sees its own keys only, so its dq is right where the others' are wrong. Therefore all
    ranks are judged together, and a wrong dq of any of them comes before a wrong dk.

    Args:
        answer: Is given this rank's part of everything, with out and lse over all visible keys.
        ranks: Four.
    """
    import_on(ranks, __name__)
    in_groups(ranks, GROUPS, _try_backward, answer, judge=_judge_backward)


def _judge_backward(findings: list[_Finding]) -> None:
    wrong = []
    for rank, (stage, hint) in enumerate(findings):
        if hint:
            wrong.append((stage, rank, hint))
    assert not wrong, f"on the rank with number {min(wrong)[1]} in the group: {min(wrong)[2]}"


def _try_backward(group: dist.ProcessGroup, answer: Callable[..., Any]) -> _Finding:
    p = group.size()
    q, k, v = _sequence(group, 5)
    dout = draw(group, 9, *q.shape)
    out, lse = PLAIN.forward(q, k, v, True)
    true = PLAIN.backward(dout, q, k, v, out, lse, True)
    whole = (dout, q, k, v, out, lse)
    own = [own_part(x, group, 2) for x in whole]
    before = [x.clone() for x in own]
    with Watch() as watch, Requests() as requests, without(RingAttention.forward):
        found = answer(*own, group)
    if found is ... or found is None:
        return _Finding(0, RETURNED_NONE)
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        return _Finding(0, "it should return three tensors: dq, dk, dv")
    requests.check_waited()
    if requests.mixed:
        return _Finding(0, MIXED)
    for name, now, then in zip(("dout", "q", "k", "v", "out", "lse"), own, before):
        if far(now, then):
            changed = f"{name} has changed: the caller still needs the tensors that it gave you"
            return _Finding(0, changed)
    if watch.collectives():
        name = watch.collectives()[0]
        return _Finding(0, f"{name} does the work for you: use sends and receives")
    for name, grad in zip(GRADIENTS, found):
        if not isinstance(grad, Tensor) or grad.shape != before[1].shape:
            return _Finding(0, f"{name} is {_shape_of(grad)}, should be {list(before[1].shape)}")
    due_here = [own_part(x, group, 2) for x in true]
    for stage, name in enumerate(GRADIENTS, 1):
        grad = found[stage - 1]
        if not far(grad, due_here[stage - 1]):
            continue
        lost = _precision_hint(name, grad, due_here[stage - 1], requests)
        if lost:
            return _Finding(stage, lost)
        if name == "dq":
            return _Finding(stage, _dq_hint(grad, own, whole, group))
        if not far(found[1], due_here[2]) and not far(found[2], due_here[1]):
            return _Finding(stage, "dk and dv are swapped: dk is what the keys get")
        return _Finding(stage, _key_gradient_hint(name, grad, true[stage - 1], own, group))
    part_bytes = own[2].nbytes + own[3].nbytes
    # K and V need p - 1 hops, their gradients p at most
    return _Finding(MESSAGES, _sent_hint(watch, (2 * p - 1) * part_bytes, part_bytes))


def _dq_hint(
    dq: Tensor, own: list[Tensor], whole: Sequence[Tensor], group: dist.ProcessGroup
) -> str:
    """What a wrong dq is instead."""
    dq_of_own_block = PLAIN.backward(*own, True)[0]
    if not far(dq, dq_of_own_block):
        return "dq has the terms of this rank's own keys alone"
    own_dout, own_q, *_, own_out, own_lse = own
    each_by_itself = torch.zeros_like(dq)
    all_causal = torch.zeros_like(dq)
    keys = whole[2].chunk(group.size(), 2)
    values = whole[3].chunk(group.size(), 2)
    for source in range(group.rank() + 1):
        k, v = keys[source], values[source]
        is_own = source == group.rank()
        out_b, lse_b = PLAIN.forward(own_q, k, v, is_own)
        each_by_itself += PLAIN.backward(own_dout, own_q, k, v, out_b, lse_b, is_own)[0]
        all_causal += PLAIN.backward(own_dout, own_q, k, v, own_out, own_lse, True)[0]
    if not far(dq, each_by_itself):
        return (
            "dq is wrong: the terms are those of a softmax over each block by itself. Whose out "
            "and lse does attend_backward get?"
        )
    if not far(dq, all_causal):
        return "dq is wrong: every block is treated as causal. In which one are some keys hidden?"
    return (
        "dq is wrong: it stays on its rank and adds up a term for each part of K and V that "
        "this rank can see"
    )


def _key_gradient_hint(
    name: str, grad: Tensor, whole_grad: Tensor, own: list[Tensor], group: dist.ProcessGroup
) -> str:
    """What a wrong dk or dv is instead."""
    expected = own_part(whole_grad, group, 2)
    from_own_block = PLAIN.backward(*own, True)[GRADIENTS.index(name)]
    if not far(grad, from_own_block):
        return f"{name} has the terms of this rank's own queries alone: where are the others'?"
    if not far(grad, expected / group.size()):
        return f"{name} is the mean over the ranks: the terms add up, and nobody divides"
    for other, part in enumerate(whole_grad.chunk(group.size(), 2)):
        if other != group.rank() and not far(grad, part):
            return (
                f"{name} is complete, but it is that of another rank's keys: how many more hops "
                "are there to its home?"
            )
    return (
        f"dq is right and {name} is wrong: does each sum travel with its own keys, does each rank "
        "add its term once, and does every rank pass on what it does not change?"
    )


# ---- 11.4

SIZES = (2, 3, 4)  # of a ring; 3 is no power of two


def deal(chunks: Callable[[int, int], Any], block: Callable[[int, int, int], Any]) -> None:
    """The learner's choice of chunks, and what a rank then computes with each rank's keys.

    Args:
        chunks: `chunks(rank, p)`: the two of 2p chunks that a rank holds.
        block: `block(rank, source, tokens)`: (queries, keys, causal), two slices of the `tokens` of
            rank and source; None where nothing is visible.
    """
    for p in SIZES:
        held = []
        for rank in range(p):
            two = due(chunks(rank, p))
            assert isinstance(two, (tuple, list)), f"my_chunks gives {two!r}: two numbers are due"
            held.append([int(chunk) for chunk in two])
        _check_chunks(held, p)
    for p in SIZES:
        _check_blocks(chunks, block, p)


def _check_chunks(held: list[list[int]], p: int) -> None:
    case = f"my_chunks, p={p}: {held}: "
    every = sorted(itertools.chain.from_iterable(held))
    assert every == list(range(2 * p)), (
        case + f"each of the chunks 0 to {2 * p - 1} belongs to exactly one rank"
    )
    assert all(len(mine) == 2 for mine in held), (
        case + "every rank holds two chunks, or tokens are shared unevenly"
    )
    # chunks of keys that the queries of each rank see: all before a chunk, and half of itself
    work = [sum(mine) + 0.5 * len(mine) for mine in held]
    listed = ", ".join(f"{seen:g}" for seen in work)
    assert max(work) == min(work), case + (
        f"the ranks see {listed} chunks of keys: which two chunks make the same sum everywhere?"
    )


SIZE = 3  # tokens of a chunk


def _check_blocks(chunks: Callable[..., Any], block: Callable[..., Any], p: int) -> None:
    tokens = 2 * SIZE
    positions = []
    for rank in range(p):
        first, second = sorted(int(chunk) for chunk in chunks(rank, p))
        positions.append(_positions(first) + _positions(second))
    work = torch.zeros(p, p)  # [step, rank] scores
    for rank in range(p):
        for source in range(p):
            found = block(rank, source, tokens)
            computed = _computed(found, rank, source, tokens)
            visible = torch.tensor(positions[rank])[:, None] >= torch.tensor(positions[source])
            whose = "its own keys" if rank == source else f"the keys of rank {source}"
            case = f"my_block, p={p}: with {whose}, rank {rank} "
            assert not (computed & ~visible).any(), case + (
                f"computes scores of keys that are later than their queries{_beyond(found, tokens)}"
            )
            call = f"my_block({rank}, {source}, {tokens})"
            # elsewhere None may be meant: "nothing is visible"
            assert found is not None or rank != source, f"{call}: {RETURNED_NONE}"
            missing = int((visible & ~computed).sum())
            assert not missing, case + (
                f"leaves out {missing} of the {int(visible.sum())} scores that it should compute"
                f"{_beyond(found, tokens)}"
            )
            work[(rank - source) % p, rank] = computed.sum()
    for step in range(p):
        assert work[step].min() == work[step].max(), (
            f"p={p}: in step {step} the ranks compute {work[step].tolist()} scores"
        )


def _positions(chunk: int) -> list[int]:
    return list(range(chunk * SIZE, (chunk + 1) * SIZE))


def _beyond(found: Any, tokens: int) -> str:
    """Which slice goes beyond the tokens that are there; "" where none does."""
    if found is None:
        return ""
    for piece in found[:2]:
        if (piece.start or 0) >= tokens or (piece.stop or 0) > tokens:
            return f": {piece} goes beyond the {tokens} tokens of its rank, which are two chunks"
    return ""


def _computed(found: Any, rank: int, source: int, tokens: int) -> Tensor:
    """Which scores a block computes, [tokens, tokens]."""
    computed = torch.zeros(tokens, tokens, dtype=torch.bool)
    case = f"my_block({rank}, {source}, {tokens}) "
    assert found is not ..., NotImplementedError("exercise")
    if found is None:
        return computed
    assert isinstance(found, (tuple, list)) and len(found) == 3, (
        case + f"gives {found!r}: a slice of queries, a slice of keys, and True or False are due"
    )
    queries, keys, causal = found
    assert isinstance(queries, slice) and isinstance(keys, slice), (
        case + "gives no slices: write slice(start, stop)"
    )
    for piece in (queries, keys):
        for edge in (piece.start, piece.stop):
            assert edge is None or hasattr(edge, "__index__"), (
                case + f"gives {piece}: a slice takes whole numbers, and {edge} is none"
            )
    seen = torch.ones_like(computed[queries, keys])
    if causal:
        assert seen.shape[0] == seen.shape[1], (
            case + f"is causal with {seen.shape[0]} queries and {seen.shape[1]} keys: in a causal "
            "block query i sees the keys 0 to i"
        )
        seen = seen.tril()
    computed[queries, keys] = seen
    return computed


# ---- 11.5

GPUS = 64
PER_NODE = 8
SEQUENCES = 8
ROOM_BYTES = 60e9
LOST_SHARE = 0.2
# bytes per second each way and GPU; sources in lesson 08
NVLINK = 450e9
INFINIBAND = 50e9
H100_FLOPS_PER_S = 989e12  # dense BF16, NVIDIA's H100 datasheet; 40 % of it is reached
LONG = gpt_shape("gpt_7b", context_length=131072)


def _link_speed(shape: GridShape, axis: str) -> float:
    """Bytes per second in the groups of an axis: the slower link where one leaves its node."""
    for group in shape.groups(axis):
        nodes = {rank // PER_NODE for rank in group}
        if len(nodes) > 1:
            return INFINIBAND
    return NVLINK


def costs(shape: GridShape) -> dict[str, float]:
    """What a grid costs with sequence parallelism over tp and a ring over cp.

        act       = S/cp * H * 2 bytes             what one tp group holds between two layers
        tp bytes  = L * 10 * (tp-1)/tp * act       of one GPU for a sequence
        cp bytes  = L * (cp-1) * 8 * act/tp        K and V in forward (2), again in backward (2),
                                                   and their float32 gradients (4)

    Weights, gradients and optimizer take 16 bytes for each parameter, divided by tp. One sequence
    is under way at a time, and nothing overlaps.

    Returns:
        GB on a GPU (`weights_gb`, `activations_gb`) and seconds of a step (`tp_s`, `cp_s`,
        `computing_s`).

    Raises:
        ValueError: The model does not fit the grid.
    """
    kept = model_activations(LONG, shape, batch=1, sequence_parallel=True)
    sequences = SEQUENCES / shape.dp
    act = LONG.context_length / shape.cp * LONG.hidden_size * 2
    tp_bytes = LONG.num_layers * 10 * (shape.tp - 1) / shape.tp * act * sequences
    cp_bytes = LONG.num_layers * (shape.cp - 1) * 2 * act / shape.tp * (1 + 1 + 2) * sequences
    flops = training_flops_per_sample(LONG) * SEQUENCES
    return {
        "weights_gb": 16 * LONG.num_parameters / shape.tp / 1e9,
        "activations_gb": sum(kept.values()) / 1e9,
        "tp_s": tp_bytes / _link_speed(shape, "tp"),
        "cp_s": cp_bytes / _link_speed(shape, "cp"),
        "computing_s": flops / GPUS / (0.4 * H100_FLOPS_PER_S),
    }


def design(shape: GridShape) -> None:
    """The learner's grid for sequences of 131072 tokens: it fits, and tp and cp take little time.

    Args:
        shape: Of 64 GPUs.
    """
    assert shape is not None, "my_grid is None: write GridShape(dp=.., cp=.., tp=..)"
    shape = due(shape)
    assert isinstance(shape, GridShape), f"{shape!r} is not a GridShape"
    assert shape.world_size == GPUS, f"dp*pp*cp*tp = {shape.world_size}, and there are {GPUS} GPUs"
    assert shape.pp == 1, f"pp is {shape.pp}, and no pipeline is asked for here: pp = 1"
    assert SEQUENCES % shape.dp == 0, (
        f"dp = {shape.dp} does not divide the {SEQUENCES} sequences of a step"
    )
    try:
        found = costs(shape)
    except ValueError as error:
        raise AssertionError(str(error)) from None

    held_bytes = (found["weights_gb"] + found["activations_gb"]) * 1e9
    larger = "weights" if found["weights_gb"] > found["activations_gb"] else "activations"
    assert held_bytes <= ROOM_BYTES, (
        f"{si(held_bytes, 'B')} on each GPU, {si(ROOM_BYTES, 'B')} are allowed; "
        f"most are {larger}: which axis cuts those?"
    )
    lost_s = found["tp_s"] + found["cp_s"]
    computing_s = found["computing_s"]
    slower = "tp" if found["tp_s"] > found["cp_s"] else "cp"
    order = ""
    if shape.size(slower) <= PER_NODE and _link_speed(shape, slower) == INFINIBAND:
        order = f", whose groups lie on several nodes in the order {shape.order}"
    assert lost_s <= LOST_SHARE * computing_s, (
        f"{lost_s:.1f} s on the links beside {computing_s:.1f} s of computing, "
        f"above {LOST_SHARE:.0%}; most of it is {slower}{order}"
    )
