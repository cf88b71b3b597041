"""The backward of a linear layer in two halves: the gradient of its input now, its weight's later.

    dx = dy W            the stage before waits for it
    dW = dy^T x          only the optimizer waits for it

A pipeline that fills its idle time with dW has a smaller bubble. Inside `with store.watching():`
every linear layer becomes one whose backward can leave dW to the store: the sharded layers ask for
the store themselves (`parallel.linear`), and each `F.linear` of a parameter is exchanged. All other
gradients (norms, biases, embeddings) are small and are computed at once.

Source: Qi et al. 2023 (arXiv:2401.10241), section 2; the idea of a store of weight gradients is
    that of its implementation.
Held by: tests/ranks/test_pipeline.py
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from labcode.parallel.linear import PLAIN_PRODUCT, current_store, deferrable_linear


class DeferredGradient(NamedTuple):
    """The gradient of a weight that has not been computed yet."""

    weight: nn.Parameter
    compute: Callable[[], torch.Tensor]


class WeightGradientStore:
    """Where the weights' halves of a backward wait. Each rank has one."""

    def __init__(self) -> None:
        self._waiting: list[DeferredGradient] | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around a forward, and around its repetition under activation checkpointing."""
        # A context variable: the layers are built before there is a store to give them.
        # It is reset, so that no later forward puts off what nobody would finish.
        token = current_store.set(self)
        try:
            with _ExchangeLinear(self):
                yield
        finally:
            current_store.reset(token)

    @contextlib.contextmanager
    def later(self) -> Iterator[list[DeferredGradient]]:
        """Around a backward: what it leaves undone is in the list that this gives."""
        waiting: list[DeferredGradient] = []
        self._waiting = waiting
        try:
            yield waiting
        finally:
            self._waiting = None

    def keep(self, weight: nn.Parameter, compute: Callable[[], torch.Tensor]) -> bool:
        """Take one product over for later; False outside `later`."""
        if self._waiting is None:
            return False
        self._waiting.append(DeferredGradient(weight, compute))
        return True


@torch.no_grad()
def finish(waiting: list[DeferredGradient]) -> None:
    """Compute what was left undone, add it to each weight's `.grad`, and forget it."""
    # Taken out one at a time: each entry holds an input and an output gradient of its layer, which
    # are freed as soon as its product is done.
    while waiting:
        weight, compute = waiting.pop(0)
        # Added by hand: for autograd this weight had no gradient, and its hooks do not run.
        grad = compute().to(weight.dtype)
        weight.grad = grad if weight.grad is None else weight.grad + grad


def same_watch() -> AbstractContextManager[Any]:
    """The context for a forward that backward repeats: watched if the forward is watched now."""
    store = current_store.get()
    if store is None:
        return contextlib.nullcontext()
    assert isinstance(store, WeightGradientStore)
    return store.watching()


class _ExchangeLinear(TorchFunctionMode):
    """Exchanges each `F.linear` of a parameter for one whose dW can be put off."""

    def __init__(self, store: WeightGradientStore) -> None:
        super().__init__()
        self.store = store

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # Without gradients there is no backward to halve, and a weight that is no parameter has no
        # `.grad` that `finish` could add to.
        if func is F.linear and not kwargs and torch.is_grad_enabled():
            x, weight, *rest = args
            if isinstance(weight, nn.Parameter):
                bias = rest[0] if rest else None
                return deferrable_linear(x, weight, bias, PLAIN_PRODUCT, self.store)
        return func(*args, **(kwargs or {}))
