"""Exercise 9.1: the operators f and g. The text of each assertion is a hint."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from labcode.comm.collectives import copy_to, reduce_from
from labcode.comm.counting import Call, counted
from labcode.comm.grid import Grid
from labcode.pool.ranks import Ranks
from labcode.teach.exercises.l09_groups import (
    SHAPES,
    check_group_sizes,
    one_tensor,
    run_on,
    stand,
    watched_sums,
    who_is,
    written,
)
from labcode.teach.exercises.on_ranks import without
from labcode.topology import GridShape


class _Applied(NamedTuple):
    """What a Function did on one rank.

    Args:
        x, y: Input and output of forward, [2, 3].
        grad_y, grad_x: Input and output of backward; grad_x is None if there was no gradient.
        x_kept, grad_y_kept: Whether forward and backward left their inputs unchanged.
        not_awaited: Sums that were started, and nobody waited for them.
        calls: What travelled.
    """

    x: Tensor
    y: Tensor
    grad_y: Tensor
    grad_x: Tensor | None
    x_kept: bool
    grad_y_kept: bool
    not_awaited: int
    calls: list[Call]


def _apply(rank: int, function: type[torch.autograd.Function], shape: GridShape) -> _Applied:
    """Run a Function forward and backward on numbers that differ between all ranks."""
    place = stand(shape)
    x = torch.arange(6.0).view(2, 3) + 10 * rank
    grad_y = torch.ones(2, 3) + 7.0**rank
    x_before = x.clone()
    grad_y_before = grad_y.clone()
    x.requires_grad_()
    with counted() as calls, watched_sums() as sums, without(copy_to, reduce_from):
        y = one_tensor(function.apply(x, place.group))
        (grad_x,) = torch.autograd.grad(y, x, grad_outputs=grad_y, allow_unused=True)
    return _Applied(
        x=x_before,
        y=y.detach(),
        grad_y=grad_y_before,
        grad_x=grad_x,
        x_kept=torch.equal(x.detach(), x_before),
        grad_y_kept=torch.equal(grad_y, grad_y_before),
        not_awaited=sums.not_awaited,
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
    written(f, "CopyTo")
    written(g, "ReduceFrom")
    for shape in SHAPES:
        for name, function, sums_forward in (("f", f, False), ("g", g, True)):
            results = run_on(ranks, shape, _apply, function)
            for rank, result in enumerate(results):
                members = next(group for group in shape.groups("tp") if rank in group)
                peers = [results[member] for member in members]
                _check_applied(who_is(rank, shape, name), result, peers, sums_forward)
    shape = SHAPES[0]
    for name, function, sums_forward in (("f", f, False), ("g", g, True)):
        results = run_on(ranks, shape, _apply_twice, function)
        for rank, result in enumerate(results):
            _check_twice(who_is(rank, shape, name), result, results, sums_forward)


class _Twice(NamedTuple):
    """What a Function did on one rank that was applied over two groups, one after the other."""

    x: Tensor
    y: Tensor
    grad_y: Tensor
    grad_x: Tensor


def _apply_twice(rank: int, function: type[torch.autograd.Function], shape: GridShape) -> _Twice:
    """Over the tensor-parallel group and then over all ranks, in one graph."""
    grid = Grid.create(shape)
    x = torch.arange(3.0) + 10 * rank
    grad_y = torch.ones(3) + 7.0**rank
    x.requires_grad_()
    inside = function.apply(x, grid.group("tp"))
    y = function.apply(inside, grid.group("dp", "tp"))
    (grad_x,) = torch.autograd.grad(y, x, grad_outputs=grad_y)
    return _Twice(x.detach(), y.detach(), grad_y, grad_x)


def _check_twice(who: str, result: _Twice, results: Sequence[_Twice], sums_forward: bool) -> None:
    """Each call sums over its own group: all ranks, and then twice the same number."""
    p = SHAPES[0].tp
    total_x = torch.stack([other.x for other in results]).sum(0)
    total_grad = torch.stack([other.grad_y for other in results]).sum(0)
    y = p * total_x if sums_forward else result.x
    grad_x = result.grad_y if sums_forward else p * total_grad
    hint = (
        "used once it is right; applied over the group and then over all ranks, in one graph, the "
        "two calls get in each other's way. Where is the group kept: what is on the class belongs "
        "to all calls"
    )
    assert torch.equal(result.y, y), who + hint
    assert torch.equal(result.grad_x, grad_x), who + hint


def _check_applied(
    who: str, result: _Applied, peers: Sequence[_Applied], sums_forward: bool
) -> None:
    total_x = torch.stack([peer.x for peer in peers]).sum(0)
    total_grad = torch.stack([peer.grad_y for peer in peers]).sum(0)
    assert result.x_kept, who + ("forward wrote into its input: the sum needs a tensor of its own")
    assert result.grad_y_kept, who + (
        "backward wrote into the gradient it was handed: the sum needs a tensor of its own"
    )
    check_group_sizes(who, result.calls, len(peers))
    assert not result.not_awaited, who + (
        "an all_reduce is started with `async_op=True`, and nobody waits for it"
    )
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
