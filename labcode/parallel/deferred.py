"""The backward of a linear layer in two halves: the gradient of its input now, that of its weight later.

    dx = dy W            what the stage before waits for
    dW = dy^T x          what nobody waits for before the optimizer does

A pipeline that fills its idle time with dW has a smaller bubble. Inside `with store.watching():` every `F.linear` of a
weight becomes one whose backward can leave dW to the store; all other gradients (norms, biases, embeddings) are small and
are computed at once.
Source: Qi et al. 2023 (arXiv:2401.10241), section 2; the idea of a store of weight gradients is that of its implementation.
Held by: tests/ranks/test_pipeline.py
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from labcode.parallel.sequence import narrowed

Waiting = list[
    tuple[nn.Parameter, torch.Tensor, torch.Tensor]
]  # a weight, and the rows of dy and x


class WeightGradients:
    """Where the weights' halves of a backward wait. One for each rank."""

    def __init__(self):
        self._waiting: Waiting | None = None

    def watching(self) -> TorchFunctionMode:
        """Around a forward (and around its repetition in backward, where activations are recomputed)."""
        return _Watch(self)

    @contextlib.contextmanager
    def later(self) -> Iterator[Waiting]:
        """Around a backward: what it leaves undone is in the list that this gives."""
        self._waiting = waiting = []
        try:
            yield waiting
        finally:
            self._waiting = None

    def keep(self, weight, rows, x) -> bool:
        """Take one product over for later; False outside `later`."""
        if self._waiting is None:
            return False
        self._waiting.append((weight, rows, x))
        return True


@torch.no_grad()
def finish(waiting: Waiting) -> None:
    """Compute what was left undone, add it to each weight's `.grad`, and forget it."""
    while waiting:
        weight, rows, x = waiting.pop(0)
        grad = (rows.T @ x).to(weight.dtype)  # [outputs, tokens] @ [tokens, inputs]
        weight.grad = grad if weight.grad is None else weight.grad + grad


_watching: ContextVar["WeightGradients | None"] = ContextVar("watching", default=None)


def same_watch():
    """For `checkpoint(context_fn=...)`: what is run again in backward is watched if it was the first time."""
    store = _watching.get()
    return contextlib.nullcontext(), contextlib.nullcontext() if store is None else store.watching()


class _Watch(TorchFunctionMode):
    def __init__(self, store):
        super().__init__()
        self.store = store

    def __enter__(self):
        self.token = _watching.set(self.store)
        return super().__enter__()

    def __exit__(self, *error):
        _watching.reset(self.token)
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (
            func is F.linear
            and not kwargs
            and isinstance(args[1], nn.Parameter)
            and torch.is_grad_enabled()
        ):
            x, weight, bias = (*args, None)[:3]
            return _Linear.apply(*narrowed(x, weight, bias), weight, self.store)
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, param, store):
        ctx.save_for_backward(x, weight)
        ctx.param, ctx.store = param, store
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows, flat = grad.flatten(0, -2), x.flatten(0, -2)
        grad_weight = None
        if ctx.param.requires_grad and not ctx.store.keep(ctx.param, rows, flat):
            grad_weight = rows.T @ flat
        return (
            grad @ weight,
            grad_weight,
            rows.sum(0) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )
