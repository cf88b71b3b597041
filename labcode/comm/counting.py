"""Which collectives a piece of code starts, and how many bytes each one moves.

    with counted() as calls:
        loss.backward()
    print(totals(calls))        # {"all_reduce": (2, 65536)}

`CollectiveSpy` is the one place that looks at collectives from outside. `counted` writes them down;
the lessons' checks ask it what a learner called; the emulated cluster delays them.

Only what this process starts is seen: calls of `torch.distributed`, those of DDP and DTensor, those
made in backward. The bytes are those of the whole tensor: the n of `perf.alpha_beta`, which says
how much of it a rank sends.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

BARRIER = "barrier"
_PROCESS_GROUP = "__torch__.torch.classes.c10d.ProcessGroup"


class Call(NamedTuple):
    """One collective, or one message, as plain values that can be sent to another process.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather,
            scatter, send or recv.
        num_bytes: Size of the whole tensor: what every rank holds before an all-reduce or a
            reduce-scatter, or after an all-gather; size of the one message for send and recv.
        group_size: How many ranks take part.
    """

    kind: str
    num_bytes: int
    group_size: int


@contextlib.contextmanager
def counted() -> Iterator[list[Call]]:
    """List the collectives that this process starts inside the block, in order.

    Barriers and waits do not count. Costs some microseconds of Python for each operation inside, so
    time something else. What backward starts belongs to the block in which `backward()` is called.

    Held by: tests/ranks/test_counting.py
    """
    counter = _Counter()
    with counter:
        yield counter.calls


def totals(calls: Iterable[Call]) -> dict[str, tuple[int, int]]:
    """{kind: (number of calls, their bytes)}, in the order of first use."""
    found: dict[str, tuple[int, int]] = {}
    for call in calls:
        number, num_bytes = found.get(call.kind, (0, 0))
        found[call.kind] = (number + 1, num_bytes + call.num_bytes)
    return found


# ---- the spy


class Collective(NamedTuple):
    """One collective, message or barrier that is about to start.

    Args:
        name: One of the names of `Call.kind`, or "barrier".
        group: The process group that it runs in.
        num_bytes: See `Call.num_bytes`; 0 for a barrier.
        ranks: Global ranks: all members of the group, in order; (sender, receiver) for send and
            recv. The sender is -1 where a message from any rank is received.
    """

    name: str
    group: dist.ProcessGroup
    num_bytes: int
    ranks: tuple[int, ...]


class CollectiveSpy(TorchDispatchMode):
    """Sees every operation of this process before it runs, in forward and in backward.

    To PyTorch a collective is an operation like any other, so a dispatch mode sees those of DDP and
    DTensor too. Subclasses override one method or both; each decides when the operation runs, and
    returns its result:

        class Printing(CollectiveSpy):
            def on_collective(self, call, start):
                print(call.name, call.num_bytes)
                return start()

        with Printing():
            loss.backward()

    The result of a collective holds the `Work` to wait for: `wait_for(result)` does so.

    Held by: tests/ranks/test_counting.py::test_the_spy_may_act_before_and_after_a_collective
    """

    def on_collective(self, call: Collective, start: Callable[[], Any]) -> Any:
        """Called in place of a collective, message or barrier; `start()` starts it."""
        return start()

    def on_operation(
        self, operation: torch._ops.OpOverload, args: tuple, kwargs: Mapping[str, Any]
    ) -> Any:
        """Called in place of every other operation; `operation(*args, **kwargs)` runs it."""
        return operation(*args, **kwargs)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for kind in types:
            if kind.__name__ == "DTensor":
                return NotImplemented  # it then does the same on plain tensors, which we see
        kwargs = kwargs or {}
        # Inside this method the mode is off, so what `func` calls in turn is not seen again.
        call = _as_collective(func, args)
        if call is None:
            return self.on_operation(func, args, kwargs)
        return self.on_collective(call, lambda: func(*args, **kwargs))


def wait_for(result: Any) -> None:
    """Wait until a collective is done.

    Args:
        result: What `start()` of `CollectiveSpy.on_collective` has returned.
    """
    if isinstance(result, (tuple, list)):
        result = result[-1]
    # c10d returns its Work boxed, alone or after the tensors
    if isinstance(result, torch.ScriptObject):
        dist.Work.unbox(result).wait()


class _Counter(CollectiveSpy):
    """A spy that lists everything but barriers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def on_collective(self, call: Collective, start: Callable[[], Any]) -> Any:
        if call.name != BARRIER:
            self.calls.append(Call(call.name, call.num_bytes, call.group.size()))
        return start()


# ---- how torch spells each of them


class _Operation(NamedTuple):
    """Where an operation of torch keeps what counts.

    Args:
        name: What we call it.
        tensors: Number of the argument with the tensor, the list of tensors or the list of such
            lists.
        is_part: Whether that is one rank's part of the whole.
        peer: Number of the argument with the other rank of a message, counted within the group.
    """

    name: str
    tensors: int = 0
    is_part: bool = False
    peer: int | None = None


# By namespace and name, without the underscore at the end that says "in place".
_OPERATIONS = {
    "c10d": {
        "allreduce": _Operation("all_reduce"),
        "allreduce_coalesced": _Operation("all_reduce"),
        "broadcast": _Operation("broadcast"),
        "reduce": _Operation("reduce"),
        "allgather": _Operation("all_gather", tensors=1, is_part=True),
        "allgather_coalesced": _Operation("all_gather", tensors=1, is_part=True),
        "_allgather_base": _Operation("all_gather"),
        "allgather_into_tensor_coalesced": _Operation("all_gather"),
        "reduce_scatter": _Operation("reduce_scatter", is_part=True),
        "_reduce_scatter_base": _Operation("reduce_scatter", tensors=1),
        "reduce_scatter_tensor_coalesced": _Operation("reduce_scatter", tensors=1),
        "alltoall": _Operation("all_to_all", tensors=1),
        "alltoall_base": _Operation("all_to_all", tensors=1),
        "gather": _Operation("gather", tensors=1, is_part=True),
        "scatter": _Operation("scatter", is_part=True),
        "send": _Operation("send", peer=2),
        "recv": _Operation("recv", peer=2),
        "recv_any_source": _Operation("recv"),
        BARRIER: _Operation(BARRIER),
        "monitored_barrier": _Operation(BARRIER),
    },
    "_c10d_functional": {  # what DTensor calls
        "all_reduce": _Operation("all_reduce"),
        "all_reduce_coalesced": _Operation("all_reduce"),
        "broadcast": _Operation("broadcast"),
        "all_gather_into_tensor": _Operation("all_gather", is_part=True),
        "all_gather_into_tensor_out": _Operation("all_gather", is_part=True),
        "all_gather_into_tensor_coalesced": _Operation("all_gather", is_part=True),
        "reduce_scatter_tensor": _Operation("reduce_scatter"),
        "reduce_scatter_tensor_out": _Operation("reduce_scatter"),
        "reduce_scatter_tensor_coalesced": _Operation("reduce_scatter"),
        "all_to_all_single": _Operation("all_to_all"),
    },
}


def _as_collective(func: torch._ops.OpOverload, args: tuple) -> Collective | None:
    """What an operation of torch is to the spy; None if it is no collective."""
    operations = _OPERATIONS.get(func.namespace)
    if operations is None:
        return None
    name = func._schema.name.removeprefix(func.namespace + "::").removesuffix("_")
    operation = operations.get(name)
    if operation is None:
        return None
    # Where the tensors and the group stand among the arguments differs from operation to operation.
    group = _group_of(args)
    return Collective(
        operation.name, group, _num_bytes(operation, args, group), _ranks(operation, args, group)
    )


def _num_bytes(operation: _Operation, args: tuple, group: dist.ProcessGroup) -> int:
    if operation.name == BARRIER:
        return 0
    num_bytes = _bytes(args[operation.tensors])
    if operation.is_part:
        num_bytes *= group.size()
    return num_bytes


def _bytes(tensors: Any) -> int:
    """The size of a tensor, or of nested lists of tensors, in bytes."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors)


def _ranks(operation: _Operation, args: tuple, group: dist.ProcessGroup) -> tuple[int, ...]:
    if operation.name not in ("send", "recv"):
        return tuple(dist.get_process_group_ranks(group))
    me = dist.get_rank()
    peer = -1
    if operation.peer is not None:
        peer = dist.get_global_rank(group, args[operation.peer])
    return (me, peer) if operation.name == "send" else (peer, me)


def _group_of(args: tuple) -> dist.ProcessGroup:
    """The group among the arguments: boxed in c10d; as a name or itself, and last, in functional
    collectives.
    """
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and arg._type().qualified_name() == _PROCESS_GROUP:
            return dist.ProcessGroup.unbox(arg)
    last = args[-1]
    if isinstance(last, str):
        return dist.distributed_c10d._resolve_process_group(last)  # pyright: ignore
    return last
