"""The checks of the exercises on instruments of lesson 07."""

import builtins
import copy
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from course.answer import RETURNED_NONE, Hint
from course.exercises.expect import (
    Table,
    confirm_in_group,
    diagnose,
    in_groups,
    own_answers,
    plural,
    refuse,
)
from course.exercises.simulated import Outcome
from course.labs import l07_clinic
from course.pool.ranks import Ranks

# ---- 7.1


def differing(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `ranks_that_differ(value, group)`."""
    outcome = in_groups(_ask, answer, judge=_check_all_named)
    return confirm_in_group(ranks, outcome, _ask, answer)


def _values(size: int) -> dict[str, list[float]]:
    """The values of the ranks of a group, by case."""
    return {
        "all are equal": [2.5] * size,
        "the last one differs": [2.5] * (size - 1) + [2.25],
        "the first one differs from all others": [0.0] + [1.0] * (size - 1),
        "two differ, in the 16th digit": [1.0, 1.0 + 2**-52] + [1.0] * (size - 3) + [1.0 - 2**-53],
    }


def _ask(group: dist.ProcessGroup, answer: Callable[..., Any]) -> list[Any]:
    return [answer(values[group.rank()], group) for values in _values(group.size()).values()]


def _check_all_named(results: list[list[Any]], outcome: Outcome, members: Sequence[int]) -> None:
    for place, rank in enumerate(members):
        for (case, values), found in zip(_values(len(members)).items(), results[place]):
            _check_named(f"on rank {rank}: ", case, values, found, members)


def _check_named(
    start: str, case: str, values: list[float], found: Any, members: Sequence[int]
) -> None:
    """One answer is the list of those that differ."""
    mistakes = {
        RETURNED_NONE: found is None,
        f"it returned {found!r}, expected is a list of ranks, empty if all agree": (
            not isinstance(found, (list, tuple))
        ),
    }
    refuse(mistakes, start)
    numbers = range(len(values))
    expected = [number for number in numbers if values[number] != values[0]]
    agreeing = [number for number in numbers if values[number] == values[0]]
    if list(found) == expected:
        return
    in_the_world = [members[number] for number in expected]
    named = [number for number in numbers if number in found]
    text = f"where {case}, values {values}, it returned {list(found)}, expected is {expected}"
    mistakes = {
        f"{text}: are these numbers in the world, not in the group?": list(found) == in_the_world,
        f"{text}: are these the ones that agree?": named == agreeing,
        text: True,
    }
    refuse(mistakes, start)


# ---- 7.2

STEPS = 3
LR = 0.1
# Factor of the loss in each step: who measures with clip_grad_norm_(params, 1.0) is seen in the
# second.
LOSS_SCALES = (1.0, 40.0, 1.0)
COMMON = 1  # the batch that all ranks get
EXPECTED = {
    "inputs": (2 * STEPS, "forward pass"),
    "weights": (STEPS, "optimizer step"),
    "gradients": (STEPS, "optimizer step"),
}
OURS = own_answers(l07_clinic.Chart.note_inputs, l07_clinic.Chart.note_step)


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


def _batches(rank: int) -> list[torch.Tensor]:
    """Six batches: number 3 is number 0 again, number 4 has its rows in another order.

    Number `COMMON` is the same on all ranks.
    """
    draw = torch.Generator().manual_seed(rank)
    # Whole numbers: a sum of them is exact, and the same in any order.
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


def chart(answer: Any, ranks: Ranks | None = None) -> str:
    """The learner's class `Chart`, around a training by DDP."""
    if not isinstance(answer, type):
        raise Hint("hand in the class `Chart` itself")
    with mock.patch.object(builtins, "hash", _hash_of_this_rank):
        outcome = in_groups(_train, answer, ours=OURS)
    return confirm_in_group(ranks, outcome, _train, answer)


_own_hash = builtins.hash
_here = threading.local()  # simulated ranks are threads


def _hash_of_this_rank(value: object) -> int:
    """Python's hash, as it is on ranks that a launcher has started.

    Each process draws a seed for the hashes of texts and bytes. Simulated ranks are one process,
    and those of the pool are forks of one, so that both would agree where a job does not.
    """
    if isinstance(value, (str, bytes)):
        return _own_hash((getattr(_here, "rank", 0), value))
    return _own_hash(value)


def _train(group: dist.ProcessGroup, answer: type) -> list[float]:
    """The norms that a chart has noted; all that it does is judged here, on each rank."""
    _here.rank = group.rank()
    model = DDP(_Model(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    batches = _batches(group.rank())
    used = [inputs.clone() for inputs in batches]
    weights = []
    norms = []
    changes: list[Table] = []  # judged later: an error inside the block would go to __exit__
    seen = answer(model, optimizer)
    _one_step(model, optimizer, used[0])
    too_early = any(_noted(seen).values())
    with seen as entered:
        for step in range(STEPS):
            optimizer.zero_grad()
            for inputs in used[2 * step : 2 * step + 2]:
                outputs, mistakes = _watched_forward(model, inputs)
                changes.append(mistakes)
                loss = LOSS_SCALES[step] * outputs.square().mean() / 2
                loss.backward()
            weights.append([param.detach().clone() for param in model.parameters()])
            norms.append(_norm(model))
            changes.append(_watched_step(model, optimizer))
    noted = _noted(seen)
    _one_step(model, optimizer, batches[0])
    of_common: list[Any] = [None] * group.size()
    dist.all_gather_object(of_common, _number_at(noted["inputs"], COMMON), group=group)
    is_read = all(torch.equal(one, before) for one, before in zip(used, batches))
    mistakes = {
        "`with Chart(...) as chart` gives None: return self in __enter__": entered is not seen,
        "the inputs have been changed: a chart only reads": not is_read,
    }
    for table in [mistakes, *changes]:
        refuse(table)
    early = "it notes something before the block has begun: where are the hooks registered?"
    refuse({early: too_early})
    _check_numbers(noted)
    _check_of_inputs(noted["inputs"], of_common)
    _check_norms(noted["gradients"], norms)
    _check_of_weights(noted["weights"], weights, answer)
    late = "it still notes something after the block has ended: who removes the hooks?"
    refuse({late: _noted(seen) != noted})
    _check_errors_let_out(answer)
    return noted["gradients"]


def _noted(seen: Any) -> dict[str, list[Any]]:
    """A copy of what a chart has noted so far."""
    return {name: list(getattr(seen, name, ())) for name in EXPECTED}


def _one_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    """Outside of the block: nothing of it may be noted."""
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def _watched_forward(model: DDP, inputs: torch.Tensor) -> tuple[torch.Tensor, Table]:
    """A forward pass within the block, and what the chart has changed of it."""
    with torch.no_grad():
        expected = copy.deepcopy(model.module)(inputs)
    draws = torch.get_rng_state()
    outputs = model(inputs)
    mistakes = {
        _draws("note_inputs"): not torch.equal(draws, torch.get_rng_state()),
        "with the chart a forward pass gives other outputs: what a pre-hook returns takes the "
        "place of the inputs; what does note_inputs return, or change?": (
            not torch.equal(outputs.detach(), expected)
        ),
        "the model is in eval mode when note_inputs is through: a chart only reads": (
            not model.training
        ),
    }
    return outputs, mistakes


def _watched_step(model: DDP, optimizer: torch.optim.Optimizer) -> Table:
    """What the chart has changed of an optimizer step, which SGD makes of these gradients."""
    expected = []
    for param in model.parameters():
        value = param.detach().clone()
        if param.grad is not None:
            value -= LR * param.grad
        expected.append(value)
    draws = torch.get_rng_state()
    optimizer.step()
    are_right = [
        torch.allclose(param.detach(), value, rtol=1e-4, atol=1e-6)
        for param, value in zip(model.parameters(), expected)
    ]
    return {
        _draws("note_step"): not torch.equal(draws, torch.get_rng_state()),
        "with the chart an optimizer step leads to other weights: which call in note_step writes "
        "into gradients or weights, and does not only read them?": not all(are_right),
    }


def _draws(method: str) -> str:
    return (
        f"{method} draws random numbers, or seeds their generator: the training then draws others, "
        "and a chart changes nothing"
    )


def _number_at(found: list[Any], place: int) -> Any:
    """A plain number of a list that may be too short or hold anything."""
    if place < len(found) and isinstance(found[place], (int, float)):
        return found[place]
    return None


def _check_numbers(noted: dict[str, list[Any]]) -> None:
    """There must be as many plain numbers as there were forward passes and steps."""
    for name, (expected, per) in EXPECTED.items():
        found = len(noted[name])
        count = (
            f"`{name}` has {plural(found, 'number')} after {STEPS} steps of two micro-batches "
            f"each, expected are {expected}: one for each {per}"
        )
        mistakes = {
            f"`{name}` is empty after {STEPS} steps: is the hook registered, and does it append to "
            "this list?": found == 0,
            count: found != expected,
        }
        refuse(mistakes)
        for value in noted[name]:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            kind = type(value).__name__
            refuse(
                {f"`{name}` holds {kind}: plain numbers can be sent and compared": not is_number}
            )


def _check_of_inputs(found: list[Any], of_common: list[Any]) -> None:
    """Numbers must be the same for the same inputs, and different for others.

    Args:
        found: Numbers found in each forward pass.
        of_common: What the ranks have noted of the batch that is the same on all of them.
    """
    reordered = (
        f"in another order got the same number, {found[0]}: an order that changes must be seen"
    )
    mistakes = {
        f"the inputs of forward passes 0 and 3 are the same, and the numbers are {found[0]} and "
        f"{found[3]}": found[3] != found[0],
        "different inputs got the same number": found[1] == found[0],
        f"a batch that has its samples {reordered}": found[4] == found[0],
        f"a batch that has the features of its samples {reordered}": found[5] == found[0],
        f"all ranks were given the same inputs and noted {of_common}: the number may depend on "
        "nothing but the inputs (Python's hash of a text or of bytes differs between processes)": (
            len(set(of_common)) != 1
        ),
    }
    refuse(mistakes)


def _check_norms(found: list[float], norms: list[float]) -> None:
    for step, (own, expected) in enumerate(zip(found, norms)):
        case = f"the norm in step {step} is {own:.6g}, expected is {expected:.6g}: "
        mistakes = {
            "that is its square": expected**2,
            "were the gradients there when you looked?": own == 0,
        }
        otherwise = "one root over the squares of all gradients"
        diagnose(case, own, expected, mistakes, otherwise, tolerance=1e-4)


def _check_of_weights(found: list[float], weights: list[list[torch.Tensor]], answer: type) -> None:
    """The numbers of steps 0, 1, 2 are those of the weights before these steps."""
    for step, values in enumerate(weights):
        again = _noted_weights(answer, values)
        late = (
            f"`weights` of step {step} is {found[step]:.9g}, and the weights that the model had "
            f"before that step give {again:.9g}: when did you look?"
        )
        refuse({late: not math.isclose(found[step], again, rel_tol=1e-6)})
    first = weights[0]
    of_first = _noted_weights(answer, first)
    for place in range(len(first)):
        changed = [value.clone() for value in first]
        changed[place].flatten()[0] += 0.01
        unseen = f"one weight of parameter {place} differs by 0.01, and the number is the same"
        refuse({unseen: _noted_weights(answer, changed) == of_first})


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


class _LoopError(Exception):
    """What a training loop raises inside the block."""


def _check_errors_let_out(answer: type) -> None:
    """An error of the training comes out of the block."""
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    try:
        with answer(model, optimizer):
            raise _LoopError
    except _LoopError:
        return
    raise Hint(
        "an error that the training raised inside the block has vanished: what does __exit__ "
        "return?"
    )
