"""Checks of lesson 06, large batches and convergence. The text of each assertion is a hint."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.counting import counted
from labcode.parallel.local import OuterOptimizer
from labcode.pool.ranks import Ranks
from labcode.teach.check import Exercise, due
from labcode.teach.exercises.on_ranks import GROUPS, in_groups, without
from labcode.teach.labs import l06_by_hand, l06_runs
from labcode.train import noise_scale, sweep_table
from labcode.train.sweep_table import DIVERGED, FAILED, Row

EXERCISES = {
    "6.1": Exercise(
        praise="two equations, two unknowns, and no bias",
        hints=(
            "Write the equation E|G_B|^2 = |G|^2 + variance / B once for each of the two batches. "
            "What is left if you subtract one from the other?",
            "With the variance known, either equation gives |G|^2.",
        ),
    ),
    "6.2": Exercise(
        praise="one number more than data parallelism sends anyway",
        hints=(
            "Of each rank's gradient you need the square before the average, of the average the "
            "square after it.",
            "The mean of the small squares is a sum over the group divided by the size of the "
            "group: a tensor with one number is enough for the all-reduce.",
        ),
    ),
    "6.3": Exercise(
        praise="smoothed first, divided last",
        hints=("Two numbers are kept. Neither of them is a ratio.",),
    ),
    "6.4": Exercise(
        praise="every run once, whatever became of it, and the best rate for each batch",
        hints=(
            "What does your loop do with a pair that is in `table` already?",
            "A run that raises ArithmeticError must leave an entry, too: which one means that the "
            "target was never reached?",
        ),
    ),
    "6.5": Exercise(
        praise="a line over 1 / B, and its two ends",
        hints=(
            "S = S_min + E_min / B is a straight line over x = 1 / B. What is its slope?",
            "np.polyfit(x, y, 1) gives slope and intercept; w=1 / y weighs relative errors.",
        ),
    ),
    "6.6": Exercise(
        praise="one run that learns nothing, and one that learns by heart",
        hints=(
            "What keeps a large rate from doing harm in the recipe? There are three things: the "
            "rate itself, warm-up, and clipping.",
            "A model learns by heart what it sees often. How do you make the training text short? "
            "The field data.val_fraction is the share that is kept for validation.",
        ),
    ),
    "6.7": Exercise(
        praise="all copies meet, and go on together from there",
        hints=(
            "The outer gradient points from where the copies are on average to where they began.",
            "PyTorch's Nesterov: v = momentum * v + g, then w = w - lr * (g + momentum * v).",
            "Where do the copies begin the next H steps, and what must `common` hold then?",
        ),
    ),
}

BY_LABCODE = (
    l06_by_hand.estimate,
    l06_by_hand.squares,
    l06_by_hand.Smoothed.add,
    l06_by_hand.sweep,
    l06_by_hand.fit,
    l06_by_hand.OuterStep.step,
    OuterOptimizer.step,
    noise_scale.estimate,
    sweep_table.fit_tradeoff,
)


def _close(found: float, expected: float, rel: float = 1e-6) -> bool:
    return math.isclose(float(found), expected, rel_tol=rel, abs_tol=1e-9)


def _pair(found: Any, names: str) -> tuple[float, float]:
    """Two numbers that a function of the learner's returned."""
    found = due(found)
    if isinstance(found, np.ndarray | torch.Tensor) and found.ndim == 1:
        found = found.tolist()
    assert isinstance(found, tuple | list) and len(found) == 2, f"return two numbers: {names}"
    first, second = found
    due(first, second)
    for value in (first, second):
        is_number = isinstance(value, int | float | np.floating | torch.Tensor)
        assert is_number, f"return numbers, {names}, not a {type(value).__name__}"
    return float(first), float(second)


# ---- 6.1

# |G|^2, tr(Sigma), small batch, big batch
PROBLEMS = ((20.0, 80.0, 1, 4), (0.5, 3.0, 2, 16), (7.0, 0.0, 4, 8), (1e-3, 5.0, 8, 64))
# |G|^2 is estimated from noisy numbers, and where it is small it may come out below zero
BELOW_ZERO = (-2.0, 30.0, 1, 8)


def estimate(answer: Callable[..., Any]) -> None:
    """The learner's `estimate(small_batch, small_square, big_batch, big_square)`."""
    for square, variance, small, big in PROBLEMS:
        squares = (square + variance / small, square + variance / big)
        with without(*BY_LABCODE):
            result = answer(small, squares[0], big, squares[1])
        found = _pair(result, "|G|^2 and the variance")
        case = f"with |G|^2 = {square:g}, variance {variance:g} and batches {small} and {big}: "
        assert not (variance and _close(found[0], variance) and _close(found[1], square)), (
            case + "the two numbers have changed places: |G|^2 comes first"
        )
        assert not (variance and _close(found[0], squares[1])), (
            case + "your |G|^2 is that of the big batch, which still has noise in it: what is left "
            "of it if the batch has no end?"
        )
        assert not (variance and _close(found[1], squares[0] - squares[1])), (
            case + "the difference of the two squares is not the variance: by what is the variance "
            "divided in each of them?"
        )
        assert not (variance and small > 1 and _close(found[1], variance / small)), (
            case + "your second number is the variance of the small batch: that of one sample is "
            "due"
        )
        assert _close(found[1], variance), (
            case + f"your variance is {found[1]:g}: put it back into the two equations"
        )
        assert _close(found[0], square), (
            case + f"your |G|^2 is {found[0]:g}: put it back into the two equations"
        )
    square, variance, small, big = BELOW_ZERO
    result = answer(small, square + variance / small, big, square + variance / big)
    found = _pair(result, "|G|^2 and the variance")
    assert _close(found[0], square) and _close(found[1], variance), (
        f"the two equations can give a |G|^2 below zero, {square:g} here, and yours is "
        f"{found[0]:g}: cut off at 0, the estimates would be too large on average"
    )


# ---- 6.2


def _gradient_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(50 + rank)
    shapes = ((5, 3), (3,), (2, 4))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _model() -> nn.ParameterList:
    """Three weights with a gradient, and a frozen one without."""
    params = [nn.Parameter(torch.ones_like(gradient)) for gradient in _gradient_of(0)]
    frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
    return nn.ParameterList([*params[:2], frozen, params[2]])


def _trained(model: nn.ParameterList) -> list[nn.Parameter]:
    return [param for param in model if param.requires_grad]


def _squared(gradients: Sequence[torch.Tensor]) -> float:
    return sum(gradient.square().sum().item() for gradient in gradients)


def _measured(group: dist.ProcessGroup, answer: Callable[..., Any]) -> None:
    members = dist.get_process_group_ranks(group)
    model = _model()
    for param, gradient in zip(_trained(model), _gradient_of(dist.get_rank())):
        param.grad = gradient.clone()
    with without(*BY_LABCODE), counted() as calls:
        result = answer(model, group)
    small, big = _pair(result, "the mean small square and the big one")
    of_ranks = [_gradient_of(rank) for rank in members]
    means = [torch.stack(parts).mean(0) for parts in zip(*of_ranks)]
    own = _squared(_gradient_of(dist.get_rank()))
    expected_small = sum(_squared(gradients) for gradients in of_ranks) / len(members)
    expected_big = _squared(means)
    for param, mean, mine in zip(_trained(model), means, _gradient_of(dist.get_rank())):
        assert param.grad is not None, "a gradient is gone: every `.grad` becomes the mean"
        assert not torch.equal(param.grad, mine), (
            "`.grad` still holds the rank's own gradient: put the mean into it"
        )
        assert torch.allclose(param.grad, mean), (
            "`.grad` is not the mean over the group: divide the sum by the size of the group, once"
        )
    is_norm = _close(small, math.sqrt(expected_small)) or _close(big, math.sqrt(expected_big))
    assert not is_norm, "that is a norm: its square is asked for"
    assert not _close(small, own), (
        "your first number is this rank's own square: take the mean over the group, so that all "
        "ranks say the same"
    )
    assert not _close(small, expected_small * len(members)), (
        "your first number is the sum of the small squares over the group, not their mean"
    )
    assert not _close(small, expected_big), (
        "your first number is that of the mean gradient: take the square of a rank's own gradient "
        "before it is averaged"
    )
    assert not _close(big, expected_small), (
        "your second number is that of the small batches: take the square of the gradient after "
        "it has been averaged"
    )
    assert _close(small, expected_small), f"your first number is {small:g}, not {expected_small:g}"
    assert _close(big, expected_big), f"your second number is {big:g}, not {expected_big:g}"
    needed = sum(mean.nbytes for mean in means)
    extra = sum(call.num_bytes for call in calls) - needed
    assert extra <= 64, (
        f"{extra} bytes travel beside the gradients, and one number is enough: 8 bytes in a tensor"
    )


def squares(answer: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `squares(model, group)`, on all ranks and on three of them."""
    in_groups(ranks, GROUPS, _measured, answer)


# ---- 6.3


def smoothed(answer: Callable[..., Any]) -> None:
    """The learner's class with `add(square, variance)` and `noise_scale()`."""
    with without(*BY_LABCODE):
        steady = answer(0.9)
        steady.add(2.0, 60.0)
        found = due(steady.noise_scale())
        assert _close(found, 30.0), (
            f"after one step with |G|^2 = 2 and variance 60 the noise scale is 30, yours is {found}"
        )
        meter = answer(0.8)
        first = second = 0.0
        ratios = 0.0
        for square, variance in ((1.0, 10.0), (0.1, 12.0), (1.9, 8.0), (0.5, 11.0)):
            meter.add(square, variance)
            first = 0.8 * first + 0.2 * square
            second = 0.8 * second + 0.2 * variance
            ratios = 0.8 * ratios + 0.2 * variance / square
        found = due(meter.noise_scale())
    assert not _close(found, 22.0), (
        "that is the ratio of the last step alone: what do the steps before it say?"
    )
    assert not _close(found, ratios) and not _close(found, ratios / (1 - 0.8**4)), (
        "you smooth ratios, and one step with a small |G|^2 outweighs all others: smooth both "
        "numbers, and divide them at the end"
    )
    mean = (10.0 + 12 + 8 + 11) / (1 + 0.1 + 1.9 + 0.5)
    assert not _close(found, mean), (
        "all steps count alike, and the noise scale grows during training: old ones must fade"
    )
    swapped = _faded(0.2)
    assert not _close(found, swapped), (
        "the new step counts for `keep`: it is the old value that is kept to that part"
    )
    assert _close(found, second / first), (
        f"after four steps with keep = 0.8 the noise scale is {second / first:.4g}, "
        f"yours is {float(found):.4g}"
    )


def _faded(keep: float) -> float:
    first = second = 0.0
    for square, variance in ((1.0, 10.0), (0.1, 12.0), (1.9, 8.0), (0.5, 11.0)):
        first = keep * first + (1 - keep) * square
        second = keep * second + (1 - keep) * variance
    return second / first


# ---- 6.4

BATCHES = [4, 16, 64]
RATES = [1e-3, 1e-2, 1e-1]
# steps to the target; "never" within the steps of a run, or the run diverges
RUNS: dict[tuple[int, float], int | str] = {
    (4, 1e-3): 900,
    (4, 1e-2): 1200,
    (4, 1e-1): "diverges",
    (16, 1e-3): 700,
    (16, 1e-2): 300,
    (16, 1e-1): "never",
    (64, 1e-3): "never",
    (64, 1e-2): "diverges",
    (64, 1e-1): "diverges",
}
BEST = {4: (1e-3, 900), 16: (1e-2, 300)}


class _Runs:
    """What the learner's sweep calls; it notes each run."""

    def __init__(self) -> None:
        self.done: list[tuple[int, float]] = []

    def __call__(self, batch: int, lr: float) -> int | None:
        assert (batch, lr) in RUNS, (
            f"a run with batch {batch} and rate {lr} was started: it is steps_to_target(batch, lr)"
        )
        self.done.append((batch, lr))
        found = RUNS[batch, lr]
        if found == "diverges":
            raise ArithmeticError("the loss is nan")
        return None if found == "never" else int(found)


def sweep(answer: Callable[..., Any]) -> None:
    """The learner's `sweep(batches, rates, steps_to_target, table)`."""
    table: dict[tuple[int, float], int | None] = {}
    runs = _Runs()
    best = _swept(answer, runs, table)
    missing = sorted(set(RUNS) - set(runs.done))
    assert not missing, f"there was no run with batch {missing[0][0]} and rate {missing[0][1]:g}"
    assert len(runs.done) == len(RUNS), "a run was done twice: ask for its steps once"
    for key in RUNS:
        assert key in table, (
            f"`table` has no entry for {key}: a run whose result is not kept is done again"
        )
        expected = RUNS[key] if isinstance(RUNS[key], int) else None
        assert table[key] == expected, (
            f"table[{key}] is {table[key]}, and the run found {expected or 'no way to the target'}"
        )
    _check_best(best)
    # a sweep that was killed after five runs
    kept = dict(list(table.items())[:5])
    again = _Runs()
    best = _swept(answer, again, kept)
    repeated = sorted(set(again.done) & set(list(table)[:5]))
    assert not repeated, (
        f"the run {repeated[0]} was in `table` already, and was done again: look there first. None "
        "is an entry, too"
    )
    assert len(again.done) == 4, "after a restart not all missing runs were done"
    _check_best(best)
    _interrupted(answer)


class _KilledRuns(_Runs):
    """Somebody interrupts the sixth run."""

    def __call__(self, batch: int, lr: float) -> int | None:
        if len(self.done) == 5:
            raise KeyboardInterrupt
        return super().__call__(batch, lr)


def _interrupted(answer: Callable[..., Any]) -> None:
    table: dict[tuple[int, float], int | None] = {}
    runs = _KilledRuns()
    try:
        answer(BATCHES, RATES, runs, table)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError(
            "somebody interrupted the sweep, and it went on: catch ArithmeticError alone"
        )
    assert set(runs.done) <= set(table), (
        f"the sweep was interrupted after {len(runs.done)} runs, and `table` has {len(table)} of "
        "them: keep each result as soon as it is there"
    )


def _swept(answer: Callable[..., Any], runs: _Runs, table: dict) -> Any:
    try:
        with without(*BY_LABCODE):
            return due(answer(BATCHES, RATES, runs, table))
    except ArithmeticError:
        raise AssertionError(
            "a run that diverged ended the sweep: catch its ArithmeticError, and go on"
        ) from None


def _check_best(best: Any) -> None:
    assert isinstance(best, Mapping), (
        f"return a dict, {{batch: (rate, steps)}}, not a {type(best).__name__}"
    )
    assert 64 not in best, (
        f"no run with batch 64 reaches the target: leave that batch out, here it has {best[64]!r}"
    )
    for batch, expected in BEST.items():
        assert batch in best, f"the best rate of batch {batch} is missing"
        found = best[batch]
        assert isinstance(found, tuple | list) and len(found) == 2, (
            f"of each batch (rate, steps) is asked for, not {found!r}"
        )
        assert tuple(found) != expected[::-1], "the rate comes first, then the steps"
        assert tuple(found) == expected, (
            f"of batch {batch} you take {tuple(found)}, and {expected} needs fewest steps"
        )


# ---- 6.5


MEASURED = {4: 1400.0, 8: 560.0, 16: 340.0, 32: 210.0, 64: 180.0, 128: 110.0, 256: 160.0}


def fit(answer: Callable[..., Any]) -> None:
    """The learner's `fit(steps_of) -> (S_min, E_min)`."""
    _fit_of_exact(answer)
    # points beside the curve: two ways to weigh their errors, or all alike
    batches = np.array(list(MEASURED))
    steps = np.array(list(MEASURED.values()))
    with without(*BY_LABCODE):
        found = _pair(answer(dict(MEASURED)), "S_min and E_min")
    allowed = []
    for weights in (1 / steps, None):
        slope, intercept = np.polyfit(1 / batches, steps, 1, w=weights)
        allowed.append((intercept, slope))
        near = (_close(found[0], intercept, 0.02), _close(found[1], slope, 0.02))
        if all(near):
            return
    ends = " or ".join(f"({least:.0f}, {samples:.0f})" for least, samples in allowed)
    raise AssertionError(
        f"for the steps {list(MEASURED.values())} of batches 4 to 256, which do not lie exactly on "
        f"a curve, you find ({found[0]:.0f}, {found[1]:.0f}), and a fit to all of them finds "
        f"{ends}: does every point count, and with which weight?"
    )


def _fit_of_exact(answer: Callable[..., Any]) -> None:
    for least_steps, least_samples in ((100.0, 3200.0), (50.0, 500.0), (400.0, 1000.0)):
        exact = {batch: least_steps + least_samples / batch for batch in (4, 8, 16, 64, 256)}
        with without(*BY_LABCODE):
            found = _pair(answer(exact), "S_min and E_min")
        case = f"steps {', '.join(f'{s:.0f}' for s in exact.values())} for batches 4 to 256: "
        assert not (
            _close(found[0], least_samples, 1e-3) and _close(found[1], least_steps, 1e-3)
        ), case + "the two numbers have changed places: S_min comes first"
        assert not _close(found[1], least_samples / least_steps, 1e-3), (
            case + "that is the critical batch: E_min is asked for"
        )
        assert not _close(found[0], exact[256], 1e-6), (
            case + "your S_min is the number of steps of the largest batch, and a larger one would "
            "need fewer: fit the curve"
        )
        assert not _close(found[1], 4 * exact[4], 1e-6), (
            case + "your E_min is the samples of the smallest batch, and a smaller one would need "
            "fewer: fit the curve"
        )
        assert _close(found[0], least_steps, 1e-3) and _close(found[1], least_samples, 1e-3), (
            case
            + f"S_min is {least_steps:g} and E_min {least_samples:g}, yours are {found[0]:.4g} "
            f"and {found[1]:.4g}"
        )


# ---- 6.6

MOST_STEPS = 800
GAP = 0.3


def _changes(found: Any, which: str) -> dict[str, object]:
    if found is ...:
        raise NotImplementedError("exercise")
    assert isinstance(found, Mapping), (
        f"{which}: give a dict of fields, such as {{'optim.lr': 1e-2}}, not {found!r}"
    )
    assert found, f"{which}: the dict is empty: which field of the recipe do you change?"
    steps = found.get("train.steps", 0)
    assert not isinstance(steps, int) or steps <= MOST_STEPS, (
        f"{which}: at most {MOST_STEPS} steps, so that the check does not take minutes"
    )
    for name in ("optim.lr", "optim.min_lr"):
        rate = found.get(name)
        assert not (isinstance(rate, int | float) and rate > 100), (
            f"{which}: {name}={rate:g} overflows at the first step; find a rate of at most 100"
        )
    return dict(found)


def _row(changes: Mapping[str, object], which: str) -> Row:
    try:
        row = l06_runs.trained(changes)
    except ValueError as error:
        raise AssertionError(f"{which}: {error}") from None
    assert row.status != FAILED, f"{which}: the run failed: {row.reason}"
    return row


def broken(diverges: Any, overfits: Any) -> None:
    """The learner's two dicts of changes to the small GPT."""
    first = _changes(diverges, "diverges")
    second = _changes(overfits, "overfits")
    assert any(name.startswith("optim.") for name in first), (
        "diverges: change how the optimizer steps, with fields of `optim`"
    )
    row = _row(first, "diverges")
    loss = math.inf if row.loss is None else row.loss
    num_characters = l06_runs.whole_model().vocab_size
    assert num_characters is not None
    guessing = math.log(num_characters)  # nats per character of one who knows nothing
    assert row.status == DIVERGED or loss > guessing, (
        f"diverges: the run ends at a training loss of {loss:.2f}, and guessing costs "
        f"{guessing:.2f}: it still learns something"
    )
    row = _row(second, "overfits")
    assert row.status != DIVERGED and row.loss is not None and row.val_loss is not None, (
        "overfits: this run diverges: it must learn its training text, and nothing else"
    )
    assert row.loss < 2.5, (
        f"overfits: the training loss ends at {row.loss:.2f}: this run learns too little to "
        "learn by heart, give it more steps or a shorter text"
    )
    gap = row.val_loss - row.loss
    assert gap > GAP, (
        f"overfits: training ends at {row.loss:.2f} and validation at {row.val_loss:.2f}, "
        f"{gap:.2f} above it, and more than {GAP:g} is asked for: how often does the run see its "
        "text?"
    )
    lowest = min(loss for _, loss in row.val_losses)
    assert row.val_loss > lowest + 0.05, (
        f"overfits: the validation loss still falls, to {row.val_loss:.2f}: it must have risen "
        "again from its lowest point"
    )


# ---- 6.7

OUTER = (0.7, 0.9)
ROUNDS = 3


def _moves(rank: int, turn: int) -> list[torch.Tensor]:
    """How far the inner steps of a rank go in one round."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in _trained(_model())]


def _met(group: dist.ProcessGroup, answer: Any) -> None:
    members = dist.get_process_group_ranks(group)
    lr, momentum = OUTER
    model = nn.ParameterList(_trained(_model()))
    outer = answer(model, group, lr, momentum)
    common = [param.detach().clone() for param in model]
    velocity = [torch.zeros_like(param) for param in common]
    for turn in range(ROUNDS):
        with torch.no_grad():
            for param, move in zip(model, _moves(dist.get_rank(), turn)):
                param += move
        before = [param.detach().clone() for param in model]
        with without(*BY_LABCODE), counted() as calls:
            outer.step()
        gone = []
        for place in range(len(common)):
            moves = torch.stack([_moves(rank, turn)[place] for rank in members])
            gone.append(-moves.mean(0))
        if turn == 0:
            assert not all(torch.equal(a, b) for a, b in zip(model, before)), (
                "`step` leaves the weights as they are: copy the common ones into them"
            )
            _first_round(list(model), common, gone, calls, len(members))
        for place, way in enumerate(gone):
            velocity[place] = momentum * velocity[place] + way
            common[place] = common[place] - lr * (way + momentum * velocity[place])
        for param, expected in zip(model, common):
            assert torch.allclose(param, expected), (
                f"after round {turn + 1} the weights are not where they should be"
                + (
                    ": look at what is kept from one round to the next, `common` and `velocity`"
                    if turn
                    else ""
                )
            )


def _first_round(
    params: Sequence[torch.Tensor],
    common: Sequence[torch.Tensor],
    gone: Sequence[torch.Tensor],
    calls: Sequence[Any],
    group_size: int,
) -> None:
    """The slips that show in the first round, where the velocity is the outer gradient."""
    lr, momentum = OUTER
    assert calls, "no collective was called: the copies never meet"
    # common + factor * gone, where lr * (1 + momentum) with a minus is right
    slips = (
        (-1.0, "the copies meet, but that is the plain mean of the weights: take an outer step"),
        (
            -lr,
            "this is the step without Nesterov: where is the momentum, times the v of this round?",
        ),
        (
            -lr * (1 + momentum) * group_size,
            "the outer gradient is the mean over the copies, and this is their sum",
        ),
        (
            -1 - lr * (1 + momentum),
            "the step begins at the mean of the copies: it is to begin where they began",
        ),
        (
            lr * (1 + momentum),
            "you walk back to where the copies came from: the outer gradient points from where "
            "they are to `common`, and a step goes against it",
        ),
        (-(1 + momentum), "the outer rate is missing"),
    )
    for factor, text in slips:
        wrong = [old + factor * way for old, way in zip(common, gone)]
        assert not all(torch.allclose(new, old) for new, old in zip(params, wrong)), text
    moved = sum(call.num_bytes for call in calls)
    needed = sum(param.nbytes for param in params)
    assert moved <= 1.01 * needed, (
        f"{moved} bytes travel in a round, and the weights have {needed}: one average is enough"
    )


def outer_step(answer: Any, ranks: Ranks) -> None:
    """The learner's class with `step()`, on all ranks and on three of them."""
    due(answer)
    if inspect.isclass(answer):
        in_groups(ranks, GROUPS, _met, answer)
        return
    raise AssertionError(f"a class is asked for, not a {type(answer).__name__}")
