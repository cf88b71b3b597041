"""Checks of lesson 26, two fleets: rewards, the loss of GRPO, and weights between layouts.

The exchange runs on simulated ranks, of which some learn, some generate, and one does neither.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from course.answer import Exercise, Hint, due, is_stub
from course.exercises.expect import (
    careless,
    check_causes,
    confirm,
    diagnose,
    distance,
    own_answers,
    refuse,
    run,
    sequence,
    tensor,
    with_gaps,
)
from course.exercises.simulated import Event, Outcome, here
from course.labs import l26_by_hand as by_hand
from course.labs import l26_two_fleets as lab
from course.pool.ranks import Ranks
from labcode.parallel import reshard
from labcode.train import grpo

CHANGED = "the call has changed {}: that belongs to the caller"


def _draw(seed: int, *shape: int) -> Tensor:
    """Normal random numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


# ---- 26.1

REWARDS = {
    "4 groups of 4: ": [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 1, 0]],
    "2 groups of 6, rewards of any size: ": [
        [0.5, 2, -1, 0, 0, 3],
        [10, 11, 10, 12, 10, 10],
    ],
    "one group: ": [1, 0, 0, 1, 1],
    "2 · 1 groups of 3: ": [[[1, 0, 0]], [[1, 1, 0]]],
}
ALIKE = "a group of all right, one of all wrong, and one of both: "
ROUNDING = 1e-5  # of the small number in the denominator


def advantages(answer: Callable[..., Any]) -> None:
    """The learner's `advantages(rewards)`."""
    for case, rows in REWARDS.items():
        rewards = torch.tensor(rows, dtype=torch.float64)
        found = _advantages_of(answer, rewards, case)
        truth = grpo.advantages(rewards)
        mistakes: dict[str, Any] = {}
        if rewards.dim() > 1:
            mistakes |= _of_other_groups(rewards)
        mistakes |= {
            "these are the rewards less their mean: they are still to be divided by the standard "
            "deviation": rewards - rewards.mean(-1, keepdim=True),
            "the rewards are divided, but not compared: where is the mean of their group?": (
                rewards / (rewards.std(-1, keepdim=True) + 1e-6)
            ),
            "divided by the variance: the standard deviation is its root": (
                truth / (rewards.std(-1, keepdim=True) + 1e-6)
            ),
            "the standard deviation is the one with G in its denominator: take that of "
            "`torch.std`, with G - 1": (
                (rewards - rewards.mean(-1, keepdim=True))
                / (rewards.std(-1, correction=0, keepdim=True) + 1e-6)
            ),
            "the sign is wrong: a good answer has a positive advantage": -truth,
            "compared with the best of the group: compare with its mean": (
                (rewards - rewards.amax(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-6)
            ),
            "the mean alone is divided, since / comes before -: what do brackets do?": (
                rewards - rewards.mean(-1, keepdim=True) / (rewards.std(-1, keepdim=True) + 1e-6)
            ),
            "no advantage is below 0, and a wrong answer has a negative one": truth.abs(),
        }
        diagnose(case, found, truth, mistakes, _in_general(found, truth), tolerance=ROUNDING)
    rewards = torch.tensor([[1.0] * 5, [0.0] * 5, [1.0, 0, 0, 0, 1]], dtype=torch.float64)
    found = _advantages_of(answer, rewards, ALIKE)
    mistakes = {
        "where all rewards are alike the advantage is not a number: there the deviation is 0, and "
        "what keeps 0 / 0 away?": not bool(found.isfinite().all()),
        "where all rewards are alike the advantage is 0": bool(found[:2].abs().max() > ROUNDING),
    }
    refuse(mistakes, ALIKE)
    diagnose(ALIKE, found, grpo.advantages(rewards), {}, tolerance=ROUNDING)


def _in_general(found: Tensor, truth: Tensor) -> str:
    """What is said of advantages that no usual mistake gives."""
    sums = found.double().sum(-1)
    if bool((sums.abs() > ROUNDING * found.abs().amax(-1)).any()):
        worst = float(sums.flatten()[sums.abs().argmax()])
        return (
            f"the advantages of a group add up to {worst:.3g}, and should to 0: what is subtracted "
            "from each reward?"
        )
    factors = (found * truth).sum(-1, keepdim=True) / (truth * truth).sum(-1, keepdim=True)
    if distance(found, factors * truth) < ROUNDING:
        first = float(factors.flatten()[0])
        return (
            f"in each group they are right up to a factor, {first:.3g} in the first: by what is it "
            "to be divided?"
        )
    return "the result is {off:.0%} away from the right one"


def _of_other_groups(rewards: Tensor) -> dict[str, Any]:
    """What comes out if mean or deviation are not those of the own group."""
    above = rewards - rewards.mean(-1, keepdim=True)
    deviation = rewards.std(-1, keepdim=True) + 1e-6
    all_above = rewards - rewards.mean()
    table = {
        "the mean is that over all groups: an answer is compared with its own group": (
            all_above / deviation
        ),
        "mean and deviation are those over all groups: an answer is compared with its own group": (
            all_above / (rewards.std() + 1e-6)
        ),
        "the deviation is that over all groups: each group has its own": (
            above / (rewards.std() + 1e-6)
        ),
        "mean and deviation run over the first dim: the rewards of a group lie along the last": (
            (rewards - rewards.mean(0)) / (rewards.std(0) + 1e-6)
        ),
    }
    if rewards.dim() == 2 and rewards.shape[0] == rewards.shape[1]:
        other = "{} of group 0 meets answer 0 of every group: keep the dim that the mean runs over"
        table |= {
            other.format("the mean"): (rewards - rewards.mean(-1)) / deviation,
            other.format("the deviation"): above / deviation[:, 0],
            other.format("mean and deviation"): (rewards - rewards.mean(-1)) / deviation[:, 0],
        }
    return table


def _advantages_of(answer: Callable[..., Any], rewards: Tensor, case: str) -> Tensor:
    given = rewards.clone()
    try:
        found = due(answer(given))
    except IndexError as error:
        raise Hint(
            f"{case}{error}: the rewards may have any number of dims, here {rewards.dim()}, and a "
            "group lies along the last one"
        ) from None
    tensor(found, rewards.shape, f"{case}it returned")
    refuse({CHANGED.format("rewards"): not torch.equal(given, rewards)}, case)
    return found


# ---- 26.2


class _Tokens(NamedTuple):
    """A batch of answers.

    Args:
        new, old: [B, T]
        advantage: [B]
        counts: [B, T]
    """

    new: Tensor
    old: Tensor
    advantage: Tensor
    counts: Tensor


def _tokens(lengths: Sequence[int], max_tokens: int) -> _Tokens:
    """Ratios on both sides of the clip, advantages of both signs; what does not count is wild."""
    num = len(lengths)
    old = -_draw(1, num, max_tokens).abs() - 0.1
    new = old + 0.4 * _draw(2, num, max_tokens)
    advantage = _draw(3, num)
    advantage[0] = -advantage[1].sign() * advantage[0].abs()  # both signs
    counts = torch.arange(max_tokens) < torch.tensor(lengths)[:, None]
    new = torch.where(counts, new, old + 1.5)
    return _Tokens(new, old, advantage, counts)


LOSS_CASES = (  # (lengths of answers, T, average, low, high)
    ((5, 2, 4, 1, 5), 5, "token", 0.2, 0.2),
    ((5, 2, 4, 1, 5), 5, "sequence", 0.2, 0.2),
    ((5, 2, 4, 1, 5), 5, "constant", 0.2, 0.2),
    ((3, 7, 1), 7, "token", 0.1, 0.3),
    ((3, 7, 1), 7, "sequence", 0.2, 0.2),  # more places than answers
    ((3, 6, 1), 7, "constant", 0.2, 0.28),  # no answer is as long as T
)


def grpo_loss(answer: Callable[..., Any]) -> None:
    """The learner's `grpo_loss(new, old, advantage, counts, low, high, average)`."""
    of_others: dict[str, bool] = {}
    for lengths, max_tokens, average, low, high in LOSS_CASES:
        about = f'average="{average}", clip {low} and {high}: '
        batch = _tokens(lengths, max_tokens)
        given = batch._replace(new=batch.new.clone().requires_grad_())
        with_copies = [value.clone() for value in given[1:]]
        for constant in with_copies[:2]:
            constant.requires_grad_()
        found = due(answer(given.new, *with_copies, low=low, high=high, average=average))
        tensor(found, what=f"{about}it returned")
        is_changed = [not torch.equal(a, b) for a, b in zip(with_copies, given[1:], strict=True)]
        mistakes = {
            f"{about}it returned a tensor of shape {list(found.shape)}: the loss is one number": (
                found.numel() != 1
            ),
            CHANGED.format("its arguments"): any(is_changed),
            f"{about}the loss is no finite number": not bool(found.isfinite().all()),
        }
        refuse(mistakes)
        truth, slope = _loss_and_slope(batch, low, high, average)
        table = _wrong_losses(batch, low, high, average, truth)
        found = found.reshape(())
        if distance(found, truth) > ROUNDING:
            refuse(table, about, found)
            refuse(_first_wrong(answer, low, high, average), about)
        diagnose(about, found, truth, {})
        no_way = "no gradient flows to `new`: is something detached, or turned into a number?"
        refuse({no_way: not found.requires_grad}, about)
        inputs = (given.new, *with_copies[:2])
        gradient, *others = torch.autograd.grad(found, inputs, allow_unused=True)
        refuse({no_way: gradient is None}, about)
        otherwise = "the loss is right, but its gradient is wrong by {off:.0%}: what is detached?"
        diagnose(about, gradient, slope, {}, otherwise)
        of_others |= _other_gradients(others)
    refuse(of_others)


def _other_gradients(others: Sequence[Tensor | None]) -> dict[str, bool]:
    """Gradients of `old` and of `advantage`, where they come with a graph of their own."""
    found = {}
    for name, gradient in zip(("old", "advantage"), others, strict=True):
        hint = (
            f"a gradient flows to `{name}` too, which here requires one: it was given by the "
            "generator and the rewards, and is a constant of the loss. What does detach() do?"
        )
        found[hint] = gradient is not None and bool(gradient.any())
    return found


SINGLE = ((1.0, 3.0), (1.0, 0.3), (-1.0, 3.0), (-1.0, 0.3), (1.0, 1.05))  # (A, ratio)


def _first_wrong(
    answer: Callable[..., Any], low: float, high: float, average: str
) -> dict[str, bool]:
    """What is wrong of a loss that no usual mistake gives: the gain of a token, or its weight."""
    found = {}
    options = {"low": low, "high": high, "average": average}
    is_one = torch.ones(1, 1, dtype=torch.bool)
    old = torch.full((1, 1), -0.7, dtype=torch.float64)
    for a, ratio in SINGLE:
        advantage = torch.tensor([a], dtype=torch.float64)
        gain = -float(answer(old + math.log(ratio), old, advantage, is_one, **options))
        truth = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
        hint = f"one token with A = {a:.0f} and ratio {ratio}: its gain is {gain:.3g}"
        found[f"{hint}, and by the formula {truth:.3g}"] = not math.isclose(gain, truth)
    counts = torch.tensor([[True, True, True], [True, False, False]])
    old = old.expand(2, 3)
    for number, name in enumerate(("the first", "the second")):
        advantage = torch.zeros(2, dtype=torch.float64)
        advantage[number] = 1.0
        weight = -float(answer(old, old, advantage, counts, **options))
        truth = float(grpo.token_weights(counts, average)[number].sum())  # type: ignore[arg-type]
        hint = f"of two answers of 3 tokens and 1, T = 3, all tokens of {name} weigh {weight:.3g}"
        found[f"{hint} together, and by the table {truth:.3g}"] = not math.isclose(weight, truth)
    return found


def _loss_and_slope(batch: _Tokens, low: float, high: float, average: Any) -> tuple[Tensor, Tensor]:
    """labcode's loss and its gradient."""
    new = batch.new.clone().requires_grad_()
    options = grpo.GRPO(clip_low=low, clip_high=high, average=average)
    weights = grpo.token_weights(batch.counts, average)
    loss = grpo.policy_loss(new, batch.old, batch.advantage, weights, options)
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad


def _wrong_losses(
    batch: _Tokens, low: float, high: float, average: Any, truth: Tensor
) -> dict[str, Any]:
    """What each of the usual mistakes gives: {hint: loss}."""
    weights = grpo.token_weights(batch.counts, average)
    a = batch.advantage[:, None]
    ratio = (batch.new - batch.old).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    gain = torch.minimum(ratio * a, clipped * a)

    def loss(gains: Tensor) -> Tensor:
        return -(weights * gains).sum()

    inverse = 1 / ratio
    inverse_gain = torch.minimum(inverse * a, inverse.clamp(1 - low, 1 + high) * a)
    swapped = ratio.clamp(1 - high, 1 + low)
    fixed = ratio.clamp(0.8, 1.2)
    table: dict[str, Any] = {
        "the sign is wrong: an optimizer makes the loss smaller, and gains should grow": -truth,
        "the larger of the two is taken: the gain is the smaller": (
            loss(torch.maximum(ratio * a, clipped * a))
        ),
        "nothing is clipped": loss(ratio * a),
        "the clipped ratio alone counts: the gain is the smaller of both, so that a token that has "
        "gone the wrong way is pulled back": loss(clipped * a),
        "the ratio is upside down: the learner's probability stands above the generator's": (
            loss(inverse_gain)
        ),
        "the smaller of ratio and clipped ratio is multiplied with A: take the smaller of both "
        "products, as A may be negative": loss(torch.minimum(ratio, clipped) * a),
        "log-probabilities are subtracted: the ratio is the exponential of that": (
            loss((batch.new - batch.old) * a)
        ),
    }
    again = (a - a.mean()) / (a.std() + 1e-6)
    table |= {
        "every ratio is 1: is `old` what the generator gave?": loss(a + 0 * ratio),
        "the ratio is clipped between low and high: its bounds are 1 - low and 1 + high": (
            loss(torch.minimum(ratio * a, ratio.clamp(low, high) * a))
        ),
        "`clamp` is given the larger bound first: then everything becomes that of its end": (
            loss(torch.minimum(ratio * a, ratio.clamp(1 + high, 1 - low) * a))
        ),
        "log-probabilities are divided: the ratio of probabilities is the exponential of their "
        "difference": _loss_of_ratio(batch.new / batch.old, weights, a, low, high),
        "the learner's probability stands there without the generator's": (
            _loss_of_ratio(batch.new.exp(), weights, a, low, high)
        ),
        "log p times A is the loss at ratio 1 alone: where is the ratio?": loss(batch.new * a),
        "the ratio is that of a whole answer: each token has its own": _loss_of_ratio(
            _mean_over_answers(batch), weights, a, low, high
        ),
        "the advantages are normalised once more: they are finished when they come": loss(
            torch.minimum(ratio * again, clipped * again)
        ),
    }
    if low != high:
        table["both bounds are made of low"] = loss(
            torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + low) * a)
        )
        table["both bounds are made of high"] = loss(
            torch.minimum(ratio * a, ratio.clamp(1 - high, 1 + high) * a)
        )
        table["low and high are exchanged"] = loss(torch.minimum(ratio * a, swapped * a))
        table["it clips at 0.8 and 1.2, whatever low and high are"] = loss(
            torch.minimum(ratio * a, fixed * a)
        )
    if batch.new.shape[0] == batch.new.shape[1]:
        across = batch.advantage[None, :]
        table[
            "the advantage of answer t meets token t of all answers: it is [B], tokens [B, T]"
        ] = loss(torch.minimum(ratio * across, clipped * across))
        by_others = batch.counts.double() / batch.counts.sum(1) / len(batch.new)
        table[
            "token t is divided by the length of answer t: keep the dim that the sum runs over"
        ] = -(by_others * gain).sum()
    kept = gain * batch.counts
    lengths = batch.counts.sum(1)
    longest = int(lengths.max())
    table |= {
        "the mean runs over all places, also those behind the end of an answer": -gain.mean(),
        "the mean over an answer runs over T places: it has fewer tokens": (
            -(gain.sum(1) / lengths).mean() if average == "sequence" else math.nan
        ),
        "it is the sum over all tokens: by what is it divided?": -kept.sum(),
        "the sums of the answers are added up: what is missing is the mean over answers": (
            -(kept.sum(1) / lengths).sum()
        ),
        "it is the sum over tokens and the mean over answers: by what is it still divided?": (
            -kept.sum(1).mean()
        ),
    }
    others: tuple[grpo.Average, ...] = ("sequence", "token", "constant")
    for other in others:
        if other != average:
            weights = grpo.token_weights(batch.counts, other)
            table[f'that is the average "{other}"'] = -(weights * gain).sum()
    if longest != batch.counts.shape[1]:
        table["divided by the longest answer there is: T is the number of columns"] = (
            -kept.sum() / (len(kept) * longest)
        )
    return table


def _mean_over_answers(batch: _Tokens) -> Tensor:
    """The ratio of a whole answer by the mean of its log-ratios, at each of its tokens."""
    sums = ((batch.new - batch.old) * batch.counts).sum(1, keepdim=True)
    return (sums / batch.counts.sum(1, keepdim=True)).exp().expand_as(batch.new)


def _loss_of_ratio(ratio: Tensor, weights: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    """The loss with another ratio."""
    clipped = ratio.clamp(1 - low, 1 + high)
    return -(weights * torch.minimum(ratio * a, clipped * a)).sum()


# ---- 26.3

Pair = tuple[tuple[int, ...], tuple[int, ...]]

COMMON: dict[str, tuple[Pair, Pair, Pair | None]] = {
    "rows 8 to 15 and rows 0 to 11: ": (((8,), (8,)), ((0,), (12,)), ((8,), (4,))),
    "rows 0 to 11 and rows 8 to 15: ": (((0,), (12,)), ((8,), (8,)), ((8,), (4,))),
    "rows 2 to 4 within rows 0 to 9: ": (((0,), (10,)), ((2,), (3,)), ((2,), (3,))),
    "two boxes that only touch: ": (((0,), (8,)), ((8,), (8,)), None),
    "two boxes far apart: ": (((0,), (3,)), ((9,), (2,)), None),
    "a box with itself: ": (((4, 2), (5, 3)), ((4, 2), (5, 3)), ((4, 2), (5, 3))),
    "rows and columns: ": (((6, 0), (6, 8)), ((0, 4), (24, 4)), ((6, 4), (6, 4))),
    "the same rows, other columns: ": (((0, 0), (4, 4)), ((0, 4), (4, 4)), None),
    "three dims: ": (
        ((1, 0, 2), (3, 5, 4)),
        ((0, 2, 3), (3, 9, 1)),
        ((1, 2, 3), (2, 3, 1)),
    ),
}
INSIDE: dict[str, tuple[Pair, Pair]] = {
    "a part that begins at row 0: ": (((0,), (8,)), ((2,), (3,))),
    "a part that begins at row 8: ": (((8,), (8,)), ((10,), (3,))),
    "a part that begins at row 2: ": (((2,), (9,)), ((4,), (3,))),  # 4 + 3 rows are there as well
    "rows 6 to 11 of columns 2 to 9: ": (((6, 2), (6, 8)), ((8, 4), (3, 2))),
    "three dims: ": (((1, 0, 2), (3, 5, 4)), ((2, 3, 2), (2, 1, 3))),
    "the whole part: ": (((5, 1), (2, 3)), ((5, 1), (2, 3))),
}


def boxes(common: Callable[..., Any], inside: Callable[..., Any]) -> None:
    """The learner's `common(one, other)` and `inside(part, box, block)`."""
    _has_common(common)
    _lies_inside(inside)


def _has_common(common: Callable[..., Any]) -> None:
    is_first = True
    for about, (one, other, truth) in COMMON.items():
        case = f"common, {about}"
        try:
            found = common(by_hand.Box(*one), by_hand.Box(*other))
        except IndexError as error:
            raise Hint(f"{case}{error}: {_num_dims(len(one[0]))}") from None
        if is_first:  # later None may be right
            due(found)
        is_first = False
        if found is None:
            refuse({f"{case}it returned None, and they have {truth} in common": truth})
            continue
        if truth is None:
            raise Hint(f"{case}they have nothing in common, so return None and not {found}")
        given = _pair(found, case)
        offsets, sizes = truth
        ends = tuple(first + size for first, size in zip(offsets, sizes))
        relative = tuple(first - begin for first, begin in zip(offsets, one[0]))
        mistakes = {
            "the second of both are sizes, and you give the ends": given == (offsets, ends),
            "offsets and sizes are exchanged": given != truth and given == (sizes, offsets),
            "offsets count in the whole weight, and yours count within the first box": (
                given != truth and given == (relative, sizes)
            ),
            f"{len(given[0])} offsets and {len(given[1])} sizes for {len(offsets)} dims": (
                len(given[0]) != len(offsets) or len(given[1]) != len(offsets)
            ),
            f"it begins at {list(given[0])}, and both are there from {list(offsets)} on": (
                given[0] != offsets
            ),
            f"its sizes are {list(given[1])}, and both are there for {list(sizes)}": (
                given[1] != sizes
            ),
        }
        refuse(mistakes, case)


def _pair(found: Any, case: str) -> Pair:
    """A box as two tuples of whole numbers."""
    wanted = f"{case}return a Box(offsets, sizes), not {found!r:.60}"
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise Hint(wanted)
    offsets, sizes = found
    if not isinstance(offsets, tuple | list) or not isinstance(sizes, tuple | list):
        raise Hint(wanted)
    try:
        return tuple(map(int, offsets)), tuple(map(int, sizes))
    except (TypeError, ValueError):
        raise Hint(wanted) from None


WHERE = (
    "offsets of box and block count in the whole weight, and those of `narrow` within the tensor. "
    "Where does the part begin?"
)


def _num_dims(number: int) -> str:
    return f"boxes may have any number of dims, and here it is {number}"


def _dims_left_whole(found: Tensor, part: Tensor, truth: Tensor) -> list[int]:
    """The dims that were not cut, if the sizes along all others are right."""
    whole = []
    if found.dim() != truth.dim():
        return whole
    for dim, size in enumerate(truth.shape):
        if found.shape[dim] == size:
            continue
        if found.shape[dim] != part.shape[dim]:
            return []
        whole.append(dim)
    return whole


def _lies_inside(inside: Callable[..., Any]) -> None:
    for about, (box, block) in INSIDE.items():
        case = f"inside, {about}"
        part = with_gaps(_draw(7, *box[1]))
        before = part.clone()
        try:
            found = inside(part, by_hand.Box(*box), by_hand.Box(*block))
        except (RuntimeError, IndexError) as error:
            if is_stub(error):
                raise
            is_of_dims = isinstance(error, IndexError) and "start out of range" not in str(error)
            why = _num_dims(part.dim()) if is_of_dims else WHERE
            raise Hint(f"{case}{error}: {why}") from None
        due(found)
        tensor(found, what=f"{case}it returned")
        truth = before
        for dim, (first, size) in enumerate(zip(block[0], block[1])):
            truth = truth.narrow(dim, first - box[0][dim], size)
        whole = _dims_left_whole(found, part, truth)
        mistakes = {
            "it is the whole part: `narrow` changes nothing, and returns a view": (
                len(whole) == part.dim() and found.shape != truth.shape
            ),
            f"dim {', '.join(map(str, whole))} is still whole, and in the others the size is "
            f"right: the part has {part.dim()} dims": 0 < len(whole) < part.dim(),
            f"it has shape {list(found.shape)}, and the block {list(truth.shape)}: {WHERE}": (
                found.shape != truth.shape
            ),
        }
        refuse(mistakes, case)
        refuse({f"these are other numbers: {WHERE}": not torch.equal(found, truth)}, case)
        found.zero_()
        is_view = bool((part == 0).sum() >= truth.numel())
        copied = "it returned a copy: what is written into it has to arrive in the part"
        refuse({copied: not is_view}, case)


# ---- 26.4

Layout = dict[int, Pair]


def _cut(length: int, parts: int, dim: int, other: int, first_rank: int) -> Layout:
    """Ranks that cut one dim of a weight of two dims into parts, the first ones larger."""
    found: Layout = {}
    begin = 0
    for number in range(parts):
        size = length // parts + (number < length % parts)
        offsets = (begin, 0) if dim == 0 else (0, begin)
        sizes = (size, other) if dim == 0 else (other, size)
        found[first_rank + number] = offsets, sizes
        begin += size
    return found


def _replicas(layout: Layout, copies: int) -> Layout:
    """The same boxes on further ranks; a layout begins at rank 0."""
    found: Layout = {}
    for copy in range(copies):
        found |= _moved(layout, copy * len(layout))
    return found


def _moved(layout: Layout, first_rank: int) -> Layout:
    return {rank + first_rank: box for rank, box in layout.items()}


def _columns_of_sizes(sizes: Sequence[int], rows: int, first_rank: int) -> Layout:
    """Ranks with so many columns each."""
    found: Layout = {}
    begin = 0
    for number, size in enumerate(sizes):
        found[first_rank + number] = (0, begin), (rows, size)
        begin += size
    return found


def _in_turn(one: Pair, other: Pair, num_ranks: int, first_rank: int) -> Layout:
    """Ranks of which every second one needs the same box."""
    return {first_rank + number: (one, other)[number % 2] for number in range(num_ranks)}


LAYOUTS: dict[str, tuple[tuple[int, int], Layout, Layout]] = {
    "tp = 2 to rows and columns exchanged: ": (
        (12, 8),
        _cut(12, 2, 0, 8, 0),
        _cut(8, 2, 1, 12, 2),
    ),
    "tp = 3 to tp = 2: ": ((24, 8), _cut(24, 3, 0, 8, 0), _cut(24, 2, 0, 8, 3)),
    "tp = 2 to tp = 4: ": ((24, 8), _cut(24, 2, 0, 8, 0), _cut(24, 4, 0, 8, 2)),
    "13 rows, tp = 3 to tp = 2: ": ((13, 4), _cut(13, 3, 0, 4, 0), _cut(13, 2, 0, 4, 3)),
    "two replicas that learn, tp = 4 that generates: ": (
        (24, 8),
        _replicas(_cut(24, 2, 0, 8, 0), 2),
        _cut(24, 4, 0, 8, 4),
    ),
    "whole weights on three ranks, to three others: ": (
        (6, 5),
        _replicas({0: ((0, 0), (6, 5))}, 3),
        _moved(_replicas({0: ((0, 0), (6, 5))}, 3), 3),
    ),
    "a fleet that generates has the first ranks: ": (
        (24, 8),
        _cut(24, 3, 0, 8, 4),
        _replicas(_cut(24, 2, 0, 8, 0), 2),
    ),
    # In the order of ranks large and small blocks take turns, and so would their senders.
    "two replicas, and six ranks that need 9 or 1 columns: ": (
        (4, 30),
        _replicas({0: ((0, 0), (4, 30))}, 2),
        _columns_of_sizes((9, 1, 9, 1, 9, 1), 4, 2),
    ),
    "two replicas, and six ranks that need 6 · 6 or 1 · 11 numbers: ": (
        (12, 12),
        _replicas({0: ((0, 0), (12, 12))}, 2),
        _in_turn(((0, 0), (6, 6)), ((11, 0), (1, 11)), 6, 2),
    ),
}


def _as_boxes(layout: Layout) -> dict[int, Any]:
    return {rank: by_hand.Box(*box) for rank, box in layout.items()}


def plan(answer: Callable[..., Any]) -> None:
    """The learner's `plan(sources, targets)`."""
    plans = {}
    for case, (shape, sources, targets) in LAYOUTS.items():
        given = _as_boxes(sources), _as_boxes(targets)
        moves = due(answer(*given))
        sequence(moves, "a list of moves")
        unchanged = given == (_as_boxes(sources), _as_boxes(targets))
        refuse({CHANGED.format("a layout"): not unchanged}, case)
        triples = _triples(moves, case)
        for source, target, block in triples:
            _fits(case, source, target, block, sources, targets)
        _covers(case, shape, triples, targets)
        _is_spread(case, triples, sources)
        plans[case] = triples
    for case, (_, sources, targets) in LAYOUTS.items():
        _is_the_same_everywhere(case, answer, plans[case], sources, targets)


def _is_the_same_everywhere(
    case: str,
    answer: Callable[..., Any],
    triples: list[tuple[int, int, Pair]],
    sources: Layout,
    targets: Layout,
) -> None:
    """Another rank may have filled its dicts in another order."""
    again = answer(_as_boxes(sources), _as_boxes(targets))
    other_order = answer(_reversed(_as_boxes(sources)), _reversed(_as_boxes(targets)))
    mistakes = {
        "called twice with the same layouts it gives two plans, and each rank makes its own": (
            _triples(again, case) != triples
        ),
        "with the same ranks in another order in the dicts it gives another list: a rank may have "
        "filled its dicts in another order. What does sorted(...) do?": (
            _triples(other_order, case) != triples
        ),
    }
    refuse(mistakes, case)


def _reversed(layout: dict[int, Any]) -> dict[int, Any]:
    return dict(reversed(layout.items()))


def _triples(moves: Sequence[Any], case: str) -> list[tuple[int, int, Pair]]:
    return [_triple(move, case) for move in moves]


def _triple(move: Any, case: str) -> tuple[int, int, Pair]:
    if not isinstance(move, tuple | list) or len(move) != 3:
        raise Hint(f"{case}a move is Move(source, target, block), not {move!r:.60}")
    source, target, block = move
    if block is None:
        raise Hint(f"{case}a move from {source} to {target} has no block: those two share nothing")
    return source, target, _pair(block, case)


def _fits(
    case: str, source: int, target: int, block: Pair, sources: Layout, targets: Layout
) -> None:
    """A block lies in what its source has and in what its target needs."""
    mistakes = {
        f"a move goes from {source} to {target}: source and target are exchanged": (
            source in targets and target in sources
        ),
        f"a move comes from rank {source}, which is none of those that send: are ranks counted "
        "from 0 in each fleet?": source not in sources,
        f"a move goes to rank {target}, which is none of those that receive: are ranks counted "
        "from 0 in each fleet?": target not in targets,
    }
    refuse(mistakes, case)
    for rank, box, what in (
        (source, sources[source], "has"),
        (target, targets[target], "needs"),
    ):
        if not _contains(box, block):
            raise Hint(
                f"{case}from {source} to {target} goes a block at {list(block[0])} of "
                f"{list(block[1])}, which rank {rank} {what} only in part, or not at all: it "
                f"{what} {list(box[1])} at {list(box[0])}. What do both have in common?"
            )


def _contains(box: Pair, block: Pair) -> bool:
    for dim, first in enumerate(block[0]):
        end = first + block[1][dim]
        if first < box[0][dim] or end > box[0][dim] + box[1][dim]:
            return False
    return True


def _covers(
    case: str,
    shape: tuple[int, int],
    triples: Sequence[tuple[int, int, Pair]],
    targets: Layout,
) -> None:
    """Each target gets each number of its box once."""
    for rank, box in targets.items():
        arrives = torch.zeros(shape, dtype=torch.int64)
        for _, target, block in triples:
            if target == rank:
                _view(arrives, block).add_(1)
        own = _view(arrives, box)
        most, least = int(own.max()), int(own.min())
        mistakes = {
            f"rank {rank} gets {int((own == 0).sum())} of its {own.numel()} numbers from nobody": (
                least == 0
            ),
            f"rank {rank} gets some numbers {most} times: of ranks with the same box one sends": (
                most > 1
            ),
        }
        refuse(mistakes, case)


def _view(whole: Tensor, block: Pair) -> Tensor:
    for dim, (first, size) in enumerate(zip(*block)):
        whole = whole.narrow(dim, first, size)
    return whole


def _one_message(sizes: Sequence[int]) -> int:
    return 1


def _rows(sizes: Sequence[int]) -> int:
    return sizes[0]


# What people count in place of the numbers of a block.
NOT_NUMBERS: dict[str, Callable[[Sequence[int]], int]] = {
    "messages": _one_message,
    "rows": _rows,
    "sums of sizes": sum,
}


def _is_spread(case: str, triples: Sequence[tuple[int, int, Pair]], sources: Layout) -> None:
    """Of ranks with the same box none has more to send than another one by more than a block."""
    uneven = _uneven(triples, sources, math.prod)
    if uneven is None:
        return
    told = ", ".join(f"rank {other} {num}" for other, num in uneven.items())
    for what, size_of in NOT_NUMBERS.items():
        if _uneven(triples, sources, size_of) is None:
            raise Hint(
                f"{case}{what} are spread evenly over ranks with the same box, and the numbers "
                f"are not ({told}): blocks differ in size. How many numbers has one?"
            )
    raise Hint(
        f"{case}ranks with the same box send different amounts ({told} numbers): let the one send "
        "that has the fewest so far"
    )


def _uneven(
    triples: Sequence[tuple[int, int, Pair]],
    sources: Layout,
    size_of: Callable[[Sequence[int]], int],
) -> dict[int, int] | None:
    """What replicas send that do not share the sending; None if all of them do."""
    sent = dict.fromkeys(sources, 0)
    largest = 0
    for source, _, block in triples:
        size = size_of(block[1])
        sent[source] += size
        largest = max(largest, size)
    for box in sources.values():
        alike = {other: sent[other] for other in sources if sources[other] == box}
        is_idle = len(alike) > 1 and min(alike.values()) == 0
        if is_idle or max(alike.values()) - min(alike.values()) > largest:
            return alike
    return None


# ---- 26.5

EXCHANGES = {  # layouts, and how many ranks there are: the last one may have no part in it
    "rows to columns: ": ("tp = 2 to rows and columns exchanged: ", 4),
    "tp = 3 to tp = 2, and a rank that does neither: ": ("tp = 3 to tp = 2: ", 6),
    "a fleet that generates has the first ranks: ": (
        "a fleet that generates has the first ranks: ",
        7,
    ),
    "two replicas that learn, tp = 4 that generates: ": (
        "two replicas that learn, tp = 4 that generates: ",
        8,
    ),
}
NOTHING: Pair = ((0, 0), (0, 0))
UNTOUCHED = -1.0
WRITTEN = "written"  # a note: the answer writes into its part


class _Exchanged(NamedTuple):
    """This rank's part afterwards."""

    part: Tensor


def _whole(shape: tuple[int, int]) -> Tensor:
    return torch.arange(1.0, 1 + math.prod(shape), dtype=torch.float64).view(shape)


class _Writes(TorchDispatchMode):
    """Notes when something is written into the memory of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.memory = tensor.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        writes = func._schema.is_mutable and isinstance(args[0], Tensor)
        if writes and args[0].untyped_storage().data_ptr() == self.memory:
            here().note(WRITTEN)
        return func(*args, **(kwargs or {}))


def _exchange(rank: int, name: str, answer: Callable[..., Any]) -> _Exchanged:
    shape, sources, targets = LAYOUTS[name]
    moves = by_hand.plan(_as_boxes(sources), _as_boxes(targets))
    box = sources.get(rank) or targets.get(rank) or NOTHING
    own = _view(_whole(shape), box).clone()
    if rank not in sources:
        own = torch.full_like(own, UNTOUCHED)
    part = with_gaps(own) if own.numel() else own
    before = list(moves)
    try:
        with _Writes(part):
            returned = answer(moves, by_hand.Box(*box), part)
    except (RuntimeError, IndexError) as error:
        if is_stub(error) or "exceeds dimension size" not in str(error):
            raise
        raise Hint(f"{error}: {WHERE}") from None
    mistakes = {
        CHANGED.format("the list of moves"): moves != before,
        "it returned the part: write into the one that is given": (
            isinstance(returned, Tensor) and rank in targets and not torch.equal(returned, part)
        ),
    }
    refuse(mistakes)
    return _Exchanged(part.clone())


def _is_exchanged(case: str, name: str, outcome: Outcome) -> None:
    shape, sources, targets = LAYOUTS[name]
    whole = _whole(shape)
    for rank, found in enumerate(outcome.results):
        about = f"{case}on rank {rank}: "
        calls = [one for one in outcome.of(rank) if one.kind != WRITTEN]
        refuse(careless(calls), about)
        refuse(_other_calls(calls), about)
        refuse(_waits_between(calls), about)
        if rank in sources:
            changed = not torch.equal(found.part, _view(whole, sources[rank]))
            refuse({"the part of a rank that sends has changed": changed}, about)
        if rank not in targets:
            continue
        truth = _view(whole, targets[rank])
        arrived = found.part != UNTOUCHED
        first_written = min((one.at for one in outcome.of(rank, WRITTEN)), default=math.inf)
        mistakes = {
            "the part was written before anything had been waited for: what a receive brings is in "
            "its tensor only after its wait(), and what you copied was there before": (
                not torch.equal(found.part, truth) and first_written < _first_wait(calls)
            ),
            "nothing has arrived in the part: is what was received written into it? `inside` gives "
            "a view to copy into": not bool(arrived.any()),
            f"{int((~arrived).sum())} numbers of the part were not written": (
                not bool(arrived.all())
            ),
            "the right numbers in the wrong places: where does a block belong in this part, and "
            "where does it lie in that of its sender?": (
                bool(torch.equal(found.part.flatten().sort()[0], truth.flatten().sort()[0]))
                and not torch.equal(found.part, truth)
            ),
        }
        refuse(mistakes, about)
        diagnose(
            about,
            found.part,
            truth,
            {},
            "other numbers than those of the whole weight: does a sender read its block at the "
            "place where it lies in its own part?",
        )
    _is_enough(case, outcome, targets)


def _first_wait(calls: Sequence[Event]) -> float:
    """When a rank waited for the first time."""
    times = []
    for call in calls:
        times += [at for at, _ in call.waits]
    return min(times, default=math.inf)


def _waits_between(calls: Sequence[Event]) -> dict[str, bool]:
    """A rank that waits for a message before it has started its others."""
    late = [call for call in calls if call.at > _first_wait(calls)]
    return {
        f"it waits for a message before it starts {len(late)} of its {len(calls)}, so that one "
        "slow rank holds up the others: start all with isend and irecv (send and recv wait at "
        "once), and then wait for all": bool(late),
    }


def _other_calls(calls: Sequence[Event]) -> Mapping[str, Any]:
    others = sorted({one.kind for one in calls if one.kind not in ("send", "recv")})
    return {
        f"{' and '.join(others)}: every rank would get what only one needs; send blocks from rank "
        "to rank": others,
    }


def _is_enough(case: str, outcome: Outcome, targets: Layout) -> None:
    sent = 0
    for rank in range(len(outcome.results)):
        sent += sum(one.num_bytes for one in outcome.of(rank, "send"))
    enough = 8 * sum(math.prod(box[1]) for box in targets.values())
    more = f"{sent} bytes are sent, and {enough} are enough: each move once, and its block alone"
    refuse({more: sent > enough}, case)


def exchange(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `exchange(moves, box, part)`."""
    ours = own_answers(by_hand.exchange, reshard.exchange)
    first = None
    for case, (name, size) in EXCHANGES.items():
        outcome = run(_exchange, name, answer, size=size, case=case, ours=ours)
        _is_exchanged(case, name, outcome)
        first = first or outcome
    assert first is not None
    return confirm(ranks, first, _exchange, "tp = 2 to rows and columns exchanged: ", answer)


# ---- 26.6

DIAGNOSES = {"X": "shard", "Y": "adapters", "Z": "stale"}
SIGNS = {
    "X": {
        "adapters": (
            "adapters would leave the first ratio at 1, as they add nothing at first. X's "
            "first ratio is wrong"
        ),
        "stale": (
            "before the first update there is no older version, and X's first ratio is wrong "
            "already. Which weights differ, and which are equal bit for bit?"
        ),
        "half": "both ranks have the same weights wrong",
    },
    "Y": {
        "shard": "a wrong shard would show in the first ratio, before any update. Y's is 1",
        "stale": (
            "with old weights all of them would differ, as all are trained. Which of Y's "
            "weights are equal bit for bit?"
        ),
        "half": "both ranks have the same weights wrong",
    },
    "Z": {
        "shard": "a wrong shard would show in the first ratio, before any update. Z's is 1",
        "adapters": (
            "adapters stand beside some weights, and all others would be equal bit for bit. "
            "Which of Z's weights are?"
        ),
        "half": "both ranks differ from the learner, and by about as much",
    },
}
CHANGES_NO_WEIGHT = {
    "dtype": "with another dtype of the computation the weights would have arrived as they are",
    "temperature": "another temperature changes log-probs, and no weight: here weights differ",
}


def diagnoses(given: Any) -> None:
    """The learner's {patient: cause}."""
    check_causes(given, DIAGNOSES, lab.CAUSES, SIGNS, CHANGES_NO_WEIGHT)


EXERCISES = {
    "26.1": Exercise(
        check=advantages,
        praise="an answer counts beside those of its group",
        hints=(
            "Over which dim run mean and standard deviation, and for how many groups at once?",
            "`rewards.mean(-1)` has one dim less than `rewards`. What does `keepdim=True` change?",
        ),
    ),
    "26.2": Exercise(
        check=grpo_loss,
        praise="it clips what has gone far enough, and counts each token as it should",
        hints=(
            "Ratio, clipped ratio, and the smaller of two products. Then a weight for each token.",
            "`advantage[:, None]` has the shape [B, 1], and so it meets each token of its answer.",
            "What do the weights of all tokens that count add up to in each of the three ways?",
        ),
    ),
    "26.3": Exercise(
        check=boxes,
        praise="boxes of any number of dims, wherever a part begins",
        hints=(
            "Along one dim: both are there from the later beginning to the earlier end.",
            "If along any dim nothing is left, there is no common block at all.",
            "A part whose box begins at row 8 has row 10 of the whole weight at its own row 2.",
        ),
    ),
    "26.4": Exercise(
        check=plan,
        praise="each number once to each rank that needs it, and replicas share the sending",
        hints=(
            "For one target: which blocks does it need, and who has each of them?",
            "A dict {block: ranks that have it} puts replicas together: a Box can be a key.",
            "`min(ranks, key=num_sent.get)` is the rank with the smallest entry in a dict.",
        ),
    ),
    "26.5": Exercise(
        check=exchange,
        praise="each block from its place in one part to its place in another",
        hints=(
            "A rank goes through all moves. What does it do in one of which it is the source?",
            "A block of columns has gaps in memory. What is sent and received has none.",
            "What was received is written into the part only when its work has been waited for.",
        ),
    ),
    "26.6": Exercise(
        check=diagnoses,
        praise="ratios say when it went wrong, and the list of weights says what",
        hints=(
            "Whose first ratio is not 1? Nothing has been trained yet then.",
            "Of the other two: for whom do all weights differ, and for whom only matrices?",
        ),
    ),
}
