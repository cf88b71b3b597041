"""Checks of lesson 09, tensor parallelism. The text of each assertion is a hint.

Every answer runs on four ranks, first in two groups of two that read different data, then in one
group of four.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from labcode.comm.collectives import copy_to, reduce_from
from labcode.comm.counting import Call, counted
from labcode.comm.grid import Grid
from labcode.parallel import tensor
from labcode.pool.answers import HangError
from labcode.pool.ranks import RankError, Ranks
from labcode.teach.check import Exercise, due
from labcode.teach.exercises.on_ranks import without
from labcode.topology import GridShape

EXERCISES = {
    "9.1": Exercise(
        praise="two mirror images, on any group, and nothing was overwritten",
        hints=(
            "Which of the four methods sum over the ranks, and which hand their tensor on?",
            "`dist.all_reduce` changes the tensor that it is given. Is that tensor yours?",
            "A backward returns one gradient for each argument of forward, so two here.",
        ),
    ),
    "9.2": Exercise(
        praise="each rank keeps its columns, and one sum in backward is all that is sent",
        hints=(
            "PyTorch stores [outputs, inputs]. Along which dim are the outputs cut?",
            "`whole.chunk(p, dim=0)[rank]` is a view. What else does a parameter need?",
            "Where does the input become something that differs by rank: f or g?",
        ),
    ),
    "9.3": Exercise(
        praise="one sum in forward, and the bias is added once",
        hints=(
            "Along which dim does this layer cut the weight [outputs, inputs]?",
            "The products of the ranks are summands of one output: f or g?",
            "Is the bias part of every summand, or of the sum?",
        ),
    ),
    "9.4": Exercise(
        praise="a share of the work on each rank, and one sum each way, although x is used twice",
        hints=(
            "Which of the three weights are cut by rows of the stored tensor, which by columns?",
            "x enters two products on each rank. How often does it pass f?",
            "The product of silu(gate) and up works on each feature alone: nothing is sent for it.",
        ),
    ),
    "9.5": Exercise(
        praise="every token is looked up by the one rank that has it",
        hints=(
            "Which row of its own part is token t on a rank whose first token is `first`?",
            "A token of another rank needs some valid row, and a zero vector afterwards.",
            "After that every rank has one summand of the result.",
        ),
    ),
    "9.6": Exercise(
        praise="uneven columns, large logits, right gradients, and three numbers for each token",
        hints=(
            "Which of the three numbers need all columns, and how does each combine over ranks?",
            "`reduce_from` sums forward, and hands the gradient on. `dist.all_reduce` has none.",
            "The maximum needs no gradient: `logits.detach().amax(-1)`.",
        ),
    ),
}

TOLERANCE = 1e-9
SHAPES = (GridShape(dp=2, tp=2), GridShape(tp=4))


class _Place(NamedTuple):
    """Where a rank stands while an answer is tried.

    Args:
        group: Its tensor-parallel group.
        rank: Its number in the group.
        p: Size of the group.
        number: Of the group, 0 or 1: groups read different data.
    """

    group: dist.ProcessGroup
    rank: int
    p: int
    number: int


def _place(shape: GridShape) -> _Place:
    grid = Grid.create(shape)
    return _Place(grid.group("tp"), grid.coord("tp"), grid.size("tp"), grid.coord("dp"))


def _who(rank: int, shape: GridShape, name: str = "") -> str:
    """Names a rank by its group: "in the group of ranks 2, 3, number 1 of the group: "."""
    for members in shape.groups("tp"):
        if rank in members:
            ranks = ", ".join(str(member) for member in members)
            number = members.index(rank)
            what = f"{name}, " if name else ""
            return f"{what}in the group of ranks {ranks}, the rank with number {number}: "
    raise ValueError(rank)


def _run(ranks: Ranks, fn: Callable[..., Any], *args: Any) -> list:
    """`ranks.run`, with a hint in place of what a rank says that waited in vain."""
    try:
        return ranks.run(fn, *args)
    except HangError as error:
        raise AssertionError(
            f"the ranks wait for each other: does every rank of the group make the same calls? "
            f"({error})"
        ) from None
    except RankError as error:
        assert "tuple index out of range" not in str(error), (
            f"{error}: in a group of p ranks the parts have the numbers 0 to p - 1; is the number "
            "of the rank in the group taken, or that in the job?"
        )
        if "Timed out" in str(error) or "Connection closed" in str(error):
            raise AssertionError(
                f"the ranks wait for each other: does every rank make the same calls? ({error})"
            ) from None
        raise


def _refuse_ours(layer: Any) -> None:
    """The learner's class is not labcode's, and none of its layers is."""
    ours = (tensor.ColumnParallelLinear, tensor.RowParallelLinear, tensor.VocabParallelEmbedding)
    if not isinstance(layer, nn.Module):
        return
    for part in layer.modules():
        assert not isinstance(part, ours), (
            f"tensor.{type(part).__name__} is labcode's own answer to this exercise: write yours"
        )


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and _error(found, expected) < TOLERANCE


def _draw(seed: int, *sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, dtype=torch.float64, generator=generator)


def _check_groups(who: str, calls: Sequence[Call], p: int) -> None:
    """Whatever travels stays in the group."""
    for call in calls:
        assert call.group_size == p, who + (
            f"an {call.kind} runs over {call.group_size} ranks, and the group has {p}: "
            "is the group handed on to it?"
        )


def _kinds(calls: Sequence[Call]) -> str:
    """What travels, in words: "2 all_reduce, 1 all_gather"."""
    names = [call.kind for call in calls]
    parts = [f"{names.count(kind)} {kind}" for kind in dict.fromkeys(names)]
    return ", ".join(parts) or "nothing"


# ---- 9.1


class _Applied(NamedTuple):
    """What a Function did on one rank.

    Args:
        x, y: Input and output of forward, [2, 3].
        grad_y, grad_x: Input and output of backward; grad_x is None if there was no gradient.
        x_kept, grad_y_kept: Whether forward and backward left their inputs unchanged.
        calls: What travelled.
    """

    x: Tensor
    y: Tensor
    grad_y: Tensor
    grad_x: Tensor | None
    x_kept: bool
    grad_y_kept: bool
    calls: list[Call]


def _apply(rank: int, function: type[torch.autograd.Function], shape: GridShape) -> _Applied:
    """Run a Function forward and backward on numbers that differ between all ranks."""
    place = _place(shape)
    x = torch.arange(6.0).view(2, 3) + 10 * rank
    grad_y = torch.ones(2, 3) + 7.0**rank
    x_before = x.clone()
    grad_y_before = grad_y.clone()
    x.requires_grad_()
    with counted() as calls, without(copy_to, reduce_from):
        y = due(function.apply(x, place.group))
        (grad_x,) = torch.autograd.grad(y, x, grad_outputs=grad_y, allow_unused=True)
    return _Applied(
        x=x_before,
        y=y.detach(),
        grad_y=grad_y_before,
        grad_x=grad_x,
        x_kept=torch.equal(x.detach(), x_before),
        grad_y_kept=torch.equal(grad_y, grad_y_before),
        calls=calls,
    )


def copy_and_reduce(
    f: type[torch.autograd.Function], g: type[torch.autograd.Function], ranks: Ranks
) -> None:
    """The learner's Functions f (identity, then a sum) and g (a sum, then identity).

    Args:
        f, g: Called as `apply(x, group)`.
        ranks: Where they run.
    """
    for shape in SHAPES:
        for name, function, sums_forward in (("f", f, False), ("g", g, True)):
            results = _run(ranks, _apply, function, shape)
            for rank, result in enumerate(results):
                members = next(group for group in shape.groups("tp") if rank in group)
                peers = [results[member] for member in members]
                _check_applied(_who(rank, shape, name), result, peers, sums_forward)


def _check_applied(
    who: str, result: _Applied, peers: Sequence[_Applied], sums_forward: bool
) -> None:
    total_x = torch.stack([peer.x for peer in peers]).sum(0)
    total_grad = torch.stack([peer.grad_y for peer in peers]).sum(0)
    assert result.x_kept, who + ("forward wrote into its input: the sum needs a tensor of its own")
    assert result.grad_y_kept, who + (
        "backward wrote into the gradient it was handed: the sum needs a tensor of its own"
    )
    _check_groups(who, result.calls, len(peers))
    assert result.grad_x is not None, who + "no gradient comes back"
    _check_forward(who, result, sums_forward, total_x)
    _check_backward(who, result, result.grad_x, sums_forward, total_grad, len(peers))


def _check_forward(who: str, result: _Applied, sums_forward: bool, total_x: Tensor) -> None:
    if sums_forward:
        wanted = total_x
        mistaken = result.x
        hint = "forward has to sum over the ranks"
    else:
        wanted = result.x
        mistaken = total_x
        hint = "forward is the identity, nothing travels"
    assert not torch.equal(result.y, mistaken), who + hint
    assert torch.equal(result.y, wanted), who + (
        f"forward gives {result.y[0].tolist()}, expected {wanted[0].tolist()}"
    )


def _check_backward(
    who: str, result: _Applied, grad_x: Tensor, sums_forward: bool, total_grad: Tensor, p: int
) -> None:
    if sums_forward:
        wanted = result.grad_y
        mistaken = total_grad
        hint = (
            f"backward sums as well, every gradient below is {p} times too long: "
            "each rank has the whole already"
        )
    else:
        wanted = total_grad
        mistaken = result.grad_y
        hint = (
            "backward hands on this rank's own part; the paths through the other ranks are missing"
        )
    assert not torch.equal(grad_x, mistaken), who + hint
    assert torch.equal(grad_x, wanted), who + (
        f"backward gives {grad_x[0].tolist()}, expected {wanted[0].tolist()}"
    )


# ---- 9.2 and 9.3

INPUTS = 8
OUTPUTS = 12


class _Parameter(NamedTuple):
    """A parameter of a learner's layer.

    Args:
        value: Its numbers.
        grad: After backward; None if it got none.
        storage: How many numbers the memory behind it holds.
    """

    value: Tensor
    grad: Tensor | None
    storage: int


class _OwnLayer(NamedTuple):
    """What a learner's layer has and does on one rank.

    Args:
        params: {name: parameter}; None if it is no nn.Module.
        y: Its output, [2, 3, ..].
        x_grad: Gradient of its input, None if there is none.
        forward, backward: What travelled.
    """

    params: dict[str, _Parameter] | None
    y: Tensor | None
    x_grad: Tensor | None
    forward: list[Call]
    backward: list[Call]


class _Truth(NamedTuple):
    """The same layer on one process."""

    weight: Tensor
    bias: Tensor | None
    y: Tensor
    x_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor | None


def _whole_linear(bias: bool) -> nn.Linear:
    layer = nn.Linear(INPUTS, OUTPUTS, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(_draw(1, OUTPUTS, INPUTS))
        if bias:
            layer.bias.copy_(_draw(2, OUTPUTS))
    return layer


def _linear_input(number: int) -> tuple[Tensor, Tensor]:
    """x and the gradient of y that the group with this number reads."""
    return _draw(10 + number, 2, 3, INPUTS), _draw(20 + number, 2, 3, OUTPUTS)


def _true_linear(number: int, bias: bool) -> _Truth:
    layer = _whole_linear(bias)
    x, grad_y = _linear_input(number)
    x.requires_grad_()
    y = layer(x)
    y.backward(grad_y)
    assert x.grad is not None and layer.weight.grad is not None
    return _Truth(
        weight=layer.weight.detach(),
        bias=layer.bias.detach() if bias else None,
        y=y.detach(),
        x_grad=x.grad,
        weight_grad=layer.weight.grad,
        bias_grad=layer.bias.grad if bias else None,
    )


def _own_linear(make: Callable[..., Any], shape: GridShape, bias: bool, columns: bool) -> _OwnLayer:
    """Build the learner's layer, and run it forward and backward.

    Args:
        make: The learner's class.
        shape: Of the grid.
        bias: Whether the layer has one.
        columns: Column-parallel: whole input, part of the output; else the other way round.
    """
    place = _place(shape)
    layer = due(make(_whole_linear(bias), place.group))
    _refuse_ours(layer)
    if not isinstance(layer, nn.Module):
        return _OwnLayer(None, None, None, [], [])
    if not _has_its_parts(layer, place.p, bias, columns):
        return _OwnLayer(_parameters(layer), None, None, [], [])
    x, grad_y = _linear_input(place.number)
    if columns:
        grad_y = grad_y.chunk(place.p, -1)[place.rank]
    else:
        x = x.chunk(place.p, -1)[place.rank].clone()
    x.requires_grad_()
    with counted() as forward:
        y = due(layer(x))
    backward: list[Call] = []
    if y.shape == grad_y.shape and y.requires_grad:
        with counted() as backward:
            y.backward(grad_y)
    return _OwnLayer(_parameters(layer), y.detach(), x.grad, forward, backward)


def _parameters(module: nn.Module) -> dict[str, _Parameter]:
    params = {}
    for name, param in module.named_parameters():
        numbers = param.untyped_storage().nbytes() // param.element_size()
        params[name] = _Parameter(param.detach(), param.grad, numbers)
    return params


def _has_its_parts(layer: nn.Module, p: int, bias: bool, columns: bool) -> bool:
    """Whether the shapes are those of a part; if not, to run the layer would hide that."""
    shapes = {name: tuple(param.shape) for name, param in layer.named_parameters()}
    wanted: dict[str, tuple[int, ...]] = {}
    wanted["weight"] = (OUTPUTS // p, INPUTS) if columns else (OUTPUTS, INPUTS // p)
    if bias:
        wanted["bias"] = (OUTPUTS // p,) if columns else (OUTPUTS,)
    return shapes == wanted


def column_parallel(make: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `ColumnParallelLinear(layer, group)`: whole input, own output features."""
    _check_linear(make, ranks, columns=True)


def row_parallel(make: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `RowParallelLinear(layer, group)`: own input features, whole output."""
    _check_linear(make, ranks, columns=False)


def _check_linear(make: Callable[..., Any], ranks: Ranks, columns: bool) -> None:
    for shape in SHAPES:
        for bias in (True, False):
            results = _run(ranks, _own_linear, make, shape, bias, columns)
            _check_results(results, shape, bias, columns)


def _check_results(
    results: Sequence[_OwnLayer], shape: GridShape, bias: bool, columns: bool
) -> None:
    note = "" if bias else "a layer without bias, "
    # A wrong part on one rank spoils the numbers of the others, so the parts of all come first.
    for rank, own in enumerate(results):
        coords = shape.coords(rank)
        truth = _true_linear(coords["dp"], bias)
        who = note + _who(rank, shape)
        _check_parameters(who, own, truth, coords["tp"], shape.tp, columns)
    for rank, own in enumerate(results):
        coords = shape.coords(rank)
        truth = _true_linear(coords["dp"], bias)
        who = note + _who(rank, shape)
        if columns:
            _check_columns(who, own, truth, coords["tp"], shape.tp)
        else:
            _check_rows(who, own, truth, coords["tp"], shape.tp)
        _check_gradients(who, own, truth, coords["tp"], shape.tp, columns)


def _check_parameters(
    who: str, own: _OwnLayer, truth: _Truth, rank: int, p: int, columns: bool
) -> None:
    """The layer holds its part, and nothing of the rest."""
    assert own.params is not None, who + "what the class makes is no nn.Module"
    assert own.params, who + "the layer has no parameters, so no optimizer would find any"
    dim = 0 if columns else 1
    wanted = truth.weight.chunk(p, dim)[rank]
    for name, param in own.params.items():
        is_whole = param.value.shape == truth.weight.shape
        assert not is_whole, who + (
            f"{name} is the whole weight, {list(truth.weight.shape)}: each rank keeps a part"
        )
    assert "weight" in own.params, who + (
        f"its parameters are {', '.join(own.params)}; call the weight `weight`"
    )
    weight = own.params["weight"]
    assert weight.value.shape == wanted.shape, who + (
        f"weight is {list(weight.value.shape)}, expected {list(wanted.shape)}: PyTorch stores "
        f"[outputs, inputs], and the {'outputs' if columns else 'inputs'} are shared out"
    )
    if not torch.equal(weight.value, wanted):
        others = [
            number
            for number, part in enumerate(truth.weight.chunk(p, dim))
            if torch.equal(weight.value, part)
        ]
        whose = f"the part of number {others[0]}" if others else "no part of the whole weight"
        raise AssertionError(who + f"weight holds {whose}, not its own part")
    assert weight.storage == weight.value.numel(), who + (
        "weight is a view of the whole weight, whose memory cannot be freed: it needs a copy"
    )
    _check_bias(who, own.params, truth, rank, p, columns)


def _check_bias(
    who: str,
    params: dict[str, _Parameter],
    truth: _Truth,
    rank: int,
    p: int,
    columns: bool,
) -> None:
    if truth.bias is None:
        assert "bias" not in params, who + "there is a bias all the same"
        return
    assert "bias" in params, who + "there is no parameter `bias`"
    wanted = truth.bias.chunk(p)[rank] if columns else truth.bias
    found = params["bias"].value
    assert torch.equal(found, wanted) or found.shape != wanted.shape, who + (
        "bias holds other numbers than its part of the whole bias"
    )
    assert found.shape == wanted.shape, who + (
        f"bias is {list(found.shape)}, expected {list(wanted.shape)}: to which output features "
        "of this rank is it added?"
    )


def _check_columns(who: str, own: _OwnLayer, truth: _Truth, rank: int, p: int) -> None:
    wanted = truth.y.chunk(p, -1)[rank]
    assert own.y is not None
    _check_groups(who, [*own.forward, *own.backward], p)
    assert own.y.shape != truth.y.shape, who + (
        "the output is whole: this layer leaves each rank its own output features"
    )
    assert own.y.shape == wanted.shape, who + (
        f"the output is {list(own.y.shape)}, expected {list(wanted.shape)}"
    )
    if truth.bias is not None:
        without = wanted - truth.bias.chunk(p)[rank]
        assert not _is_close(own.y, without), who + "the bias is not added"
    assert not own.forward, who + f"{_kinds(own.forward)} in forward: nothing has to travel there"
    assert _is_close(own.y, wanted), who + (
        "the output has other values than these output features of the whole layer"
    )
    assert own.backward, who + (
        "nothing travels in backward: the gradient of x holds the part of this rank alone"
    )
    assert [call.kind for call in own.backward] == ["all_reduce"], who + (
        f"{_kinds(own.backward)} in backward; one all_reduce is enough"
    )


def _check_rows(who: str, own: _OwnLayer, truth: _Truth, rank: int, p: int) -> None:
    assert own.y is not None
    _check_groups(who, [*own.forward, *own.backward], p)
    assert own.y.shape == truth.y.shape, who + (
        f"the output is {list(own.y.shape)}, expected {list(truth.y.shape)}"
    )
    assert own.forward, who + (
        "nothing travels in forward: the output is the summand of this rank alone"
    )
    if truth.bias is not None:
        without = truth.y - truth.bias
        assert not _is_close(own.y, without), who + "the bias is not added"
        assert not _is_close(own.y, truth.y + (p - 1) * truth.bias), who + (
            f"the output is too large by {p - 1} biases: when is the bias added?"
        )
    assert _is_close(own.y, truth.y), who + (
        "the output has other values than that of the whole layer"
    )
    assert [call.kind for call in own.forward] == ["all_reduce"], who + (
        f"{_kinds(own.forward)} in forward; one all_reduce is enough"
    )
    assert not own.backward, who + (
        f"{_kinds(own.backward)} in backward: each rank has the gradient of the sum already"
    )


def _check_gradients(
    who: str, own: _OwnLayer, truth: _Truth, rank: int, p: int, columns: bool
) -> None:
    assert own.params is not None
    dim = 0 if columns else 1
    x_grad = truth.x_grad if columns else truth.x_grad.chunk(p, -1)[rank]
    assert own.x_grad is not None, who + (
        "no gradient reaches the input: all_reduce alone has no backward, f and g have"
    )
    assert _is_close(own.x_grad, x_grad), who + (
        f"the gradient of x is {_error(own.x_grad, x_grad):.0%} off"
    )
    wanted = {"weight": truth.weight_grad.chunk(p, dim)[rank]}
    if truth.bias_grad is not None:
        wanted["bias"] = truth.bias_grad.chunk(p)[rank] if columns else truth.bias_grad
    for name, expected in wanted.items():
        grad = own.params[name].grad
        assert grad is not None, who + f"{name} gets no gradient: is it used, and a parameter?"
        assert _is_close(grad, expected), who + (
            f"the gradient of {name} is {_error(grad, expected):.0%} off"
        )


# ---- 9.4

SWIGLU_SIZES = (16, 48)  # H and F


class _OwnSwiglu(NamedTuple):
    """What the learner's MLP of Llama did on one rank.

    Args:
        y: Its output.
        x_grad: Gradient of x, or None.
        forward, backward: What travelled.
        flops: Of all matrix products in forward.
    """

    y: Tensor
    x_grad: Tensor | None
    forward: list[Call]
    backward: list[Call]
    flops: int


def _swiglu_tensors(number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [6, H] of a group, gate and up [F, H], down [H, F]."""
    hidden, inside = SWIGLU_SIZES
    x = _draw(30 + number, 6, hidden)
    gate = _draw(40, inside, hidden) / hidden**0.5
    up = _draw(41, inside, hidden) / hidden**0.5
    down = _draw(42, hidden, inside) / inside**0.5
    return x, gate, up, down


def _whole_swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _own_swiglu(swiglu: Callable[..., Tensor], shape: GridShape) -> _OwnSwiglu:
    place = _place(shape)
    x, gate, up, down = _swiglu_tensors(place.number)
    x.requires_grad_()
    flops = FlopCounterMode(display=False)
    with counted() as forward, flops:
        y = due(swiglu(x, gate, up, down, place.group))
    backward: list[Call] = []
    if y.requires_grad and y.shape == x.shape:
        with counted() as backward:
            y.square().sum().backward()
    return _OwnSwiglu(y.detach(), x.grad, forward, backward, flops.get_total_flops())


def swiglu(answer: Callable[..., Tensor], ranks: Ranks) -> None:
    """The learner's `my_swiglu(x, gate, up, down, group)`, which gets the whole weights."""
    hidden, inside = SWIGLU_SIZES
    whole_flops = 3 * 2 * 6 * hidden * inside
    for shape in SHAPES:
        results = _run(ranks, _own_swiglu, answer, shape)
        for rank, own in enumerate(results):
            x, gate, up, down = _swiglu_tensors(shape.coords(rank)["dp"])
            x.requires_grad_()
            expected = _whole_swiglu(x, gate, up, down)
            expected.square().sum().backward()
            assert x.grad is not None
            share = own.flops / (whole_flops / shape.tp)
            _check_swiglu(_who(rank, shape), own, expected.detach(), x.grad, share, shape.tp)


def _check_swiglu(
    who: str, own: _OwnSwiglu, expected: Tensor, x_grad: Tensor, share: float, p: int
) -> None:
    assert own.y.shape == expected.shape, who + (
        f"the output is {list(own.y.shape)}, expected {list(expected.shape)}"
    )
    _check_groups(who, [*own.forward, *own.backward], p)
    assert own.forward, who + "nothing travels forward: is the output a sum over the ranks?"
    assert _is_close(own.y, expected), who + (
        f"the output is {_error(own.y, expected):.0%} off: "
        "which rows of gate and up and which columns of down fit together?"
    )
    assert share < 1.01, who + (
        f"it multiplies {share:.1f} times as much as its share: which of the three products "
        "is computed whole?"
    )
    assert own.x_grad is not None, who + (
        "no gradient reaches x: all_reduce alone has no backward, f and g have"
    )
    assert _is_close(own.x_grad, x_grad), who + (
        "the output is right, the gradient of x is not: it enters two products on each rank"
    )
    for name, calls in (("forward", own.forward), ("backward", own.backward)):
        assert [call.kind for call in calls] == ["all_reduce"], who + (
            f"{name} makes {_kinds(calls)}, one all_reduce is enough: where does x enter?"
        )


# ---- 9.5

VOCAB = 83  # does not divide by 2 or 4: the last rank has fewer rows
WIDTH = 5


class _OwnEmbedding(NamedTuple):
    """What the learner's embedding has and gives on one rank; params is None for no nn.Module."""

    params: dict[str, _Parameter] | None
    y: Tensor | None
    calls: list[Call]


def _tokens(number: int) -> Tensor:
    """[2, 9] tokens of a group, with the first and the last token of each rank among them."""
    generator = torch.Generator().manual_seed(50 + number)
    tokens = torch.randint(VOCAB, (2, 9), generator=generator)
    ends = [0, VOCAB - 1]
    for part in torch.arange(VOCAB).tensor_split(4)[1:]:
        ends += [int(part[0]) - 1, int(part[0])]
    tokens.view(-1)[: len(ends)] = torch.tensor(ends)
    return tokens


def _whole_embedding() -> nn.Embedding:
    return nn.Embedding.from_pretrained(_draw(60, VOCAB, WIDTH), freeze=False)


def _own_embedding(make: Callable[..., Any], shape: GridShape) -> _OwnEmbedding:
    place = _place(shape)
    embedding = due(make(_whole_embedding(), place.group))
    _refuse_ours(embedding)
    if not isinstance(embedding, nn.Module):
        return _OwnEmbedding(None, None, [])
    with counted() as calls:
        y = due(embedding(_tokens(place.number)))
        if y.requires_grad:
            y.square().sum().backward()
    return _OwnEmbedding(_parameters(embedding), y.detach(), calls)


def vocabulary_embedding(make: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `VocabParallelEmbedding(embedding, group)`."""
    for shape in SHAPES:
        try:
            results = _run(ranks, _own_embedding, make, shape)
        except RankError as error:
            assert "IndexError" not in str(error), (
                "a rank looks up a token that it does not have: which row of its own part would "
                "that be?"
            )
            raise
        for rank, own in enumerate(results):
            coords = shape.coords(rank)
            _check_embedding(_who(rank, shape), own, coords["tp"], shape.tp, coords["dp"])


def _check_embedding(who: str, own: _OwnEmbedding, rank: int, p: int, number: int) -> None:
    whole = _whole_embedding()
    tokens = _tokens(number)
    expected = whole(tokens)
    expected.square().sum().backward()
    assert whole.weight.grad is not None
    assert own.params is not None and own.y is not None, who + "the class makes no nn.Module"
    assert "weight" in own.params, who + "there is no parameter `weight`"
    weight = own.params["weight"]
    wanted = whole.weight.detach().tensor_split(p)[rank]
    assert weight.value.shape != whole.weight.shape, who + (
        "weight is the whole table: each rank keeps some rows"
    )
    assert weight.value.shape == wanted.shape and torch.equal(weight.value, wanted), who + (
        f"weight is {list(weight.value.shape)} and not part {rank} of `tensor_split({p})`, "
        f"{list(wanted.shape)}"
    )
    assert weight.storage == weight.value.numel(), who + (
        "weight is a view of the whole table, whose memory cannot be freed: it needs a copy"
    )
    _check_groups(who, own.calls, p)
    assert own.y.shape == expected.shape, who + (
        f"the output is {list(own.y.shape)}, expected {list(expected.shape)}"
    )
    assert own.calls, who + "nothing travels: who has the vectors of the other tokens?"
    wrong = (own.y - expected.detach()).abs().amax(-1) > TOLERANCE
    if wrong.any():
        token = int(tokens[wrong][0])
        first = sum(len(part) for part in torch.arange(VOCAB).tensor_split(p)[:rank])
        whose = "has" if first <= token < first + len(wanted) else "does not have"
        raise AssertionError(
            who + f"the vector of token {token} is wrong; this rank {whose} that token. What does "
            "each rank add to the sum?"
        )
    assert [call.kind for call in own.calls] == ["all_reduce"], who + (
        f"{_kinds(own.calls)}; one all_reduce is enough"
    )
    grad = weight.grad
    assert grad is not None, who + (
        "weight gets no gradient: all_reduce alone has no backward, g has"
    )
    assert _is_close(grad, whole.weight.grad.tensor_split(p)[rank]), who + (
        "the gradient of weight is wrong: what do the tokens of other ranks look up here?"
    )


# ---- 9.6

TOKENS = 12
VocabularyLoss = Callable[..., Tensor]


class _OwnLoss(NamedTuple):
    """What the learner's loss gave on one rank.

    Args:
        loss: [TOKENS].
        grad: Of this rank's logits; None if there is none.
        shifted: This rank's logits minus their own maximum, [TOKENS, columns]: what a loss sums
            whose ranks did not agree on one maximum.
        logits_kept: Whether the logits were left unchanged.
        forward, backward: What travelled.
    """

    loss: Tensor
    grad: Tensor | None
    shifted: Tensor
    logits_kept: bool
    forward: list[Call]
    backward: list[Call]


def _logits(shift: float, number: int) -> tuple[Tensor, Tensor]:
    """Whole logits of a group around `shift`, [TOKENS, VOCAB], and targets, [TOKENS]."""
    logits = _draw(70 + number, TOKENS, VOCAB) * 3 + shift
    generator = torch.Generator().manual_seed(80 + number)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    # one target on the first rank and one on the last, however many ranks there are
    targets[0] = 0
    targets[1] = VOCAB - 1
    return logits, targets


def _own_loss(loss: VocabularyLoss, shape: GridShape, shift: float) -> _OwnLoss:
    place = _place(shape)
    logits, targets = _logits(shift, place.number)
    parts = logits.tensor_split(place.p, -1)
    before = parts[place.rank].contiguous()
    first = sum(part.shape[-1] for part in parts[: place.rank])
    mine = before.clone().requires_grad_()
    with counted() as forward, without(tensor.vocab_parallel_cross_entropy):
        found = due(loss(mine, targets.clone(), first, place.group))
    backward: list[Call] = []
    if found.requires_grad and found.shape == (TOKENS,):
        with counted() as backward:
            found.sum().backward()
    return _OwnLoss(
        loss=found.detach(),
        grad=mine.grad,
        shifted=before - before.amax(-1, keepdim=True),
        logits_kept=torch.equal(mine.detach(), before),
        forward=forward,
        backward=backward,
    )


def vocabulary_loss(loss: VocabularyLoss, ranks: Ranks) -> None:
    """The learner's loss per token, from logits that are cut over the vocabulary.

    Args:
        loss: `loss(logits, targets, first, group)`: [T, columns] own logits, [T] targets, the
            number of the first own column, the group.
        ranks: Where it runs.
    """
    for shape in SHAPES:
        for shift in (0.0, 1000.0):
            try:
                results = _run(ranks, _own_loss, loss, shape, shift)
            except RankError as error:
                assert "index" not in str(error) or "out of" not in str(error), (
                    "a rank reads a column that it does not have: who has the logit of the target?"
                )
                raise
            for members in shape.groups("tp"):
                _check_group_loss([results[member] for member in members], members, shape, shift)


def _check_group_loss(
    results: Sequence[_OwnLoss], members: Sequence[int], shape: GridShape, shift: float
) -> None:
    logits, targets = _logits(shift, shape.coords(members[0])["dp"])
    logits.requires_grad_()
    expected = F.cross_entropy(logits, targets, reduction="none")
    expected.sum().backward()
    assert logits.grad is not None
    grads = logits.grad.tensor_split(shape.tp, -1)
    own_shifted = torch.cat([result.shifted for result in results], -1)
    separate_maxima = F.cross_entropy(own_shifted, targets, reduction="none")
    expected = expected.detach()
    for member, result, grad in zip(members, results, grads):
        who = _who(member, shape)
        _check_loss_shape(who, result.loss, shift, expected)
        _check_groups(who, [*result.forward, *result.backward], shape.tp)
        assert not _is_close(result.loss, separate_maxima), who + (
            "each rank subtracts a maximum of its own, so their sums have different units: "
            "agree on one maximum first"
        )
        _check_loss_values(who, result, targets, expected)
        _check_loss_gradient(who, result, grad)


def _check_loss_shape(who: str, found: Tensor, shift: float, expected: Tensor) -> None:
    assert found.shape == expected.shape, who + (
        f"the result is {list(found.shape)}, expected {list(expected.shape)}: one loss for each "
        "token"
    )
    assert found.isfinite().all(), who + (
        f"the loss is not finite with logits around {shift:g}: "
        "what do you subtract before you take the exponential?"
    )


def _check_loss_values(who: str, result: _OwnLoss, targets: Tensor, expected: Tensor) -> None:
    """The right numbers, from few bytes, and the logits unchanged."""
    found = result.loss
    worst = int((found - expected).abs().argmax())
    assert _is_close(found, expected), who + (
        f"token {worst} (target {targets[worst]}): {found[worst]:.4f}, "
        f"expected {expected[worst]:.4f}; which sums need the other ranks, "
        "and who has the logit of the target?"
    )
    assert result.logits_kept, who + "the logits were changed in place: backward will need them"
    numbers_per_token = sum(call.num_bytes for call in result.forward) / TOKENS / 8
    assert numbers_per_token <= 4, who + (
        f"{numbers_per_token:.0f} numbers per token travel; three are enough, "
        "the logits stay where they are"
    )


def _check_loss_gradient(who: str, result: _OwnLoss, expected: Tensor) -> None:
    """Softmax minus one at the target, on this rank's columns."""
    assert result.grad is not None, who + (
        "the loss is right, and no gradient reaches the logits: all_reduce alone has no backward"
    )
    assert not result.backward, who + (
        f"backward makes {_kinds(result.backward)}: nothing has to travel there"
    )
    assert _is_close(result.grad, expected), who + (
        "the loss is right, the gradient of the logits is "
        f"{_error(result.grad, expected):.0%} off: through which sums must it flow back?"
    )
