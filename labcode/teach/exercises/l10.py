"""Checks of lesson 10, pipeline parallel. Each assertion's text is a hint."""

import itertools
import math

import torch

from labcode.perf.pipeline import StageTimes, bubble_over_total, peak_microbatches, simulate
from labcode.schedules import Action, check_schedule, schedule
from labcode.teach.check import due
from labcode.teach.labs import l10_paced_pipeline

# ---- 10.1


def enough(enough) -> None:
    """The learner's `enough(p, share)`: the fewest micro-batches whose bubble is at most `share` of the whole time."""
    for p, share in ((8, 0.07), (4, 0.25), (4, 0.5), (16, 0.03), (2, 0.5)):
        found = due(enough(p, share))
        case = f"p={p}, share={share}: "
        assert float(found).is_integer(), (
            case + f"{found} micro-batches; give a whole number, rounded up"
        )
        found = int(found)
        assert found >= 1, case + f"{found} micro-batches; there is at least one"
        over_total = bubble_over_total("gpipe", p, found)
        if over_total > share + 1e-9:
            raise AssertionError(
                case + f"with {found} micro-batches the ranks wait {over_total:.1%} of the time"
            )
        of_ideal = math.ceil((p - 1) / share - 1e-9)
        if found == of_ideal > 1:
            raise AssertionError(
                case + "this keeps bubble / work at the share; here it is a share of the whole time"
            )
        fewer = found > 1 and bubble_over_total("gpipe", p, found - 1) <= share + 1e-9
        assert not fewer, case + f"{found} micro-batches are enough, but fewer are as well"


# ---- 10.2


def one_f_one_b(order, ranks) -> None:
    """The learner's `order(rank, p, m)`: 1F1B for one rank; checked as data first, and then run."""
    for p, m in ((2, 3), (4, 8), (3, 5), (4, 2)):
        orders, case = {rank: due(order(rank, p, m)) for rank in range(p)}, f"p={p}, m={m}: "
        for rank, one in orders.items():
            assert isinstance(one, list) and all(isinstance(action, Action) for action in one), (
                case
                + f"rank {rank} has {str(one)[:40]}: give a list of Action(kind, stage, microbatch)"
            )
        try:
            check_schedule(orders, p, m)
        except ValueError as error:
            raise AssertionError(case + str(error)) from None
        _compare_with_1f1b(orders, p, m, case)
    orders = {rank: order(rank, ranks.n, 8) for rank in range(ranks.n)}
    off = l10_paced_pipeline.difference(
        ranks.run(l10_paced_pipeline.run_schedule, orders, ranks.n, 8), ranks.n, 8
    )
    assert off < 1e-12, f"the gradients differ from one process by {off:.0e}"


def _compare_with_1f1b(orders, p, m, case):
    """By what it costs first, memory and time, and then action by action."""
    times = StageTimes(1, 1, 1)
    line, best = simulate(orders, times), simulate(schedule("1f1b", p, m), times)
    for rank in range(p):
        kept, needed = line.peak_microbatches(rank), peak_microbatches("1f1b", p, m, rank=rank)
        assert kept <= needed, case + (
            f"rank {rank} keeps {kept} micro-batches at once, {needed} are enough: "
            "after the first forwards each forward is followed by a backward"
        )
    assert line.total_s <= best.total_s, case + (
        f"it is complete, but takes {line.total_s:.0f} units where 1F1B takes {best.total_s:.0f}: "
        "how many forwards come before the first backward, on the first rank and on the last?"
    )
    for rank, expected in schedule("1f1b", p, m).items():
        for place, (found, wanted) in enumerate(zip(orders[rank], expected)):
            assert found == wanted, (
                case + f"rank {rank}, place {place}: {found}, 1F1B has {wanted.kind} here"
            )


# ---- 10.3


def halves(input_half, weight_half) -> None:
    """The learner's `input_half(grad, weight)` and `weight_half(grad, x)` against autograd."""
    generator = torch.Generator().manual_seed(2)
    x, weight, grad = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((2, 5, 7), (3, 7), (2, 5, 3))
    )
    x.requires_grad_()
    weight.requires_grad_()
    torch.nn.functional.linear(x, weight).backward(grad)
    for name, found, expected in (
        ("input_half", due(input_half(grad.clone(), weight.detach())), x.grad),
        ("weight_half", due(weight_half(grad.clone(), x.detach())), weight.grad),
    ):
        shape = list(found.shape)
        assert found.ndim != 2 or shape != list(expected.shape)[::-1], (
            f"{name}: {shape} is the transpose; PyTorch keeps a weight as [outputs, inputs], here {list(expected.shape)}"
        )
        assert found.ndim == expected.ndim, (
            f"{name}: {shape}, expected {list(expected.shape)}: the weight's gradient is a sum over samples and tokens"
        )
        assert shape == list(expected.shape), f"{name}: {shape}, expected {list(expected.shape)}"
        off = ((found - expected).norm() / expected.norm()).item()
        assert off < 1e-12, f"{name}: the shape is right, the values are {off:.0%} off"


# ---- 10.4

LAYERS, RANKS, MICROBATCHES = 14, 4, 16
HEAD = 2  # what the head costs, in layers


def step_units(layers) -> float:
    """How long a step of 1F1B takes with these layers on each rank, in forwards of one layer; the last one has the head."""
    work = [number + HEAD * (rank == RANKS - 1) for rank, number in enumerate(layers)]
    times = [StageTimes(units, units, units) for units in work]
    return simulate(schedule("1f1b", RANKS, MICROBATCHES), times).total_s


def layers(layers) -> None:
    """The learner's number of layers of each stage, beside the best of all ways to deal them out."""
    layers = tuple(due(layers))
    assert len(layers) == RANKS and sum(layers) == LAYERS and min(layers) >= 1, (
        f"{layers}: give {RANKS} numbers, each at least 1, that add up to {LAYERS} layers"
    )
    found = step_units(layers)
    cuts = itertools.combinations(range(1, LAYERS), RANKS - 1)
    dealt = [
        [stop - start for start, stop in itertools.pairwise((0, *cut, LAYERS))] for cut in cuts
    ]
    slowest = lambda sizes: max(*sizes[:-1], sizes[-1] + HEAD)  # noqa: E731
    lightest = min(map(slowest, dealt))
    best = min(step_units(sizes) for sizes in dealt if slowest(sizes) <= lightest + 1)
    assert found <= best, (
        f"{layers}: a step takes {found:.0f} units, {best:.0f} are possible: the slowest stage sets the pace, "
        f"and here it has {slowest(layers)} units of work per micro-batch"
    )
