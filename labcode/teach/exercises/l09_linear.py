"""Exercises 9.2 to 9.4: linear layers, and Llama's MLP. The text of each assertion is a hint."""

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from labcode.comm.counting import Call, counted
from labcode.pool.ranks import Ranks
from labcode.teach.check import due
from labcode.teach.exercises.l09_groups import (
    SHAPES,
    Parameter,
    check_group_sizes,
    check_sums,
    draw,
    error_of,
    everywhere,
    is_close,
    kinds,
    one_tensor,
    parameters_of,
    refuse_ours,
    run_on,
    sent_in_backward,
    stand,
    watched_sums,
    who_is,
    written,
)
from labcode.topology import GridShape

# ---- 9.2 and 9.3

INPUTS = 8
OUTPUTS = 12
ROWS = 6  # tokens of an input [2, 3, ..]


class _OwnLayer(NamedTuple):
    """What a learner's layer has and does on one rank.

    Args:
        params: {name: parameter}; None if it is no nn.Module.
        y: Its output, [2, 3, ..].
        x_grad: Gradient of its input, None if there is none.
        forward, backward: What travelled.
        flops: Of all matrix products in forward.
        plain: Names of tensors that are no parameters.
        holds_whole: Whether something still holds the memory of the whole weight.
        layer_kept: Whether the layer that was handed in was left unchanged.
        x_kept: Whether the input was left unchanged.
        behind_autograd: Whether a sum was written into a tensor of the graph.
    """

    params: dict[str, Parameter] | None
    y: Tensor | None = None
    x_grad: Tensor | None = None
    forward: Sequence[Call] = ()
    backward: Sequence[Call] = ()
    flops: int = 0
    plain: Sequence[str] = ()
    holds_whole: bool = False
    layer_kept: bool = True
    x_kept: bool = True
    behind_autograd: bool = False


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
        layer.weight.copy_(draw(1, OUTPUTS, INPUTS))
        if bias:
            layer.bias.copy_(draw(2, OUTPUTS))
    return layer


def _linear_input(number: int) -> tuple[Tensor, Tensor]:
    """x and the gradient of y that the group with this number reads."""
    return draw(10 + number, 2, 3, INPUTS), draw(20 + number, 2, 3, OUTPUTS)


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
    place = stand(shape)
    whole = _whole_linear(bias)
    memory = StorageWeakRef(whole.weight.untyped_storage())
    layer = due(make(whole, place.group))
    layer_kept = _is_unchanged(whole, bias)
    del whole
    refuse_ours(layer)
    is_module = isinstance(layer, nn.Module)
    plain = _plain_tensors(layer) if is_module else []
    has_its_parts = is_module and _has_its_parts(layer, place.p, bias, columns)
    if not everywhere(has_its_parts):
        params = parameters_of(layer) if is_module else None
        return _OwnLayer(params, plain=plain, layer_kept=layer_kept)
    if not memory.expired():
        gc.collect()
    x, grad_y = _linear_input(place.number)
    if columns:
        grad_y = grad_y.chunk(place.p, -1)[place.rank]
    else:
        x = x.chunk(place.p, -1)[place.rank].clone()
    before = x.clone()
    x.requires_grad_()
    flops = FlopCounterMode(display=False)
    with counted() as forward, flops, watched_sums() as sums:
        y = one_tensor(layer(x))
    backward: list[Call] = []
    if y.shape == grad_y.shape and y.requires_grad:
        backward = sent_in_backward(y, grad_y)
    return _OwnLayer(
        params=parameters_of(layer),
        y=y.detach(),
        x_grad=x.grad,
        forward=forward,
        backward=backward,
        flops=flops.get_total_flops(),
        plain=plain,
        holds_whole=not memory.expired(),
        layer_kept=layer_kept,
        x_kept=torch.equal(x.detach(), before),
        behind_autograd=sums.behind_autograd,
    )


def _is_unchanged(layer: nn.Linear, bias: bool) -> bool:
    """Whether a whole layer still is as `_whole_linear` makes it."""
    found = [param.detach() for param in layer.parameters()]
    expected = [param.detach() for param in _whole_linear(bias).parameters()]
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def _plain_tensors(module: nn.Module) -> list[str]:
    names = [name for name, _ in module.named_buffers()]
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            names.append(name)
    return names


def _has_its_parts(layer: nn.Module, p: int, bias: bool, columns: bool) -> bool:
    """Whether the shapes are those of a part; if not, to run the layer would hide that."""
    shapes = {name: tuple(param.shape) for name, param in layer.named_parameters()}
    wanted: dict[str, tuple[int, ...]] = {}
    wanted["weight"] = (OUTPUTS // p, INPUTS) if columns else (OUTPUTS, INPUTS // p)
    if bias:
        wanted["bias"] = (OUTPUTS // p,) if columns else (OUTPUTS,)
    return all(shapes.get(name) == shape for name, shape in wanted.items())


def column_parallel(make: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `ColumnParallelLinear(layer, group)`: whole input, own output features."""
    written(make, "MyColumnParallelLinear")
    _check_linear(make, ranks, columns=True)


def row_parallel(make: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `RowParallelLinear(layer, group)`: own input features, whole output."""
    written(make, "MyRowParallelLinear")
    _check_linear(make, ranks, columns=False)


def _check_linear(make: Callable[..., Any], ranks: Ranks, columns: bool) -> None:
    for shape in SHAPES:
        for bias in (True, False):
            results = run_on(ranks, shape, _own_linear, make, bias, columns)
            _check_results(results, shape, bias, columns)


def _check_results(
    results: Sequence[_OwnLayer], shape: GridShape, bias: bool, columns: bool
) -> None:
    note = "" if bias else "a layer without bias, "
    # A wrong part on one rank spoils the numbers of the others, so the parts of all come first.
    for rank, own in enumerate(results):
        coords = shape.coords(rank)
        truth = _true_linear(coords["dp"], bias)
        who = note + who_is(rank, shape)
        _check_parameters(who, own, truth, coords["tp"], shape.tp, columns)
    for rank, own in enumerate(results):
        coords = shape.coords(rank)
        truth = _true_linear(coords["dp"], bias)
        who = note + who_is(rank, shape)
        assert own.x_kept, who + "forward has changed its input, which belongs to the caller"
        if columns:
            _check_columns(who, own, truth, coords["tp"], shape.tp)
        else:
            _check_rows(who, own, truth, coords["tp"], shape.tp)
        _check_gradients(who, own, truth, coords["tp"], shape.tp, columns)
        share = own.flops / (2 * ROWS * INPUTS * OUTPUTS / shape.tp)
        assert share < 1.01, who + (
            f"forward multiplies {share:.1f} times as much as this rank's share: which product is "
            "larger than it need be?"
        )


def _check_parameters(
    who: str, own: _OwnLayer, truth: _Truth, rank: int, p: int, columns: bool
) -> None:
    """The layer holds its part, and nothing of the rest."""
    assert own.params is not None, who + "what the class makes is no nn.Module"
    for name in ("weight", "bias"):
        assert name not in own.plain, who + (
            f"{name} is a tensor and not an nn.Parameter, so no optimizer would find it"
        )
    assert own.layer_kept, who + (
        "`layer` itself has been changed, and it belongs to the caller: make new parameters"
    )
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
    assert not own.holds_whole, who + (
        "something in the layer still holds the whole weight, whose memory cannot be freed"
    )


def _check_bias(
    who: str,
    params: dict[str, Parameter],
    truth: _Truth,
    rank: int,
    p: int,
    columns: bool,
) -> None:
    if truth.bias is None:
        assert "bias" not in params, who + "there is a bias all the same"
        return
    assert "bias" in params, who + (
        "there is no parameter `bias`; the table of this section says what each rank keeps of it"
    )
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
    check_group_sizes(who, [*own.forward, *own.backward], p)
    assert own.y.shape != truth.y.shape, who + (
        "the output is whole: this layer leaves each rank its own output features"
    )
    assert own.y.shape == wanted.shape, who + (
        f"the output is {list(own.y.shape)}, expected {list(wanted.shape)}"
    )
    if truth.bias is not None:
        without = wanted - truth.bias.chunk(p)[rank]
        assert not is_close(own.y, without), who + "the bias is not added"
    assert not own.forward, who + f"{kinds(own.forward)} in forward: nothing has to travel there"
    assert is_close(own.y, wanted), who + (
        "the output has other values than these output features of the whole layer"
    )
    assert own.backward, who + (
        "nothing travels in backward: the gradient of x holds the part of this rank alone"
    )
    assert [call.kind for call in own.backward] == ["all_reduce"], who + (
        f"{kinds(own.backward)} in backward; one all_reduce is enough"
    )


def _check_rows(who: str, own: _OwnLayer, truth: _Truth, rank: int, p: int) -> None:
    assert own.y is not None
    check_group_sizes(who, [*own.forward, *own.backward], p)
    assert own.y.shape == truth.y.shape, who + (
        f"the output is {list(own.y.shape)}, expected {list(truth.y.shape)}"
    )
    assert own.forward, who + (
        "nothing travels in forward: the output is the summand of this rank alone"
    )
    if truth.bias is not None:
        without = truth.y - truth.bias
        assert not is_close(own.y, without), who + "the bias is not added"
        assert not is_close(own.y, truth.y + (p - 1) * truth.bias), who + (
            f"the output is too large by {p - 1} biases: when is the bias added?"
        )
    assert is_close(own.y, truth.y), who + (
        "the output has other values than that of the whole layer"
    )
    check_sums(who, own.behind_autograd)
    assert [call.kind for call in own.forward] == ["all_reduce"], who + (
        f"{kinds(own.forward)} in forward; one all_reduce is enough"
    )
    assert not own.backward, who + (
        f"{kinds(own.backward)} in backward: each rank has the gradient of the sum already"
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
    assert is_close(own.x_grad, x_grad), who + (
        f"the gradient of x is {error_of(own.x_grad, x_grad):.0%} off"
    )
    wanted = {"weight": truth.weight_grad.chunk(p, dim)[rank]}
    if truth.bias_grad is not None:
        wanted["bias"] = truth.bias_grad.chunk(p)[rank] if columns else truth.bias_grad
    for name, expected in wanted.items():
        grad = own.params[name].grad
        assert grad is not None, who + f"{name} gets no gradient: is it used, and a parameter?"
        assert is_close(grad, expected), who + (
            f"the gradient of {name} is {error_of(grad, expected):.0%} off"
        )


# ---- 9.4

SWIGLU_SIZES = (16, 48)  # H and F


WEIGHTS = ("gate", "up", "down")
ARGUMENTS = ("x", *WEIGHTS)


class _OwnSwiglu(NamedTuple):
    """What the learner's MLP of Llama did on one rank.

    Args:
        y: Its output.
        x_grad: Gradient of x, or None.
        weight_grads: Of gate, up and down, each the whole tensor, or None.
        forward, backward: What travelled.
        flops: Of all matrix products in forward.
        changed: Names of the arguments that were not left unchanged.
        behind_autograd: Whether a sum was written into a tensor of the graph.
    """

    y: Tensor
    x_grad: Tensor | None
    weight_grads: list[Tensor | None]
    forward: list[Call]
    backward: list[Call]
    flops: int
    changed: list[str]
    behind_autograd: bool


def _swiglu_tensors(number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [6, H] of a group, gate and up [F, H], down [H, F]."""
    hidden, inside = SWIGLU_SIZES
    x = draw(30 + number, 6, hidden)
    gate = draw(40, inside, hidden) / hidden**0.5
    up = draw(41, inside, hidden) / hidden**0.5
    down = draw(42, hidden, inside) / inside**0.5
    return x, gate, up, down


def _whole_swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _mistaken_swiglus(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> list[tuple[Tensor, str]]:
    """The results of other formulas on one process, and what is said about each."""
    a = x @ gate.T
    b = x @ up.T
    exchanged = (
        "the cuts are right, and gate and up have changed places: to which of them does silu "
        "belong?"
    )
    elsewhere = "the cuts are right, and the formula is not: of what is silu taken?"
    return [
        (a * F.silu(b) @ down.T, exchanged),
        (F.silu(a * b) @ down.T, elsewhere),
        (F.silu(a) * F.silu(b) @ down.T, elsewhere),
        (a * b @ down.T, elsewhere),
        (torch.sigmoid(a) * b @ down.T, elsewhere),
    ]


def _own_swiglu(swiglu: Callable[..., Tensor], shape: GridShape) -> _OwnSwiglu:
    place = stand(shape)
    x, *weights = _swiglu_tensors(place.number)
    leaves = dict(zip(ARGUMENTS, (x, *weights)))
    before = {name: leaf.clone() for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    flops = FlopCounterMode(display=False)
    with counted() as forward, flops, watched_sums() as sums:
        y = one_tensor(swiglu(x, *weights, place.group))
    changed = [name for name in ARGUMENTS if not torch.equal(leaves[name].detach(), before[name])]
    backward: list[Call] = []
    if y.requires_grad and y.shape == x.shape and not changed:
        backward = sent_in_backward(y.square().sum())
    return _OwnSwiglu(
        y=y.detach(),
        x_grad=x.grad,
        weight_grads=[weight.grad for weight in weights],
        forward=forward,
        backward=backward,
        flops=flops.get_total_flops(),
        changed=changed,
        behind_autograd=sums.behind_autograd,
    )


class _TrueSwiglu(NamedTuple):
    """The same on one process.

    Args:
        y: The output.
        mistaken: What would come out of formulas that are taken for it, with a hint for each.
        x_grad: Gradient of x.
        weight_grads: Of gate, up and down.
    """

    y: Tensor
    mistaken: list[tuple[Tensor, str]]
    x_grad: Tensor
    weight_grads: list[Tensor]


def _true_swiglu(number: int) -> _TrueSwiglu:
    x, gate, up, down = _swiglu_tensors(number)
    mistaken = _mistaken_swiglus(x, gate, up, down)
    leaves = (x, gate, up, down)
    for leaf in leaves:
        leaf.requires_grad_()
    y = _whole_swiglu(x, gate, up, down)
    x_grad, *weight_grads = torch.autograd.grad(y.square().sum(), leaves)
    return _TrueSwiglu(y.detach(), mistaken, x_grad, weight_grads)


def swiglu(answer: Callable[..., Tensor], ranks: Ranks) -> None:
    """The learner's `my_swiglu(x, gate, up, down, group)`, which gets the whole weights."""
    written(answer, "my_swiglu")
    hidden, inside = SWIGLU_SIZES
    whole_flops = 3 * 2 * 6 * hidden * inside
    for shape in SHAPES:
        results = run_on(ranks, shape, _own_swiglu, answer)
        truths = [_true_swiglu(shape.coords(rank)["dp"]) for rank in range(ranks.n)]
        for rank, own in enumerate(results):
            share = own.flops / (whole_flops / shape.tp)
            _check_swiglu_output(who_is(rank, shape), own, truths[rank], share, shape.tp)
        for members in shape.groups("tp"):
            truth = truths[members[0]]
            _check_not_doubled([results[member] for member in members], members, shape, truth)
        for rank, own in enumerate(results):
            _check_swiglu_gradient(who_is(rank, shape), own, truths[rank])
        for members in shape.groups("tp"):
            truth = truths[members[0]]
            _check_weight_gradients([results[member] for member in members], members, shape, truth)


def _check_not_doubled(
    results: Sequence[_OwnSwiglu], members: Sequence[int], shape: GridShape, truth: _TrueSwiglu
) -> None:
    """The gradient of down, which lies above f, is not p times that of one process."""
    grads = [own.weight_grads[-1] for own in results]
    if any(grad is None for grad in grads):
        return
    total = torch.stack([grad for grad in grads if grad is not None]).sum(0)
    assert not is_close(total, shape.tp * truth.weight_grads[-1]), who_is(members[0], shape) + (
        f"the output is right, and every gradient is {shape.tp} times too long, also that of down: "
        "what happens in backward where the sum is made?"
    )


def _check_weight_gradients(
    results: Sequence[_OwnSwiglu], members: Sequence[int], shape: GridShape, truth: _TrueSwiglu
) -> None:
    """Each rank has the gradient of its part; together they are that of the whole weight."""
    for place, name in enumerate(WEIGHTS):
        total = torch.zeros_like(truth.weight_grads[place])
        for member, own in zip(members, results):
            grad = own.weight_grads[place]
            assert grad is not None, who_is(member, shape) + (
                f"{name} gets no gradient: what cuts it off from autograd?"
            )
            total += grad
        assert is_close(total, truth.weight_grads[place]), who_is(members[0], shape) + (
            f"the output is right, the gradient of {name} is not"
        )


def _check_swiglu_output(
    who: str, own: _OwnSwiglu, truth: _TrueSwiglu, share: float, p: int
) -> None:
    """The right numbers, from this rank's share of the products."""
    assert not own.changed, who + (
        f"the call has changed {' and '.join(own.changed)}: the arguments belong to the caller"
    )
    assert own.y.shape == truth.y.shape, who + (
        f"the output is {list(own.y.shape)}, expected {list(truth.y.shape)}"
    )
    check_group_sizes(who, [*own.forward, *own.backward], p)
    assert own.forward, who + "nothing travels forward: is the output a sum over the ranks?"
    for mistaken, hint in truth.mistaken:
        assert not is_close(own.y, mistaken), who + hint
    assert is_close(own.y, truth.y), who + (
        f"the output is {error_of(own.y, truth.y):.0%} off: "
        "which rows of gate and up and which columns of down fit together?"
    )
    check_sums(who, own.behind_autograd)
    assert share < 1.01, who + (
        f"it multiplies {share:.1f} times as much as its share: which of the three products "
        "is computed whole?"
    )


def _check_swiglu_gradient(who: str, own: _OwnSwiglu, truth: _TrueSwiglu) -> None:
    """The gradient of x, and one sum each way."""
    assert own.x_grad is not None, who + (
        "no gradient reaches x: all_reduce alone has no backward, f and g have"
    )
    assert is_close(own.x_grad, truth.x_grad), who + (
        "the output is right, the gradient of x is not: it enters two products on each rank"
    )
    for name, calls in (("forward", own.forward), ("backward", own.backward)):
        assert [call.kind for call in calls] == ["all_reduce"], who + (
            f"{name} makes {kinds(calls)}, one all_reduce is enough: where does x enter?"
        )
