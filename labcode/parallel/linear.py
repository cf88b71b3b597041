"""The linear layer as three matrix products, each of which can be exchanged or put off.

    y  = x W^T          forward
    dx = dy W           backward for the input: the layer before waits for it
    dW = dy^T x         backward for the weight: only the optimizer waits for it

`MatrixProduct` holds the three, so that a layer can be given others (in FP8, or with a probe). dW
can be left to a store (`parallel.deferred`), from which a pipeline with a zero-bubble schedule
fetches it when it has nothing else to do. Every sharded layer computes through here.

Shapes: x [.., S, H], W [F, H], y [.., S, F]; rows are all dims but the last one flattened.
Held by: tests/ranks/test_pipeline.py, tests/ranks/test_tensor.py
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn


def _forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _grad_input(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return grad @ weight


def _grad_weight(grad_rows: torch.Tensor, x_rows: torch.Tensor) -> torch.Tensor:
    return grad_rows.T @ x_rows


@dataclass(frozen=True)
class MatrixProduct:
    """The three matrix products of a linear layer.

    Args:
        forward: (x [.., H], weight [F, H], bias [F] or None) -> [.., F]
        grad_input: (grad [.., F], weight [F, H]) -> [.., H]
        grad_weight: (grad rows [T, F], x rows [T, H]) -> [F, H]
    """

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = _forward
    grad_input: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _grad_input
    grad_weight: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _grad_weight


PLAIN_PRODUCT = MatrixProduct()


class LinearFunction(Protocol):
    """A linear layer with a backward of its own, in place of three products (`precision.fp8`)."""

    def __call__(
        self, x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`x W^T + bias`; it asks `current_store` itself."""
        ...


Product = MatrixProduct | LinearFunction


class GradientStore(Protocol):
    """A store that may take over the gradient of a weight to compute it later."""

    def keep(self, weight: nn.Parameter, compute: Callable[[], torch.Tensor]) -> bool:
        """Take `compute` over, which returns the gradient; False: compute it now."""
        ...


# the store of the forward that runs now; None: all gradients are computed during backward
current_store: ContextVar[GradientStore | None] = ContextVar("current_store", default=None)


def linear(
    x: torch.Tensor,
    weight: nn.Parameter,
    bias: torch.Tensor | None,
    product: Product = PLAIN_PRODUCT,
) -> torch.Tensor:
    """`x W^T + bias` with exchangeable products, whose dW can be put off."""
    if not isinstance(product, MatrixProduct):
        return product(x, weight, bias)
    # Where nothing of ours is asked for, PyTorch does it: its backward runs without Python.
    store = current_store.get()
    autocast = torch.is_autocast_enabled(x.device.type)
    if product is PLAIN_PRODUCT and store is None and not autocast:
        return F.linear(x, weight, bias)  # the same, in PyTorch's own backward
    return deferrable_linear(x, weight, bias, product, store)


def deferrable_linear(
    x: torch.Tensor,
    weight: nn.Parameter,
    bias: torch.Tensor | None,
    product: MatrixProduct,
    store: GradientStore | None,
) -> torch.Tensor:
    """`linear` with our own backward in any case.

    Under autocast the weight is narrowed once more in backward. `F.linear` would keep the narrow
    copy until then: of all weights, for each micro-batch of a pipeline that is under way, and also
    where ZeRO-3 has thrown the wide ones away.

    Held by: tests/ranks/test_training_memory.py::test_no_micro_batch_keeps_narrow_weights
    """
    x_narrow, bias_narrow = narrowed(x, bias)
    return _Linear.apply(x_narrow, weight, bias_narrow, product, store)


def narrowed(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors in the dtype of autocast, if it is on.

    For what goes into an autograd Function: autocast does not look inside.
    """
    first = tensors[0]
    assert first is not None
    device = first.device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    cast = []
    for tensor in tensors:
        cast.append(None if tensor is None else tensor.to(dtype))
    return tuple(cast)


class _Linear(torch.autograd.Function):
    """A linear layer of three products in the dtype of x; the weight may be wider."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: nn.Parameter,
        bias: torch.Tensor | None,
        product: MatrixProduct,
        store: GradientStore | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        # The parameter itself too: out of save_for_backward activation checkpointing gives another
        # tensor with its numbers, which a store could not tell by identity.
        ctx.param = weight
        ctx.product = product
        ctx.store = store
        return product.forward(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        product = ctx.product
        grad_rows = grad.flatten(0, -2)  # [.., S, F] -> [rows, F]
        x_rows = x.flatten(0, -2)  # [.., S, H] -> [rows, H]

        # A closure, so that it can wait: it keeps both matrices alive until it is called.
        def grad_weight() -> torch.Tensor:
            return product.grad_weight(grad_rows, x_rows)

        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = product.grad_input(grad, weight.to(x.dtype))
        # In the dtype of x if it is computed here; autograd makes it as wide as the weight.
        grad_w = None
        if ctx.param.requires_grad:
            grad_w = computed_or_kept(ctx.param, grad_weight, ctx.store)
        grad_bias = grad_rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_w, grad_bias, None, None


def computed_or_kept(
    param: nn.Parameter, compute: Callable[[], torch.Tensor], store: GradientStore | None
) -> torch.Tensor | None:
    """The gradient of a weight; None if a store has taken it over for later."""
    if store is not None and store.keep(param, compute):
        return None
    return compute()
