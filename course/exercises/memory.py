"""What a piece of code makes in memory, and what of it is still there afterwards.

    with Made() as made:
        y = answer(x)
    made.alive(x, y)      # bytes of each piece of memory that somebody keeps
    made.largest          # elements of the largest tensor that there was

    with KeptForBackward() as kept:
        loss = answer(x)
    kept.num_bytes()      # what graphs still hold for a backward

On simulated ranks alone: gloo's own threads may hold the tensors of a call for a while.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Made(TorchDispatchMode):
    """The memory of all tensors that this rank's operations give while it is active.

    Nothing is kept alive by it. What a collective does inside is not seen.

    Attributes:
        largest: Elements of the largest tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self._pieces: dict[StorageWeakRef, int] = {}  # with the bytes of each

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for one in tensors_in((args, kwargs)):  # what is read and was not made here counts nothing
            self._pieces.setdefault(StorageWeakRef(one.untyped_storage()), 0)
        result = func(*args, **kwargs)
        for one in tensors_in(result):
            storage = one.untyped_storage()
            self._pieces.setdefault(StorageWeakRef(storage), storage.nbytes())
            self.largest = max(self.largest, one.numel())
        return result

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor was made here."""
        return self._pieces.get(StorageWeakRef(tensor.untyped_storage()), 0) > 0

    def alive(self, *others: torch.Tensor) -> list[int]:
        """Bytes of each piece of memory that was made here and still exists.

        Args:
            others: Tensors that do not count.
        """
        gc.collect()  # what objects in a circle hold is not kept; a simulation makes this fast
        known = {StorageWeakRef(one.untyped_storage()) for one in others}
        found = []
        for piece, num_bytes in self._pieces.items():
            if num_bytes > 0 and piece not in known and not piece.expired():
                found.append(num_bytes)
        return found


class _Saved:
    """A tensor that a graph holds: this object goes when the graph lets go of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class KeptForBackward(torch.autograd.graph.saved_tensors_hooks):
    """What the graphs that are made while it is active keep for their backward.

    A backward frees it, unless it was called with `retain_graph=True`; so does whoever lets go of
    the graph's last tensor.
    """

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[_Saved] = weakref.WeakSet()
        super().__init__(self._pack, _unpack)

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._alive.add(saved)
        return saved

    def num_bytes(self) -> int:
        """What is kept now; a tensor that two operations keep counts twice."""
        return sum(saved.tensor.nbytes for saved in self._alive)


def _unpack(saved: _Saved) -> torch.Tensor:
    return saved.tensor


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Those among the arguments or results of an operation; faster than `tree_leaves`."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    found = []
    for value in values:
        found += tensors_in(value)
    return found
