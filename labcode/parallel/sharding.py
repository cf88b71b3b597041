"""Where each weight lives on the grid: cut over tp, or held whole by several ranks that must agree on it.

A rank computes the gradient of what it saw. A weight that several ranks hold but use on different tokens (every weight
over cp; under sequence parallelism norms and biases over tp too) gets only a part of its gradient on each, and

    gradient = sum over the ranks that share the weight of their parts

Forget it, and nothing fails: the copies drift apart, each trained on its own tokens. `Placement.summed` says over which
axes, `sum_shared_gradients` is the only place that does it.
Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2; Megatron-LM `finalize_model_grads`.
Held by: tests/ranks/test_parallel_parity.py
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.grid import Grid

MODEL_AXES = ("cp", "tp")  # the ranks that hold one copy of the model together


@dataclass(frozen=True)
class Split:
    """How a whole tensor is cut into one part per rank: along `dim`, the first parts one longer where it does not go up.

    With `sections` each section is cut by itself, and a part is one piece of each: the rows q | k | v of an attention
    become q0 | k0 | v0 and q1 | k1 | v1, so that every rank gets whole heads of each kind.

    Args:
        dim: The dim that is cut.
        sections: Lengths along `dim`, which add up to its size; None: one section.
    """

    dim: int
    sections: tuple[int, ...] | None = None

    def take(self, whole: torch.Tensor, index: int, parts: int) -> torch.Tensor:
        """Part number `index` of `parts`: a copy, so that nothing holds on to the whole."""
        return torch.cat(self._pieces(whole, index, parts), self.dim)

    def join(self, parts: list[torch.Tensor], shape: Iterable[int]) -> torch.Tensor:
        """The whole tensor, of `shape`, from all its parts in order."""
        whole = parts[0].new_empty(tuple(shape))
        for index, part in enumerate(parts):
            places = self._pieces(whole, index, len(parts))
            for place, piece in zip(
                places, part.split([place.shape[self.dim] for place in places], self.dim)
            ):
                place.copy_(piece)
        return whole

    def _pieces(self, whole, index, parts):
        """Views of what part `index` has of each section."""
        sections = whole.split(list(self.sections or [whole.shape[self.dim]]), self.dim)
        return [section.tensor_split(parts, self.dim)[index] for section in sections]


@dataclass(frozen=True)
class Placement:
    """Where one weight lives.

    Args:
        shape: Of the whole weight.
        split: How it is cut over tp; None: every rank of tp holds all of it.
        summed: Axes whose ranks each see a part of its gradient.
        tied: The first and the last stage of a pipeline hold it both, and each sees a part of its gradient.
    """

    shape: tuple[int, ...]
    split: Split | None
    summed: tuple[str, ...]
    tied: bool = False

    @property
    def held_whole_on(self) -> tuple[str, ...]:
        """Axes along which all ranks hold the same values."""
        return ("cp",) if self.split else MODEL_AXES

    def own(self, whole: torch.Tensor, grid: Grid) -> torch.Tensor:
        """This rank's part of the whole weight."""
        return self.split.take(whole, grid.coord("tp"), grid.size("tp")) if self.split else whole

    def whole(self, own: torch.Tensor, grid: Grid) -> torch.Tensor:
        """The whole weight on every rank of tp.

        Communicates: a broadcast from each rank of tp, `(p-1)/p` times the weight's bytes received; nothing if not cut.
        """
        if self.split is None:
            return own
        group, size = grid.group("tp"), grid.size("tp")
        shapes = [
            self.split.take(torch.empty(self.shape, device="meta"), index, size).shape
            for index in range(size)
        ]
        parts = [
            own.contiguous() if index == group.rank() else own.new_empty(shape)
            for index, shape in enumerate(shapes)
        ]
        for index, part in enumerate(parts):  # broadcasts: parts may differ in size
            dist.broadcast(part, src=dist.get_global_rank(group, index), group=group)
        return self.split.join(parts, self.shape)


@torch.no_grad()
def start_equal(
    params: Mapping[str, nn.Parameter], placements: Mapping[str, Placement], grid: Grid
) -> None:
    """Give each weight the value of the first rank that holds it, on every rank that holds it too.

    Communicates: a broadcast of each weight over the axes on which it is whole.
    """
    for name, param in params.items():
        group = grid.group(*placements[name].held_whole_on)
        dist.broadcast(param.data, src=dist.get_global_rank(group, 0), group=group)
        if placements[name].tied:
            dist.broadcast(param.data, src=dist.get_global_rank(grid.ends(), 0), group=grid.ends())


@torch.no_grad()
def sum_shared_gradients(
    params: Mapping[str, nn.Parameter], placements: Mapping[str, Placement], grid: Grid
) -> None:
    """Add up the parts of each shared weight's gradient, in place, after backward and before clipping.

    Kept apart from the averaging over dp so that it can be seen and forgotten. The price with cp: each gradient travels
    twice, over dp during backward and over cp after it, and is copied once; Megatron-LM and torchtitan put cp and dp
    into one group and send it once.

    Communicates: one flat all-reduce for all weights that are shared on the same axes.
    """
    shared: dict[tuple[str, ...], list[nn.Parameter]] = {}
    for name, param in params.items():
        axes = tuple(
            axis for axis in placements[name].summed if grid.size(axis) > 1
        )  # a lone rank has seen all there is
        if param.requires_grad and axes:
            shared.setdefault(axes, []).append(param)
    for axes, members in sorted(
        shared.items()
    ):  # one order on all ranks: collectives match by order
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=grid.group(*axes))
        for param, total in zip(members, flat.split([p.numel() for p in members])):
            param.grad = total.view_as(param)
    for name, param in params.items():
        if placements[name].tied and param.requires_grad:
            dist.all_reduce(param.grad, group=grid.ends())


@torch.no_grad()
def gradient_norm(
    params: Mapping[str, nn.Parameter], placements: Mapping[str, Placement], grid: Grid
) -> torch.Tensor:
    """The 2-norm of the whole model's gradient: parts of cut weights are added up, whole ones count once.

        norm^2 = sum over pp of (sum over tp of |parts|^2 + |whole weights|^2)

    Communicates: one number, an all-reduce over tp and one over pp.
    Returns:
        A float64 scalar, the same on every rank of the model.
    """
    kinds: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for name, param in params.items():
        again = placements[name].tied and grid.coord("pp") > 0  # the first stage counts it
        if param.grad is not None and not again:
            kinds[placements[name].split is not None].append(param.grad)
    device = next(iter(params.values())).device
    cut, whole = (
        torch.nn.utils.get_total_norm(kinds[cut]).to(device, torch.float64).square()
        for cut in (True, False)
    )
    dist.all_reduce(cut, group=grid.group("tp"))
    total = cut + whole
    dist.all_reduce(total, group=grid.group("pp"))
    return total.sqrt()


def whole_weights(
    module: nn.Module,
    placements: Mapping[str, Placement],
    homes: Mapping[str, tuple[int, tuple]],
    grid: Grid,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The state dict of the whole model, one entry at a time, on every rank; all ranks of the model run through it.

    Communicates: as `Placement.whole` for each weight that is cut, and a broadcast of each whole weight over pp.

    Args:
        module: This rank's share.
        placements: Of its weights.
        homes: {name: (pp coordinate that has it, shape of the whole)}, of all weights in the order of the state dict.
    """
    first_names = {id(param): name for name, param in module.named_parameters()}
    own = dict(module.named_parameters(remove_duplicate=False))  # tied weights under both names
    example, group = next(iter(own.values())), grid.group("pp")
    for name, (home, shape) in homes.items():
        if home == grid.coord("pp"):
            param = own[name]
            whole = placements[first_names[id(param)]].whole(param.detach(), grid).contiguous()
        else:
            whole = example.new_empty(shape)
        dist.broadcast(whole, src=dist.get_global_rank(group, home), group=group)
        yield name, whole
