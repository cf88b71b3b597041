"""Marks in a recording that say what memory is for: activations, gradients, optimizer.

The profiler of PyTorch notes each allocation by its address, and not what it is for. A mark is a
named range without length, "memory: gradients 94570", which says it of what lies at that address at
that moment. `perf.memory_timeline` reads them from the trace.

PyTorch has a timeline of its own, `profile.export_memory_timeline`; it guesses the categories from
the order of operations, needs shapes and stacks to be recorded as well, and is deprecated.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from labcode.perf.memory_timeline import BEFORE, mark_name


class MemoryMarks:
    """Says what the memory of a training step is for, while a profiler records it.

    Activations are what autograd saves for the backward, as in `perf.saved_bytes`; gradients and
    the optimizer's state are marked where the optimizer makes its step, before and after it.

    Args:
        weights: Parameters of the module and this rank's rows of them; their gradients count.
        optimizer: Optimizer whose state counts.

    Held by: tests/unit/test_memory_timeline.py
    """

    def __init__(self, weights: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._weights = list(weights)
        self._optimizer = optimizer

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Around one step; the profiler must record already."""
        self._note_what_there_is()
        before = self._optimizer.register_step_pre_hook(self._before_update)
        after = self._optimizer.register_step_post_hook(self._after_update)
        self._own = _addresses(self._weights)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, _unpack):
                yield
        finally:
            before.remove()
            after.remove()

    def _note_what_there_is(self) -> None:
        """What was allocated before the recording, which has no events of it."""
        for category, tensors in (
            ("parameters", self._weights),
            ("gradients", self._gradients()),
            ("optimizer", self._state()),
        ):
            for address, num_bytes in _addresses(tensors).items():
                _mark(f"{BEFORE}{mark_name(category, address)} {num_bytes}")

    def _save(self, tensor: torch.Tensor) -> "_Saved":
        address = _own(tensor).untyped_storage().data_ptr()
        if address not in self._own:
            _mark(mark_name("activations", address))
        return _Saved(tensor)

    def _before_update(self, *_: object) -> None:
        for address in _addresses(self._gradients()):
            _mark(mark_name("gradients", address))

    def _after_update(self, *_: object) -> None:
        for address in _addresses(self._state()):
            _mark(mark_name("optimizer", address))

    def _gradients(self) -> list[torch.Tensor]:
        return [weight.grad for weight in self._weights if weight.grad is not None]

    def _state(self) -> list[torch.Tensor]:
        found = []
        for values in self._optimizer.state.values():
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    found.append(value)
        return found


class _Saved:
    """What autograd keeps in place of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _unpack(saved: _Saved) -> torch.Tensor:
    return saved.tensor


def _mark(name: str) -> None:
    with record_function(name):
        pass


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _addresses(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """{address: bytes} of the memory behind some tensors, that of views of one memory once."""
    found = {}
    for tensor in tensors:
        storage = _own(tensor).untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found
