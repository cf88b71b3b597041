"""Checks of lesson 09, tensor parallelism.

Every answer runs on all four ranks, and then on three of them.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from course.answer import Exercise, Hint, due
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
)
from course.exercises.simulated import Outcome, here
from course.pool.ranks import Ranks
from labcode.comm.collectives import copy_to, reduce_from
from labcode.comm.grid import group_of
from labcode.parallel import tensor as parallel

OURS = own_answers(
    parallel.ColumnParallelLinear.__init__,
    parallel.RowParallelLinear.__init__,
    parallel.VocabParallelEmbedding.__init__,
    parallel.vocab_parallel_cross_entropy,
)


def _draw(seed: int, *shape: int) -> Tensor:
    """Normal random numbers in float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _sent(outcome: Outcome, rank: int, block: str) -> str:
    """What a rank sends in a block, in words: "2 all_reduce, 1 all_gather"; "" for nothing."""
    kinds = [one.kind for one in outcome.of(rank) if one.block == block]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


# ---- forward and backward of an answer


class _Products(TorchDispatchMode):
    """Counts the operations of matrix products.

    `FlopCounterMode` does it as well, but hooks into the modules of all threads.
    """

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


class _Graph(TorchFunctionMode):
    """Keeps the tensors of the graph, to see whether somebody has written into them unnoticed.

    `dist.all_reduce(y)` writes like that, also into y.detach(): y has other numbers afterwards, and
    for autograd it still has the same version.
    """

    def __init__(self) -> None:
        super().__init__()
        self._results: list[tuple[Tensor, Tensor, int]] = []  # tensor, copy, version

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if type(one) is Tensor and one.grad_fn is not None:
                self._results.append((one, one.detach().clone(), one._version))
        return result

    def is_overwritten(self) -> bool:
        """Whether a tensor has changed of which autograd knows no change."""
        for result, before, version in self._results:
            is_same = torch.allclose(result, before, rtol=0, atol=0, equal_nan=True)
            if result._version == version and not is_same:
                return True
        return False


class _Step(NamedTuple):
    """Forward and backward of an answer on one rank, or of the truth on one process.

    Args:
        y: The output.
        grads: {name of an argument or a parameter: its gradient}, where there is one.
        flops: FLOPs of all matrix products in forward.
        is_overwritten: Whether a sum was written into a tensor of the graph.
    """

    y: Tensor
    grads: dict[str, Tensor]
    flops: int = 0
    is_overwritten: bool = False


BEHIND_AUTOGRAD = (
    "a tensor was written to, and autograd does not know that it has changed: `dist.all_reduce` "
    "does so, and writing through `.data`. What comes out is right by accident at most "
    "(section 1): is an f or a g missing, or another way of writing?"
)


def _step(
    answer: Callable[..., Any],
    arguments: Mapping[str, Tensor],
    *others: Any,
    grad_y: Tensor,
    about_shape: str = "",
) -> _Step:
    """Run an answer forward and backward; it leaves its arguments as they are.

    Args:
        answer: Called with the arguments and the others.
        arguments: Arguments by name.
        others: No tensors.
        grad_y: Gradient of the output.
        about_shape: What is said of a wrong shape of the output.
    """
    given = {}
    for name, value in arguments.items():
        given[name] = value.clone().requires_grad_(value.is_floating_point())
    products = _Products()
    graph = _Graph()
    with here().block("forward"), products, graph:
        y = answer(*given.values(), *others)
    tensor(y)
    is_overwritten = graph.is_overwritten()
    changed = [name for name in given if not torch.equal(given[name], arguments[name])]
    shapes = f"{list(y.shape)}, expected is {list(grad_y.shape)}"
    mistakes = {
        f"the call has changed {' and '.join(changed)}: the arguments belong to the caller": (
            changed
        ),
        f"the output is {shapes}{about_shape}": y.shape != grad_y.shape,
    }
    refuse(mistakes)
    if y.requires_grad:
        with here().block("backward"):
            y.backward(grad_y)
    return _Step(y.detach().clone(), _gradients(given), products.flops, is_overwritten)


def _gradients(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients that there are; a functional collective waits when its result is copied."""
    return {name: one.grad.clone() for name, one in tensors.items() if one.grad is not None}


@contextlib.contextmanager
def _inside_own_part(hint: str) -> Iterator[None]:
    """A hint in place of PyTorch's error for an index that this rank's part does not have."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        refuse({hint: "index" in str(error) and "out of" in str(error)})
        raise


# ---- 9.1


class _Applied(NamedTuple):
    """What went into a Function on one rank, and what came out, forward and backward."""

    x: Tensor
    y: Tensor
    grad_y: Tensor
    grad_x: Tensor


def _apply(group: dist.ProcessGroup, name: str, function: Any) -> _Applied:
    rank = dist.get_rank()
    x = torch.arange(6.0).view(2, 3) + 10 * rank
    grad_y = torch.ones(2, 3) + 7.0**rank
    given = x.clone().requires_grad_()
    handed = grad_y.clone()
    y = function.apply(given, group)
    tensor(y, x.shape)
    (grad_x,) = torch.autograd.grad(y, given, handed, allow_unused=True)
    mistakes = {
        "forward wrote into its input: the sum needs a tensor of its own": (
            not torch.equal(given, x)
        ),
        "backward wrote into the gradient it was handed: the sum needs a tensor of its own": (
            not torch.equal(handed, grad_y)
        ),
        "no gradient comes back": grad_x is None,
    }
    refuse(mistakes, f"{name}: ")
    # The result of a functional collective waits when it is copied.
    return _Applied(x, y.detach().clone(), grad_y, grad_x.clone())


def _check_pair(
    name: str, results: Sequence[_Applied], outcome: Outcome, members: Sequence[int]
) -> None:
    """One direction is the identity, and the other one the sum over the group."""
    sum_x = torch.stack([one.x for one in results]).sum(0)
    sum_grad = torch.stack([one.grad_y for one in results]).sum(0)
    for rank, found in zip(members, results):
        case = f"on rank {rank}: {name}: "
        refuse(careless(outcome.of(rank)), case)
        if name == "CopyTo":
            y = found.x
            grad_x = sum_grad
            forward = {"forward is the identity, nothing travels": sum_x}
            backward = {
                "backward hands on this rank's own part; the paths through the other ranks are "
                "missing": found.grad_y
            }
        else:
            y = sum_x
            grad_x = found.grad_y
            forward = {"forward has to sum over the ranks": found.x}
            backward = {
                f"backward sums as well, every gradient below is {len(members)} times too long: "
                "each rank has the whole already": sum_grad
            }
        gives = f"forward gives {found.y[0].tolist()}, expected is {y[0].tolist()}"
        diagnose(case, found.y, y, forward, gives)
        gives = f"backward gives {found.grad_x[0].tolist()}, expected is {grad_x[0].tolist()}"
        diagnose(case, found.grad_x, grad_x, backward, gives)


def _apply_twice(group: dist.ProcessGroup, name: str, function: Any) -> None:
    """Applied over this rank alone as well, in one graph, it gives the same again."""
    x = torch.arange(3.0, requires_grad=True)
    once = function.apply(x, group)
    (grad_once,) = torch.autograd.grad(once, x, torch.ones(3))
    alone = group_of([dist.get_rank()], members_only=True)
    twice = function.apply(function.apply(x, group), alone)
    (grad_twice,) = torch.autograd.grad(twice, x, torch.ones(3))
    is_same = torch.equal(once, twice) and torch.equal(grad_once, grad_twice)
    hint = (
        f"{name}: used once it is right; applied over the group and then over this rank alone, in "
        "one graph, the two calls get in each other's way. Where is the group kept: what is on "
        "the class belongs to all calls"
    )
    refuse({hint: not is_same})


def copy_and_reduce(f: Any, g: Any, ranks: Ranks | None = None) -> str:
    """The learner's Functions f (identity, then a sum) and g (a sum, then identity).

    Args:
        f, g: Called as `apply(x, group)`.
        ranks: Ranks for the last run.
    """
    said = ""
    for name, function in (("CopyTo", f), ("ReduceFrom", g)):
        judge = functools.partial(_check_pair, name)
        ours = own_answers(copy_to, reduce_from)
        outcome = in_groups(_apply, name, function, judge=judge, ours=ours)
        in_groups(_apply_twice, name, function, ours=ours)
        said = confirm_in_group(ranks, outcome, _apply, name, function)
    return said


# ---- 9.2 and 9.3


def _made(
    make: Callable[..., Any],
    make_whole: Callable[[], nn.Module],
    group: dist.ProcessGroup,
    all_parts: Mapping[str, Sequence[Tensor]],
    about: Mapping[str, str],
) -> nn.Module:
    """What the learner's class makes of a whole module: this rank's parts, and nothing of the rest.

    Args:
        make: The class.
        make_whole: Makes what it is given.
        group: The ranks that share it.
        all_parts: {name of a parameter: the part of each rank}.
        about: {name of a parameter: what is said of a wrong shape}.
    """
    given = make_whole()
    memory = StorageWeakRef(given.get_parameter("weight").untyped_storage())
    module = due(make(given, group))
    whole = make_whole()
    is_changed = not _are_equal(given, whole)
    del given
    if not isinstance(module, nn.Module):
        raise Hint("what the class makes is no nn.Module")
    argument = "embedding" if isinstance(whole, nn.Embedding) else "layer"
    mistakes = {
        f"`{argument}` itself has been changed, and it belongs to the caller: make new "
        "parameters": is_changed
    }
    shape = list(whole.get_parameter("weight").shape)
    for name, param in module.named_parameters():
        hint = f"{name} is the whole weight, {shape}: each rank keeps a part"
        mistakes[hint] = list(param.shape) == shape
    refuse(mistakes)
    for name, parts in all_parts.items():
        _check_part(module, name, parts, group.rank(), about[name])
    if not memory.expired():
        gc.collect()
    hint = "something in it still holds the whole weight, whose memory cannot be freed"
    refuse({hint: not memory.expired()})
    return module


def _are_equal(one: nn.Module, other: nn.Module) -> bool:
    some = one.state_dict()
    others = other.state_dict()
    return some.keys() == others.keys() and all(
        torch.equal(some[name], others[name]) for name in some
    )


def _check_part(
    module: nn.Module, name: str, parts: Sequence[Tensor], number: int, about: str
) -> None:
    """A parameter is the part of the rank with this number, in memory of its own."""
    params = dict(module.named_parameters())
    is_plain = name not in params and isinstance(getattr(module, name, None), Tensor)
    names = ", ".join(params) or "none"
    mistakes = {
        f"{name} is a tensor and not an nn.Parameter, so no optimizer would find it": is_plain,
        f"there is no parameter `{name}`, but {names}: what does each rank keep?": (
            name not in params
        ),
    }
    refuse(mistakes)
    found = params[name]
    own = parts[number]
    others = [other for other, part in enumerate(parts) if torch.equal(found, part)]
    whose = f"what is no rank's part of the whole {name}"
    if others:
        whose = f"the part of number {others[0]}, not its own part"
    mistakes = {
        f"{name} is {list(found.shape)}, expected is {list(own.shape)}: {about}": (
            found.shape != own.shape
        ),
        f"{name} holds {whose}": number not in others,
        f"{name} is a view of the whole tensor, whose memory cannot be freed: it needs a copy": (
            found.untyped_storage().nbytes() > found.nbytes
        ),
    }
    refuse(mistakes)


INPUTS = 12
OUTPUTS = 24


def _whole_linear(has_bias: bool) -> nn.Linear:
    layer = nn.Linear(INPUTS, OUTPUTS, bias=has_bias, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(_draw(1, OUTPUTS, INPUTS))
        if has_bias:
            layer.bias.copy_(_draw(2, OUTPUTS))
    return layer


def _linear_arguments() -> tuple[Tensor, Tensor]:
    """The whole input, and the gradient of the whole output."""
    return _draw(10, 2, 3, INPUTS), _draw(20, 2, 3, OUTPUTS)


def _linear_step(
    group: dist.ProcessGroup, make: Callable[..., Any], is_column: bool, has_bias: bool
) -> _Step:
    """Build the learner's layer, and run it forward and backward."""
    p = group.size()
    number = group.rank()
    whole = _whole_linear(has_bias)
    all_parts = {"weight": whole.weight.detach().chunk(p, 0 if is_column else 1)}
    if has_bias:
        bias = whole.bias.detach()
        all_parts["bias"] = bias.chunk(p) if is_column else (bias,) * p
    cut = "outputs" if is_column else "inputs"
    about = {
        "weight": f"PyTorch stores [outputs, inputs], and the {cut} are shared out",
        "bias": "to which output features of this rank is it added?",
    }
    layer = _made(make, functools.partial(_whole_linear, has_bias), group, all_parts, about)
    params = dict(layer.named_parameters())
    refuse({"there is a bias all the same": not has_bias and "bias" in params})
    x, grad_y = _linear_arguments()
    if is_column:
        grad_y = grad_y.chunk(p, -1)[number]
        about_shape = ": this layer leaves each rank its own output features"
    else:
        x = x.chunk(p, -1)[number]
        about_shape = ""
    step = _step(layer, {"x": x}, grad_y=grad_y, about_shape=about_shape)
    step.grads.update(_gradients({name: params[name] for name in all_parts}))
    return step


def _check_linear(
    is_column: bool,
    has_bias: bool,
    results: Sequence[_Step],
    outcome: Outcome,
    members: Sequence[int],
) -> None:
    """The right output and gradients, with one sum, from a share of the products."""
    p = len(members)
    whole = _whole_linear(has_bias)
    x, grad_y = _linear_arguments()
    truth = _step(whole, {"x": x}, grad_y=grad_y)
    truth.grads.update(_gradients(dict(whole.named_parameters())))
    bias = whole.bias.detach() if has_bias else torch.zeros(OUTPUTS, dtype=torch.float64)
    cut_dims = {"weight": 0, "bias": 0} if is_column else {"x": -1, "weight": 1}
    for number, (rank, found) in enumerate(zip(members, results)):
        case = f"on rank {rank}: " + ("" if has_bias else "of a layer without bias: ")
        refuse(careless(outcome.of(rank)), case)
        forward = _sent(outcome, rank, "forward")
        backward = _sent(outcome, rank, "backward")
        if is_column:
            y = truth.y.chunk(p, -1)[number]
            hint = f"{forward} in forward: nothing has to travel there"
            refuse({hint: forward}, case)
            values = {"the bias is not added": y - bias.chunk(p)[number]}
            otherwise = "the output has other values than these output features of the whole layer"
            calls = {
                "nothing travels in backward: the gradient of x holds the part of this rank "
                "alone": not backward,
                f"{backward} in backward; one all_reduce is enough": backward != "1 all_reduce",
            }
        else:
            y = truth.y
            hint = "nothing travels in forward: the output is the summand of this rank alone"
            refuse({hint: not forward}, case)
            values = {
                "the bias is not added": y - bias,
                f"the output is too large by {p - 1} biases: when is the bias added?": (
                    y + (p - 1) * bias
                ),
            }
            otherwise = "the output has other values than that of the whole layer"
            calls = {
                f"{forward} in forward; one all_reduce is enough": forward != "1 all_reduce",
                f"{backward} in backward: each rank has the gradient of the sum already": backward,
            }
        diagnose(case, found.y, y, values, otherwise)
        share = found.flops * p / truth.flops
        mistakes = {
            "no gradient reaches the input: all_reduce alone has no backward, f and g have": (
                "x" not in found.grads
            ),
            BEHIND_AUTOGRAD: found.is_overwritten,
            **calls,
            f"forward multiplies {share:.1f} times as much as this rank's share: which product is "
            "larger than it need be?": share > 1.01,
        }
        refuse(mistakes, case)
        for name, grad in truth.grads.items():
            own = grad.chunk(p, cut_dims[name])[number] if name in cut_dims else grad
            hint = f"{name} gets no gradient: is it used, and a parameter?"
            refuse({hint: name not in found.grads}, case)
            otherwise = f"the gradient of {name} is {{off:.0%}} off"
            diagnose(case, found.grads[name], own, {}, otherwise)


def _linear(make: Callable[..., Any], is_column: bool, ranks: Ranks | None) -> str:
    for has_bias in (True, False):
        judge = functools.partial(_check_linear, is_column, has_bias)
        outcome = in_groups(_linear_step, make, is_column, has_bias, judge=judge, ours=OURS)
    return confirm_in_group(ranks, outcome, _linear_step, make, is_column, has_bias)


def column_parallel(make: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `ColumnParallelLinear(layer, group)`: whole input, own output features."""
    return _linear(make, True, ranks)


def row_parallel(make: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `RowParallelLinear(layer, group)`: own input features, whole output."""
    return _linear(make, False, ranks)


# ---- 9.4

HIDDEN = 16
INSIDE = 48
WEIGHTS = ("gate", "up", "down")


def _swiglu_arguments() -> dict[str, Tensor]:
    """x [6, H], gate and up [F, H], down [H, F]."""
    return {
        "x": _draw(30, 6, HIDDEN),
        "gate": _draw(40, INSIDE, HIDDEN) / HIDDEN**0.5,
        "up": _draw(41, INSIDE, HIDDEN) / HIDDEN**0.5,
        "down": _draw(42, HIDDEN, INSIDE) / INSIDE**0.5,
    }


def _whole_swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _swiglu_step(group: dist.ProcessGroup, swiglu: Callable[..., Any]) -> _Step:
    return _step(swiglu, _swiglu_arguments(), group, grad_y=_draw(31, 6, HIDDEN))


def _check_swiglu(results: Sequence[_Step], outcome: Outcome, members: Sequence[int]) -> None:
    """The right numbers, from a share of the products on each rank, with one sum each way."""
    p = len(members)
    truth = _step(_whole_swiglu, _swiglu_arguments(), grad_y=_draw(31, 6, HIDDEN))
    x, gate, up, down = _swiglu_arguments().values()
    a = x @ gate.T
    b = x @ up.T
    other_formulas = (
        F.silu(a * b) @ down.T,
        (F.silu(a) * F.silu(b)) @ down.T,
        (a * b) @ down.T,
        (torch.sigmoid(a) * b) @ down.T,
    )
    for rank, found in zip(members, results):
        case = f"on rank {rank}: "
        hint = "nothing travels forward: is the output a sum over the ranks?"
        refuse({hint: not _sent(outcome, rank, "forward"), **careless(outcome.of(rank))}, case)
        mistakes = {
            "the cuts are right, and gate and up have changed places: to which of them does silu "
            "belong?": (a * F.silu(b)) @ down.T,
            "the cuts are right, and the formula is not: of what is silu taken?": any(
                distance(found.y, other) < TOLERANCE for other in other_formulas
            ),
        }
        otherwise = (
            "the output is {off:.0%} off: which rows of gate and up and which columns of down fit "
            "together?"
        )
        diagnose(case, found.y, truth.y, mistakes, otherwise)
        share = found.flops * p / truth.flops
        mistakes = {
            "no gradient reaches x: all_reduce alone has no backward, f and g have": (
                "x" not in found.grads
            ),
            BEHIND_AUTOGRAD: found.is_overwritten,
            f"it multiplies {share:.1f} times as much as its share: which of the three products "
            "is computed whole?": share > 1.01,
        }
        for name in WEIGHTS:
            hint = f"{name} gets no gradient: what cuts it off from autograd?"
            mistakes[hint] = name not in found.grads
        refuse(mistakes, case)
    # A rank has the gradients of its own parts, and zeros elsewhere.
    sums = {}
    for name in WEIGHTS:
        sums[name] = torch.stack([found.grads[name] for found in results]).sum(0)
    hint = (
        f"the output is right, and every gradient is {p} times too long, also that of down: what "
        "happens in backward where the sum is made?"
    )
    refuse({hint: p * truth.grads["down"]}, found=sums["down"])
    for rank, found in zip(members, results):
        case = f"on rank {rank}: "
        otherwise = (
            "the output is right, the gradient of x is not: it enters two products on each rank"
        )
        diagnose(case, found.grads["x"], truth.grads["x"], {}, otherwise)
        for block in ("forward", "backward"):
            sent = _sent(outcome, rank, block)
            hint = f"{block} makes {sent}, one all_reduce is enough: where does x enter?"
            refuse({hint: sent != "1 all_reduce"}, case)
    for name, grad in sums.items():
        otherwise = f"the output is right, the gradient of {name} is not"
        diagnose("", grad, truth.grads[name], {}, otherwise)


def swiglu(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `my_swiglu(x, gate, up, down, group)`, which gets the whole weights."""
    outcome = in_groups(_swiglu_step, answer, judge=_check_swiglu)
    return confirm_in_group(ranks, outcome, _swiglu_step, answer)


# ---- 9.5

# 83 on 4 ranks: only the last has fewer rows. 82: the last two, so it counts how long each part is.
VOCABS = (83, 82)
# Whether all tokens of the batch belong to the first rank: then the others too have to come.
BATCHES = {"": False, ", in a batch with tokens of the first rank alone": True}
WIDTH = 5


def _whole_embedding(vocab: int) -> nn.Embedding:
    return nn.Embedding.from_pretrained(_draw(60, vocab, WIDTH), freeze=False)


def _tokens(vocab: int, p: int, *shape: int, of_the_first: bool = False) -> Tensor:
    """Random tokens, among them the first and the last one of each rank; or all of the first."""
    generator = torch.Generator().manual_seed(50)
    tokens = torch.randint(vocab, shape, generator=generator)
    if of_the_first:
        return tokens % (vocab // p)
    for number, part in enumerate(torch.arange(vocab).tensor_split(p)):
        tokens.view(-1)[2 * number : 2 * number + 2] = part[[0, -1]]
    return tokens


def _embed(group: dist.ProcessGroup, make: Callable[..., Any], vocab: int, batch: str) -> _Step:
    """Build the learner's embedding, and run it forward and backward."""
    p = group.size()
    parts = _draw(60, vocab, WIDTH).tensor_split(p)
    about = {"weight": "are these the rows that `tensor_split` gives to this rank?"}
    make_whole = functools.partial(_whole_embedding, vocab)
    embedding = _made(make, make_whole, group, {"weight": parts}, about)
    hint = "it looks up a token that it does not have: which row of its own part would that be?"
    tokens = _tokens(vocab, p, 2, 9, of_the_first=BATCHES[batch])
    with _inside_own_part(hint):
        step = _step(embedding, {"tokens": tokens}, grad_y=_draw(61, 2, 9, WIDTH))
    step.grads.update(_gradients({"weight": embedding.get_parameter("weight")}))
    return step


def _check_embedding(
    vocab: int, batch: str, results: Sequence[_Step], outcome: Outcome, members: Sequence[int]
) -> None:
    """Every token has its vector on every rank, after one sum."""
    p = len(members)
    whole = _whole_embedding(vocab)
    tokens = _tokens(vocab, p, 2, 9, of_the_first=BATCHES[batch])
    truth = _step(whole, {"tokens": tokens}, grad_y=_draw(61, 2, 9, WIDTH))
    grads = _gradients({"weight": whole.weight})["weight"].tensor_split(p)
    for number, (rank, found) in enumerate(zip(members, results)):
        case = f"on rank {rank}: of {vocab} tokens{batch}: "
        hint = "nothing travels: who has the vectors of the other tokens?"
        sent = ", ".join(call.kind for call in outcome.of(rank))
        refuse({hint: not sent, **careless(outcome.of(rank))}, case)
        own_tokens = torch.arange(vocab).tensor_split(p)[number].tolist()
        is_wrong = (found.y - truth.y).abs().amax(-1) > TOLERANCE
        if is_wrong.any():
            token = int(tokens[is_wrong][0])
            whose = "has" if token in own_tokens else "does not have"
            raise Hint(
                f"{case}the vector of token {token} is wrong; this rank {whose} that token. What "
                "does each rank add to the sum?"
            )
        mistakes = {
            "weight gets no gradient: all_reduce alone has no backward, g has": (
                "weight" not in found.grads
            ),
            BEHIND_AUTOGRAD: found.is_overwritten,
            f"{sent}; one all_reduce is enough": sent != "all_reduce",
        }
        refuse(mistakes, case)
        otherwise = (
            "the gradient of weight is wrong: what do the tokens of other ranks look up here?"
        )
        diagnose(case, found.grads["weight"], grads[number], {}, otherwise)


def vocabulary_embedding(make: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `VocabParallelEmbedding(embedding, group)`."""
    for vocab in VOCABS:
        for batch in BATCHES:
            judge = functools.partial(_check_embedding, vocab, batch)
            outcome = in_groups(_embed, make, vocab, batch, judge=judge, ours=OURS)
    return confirm_in_group(ranks, outcome, _embed, make, vocab, batch)


# ---- 9.6

VOCAB = VOCABS[0]
TOKENS = 12
EVERY_OTHER = torch.arange(TOKENS).remainder(2)[:, None]
OF_THE_FIRST = "with all targets in the columns of the first rank"
LEVELS = {  # around which the logits of the tokens lie
    "with logits around 0": torch.zeros(TOKENS, 1),
    OF_THE_FIRST: torch.zeros(TOKENS, 1),
    "with logits around 1000": torch.full((TOKENS, 1), 1000.0),
    "with logits around 0 for some tokens and around 2000 for others": 2000.0 * EVERY_OTHER,
}


def _logits(level: str) -> Tensor:
    """Whole logits, [TOKENS, VOCAB]."""
    return _draw(70, TOKENS, VOCAB) * 3 + LEVELS[level]


def _targets(level: str, p: int) -> Tensor:
    return _tokens(VOCAB, p, TOKENS, of_the_first=level == OF_THE_FIRST)


def _loss_step(group: dist.ProcessGroup, loss: Callable[..., Any], level: str) -> _Step:
    parts = _logits(level).tensor_split(group.size(), -1)
    first = sum(part.shape[-1] for part in parts[: group.rank()])
    arguments = {
        "logits": parts[group.rank()].contiguous(),
        "targets": _targets(level, group.size()),
    }
    hint = "it reads a column that it does not have: who has the logit of the target?"
    with _inside_own_part(hint):
        step = _step(
            loss,
            arguments,
            first,
            group,
            grad_y=torch.ones(TOKENS, dtype=torch.float64),
            about_shape=": one loss for each token",
        )
    hint = (
        f"the loss is not finite {level}: what do you subtract before you take the exponential, "
        "and of which logits is it taken?"
    )
    refuse({hint: not step.y.isfinite().all()})
    return step


def _check_loss(
    level: str, results: Sequence[_Step], outcome: Outcome, members: Sequence[int]
) -> None:
    """The loss of the whole logits and its gradient, from three numbers of each token."""
    p = len(members)
    logits = _logits(level).requires_grad_()
    targets = _targets(level, p)
    losses = F.cross_entropy(logits, targets, reduction="none")
    losses.sum().backward()
    losses = losses.detach()
    grads = _gradients({"logits": logits})["logits"].tensor_split(p, -1)
    largest = logits.detach().amax(-1)
    shifted = [part - part.amax(-1, keepdim=True) for part in logits.detach().tensor_split(p, -1)]
    separate_maxima = F.cross_entropy(torch.cat(shifted, -1), targets, reduction="none")
    for number, (rank, found) in enumerate(zip(members, results)):
        case = f"on rank {rank}: "
        calls = outcome.of(rank)
        refuse(careless(calls), case)
        worst = int((found.y - losses).abs().argmax())
        mistakes = {
            "each rank subtracts a maximum of its own, so their sums have different units: agree "
            "on one maximum first": separate_maxima,
            "every loss has the wrong sign": -losses,
            "every loss is off by the largest logit of its token: in which terms of the formula "
            "does m stand?": distance((found.y - losses).abs(), largest.abs()) < TOLERANCE,
        }
        otherwise = (
            f"token {worst} (target {targets[worst]}): {found.y[worst]:.4f}, expected is "
            f"{losses[worst]:.4f}; which sums need the other ranks, and who has the logit of the "
            "target?"
        )
        diagnose(case, found.y, losses, mistakes, otherwise)
        num_bytes = sum(call.num_bytes for call in calls if call.block == "forward")
        numbers = num_bytes / TOKENS / losses.element_size()
        backward = _sent(outcome, rank, "backward")
        mistakes = {
            f"{numbers:.0f} numbers per token travel; three are enough, the logits stay where "
            "they are": numbers > 4,
            "the loss is right, and no gradient reaches the logits: all_reduce alone has no "
            "backward": "logits" not in found.grads,
            BEHIND_AUTOGRAD: found.is_overwritten,
            f"backward makes {backward}: nothing has to travel there": backward,
        }
        refuse(mistakes, case)
        otherwise = (
            "the loss is right, the gradient of the logits is {off:.0%} off: through which sums "
            "must it flow back?"
        )
        diagnose(case, found.grads["logits"], grads[number], {}, otherwise)


def vocabulary_loss(loss: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's loss of each token, from logits that are cut over the vocabulary.

    Args:
        loss: `loss(logits, targets, first, group)`: [T, columns] own logits, [T] targets, the
            number of the first own column, the group.
        ranks: Ranks for the last run.
    """
    for level in LEVELS:
        judge = functools.partial(_check_loss, level)
        outcome = in_groups(_loss_step, loss, level, judge=judge, ours=OURS)
    return confirm_in_group(ranks, outcome, _loss_step, loss, level)


EXERCISES = {
    "9.1": Exercise(
        check=copy_and_reduce,
        praise="two mirror images, on any group, and nothing was overwritten",
        hints=(
            "Which of the four methods sum over the ranks, and which hand their tensor on?",
            "`dist.all_reduce` changes the tensor that it is given. Is that tensor yours?",
            "A backward returns one gradient for each argument of forward, so two here.",
        ),
    ),
    "9.2": Exercise(
        check=column_parallel,
        praise="each rank keeps its columns, and one sum in backward is all that is sent",
        hints=(
            "PyTorch stores [outputs, inputs]. Along which dim are the outputs cut?",
            "`whole.chunk(p, dim=0)[rank]` is a view. What else does a parameter need?",
            "Where does the input become something that differs by rank: f or g?",
        ),
    ),
    "9.3": Exercise(
        check=row_parallel,
        praise="one sum in forward, and the bias is added once",
        hints=(
            "Along which dim does this layer cut the weight [outputs, inputs]?",
            "The products of the ranks are summands of one output: f or g?",
            "Is the bias part of every summand, or of the sum?",
        ),
    ),
    "9.4": Exercise(
        check=swiglu,
        praise="a share of the work on each rank, and one sum each way, although x is used twice",
        hints=(
            "Which of the three weights are cut by rows of the stored tensor, which by columns?",
            "x enters two products on each rank. How often does it pass f?",
            "The product of silu(gate) and up works on each feature alone: nothing is sent for it.",
        ),
    ),
    "9.5": Exercise(
        check=vocabulary_embedding,
        praise="every token is looked up by the one rank that has it",
        hints=(
            "Which row of its own part is token t on a rank whose first token is `first`?",
            "A token of another rank needs some valid row, and a zero vector afterwards.",
            "After that every rank has one summand of the result.",
        ),
    ),
    "9.6": Exercise(
        check=vocabulary_loss,
        praise="uneven columns, large logits, right gradients, and three numbers for each token",
        hints=(
            "Which of the three numbers need all columns, and how does each combine over ranks?",
            "`reduce_from` sums forward, and hands the gradient on. `dist.all_reduce` has none.",
            "The maximum needs no gradient: `logits.detach().amax(-1)`.",
        ),
    ),
}
