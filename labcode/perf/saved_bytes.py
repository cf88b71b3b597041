"""The activations that a forward pass keeps in memory for its backward, measured by module.

with saved_bytes(model) as saved:
    loss = model(tokens).mean()
print(saved.total(), saved.by_module())        # bytes; 0 once the backward is done
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn


class Saved:
    """The memory that autograd holds on to now.

    Each storage counts once and whole, however many tensors look into it. Weights are left out.
    Under autocast the narrow copies of weights are not: they are made for this pass alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
        # Autograd owns what it saved. Only weak references are kept here, so that what it lets go
        # of disappears here too.
        self._held: weakref.WeakSet[_Held] = weakref.WeakSet()
        self._running = [""]  # names of the modules that run now, the innermost last
        self._order = itertools.count()

    def total(self) -> int:
        """Bytes that are held now."""
        return sum(self.by_module().values())

    def by_module(self) -> dict[str, int]:
        """Bytes that are held now, by the name of the module that saved them.

        Memory that several modules hold belongs to the first of them; "" is what runs outside the
        model.
        """
        found: Counter[str] = Counter()
        counted = set(self._weights)
        for held in sorted(self._held, key=_number):
            memory = _memory(held.tensor)
            if memory not in counted:
                counted.add(memory)
                found[held.module] += held.tensor.untyped_storage().nbytes()
        return dict(found)

    def hook_into(self, name: str, module: nn.Module) -> list[Callable[[], None]]:
        """Watch when `module` runs; the functions that end it."""
        begin = module.register_forward_pre_hook(partial(self._begin, name))
        end = module.register_forward_hook(self._end, always_call=True)
        return [begin.remove, end.remove]

    def pack(self, tensor: torch.Tensor) -> "_Held":
        """What autograd keeps in place of a tensor that it saves."""
        held = _Held(tensor, self._running[-1], next(self._order))
        self._held.add(held)
        return held

    def _begin(self, name: str, module: nn.Module, args: object) -> None:
        self._running.append(name)

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        self._running.pop()


class _Held:
    """A saved tensor, the name of its module, and its number in the order of saving."""

    def __init__(self, tensor: torch.Tensor, module: str, number: int) -> None:
        self.tensor = tensor
        self.module = module
        self.number = number


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[Saved]:
    """Watch what is saved for backward inside the block; run the forward in it.

    The numbers are those of the moment of asking: ask after the forward and before the backward for
    the most there is. What an operation needs only while it runs is not among them, nor are
    gradients and the optimizer's state.

    Args:
        model: The module; its weights do not count, and its submodules give the names.

    Held by: tests/ranks/test_activation_bytes.py
    """
    saved = Saved(model)
    undo = []
    for name, module in model.named_modules():
        undo += saved.hook_into(name, module)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, _unpack):
            yield saved
    finally:
        for remove in undo:
            remove()


def _unpack(held: _Held) -> torch.Tensor:
    return held.tensor


def _number(held: _Held) -> int:
    return held.number


def _memory(tensor: torch.Tensor) -> int:
    """What tells storages apart: the same for two tensors over one memory, fake ones too."""
    return tensor.untyped_storage()._cdata
