"""What a learner's code sends, calls and makes on a rank, and trials of it in several groups.

    run_trial(ranks, _trial, answer)      # AssertionError with the first hint of a rank

`_trial(group, answer)` runs on the ranks of each group and returns a hint, or "" where all is
right.
"""

import gc
import importlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from labcode.comm.counting import BARRIER, Collective, CollectiveSpy
from labcode.pool.ranks import Ranks
from labcode.teach.exercises.on_ranks import GROUPS, IMPORT_LIMIT_S, in_groups

MAX_CALLS = 100  # far above what any exercise needs on four ranks
LET_GO_S = 2.0  # how long gloo's own threads may hold the tensors of a call that is done


class Memory:
    """Pieces of memory behind tensors, each known by a weak reference, so that none is kept."""

    def __init__(self) -> None:
        self._pieces: dict[StorageWeakRef, int] = {}  # with the bytes of each

    def add(self, tensor: torch.Tensor) -> None:
        """Note the memory behind a tensor; that of a view is that of the whole."""
        storage = tensor.untyped_storage()
        self._pieces.setdefault(StorageWeakRef(storage), storage.nbytes())

    def __contains__(self, piece: StorageWeakRef) -> bool:
        return piece in self._pieces

    def alive(self) -> dict[StorageWeakRef, int]:
        """What still exists, with its bytes."""
        return {piece: size for piece, size in self._pieces.items() if not piece.expired()}


class Watch(CollectiveSpy):
    """What this rank sends, calls and makes while it is active.

    A loop without an end that sends is ended: after `MAX_CALLS` calls an assertion fails.

    Attributes:
        calls: Messages and collectives, in order; no barriers.
        largest: Elements of the largest tensor that an operation has given.
        most_arrived: The most bytes of messages that had arrived, or were about to, and were alive
            together while something was computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []
        self.largest = 0
        self.most_arrived = 0
        self._made = Memory()
        self._arrived = Memory()
        self._elements: dict[StorageWeakRef, int] = {}  # of the largest tensor in each piece

    def on_collective(self, call: Collective, start: Callable[[], Any]) -> Any:
        if call.name == BARRIER:
            return start()
        self.calls.append(call)
        assert len(self.calls) <= MAX_CALLS, (
            f"it has made more than {MAX_CALLS} calls and goes on: does your loop end?"
        )
        return start()

    def on_operation(
        self, operation: torch._ops.OpOverload, args: tuple, kwargs: Mapping[str, Any]
    ) -> Any:
        result = operation(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._made.add(tensor)
                piece = StorageWeakRef(tensor.untyped_storage())
                self._elements[piece] = max(tensor.numel(), self._elements.get(piece, 0))
        self.most_arrived = max(self.most_arrived, sum(self._arrived.alive().values()))
        return result

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "c10d" and func._schema.name.startswith("c10d::recv"):
            for tensor in args[0]:
                self._arrived.add(tensor)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def held(self, *others: torch.Tensor, at_most: int = 0) -> list[int]:
        """Bytes of each piece of memory that was made while this was active and is still alive.

        Args:
            others: Tensors that do not count.
            at_most: Bytes that are fine; for more, what gloo's threads still hold is waited for.
        """
        known = {StorageWeakRef(tensor.untyped_storage()) for tensor in others}
        end = time.monotonic() + LET_GO_S
        while True:
            gc.collect()
            sizes = [size for piece, size in self._made.alive().items() if piece not in known]
            if sum(sizes) <= at_most or time.monotonic() > end:
                return sizes
            time.sleep(0.01)

    def largest_without_messages(self) -> int:
        """Elements of the largest tensor into whose memory no message was received."""
        sizes = [size for piece, size in self._elements.items() if piece not in self._arrived]
        return max(sizes, default=0)

    def count(self, name: str) -> int:
        """How many calls of one kind were made."""
        return sum(call.name == name for call in self.calls)

    def sent_bytes(self) -> int:
        """Bytes of all messages that this rank sent with `send` or `isend`."""
        return sum(call.num_bytes for call in self.calls if call.name == "send")

    def receivers(self) -> set[int]:
        """The ranks to which this one sent messages."""
        return {call.ranks[1] for call in self.calls if call.name == "send"}

    def collectives(self) -> list[str]:
        """The names of all calls that are not messages."""
        return [call.name for call in self.calls if call.name not in ("send", "recv")]


def run_trial(ranks: Ranks, trial: Callable[..., str], *args: Any) -> None:
    """Run `trial(group, *args)` on all ranks, and then on some of them.

    Args:
        ranks: Four of them.
        trial: Returns a hint, or "".
        args: What it is given besides the group.

    Raises:
        AssertionError: With the hint of the first rank that has one, and in which group it was.
    """
    import_on(ranks, trial.__module__)
    in_groups(ranks, GROUPS, _assert_no_hint, trial, *args)


def import_on(ranks: Ranks, module: str) -> None:
    """Let the ranks import what a check needs, in time that is not the learner's."""
    ranks.run(_import, module, limit_s=IMPORT_LIMIT_S)


def _import(module: str) -> None:
    importlib.import_module(module)


def _assert_no_hint(group: dist.ProcessGroup, trial: Callable[..., str], *args: Any) -> None:
    hint = trial(group, *args)
    assert not hint, hint


def draw(group: dist.ProcessGroup, seed: int, *shape: int) -> torch.Tensor:
    """Random numbers in float64: the same on all ranks of a group, others in another group."""
    first = min(dist.get_process_group_ranks(group))
    generator = torch.Generator().manual_seed(100 * seed + first)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def own_part(whole: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's part along `dim`, in memory of its own."""
    return whole.chunk(group.size(), dim)[group.rank()].clone()


def far(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-9) -> bool:
    """Whether two tensors of one shape differ by more than rounding; nan is far from everything."""
    return not bool((a - b).abs().max() < tolerance)
