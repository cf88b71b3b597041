"""What each collective sends, adds and receives, with gloo's own rules.

The rules have to be copied, or wrong code would pass: which dtypes gloo knows, which shapes the
parts of all_gather, reduce_scatter and scatter may have, and that a message is contiguous. Three of
gloo's liberties are refused here. In two of them gloo gives garbage without a word: a tensor with
gaps in its memory, and an all_to_all of a tensor without equal parts. The third, a tensor that is
dense and not contiguous, NCCL refuses.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

SUMS: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
WITH_ROOT = ("broadcast", "reduce", "scatter", "gather")
DTYPES = (  # that gloo knows in a collective; in a message it takes any
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex128,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)
EQUAL_PARTS = ("all_reduce", "reduce", "reduce_scatter", "all_gather")  # on all ranks


class Tensors(NamedTuple):
    """The tensors of one rank in a collective.

    Args:
        own: The rank's own tensor, which names the call.
        sends: What it sends; for a reduce_scatter or an all_to_all a part for each rank.
        receives: Tensors that it receives into.
    """

    own: Tensor
    sends: Sequence[Tensor]
    receives: Sequence[Tensor]


# ---- what a rank passes; p is the size of the group


def _in_place(p: int, tensors: list) -> Tensors:
    return Tensors(tensors[0], tensors, tensors)


def _all_gather(p: int, outputs: list, inputs: list) -> Tensors:
    parts = list(itertools.chain.from_iterable(outputs))
    return Tensors(inputs[0], inputs, _alike(p, parts, inputs[0]))


def _all_gather_single(p: int, output: Tensor, own: Tensor) -> Tensors:
    return Tensors(own, [own], _parts(p, [output], [own]))


def _all_gather_coalesced(p: int, outputs: list, inputs: list) -> Tensors:
    return Tensors(inputs[0], inputs, _parts(p, outputs, inputs))


def _gather(p: int, outputs: list, inputs: list) -> Tensors:
    receives = _alike(p, outputs[0], inputs[0]) if outputs else []
    return Tensors(inputs[0], inputs, receives)


def _scatter(p: int, outputs: list, inputs: list) -> Tensors:
    sends = _alike(p, inputs[0], outputs[0]) if inputs else []
    return Tensors(outputs[0], sends, outputs)


def _reduce_scatter(p: int, outputs: list, inputs: list) -> Tensors:
    """The parts may have different shapes; a rank's own part has the shape of its output."""
    (parts,) = inputs
    if len(parts) != p:
        raise ValueError("invalid input tensor list size, must be world size")  # gloo's own words
    if outputs[0].shape not in [part.shape for part in parts]:
        parts = _alike(p, parts, outputs[0])
    return Tensors(outputs[0], parts, outputs)


def _reduce_scatter_single(p: int, output: Tensor, own: Tensor) -> Tensors:
    return Tensors(own, _parts(p, [own], [output]), [output])


def _reduce_scatter_coalesced(p: int, outputs: list, inputs: list) -> Tensors:
    return Tensors(inputs[0], _parts(p, inputs, outputs), outputs)


def _all_to_all(p: int, outputs: list, inputs: list) -> Tensors:
    return Tensors(inputs[0], inputs, outputs)


def _all_to_all_single(
    p: int, output: Tensor, own: Tensor, output_sizes: list[int], input_sizes: list[int]
) -> Tensors:
    return Tensors(own, _cut(p, own, input_sizes), _cut(p, output, output_sizes))


def _barrier(p: int) -> Tensors:
    return Tensors(torch.empty(0, dtype=torch.uint8), [], [])


class Method(NamedTuple):
    """One method of a process group.

    Args:
        kind: The collective that it is.
        tensors: Makes of what it is given what is sent and received.
        num_arguments: How many it takes before its options.
    """

    kind: str
    tensors: Callable[..., Tensors]
    num_arguments: int


METHODS = {
    "allreduce": Method("all_reduce", _in_place, 1),
    "allreduce_coalesced": Method("all_reduce", _in_place, 1),
    "reduce": Method("reduce", _in_place, 1),
    "broadcast": Method("broadcast", _in_place, 1),
    "allgather": Method("all_gather", _all_gather, 2),
    "all_gather_single": Method("all_gather", _all_gather_single, 2),
    "all_gather_single_coalesced": Method("all_gather", _all_gather_coalesced, 2),
    "gather": Method("gather", _gather, 2),
    "scatter": Method("scatter", _scatter, 2),
    "reduce_scatter": Method("reduce_scatter", _reduce_scatter, 2),
    "reduce_scatter_single": Method("reduce_scatter", _reduce_scatter_single, 2),
    "reduce_scatter_single_coalesced": Method("reduce_scatter", _reduce_scatter_coalesced, 2),
    "alltoall": Method("all_to_all", _all_to_all, 2),
    "all_to_all_single": Method("all_to_all", _all_to_all_single, 4),
    "barrier": Method("barrier", _barrier, 0),
}
BEFORE_2_13 = {  # how torch called them until 2.12
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


def _parts(p: int, wholes: list, parts: list) -> list[Tensor]:
    """Tensors cut along dim 0 into one part for each rank."""
    found = []
    for whole, part in zip(wholes, parts):
        first, *rest = part.shape or (1,)
        if tuple(whole.shape) != (p * first, *rest):
            raise ValueError(
                f"a tensor {list(whole.shape)} does not consist of {p} tensors {list(part.shape)}"
            )
        found += whole.detach().chunk(p)
    return found


def _alike(p: int, many: list, one: Tensor) -> list[Tensor]:
    """A list of tensors, one for each rank, of one shape."""
    shapes = [list(other.shape) for other in many]
    if shapes != [list(one.shape)] * p:
        raise ValueError(f"the list holds tensors {shapes}, it needs {p} tensors {list(one.shape)}")
    return many


def _cut(p: int, whole: Tensor, sizes: list[int]) -> list[Tensor]:
    """A tensor cut along dim 0, into parts of these sizes or into equal ones."""
    if not sizes and whole.shape[0] % p:
        raise ValueError(f"a tensor {list(whole.shape)} has no {p} equal parts along dim 0")
    return list(whole.detach().split(sizes or whole.shape[0] // p))


def check_dense(tensors: Any) -> None:
    """Gloo takes the memory of a tensor as it lies there, whatever its strides are.

    Where the memory was given back (`resize_(0)` of the storage), gloo ends the whole process.
    """
    for one in tree_leaves(tensors):
        if not isinstance(one, Tensor) or one.numel() == 0:
            continue
        last = sum((size - 1) * step for size, step in zip(one.shape, one.stride()))
        if last + 1 != one.numel():
            raise ValueError(
                "a tensor has gaps in its memory, NCCL refuses it and gloo may send what lies in "
                "the gaps: pass x.contiguous()"
            )
        needs = (one.storage_offset() + one.numel()) * one.element_size()
        if one.untyped_storage().nbytes() < needs:
            raise ValueError("a tensor has no memory: its storage is too small for it")


def check_contiguous(tensors: Any) -> None:
    """NCCL takes the tensors of a collective only if they are contiguous (or channels-last).

    Source: `check_gpu_single_tensor` of torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp.
    """
    for one in tree_leaves(tensors):
        if isinstance(one, Tensor) and not one.is_contiguous():
            raise ValueError("NCCL's words: Tensors must be contiguous. Pass x.contiguous()")


def check_dtype(tensors: Any) -> None:
    """Gloo knows neither 8-bit floats nor integers of 16 bits."""
    for one in tree_leaves(tensors):
        if isinstance(one, Tensor) and one.dtype not in DTYPES:
            raise ValueError(f"gloo does not know {one.dtype} (its words: Invalid scalar type)")


# ---- what comes of it


def received(
    kind: str, op: str, root: int | None, number: int, sent: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """What comes to one rank of a group, in the order of the tensors into which it receives.

    Args:
        kind: The collective.
        op: How it adds.
        root: Number of the root in the group.
        number: Number of the rank that receives, in the group.
        sent: What each rank of the group sends.
    """
    if kind == "all_reduce" or (kind == "reduce" and number == root):
        return _sums(op, sent)
    if kind == "reduce_scatter":  # several tensors one after the other, of each a part for all
        own_parts = [parts[number :: len(sent)] for parts in sent]
        return _sums(op, own_parts)
    if kind == "all_gather" or (kind == "gather" and number == root):
        return list(itertools.chain.from_iterable(zip(*sent)))
    if kind == "broadcast":
        assert root is not None
        return list(sent[root])
    if kind == "scatter":
        assert root is not None
        return [sent[root][number]]
    if kind == "all_to_all":
        return [parts[number] for parts in sent]
    return []  # a barrier; and not the root of a reduce or gather


def _sums(op: str, sent: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    sums = []
    for parts in zip(*sent):
        total = functools.reduce(SUMS[op], [part.flatten() for part in parts])
        sums.append(total / len(sent) if op == "AVG" else total)
    return sums
