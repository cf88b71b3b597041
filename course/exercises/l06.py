"""Checks of lesson 06, large batches and convergence."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from course.answer import Exercise, Hint, due
from course.exercises.expect import (
    careless,
    confirm_in_group,
    diagnose,
    distance,
    in_groups,
    own_answers,
    refuse,
)
from course.exercises.in_notebook import without
from course.exercises.simulated import Outcome, here
from course.labs import l06_runs
from course.pool.ranks import Ranks
from labcode.parallel.local import OuterOptimizer
from labcode.run import sweep_table
from labcode.run.sweep_table import DIVERGED, FAILED, Row
from labcode.runtime.units import type_in_words
from labcode.train import noise_scale

ROUNDED = 1e-6  # numbers may have been float32 on their way
BY_LABCODE = (
    OuterOptimizer.step,
    noise_scale.estimate,
    sweep_table.fit_tradeoff,
)
OURS = own_answers(*BY_LABCODE)


def _close(found: float, expected: float, rel: float = ROUNDED) -> bool:
    return math.isclose(found, expected, rel_tol=rel, abs_tol=1e-9)


def _by_hand(answer: Callable[..., Any], *args: Any) -> Any:
    """What a learner's function returns, written without labcode's own."""
    with without(*BY_LABCODE):
        return due(answer(*args))


def _pair(found: Any, names: str) -> tuple[float, float]:
    """Two numbers that a function of the learner's returned."""
    found = due(found)
    if isinstance(found, np.ndarray | Tensor) and found.ndim == 1:
        found = found.tolist()
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise Hint(f"return two numbers: {names}")
    for value in due(*found):
        if not isinstance(value, int | float | np.floating | Tensor):
            raise Hint(f"return numbers, {names}, not {type_in_words(value)}")
    return float(found[0]), float(found[1])


# ---- 6.1

# |G|^2, tr(Sigma), small batch, big batch. In the last one |G|^2 is estimated from noisy numbers:
# where it is small, it may come out below zero.
PROBLEMS = (
    (20.0, 80.0, 1, 4),
    (0.5, 3.0, 2, 16),
    (7.0, 0.0, 4, 8),
    (1e-3, 5.0, 8, 64),
    (-2.0, 30.0, 1, 8),
)


def estimate(answer: Callable[..., Any]) -> None:
    """The learner's `estimate(small_batch, small_square, big_batch, big_square)`."""
    for square, variance, small, big in PROBLEMS:
        small_square = square + variance / small
        big_square = square + variance / big
        found = _by_hand(answer, small, small_square, big, big_square)
        first, second = _pair(found, "|G|^2 and the variance")
        if _close(first, square) and _close(second, variance):
            continue
        mistakes = {
            "the two numbers have changed places: |G|^2 comes first": (
                _close(first, variance) and _close(second, square)
            ),
            "your |G|^2 is that of the big batch, which still has noise in it: what is left of it "
            "if the batch has no end?": _close(first, big_square),
            "the difference of the two squares is not the variance: by what is the variance "
            "divided in each of them?": _close(second, small_square - big_square),
            "your second number is the variance of the small batch: expected is that of one "
            "sample": small > 1 and _close(second, variance / small),
            f"your variance is {second:g}: put it back into the two equations": (
                not _close(second, variance)
            ),
            f"the two equations can give a |G|^2 below zero, and yours is {first:g}: cut off at 0, "
            "the estimates would be too large on average": square < 0 <= first,
            f"your |G|^2 is {first:g}: put it back into the two equations": True,
        }
        case = f"with |G|^2 = {square:g}, variance {variance:g} and batches {small} and {big}: "
        refuse(mistakes, case)


# ---- 6.2


def _gradients(rank: int) -> list[Tensor]:
    """A rank's own gradients, by parameter."""
    generator = torch.Generator().manual_seed(50 + rank)
    shapes = ((5, 3), (3,), (2, 4))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _model() -> nn.ParameterList:
    """Three weights with a gradient, and a frozen one without."""
    params = [nn.Parameter(torch.ones_like(gradient)) for gradient in _gradients(0)]
    frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
    return nn.ParameterList([*params[:2], frozen, params[2]])


def _trained(model: nn.ParameterList) -> list[nn.Parameter]:
    return [param for param in model if param.requires_grad]


class _Measured(NamedTuple):
    """What a rank has measured: the two numbers, and what is in `.grad` afterwards."""

    small: float
    big: float
    grads: list[Tensor]


def _measure(group: dist.ProcessGroup, answer: Callable[..., Any]) -> _Measured:
    model = _model()
    for param, gradient in zip(_trained(model), _gradients(dist.get_rank())):
        param.grad = gradient.clone()
    small, big = _pair(answer(model, group), "the mean small square and the big one")
    grads = []
    for param in _trained(model):
        if param.grad is None:
            raise Hint("a gradient is gone: every `.grad` becomes the mean")
        grads.append(param.grad)
    return _Measured(small, big, grads)


def _check_measured(results: list[_Measured], outcome: Outcome, members: Sequence[int]) -> None:
    """The mean is in `.grad` of each rank of a group, and the two numbers are right."""
    p = len(members)
    means = [torch.stack(parts).mean(0) for parts in zip(*map(_gradients, members))]
    squares_of = {rank: _squared(_gradients(rank)) for rank in members}
    small = sum(squares_of.values()) / p
    big = _squared(means)
    norm = "that is a norm: its square is asked for"
    for rank, found in zip(members, results):
        case = f"on rank {rank}: "
        refuse(careless(outcome.of(rank)), case)
        for grad, mean, own in zip(found.grads, means, _gradients(rank)):
            mistakes = {"`.grad` still holds the rank's own gradient: put the mean into it": own}
            otherwise = (
                "`.grad` is not the mean over the group: divide the sum by the size of the group, "
                "once"
            )
            diagnose(case, grad, mean, mistakes, otherwise, ROUNDED)
        mistakes = {
            norm: math.sqrt(small),
            "your first number is this rank's own square: take the mean over the group, so that "
            "all ranks say the same": squares_of[rank],
            "your first number is the sum of the small squares over the group, not their mean": (
                small * p
            ),
            "your first number is that of the mean gradient: take the square of a rank's own "
            "gradient before it is averaged": big,
        }
        otherwise = f"your first number is {found.small:g}, expected is {small:g}"
        diagnose(case, found.small, small, mistakes, otherwise, ROUNDED)
        mistakes = {
            norm: math.sqrt(big),
            "your second number is that of the small batches: take the square of the gradient "
            "after it has been averaged": small,
        }
        otherwise = f"your second number is {found.big:g}, expected is {big:g}"
        diagnose(case, found.big, big, mistakes, otherwise, ROUNDED)
        sent = sum(call.num_bytes for call in outcome.of(rank))
        extra = sent - sum(mean.nbytes for mean in means)
        mistakes = {
            f"{extra} bytes travel beside the gradients, and one number is enough: 8 bytes in a "
            "tensor": extra > 16
        }
        refuse(mistakes, case)


def _squared(gradients: Sequence[Tensor]) -> float:
    return sum(gradient.square().sum().item() for gradient in gradients)


def squares(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `squares(model, group)`, on all ranks and on three of them."""
    outcome = in_groups(_measure, answer, judge=_check_measured, ours=OURS)
    return confirm_in_group(ranks, outcome, _measure, answer)


# ---- 6.3

# keep, and |G|^2 and variance of each step
MEASUREMENTS = (
    (0.9, ((2.0, 60.0),)),
    (0.8, ((1.0, 10.0), (0.1, 12.0), (1.9, 8.0), (0.5, 11.0))),
)


def smoothed(answer: Callable[..., Any]) -> None:
    """The learner's class with `add(square, variance)` and `noise_scale()`."""
    for keep, steps in MEASUREMENTS:
        found = _by_hand(_noise_scale, answer, keep, steps)
        all_squares, all_variances = zip(*steps)
        truth = _faded(all_variances, keep) / _faded(all_squares, keep)
        ratios = [variance / square for square, variance in steps]
        of_ratios = _faded(ratios, keep)
        weight = 1 - keep ** len(steps)  # of all steps together
        mistakes = {
            "that is the ratio of the last step alone: what do the steps before it say?": (
                ratios[-1]
            ),
            "you smooth ratios, and one step with a small |G|^2 outweighs all others: smooth both "
            "numbers, and divide them at the end": (
                _close(found, of_ratios) or _close(found, of_ratios / weight)
            ),
            "all steps count alike, and the noise scale grows during training: old ones must "
            "fade": sum(all_variances) / sum(all_squares),
            "the new step counts for `keep`: it is the old value that is kept to that part": (
                _faded(all_variances, 1 - keep) / _faded(all_squares, 1 - keep)
            ),
        }
        otherwise = (
            f"after steps with (|G|^2, variance) = {', '.join(map(str, steps))} and keep = {keep} "
            f"the noise scale is {truth:.4g}, yours is {found:.4g}"
        )
        diagnose("", found, truth, mistakes, otherwise, ROUNDED)


def _noise_scale(
    answer: Callable[..., Any], keep: float, steps: Sequence[tuple[float, float]]
) -> float:
    meter = answer(keep)
    for square, variance in steps:
        meter.add(square, variance)
    return float(due(meter.noise_scale()))


def _faded(values: Sequence[float], keep: float) -> float:
    """The smoothed value after all steps."""
    value = 0.0
    for one in values:
        value = keep * value + (1 - keep) * one
    return value


# ---- 6.4

BATCHES = [4, 16, 64]
RATES = [1e-3, 1e-2, 1e-1]
# steps to the target; None where a run does not reach it, or diverges
RUNS = {
    (4, 1e-3): 900,
    (4, 1e-2): 1200,
    (4, 1e-1): None,
    (16, 1e-3): 700,
    (16, 1e-2): 300,
    (16, 1e-1): None,
    (64, 1e-3): None,
    (64, 1e-2): None,
    (64, 1e-1): None,
}
DIVERGING = ((4, 1e-1), (64, 1e-2), (64, 1e-1))
BEST = {4: (1e-3, 900), 16: (1e-2, 300)}
NUM_DONE = 5  # before a sweep is killed
Table = dict[tuple[int, float], int | None]


class _Runs:
    """What the learner's sweep calls; it notes each run.

    Args:
        max_runs: Number of runs after which somebody interrupts the next one.
    """

    def __init__(self, max_runs: int = 100) -> None:
        self.done: list[tuple[int, float]] = []
        self.max_runs = max_runs

    def __call__(self, batch: int, lr: float) -> int | None:
        if (batch, lr) not in RUNS:
            text = f"a run with batch {batch} and rate {lr} was started"
            raise Hint(f"{text}: it is steps_to_target(batch, lr)")
        if len(self.done) == self.max_runs:
            raise KeyboardInterrupt
        self.done.append((batch, lr))
        if (batch, lr) in DIVERGING:
            raise ArithmeticError("the loss is nan")
        return RUNS[batch, lr]


def sweep(answer: Callable[..., Any]) -> None:
    """The learner's `sweep(batches, rates, steps_to_target, table)`."""
    table: Table = {}
    runs = _Runs()
    best = _swept(answer, runs, table)
    for batch, lr in sorted(set(RUNS) - set(runs.done)):
        raise Hint(f"there was no run with batch {batch} and rate {lr:g}")
    refuse({"a run was done twice: ask for its steps once": len(runs.done) != len(RUNS)})
    for key, steps in RUNS.items():
        found = table.get(key)
        mistakes = {
            f"`table` has no entry for {key}: a run whose result is not kept is done again": (
                key not in table
            ),
            f"table[{key}] is {found}, and the run found {steps or 'no way to the target'}": (
                found != steps
            ),
        }
        refuse(mistakes)
    _check_best(best)
    _check_resumed(answer, dict(list(table.items())[:NUM_DONE]))
    _check_interrupted(answer)


def _check_resumed(answer: Callable[..., Any], table: Table) -> None:
    """A sweep that was killed does what is missing."""
    before = set(table)
    again = _Runs()
    best = _swept(answer, again, table)
    for run in sorted(before.intersection(again.done)):
        raise Hint(
            f"the run {run} was in `table` already, and was done again: look there first. None is "
            "an entry, too"
        )
    is_complete = len(again.done) == len(RUNS) - NUM_DONE
    refuse({"after a restart not all missing runs were done": not is_complete})
    _check_best(best)


def _check_interrupted(answer: Callable[..., Any]) -> None:
    """A sweep that is interrupted ends, and has kept what was done."""
    table: Table = {}
    runs = _Runs(NUM_DONE)
    try:
        answer(BATCHES, RATES, runs, table)
    except KeyboardInterrupt:
        mistakes = {
            f"the sweep was interrupted after {NUM_DONE} runs, and `table` has {len(table)} of "
            "them: keep each result as soon as it is there": not set(runs.done) <= set(table),
            "the run that was interrupted has an entry in `table`, and after a restart it would be "
            "left out: make the entry when a run has ended": len(table) > NUM_DONE,
        }
        refuse(mistakes)
        return
    raise Hint("somebody interrupted the sweep, and it went on: catch ArithmeticError alone")


def _swept(answer: Callable[..., Any], runs: _Runs, table: Table) -> Any:
    try:
        return _by_hand(answer, BATCHES, RATES, runs, table)
    except ArithmeticError:
        text = "a run that diverged ended the sweep: catch its ArithmeticError, and go on"
        raise Hint(text) from None


def _check_best(best: Any) -> None:
    """{batch: (rate, steps)} of the best run of each batch."""
    if not isinstance(best, Mapping):
        raise Hint(f"return a dict, {{batch: (rate, steps)}}, not {type_in_words(best)}")
    never = "no run with batch 64 reaches the target: leave that batch out, here it has"
    refuse({f"{never} {best.get(64)!r}": 64 in best})
    for batch, expected in BEST.items():
        if batch not in best:
            raise Hint(f"the best rate of batch {batch} is missing")
        found = best[batch]
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise Hint(f"of each batch (rate, steps) is asked for, not {found!r}")
        mistakes = {
            "the rate comes first, then the steps": tuple(found) == expected[::-1],
            f"of batch {batch} you take {tuple(found)}, and {expected} needs fewest steps": (
                tuple(found) != expected
            ),
        }
        refuse(mistakes)


# ---- 6.5

CURVES = ((100.0, 3200.0), (50.0, 500.0), (400.0, 1000.0))  # S_min, E_min
MEASURED = {4: 1400.0, 8: 560.0, 16: 340.0, 32: 210.0, 64: 180.0, 128: 110.0, 256: 160.0}


def fit(answer: Callable[..., Any]) -> None:
    """The learner's `fit(steps_of) -> (S_min, E_min)`."""
    for least_steps, least_samples in CURVES:
        exact = {batch: least_steps + least_samples / batch for batch in (4, 8, 16, 64, 256)}
        first, second = _pair(_by_hand(answer, dict(exact)), "S_min and E_min")
        if _close(first, least_steps, 1e-3) and _close(second, least_samples, 1e-3):
            continue
        mistakes = {
            "the two numbers have changed places: S_min comes first": (
                _close(first, least_samples, 1e-3) and _close(second, least_steps, 1e-3)
            ),
            "that is the critical batch: E_min is asked for": (
                _close(second, least_samples / least_steps, 1e-3)
            ),
            "your S_min is the number of steps of the largest batch, and a larger one would need "
            "fewer: fit the curve": _close(first, exact[256]),
            "your E_min is the samples of the smallest batch, and a smaller one would need fewer: "
            "fit the curve": _close(second, 4 * exact[4]),
            f"S_min is {least_steps:g} and E_min {least_samples:g}, yours are {first:.4g} and "
            f"{second:.4g}": True,
        }
        listed = ", ".join(f"{steps:.0f}" for steps in exact.values())
        refuse(mistakes, f"steps {listed} for batches 4 to 256: ")
    _check_fits_all_points(answer)


def _check_fits_all_points(answer: Callable[..., Any]) -> None:
    """Points beside the curve: two ways to weigh their errors, or all alike."""
    batches = np.array(list(MEASURED))
    steps = np.array(list(MEASURED.values()))
    first, second = _pair(_by_hand(answer, dict(MEASURED)), "S_min and E_min")
    allowed = []
    for weights in (1 / steps, None):
        slope, intercept = np.polyfit(1 / batches, steps, 1, w=weights)
        allowed.append(f"({intercept:.0f}, {slope:.0f})")
        if _close(first, intercept, 0.02) and _close(second, slope, 0.02):
            return
    raise Hint(
        f"for the steps {list(MEASURED.values())} of batches 4 to 256, which do not lie exactly on "
        f"a curve, you find ({first:.0f}, {second:.0f}), and a fit to all of them finds "
        f"{' or '.join(allowed)}: does every point count, and with which weight?"
    )


# ---- 6.6

MOST_STEPS = 800
MOST_RATE = 100
MOST_LOSS = 2.5  # of a run that has learned something
GAP = 0.3


def _changes(found: Any, which: str) -> dict[str, object]:
    """The fields of a run, as far as one sees without training that they will do."""
    if not isinstance(found, Mapping):
        raise Hint(f"{which}: give a dict of fields, such as {{'optim.lr': 1e-2}}, not {found!r}")
    steps = found.get("train.steps", 0)
    mistakes = {
        "the dict is empty: which field of the recipe do you change?": not found,
        f"at most {MOST_STEPS} steps, so that the check does not take minutes": (
            isinstance(steps, int) and steps > MOST_STEPS
        ),
    }
    refuse(mistakes, f"{which}: ")
    for name in ("optim.lr", "optim.min_lr"):
        rate = found.get(name)
        if isinstance(rate, int | float) and rate > MOST_RATE:
            text = f"{which}: {name}={rate:g} overflows at the first step"
            raise Hint(f"{text}; find a rate of at most {MOST_RATE}")
    return dict(found)


def _row(changes: Mapping[str, object], which: str) -> Row:
    """What became of the run."""
    try:
        row = l06_runs.trained(changes)
    except ValueError as error:
        raise Hint(f"{which}: {error}") from None
    refuse({f"{which}: the run failed: {row.reason}": row.status == FAILED})
    return row


def broken(diverges: Any, overfits: Any) -> None:
    """The learner's two dicts of changes to the small GPT."""
    first = _changes(diverges, "diverges")
    second = _changes(overfits, "overfits")
    if not all(name.startswith("optim.") for name in first):
        raise Hint("diverges: change how the optimizer steps, with fields of `optim` alone")
    _check_diverges(_row(first, "diverges"))
    _check_overfits(_row(second, "overfits"))


def _check_diverges(row: Row) -> None:
    """The run ends worse than guessing."""
    loss = math.inf if row.loss is None else row.loss
    num_characters = l06_runs.whole_model().vocab_size
    assert num_characters is not None
    guessing = math.log(num_characters)  # nats per character of one who knows nothing
    is_no_worse = row.status != DIVERGED and loss <= guessing
    mistakes = {
        f"diverges: the run ends at a training loss of {loss:.2f}, and guessing costs "
        f"{guessing:.2f}: it has to end worse than that": is_no_worse
    }
    refuse(mistakes)


def _check_overfits(row: Row) -> None:
    """The run has learned its text by heart."""
    if row.status == DIVERGED or row.loss is None or row.val_loss is None:
        raise Hint("overfits: this run diverges: it must learn its training text, and nothing else")
    gap = row.val_loss - row.loss
    lowest = min(loss for _, loss in row.val_losses)
    mistakes = {
        f"the training loss ends at {row.loss:.2f}: this run learns too little to learn by heart, "
        "give it more steps or a shorter text": row.loss >= MOST_LOSS,
        f"training ends at {row.loss:.2f} and validation at {row.val_loss:.2f}, {gap:.2f} above "
        f"it, and more than {GAP:g} is asked for: how often does the run see its text?": gap <= GAP,
        f"the validation loss still falls, to {row.val_loss:.2f}: it must have risen again from "
        "its lowest point": row.val_loss <= lowest + 0.05,
    }
    refuse(mistakes, "overfits: ")


# ---- 6.7

LR = 0.7
MOMENTUM = 0.9
ROUNDS = 3


def _moves(rank: int, turn: int) -> list[Tensor]:
    """How far the inner steps of a rank go in one round, by parameter."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in _trained(_model())]


def _meet(group: dist.ProcessGroup, outer_class: Callable[..., Any]) -> list[Tensor]:
    """All weights of this rank after each round."""
    model = nn.ParameterList(_trained(_model()))
    outer = outer_class(model, group, LR, MOMENTUM)
    found = []
    for turn in range(ROUNDS):
        with torch.no_grad():
            for param, move in zip(model, _moves(dist.get_rank(), turn)):
                param += move
        here().note("round")
        outer.step()
        found.append(parameters_to_vector(model).detach().clone())
    return found


def _check_met(results: list[list[Tensor]], outcome: Outcome, members: Sequence[int]) -> None:
    """The copies of a group are where Nesterov's steps lead, after each round."""
    common = parameters_to_vector(_trained(_model())).detach()
    velocity = torch.zeros_like(common)
    for turn in range(ROUNDS):
        moves = {rank: parameters_to_vector(_moves(rank, turn)) for rank in members}
        gone = -torch.stack(list(moves.values())).mean(0)
        velocity = MOMENTUM * velocity + gone
        truth = common - LR * (gone + MOMENTUM * velocity)
        for rank, found in zip(members, results):
            case = f"on rank {rank}: "
            calls = outcome.parts(rank, "round")[turn]
            refuse(careless(outcome.of(rank)), case)
            mistakes = {}
            otherwise = (
                f"after round {turn + 1} the weights are not where they should be: look at what is "
                "kept from one round to the next, `common` and `velocity`"
            )
            if turn == 0:
                refuse({"no collective was called: the copies never meet": not calls}, case)
                mistakes = _first_mistakes(common, common + moves[rank], gone, len(members))
                otherwise = "after round 1 the weights are not where they should be"
            if any(distance(other[turn], found[turn]) > ROUNDED for other in results):
                otherwise = (
                    f"after round {turn + 1} the copies have different weights: what in your step "
                    "is not the same on all ranks?"
                )
            diagnose(case, found[turn], truth, mistakes, otherwise, ROUNDED)
            sent = sum(call.num_bytes for call in calls)
            mistakes = {
                f"{sent} bytes travel in a round, and the weights have {common.nbytes}: one "
                "average is enough": sent > 1.01 * common.nbytes
            }
            refuse(mistakes, case)
        common = truth


def _first_mistakes(common: Tensor, before: Tensor, gone: Tensor, p: int) -> dict[str, Tensor]:
    """The slips that show in the first round, where the velocity is the outer gradient.

    Args:
        common: Weights that all copies began with.
        before: Weights of this rank's copy before the step.
        gone: The outer gradient.
        p: Number of copies.
    """
    step = LR * (1 + MOMENTUM) * gone
    return {
        "`step` leaves the weights as they are: copy the common ones into them": before,
        "the copies meet, but that is the plain mean of the weights: take an outer step": (
            common - gone
        ),
        "this is the step without Nesterov: where is the momentum, times the v of this round?": (
            common - LR * gone
        ),
        "the outer gradient is the mean over the copies, and this is their sum": common - p * step,
        "the step begins at the mean of the copies: it is to begin where they began": (
            common - gone - step
        ),
        "you walk back to where the copies came from: the outer gradient points from where they "
        "are to `common`, and a step goes against it": common + step,
        "the outer rate is missing": common - (1 + MOMENTUM) * gone,
    }


def outer_step(answer: Any, ranks: Ranks | None = None) -> str:
    """The learner's class with `step()`, on all ranks and on three of them."""
    if not inspect.isclass(due(answer)):
        raise Hint(f"a class is asked for, not {type_in_words(answer)}")
    outcome = in_groups(_meet, answer, judge=_check_met, ours=OURS)
    return confirm_in_group(ranks, outcome, _meet, answer)


EXERCISES = {
    "6.1": Exercise(
        check=estimate,
        praise="two equations, two unknowns, and no bias",
        hints=(
            "Write the equation E|G_B|^2 = |G|^2 + variance / B once for each of the two batches. "
            "What is left if you subtract one from the other?",
            "With the variance known, either equation gives |G|^2.",
        ),
    ),
    "6.2": Exercise(
        check=squares,
        praise="one number more than data parallelism sends anyway",
        hints=(
            "Of each rank's gradient you need the square before the average, of the average the "
            "square after it.",
            "The mean of the small squares is a sum over the group divided by the size of the "
            "group: a tensor with one number is enough for the all-reduce.",
        ),
    ),
    "6.3": Exercise(
        check=smoothed,
        praise="smoothed first, divided last",
        hints=("Two numbers are kept. Neither of them is a ratio.",),
    ),
    "6.4": Exercise(
        check=sweep,
        praise="every run once, whatever became of it, and the best rate for each batch",
        hints=(
            "What does your loop do with a pair that is in `table` already?",
            "A run that raises ArithmeticError must leave an entry, too: which one means that the "
            "target was never reached?",
        ),
    ),
    "6.5": Exercise(
        check=fit,
        praise="a line over 1 / B, and its two ends",
        hints=(
            "S = S_min + E_min / B is a straight line over x = 1 / B. What is its slope?",
            "np.polyfit(x, y, 1) gives slope and intercept; w=1 / y weighs relative errors.",
        ),
    ),
    "6.6": Exercise(
        check=broken,
        praise="one run that ends worse than guessing, and one that learns by heart",
        hints=(
            "AdamW divides by the usual length of a gradient. Where all gradients are long, "
            "clipping hardly holds it back. How far up can you go with the rate itself?",
            "A model learns by heart what it sees often. How do you make the training text short? "
            "The field data.val_fraction is the share that is kept for validation.",
        ),
    ),
    "6.7": Exercise(
        check=outer_step,
        praise="all copies meet, and go on together from there",
        hints=(
            "The outer gradient points from where the copies are on average to where they began.",
            "PyTorch's Nesterov: v = momentum * v + g, then w = w - lr * (g + momentum * v).",
            "Where do the copies begin the next H steps, and what must `common` hold then?",
        ),
    ),
}
