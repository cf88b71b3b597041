"""Checks of lesson 12, pipeline parallelism. The text of each assertion is a hint."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from labcode.perf.pipeline import StageTimes, bubble_over_total, peak_microbatches, simulate
from labcode.pool.ranks import Ranks
from labcode.schedules import Action, check_schedule, schedule
from labcode.teach.check import Exercise, due
from labcode.teach.labs import l12_paced_pipeline

EXERCISES = {
    "12.1": Exercise("many micro-batches, and GPipe keeps them all"),
    "12.2": Exercise("the order of the library, and the gradients of one process"),
    "12.3": Exercise("together they are backward, and they need not be together"),
    "12.4": Exercise("no stage is slower than another"),
}

# ---- 12.1


def enough(enough: Callable[[int, float], float]) -> None:
    """The learner's number of micro-batches that keeps the bubble small.

    Args:
        enough: `enough(p, share)`: the fewest micro-batches whose bubble is at most `share` of the
            whole time on p ranks.
    """
    for p, share in ((8, 0.07), (4, 0.25), (4, 0.5), (16, 0.03), (2, 0.5)):
        _check_enough(p, share, due(enough(p, share)))


def _check_enough(p: int, share: float, found: float) -> None:
    case = f"p={p}, share={share}: "
    limit = share + 1e-9
    assert float(found).is_integer(), (
        case + f"{found} micro-batches; give a whole number, rounded up"
    )
    found = int(found)
    assert found >= 1, case + f"{found} micro-batches; there is at least one"
    over_total = bubble_over_total("gpipe", p, found)
    assert over_total <= limit, (
        case + f"with {found} micro-batches the ranks wait {over_total:.1%} of the time"
    )
    if found == 1:
        return
    of_work = math.ceil((p - 1) / share - 1e-9)
    assert found != of_work, (
        case + "this keeps bubble / work at the share; here it is a share of the whole time"
    )
    assert bubble_over_total("gpipe", p, found - 1) > limit, (
        case + f"{found} micro-batches are enough, but fewer are as well"
    )


# ---- 12.2


def one_f_one_b(order: Callable[[int, int, int], list[Action]], ranks: Ranks) -> None:
    """The learner's 1F1B, checked as data first, and then run.

    Args:
        order: `order(rank, p, m)`: the actions of one rank.
        ranks: Where it runs.
    """
    for p, m in ((2, 3), (4, 8), (3, 5), (4, 2)):
        case = f"p={p}, m={m}: "
        orders = {rank: due(order(rank, p, m)) for rank in range(p)}
        _check_types(orders, case)
        try:
            check_schedule(orders, p, m)
        except ValueError as error:
            raise AssertionError(case + str(error)) from None
        _check_costs(orders, p, m, case)
        _check_actions(orders, p, m, case)
    p = ranks.n
    m = 8
    orders = {rank: order(rank, p, m) for rank in range(p)}
    runs = ranks.run(l12_paced_pipeline.run_schedule, orders, p, m)
    off = l12_paced_pipeline.difference(runs, p, m)
    assert off < 1e-12, f"the gradients differ from one process by {off:.0e}"


def _check_types(orders: dict[int, list[Action]], case: str) -> None:
    for rank, actions in orders.items():
        right = isinstance(actions, list) and all(isinstance(one, Action) for one in actions)
        assert right, case + (
            f"rank {rank} has {str(actions)[:40]}: give a list of Action(kind, stage, microbatch)"
        )


def _check_costs(orders: dict[int, list[Action]], p: int, m: int, case: str) -> None:
    """Memory and time, as 1F1B takes them."""
    times = StageTimes(1, 1, 1)
    line = simulate(orders, times)
    for rank in range(p):
        kept = line.peak_microbatches(rank)
        needed = peak_microbatches("1f1b", p, m, rank=rank)
        assert kept <= needed, case + (
            f"rank {rank} keeps {kept} micro-batches at once, {needed} are enough: "
            "after the first forwards each forward is followed by a backward"
        )
    best_s = simulate(schedule("1f1b", p, m), times).total_s
    assert line.total_s <= best_s, case + (
        f"it is complete, but takes {line.total_s:.0f} units where 1F1B takes {best_s:.0f}: "
        "how many forwards come before the first backward, on the first rank and on the last?"
    )


def _check_actions(orders: dict[int, list[Action]], p: int, m: int, case: str) -> None:
    """Action by action."""
    for rank, expected in schedule("1f1b", p, m).items():
        for place, (found, wanted) in enumerate(zip(orders[rank], expected)):
            assert found == wanted, case + (
                f"rank {rank}, place {place}: {found}, 1F1B has {wanted.kind} here"
            )


# ---- 12.3


def halves(
    input_half: Callable[[Tensor, Tensor], Tensor], weight_half: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """The learner's two halves of the backward of a linear layer, against autograd.

    Args:
        input_half: `input_half(grad, weight)`: the gradient of the input.
        weight_half: `weight_half(grad, x)`: the gradient of the weight.
    """
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 5, 7, dtype=torch.float64, generator=generator)
    weight = torch.randn(3, 7, dtype=torch.float64, generator=generator)
    grad = torch.randn(2, 5, 3, dtype=torch.float64, generator=generator)
    x.requires_grad_()
    weight.requires_grad_()
    torch.nn.functional.linear(x, weight).backward(grad)
    assert x.grad is not None and weight.grad is not None
    _check_half("input_half", due(input_half(grad.clone(), weight.detach())), x.grad)
    _check_half("weight_half", due(weight_half(grad.clone(), x.detach())), weight.grad)


def _check_half(name: str, found: Tensor, expected: Tensor) -> None:
    shape = list(found.shape)
    wanted = list(expected.shape)
    assert found.ndim != 2 or shape != wanted[::-1], (
        f"{name}: {shape} is the transpose; "
        f"PyTorch keeps a weight as [outputs, inputs], here {wanted}"
    )
    assert found.ndim == expected.ndim, (
        f"{name}: {shape}, expected {wanted}: "
        "the weight's gradient is a sum over samples and tokens"
    )
    assert shape == wanted, f"{name}: {shape}, expected {wanted}"
    off = ((found - expected).norm() / expected.norm()).item()
    assert off < 1e-12, f"{name}: the shape is right, the values are {off:.0%} off"


# ---- 12.4

LAYERS = 14
RANKS = 4
MICROBATCHES = 16
HEAD = 2  # what the head costs, in layers


def _work(layers: Sequence[int]) -> list[int]:
    """What each rank computes for a micro-batch, in layers; the last one has the head."""
    return [*layers[:-1], layers[-1] + HEAD]


def step_units(layers: Sequence[int]) -> float:
    """How long a step of 1F1B takes, in forwards of one layer.

    Args:
        layers: Of each rank; the last one has the head too.
    """
    times = [StageTimes(units, units, units) for units in _work(layers)]
    return simulate(schedule("1f1b", RANKS, MICROBATCHES), times).total_s


def _all_splits() -> Iterator[list[int]]:
    """Every way to give each rank at least one of the layers, in order."""
    for cuts in itertools.combinations(range(1, LAYERS), RANKS - 1):
        edges = (0, *cuts, LAYERS)
        yield [stop - start for start, stop in itertools.pairwise(edges)]


def _best_units() -> float:
    """The shortest step of all splits.

    Only splits whose slowest stage is within one layer of the best are simulated: with a slower
    one the step is longer for certain, and a simulation takes milliseconds.
    """
    slowest = {tuple(split): max(_work(split)) for split in _all_splits()}
    limit = min(slowest.values()) + 1
    return min(step_units(split) for split, units in slowest.items() if units <= limit)


def layers(layers: Sequence[int]) -> None:
    """The learner's number of layers of each stage, against the best of all splits.

    Args:
        layers: Four numbers.
    """
    layers = tuple(due(layers))
    assert len(layers) == RANKS and sum(layers) == LAYERS and min(layers) >= 1, (
        f"{layers}: give {RANKS} numbers, each at least 1, that add up to {LAYERS} layers"
    )
    found = step_units(layers)
    best = _best_units()
    assert found <= best, (
        f"{layers}: a step takes {found:.0f} units, {best:.0f} are possible: the slowest stage "
        f"sets the pace, and here it has {max(_work(layers))} units of work per micro-batch"
    )
