'''The exercises on instruments of lesson 07. The text of each assertion is a hint.

What the learner is given:

    def ranks_that_differ(value, group):
        """Numbers in the group of the ranks whose value is not that of the group's first."""
        ### BEGIN SOLUTION

    class Chart:
        """Notes what a training loop does on this rank, while a `with` block lasts."""

        def __init__(self, model, optimizer, loader=None):
            self.model = model
            self.optimizer = optimizer
            self.inputs = []
            self.weights = []
            self.gradients = []

        def __enter__(self):            # registers the two methods below as hooks
        def __exit__(self, *error):     # removes them
        def note_inputs(self, model, inputs):
        def note_step(self, optimizer, *arguments):

    check("7.1", lambda: l07.differing(ranks_that_differ, ranks))
    check("7.2", lambda: l07.chart(Chart, ranks))
'''

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from labcode.pool.ranks import Ranks
from labcode.teach.check import due
from labcode.teach.exercises.on_ranks import GROUPS, in_groups, without
from labcode.teach.labs import l07_clinic

STEPS = 3
LR = 0.1
# of the loss in each step: who measures with clip_grad_norm_(params, 1.0) is seen in the second
LOSS_SCALES = (1.0, 40.0, 1.0)
COMMON = 1  # the batch that all ranks get
LISTS = ("inputs", "weights", "gradients")

# ---- 7.1


def differing(answer: Any, ranks: Ranks) -> None:
    """The learner's `ranks_that_differ`, over all ranks and over three of them."""
    in_groups(ranks, GROUPS, _differing, answer)


def _differing(group: dist.ProcessGroup, answer: Any) -> None:
    size, own = group.size(), group.rank()
    cases = {
        "all are equal": [2.5] * size,
        "the last one differs": [2.5] * (size - 1) + [2.25],
        "the first one differs from all others": [0.0] + [1.0] * (size - 1),
        "two differ, in the 16th digit": [1.0, 1.0 + 2**-52] + [1.0] * (size - 3) + [1.0 - 2**-53],
    }
    # all calls first: a rank that stops at its first wrong answer would leave the others waiting
    answers = [answer(values[own], group) for values in cases.values()]
    for (case, values), found in zip(cases.items(), answers):
        _judge_differing(case, values, due(found), group)


def _judge_differing(case: str, values: list[float], found: Any, group: dist.ProcessGroup) -> None:
    expected = [rank for rank, value in enumerate(values) if value != values[0]]
    assert isinstance(found, (list, tuple)), (
        f"it returned {found!r}: a list of ranks is wanted, and an empty one if all agree"
    )
    text = f"where {case}, values {values}, it returned {list(found)}, not {expected}"
    if list(found) == [group_rank(rank, group) for rank in expected] != expected:
        raise AssertionError(f"{text}: are these numbers in the world, not in the group?")
    if sorted(found) == sorted(set(range(len(values))) - set(expected)) != expected:
        raise AssertionError(f"{text}: are these the ones that agree?")
    assert list(found) == expected, text


def group_rank(rank: int, group: dist.ProcessGroup) -> int:
    """The rank in the world of the one with this number in the group."""
    return dist.get_global_rank(group, rank)


# ---- 7.2


class _Model(nn.Module):
    """Two layers, and one that is frozen and never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(self.first(x))))


def chart(answer: Any, ranks: Ranks) -> None:
    """The learner's `Chart`, over all ranks and over three of them."""
    assert isinstance(answer, type), "hand in the class `Chart` itself"
    in_groups(ranks, GROUPS, _chart, answer)


def _chart(group: dist.ProcessGroup, answer: Any) -> None:
    with without(l07_clinic.Chart.note_inputs, l07_clinic.Chart.note_step):
        _train_and_look(group, answer)


def _train_and_look(group: dist.ProcessGroup, answer: Any) -> None:
    model = DDP(_Model(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    batches = _batches(group.rank())
    weights, norms = [], []
    used = []
    changes = []  # what the chart changed, in words
    seen = answer(model, optimizer)
    _one_step(model, optimizer, batches[0])
    too_early = {name: len(getattr(seen, name, ())) for name in LISTS}
    with seen as entered:
        for step in range(STEPS):
            optimizer.zero_grad()
            for inputs in batches[2 * step : 2 * step + 2]:
                used.append(inputs.clone())
                outputs = _watched_forward(model, inputs, changes)
                loss = LOSS_SCALES[step] * outputs.square().mean() / 2
                loss.backward()
            weights.append([param.detach().clone() for param in model.parameters()])
            norms.append(_norm(model))
            _watched_step(model, optimizer, changes)
    noted: dict[str, list[Any]] = {name: list(getattr(seen, name, ())) for name in LISTS}
    # what needs the other ranks comes before any assertion: they would wait for this one
    _one_step(model, optimizer, batches[0])
    after = {name: len(getattr(seen, name, ())) for name in LISTS}
    of_common: list[Any] = [None] * group.size()
    dist.all_gather_object(of_common, _number_at(noted["inputs"], COMMON), group=group)
    assert entered is seen, "`with Chart(...) as chart` gives None: return self in __enter__"
    for inputs, before in zip(batches, used):
        assert torch.equal(inputs, before), "the inputs have been changed: a chart only reads"
    for change in changes:
        raise AssertionError(change)
    assert not any(too_early.values()), (
        "it notes something before the block has begun: where are the hooks registered?"
    )
    _check_lengths(noted)
    _check_inputs(noted["inputs"])
    _check_common(of_common)
    _check_gradients(noted["gradients"], norms)
    _check_weights(noted["weights"], weights, answer)
    lengths = {name: len(values) for name, values in noted.items()}
    assert after == lengths, (
        "it still notes something after the block has ended: who removes the hooks?"
    )
    _check_errors(answer)


def _one_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    """Outside of the block: nothing of it may be noted."""
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def _watched_forward(model: DDP, inputs: torch.Tensor, changes: list[str]) -> torch.Tensor:
    """A forward pass within the block, compared with one that nobody watches."""
    with torch.no_grad():
        expected = copy.deepcopy(model.module)(inputs)
    draws = torch.get_rng_state()
    outputs = model(inputs)
    if not torch.equal(draws, torch.get_rng_state()):
        changes.append(
            "note_inputs draws random numbers, or seeds their generator: the training then draws "
            "others, and a chart changes nothing"
        )
    if not torch.equal(outputs.detach(), expected):
        changes.append(
            "with the chart a forward pass gives other outputs: what a pre-hook returns takes the "
            "place of the inputs; what does note_inputs return, or change?"
        )
    if not model.training:
        changes.append("the model is in eval mode when note_inputs is through: a chart only reads")
    return outputs


def _watched_step(model: DDP, optimizer: torch.optim.Optimizer, changes: list[str]) -> None:
    """An optimizer step within the block, compared with what SGD makes of these gradients."""
    expected = []
    for param in model.parameters():
        value = param.detach().clone()
        if param.grad is not None:
            value -= LR * param.grad
        expected.append(value)
    draws = torch.get_rng_state()
    optimizer.step()
    if not torch.equal(draws, torch.get_rng_state()):
        changes.append(
            "note_step draws random numbers, or seeds their generator: the training then draws "
            "others, and a chart changes nothing"
        )
    for param, value in zip(model.parameters(), expected):
        if not torch.allclose(param.detach(), value, rtol=1e-4, atol=1e-6):
            changes.append(
                "with the chart an optimizer step leads to other weights: which call in note_step "
                "writes into gradients or weights, and does not only read them?"
            )
            return


def _number_at(found: list[Any], place: int) -> Any:
    """A plain number of a list that may be too short or hold anything."""
    if place < len(found) and isinstance(found[place], (int, float)):
        return found[place]
    return None


class _OfTheLoopError(Exception):
    """What a training loop raises inside the block."""


def _check_errors(answer: Any) -> None:
    """An error of the training comes out of the block."""
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    try:
        with answer(model, optimizer):
            raise _OfTheLoopError
    except _OfTheLoopError:
        return
    raise AssertionError(
        "an error that the training raised inside the block has vanished: what does __exit__ "
        "return?"
    )


def _batches(rank: int) -> list[torch.Tensor]:
    """Six batches: number 3 is number 0 again, number 4 has its rows in another order.

    Number `COMMON` is the same on all ranks.
    """
    draw = torch.Generator().manual_seed(rank)
    # whole numbers: a sum of them is exact, and the same in any order
    batches = [torch.randint(-9, 10, (4, 6), generator=draw).float() for _ in range(6)]
    common = torch.Generator().manual_seed(99)
    batches[COMMON] = torch.randint(-9, 10, (4, 6), generator=common).float()
    batches[3] = batches[0].clone()
    batches[4] = batches[0].flip(0)
    batches[5] = batches[0].flip(1)
    return batches


def _norm(model: nn.Module) -> float:
    squares = [
        float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None
    ]
    return math.sqrt(sum(squares))


def _check_lengths(noted: dict[str, list[Any]]) -> None:
    for name, expected, per in (
        ("inputs", 2 * STEPS, "forward pass"),
        ("weights", STEPS, "optimizer step"),
        ("gradients", STEPS, "optimizer step"),
    ):
        found = len(noted[name])
        assert found, f"`{name}` is empty after {STEPS} steps: is the hook registered?"
        assert found == expected, (
            f"`{name}` has {found} numbers after {STEPS} steps of two micro-batches each, expected "
            f"{expected}: one for each {per}"
        )
        for value in noted[name]:
            assert isinstance(value, (int, float)) and not isinstance(value, bool), (
                f"`{name}` holds {type(value).__name__}: plain numbers can be sent and compared"
            )


def _check_inputs(found: list[Any]) -> None:
    assert found[3] == found[0], (
        f"the inputs of forward passes 0 and 3 are the same, and the numbers are {found[0]} and "
        f"{found[3]}"
    )
    assert found[1] != found[0], "different inputs got the same number"
    for place, what in ((4, "its samples"), (5, "the features of its samples")):
        assert found[place] != found[0], (
            f"a batch that has {what} in another order got the same number, {found[0]}: an order "
            "that changes must be seen"
        )


def _check_common(of_ranks: list[Any]) -> None:
    """The number of the batch that all ranks were given."""
    assert len(set(of_ranks)) == 1, (
        f"all ranks were given the same inputs and noted {of_ranks}: the number may depend on "
        "nothing but the inputs (Python's hash of a text differs between processes)"
    )


def _check_gradients(found: list[Any], norms: list[float]) -> None:
    for step, (own, expected) in enumerate(zip(found, norms)):
        if math.isclose(own, expected, rel_tol=1e-4):
            continue
        text = f"the norm in step {step} is {own:.6g}, expected {expected:.6g}"
        if math.isclose(own, expected**2, rel_tol=1e-4):
            raise AssertionError(f"{text}: that is its square")
        if own == 0:
            raise AssertionError(f"{text}: were the gradients there when you looked?")
        raise AssertionError(f"{text}: one root over the squares of all gradients")


def _check_weights(found: list[Any], weights: list[list[torch.Tensor]], answer: Any) -> None:
    """The numbers of steps 0, 1, 2 are those of the weights before these steps."""
    for step, values in enumerate(weights):
        again = _noted_weights(answer, values)
        assert math.isclose(found[step], again, rel_tol=1e-6), (
            f"`weights` of step {step} is {found[step]:.9g}, and the weights that the model had "
            f"before that step give {again:.9g}: when did you look?"
        )
    first = weights[0]
    for place in range(len(first)):
        changed = [value.clone() for value in first]
        changed[place].flatten()[0] += 0.01
        assert _noted_weights(answer, changed) != _noted_weights(answer, first), (
            f"one weight of parameter {place} differs by 0.01, and the number is the same"
        )


def _noted_weights(answer: Any, values: list[torch.Tensor]) -> float:
    """What the learner's chart notes of a model that has these weights."""
    model = _Model()
    with torch.no_grad():
        for param, value in zip(model.parameters(), values):
            param.copy_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with answer(model, optimizer) as seen:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    return next(iter(seen.weights))
