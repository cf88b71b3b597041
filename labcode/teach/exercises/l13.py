"""Checks of lesson 13, sharded data parallelism. The text of each assertion is a hint."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from labcode.parallel.zero.cut import Cut, piece_of, rows_of
from labcode.parallel.zero.gradients import ShardedBucket
from labcode.parallel.zero.optimizer import ShardedOptimizer, gather_weights
from labcode.parallel.zero.parameters import Unit
from labcode.pool.ranks import Ranks
from labcode.teach.check import Exercise, due
from labcode.teach.exercises.on_ranks import without
from labcode.teach.exercises.watch import Watch, draw, far, run_trial
from labcode.teach.labs.l13_layouts import CASES, Layout, Situation, best, candidates, cost_of

EXERCISES = {
    "13.1": Exercise(
        praise="views, with any number of rows, and by the rank's number in its group",
        hints=(
            "R rows on p ranks: how many does the first rank get when R is no multiple of p?",
            "-(-R // p) is R / p, rounded up. At which row does rank i begin?",
        ),
    ),
    "13.2": Exercise(
        praise="each rank keeps 1/p of the state, and the weights are those of one process",
        hints=(
            "Which tensors does `make` need, so that it makes state for your rows only?",
            "The whole gradient is in `param.grad`. What is the `.grad` of your rows?",
            "After the inner step rank i has new values in its rows. Who broadcasts which rows?",
        ),
    ),
    "13.3": Exercise(
        praise="one reduce-scatter, the mean of your own rows, and no whole gradient is left",
        hints=(
            "Write down the message of 2 ranks for a weight of 3 rows and one of 4: which rows go "
            "to rank 0, which to rank 1, and how long is the longer part?",
            "The first rank of a group never has fewer rows than another one.",
            "What you receive is laid out as what you have sent to yourself.",
        ),
    ),
    "13.4": Exercise(
        praise="whole only while it is used, and the gradients are those of one process",
        hints=(
            "`gather`: memory first, then the message, then the values. All ranks send parts of "
            "one size.",
            "`forward`: when does the layer have its weight, and until when does it need it?",
            "`gradient_ready`: pad the gradient to p equal parts, as you did in exercise 13.3.",
        ),
    ),
    "13.5": Exercise(
        praise="it fits, nothing that fits sends in less time, and the costs are right",
        hints=(
            "Make a list of all candidates first, each with its costs; then throw out what does "
            "not fit, and take the fastest.",
            "With one node there is nothing between nodes, and one copy over all ranks is one copy "
            "over the node.",
        ),
    ),
    "13.6": Exercise(
        praise="two ranks train like one, one rank goes on from their checkpoint, and in bfloat16 "
        "the weights stay in float32",
        hints=(
            "In which order: blocks, model, optimizer, checkpoint?",
            "To read a checkpoint you need tensors to read into. Which call gives you those of the "
            "model and of the optimizer?",
            "`state` is what you save and what you read: a dict of three entries. Where does its "
            "`step` come from after dcp.load?",
        ),
    ),
}

EMPTY = (
    "the weight was read or written while it had no memory: its storage has to have its size again "
    "before that. (Outside of this check the process may die of it.)"
)
TOO_SMALL = (
    "the memory of a tensor has {has} bytes, and its {numbers} numbers need {needs}: in what does "
    "the storage count? (Outside of this check the process may die of it.)"
)
SEEN = (
    "autograd has seen that you wrote into the weight, and refuses it in backward: which way of "
    "writing does the text above name?"
)


class _Waited(Watch):
    """A watch that knows whether the learner's code has waited for all that it started.

    PyTorch waits with `Work.wait` itself unless `async_op` is True, so both ways are counted there.
    (`is_completed` is of no use: gloo's reduce-scatter never says so.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._waits = 0
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for name in ("wait", "get_future"):
            self._patches.enter_context(mock.patch.object(dist.Work, name, self._counting(name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _counting(self, name: str) -> Callable[..., Any]:
        method = getattr(dist.Work, name)

        def counting(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            self._waits += 1
            return method(work, *args, **kwargs)

        return counting

    def under_way(self) -> str:
        """A hint if there are more calls than waits."""
        if self._waits >= len(self.calls):
            return ""
        return (
            f"collectives started: {len(self.calls)}, waited for: {self._waits}. Has the message "
            "come when you use it?"
        )


def _in_step(group: dist.ProcessGroup, parts: Iterator[str]) -> str:
    """The hint of this rank, from a trial in parts that yields one, or "", after each of them.

    All ranks stop after a part in which one has a hint: the others would wait for it in the next.
    """
    while True:
        try:
            hint = next(parts, None)
        except AssertionError as error:
            hint = str(error)
        answers = [None] * group.size()
        dist.all_gather_object(answers, hint, group=group)
        if any(answers) or hint is None:
            return hint or ""


# ---- 13.1


def own_rows(answer: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `own_rows(weight, group)`."""
    run_trial(ranks, _try_own_rows, answer)


def _try_own_rows(group: dist.ProcessGroup, answer: Callable[..., Any]) -> str:
    p = group.size()
    me = group.rank()
    for rows in (8, 12, 7, 9, 5, 2):
        weight = draw(group, rows, rows, 3)
        before = weight.clone()
        first, stop = rows_of(rows, me, p)
        expected = before[first:stop]
        case = f"{rows} rows on {p} ranks: "
        with without(rows_of, piece_of):
            found = answer(weight, group)
        if found is None and first == stop:
            return (
                f"{case}it returned None on the rank with number {me}: a rank that gets no rows "
                "has a view of 0 rows"
            )
        found = due(found)
        if not isinstance(found, Tensor):
            return f"it returned a {type(found).__name__}: the rows are a tensor"
        if not torch.equal(weight, before):
            return f"{case}the weight itself has changed: only look at it"
        if found.shape == before.shape and len(expected) < rows:
            return f"{case}it returned all rows"
        if found.dim() != 2 or found.shape[1] != 3:
            return f"{case}it returned {list(found.shape)}: rows are whole, with 3 columns here"
        if len(found) != len(expected):
            return (
                f"{case}it returned {len(found)} of them on the rank with number {me}, and "
                f"{len(expected)} are due: how many does each rank get before none are left?"
            )
        if not torch.equal(found, expected):
            return (
                f"{case}as many as they should be, but those of another rank: where do yours begin?"
            )
        if len(found) and found.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
            return f"{case}the right rows, but a copy of them: a change in it changes no weight"
    return ""


# ---- 13.2

SHAPES = ((7, 3), (5,), (2, 4), (8, 2))
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
}
NUM_STEPS = 3
UNUSED = (1, 3)  # in this step this weight has no gradient; all ranks have rows of it
BY_LABCODE = (
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


def sharded_optimizer(answer: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's class: three steps beside the same optimizer on whole weights."""
    run_trial(ranks, _try_optimizer, answer)


def _try_optimizer(group: dist.ProcessGroup, answer: Callable[..., Any]) -> str:
    return _in_step(group, _train_all(group, answer))


def _train_all(group: dist.ProcessGroup, answer: Callable[..., Any]) -> Iterator[str]:
    for name, (kind, options) in OPTIMIZERS.items():
        for hint in _train(group, answer, kind, options):
            yield f"{name}, {hint}" if hint else ""


def _train(
    group: dist.ProcessGroup,
    answer: Callable[..., Any],
    kind: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
) -> Iterator[str]:
    """After each step a hint, or "" where it gives the weights of one process."""
    params = _weights(group)
    alone = _weights(group)
    reference = kind(alone, **options)
    made: list[torch.optim.Optimizer] = []

    def make(tensors: Iterable[Tensor]) -> torch.optim.Optimizer:
        made.append(kind(tensors, **options))
        return made[-1]

    with without(*BY_LABCODE):
        # a generator, as model.parameters() gives one
        optimizer = answer((param for param in params), make, group)
    names: set[str] = set()
    for number in range(NUM_STEPS):
        case = f"step {number + 1}: "
        before = [param.detach().clone() for param in params]
        for place, param in enumerate(params):
            if (number, place) == UNUSED:
                param.grad = None
                alone[place].grad = None
                continue
            grad = draw(group, 50 + 10 * number + place, *param.shape)
            # as backward does it: what stands in .grad is added to
            param.grad = grad.clone() if param.grad is None else param.grad + grad
            alone[place].grad = grad
        with _Waited() as watch, _with_none(case), without(*BY_LABCODE):
            optimizer.step()
        reference.step()
        names.update(call.name for call in watch.calls)
        yield _of_state(group, made)
        hint = watch.under_way()
        yield case + hint if hint else ""
        if not _moves(params, before) and _keeps_used_generator(optimizer):
            yield (
                "nothing changes: `params` may be a generator, as model.parameters() gives one, "
                "and who goes through it a second time finds nothing"
            )
        yield ""
        for place, param in enumerate(params):
            if (number, place) == UNUSED and far(param.detach(), before[place]):
                yield (
                    f"{case}the weight {list(param.shape)} has changed, and it had no gradient in "
                    "this step (`grad` is None): what stands in the `.grad` of its rows?"
                )
            yield ""
            hint = _of_rows(group, param.detach(), alone[place].detach(), before[place], made[0])
            yield f"{case}of the weight {list(param.shape)} {hint}" if hint else ""
        optimizer.zero_grad()
        left = [param.grad for param in params if param.grad is not None]
        if any(bool(grad.any()) for grad in left):
            yield f"{case}after zero_grad() a weight still has its gradient"
        yield ""
    kinds = sorted(names - {"broadcast", "all_gather", "send", "recv"})
    if kinds:
        yield f"the weights are right, but it calls {kinds[0]}: what is there to add up?"


@contextlib.contextmanager
def _with_none(case: str) -> Iterator[None]:
    """An error over the gradient that is None, in words."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        text = str(error)
        assert "NoneType" not in text, (
            f"{case}{type(error).__name__}: {text}. Is it a weight whose `grad` is None?"
        )
        raise


def _moves(params: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Whether any weight has changed."""
    return any(far(param.detach(), old) for param, old in zip(params, before))


def _keeps_used_generator(holder: Any) -> bool:
    """Whether an attribute is a generator that has nothing left."""
    values = vars(holder).values()
    return any(isinstance(value, GeneratorType) and not value.gi_frame for value in values)


def _weights(group: dist.ProcessGroup) -> list[nn.Parameter]:
    return [nn.Parameter(draw(group, 10 + i, *shape)) for i, shape in enumerate(SHAPES)]


def _of_state(group: dist.ProcessGroup, made: Sequence[torch.optim.Optimizer]) -> str:
    """What is wrong with what the inner optimizer was made of."""
    if not made:
        return "`make` was never called: who updates the rows?"
    if len(made) > 1:
        return f"`make` was called {len(made)} times: one optimizer takes a list of tensors"
    given = 0
    for inner_group in made[0].param_groups:
        given += sum(tensor.numel() for tensor in inner_group["params"])
    whole = sum(math.prod(shape) for shape in SHAPES)
    own = 0
    for param in _weights(group):
        own += piece_of(param.detach(), group.rank(), group.size()).numel()
    if given == whole:
        return "`make` was given whole weights: the rank keeps state for the rows of all others"
    if given != own:
        return (
            f"`make` was given {given} numbers on the rank with number {group.rank()}, and its "
            f"rows have {own}"
        )
    return ""


def _of_rows(
    group: dist.ProcessGroup,
    found: Tensor,
    expected: Tensor,
    before: Tensor,
    inner: torch.optim.Optimizer,
) -> str:
    """What is wrong with a weight after a step; this rank's own rows are looked at first."""
    p = group.size()
    me = group.rank()
    order = [me, *(number for number in range(p) if number != me)]
    for number in order:
        mine = piece_of(found, number, p)
        wanted = piece_of(expected, number, p)
        old = piece_of(before, number, p)
        if not len(wanted) or not far(mine, wanted):
            continue
        if number != me:
            if not far(mine, old):
                return (
                    f"the rows of rank {number} of the group are the old ones on rank {me}: "
                    "how do they get there?"
                )
            return (
                f"the rows of rank {number} of the group are wrong on rank {me}: who sends them, "
                "and is that the rank that has updated them?"
            )
        if not far(mine, old):
            if not _has_gradients(inner):
                return "nothing changes: the tensors that `make` got have no `.grad` when they step"
            return (
                "this rank's own rows are the old ones after the step: does what `make` got share "
                "the memory of the weight, and does nobody write over it afterwards?"
            )
        times = _times(mine - old, wanted - old)
        if times is not None:
            return (
                f"this rank's own rows move {times:.3g} times as far as they should: the gradients "
                "are averages already, and each step has its own"
            )
        return (
            "this rank's own rows are wrong: which rows of the gradient go with them, and are they "
            "those of this step?"
        )
    return ""


def _has_gradients(inner: torch.optim.Optimizer) -> bool:
    """Whether any tensor of an optimizer has a gradient."""
    for part in inner.param_groups:
        if any(tensor.grad is not None for tensor in part["params"]):
            return True
    return False


def _times(found: Tensor, expected: Tensor) -> float | None:
    """By which factor `found` is longer where it has the direction of `expected`; else None."""
    length = float((found * expected).sum() / (expected * expected).sum())
    if abs(length) < 1e-9 or far(found, length * expected):
        return None
    return length


# ---- 13.3


def average_own_rows(answer: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `average_own_rows(params, rows, group)`, called twice."""
    run_trial(ranks, _try_average, answer)


def _try_average(group: dist.ProcessGroup, answer: Callable[..., Any]) -> str:
    return _in_step(group, _two_calls(group, answer))


def _two_calls(group: dist.ProcessGroup, answer: Callable[..., Any]) -> Iterator[str]:
    p = group.size()
    me = group.rank()
    params = _weights(group)
    before = [param.detach().clone() for param in params]
    rows = [nn.Parameter(piece_of(param.detach(), me, p)) for param in params]
    for number in range(2):
        case = "" if number == 0 else "in a second call: "
        everybody = []  # the gradients of each rank of the group
        for rank in range(p):
            seeds = [200 + 100 * number + 10 * rank + place for place in range(len(SHAPES))]
            grads = [draw(group, seed, *shape) for seed, shape in zip(seeds, SHAPES)]
            everybody.append(grads)
        old = [None if row.grad is None else row.grad.clone() for row in rows]
        for param, grad in zip(params, everybody[me]):
            param.grad = grad.clone()
        with _Waited() as watch, without(*BY_LABCODE):
            answer(params, rows, group)
        if any(far(param.detach(), value) for param, value in zip(params, before)):
            yield f"{case}weights have changed: it is about gradients only"
        hint = _of_messages(watch)
        yield case + hint if hint else ""
        hint = watch.under_way()
        yield case + hint if hint else ""
        for place, shape in enumerate(SHAPES):
            hint = _of_mean(
                group, place, rows[place], [one[place] for one in everybody], old[place]
            )
            yield f"{case}of the weight {list(shape)} {hint}" if hint else ""
        if any(param.grad is not None for param in params):
            yield f"{case}`params[i].grad` still holds a whole gradient"
        yield ""


def _of_messages(watch: Watch) -> str:
    names = [call.name for call in watch.calls]
    if not names:
        return "no collective was called: did anything travel?"
    others = sorted(set(names) - {"reduce_scatter"})
    if others:
        return (
            f"it calls {others[0]}: which collective gives each rank the sum of its own part only?"
        )
    if len(names) > 1:
        return f"{len(names)} reduce-scatters for {len(SHAPES)} weights: one message is enough"
    return ""


def _of_mean(
    group: dist.ProcessGroup, place: int, row: Tensor, grads: Sequence[Tensor], old: Tensor | None
) -> str:
    """What is wrong with the mean of this rank's rows of one weight."""
    p = group.size()
    me = group.rank()
    mean = torch.stack(list(grads)).mean(0)
    wanted = piece_of(mean, me, p)
    found = row.grad
    if not wanted.numel():
        return ""
    if found is None:
        return "the rows of this rank have no `.grad`: is it set?"
    if not far(found, wanted):
        return ""
    if not far(found, piece_of(grads[me], me, p)) or not far(found, piece_of(grads[me], me, p) / p):
        return "`.grad` of the rows is that of this rank alone: where is the sum?"
    times = _times(found, wanted)
    if times is not None:
        return (
            f"`.grad` of the rows is {times:.3g} times as large as the mean over the group: by "
            "what do you divide?"
        )
    if old is not None and not far(found, wanted + old):
        return "the new mean was added to the old one: it takes its place"
    for number in range(p):
        other = piece_of(mean, number, p)
        if number != me and other.shape == found.shape and not far(found, other):
            return f"`.grad` has the rows of rank {number} of the group on rank {me}"
    numbers = mean.flatten()
    if all(float((numbers - value).abs().min()) < 1e-9 for value in found.flatten()):
        return "`.grad` has right numbers in wrong places: which rows go to which rank?"
    return (
        "`.grad` of the rows has wrong numbers: where in the message does the part of each weight "
        "begin, on the rank that sends and on the one that receives?"
    )


# ---- 13.4


class _Careful(_Waited):
    """A watch that stops before memory is read or written that is not there."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not func.is_view:
            for value in pytree.tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and value.numel() > 0:
                    _assert_memory(value)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _assert_memory(value: Tensor) -> None:
    """Assert that the memory of a tensor reaches to its last number."""
    has = value.untyped_storage().nbytes()
    assert has, EMPTY
    last = value.storage_offset()
    for size, stride in zip(value.shape, value.stride()):
        last += (size - 1) * stride
    needs = (last + 1) * value.element_size()
    assert has >= needs, TOO_SMALL.format(has=has, numbers=last + 1, needs=needs)


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """What PyTorch says of memory that is not there, or was written, explained."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        assert "out of bounds for storage of size 0" not in text, EMPTY
        assert "modified by an inplace operation" not in text, SEEN
        raise


@contextlib.contextmanager
def _watched() -> Iterator[_Careful]:
    """What the learner's layer calls and makes."""
    watch = _Careful()
    with _in_words(), without(*BY_LABCODE), watch:
        yield watch


def borrowing_linear(answer: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's layer: its methods one by one, and then two layers in training."""
    for trial in (_gather_trial, _forward_trial, _backward_trial, _training_trial):
        run_trial(ranks, _try_part, trial, answer)


def _try_part(
    group: dist.ProcessGroup,
    trial: Callable[..., Iterator[str]],
    answer: Callable[..., Any],
) -> str:
    return _in_step(group, trial(group, answer))


WEIGHTS = ((7, 6), (8, 6), (5, 6))  # no multiple of the ranks, one of 4 ranks, none for the last
INPUT = (1, 2, 6)  # inputs and outputs are smaller than any of the weights


def _bytes(layer: Any) -> int:
    """Of the memory behind the whole weight now."""
    return layer.weight.untyped_storage().nbytes()


def _gather_trial(group: dist.ProcessGroup, answer: Callable[..., Any]) -> Iterator[str]:
    for number, shape in enumerate(WEIGHTS):
        weight = draw(group, 400 + number, *shape)
        hint = _of_gather(group, answer, weight, weighs=number == 0)
        yield f"a weight {list(shape)} on {group.size()} ranks: {hint}" if hint else ""


def _of_gather(
    group: dist.ProcessGroup, answer: Callable[..., Any], weight: Tensor, weighs: bool
) -> str:
    """What is wrong with `gather` and `reshard`, for one weight.

    Args:
        group: In which the layer is tried.
        answer: The learner's class.
        weight: Of the layer.
        weighs: Look for what is still alive, too, which takes half a second.
    """
    before = weight.clone()
    with _watched():
        layer = answer(weight, group)
    if _bytes(layer):
        return "right after __init__ the weight has memory: reshard() gives it back"
    if far(weight, before):
        return "the tensor that the layer was made of has changed"
    with torch.no_grad():
        layer.rows.mul_(2)  # as an optimizer would change them
    with _watched() as watch:
        layer.gather()
    hint = watch.under_way()
    if hint:
        return hint
    if not _bytes(layer):
        return "after gather() the weight has no memory"
    if layer.weight.shape != weight.shape or _bytes(layer) != weight.nbytes:
        return (
            f"after gather() the weight is {list(layer.weight.shape)} in {_bytes(layer)} "
            f"bytes of memory, and it should be {list(weight.shape)} in {weight.nbytes}"
        )
    names = [call.name for call in watch.calls]
    if names != ["all_gather"]:
        return f"gather() makes the calls {', '.join(names) or 'none'}: one all_gather"
    found = layer.weight.detach()
    if not far(found, weight):
        return (
            "after gather() the weight is that of the beginning, and the rows of all "
            "ranks have changed since: from where does it get its values?"
        )
    if far(found, 2 * weight):
        return "after gather() the weight has wrong values: whose rows stand where?"
    with _watched():
        layer.reshard()
    if _bytes(layer):
        return "after reshard() the weight still has its memory"
    if weighs:
        return _of_held(watch, layer, weight, "after gather() and reshard()")
    return ""


def _of_held(watch: Watch, layer: Any, weight: Tensor, when: str, *others: Tensor | None) -> str:
    """Whether as much as the whole weight is still alive; `others` do not count."""
    known = [layer.weight, layer.rows, weight]
    known += [tensor for tensor in others if tensor is not None]
    held = watch.held(*known, at_most=weight.nbytes - 1)
    if sum(held) >= weight.nbytes:
        return (
            f"{when} tensors of {sum(held)} bytes are alive besides the layer's own, and the whole "
            f"weight has {weight.nbytes}: a copy of it, or its parts. Who holds them? (An "
            "attribute does, and autograd holds what an operation needs in backward.)"
        )
    return ""


def _forward_trial(group: dist.ProcessGroup, answer: Callable[..., Any]) -> Iterator[str]:
    for is_training in (False, True):
        case = "with gradients: " if is_training else "under torch.no_grad(): "
        hint = _of_forward(group, answer, is_training)
        yield case + hint if hint else ""


def _of_forward(group: dist.ProcessGroup, answer: Callable[..., Any], is_training: bool) -> str:
    """What is wrong with `forward`."""
    weight = draw(group, 410, 7, 6)
    x = draw(group, 420 + group.rank(), *INPUT)
    x.requires_grad_()  # so that autograd saves the weight
    with _watched():
        layer = answer(weight, group)
    with torch.set_grad_enabled(is_training), _watched() as watch:
        y = due(layer(x))
    if not isinstance(y, Tensor) or y.shape != (1, 2, 7):
        what = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        return f"forward gives {what} for x [1, 2, 6] and W [7, 6]"
    hint = watch.under_way()
    if hint:
        return hint
    if far(y.detach(), F.linear(x.detach(), weight)):
        return "forward gives wrong values: it is x W^T"
    if _bytes(layer):
        return "after forward the weight still has its memory"
    names = [call.name for call in watch.calls]
    if names != ["all_gather"]:
        return f"forward makes the calls {', '.join(names) or 'none'}: one all_gather"
    return _of_held(watch, layer, weight, "after forward", x, y)


def _backward_trial(group: dist.ProcessGroup, answer: Callable[..., Any]) -> Iterator[str]:
    p = group.size()
    for number, shape in enumerate(WEIGHTS):
        weight = draw(group, 430 + number, *shape)
        case = f"a weight {list(shape)} on {p} ranks: "
        with _watched():
            layer = answer(weight, group)
        total = torch.zeros_like(weight)
        for micro_batch in range(2):
            hint = _one_backward(group, layer, weight, total, micro_batch)
            yield case + hint if hint else ""


def _one_backward(
    group: dist.ProcessGroup, layer: Any, weight: Tensor, total: Tensor, micro_batch: int
) -> str:
    """Forward and backward of one micro-batch; `total` is the mean gradient of those before."""
    p = group.size()
    me = group.rank()
    inputs = []
    grads = []  # of each rank alone
    for rank in range(p):
        x = draw(group, 500 + 20 * micro_batch + rank, *INPUT)
        own = weight.clone().requires_grad_()
        F.linear(x, own).square().sum().backward()
        assert own.grad is not None
        inputs.append(x)
        grads.append(own.grad)
    x = inputs[me].clone().requires_grad_()
    true_x = inputs[me].clone().requires_grad_()
    F.linear(true_x, weight).square().sum().backward()
    with _watched():
        y = layer(x)
    with _watched() as backward:
        y.square().sum().backward()
    hint = backward.under_way()
    assert x.grad is not None, "x has no gradient after backward"
    assert true_x.grad is not None
    if far(x.grad, true_x.grad):
        return "the gradient of x is wrong: which values did the weight have in backward?"
    names = [call.name for call in backward.calls]
    if "reduce_scatter" not in names:
        made = ", ".join(names) or "none"
        return f"backward makes the calls {made}: who sums the gradient of the weight?"
    if hint:
        return hint
    if sorted(names) != ["all_gather", "reduce_scatter"]:
        return f"backward makes the calls {', '.join(names)}: one all_gather and one reduce_scatter"
    if layer.weight.grad is not None:
        return "after backward `weight.grad` still holds the whole gradient"
    if _bytes(layer):
        return "after backward the weight still has its memory"
    mean = torch.stack(grads).mean(0)
    old = piece_of(total, me, p).clone()
    total += mean
    found: Any = layer.rows.grad
    wanted = piece_of(total, me, p)
    if wanted.numel() and found is None:
        return "after backward `rows.grad` is None"
    if wanted.numel() and far(found, wanted):
        new = piece_of(mean, me, p)
        if not far(found, new):
            return "a second backward has replaced `rows.grad`: backward adds to what stands there"
        times = _times(found - old, new)
        if times is not None:
            return (
                f"`rows.grad` is {times:.3g} times as large as the mean over the group: by what do "
                "you divide?"
            )
        return "`rows.grad` is wrong: which rows of the gradient go to which rank?"
    del y
    if micro_batch == 0 and weight.shape == WEIGHTS[0]:
        return _of_held(backward, layer, weight, "after backward", x, x.grad, found)
    return ""


def _training_trial(group: dist.ProcessGroup, answer: Callable[..., Any]) -> Iterator[str]:
    """Two layers, three steps, beside one process with the batch of all ranks."""
    p = group.size()
    me = group.rank()
    start = [draw(group, 600, 5, 6), draw(group, 601, 6, 5)]
    with _watched():
        layers = [answer(weight, group) for weight in start]
    alone = [nn.Parameter(weight.clone()) for weight in start]
    optimizer = torch.optim.SGD([layer.rows for layer in layers], lr=0.05)
    reference = torch.optim.SGD(alone, lr=0.05)
    for step in range(3):
        batches = [draw(group, 610 + 10 * step + rank, 4, 6) for rank in range(p)]
        hidden = torch.tanh(F.linear(torch.cat(batches), alone[0]))
        F.linear(hidden, alone[1]).square().mean().backward()
        with _watched():
            hidden = torch.tanh(layers[0](batches[me]))
            layers[1](hidden).square().mean().backward()
        for chosen in (optimizer, reference):
            chosen.step()
            chosen.zero_grad()
        for number, layer in enumerate(layers):
            wanted = piece_of(alone[number].detach(), me, p)
            if wanted.numel() and far(layer.rows.detach(), wanted):
                yield (
                    f"two layers in training: after step {step + 1} the rows of layer {number + 1} "
                    "are not those of one process"
                )
        yield ""


# ---- 13.5


def choose(answer: Callable[..., Any]) -> None:
    """The learner's choice of a layout, in several situations.

    Args:
        answer: `answer(situation)`: a `Layout`, with its costs.
    """
    for situation in CASES:
        with without(best, cost_of):
            found = due(answer(situation))
        _check_layout(found, situation)


def _check_layout(found: Any, situation: Situation) -> None:
    case = f"{situation.about}: "
    is_layout = isinstance(found, tuple) and len(found) == len(Layout._fields)
    assert is_layout, f"{case}it returned {str(found)[:40]}: return Layout(...)"
    found = Layout(*found)
    known = candidates(situation)
    assert (found.stage, found.ranks_of_a_copy) in known, (
        f"{case}stage {found.stage} over {found.ranks_of_a_copy} ranks is none of the candidates"
    )
    true = cost_of(situation, found.stage, found.ranks_of_a_copy)
    chosen = f"stage {found.stage} over {found.ranks_of_a_copy} ranks "
    assert math.isclose(found.kept_bytes, true.kept_bytes, rel_tol=1e-6), (
        f"{case}{chosen}keeps {true.kept_bytes / 1e9:.4g} GB, and kept_bytes says "
        f"{found.kept_bytes / 1e9:.4g}: look at what it keeps of the model, and at the "
        "layers that are whole"
    )
    assert math.isclose(found.sending_s, true.sending_s, rel_tol=1e-6), (
        f"{case}{chosen}sends for {true.sending_s:.4g} s, and sending_s says "
        f"{found.sending_s:.4g}: look at what travels inside a copy, over which link, and at what "
        "travels between copies"
    )
    assert true.kept_bytes <= situation.room_bytes, (
        f"{case}{chosen}keeps {true.kept_bytes / 1e9:.4g} GB, and there is room for "
        f"{situation.room_bytes / 1e9:.4g}"
    )
    fastest = best(situation)
    assert true.sending_s <= fastest.sending_s * (1 + 1e-9), (
        f"{case}{chosen}sends for {true.sending_s:.3g} s, and something else that fits for "
        f"{fastest.sending_s:.3g} s"
    )
