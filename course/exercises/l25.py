"""Checks of lesson 25, fine-tuning on many ranks.

What has collectives runs on simulated ranks: on four, on six, and on three of four.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course.answer import Exercise, Hint, due
from course.exercises.expect import (
    careless,
    confirm_in_group,
    diagnose,
    in_groups,
    multiple,
    refuse,
    sequence,
    tensor,
    times,
    with_gaps,
)
from course.exercises.simulated import Outcome, here
from course.pool.ranks import Ranks

CHANGED = "the call has changed {}: that belongs to the caller"
NOT_COUNTED = -100

Pair = tuple[list[int], list[int]]


def _draw(seed: int, *shape: int) -> Tensor:
    """Normal random numbers in float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


# ---- 25.1

PAIRS: tuple[Pair, ...] = (
    ([11, 12, 13], [21, 22]),
    ([11], [21, 22, 23, 24]),
    ([11, 12, 13, 14, 15], [21]),
    ([7, 7, 3], [7, 3, 0]),
)


def _targets(prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    return [NOT_COUNTED] * (len(prompt) - 1) + list(answer)


def targets_of(answer: Callable[..., Any]) -> None:
    """The learner's `targets_of(prompt, answer)`."""
    for prompt, own in PAIRS:
        given = list(prompt), list(own)
        found = due(answer(*given))
        case = f"prompt {prompt}, answer {own}: "
        refuse({CHANGED.format("a list"): given != (prompt, own)}, case)
        sequence(found, "a list of numbers")
        found = list(found)
        truth = _targets(prompt, own)
        if found == truth:
            continue
        whole = prompt + own
        late = [NOT_COUNTED] * len(prompt)
        with_zeros = [0] * (len(prompt) - 1) + own
        mistakes = {
            "that is the pair itself: a target is the token that comes after the place": (
                found in (whole, whole[:-1])
            ),
            "the prompt counts as well: which places predict a token of the prompt?": (
                found == whole[1:]
            ),
            "this pads with 0, which is a token: what does not count is -100": found == with_zeros,
            "one target too many: the last token of a pair has nothing to predict. And which place "
            "predicts the first token of the answer?": found == late + own,
            "the first token of the answer is lost: the last token of the prompt predicts it": (
                found == late + own[1:]
            ),
            "only the answer is there: places of the prompt need a target too, one that does not "
            "count": found in (own, own[1:]) and len(prompt) > 1,
            f"{len(found)} targets, and the pair has {len(truth)} places: one for each token but "
            "the last": len(found) != len(truth),
        }
        refuse(mistakes, case)
        raise Hint(f"{case}it returned {found}: at which places is a token of the answer next?")


# ---- 25.2

ROWS: tuple[tuple[Pair, ...], ...] = (
    (([1, 2, 3], [4, 5, 6]),),
    (([1, 2], [4, 5]), ([7, 8, 9], [10])),
    (([1, 2, 3], [4, 5, 6]), ([7], [9]), ([11], [12, 13, 14]), ([3, 3], [3, 5])),
)
NAMES = ("tokens", "targets", "positions", "mask")


class _Row(NamedTuple):
    """A packed row, and for each place the number of its document."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor


def _packed(pairs: Sequence[Pair]) -> _Row:
    tokens: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    documents: list[int] = []
    for number, (prompt, own) in enumerate(pairs):
        length = len(prompt) + len(own) - 1
        tokens += [*prompt, *own][:-1]
        targets += _targets(prompt, own)
        positions += range(length)
        documents += [number] * length
    columns = (tokens, targets, positions, documents)
    return _Row(*(torch.tensor(column) for column in columns))


def pack(answer: Callable[..., Any]) -> None:
    """The learner's `pack(pairs)`."""
    for pairs in ROWS:
        case = "one pair: " if len(pairs) == 1 else f"{len(pairs)} pairs: "
        given = [(list(prompt), list(own)) for prompt, own in pairs]
        found = due(answer(given))
        refuse({CHANGED.format("pairs"): given != [tuple(pair) for pair in pairs]}, case)
        if not isinstance(found, list | tuple) or len(found) != len(NAMES):
            raise Hint(f"{case}return four tensors: {', '.join(NAMES)}")
        for name, value in zip(NAMES, found):
            due(value)
            tensor(value, what=f"{name}: it is")
        row = _packed(pairs)
        whole = torch.cat([torch.tensor(prompt + own) for prompt, own in pairs])
        _are_tokens(case, found[0], row, whole)
        _are_targets(case, found[1], row, whole)
        _are_positions(case, found[2], row)
        _is_mask(case, found[3], row)


def _is(found: Tensor, other: Tensor) -> bool:
    return found.shape == other.shape and bool((found == other).all())


def _whole_numbers(case: str, name: str, found: Tensor, row: _Row) -> None:
    length = len(row.tokens)
    mistakes = {
        f"{name} have the dtype {found.dtype}, expected is int64": found.dtype != torch.int64,
        f"{name} have the shape {list(found.shape)}, expected is [{length}]: one row, without a "
        "dim for the batch": list(found.shape) != [length],
    }
    refuse(mistakes, case)


def _are_tokens(case: str, found: Tensor, row: _Row, whole: Tensor) -> None:
    mistakes = {
        "each pair is there with its last token, which has nothing to predict": _is(found, whole),
        "only the last token of the row is left out: what is to be predicted at the last token of "
        "the first pair?": _is(found, whole[:-1]) and not _is(found, row.tokens),
    }
    refuse(mistakes, case)
    _whole_numbers(case, "tokens", found, row)
    refuse({"tokens are not those of the pairs in their order": not _is(found, row.tokens)}, case)


def _are_targets(case: str, found: Tensor, row: _Row, whole: Tensor) -> None:
    _whole_numbers(case, "targets", found, row)
    if _is(found, row.targets):
        return
    counts = row.targets != NOT_COUNTED
    shifted = torch.cat((row.tokens[1:], whole[-1:]))
    ends = row.documents != torch.cat((row.documents[1:], row.documents[-1:] + 1))
    mistakes = {
        "at the end of a document the target is the first token of the next one: its own answer "
        "ends there": (
            len(row.tokens) > 1
            and bool((found[ends] == shifted[ends])[:-1].any())
            and not bool((found[ends] == row.targets[ends]).all())
        ),
        "the prompts count as well": (
            _is(found[counts], row.targets[counts]) and bool((found[~counts] != NOT_COUNTED).any())
        ),
        "the targets are the tokens themselves: a target is what comes after": (
            _is(found[counts], row.tokens[counts])
        ),
    }
    refuse(mistakes, case)
    raise Hint(
        f"{case}the targets are {found.tolist()}: each document has those of its pair, as in 25.1"
    )


def _are_positions(case: str, found: Tensor, row: _Row) -> None:
    _whole_numbers(case, "positions", found, row)
    mistakes = {
        "positions run through the row: each document begins at 0": (
            _is(found, torch.arange(len(row.tokens))) and not _is(found, row.positions)
        ),
        "positions begin at 1: the first one is 0": _is(found, row.positions + 1),
        "positions are numbers of documents": _is(found, row.documents),
        "positions do not count from 0 in each document": not _is(found, row.positions),
    }
    refuse(mistakes, case)


def _is_mask(case: str, found: Tensor, row: _Row) -> None:
    length = len(row.tokens)
    if list(found.shape) != [length, length]:
        raise Hint(f"{case}the mask has the shape {list(found.shape)}, expected is [S, S]")
    same = row.documents[:, None] == row.documents[None, :]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    truth = same & causal
    if found.dtype != torch.bool:
        raise Hint(f"{case}the mask has the dtype {found.dtype}, expected is bool: True is seen")
    by_position = row.positions[None, :] <= row.positions[:, None]
    mistakes = {
        "the mask is the wrong way round: True is what is seen": _is(found, ~truth),
        "documents see each other: the mask is that of one causal sequence": _is(found, causal),
        "a token sees what comes after it in its document": _is(found, same),
        "a token does not see itself": _is(found, truth & ~torch.eye(length, dtype=torch.bool)),
        "a token sees what comes after it and not what came before: row i says whom i sees": (
            _is(found, truth.T)
        ),
        "documents see each other: positions alone do not tell one document from another": (
            _is(found, by_position) or _is(found, by_position & causal)
        ),
        "documents see each other": bool((found & ~same).any()),
        "a token sees what comes after it": bool((found & ~causal).any()),
    }
    if not _is(found, truth):
        refuse(mistakes, case)
        raise Hint(f"{case}a token does not see all that came before it in its document")


# ---- 25.3

VOCABULARY = 5
WIDTH = 3


class _Load(NamedTuple):
    """How many targets count: of rank r in micro-batch m.

    Args:
        about: What a hint begins with.
        counts: `counts(number in the group, micro-batch)`.
        micro_batches: How many a rank has.
    """

    about: str
    counts: Callable[[int, int], int]
    micro_batches: int = 2


def _all_alike(number: int, micro: int) -> int:
    return 7  # no size of a group, so that dividing by it is not taken for a factor of p


def _by_micro_batch(number: int, micro: int) -> int:
    return (2, 6, 3)[micro] + number % 3


def _uneven(number: int, micro: int) -> int:
    return 1 + (3 * number + 2 * micro) % 7


def _some_none(number: int, micro: int) -> int:
    return 0 if number == 1 or (number == 2 and micro == 0) else _uneven(number, micro)


LOADS = (
    _Load("with the same number of targets everywhere: ", _all_alike),
    _Load("with micro-batches of different numbers of targets: ", _by_micro_batch, 3),
    _Load("with ranks that have different numbers of targets: ", _uneven),
    _Load("with a rank on which no target counts: ", _some_none),
)


def _micro_batches(load: _Load, number: int) -> list[tuple[Tensor, Tensor]]:
    """(tokens, targets) [2, 5] of a rank; the tokens of ranks differ."""
    found = []
    for micro in range(load.micro_batches):
        generator = torch.Generator().manual_seed(100 * number + micro)
        tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
        targets = torch.randint(VOCABULARY, (10,), generator=generator)
        order = torch.randperm(10, generator=generator)
        targets[order[load.counts(number, micro) :]] = NOT_COUNTED
        found.append((tokens, with_gaps(targets.view(2, 5))))
    return found


class _Model(nn.Module):
    """Logits [B, S, V] from a token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(_draw(1, VOCABULARY, WIDTH))
        self.head = nn.Parameter(_draw(2, WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.embed[tokens]) @ self.head


class _Stepped(NamedTuple):
    """The loss that was returned, and the gradient after DDP's mean."""

    loss: Tensor
    grad: Tensor


def _step(group: dist.ProcessGroup, answer: Callable[..., Any], load: _Load) -> _Stepped:
    model = _Model()
    before = [param.detach().clone() for param in model.parameters()]
    given = _micro_batches(load, group.rank())
    copies = [(tokens.clone(), targets.clone()) for tokens, targets in given]
    with here().block("step"):
        loss = due(answer(model, given, group))
    if not isinstance(loss, Tensor | float) or torch.as_tensor(loss).numel() != 1:
        raise Hint("return the mean loss: one number")
    same = [
        torch.equal(tokens, old) and torch.equal(targets, others)
        for (tokens, targets), (old, others) in zip(given, copies)
    ]
    grads = [param.grad for param in model.parameters()]
    moved = [not torch.equal(param, old) for param, old in zip(model.parameters(), before)]
    mistakes = {
        CHANGED.format("a micro-batch"): len(given) != len(copies) or not all(same),
        "the weights have changed: an optimizer comes later": any(moved),
        "the weights have no gradient: is backward called for each micro-batch, also for one in "
        "which no target counts?": any(grad is None for grad in grads),
    }
    refuse(mistakes)
    with here().block("DDP"):
        flat = torch.cat([grad.flatten() for grad in grads if grad is not None])
        dist.all_reduce(flat, group=group)
    value = torch.as_tensor(loss, dtype=torch.float64).detach().clone().reshape(())
    return _Stepped(value, flat / group.size())


class _Sums(NamedTuple):
    """Of one micro-batch of a rank: the sum of the losses, its gradient, and how many count."""

    loss: Tensor
    grad: Tensor
    count: int
    places: int


def _sums(load: _Load, number: int) -> list[_Sums]:
    found = []
    for tokens, targets in _micro_batches(load, number):
        model = _Model()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        parts = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
        count = int((targets != NOT_COUNTED).sum())
        found.append(_Sums(loss.detach(), torch.cat(parts), count, targets.numel()))
    return found


def _counts(own: Sequence[_Sums]) -> list[int]:
    return [one.count for one in own]


def _mean_over(of_ranks: Sequence[Sequence[_Sums]], field: str, divide: Callable[..., Any]) -> Any:
    """The sum of all micro-batches of all ranks, each divided by its own number, over the ranks."""
    total = torch.zeros((), dtype=torch.float64)
    for number, own in enumerate(of_ranks):
        for micro, one in enumerate(own):
            total = total + getattr(one, field) / max(1, divide(number, micro))
    return total / len(of_ranks)


def _is_step(
    load: _Load, results: Sequence[_Stepped], outcome: Outcome, members: Sequence[int]
) -> None:
    p = len(members)
    of_ranks = [_sums(load, number) for number in range(p)]
    counts = torch.tensor([_counts(own) for own in of_ranks])
    total = int(counts.sum())
    micro = load.micro_batches
    places = p * micro * of_ranks[0][0].places

    def by_own_mean(number: int, place: int) -> int:
        return int(counts[number, place]) * micro

    def by_rank(number: int, place: int) -> int:
        return int(counts[number].sum())

    def by_micro_batch(number: int, place: int) -> float:
        return counts[:, place].sum().item() / p * micro

    def by_mean_sum(number: int, place: int) -> int:
        return int(counts[number, place])

    for rank, found in zip(members, results):
        about = f"{load.about}on rank {rank}: "
        refuse(careless(outcome.of(rank)), about)
        for field, what, value in (
            ("grad", "the gradient", found.grad),
            ("loss", "the loss", found.loss),
        ):
            summed = _mean_over(of_ranks, field, _one) * p
            truth = summed / total
            own = of_ranks[members.index(rank)]
            own_loss = torch.stack([getattr(one, field) for one in own]).sum(0)
            own_count = max(1, sum(_counts(own)))
            mistakes: dict[str, Any] = {
                f"{what} is nan: a mean over no tokens is 0/0, and a sum is not": (
                    bool(value.isnan().any())
                ),
                f"{what} divides by all places: only those whose target is not -100 count": (
                    summed / places
                ),
            }
            if field == "grad":
                mistakes |= {
                    "the gradient is 1/p of what it should be: DDP divides by the number of ranks "
                    "after you have divided already": truth / p,
                    "the gradient is p times as long as it should be: is N that of all ranks, and "
                    "does p stand there once?": truth * p,
                }
            else:
                mistakes |= {
                    "the loss is that of this rank alone: the log wants that of all ranks": (
                        own_loss / own_count
                    ),
                    "the loss is this rank's part of the sum: nobody has added up the others": (
                        own_loss / total
                    ),
                    "the loss is p times as large as it should be: the factor against DDP's mean "
                    "belongs to the gradient": truth * p,
                    "the loss is a sum over all tokens: divide it by their number": summed,
                }
            mistakes |= {
                f"{what} is a mean of the micro-batches' means: each token has to count alike, "
                "wherever it lies": _mean_over(of_ranks, field, by_own_mean),
                f"{what} is a sum of means, one of each micro-batch": (
                    _mean_over(of_ranks, field, by_mean_sum)
                ),
                f"{what} is a mean of the ranks' means: each rank has divided by its own tokens": (
                    _mean_over(of_ranks, field, by_rank)
                ),
                f"{what} is divided twice, by N and by each micro-batch's own tokens: which "
                "reduction leaves the division to you?": (
                    p * _mean_over(of_ranks, field, by_mean_sum) / total
                ),
                f"{what} divides each micro-batch by its own tokens on all ranks: N is the number "
                "of the whole step": _mean_over(of_ranks, field, by_micro_batch),
                f"{what} is {{times:.3g}} times what it should be: is each loss divided once by "
                "the tokens of all ranks and micro-batches?": times(truth),
            }
            otherwise = f"{what} is {{off:.0%}} away from that of one process with all tokens"
            diagnose(about, value, truth, mistakes, otherwise)


def _one(number: int, micro: int) -> int:
    return 1


def backward_of_step(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `backward_of_step(model, micro_batches, group)`."""
    said = ""
    for load in LOADS:

        def judge(
            results: Sequence[_Stepped],
            outcome: Outcome,
            members: Sequence[int],
            load: _Load = load,
        ) -> None:
            _is_step(load, results, outcome, members)

        outcome = in_groups(_step, answer, load, judge=judge)
        said = confirm_in_group(ranks, outcome, _step, answer, load)
    return said


# ---- 25.4


def lora(answer: Callable[..., Any]) -> None:
    """The learner's class `Lora(layer, rank, alpha)`."""
    for num_in, num_out, rank, alpha, bias in ((6, 4, 2, 6.0, True), (3, 7, 3, 2.0, False)):
        case = f"a layer of {num_in} to {num_out}, r = {rank}, alpha = {alpha:g}: "
        torch.manual_seed(25)
        layer = nn.Linear(num_in, num_out, bias=bias).double()
        weight = layer.weight.detach().clone()
        x = with_gaps(_draw(3, 2, 5, num_in))
        plain = F.linear(x, weight, layer.bias).detach()
        mine = answer(layer, rank, alpha)
        _is_made(case, mine, layer, rank)
        mine_a, mine_b = mine.a, mine.b
        with torch.no_grad():
            _gives(case + "at first: ", mine, x, plain, {"the bias is missing": _no_bias(layer, x)})
            mine_b.copy_(_draw(5, num_out, rank))
        product = (x @ mine_a.T @ mine_b.T).detach()
        scale = alpha / rank
        mistakes = {
            "s is alpha / r, and the adapter counts alpha times": plain + alpha * product,
            "s is alpha / r, and the adapter counts once": plain + product,
            "s is alpha / r, and the adapter counts r / alpha times": plain + product / scale,
            "the adapter counts alpha r times": plain + alpha * rank * product,
            "the adapter is missing": plain,
            "only the adapter is there, without W x": scale * product,
            "W x and the bias are multiplied by s as well": scale * (plain + product),
            "s is there twice": plain + scale**2 * product,
        }
        about = case + "with a B that is not zero: "
        y = _gives(about, mine, x, plain + scale * product, mistakes)
        y.backward(_draw(6, *y.shape))
        refuse(
            {
                "W gets a gradient: it is to be frozen": layer.weight.grad is not None,
                "A gets no gradient": mine_a.grad is None,
                "B gets no gradient": mine_b.grad is None,
            },
            about,
        )
        _is_merged(case, mine, layer, weight, x, plain, product, scale)


def _no_bias(layer: nn.Linear, x: Tensor) -> Any:
    if layer.bias is None:
        return False
    return F.linear(x, layer.weight).detach()


def _is_made(case: str, mine: Any, layer: nn.Linear, rank: int) -> None:
    """A and B are parameters of the right shape, A random and B zero, and the layer is frozen."""
    num_out, num_in = layer.weight.shape
    shapes = {"a": [rank, num_in], "b": [num_out, rank]}
    for name, shape in shapes.items():
        value = getattr(mine, name, None)
        due(value) if value is ... else None
        if value is None:
            raise Hint(f"{case}there is no `self.{name}`")
        found = list(getattr(value, "shape", ()))
        refuse(
            {
                f"`self.{name}` is no nn.Parameter, so that no optimizer finds it": (
                    not isinstance(value, nn.Parameter)
                ),
                f"`self.{name}` has the shape {found}, expected is {shape}": found != shape,
                f"`self.{name}` does not require a gradient": (
                    isinstance(value, Tensor) and not value.requires_grad
                ),
                f"`self.{name}` has another dtype than the weight of the layer, which is "
                f"{layer.weight.dtype}": getattr(value, "dtype", None) != layer.weight.dtype,
            },
            case,
        )
    trained = [name for name, param in mine.named_parameters() if param.requires_grad]
    refuse(
        {
            "A and B are both zero: then neither ever gets a gradient": (
                not mine.a.any() and not mine.b.any()
            ),
            "A is zero and B is random: the other way round": not mine.a.any(),
            "B is not zero: training is to begin at the frozen model": bool(mine.b.any()),
            "all rows of A are the same: they would stay so, draw each number": (
                bool((mine.a == mine.a[:1]).all())
            ),
            f"these train: {', '.join(trained)}. The layer is to be frozen, with its bias": (
                sorted(trained) != ["a", "b"]
            ),
        },
        case,
    )


def _gives(case: str, mine: Any, x: Tensor, truth: Tensor, mistakes: Mapping[str, Any]) -> Tensor:
    given = x.clone()
    y = due(mine(given))
    tensor(y, truth.shape)
    refuse({CHANGED.format("x"): not torch.equal(given, x)}, case)
    diagnose(case, y.detach(), truth, mistakes, "forward is {off:.0%} away from the equation")
    return y


def _is_merged(
    case: str,
    mine: Any,
    layer: nn.Linear,
    weight: Tensor,
    x: Tensor,
    plain: Tensor,
    product: Tensor,
    scale: float,
) -> None:
    """After `merge` the weight has the adapter in it, and forward gives what it gave."""
    about = case + "after merge: "
    before = mine.a.detach().clone(), mine.b.detach().clone()
    given = layer.weight
    mine.merge()
    is_new = layer.weight is not given
    refuse(
        {
            "the layer has a new weight, which trains and which no optimizer knows: change the "
            "old one in place": is_new and layer.weight.requires_grad,
            "the layer has a new weight: change the old one in place": is_new,
        },
        about,
    )
    adapter = (before[1] @ before[0]).detach()
    diagnose(
        about,
        layer.weight.detach(),
        weight + scale * adapter,
        {
            "the layer's weight is what it was: does `merge` change it in place?": weight,
            "the adapter is in the weight without s": weight + adapter,
            "the adapter is in the weight, but W itself is gone": scale * adapter,
            "s is twice in the weight": weight + scale**2 * adapter,
            "the adapter was taken from the weight, and not added": weight - scale * adapter,
        },
        "the layer's weight is {off:.0%} away from W + s B A",
    )
    mistakes = {
        "forward adds the adapter once more: it is in the weight already": (
            plain + 2 * scale * product
        )
    }
    with torch.no_grad():
        _gives(about, mine, x, plain + scale * product, mistakes)


# ---- 25.5

HIDDEN = 5
FFN = 12  # four, six and three divide it
RANK = 2
TOKENS = 7
SCALE = 1.5


class _Layer(NamedTuple):
    """W [out, in], A [r, in], B [out, r]."""

    w: Tensor
    a: Tensor
    b: Tensor


def _whole() -> tuple[Tensor, _Layer, _Layer, Tensor]:
    """(x, up, down, the gradient of y)"""
    up = _Layer(_draw(11, FFN, HIDDEN), _draw(12, RANK, HIDDEN), _draw(13, FFN, RANK))
    down = _Layer(_draw(14, HIDDEN, FFN), _draw(15, RANK, FFN), _draw(16, HIDDEN, RANK))
    return _draw(10, TOKENS, HIDDEN), up, down, _draw(17, TOKENS, HIDDEN)


class _Tuned(NamedTuple):
    """What a rank has after backward and `finish`."""

    y: Tensor
    x_grad: Tensor
    grads: dict[str, Tensor]


def _tuned(group: dist.ProcessGroup, answer: Callable[..., Any]) -> _Tuned:
    x, up, down, grad_y = _whole()
    given = [*up, *down]
    before = [value.clone() for value in given]
    mlp = answer(tuple(up), tuple(down), SCALE, group)
    parts = _parts_of(mlp)
    for name, shape in _right_shapes(group.size()).items():
        own = list(parts[name].shape)
        if own != shape:
            raise Hint(f"{name} has the shape {own}, expected is {shape}: {SHAPES[name]}")
    leaf = x.clone().requires_grad_()
    with here().block("forward"):
        y = due(mlp.forward(leaf))
    tensor(y, x.shape)
    refuse({"no gradient can flow back from y": not y.requires_grad})
    with here().block("backward"):
        y.backward(grad_y)
    kept = {}
    for name in ("up A", "up B", "down A", "down B"):
        grad = parts[name].grad
        if grad is None:
            raise Hint(f"{name} has no gradient after backward")
        kept[name] = grad
    with here().block("finish"):
        mlp.finish()
    changed = [not torch.equal(value, old) for value, old in zip(given, before)]
    marked = [value.requires_grad for value in given]
    refuse(
        {
            CHANGED.format("a whole matrix"): any(changed),
            "a whole matrix that it was given requires a gradient afterwards: copy it first": (
                any(marked)
            ),
            "W gets a gradient: it is frozen": any(
                parts[name].requires_grad for name in ("up W", "down W")
            ),
            "no gradient reaches x": leaf.grad is None,
        }
    )
    parts = _parts_of(mlp)
    grads = {}
    for name in kept:
        grad = parts[name].grad
        if grad is None:
            raise Hint(f"{name} has no gradient after finish")
        grads[name] = grad.clone()
    assert leaf.grad is not None
    return _Tuned(y.detach().clone(), leaf.grad.clone(), grads)


def _parts_of(mlp: Any) -> dict[str, Tensor]:
    found = {}
    for name in ("up", "down"):
        layer = getattr(mlp, name, None)
        due(layer) if layer is ... else None
        if not isinstance(layer, list | tuple) or len(layer) != 3:
            raise Hint(f"set `self.{name}` to (W, A, B) of this rank in __init__")
        for matrix, value in zip("WAB", layer):
            tensor(value, what=f"{matrix} of self.{name} is")
            if matrix != "W" and not value.is_leaf:
                raise Hint(
                    f"{matrix} of self.{name} is no leaf, so that its .grad stays None: cut first, "
                    "and call requires_grad_() on the part"
                )
            if matrix != "W" and not value.requires_grad:
                raise Hint(f"{matrix} of self.{name} does not require a gradient")
            if value.untyped_storage().nbytes() > value.numel() * value.element_size():
                raise Hint(
                    f"{matrix} of self.{name} is a view, which keeps the whole matrix in memory: "
                    "make a copy of the part"
                )
            found[f"{name} {matrix}"] = value
    return found


def _right_shapes(p: int) -> dict[str, list[int]]:
    return {
        "up W": [FFN // p, HIDDEN],
        "up A": [RANK, HIDDEN],
        "up B": [FFN // p, RANK],
        "down W": [HIDDEN, FFN // p],
        "down A": [RANK, FFN // p],
        "down B": [HIDDEN, RANK],
    }


SHAPES = {
    "up W": "up is column-parallel: W is cut along its output features",
    "up A": "up is column-parallel: each rank needs the whole A x",
    "up B": "up is column-parallel: B has a row for each output feature: which are its own?",
    "down W": "down is row-parallel: W is cut along its input features",
    "down A": "down is row-parallel: this rank has some of the input features, and which side of A "
    "stands for them?",
    "down B": "down is row-parallel: each rank gives a part of the sum for all output features",
}


class _Truth(NamedTuple):
    """Of one process: y, the gradient of x, whole gradients, and each rank's part of them."""

    y: Tensor
    x_grad: Tensor
    grads: dict[str, Tensor]
    parts: list[dict[str, Tensor]]
    partial_x: list[Tensor]


def _of_one_process(p: int) -> _Truth:
    """The sum of what p ranks compute, each with leaves of its own."""
    x, up, down, grad_y = _whole()
    leaves: list[dict[str, Tensor]] = []
    y = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for number in range(p):
        own = {
            "x": x.clone().requires_grad_(),
            "up A": up.a.clone().requires_grad_(),
            "up B": up.b.chunk(p)[number].clone().requires_grad_(),
            "down A": down.a.chunk(p, 1)[number].clone().requires_grad_(),
            "down B": down.b.clone().requires_grad_(),
        }
        inner = own["x"] @ up.w.chunk(p)[number].T
        inner = F.gelu(inner + SCALE * own["x"] @ own["up A"].T @ own["up B"].T)
        y = y + inner @ down.w.chunk(p, 1)[number].T
        y = y + SCALE * inner @ own["down A"].T @ own["down B"].T
        leaves.append(own)
    y.backward(grad_y)
    parts = []
    for own in leaves:
        parts.append({name: _grad(leaf) for name, leaf in own.items()})
    whole = {}
    for name in ("up A", "down B"):
        whole[name] = torch.stack([part[name] for part in parts]).sum(0)
    partial_x = [part["x"] for part in parts]
    return _Truth(y.detach(), torch.stack(partial_x).sum(0), whole, parts, partial_x)


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _scaled(of_up: float, of_down: float) -> Tensor:
    """y of one process with these scales."""
    x, up, down, _ = _whole()
    inner = F.gelu(x @ up.w.T + of_up * x @ up.a.T @ up.b.T)
    return inner @ down.w.T + of_down * inner @ down.a.T @ down.b.T


def _own_y(p: int, number: int) -> Tensor:
    """This rank's part of the sum y."""
    x, up, down, _ = _whole()
    inner = x @ up.w.chunk(p)[number].T + SCALE * x @ up.a.T @ up.b.chunk(p)[number].T
    inner = F.gelu(inner)
    y = inner @ down.w.chunk(p, 1)[number].T
    return y + SCALE * inner @ down.a.chunk(p, 1)[number].T @ down.b.T


def _is_tuned(results: Sequence[_Tuned], outcome: Outcome, members: Sequence[int]) -> None:
    p = len(members)
    truth = _of_one_process(p)
    for number, (rank, found) in enumerate(zip(members, results)):
        about = f"on rank {rank}: "
        refuse(careless(outcome.of(rank)), about)
        mistakes = {
            "y is this rank's part of a sum: who adds up the parts?": _own_y(p, number),
            "y is {times:.3g} times as large as that of one process": times(truth.y),
            "both adapters are missing in y": _scaled(0.0, 0.0),
            "the adapter of up is missing in y": _scaled(0.0, SCALE),
            "the adapter of down is missing in y": _scaled(SCALE, 0.0),
            "the adapters count without their scale": _scaled(1.0, 1.0),
        }
        otherwise = "y is {off:.0%} away from that of one process: is part i of each matrix here?"
        diagnose(about, found.y, truth.y, mistakes, otherwise)
        mistakes = {
            "the gradient of x is this rank's part alone: f in front of up sums it": (
                truth.partial_x[number]
            ),
            "the gradient of x is {times:.3g} times that of one process": times(truth.x_grad),
        }
        otherwise = (
            "the gradient of x is {off:.0%} away from that of one process: it comes through W and "
            "through the adapter, and each path is summed over the ranks once"
        )
        diagnose(about, found.x_grad, truth.x_grad, mistakes, otherwise)
    for number, (rank, found) in enumerate(zip(members, results)):
        _are_gradients(f"on rank {rank}: ", found, truth, number, p)


def _are_gradients(about: str, found: _Tuned, truth: _Truth, number: int, p: int) -> None:
    for name in ("up A", "down B"):
        whole = truth.grads[name]
        mistakes: dict[str, Any] = {
            f"the gradient of {name} is this rank's part alone: every rank has the whole matrix, "
            "but sees only a part of what it does": truth.parts[number][name],
            f"the gradient of {name} is a mean over the ranks: they are parts of one sum": (
                whole / p
            ),
        }
        factor = multiple(found.grads[name], whole)
        if factor is not None and factor > 1.5:
            raise Hint(
                f"{about}the gradient of {name} is {factor:.3g} times that of one process: it is "
                "summed over the ranks more than once"
            )
        diagnose(about, found.grads[name], whole, mistakes, f"the gradient of {name} is wrong")
    for name in ("up B", "down A"):
        own = truth.parts[number][name]
        summed = torch.stack([part[name] for part in truth.parts]).sum(0)
        mistakes = {
            f"the gradient of {name} is summed over the ranks: they hold different parts of it": (
                summed
            ),
            f"the gradient of {name} is a mean over ranks that hold different parts of it": (
                summed / p
            ),
            f"the gradient of {name} is {{times:.3g}} times that of one process": times(own),
        }
        diagnose(about, found.grads[name], own, mistakes, f"the gradient of {name} is wrong")


def tuned_mlp(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's class `TunedMLP(up, down, scale, group)`."""
    outcome = in_groups(_tuned, answer, judge=_is_tuned)
    return confirm_in_group(ranks, outcome, _tuned, answer)


EXERCISES = {
    "25.1": Exercise(
        check=targets_of,
        praise="the last token of the prompt already has something to say",
        hints=(
            "How many places does a pair have, and at which of them is a token of the answer next?",
            "Write the pair down, and below each token but the last the one that follows it.",
        ),
    ),
    "25.2": Exercise(
        check=pack,
        praise="as many documents as fit, and each of them alone in its row",
        hints=(
            "Go through the pairs one after the other and lengthen four lists.",
            "Two places may see each other if their numbers of documents are equal. Which half of "
            "that is causal?",
        ),
    ),
    "25.3": Exercise(
        check=backward_of_step,
        praise="each token counts the same, wherever it lies",
        hints=(
            "What must be known before the first backward, and who knows it?",
            'reduction="sum" leaves the division to you. By what, once?',
            "DDP divides the sum of p gradients by p. What has to stand in front of each loss?",
        ),
    ),
    "25.4": Exercise(
        check=lora,
        praise="it begins at the model, and ends in its weight",
        hints=(
            "Which of the two is zero at first, and what shape has it?",
            "x @ A.T is [.., r]. What makes it [.., out]?",
            "After merge the adapter is in the weight. What may forward add then?",
        ),
    ),
    "25.5": Exercise(
        check=tuned_mlp,
        praise="cut where W is cut, and summed where it is whole",
        hints=(
            "Write the shapes of W, A and B below each other: which side of A, which of B, has the "
            "features that W is cut along?",
            "f stands in front of up, g behind down. Both adapters lie between them.",
            "Which two matrices does a rank have whole? What part of their gradient does it see?",
        ),
    ),
}
