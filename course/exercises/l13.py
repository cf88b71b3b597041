"""Checks of lesson 13, sharded data parallelism."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._prims_common import compute_required_storage_length
from torch.nn import functional as F

from course.answer import Exercise, Hint, due
from course.exercises import l13_fsdp, l13_script
from course.exercises.expect import (
    TOLERANCE,
    careless,
    confirm_in_group,
    diagnose,
    distance,
    in_groups,
    own_answers,
    refuse,
    tensor,
    times,
)
from course.exercises.in_notebook import bounded, without
from course.exercises.memory import Made, tensors_in
from course.exercises.simulated import Event, Outcome, here
from course.labs.l13_layouts import CASES, Layout, Situation, best, candidates, cost_of
from course.pool.ranks import Ranks
from labcode.parallel.zero.cut import Cut, piece_of, rows_of
from labcode.parallel.zero.gradients import ShardedBucket
from labcode.parallel.zero.optimizer import ShardedOptimizer, gather_weights
from labcode.parallel.zero.parameters import Unit

SHAPES = ((7, 3), (5,), (2, 4), (8, 2))  # of the weights that are updated and averaged
NUM_STEPS = 3
OURS = own_answers(
    ShardedOptimizer.__init__,
    ShardedOptimizer.step,
    gather_weights,
    Cut.pack,
    Cut.pack_all,
    Cut.unpack_all,
    ShardedBucket.send,
    Unit.gather,
    Unit.reduce,
)


def _random(seed: int, *shape: int) -> Tensor:
    """Numbers in float64, which ranks and judge draw alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _weights() -> list[nn.Parameter]:
    return [nn.Parameter(_random(10 + place, *shape)) for place, shape in enumerate(SHAPES)]


def _calls(events: Iterable[Event], block: str = "") -> list[Event]:
    """Messages and collectives; no barriers, and nothing that the check has noted."""
    return [one for one in events if one.group and one.kind != "barrier" and one.block == block]


def _named(calls: Iterable[Event]) -> str:
    return ", ".join(one.kind for one in calls) or "none"


# ---- 13.1


def _own_rows(group: dist.ProcessGroup, answer: Callable[..., Any]) -> list[Tensor]:
    """The rows that the learner's function gives of some weights."""
    p = group.size()
    results = []
    for rows in (8, 12, 7, 9, 5, 2):
        case = f"{rows} rows on {p} ranks: "
        weight = _random(rows, rows, 3)
        before = weight.clone()
        each = math.ceil(rows / p)
        own = before[group.rank() * each :][:each]
        try:
            found = answer(weight, group)
        except IndexError as error:
            raise Hint(f"{case}{error}: is there a part for each rank, if of 0 rows?") from None
        no_view = "it returned None: a rank that gets no rows has a view of 0 rows"
        refuse({no_view: found is None and len(own) == 0}, case)
        found = due(found)
        tensor(found)
        mistakes = {
            "the weight itself has changed: only look at it": not torch.equal(weight, before),
            "it returned all rows": found.shape == before.shape and len(own) < rows,
            f"it returned {list(found.shape)}: rows are whole, with 3 columns here": (
                found.dim() != 2 or found.shape[1] != 3
            ),
        }
        refuse(mistakes, case)
        is_copy = found.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()
        mistakes = {
            f"it returned {len(found)} of them, expected is {len(own)}: how many does each rank "
            "get before none are left?": len(found) != len(own),
            "as many as they should be, but those of another rank: where do yours begin?": (
                not torch.equal(found, own)
            ),
            "the right rows, but a copy of them: a change in it changes no weight": (
                is_copy and len(own) > 0
            ),
        }
        refuse(mistakes, case)
        results.append(found)
    return results


def own_rows(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `own_rows(weight, group)`."""
    outcome = in_groups(_own_rows, answer, ours=own_answers(rows_of, piece_of))
    return confirm_in_group(ranks, outcome, _own_rows, answer)


# ---- 13.2

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
}
UNUSED = (1, 3)  # in this step this weight has no gradient; all ranks have rows of it


def _give_gradients(params: Sequence[nn.Parameter], step: int) -> None:
    """Give gradients as backward does: what stands in `.grad` is added to."""
    for place, param in enumerate(params):
        grad = _random(50 + 10 * step + place, *param.shape)
        if (step, place) == UNUSED:
            continue  # what `zero_grad` has left there stays
        if param.grad is None:
            param.grad = grad
        else:
            param.grad = param.grad + grad


def _train(group: dist.ProcessGroup, answer: Callable[..., Any], name: str) -> list[list[Tensor]]:
    """All weights after each step with the learner's optimizer."""
    params = _weights()
    made: list[torch.optim.Optimizer] = []

    def make(tensors: Iterable[Tensor]) -> torch.optim.Optimizer:
        made.append(OPTIMIZERS[name](tensors))
        return made[-1]

    # a generator, as model.parameters() gives one
    optimizer = answer((param for param in params), make, group)
    found = []
    for number in range(NUM_STEPS):
        before = [param.detach().clone() for param in params]
        _give_gradients(params, number)
        here().note("step")
        with _none_in_words(f"{name}, step {number + 1}: "):
            optimizer.step()
        rows = []
        for inner in made:
            for part in inner.param_groups:
                rows += part["params"]
        _check_own_rows(group, len(made), rows)
        is_still = all(torch.equal(one, old) for one, old in zip(params, before))
        has_generator = any(isinstance(one, GeneratorType) for one in vars(optimizer).values())
        found.append([param.detach().clone() for param in params])
        has_gradients = any(row.grad is not None for row in rows)
        optimizer.zero_grad()
        left = [param.grad for param in params if param.grad is not None]
        mistakes = {
            "nothing changes: `params` may be a generator, as model.parameters() gives one, and "
            "who goes through it a second time finds nothing": is_still and has_generator,
            "nothing changes: the tensors that `make` got have no `.grad` when they step": (
                is_still and not has_gradients
            ),
            "after zero_grad() a weight still has its gradient": any(grad.any() for grad in left),
            "after zero_grad() the gradients are zeros, and not None: a weight that is not used in "
            "the next step then moves all the same, by weight decay and by momentum": bool(left),
        }
        refuse(mistakes, f"{name}, step {number + 1}: ")
    return found


@contextlib.contextmanager
def _none_in_words(case: str) -> Iterator[None]:
    """An error over the gradient that is None, in words."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        name = type(error).__name__
        text = f"{name}: {error}. Is it a weight whose `grad` is None?"
        refuse({text: "NoneType" in str(error)}, case)
        raise


def _check_own_rows(group: dist.ProcessGroup, num_made: int, rows: Sequence[Tensor]) -> None:
    """One optimizer was made, and it was given this rank's rows."""
    given = sum(row.numel() for row in rows)
    whole = sum(param.numel() for param in _weights())
    own = sum(piece_of(param, group.rank(), group.size()).numel() for param in _weights())
    mistakes = {
        "`make` was never called: who updates the rows?": num_made == 0,
        f"`make` was called {num_made} times: one optimizer takes a list of tensors": num_made > 1,
        "`make` was given whole weights: the rank keeps state for the rows of all others": (
            given == whole
        ),
        f"`make` was given {given} numbers, and this rank's rows have {own}": given != own,
    }
    refuse(mistakes)


def sharded_optimizer(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's class: three steps beside the same optimizer on whole weights."""
    for name in OPTIMIZERS:
        judge = functools.partial(_check_trains_like_one, name)
        outcome = in_groups(_train, answer, name, judge=judge, ours=OURS)
    return confirm_in_group(ranks, outcome, _train, answer, name)


def _check_trains_like_one(
    name: str, results: list[list[list[Tensor]]], outcome: Outcome, members: Sequence[int]
) -> None:
    """All weights are those of one process after each step, and nothing was added up for it."""
    weights = _weights()
    optimizer = OPTIMIZERS[name](weights)
    for number in range(NUM_STEPS):
        olds = [weight.detach().clone() for weight in weights]
        _give_gradients(weights, number)
        optimizer.step()
        optimizer.zero_grad()
        cases = [f"on rank {rank}: {name}, step {number + 1}: " for rank in members]
        for case, rank in zip(cases, members):
            refuse(careless(outcome.parts(rank, "step")[number]), case)
        for place, (old, weight) in enumerate(zip(olds, weights)):
            founds = [of_rank[number][place] for of_rank in results]
            _check_updated(cases, founds, old, weight.detach())
    for rank in members:
        kinds = {one.kind for one in _calls(outcome.of(rank))}
        adding = ", ".join(sorted(kinds - {"broadcast", "all_gather", "send", "recv"}))
        text = f"the weights are right, but it calls {adding}: what is there to add up?"
        refuse({text: adding}, f"on rank {rank}: {name}, ")


def _check_updated(
    cases: Sequence[str], founds: Sequence[Tensor], old: Tensor, new: Tensor
) -> None:
    """A weight is right on all ranks: each rank's own rows first, then those of the others.

    Args:
        cases: What a hint begins with, for each rank.
        founds: The weight on each rank.
        old: The weight in one process, before the step.
        new: The same after it.
    """
    p = len(founds)
    name = f"the weight {list(new.shape)} "
    for me, (case, found) in enumerate(zip(cases, founds)):
        is_unused = torch.equal(new, old)
        changed = (
            f"{name}has changed, and it had no gradient in this step (`grad` is None): what stands "
            "in the `.grad` of its rows?"
        )
        refuse({changed: is_unused and not torch.equal(found, old)}, case)
        move = piece_of(found - old, me, p)
        right_move = piece_of(new - old, me, p)
        mistakes = {
            "this rank's own rows are the old ones after the step: does what `make` got share the "
            "memory of the weight, and does nobody write over it afterwards?": not move.any(),
            "this rank's own rows move {times:.3g} times as far as they should: the gradients are "
            "averages already, and each step has its own": times(right_move),
        }
        otherwise = (
            "this rank's own rows are wrong: which rows of the gradient go with them, and are they "
            "those of this step?"
        )
        diagnose(f"{case}of {name}", move, right_move, mistakes, otherwise)
    for me, (case, found) in enumerate(zip(cases, founds)):
        for owner in range(p):
            case_of_owner = f"{case}of {name}the rows of rank {owner} of the group are "
            old_ones = f"the old ones on rank {me}: how do they get there?"
            otherwise = (
                f"wrong on rank {me}: who sends them, and is that the rank that has updated them?"
            )
            rows, right, before = (piece_of(one, owner, p) for one in (found, new, old))
            diagnose(case_of_owner, rows, right, {old_ones: before}, otherwise)


# ---- 13.3

Averaged = tuple[list[Tensor | None], bool]


def _gradients(call: int, rank: int) -> list[Tensor]:
    """Gradients of all weights, on one rank of the group."""
    first = 200 + 100 * call + 10 * rank
    return [_random(first + place, *shape) for place, shape in enumerate(SHAPES)]


def _average_twice(group: dist.ProcessGroup, answer: Callable[..., Any]) -> list[Averaged]:
    """After each call: `.grad` of this rank's rows, and whether a whole gradient is left."""
    params = _weights()
    rows = []
    for param in params:
        rows.append(nn.Parameter(piece_of(param.detach(), group.rank(), group.size())))
    found = []
    for call in range(2):
        for param, grad in zip(params, _gradients(call, group.rank())):
            param.grad = grad
        here().note("call")
        answer(params, rows, group)
        is_same = all(torch.equal(param, old) for param, old in zip(params, _weights()))
        refuse({"weights have changed: it is about gradients only": not is_same})
        means = [None if row.grad is None else row.grad.clone() for row in rows]
        found.append((means, any(param.grad is not None for param in params)))
    return found


def average_own_rows(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `average_own_rows(params, rows, group)`, called twice."""
    outcome = in_groups(_average_twice, answer, judge=_check_average, ours=OURS)
    return confirm_in_group(ranks, outcome, _average_twice, answer)


def _check_average(results: list[list[Averaged]], outcome: Outcome, members: Sequence[int]) -> None:
    """In each call one reduce-scatter, the mean of the own rows, and no whole gradient is left."""
    p = len(members)
    for call, again in enumerate(("", "in a second call: ")):
        cases = [f"on rank {rank}: {again}" for rank in members]
        for case, rank in zip(cases, members):
            _check_one_message(case, _calls(outcome.parts(rank, "call")[call]))
        for place in range(len(SHAPES)):
            grads = torch.stack([_gradients(call, number)[place] for number in range(p)])
            for me, case in enumerate(cases):
                olds, _ = results[me][0]
                means, _ = results[me][call]
                _check_own_mean(case, me, means[place], grads, olds[place])
        for case, of_rank in zip(cases, results):
            _, is_left = of_rank[call]
            refuse({"`params[i].grad` still holds a whole gradient": is_left}, case)


def _check_one_message(case: str, calls: Sequence[Event]) -> None:
    others = [one for one in calls if one.kind != "reduce_scatter"]
    mistakes = {
        "no collective was called: did anything travel?": not calls,
        f"it calls {_named(others[:1])}: which collective gives each rank the sum of its own part "
        "only?": others,
        f"{len(calls)} reduce-scatters for {len(SHAPES)} weights: one message is enough": (
            len(calls) > 1
        ),
    }
    refuse({**mistakes, **careless(calls)}, case)


def _check_own_mean(case: str, me: int, found: Tensor | None, grads: Tensor, old: Any) -> None:
    """`.grad` of this rank's rows of one weight is the mean of what all ranks have.

    Args:
        case: What a hint begins with.
        me: This rank's number in the group.
        found: What stands in `.grad`.
        grads: The whole gradient on each rank.
        old: What stood in `.grad` after the first call.
    """
    p = len(grads)
    mean = piece_of(grads.mean(0), me, p)
    own = piece_of(grads[me], me, p)
    if len(mean) == 0:
        return
    case += f"of the weight {list(grads[0].shape)} "
    if found is None:
        raise Hint(f"{case}the rows of this rank have no `.grad`: is it set?")
    away = (found.flatten()[:, None] - grads.mean(0).flatten()).abs()  # from each right number
    mistakes = {
        "`.grad` of the rows is that of this rank alone: where is the sum?": (
            min(distance(found, own), distance(found, own / p)) < TOLERANCE
        ),
        "`.grad` of the rows is {times:.3g} times as large as the mean over the group: by what do "
        "you divide?": times(mean),
        "the new mean was added to the old one: it takes its place": mean + old,
        "`.grad` has right numbers in wrong places: which rows go to which rank?": (
            away.amin(1).max() < TOLERANCE
        ),
    }
    otherwise = (
        "`.grad` of the rows has wrong numbers: where in the message does the part of each weight "
        "begin, on the rank that sends and on the one that receives?"
    )
    diagnose(case, found, mean, mistakes, otherwise)


# ---- 13.4

WEIGHTS = ((7, 6), (8, 6), (5, 6))  # no multiple of the ranks, one of 4 ranks, none for the last
INPUT = (1, 2, 6)  # inputs and outputs are smaller than any of the weights
FORWARDS = {"under torch.no_grad(): ": False, "with gradients: ": True}
EMPTY = (
    "the weight was read or written while its storage had no memory: that has to have its size "
    "again before, in backward too. (Has the weight another storage now? Autograd has the first. "
    "Outside of this check the process may die of it.)"
)
SEEN = (
    "autograd has seen that you wrote into the weight, and refuses it in backward: which way of "
    "writing does the text above name?"
)


class _Careful(Made):
    """Stops before memory is read or written that is not there: the process could die of it."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func._schema.name
        is_about_shapes = func.is_view or name.startswith("aten::new_") or name.endswith("_like")
        for one in [] if is_about_shapes else tensors_in((args, kwargs)):
            _check_memory(one)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _check_memory(value: Tensor) -> None:
    """The memory of a tensor reaches to its last number."""
    has = value.untyped_storage().nbytes()
    numbers = compute_required_storage_length(
        value.shape, value.stride(), int(value.storage_offset())
    )
    needs = numbers * value.element_size()
    too_small = (
        f"the memory of a tensor has {has} bytes, and its {numbers} numbers need {needs}: in what "
        "does the storage count? (Outside of this check the process may die of it.)"
    )
    refuse({EMPTY: has == 0 < needs, too_small: has < needs})


@contextlib.contextmanager
def _watched() -> Iterator[_Careful]:
    """What the learner's layer makes; and what goes wrong with its memory, in words."""
    try:
        with _Careful() as made:
            yield made
    except (RuntimeError, ValueError) as error:
        text = str(error)
        is_empty = "storage of size 0" in text or "a tensor has no memory" in text
        refuse({EMPTY: is_empty, SEEN: "modified by an inplace operation" in text})
        raise


def _bytes(layer: Any) -> int:
    """Bytes of the memory behind the whole weight now."""
    return layer.weight.untyped_storage().nbytes()


def _note_held(made: Made, layer: Any, *others: Tensor | None) -> None:
    """Note how many bytes have been made and are alive, besides the layer's tensors and others."""
    known = [one for one in (layer.weight, layer.rows, *others) if one is not None]
    here().note("held", sum(made.alive(*known)))


def _holds_weight(events: Iterable[Event], num_bytes: int, when: str) -> dict[str, bool]:
    """A row of a table: what is still alive is as much as the whole weight."""
    held = max(one.value for one in events if one.kind == "held")
    text = (
        f"{when} tensors of {held} bytes are alive besides the layer's own, and the whole weight "
        f"has {num_bytes}: a copy of it, or its parts. Who holds them? (An attribute does, and "
        "autograd holds what an operation needs in backward.)"
    )
    return {text: held >= num_bytes}


def borrowing_linear(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's layer: its methods one by one, and then two layers in training."""
    for shape in WEIGHTS:
        judge = functools.partial(_check_gathered, shape)
        in_groups(_gather, answer, shape, judge=judge, ours=OURS)
    with _so_far("gather and reshard are right, forward is next"):
        for case in FORWARDS:
            judge = functools.partial(_check_product, case)
            in_groups(_forward, answer, case, judge=judge, ours=OURS)
    with _so_far("gather, reshard and forward are right, backward is next"):
        for shape in WEIGHTS:
            judge = functools.partial(_check_gradients, shape)
            in_groups(_two_micro_batches, answer, shape, judge=judge, ours=OURS)
    outcome = in_groups(_train_two_layers, answer, judge=_train_like_one, ours=OURS)
    return confirm_in_group(ranks, outcome, _train_two_layers, answer)


@contextlib.contextmanager
def _so_far(text: str) -> Iterator[None]:
    """What is right already, where a method is still to be written."""
    try:
        yield
    except Exception as error:
        error.add_note(text)
        raise


def _gather(group: dist.ProcessGroup, answer: Callable[..., Any], shape: Sequence[int]) -> Tensor:
    """The weight after `gather`; the rows have changed since the layer was made."""
    weight = _random(400, *shape)
    before = weight.clone()
    case = f"a weight {list(shape)} on {group.size()} ranks: "
    with _watched():
        layer = answer(weight, group)
    mistakes = {
        "right after __init__ the weight has memory: reshard() gives it back": _bytes(layer),
        "the tensor that the layer was made of has changed": not torch.equal(weight, before),
    }
    refuse(mistakes, case)
    with torch.no_grad():
        layer.rows.mul_(2)  # as an optimizer would change them
    with _watched() as made:
        layer.gather()
    has = _bytes(layer)
    found_shape = layer.weight.shape
    mistakes = {
        "after gather() the weight has no memory": has == 0,
        f"after gather() the weight is {list(found_shape)} in {has} bytes of memory, and it should "
        f"be {list(shape)} in {weight.nbytes}, in the storage that it had": (
            (found_shape, has) != (shape, weight.nbytes)
        ),
    }
    refuse(mistakes, case)
    found = layer.weight.detach().clone()
    with _watched():
        layer.reshard()
    refuse({"after reshard() the weight still has its memory": _bytes(layer)}, case)
    _note_held(made, layer)
    return found


def _check_gathered(
    shape: Sequence[int], results: list[Tensor], outcome: Outcome, members: Sequence[int]
) -> None:
    weight = _random(400, *shape)
    for rank, found in zip(members, results):
        case = f"on rank {rank}: a weight {list(shape)} on {len(members)} ranks: "
        calls = _calls(outcome.of(rank))
        mistakes = careless(calls)
        mistakes[f"gather() makes the calls {_named(calls)}: one all_gather"] = (
            _named(calls) != "all_gather"
        )
        refuse(mistakes, case)
        of_the_beginning = (
            "after gather() the weight is that of the beginning, and the rows of all ranks have "
            "changed since: from where does it get its values?"
        )
        otherwise = "after gather() the weight has wrong values: whose rows stand where?"
        diagnose(case, found, 2 * weight, {of_the_beginning: weight}, otherwise)
        when = "after gather() and reshard()"
        refuse(_holds_weight(outcome.of(rank), weight.nbytes, when), case)


def _forward(group: dist.ProcessGroup, answer: Callable[..., Any], case: str) -> Tensor:
    """What the layer gives for this rank's input."""
    weight = _random(410, 7, 6)
    x = _random(420 + group.rank(), *INPUT)
    x.requires_grad_()  # so that autograd saves the weight
    with _watched():
        layer = answer(weight, group)
    with torch.set_grad_enabled(FORWARDS[case]), _watched() as made:
        y = layer(x)
    tensor(y, (1, 2, 7), f"{case}forward gives")
    refuse({"after forward the weight still has its memory": _bytes(layer)}, case)
    _note_held(made, layer, x, y)
    return y.detach()


def _check_product(
    forward: str, results: list[Tensor], outcome: Outcome, members: Sequence[int]
) -> None:
    weight = _random(410, 7, 6)
    for me, (rank, y) in enumerate(zip(members, results)):
        case = f"on rank {rank}: {forward}"
        calls = _calls(outcome.of(rank))
        refuse(careless(calls), case)
        right = F.linear(_random(420 + me, *INPUT), weight)
        diagnose(case, y, right, {}, "forward gives wrong values: it is x W^T")
        named = _named(calls)
        mistakes = {f"forward makes the calls {named}: one all_gather": named != "all_gather"}
        held = _holds_weight(outcome.of(rank), weight.nbytes, "after forward")
        refuse({**mistakes, **held}, case)


def _input(micro_batch: int, rank: int) -> Tensor:
    return _random(500 + 20 * micro_batch + rank, *INPUT).requires_grad_()


def _two_micro_batches(
    group: dist.ProcessGroup, answer: Callable[..., Any], shape: Sequence[int]
) -> list[tuple[Tensor, Tensor | None]]:
    """After backward of each: the gradient of the input, and what stands in `rows.grad`."""
    case = f"a weight {list(shape)} on {group.size()} ranks: "
    weight = _random(430, *shape)
    with _watched():
        layer = answer(weight, group)
    found = []
    for micro_batch in range(2):
        x = _input(micro_batch, group.rank())
        with _watched():
            y = layer(x)
        with _watched() as made, here().block(f"backward {micro_batch}"):
            y.square().sum().backward()
        del y
        grad = layer.rows.grad
        mistakes = {
            "x has no gradient after backward": x.grad is None,
            "after backward `weight.grad` still holds the whole gradient": (
                layer.weight.grad is not None
            ),
            "after backward the weight still has its memory": _bytes(layer),
        }
        refuse(mistakes, case)
        _note_held(made, layer, x, x.grad, grad)
        found.append((x.grad, None if grad is None else grad.clone()))
    return found


def _check_gradients(
    shape: Sequence[int], results: list[Any], outcome: Outcome, members: Sequence[int]
) -> None:
    """Backward makes its two calls, and adds the mean over the group to the own rows."""
    p = len(members)
    weight = _random(430, *shape)
    total = torch.zeros_like(weight)  # of the means of the micro-batches before
    for micro_batch in range(2):
        xs = [_input(micro_batch, me) for me in range(p)]
        whole = weight.clone().requires_grad_()
        loss = F.linear(torch.stack(xs), whole).square().sum()
        *of_xs, of_weight = torch.autograd.grad(loss, [*xs, whole])
        mean = of_weight / p
        for me, rank in enumerate(members):
            case = f"on rank {rank}: a weight {list(shape)} on {p} ranks: "
            of_input, of_rows = results[me][micro_batch]
            calls = _calls(outcome.of(rank), f"backward {micro_batch}")
            kinds = sorted(one.kind for one in calls)
            makes = f"backward makes the calls {_named(calls)}: "
            mistakes = {
                "the gradient of x is wrong: which values did the weight have in backward?": (
                    distance(of_input, of_xs[me]) > TOLERANCE
                ),
                f"{makes}who sums the gradient of the weight?": "reduce_scatter" not in kinds,
                **careless(calls),
                f"{makes}one all_gather and one reduce_scatter": (
                    kinds != ["all_gather", "reduce_scatter"]
                ),
                **_holds_weight(outcome.of(rank), weight.nbytes, "after backward"),
            }
            refuse(mistakes, case)
            _check_rows_mean(case, of_rows, piece_of(total, me, p), piece_of(mean, me, p))
        total += mean


def _check_rows_mean(case: str, found: Tensor | None, before: Tensor, mean: Tensor) -> None:
    """The mean was added to what stood in `rows.grad` before."""
    if len(mean) == 0:
        return
    if found is None:
        raise Hint(f"{case}after backward `rows.grad` is None")
    mistakes = {
        "a second backward has replaced `rows.grad`: backward adds to what stands there": (
            mean - before
        ),
        "`rows.grad` is {times:.3g} times as large as the mean over the group: by what do you "
        "divide?": times(mean),
    }
    otherwise = "`rows.grad` is wrong: which rows of the gradient go to which rank?"
    diagnose(case, found - before, mean, mistakes, otherwise)


def _two_weights() -> list[Tensor]:
    return [_random(600, 5, 6), _random(601, 6, 5)]


def _batch(step: int, rank: int) -> Tensor:
    return _random(610 + 10 * step + rank, 4, 6)


def _train_two_layers(group: dist.ProcessGroup, answer: Callable[..., Any]) -> list[list[Tensor]]:
    """The rows of both layers after each step."""
    with _watched():
        layers = [answer(weight, group) for weight in _two_weights()]
    optimizer = torch.optim.SGD([layer.rows for layer in layers], lr=0.05)
    found = []
    for step in range(NUM_STEPS):
        with _watched():
            hidden = torch.tanh(layers[0](_batch(step, group.rank())))
            layers[1](hidden).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([layer.rows.detach().clone() for layer in layers])
    return found


def _train_like_one(
    results: list[list[list[Tensor]]], outcome: Outcome, members: Sequence[int]
) -> None:
    """The rows are those of one process with the batches of all ranks."""
    p = len(members)
    weights = [nn.Parameter(weight) for weight in _two_weights()]
    optimizer = torch.optim.SGD(weights, lr=0.05)
    for step in range(NUM_STEPS):
        batch = torch.cat([_batch(step, rank) for rank in range(p)])
        hidden = torch.tanh(F.linear(batch, weights[0]))
        F.linear(hidden, weights[1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for me, rank in enumerate(members):
            for number, weight in enumerate(weights):
                otherwise = (
                    f"two layers in training: after step {step + 1} the rows of layer {number + 1} "
                    "are not those of one process"
                )
                right = piece_of(weight.detach(), me, p)
                diagnose(f"on rank {rank}: ", results[me][step][number], right, {}, otherwise)


# ---- 13.7


def choose(answer: Callable[..., Any]) -> None:
    """The learner's choice of a layout, in several situations.

    Args:
        answer: `answer(situation)`: a `Layout`, with its costs.
    """
    for situation in CASES:
        with without(best, cost_of):
            found = due(bounded("does your loop end?", answer, situation))
        _check_best(found, situation)


def _check_best(found: Any, situation: Situation) -> None:
    case = f"{situation.about}: "
    is_layout = isinstance(found, tuple) and len(found) == len(Layout._fields)
    refuse({f"it returned {str(found)[:40]}: return Layout(...)": not is_layout}, case)
    found = Layout(*found)
    chosen = f"stage {found.stage} over {found.ranks_of_a_copy} ranks "
    known = candidates(situation)
    is_known = (found.stage, found.ranks_of_a_copy) in known
    refuse({f"{chosen}is none of the candidates": not is_known}, case)
    true = cost_of(situation, found.stage, found.ranks_of_a_copy)
    fastest = best(situation)
    mistakes = {
        f"keeps {true.kept_bytes / 1e9:.4g} GB, and kept_bytes says "
        f"{found.kept_bytes / 1e9:.4g}: look at what it keeps of the model, and at the layers that "
        "are whole": not math.isclose(found.kept_bytes, true.kept_bytes, rel_tol=1e-6),
        f"sends for {true.sending_s:.4g} s, and sending_s says {found.sending_s:.4g}: look at what "
        "travels inside a copy, over which link, and at what travels between copies": (
            not math.isclose(found.sending_s, true.sending_s, rel_tol=1e-6)
        ),
        f"keeps {true.kept_bytes / 1e9:.4g} GB, and there is room for "
        f"{situation.room_bytes / 1e9:.4g}": true.kept_bytes > situation.room_bytes,
        f"sends for {true.sending_s:.3g} s, and something else that fits for "
        f"{fastest.sending_s:.3g} s": true.sending_s > fastest.sending_s * (1 + 1e-9),
    }
    refuse(mistakes, case + chosen)


EXERCISES = {
    "13.1": Exercise(
        check=own_rows,
        praise="views, with any number of rows, and by the rank's number in its group",
        hints=(
            "R rows on p ranks: how many does the first rank get when R is no multiple of p?",
            "-(-R // p) is R / p, rounded up. At which row does rank i begin?",
        ),
    ),
    "13.2": Exercise(
        check=sharded_optimizer,
        praise="each rank keeps 1/p of the state, and the weights are those of one process",
        hints=(
            "Which tensors does `make` need, so that it makes state for your rows only?",
            "The whole gradient is in `param.grad`. What is the `.grad` of your rows?",
            "After the inner step rank i has new values in its rows. Who broadcasts which rows?",
        ),
    ),
    "13.3": Exercise(
        check=average_own_rows,
        praise="one reduce-scatter, the mean of your own rows, and no whole gradient is left",
        hints=(
            "Write down the message of 2 ranks for a weight of 3 rows and one of 4: which rows go "
            "to rank 0, which to rank 1, and how long is the longer part?",
            "The first rank of a group never has fewer rows than another one.",
            "What you receive is laid out as what you have sent to yourself.",
        ),
    ),
    "13.4": Exercise(
        check=borrowing_linear,
        praise="whole only while it is used, and the gradients are those of one process",
        hints=(
            "`gather`: memory first, then the message, then the values. All ranks send parts of "
            "one size.",
            "`forward`: when does the layer have its weight, and until when does it need it? The "
            "hook makes it whole again in backward.",
            "`gradient_ready`: pad the gradient to p equal parts, as you did in exercise 13.3.",
        ),
    ),
    "13.5": Exercise(
        check=l13_fsdp.units,
        praise="a layer is gathered in forward and again in backward, norm and head once",
        hints=(
            "A unit takes the parameters of its module that no unit inside it has. What is left "
            "for the last call?",
            "Which unit does backward need first, and when did forward use it?",
        ),
    ),
    "13.6": Exercise(
        check=l13_script.script,
        praise="two ranks train like one, one rank goes on from their checkpoint, and in bfloat16 "
        "the weights stay in float32",
        hints=(
            "In which order: blocks, model, optimizer, checkpoint?",
            "To read a checkpoint you need tensors to read into. Which call gives you those of the "
            "model and of the optimizer?",
            "`saved` is what you save and what you read: a dict of three entries. Where does its "
            "`step` come from after dcp.load?",
        ),
    ),
    "13.7": Exercise(
        check=choose,
        praise="it fits, nothing that fits sends in less time, and the costs are right",
        hints=(
            "Make a list of all candidates first, each with its costs; then throw out what does "
            "not fit, and take the fastest.",
            "With one node there is nothing between nodes, and one copy over all ranks is one copy "
            "over the node.",
        ),
    ),
}
