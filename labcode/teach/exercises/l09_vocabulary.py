"""Exercises 9.5 and 9.6: the embedding and the loss. The text of each assertion is a hint."""

import gc
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from labcode.comm.counting import Call, counted
from labcode.parallel import tensor
from labcode.pool.ranks import RankError, Ranks
from labcode.teach.check import due
from labcode.teach.exercises.l09_groups import (
    SHAPES,
    TOLERANCE,
    Parameter,
    check_group_sizes,
    check_sums,
    draw,
    error_of,
    is_close,
    kinds,
    one_tensor,
    parameters_of,
    refuse_ours,
    run_on,
    sent_in_backward,
    stand,
    watched_sums,
    who_is,
    written,
)
from labcode.teach.exercises.on_ranks import without
from labcode.topology import GridShape

# ---- 9.5

# 83 on 4 ranks: only the last has fewer rows. 82: the last two, so it counts how long each part is.
VOCABS = (83, 82)
WIDTH = 5


class _OwnEmbedding(NamedTuple):
    """What the learner's embedding has and gives on one rank.

    Args:
        params: {name: parameter}; None if it is no nn.Module.
        y: Its output, [2, 9, WIDTH].
        calls: What travelled.
        table_kept: Whether the embedding that was handed in was left unchanged.
        holds_whole: Whether something still holds the memory of the whole table.
        tokens_kept: Whether the tokens were left unchanged.
        behind_autograd: Whether a sum was written into a tensor of the graph.
    """

    params: dict[str, Parameter] | None
    y: Tensor | None = None
    calls: Sequence[Call] = ()
    table_kept: bool = True
    holds_whole: bool = False
    tokens_kept: bool = True
    behind_autograd: bool = False


def _tokens(number: int, vocab: int) -> Tensor:
    """[2, 9] tokens of a group, with the first and the last token of each rank among them."""
    generator = torch.Generator().manual_seed(50 + number)
    tokens = torch.randint(vocab, (2, 9), generator=generator)
    ends = _ends(vocab)
    tokens.view(-1)[: len(ends)] = ends
    return tokens


def _ends(vocab: int) -> Tensor:
    """The first and the last token of each rank, whether there are two ranks or four."""
    ends = [0, vocab - 1]
    for part in torch.arange(vocab).tensor_split(4)[1:]:
        ends += [int(part[0]) - 1, int(part[0])]
    return torch.tensor(ends)


def _whole_embedding(vocab: int) -> nn.Embedding:
    return nn.Embedding.from_pretrained(draw(60, vocab, WIDTH), freeze=False)


def _own_embedding(make: Callable[..., Any], shape: GridShape, vocab: int) -> _OwnEmbedding:
    place = stand(shape)
    whole = _whole_embedding(vocab)
    memory = StorageWeakRef(whole.weight.untyped_storage())
    embedding = due(make(whole, place.group))
    table_kept = torch.equal(whole.weight.detach(), _whole_embedding(vocab).weight.detach())
    del whole
    refuse_ours(embedding)
    if not isinstance(embedding, nn.Module):
        return _OwnEmbedding(None)
    tokens = _tokens(place.number, vocab)
    before = tokens.clone()
    with counted() as calls, watched_sums() as sums:
        y = one_tensor(embedding(tokens))
    if y.requires_grad:
        calls += sent_in_backward(y.square().sum())
    if not memory.expired():
        gc.collect()
    return _OwnEmbedding(
        params=parameters_of(embedding),
        y=y.detach(),
        calls=calls,
        table_kept=table_kept,
        holds_whole=not memory.expired(),
        tokens_kept=torch.equal(tokens, before),
        behind_autograd=sums.behind_autograd,
    )


def vocabulary_embedding(make: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `VocabParallelEmbedding(embedding, group)`."""
    written(make, "MyVocabParallelEmbedding")
    for vocab, shape in itertools.product(VOCABS, SHAPES):
        try:
            results = run_on(ranks, shape, _own_embedding, make, vocab)
        except RankError as error:
            assert "IndexError" not in str(error), (
                "a rank looks up a token that it does not have: which row of its own part would "
                "that be?"
            )
            raise
        for rank, own in enumerate(results):
            coords = shape.coords(rank)
            who = f"{vocab} tokens, {who_is(rank, shape)}"
            _check_embedding(who, own, coords["tp"], shape.tp, coords["dp"], vocab)


def _check_embedding(
    who: str, own: _OwnEmbedding, rank: int, p: int, number: int, vocab: int
) -> None:
    whole = _whole_embedding(vocab)
    tokens = _tokens(number, vocab)
    expected = whole(tokens)
    expected.square().sum().backward()
    assert whole.weight.grad is not None
    assert own.params is not None and own.y is not None, who + "the class makes no nn.Module"
    assert own.table_kept, who + (
        "`embedding` itself has been changed, and it belongs to the caller: make a new parameter"
    )
    for name, param in own.params.items():
        assert param.value.shape != whole.weight.shape, who + (
            f"{name} is the whole table, {list(whole.weight.shape)}: each rank keeps some rows"
        )
    assert "weight" in own.params, who + "there is no parameter `weight`"
    weight = own.params["weight"]
    wanted = whole.weight.detach().tensor_split(p)[rank]
    assert weight.value.shape == wanted.shape and torch.equal(weight.value, wanted), who + (
        f"weight is {list(weight.value.shape)} and not part {rank} of `tensor_split({p})`, "
        f"{list(wanted.shape)}"
    )
    assert weight.storage == weight.value.numel(), who + (
        "weight is a view of the whole table, whose memory cannot be freed: it needs a copy"
    )
    assert not own.holds_whole, who + (
        "something in the layer still holds the whole table, whose memory cannot be freed"
    )
    assert own.tokens_kept, who + "forward has changed `tokens`, which belong to the caller"
    check_group_sizes(who, own.calls, p)
    assert own.y.shape == expected.shape, who + (
        f"the output is {list(own.y.shape)}, expected {list(expected.shape)}"
    )
    assert own.calls, who + "nothing travels: who has the vectors of the other tokens?"
    wrong = (own.y - expected.detach()).abs().amax(-1) > TOLERANCE
    if wrong.any():
        token = int(tokens[wrong][0])
        first = sum(len(part) for part in torch.arange(vocab).tensor_split(p)[:rank])
        whose = "has" if first <= token < first + len(wanted) else "does not have"
        raise AssertionError(
            who + f"the vector of token {token} is wrong; this rank {whose} that token. What does "
            "each rank add to the sum?"
        )
    assert [call.kind for call in own.calls] == ["all_reduce"], who + (
        f"{kinds(own.calls)}; one all_reduce is enough"
    )
    check_sums(who, own.behind_autograd)
    grad = weight.grad
    assert grad is not None, who + (
        "weight gets no gradient: all_reduce alone has no backward, g has"
    )
    assert is_close(grad, whole.weight.grad.tensor_split(p)[rank]), who + (
        "the gradient of weight is wrong: what do the tokens of other ranks look up here?"
    )


# ---- 9.6

VOCAB = VOCABS[0]
TOKENS = 12
LEVELS = {  # around which the logits of the tokens lie
    "with logits around 0": torch.zeros(TOKENS, 1),
    "with logits around 1000": torch.full((TOKENS, 1), 1000.0),
    "with logits around 0 for some tokens and around 2000 for others": torch.arange(
        TOKENS
    ).remainder(2)[:, None]
    * 2000.0,
}
VocabularyLoss = Callable[..., Tensor]


class _OwnLoss(NamedTuple):
    """What the learner's loss gave on one rank.

    Args:
        loss: [TOKENS].
        grad: Of this rank's logits; None if there is none.
        shifted: This rank's logits minus their own maximum, [TOKENS, columns]: what a loss sums
            whose ranks did not agree on one maximum.
        logits_kept, targets_kept: Whether the arguments were left unchanged.
        forward, backward: What travelled.
    """

    loss: Tensor
    grad: Tensor | None
    shifted: Tensor
    logits_kept: bool
    targets_kept: bool
    forward: list[Call]
    backward: list[Call]
    behind_autograd: bool


def _logits(levels: str, number: int) -> tuple[Tensor, Tensor]:
    """Whole logits of a group at these levels, [TOKENS, VOCAB], and targets, [TOKENS]."""
    logits = draw(70 + number, TOKENS, VOCAB) * 3 + LEVELS[levels]
    generator = torch.Generator().manual_seed(80 + number)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    ends = _ends(VOCAB)
    targets[: len(ends)] = ends
    return logits, targets


def _own_loss(loss: VocabularyLoss, shape: GridShape, levels: str) -> _OwnLoss:
    place = stand(shape)
    logits, targets = _logits(levels, place.number)
    parts = logits.tensor_split(place.p, -1)
    before = parts[place.rank].contiguous()
    first = sum(part.shape[-1] for part in parts[: place.rank])
    mine = before.clone().requires_grad_()
    given = targets.clone()
    with (
        counted() as forward,
        watched_sums() as sums,
        without(tensor.vocab_parallel_cross_entropy),
    ):
        found = one_tensor(loss(mine, given, first, place.group))
    backward: list[Call] = []
    if found.requires_grad and found.shape == (TOKENS,):
        backward = sent_in_backward(found.sum())
    return _OwnLoss(
        loss=found.detach(),
        grad=mine.grad,
        shifted=before - before.amax(-1, keepdim=True),
        logits_kept=torch.equal(mine.detach(), before),
        targets_kept=torch.equal(given, targets),
        forward=forward,
        backward=backward,
        behind_autograd=sums.behind_autograd,
    )


def vocabulary_loss(loss: VocabularyLoss, ranks: Ranks) -> None:
    """The learner's loss per token, from logits that are cut over the vocabulary.

    Args:
        loss: `loss(logits, targets, first, group)`: [T, columns] own logits, [T] targets, the
            number of the first own column, the group.
        ranks: Where it runs.
    """
    written(loss, "my_loss")
    for shape, levels in itertools.product(SHAPES, LEVELS):
        try:
            results = run_on(ranks, shape, _own_loss, loss, levels)
        except RankError as error:
            assert "index" not in str(error) or "out of" not in str(error), (
                "a rank reads a column that it does not have: who has the logit of the target?"
            )
            raise
        for members in shape.groups("tp"):
            _check_group_loss([results[member] for member in members], members, shape, levels)


def _check_group_loss(
    results: Sequence[_OwnLoss], members: Sequence[int], shape: GridShape, levels: str
) -> None:
    logits, targets = _logits(levels, shape.coords(members[0])["dp"])
    logits.requires_grad_()
    expected = F.cross_entropy(logits, targets, reduction="none")
    expected.sum().backward()
    assert logits.grad is not None
    grads = logits.grad.tensor_split(shape.tp, -1)
    own_shifted = torch.cat([result.shifted for result in results], -1)
    separate_maxima = F.cross_entropy(own_shifted, targets, reduction="none")
    expected = expected.detach()
    largest = logits.detach().amax(-1)
    for member, result, grad in zip(members, results, grads):
        who = who_is(member, shape)
        _check_loss_shape(who, result.loss, levels, expected)
        check_group_sizes(who, [*result.forward, *result.backward], shape.tp)
        assert not is_close(result.loss, separate_maxima), who + (
            "each rank subtracts a maximum of its own, so their sums have different units: "
            "agree on one maximum first"
        )
        _check_loss_formula(who, result.loss, expected, largest)
        _check_loss_values(who, result, targets, expected)
        _check_loss_gradient(who, result, grad)


def _check_loss_shape(who: str, found: Tensor, levels: str, expected: Tensor) -> None:
    assert found.shape == expected.shape, who + (
        f"the result is {list(found.shape)}, expected {list(expected.shape)}: one loss for each "
        "token"
    )
    assert found.isfinite().all(), who + (
        f"the loss is not finite {levels}: what do you subtract before you take the exponential, "
        "and of which logits is it taken?"
    )


def _check_loss_formula(who: str, found: Tensor, expected: Tensor, largest: Tensor) -> None:
    """Right sums, wrongly put together."""
    assert not is_close(found, -expected), who + "every loss has the wrong sign"
    for sign in (-1, 1):
        assert not is_close(found, expected + sign * largest), who + (
            "every loss is off by the largest logit of its token: in which terms of the formula "
            "does m stand?"
        )


def _check_loss_values(who: str, result: _OwnLoss, targets: Tensor, expected: Tensor) -> None:
    """The right numbers, from few bytes, and the logits unchanged."""
    found = result.loss
    worst = int((found - expected).abs().argmax())
    assert is_close(found, expected), who + (
        f"token {worst} (target {targets[worst]}): {found[worst]:.4f}, "
        f"expected {expected[worst]:.4f}; which sums need the other ranks, "
        "and who has the logit of the target?"
    )
    assert result.targets_kept, who + "`targets` have been changed, and they belong to the caller"
    assert result.logits_kept, who + "the logits were changed in place: backward will need them"
    numbers_per_token = sum(call.num_bytes for call in result.forward) / TOKENS / 8
    assert numbers_per_token <= 4, who + (
        f"{numbers_per_token:.0f} numbers per token travel; three are enough, "
        "the logits stay where they are"
    )


def _check_loss_gradient(who: str, result: _OwnLoss, expected: Tensor) -> None:
    """Softmax minus one at the target, on this rank's columns."""
    check_sums(who, result.behind_autograd)
    assert result.grad is not None, who + (
        "the loss is right, and no gradient reaches the logits: all_reduce alone has no backward"
    )
    assert not result.backward, who + (
        f"backward makes {kinds(result.backward)}: nothing has to travel there"
    )
    assert is_close(result.grad, expected), who + (
        "the loss is right, the gradient of the logits is "
        f"{error_of(result.grad, expected):.0%} off: through which sums must it flow back?"
    )
