"""Which collectives a piece of code starts, and how many bytes each is about.

    with counted() as calls:
        loss.backward()
    print(totals(calls))        # {"all_reduce": (2, 65536)}

What this process alone starts is written down: calls of `torch.distributed`, those of DDP's and DTensor's, those made in
backward. The bytes are those of the whole tensor, the n of `perf.comm`, which says how much of it a rank sends.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Call(NamedTuple):
    """One collective, or one message.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send or recv.
        num_bytes: Of the whole tensor: what every rank holds before an all-reduce or a reduce-scatter, or after an
            all-gather; of the one message for send and recv.
        group_size: How many ranks take part.
    """

    kind: str
    num_bytes: int
    group_size: int


@contextlib.contextmanager
def counted() -> Iterator[list[Call]]:
    """Write down what this process starts inside the block, in order; barriers and waits do not count.

    Costs some microseconds of Python for each operation inside, so time something else. What backward starts belongs to the
    block that `backward()` is called in.

    Held by: tests/ranks/test_counting.py
    """
    calls: list[Call] = []
    with _Watch(calls):
        yield calls


def totals(calls: Iterable[Call]) -> dict[str, tuple[int, int]]:
    """{kind: (how many, their bytes)}, in the order of first use."""
    found: dict[str, tuple[int, int]] = {}
    for call in calls:
        number, num_bytes = found.get(call.kind, (0, 0))
        found[call.kind] = (number + 1, num_bytes + call.num_bytes)
    return found


def _whole(place: int) -> Callable:
    """The bytes of argument number `place`, a tensor or lists of tensors."""
    return lambda args, size: _bytes(args[place])


def _part(place: int) -> Callable:
    """The bytes of an argument that is one rank's part of the whole."""
    return lambda args, size: _bytes(args[place]) * size


# Where each operation of torch keeps the tensor that counts. A name is looked up without its last underscore.
_OPERATIONS = {
    "c10d": {
        "allreduce": ("all_reduce", _whole(0)),
        "allreduce_coalesced": ("all_reduce", _whole(0)),
        "broadcast": ("broadcast", _whole(0)),
        "reduce": ("reduce", _whole(0)),
        "allgather": ("all_gather", _part(1)),
        "allgather_coalesced": ("all_gather", _part(1)),
        "_allgather_base": ("all_gather", _whole(0)),
        "allgather_into_tensor_coalesced": ("all_gather", _whole(0)),
        "reduce_scatter": ("reduce_scatter", _part(0)),
        "_reduce_scatter_base": ("reduce_scatter", _whole(1)),
        "reduce_scatter_tensor_coalesced": ("reduce_scatter", _whole(1)),
        "alltoall": ("all_to_all", _whole(1)),
        "alltoall_base": ("all_to_all", _whole(1)),
        "gather": ("gather", _part(1)),
        "scatter": ("scatter", _part(0)),
        "send": ("send", _whole(0)),
        "recv": ("recv", _whole(0)),
        "recv_any_source": ("recv", _whole(0)),
    },
    "_c10d_functional": {  # what DTensor calls
        "all_reduce": ("all_reduce", _whole(0)),
        "all_reduce_coalesced": ("all_reduce", _whole(0)),
        "broadcast": ("broadcast", _whole(0)),
        "all_gather_into_tensor": ("all_gather", _part(0)),
        "all_gather_into_tensor_out": ("all_gather", _part(0)),
        "all_gather_into_tensor_coalesced": ("all_gather", _part(0)),
        "reduce_scatter_tensor": ("reduce_scatter", _whole(0)),
        "reduce_scatter_tensor_out": ("reduce_scatter", _whole(0)),
        "reduce_scatter_tensor_coalesced": ("reduce_scatter", _whole(0)),
        "all_to_all_single": ("all_to_all", _whole(0)),
    },
}


class _Watch(TorchDispatchMode):
    """Sees every operation before it runs; collectives are operations of torch like any other."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it does the same on plain tensors next, and those come by here again
        name = func._schema.name.removeprefix(func.namespace + "::").removesuffix("_")
        found = _OPERATIONS.get(func.namespace, {}).get(name)
        if found:
            kind, bytes_of = found
            size = _group_size(args)
            self.calls.append(Call(kind, bytes_of(args, size), size))
        return func(*args, **(kwargs or {}))


def _bytes(tensors):
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors)


def _group_size(args):
    """From the group, which comes boxed or, for functional collectives, as the last argument: its name or itself."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and arg._type().name() == "ProcessGroup":
            return dist.ProcessGroup.unbox(arg).size()
    last = args[-1]
    return (
        torch._C._distributed_c10d._resolve_process_group(last) if isinstance(last, str) else last
    ).size()
