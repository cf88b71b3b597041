"""What a forward pass keeps in memory for its backward, measured: the activations, by the module that keeps them.

with saved_bytes(model) as saved:
    loss = model(tokens).mean()
print(saved.total(), saved.by_module())        # bytes; 0 once the backward is done
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Saved:
    """The memories that autograd holds on to now, each counted once and whole, however many tensors look into it.

    Weights are left out. Under autocast the narrow copies of weights are not, they are made for this pass alone.
    """

    def __init__(self, model: nn.Module):
        self._weights = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._held = (
            weakref.WeakSet()
        )  # autograd owns what it saved; what it lets go of disappears here too
        self._running, self._order = [""], itertools.count()

    def total(self) -> int:
        """Bytes that are held now."""
        return sum(self.by_module().values())

    def by_module(self) -> dict[str, int]:
        """{name of a module: bytes}; a memory that several hold belongs to the first; "" is what runs outside the model."""
        found: Counter[str] = Counter()
        counted = set(self._weights)
        for held in sorted(self._held, key=lambda held: held.order):
            if _memory(held.tensor) not in counted:
                counted.add(_memory(held.tensor))
                found[held.module] += held.tensor.untyped_storage().nbytes()
        return dict(found)

    def _pack(self, tensor):
        held = _Held(tensor, self._running[-1], next(self._order))
        self._held.add(held)
        return held

    def _done(self, module, args, output):
        self._running.pop()


class _Held:
    """A saved tensor, who saved it, and as which one."""

    def __init__(self, tensor, module, order):
        self.tensor, self.module, self.order = tensor, module, order


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[Saved]:
    """Watch what is saved for backward inside the block; run the forward in it.

    The numbers are those of the moment of asking, so ask after the forward and before the backward for the most there is.
    What an operation needs only while it runs is not among them, nor are gradients and the optimizer's numbers.

    Args:
        model: Its weights do not count, and its modules give the names.

    Held by: tests/ranks/test_activation_bytes.py
    """
    saved, hooks = Saved(model), []
    for name, module in model.named_modules():
        hooks.append(
            module.register_forward_pre_hook(lambda *_, name=name: saved._running.append(name))
        )
        hooks.append(module.register_forward_hook(saved._done, always_call=True))
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved._pack, lambda held: held.tensor):
            yield saved
    finally:
        for hook in hooks:
            hook.remove()


def _memory(tensor):
    """What two tensors over the same memory have in common."""
    return tensor.untyped_storage().data_ptr()
