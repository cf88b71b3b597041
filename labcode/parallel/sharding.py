"""How each weight is spread over the grid: one description for all that follows from it.

A weight is sharded over some axes of the grid and replicated over the others. Drawing its values,
making its copies equal, summing its gradient, taking the norm, collecting the full state dict and
storing it in a checkpoint all read the same `ParamSharding`.

A rank computes the gradient of what it saw. A weight that several ranks hold but use on different
tokens (every weight over cp; under sequence parallelism norms and biases over tp too) gets only a
part of its gradient on each of them. Such a gradient is called partial:

    gradient = sum of the parts over the ranks that share the weight

If the sum is forgotten, nothing fails: the copies drift apart, each trained on its own tokens.
`partial_over` names the axes. The sum over cp travels together with the average over dp
(`parallel.data`), the sum over tp is made by `all_reduce_partial_gradients`.

Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2; Megatron-LM
    `finalize_model_grads`; the words Shard, replicated and partial are those of PyTorch's DTensor.
Held by: tests/ranks/test_parallel_parity.py
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.grid import Grid
from labcode.comm.one_message import in_one_message
from labcode.topology import GridShape


@dataclass(frozen=True)
class Shard:
    """How a whole tensor is cut into one part per rank of an axis.

    It is cut along `dim`; if the size is not divisible, the first parts get one element more. With
    `sections` each section is cut by itself, and a part is one piece of each: the rows q | k | v of
    an attention become q0 | k0 | v0 and q1 | k1 | v1, so that every rank gets whole heads of each.

    With `copies` a section is cut into fewer pieces than there are ranks: `copies` neighbouring
    ranks hold the same piece. This is for attention with fewer key/value heads than ranks. If the
    copies lie `apart`, ranks that follow each other hold different pieces until all are there; then
    it begins again. This is for hybrid sharding, whose neighbours are one copy of the model.

    Args:
        dim: The dim that is cut.
        sections: Lengths along `dim`, which add up to its size; None: one section.
        copies: How many ranks hold the same piece, for each section; None: 1 for all.
        apart: Whether the ranks that hold the same piece lie apart; else they are neighbours.
        in_chunks: Cut as `torch.chunk` does: all pieces but the last ones have the same size, and
            the last ones may be smaller or empty.
    """

    dim: int
    sections: tuple[int, ...] | None = None
    copies: tuple[int, ...] | None = None
    apart: bool = False
    in_chunks: bool = False

    def take(self, whole: torch.Tensor, index: int, parts: int) -> torch.Tensor:
        """Part number `index` of `parts`: a copy, so that nothing holds on to the whole."""
        return torch.cat(self.pieces(whole, index, parts), self.dim)

    def join(self, parts: Sequence[torch.Tensor], shape: Iterable[int]) -> torch.Tensor:
        """The whole tensor, of `shape`, from all its parts in order."""
        whole = parts[0].new_empty(tuple(shape))
        for index, part in enumerate(parts):
            places = self.pieces(whole, index, len(parts))
            lengths = [place.shape[self.dim] for place in places]
            for place, piece in zip(places, part.split(lengths, self.dim)):
                place.copy_(piece)
        return whole

    def part_shape(self, shape: Iterable[int], index: int, parts: int) -> torch.Size:
        """The shape of part number `index`."""
        # The cut itself, on a tensor without memory, so that a formula cannot disagree with it.
        return self.take(torch.empty(tuple(shape), device="meta"), index, parts).shape

    def copies_of(self, section: int) -> int:
        """How many ranks hold the same piece of a section."""
        return 1 if self.copies is None else self.copies[section]

    def pieces(self, whole: torch.Tensor, index: int, parts: int) -> list[torch.Tensor]:
        """Views of what part `index` has of each section."""
        lengths = list(self.sections or [whole.shape[self.dim]])
        pieces = []
        for number, section in enumerate(whole.split(lengths, self.dim)):
            copies = self.copies_of(number)
            # Of 4 parts and copies = 2: pieces 0 0 1 1 for neighbours, 0 1 0 1 if they lie apart.
            num_pieces = parts // copies
            place = index % num_pieces if self.apart else index // copies
            pieces.append(self._cut(section, num_pieces, place))
        return pieces

    def _cut(self, section: torch.Tensor, num_pieces: int, place: int) -> torch.Tensor:
        if not self.in_chunks:
            return section.tensor_split(num_pieces, self.dim)[place]
        first, last = rows_of(section.shape[self.dim], place, num_pieces)
        return section.narrow(self.dim, first, last - first)


def rows_of(rows: int, index: int, parts: int) -> tuple[int, int]:
    """(first, last + 1) of the rows that a rank gets."""
    # Rounded up, so that 5 rows over 4 ranks are 2, 2, 1 and 0. tensor_split would make 2, 1, 1 and
    # 1 of them, which is more even; but a DTensor, and so FSDP2, cuts as torch.chunk does.
    each = -(-rows // parts)
    return min(index * each, rows), min((index + 1) * each, rows)


@dataclass(frozen=True)
class ParamSharding:
    """Where one weight lives on the grid.

    Args:
        shape: The shape of the whole weight.
        shards: {axis: how it is cut over the ranks of that axis}; of several axes the first one
            cuts the whole, the next one cuts the parts of the first.
        partial_over: Axes whose ranks each see a part of its gradient.
        tied: It is held by the first and by the last stage of a pipeline, as an embedding that is
            tied to the head is; each of the two sees a part of its gradient.
    """

    shape: tuple[int, ...]
    shards: Mapping[str, Shard] = field(default_factory=dict)
    partial_over: tuple[str, ...] = ()
    tied: bool = False

    def replicated_over(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of `axes` along which all ranks hold the same values."""
        return tuple(axis for axis in axes if axis not in self.shards)

    def own(self, whole: torch.Tensor, grid: Grid) -> torch.Tensor:
        """This rank's part of the whole weight."""
        part = whole
        for axis, shard in self.shards.items():
            part = shard.take(part, grid.coord(axis), grid.size(axis))
        return part

    def full(self, own: torch.Tensor, grid: Grid) -> torch.Tensor:
        """The whole weight, on every rank of the axes that cut it.

        Communicates: for each axis that cuts it, a broadcast from each of the p ranks of that axis,
            `(p-1)/p` times the bytes of what is put together received; nothing if it is not cut.
        """
        # shapes[i] is what the i-th axis cuts: first the whole, then the part of tp, ...
        shapes = [torch.Size(self.shape)]
        for axis, shard in self.shards.items():
            shapes.append(shard.part_shape(shapes[-1], grid.coord(axis), grid.size(axis)))
        part = own
        axes = list(self.shards)
        for number in reversed(range(len(axes))):  # the innermost cut first
            axis = axes[number]
            shard = self.shards[axis]
            shape = shapes[number]
            parts = _gather_parts(part, shard, shape, grid.group(axis))
            part = shard.join(parts, shape)
        return part


def placement(sharding: ParamSharding, shape: GridShape) -> str:
    """Where a weight lives, in the words of DTensor: "Shard(0) over ep, Shard(2) over tp".

    The axes come in the order in which they cut it. Axes of one rank cut nothing and are left out;
    over all others the weight is replicated.

    Held by: tests/unit/test_placement.py
    """
    cuts = []
    for axis, shard in sharding.shards.items():
        if shape.size(axis) > 1:
            cuts.append(f"Shard({shard.dim}) over {axis}")
    return ", ".join(cuts) or "replicated"


def gradient_axes(sharding: ParamSharding, shape: GridShape) -> tuple[str, ...]:
    """The axes over whose ranks the gradient of a weight is summed.

    Those of dp and cp, which hold other tokens; and of tp where its ranks see a part each. An
    expert gets the tokens of all ranks of ep where it is kept, so that of dp edp is left.

    Held by: tests/unit/test_placement.py
    """
    data = "edp" if "ep" in sharding.shards and shape.ep > 1 else "dp"
    axes = (data, *sharding.partial_over)
    return tuple(axis for axis in axes if shape.size(axis) > 1)


class FullWeight(NamedTuple):
    """A weight of the whole model, as every rank knows it: where it lives and how large it is.

    Args:
        stage: The pp coordinate that has it; of a tied weight the one under this name.
        shape: The shape of the whole weight.
    """

    stage: int
    shape: tuple[int, ...]


Params = Mapping[str, nn.Parameter]
Shardings = Mapping[str, ParamSharding]


@torch.no_grad()
def broadcast_parameters(params: Params, shardings: Shardings, grid: Grid) -> None:
    """Give each weight the value of the first rank that holds it, on every rank of its model.

    The copies over dp and cp are made equal by what averages their gradients (`parallel.data`).

    Communicates: a broadcast over tp of each weight that is replicated there, and one between the
        first and the last stage of each weight that is tied.
    """
    for name, param in params.items():
        axes = shardings[name].replicated_over(("tp",))
        _broadcast(param, grid.group(*axes))
        if shardings[name].tied:
            _broadcast(param, grid.ends())


@torch.no_grad()
def all_reduce_partial_gradients(params: Params, shardings: Shardings, grid: Grid) -> None:
    """Sum the parts of each partial gradient over tp and over tied stages, in place.

    Call it after backward and before clipping. The axes dp and cp are not its business: their sum
    travels in the buckets of `parallel.data`, during backward.

    Communicates: one flat all-reduce over tp for all partial gradients, one for all sections of
        which several ranks of tp hold copies, and one for each tied weight.
    """
    partial = []
    copied = {}
    tied = []
    for name, param in params.items():
        if not param.requires_grad:
            continue
        sharding = shardings[name]
        if "tp" in sharding.partial_over:
            partial.append(param)
        if _has_copies(sharding):
            copied[name] = param
        if sharding.tied:
            tied.append(param)
    if partial and grid.size("tp") > 1:  # a rank alone has seen everything
        in_one_message(_gradients(partial), dist.all_reduce, group=grid.group("tp"))
    if copied:
        _sum_copied_sections(copied, shardings, grid.group("tp"))
    for grad in _gradients(tied):
        dist.all_reduce(grad, group=grid.ends())


@torch.no_grad()
def gradient_norm(params: Params, shardings: Shardings, grid: Grid) -> torch.Tensor:
    """The 2-norm of the whole model's gradient: shards add up, replicated gradients count once.

        norm^2 = sum over pp of (sum over tp of |shards|^2 + |replicated|^2)

    Communicates: one number over each set of axes that cuts some weight, and one over pp.

    Returns:
        A float64 scalar, the same on every rank of the model.
    """
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for name, param in params.items():
        sharding = shardings[name]
        grads = by_axes.setdefault(tuple(sharding.shards), [])
        # After `all_reduce_partial_gradients` both stages hold the sum; the first one counts it.
        counted_elsewhere = sharding.tied and grid.coord("pp") > 0
        if param.grad is not None and not counted_elsewhere:
            grads.extend(_counted_here(param.grad, sharding, grid))
    device = next(iter(params.values())).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for axes in sorted(by_axes):  # the same order on all ranks: collectives match by order
        # A rank without such weights takes part all the same: the norm of no tensors is 0.
        squared = torch.nn.utils.get_total_norm(by_axes[axes]).to(device, torch.float64).square()
        if axes:
            dist.all_reduce(squared, group=grid.group(*axes))
        total += squared
    dist.all_reduce(total, group=grid.group("pp"))  # every stage has other weights
    return total.sqrt()


def full_state_dict(
    module: nn.Module,
    params: Params,
    shardings: Shardings,
    full_weights: Mapping[str, FullWeight],
    grid: Grid,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The state dict of the whole model, one entry at a time, on every rank.

    All ranks of the model iterate over it together. All weights come in one dtype, the widest of
    this rank's: a frozen weight may be kept in a narrower one.

    Communicates: what `ParamSharding.full` does for each sharded weight, and a broadcast of each
        whole weight over pp.

    Args:
        module: This rank's part of the model.
        params: What this rank holds of each of its weights.
        shardings: How each of them is spread.
        full_weights: All weights of the whole model, in the order of the state dict.
    """
    first_names = {id(param): name for name, param in module.named_parameters()}
    own = dict(module.named_parameters(remove_duplicate=False))  # tied weights under both names
    device = next(iter(params.values())).device
    dtype = functools.reduce(torch.promote_types, {param.dtype for param in params.values()})
    group = grid.group("pp")
    # A generator, one weight at a time: no rank ever holds the whole model.
    for name, (stage, shape) in full_weights.items():
        if stage == grid.coord("pp"):
            first_name = first_names[id(own[name])]
            sharding = shardings[first_name]
            whole = sharding.full(params[first_name].detach(), grid).to(dtype).contiguous()
        else:
            whole = torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(whole, src=dist.get_global_rank(group, stage), group=group)
        yield name, whole


def _broadcast(param: nn.Parameter, group: dist.ProcessGroup) -> None:
    dist.broadcast(param.data, src=dist.get_global_rank(group, 0), group=group)


def _gather_parts(
    own: torch.Tensor, shard: Shard, shape: torch.Size, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """The parts of all ranks. Broadcasts, because the parts may differ in size."""
    # All-gather wants equal parts, and padding them would need as much care as this loop. It runs
    # only where whole weights are collected, to save or to compare them.
    parts = []
    for index in range(group.size()):
        if index == group.rank():
            part = own.contiguous()
        else:
            part = own.new_empty(shard.part_shape(shape, index, group.size()))
        dist.broadcast(part, src=dist.get_global_rank(group, index), group=group)
        parts.append(part)
    return parts


def _gradients(params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients of some weights; one that took no part in backward has a gradient of zero."""
    grads = []
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        grads.append(param.grad)
    return grads


def _own_pieces(
    grad: torch.Tensor, sharding: ParamSharding, index: int, parts: int
) -> list[tuple[int, torch.Tensor]]:
    """(copies, view of the gradient) for each section of a weight that tp cuts."""
    shard = sharding.shards["tp"]
    example = torch.empty(sharding.shape, device="meta")
    lengths = [piece.shape[shard.dim] for piece in shard.pieces(example, index, parts)]
    pieces = grad.split(lengths, shard.dim)
    return [(shard.copies_of(number), piece) for number, piece in enumerate(pieces)]


def _has_copies(sharding: ParamSharding) -> bool:
    shard = sharding.shards.get("tp")
    return shard is not None and shard.copies is not None and max(shard.copies) > 1


def _sum_copied_sections(params: Params, shardings: Shardings, group: dist.ProcessGroup) -> None:
    """Sum the gradients of key/value heads over the ranks that hold copies of them.

    Each of these ranks has other query heads, so each saw a part of the gradient. The ranks with
    the same copy are no group of the grid; so all of tp sum the whole sections, to which each rank
    adds in its own place. These sections are small: they have fewer heads than there are ranks.
    """
    rank = group.rank()
    buffers = []  # whole sections
    places = []  # (view of a gradient, view of the buffer where its sum arrives)
    for name, param in params.items():
        (grad,) = _gradients([param])
        for copies, piece in _own_pieces(grad, shardings[name], rank, group.size()):
            if copies == 1:
                continue
            num_pieces = group.size() // copies
            # The whole section, zero but for this rank's piece: the sum over all of tp adds up the
            # copies of each piece, and nothing else.
            buffer = piece.new_zeros((num_pieces, *piece.shape))  # [pieces, shape of one piece]
            place = buffer[rank // copies]
            place.copy_(piece)
            buffers.append(buffer)
            places.append((piece, place))
    in_one_message(buffers, dist.all_reduce, group=group)
    for piece, place in places:
        piece.copy_(place)


def _counted_here(grad: torch.Tensor, sharding: ParamSharding, grid: Grid) -> list[torch.Tensor]:
    """What this rank adds to the norm: of several copies of a section the first one counts."""
    over_dp = sharding.shards.get("dp")
    if over_dp is not None and grid.coord("dp") >= grid.size("dp") // over_dp.copies_of(0):
        return []  # hybrid sharding: the first ranks of dp are the first copy of the model
    if not _has_copies(sharding):
        return [grad]
    index = grid.coord("tp")
    pieces = _own_pieces(grad, sharding, index, grid.size("tp"))
    return [piece for copies, piece in pieces if index % copies == 0]
