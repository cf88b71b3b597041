"""What the checks of lesson 09 share: the groups, the numbers, and what an answer sends."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from labcode.comm.counting import Call, counted
from labcode.comm.grid import Grid
from labcode.parallel import tensor
from labcode.pool.answers import HangError
from labcode.pool.ranks import RankError, Ranks
from labcode.teach.check import due
from labcode.topology import GridShape

TOLERANCE = 1e-9
SHAPES = (GridShape(dp=2, tp=2), GridShape(tp=4))


class Place(NamedTuple):
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


def stand(shape: GridShape) -> Place:
    """Where this rank stands in a grid."""
    grid = Grid.create(shape)
    return Place(grid.group("tp"), grid.coord("tp"), grid.size("tp"), grid.coord("dp"))


def who_is(rank: int, shape: GridShape, name: str = "") -> str:
    """Names a rank by its group: "in the group of ranks 2, 3, number 1 of the group: "."""
    for members in shape.groups("tp"):
        if rank in members:
            ranks = ", ".join(str(member) for member in members)
            number = members.index(rank)
            what = f"{name}, " if name else ""
            return f"{what}in the group of ranks {ranks}, the rank with number {number}: "
    raise ValueError(rank)


def written(answer: Any, name: str) -> None:
    """The learner's class or function is not None."""
    assert answer is not None, f"{name} is None: write it"


def run_on(ranks: Ranks, shape: GridShape, fn: Callable[..., Any], answer: Any, *args: Any) -> list:
    """`ranks.run(fn, answer, shape, *args)`, with a hint in place of some errors of PyTorch."""
    try:
        return ranks.run(fn, answer, shape, *args)
    except HangError as error:
        raise AssertionError(
            f"the ranks wait for each other: does every rank of the group make the same calls? "
            f"({error})"
        ) from None
    except RankError as error:
        hint = _in_words(str(error), shape)
        if hint:
            raise AssertionError(hint) from None
        raise


def _in_words(error: str, shape: GridShape) -> str:
    """A hint for an error of PyTorch that does not say what is wrong; "" for the others."""
    if "tuple index out of range" in error and shape.dp == 1:
        return (
            f"{error}: in groups of two it is right, and this is one group of four; into how many "
            "parts do you cut?"
        )
    if "tuple index out of range" in error:
        return (
            f"{error}: in a group of p ranks the parts have the numbers 0 to p - 1; is the number "
            "of the rank in the group taken, or that in the job?"
        )
    if "incorrect number of gradients" in error:
        return (
            f"{error}: is there a `return` in backward, with one gradient for each argument of "
            "forward?"
        )
    if "Timed out" in error or "Connection closed" in error:
        return f"the ranks wait for each other: does every rank make the same calls? ({error})"
    return ""


def refuse_ours(layer: Any) -> None:
    """The learner's class is not labcode's, and none of its layers is."""
    ours = (tensor.ColumnParallelLinear, tensor.RowParallelLinear, tensor.VocabParallelEmbedding)
    if not isinstance(layer, nn.Module):
        return
    for part in layer.modules():
        assert not isinstance(part, ours), (
            f"tensor.{type(part).__name__} is labcode's own answer to this exercise: write yours"
        )


def one_tensor(value: Any) -> Tensor:
    """What a learner's code returns, if it is a tensor; runs on a rank."""
    value = due(value)
    if isinstance(value, Tensor):
        return value
    what = f"a {type(value).__name__}"
    if isinstance(value, (tuple, list)):
        what = f"{what} of {len(value)}"
    raise AssertionError(f"it returned {what}, and one tensor is due")


def everywhere(is_so: bool) -> bool:
    """Whether all ranks say yes; else one of them would wait for the others."""
    votes = torch.tensor(int(is_so))
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes)


def sent_in_backward(y: Tensor, grad: Tensor | None = None) -> list[Call]:
    """Run `y.backward(grad)`.

    Returns:
        What travelled.
    """
    with warnings.catch_warnings(), counted() as calls:
        # `check_sums` says the same, in words of the lesson and once for all ranks
        warnings.filterwarnings("ignore", "c10d::allreduce_: an autograd kernel was not registered")
        y.backward(grad)
    return calls


def error_of(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have one shape, and the same numbers up to rounding."""
    return found.shape == expected.shape and error_of(found, expected) < TOLERANCE


def draw(seed: int, *sizes: int) -> Tensor:
    """Normal random numbers in float64, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, dtype=torch.float64, generator=generator)


def check_group_sizes(who: str, calls: Sequence[Call], p: int) -> None:
    """Whatever travels stays in the group."""
    for call in calls:
        assert call.group_size == p, who + (
            f"an {call.kind} runs over {call.group_size} ranks, and the group has {p}: "
            "is the group handed on to it?"
        )


def kinds(calls: Sequence[Call]) -> str:
    """What travels, in words: "2 all_reduce, 1 all_gather"."""
    names = [call.kind for call in calls]
    parts = [f"{names.count(kind)} {kind}" for kind in dict.fromkeys(names)]
    return ", ".join(parts) or "nothing"


class Parameter(NamedTuple):
    """A parameter of a learner's layer.

    Args:
        value: Its numbers.
        grad: After backward; None if it got none.
        storage: How many numbers the memory behind it holds.
    """

    value: Tensor
    grad: Tensor | None
    storage: int


def parameters_of(module: nn.Module) -> dict[str, Parameter]:
    """{name: parameter} of a module, as plain values that can be sent to another process."""
    params = {}
    for name, param in module.named_parameters():
        numbers = param.untyped_storage().nbytes() // param.element_size()
        params[name] = Parameter(param.detach(), param.grad, numbers)
    return params


# ---- how sums are made


class Sums:
    """What is noticed of the calls of `dist.all_reduce`.

    Attributes:
        behind_autograd: Whether one wrote into a tensor of the graph, outside of a Function.
    """

    def __init__(self) -> None:
        self.behind_autograd = False
        self._handles: list[_Handle] = []

    @property
    def not_awaited(self) -> int:
        """How many were started with `async_op=True`, and nobody waited for them."""
        return sum(not handle.was_awaited for handle in self._handles)

    def note(self, handle: "_Handle") -> None:
        """Remember what was started."""
        self._handles.append(handle)


class _Handle:
    """A `Work` that knows whether somebody waited for it."""

    def __init__(self, work: Any) -> None:
        self.was_awaited = False
        self._work = work

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self.was_awaited = True
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextlib.contextmanager
def watched_sums() -> Iterator[Sums]:
    """Look at every call of `dist.all_reduce` inside the block."""
    sums = Sums()
    real = dist.all_reduce

    def all_reduce(
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if _is_in_the_graph(tensor, sys._getframe(1)):
            sums.behind_autograd = True
        work = real(tensor, op, group, async_op)
        if not async_op:
            return work
        handle = _Handle(work)
        sums.note(handle)
        return handle

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield sums


def _is_in_the_graph(tensor: Tensor, caller: FrameType) -> bool:
    """Whether autograd remembers a tensor that lies in this memory, as `y` does of `y.detach()`.

    Inside of a Function autograd is told what happens; its methods have a `ctx`.
    """
    known = list(caller.f_locals.values())
    if any(isinstance(value, FunctionCtx) for value in known):
        return False
    memory = tensor.untyped_storage().data_ptr()
    for value in [tensor, *known]:
        is_remembered = isinstance(value, Tensor) and value.grad_fn is not None
        if is_remembered and value.untyped_storage().data_ptr() == memory:
            return True
    return False


def check_sums(who: str, sums_behind_autograd: bool) -> None:
    """No sum was written into a tensor of the graph."""
    assert not sums_behind_autograd, who + (
        "`dist.all_reduce` writes into a tensor of which autograd does not know that it has "
        "changed. What comes out is right by accident at most (section 1): f or g?"
    )
