"""Collectives that autograd understands: each forward communication with its backward.

Autograd runs inside one process. Where a tensor is used by several ranks, its gradient is a sum
over them, and only a Function that says so makes that sum. The pairs are conjugate:

    copy_to       identity     / all-reduce          all_gather      all-gather     / reduce-scatter
    reduce_from   all-reduce   / identity            reduce_scatter  reduce-scatter / all-gather
    gather_from   all-gather   / split               all_to_all      all-to-all     / the way back
    split_to      split        / all-gather

All-reduce and reduce-scatter sum. Every rank passes tensors of one shape; no input is changed. p is
the group's size; a group of one has nothing to send and gets its input back, so that a layer need
not ask how many ranks it has.
Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3, operators f and g; Korthikanti et al.
2022 (arXiv:2205.05198), section 4.2, their sequence-parallel counterparts; Jacobs et al. 2023
(arXiv:2309.14509) all_to_all.
Held by: tests/ranks/test_collectives.py::test_forward_and_backward_equal_the_single_process_result
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

Group: TypeAlias = dist.ProcessGroup
Operation: TypeAlias = Callable[[torch.Tensor, Group], torch.Tensor]

# torch 2.13 renamed the two flat collectives; older versions know the old names only
_gather_flat: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_scatter_flat: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def copy_to(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Hand a replicated tensor to computations that differ by rank (Megatron's f). Any shape.

    Communicates: nothing forward; backward an all-reduce of the gradient, `2 (p-1)/p` times its
    bytes per rank on a ring.
    """
    return _paired(x, group, forward=_identity, backward=_all_reduce)


def reduce_from(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum partial results over the group (Megatron's g). Any shape.

    Communicates: forward an all-reduce; backward nothing, since every rank holds the gradient of
    the sum.
    """
    return _paired(x, group, forward=_all_reduce, backward=_identity)


def gather_from(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Join the parts of all ranks along `dim`, before a replicated computation.

    `[.., D/p, ..]` becomes `[.., D, ..]`.

    Communicates: forward an all-gather; backward nothing, each rank keeps its own part of the
    gradient.
    """
    return _paired(x, group, forward=partial(_gather, dim=dim), backward=partial(_split, dim=dim))


def split_to(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Keep this rank's part of a replicated tensor along `dim`: `[.., D, ..]` to `[.., D/p, ..]`.

    Communicates: nothing forward; backward an all-gather of the gradient's parts.
    Raises:
        ValueError: D is not divisible by p.
    """
    return _paired(x, group, forward=partial(_split, dim=dim), backward=partial(_gather, dim=dim))


def all_gather(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Join the parts of all ranks along `dim`, before computations that differ by rank.

    Communicates: forward an all-gather, backward a reduce-scatter: each rank used the whole, each
    part's gradient is a sum.
    """
    return _paired(
        x, group, forward=partial(_gather, dim=dim), backward=partial(_reduce_scatter, dim=dim)
    )


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Sum over the group and keep this rank's part along `dim`: `[.., D, ..]` to `[.., D/p, ..]`.

    Communicates: forward a reduce-scatter, backward an all-gather.
    Raises:
        ValueError: D is not divisible by p.
    """
    return _paired(
        x, group, forward=partial(_reduce_scatter, dim=dim), backward=partial(_gather, dim=dim)
    )


def all_to_all(
    x: torch.Tensor, group: dist.ProcessGroup, split_dim: int, concat_dim: int
) -> torch.Tensor:
    """Move the sharding from one dim to another: `split_dim` D to D/p, `concat_dim` E/p to E.

    Communicates: an all-to-all each way, `(p-1)/p` times the tensor's bytes per rank.
    Raises:
        ValueError: D is not divisible by p.
    """
    there = partial(_exchange, split_dim=split_dim, concat_dim=concat_dim)
    back = partial(_exchange, split_dim=concat_dim, concat_dim=split_dim)
    return _paired(x, group, forward=there, backward=back)


# ---- how a pair is made of two operations


def _paired(
    x: torch.Tensor, group: Group, *, forward: Operation, backward: Operation
) -> torch.Tensor:
    """Apply one operation now, and the other one to the gradient in backward."""
    return _Pair.apply(x, group, forward, backward)


class _Pair(torch.autograd.Function):
    """One operation forward, another one backward; neither changes its input."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, forward: Operation, backward: Operation
    ) -> torch.Tensor:
        # Not a tensor, so plain attributes and no save_for_backward. Nothing of x is kept: neither
        # a sum nor a rearrangement needs its input for the gradient.
        ctx.group = group
        ctx.backward_operation = backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # It has to run on every rank of the group or on none: a rank whose loss does not depend on
        # the output would leave the others waiting in this collective.
        grad_of_x = ctx.backward_operation(grad, ctx.group)
        return grad_of_x, None, None, None


# ---- the operations, outside autograd


def _identity(x: torch.Tensor, group: Group) -> torch.Tensor:
    # a new tensor over the same memory: autograd must not see its own input come back
    return x.view_as(x)


def _all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    if group.size() == 1:
        return _identity(x, group)
    # all_reduce works in place, and x belongs to the caller. Contiguous, because a collective adds
    # up memory as it lies: x may be a transpose on one rank and a plain tensor on another.
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def start_all_gather(x: torch.Tensor, group: Group, dim: int) -> Callable[[], torch.Tensor]:
    """Begin to join the parts of all ranks; what it returns waits and gives `[.., D, ..]`.

    Between the two calls the rank computes while the parts travel; x must not change until then.
    """
    if group.size() == 1:
        return partial(_identity, x, group)
    # One flat collective into one buffer, [p, .., D/p, ..]. `dist.all_gather` takes a list of p
    # tensors instead, which NCCL would gather into such a buffer first and copy out of it after.
    parts = x.new_empty(group.size(), *x.shape)
    work = _gather_flat(parts.view(-1), x.contiguous().view(-1), group=group, async_op=True)

    def finish() -> torch.Tensor:
        work.wait()
        if dim == 0:
            return parts.flatten(0, 1)  # [p, D/p, ..] -> [D, ..], a view: no copy
        # Any other dim costs a copy of the whole, because the parts of one row lie apart:
        # p times [.., D/p, ..] -> [.., D, ..]
        return torch.cat(parts.unbind(0), dim)

    return finish


def start_reduce_scatter(x: torch.Tensor, group: Group, dim: int) -> Callable[[], torch.Tensor]:
    """Begin to sum over the group; what it returns waits and gives this rank's part of the sum.

    The part is `[.., D/p, ..]`. Between the two calls x must not change.

    Raises:
        ValueError: D is not divisible by p.
    """
    if group.size() == 1:
        return partial(_identity, x, group)
    own_parts = _parts(x, group, dim)
    out = torch.empty_like(own_parts[0], memory_format=torch.contiguous_format)
    # [p, .., D/p, ..]: what goes to one rank has to be contiguous. Along dim 0 it is; along another
    # dim the parts are first copied one behind the other.
    parts = x.contiguous() if dim == 0 else torch.stack(own_parts)
    work = _scatter_flat(out.view(-1), parts.view(-1), group=group, async_op=True)

    def finish() -> torch.Tensor:
        work.wait()
        return out

    return finish


def _gather(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return start_all_gather(x, group, dim)()


def _split(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return _parts(x, group, dim)[group.rank()].contiguous()


def _reduce_scatter(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return start_reduce_scatter(x, group, dim)()


def _exchange(x: torch.Tensor, group: Group, split_dim: int, concat_dim: int) -> torch.Tensor:
    if group.size() == 1:
        return _identity(x, group)
    # Index 0 of `sent` is the receiver, index 0 of `received` the sender:
    # [.., D, .., E/p, ..] -> [p, .., D/p, .., E/p, ..], then p parts joined -> [.., D/p, .., E, ..]
    sent = torch.stack(_parts(x, group, split_dim))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), concat_dim)


def _parts(x: torch.Tensor, group: Group, dim: int) -> tuple[torch.Tensor, ...]:
    """`x` cut into one equal part per rank along `dim`."""
    size = group.size()
    if x.shape[dim] % size:
        raise ValueError(
            f"dim {dim} of shape {list(x.shape)} is not divisible by the group's {size} ranks: "
            "pad it or change the grid"
        )
    return x.chunk(size, dim)
