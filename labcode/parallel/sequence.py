"""Sequence parallelism: what tensor parallelism replicates is cut along the sequence.

Tensor parallelism cuts the matrix products, but norms, dropout and residuals still hold [B, S, H]
on every rank of tp. Here they hold [B, S/tp, H]; the sequence is gathered where a matrix product
begins and scattered where it ends:

    tensor parallel          copy_to    -> linear .. linear -> reduce_from
    + sequence parallel      all-gather -> linear .. linear -> reduce-scatter

On a ring both send the same bytes forward: an all-reduce is a reduce-scatter and an all-gather.
Backward gathers a second time what it did not keep, so that in all a rank sends a quarter more
(`gathered_linear`). Weights that only see S/tp tokens get a partial gradient, which
`parallel.sharding` sums.

Shapes: B samples, S tokens, H features, F features of the product, tp ranks.
Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.collectives import (
    all_gather,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)
from labcode.parallel.linear import (
    PLAIN_PRODUCT,
    GradientStore,
    MatrixProduct,
    Product,
    current_store,
    narrowed,
)

SEQUENCE_DIM = 1


def scatter_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum partial results and keep this rank's part of the sequence: [B, S, H] to [B, S/tp, H].

    Communicates: forward a reduce-scatter, backward an all-gather.
    """
    return reduce_scatter(x, group, SEQUENCE_DIM)


def gathered_linear(
    x: torch.Tensor,
    weight: nn.Parameter,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    product: Product = PLAIN_PRODUCT,
) -> torch.Tensor:
    """`gather(x) @ weight.T + bias`, of which only this rank's part of x is kept for backward.

    An all-gather followed by a linear layer would keep [B, S, H] for the weight's gradient and lose
    half of what sequence parallelism saves. This one gathers x a second time in backward, while it
    computes x's gradient. When the weight's gradient is put off (`parallel.deferred`), the second
    gather is put off with it, so that nothing but the part of x is held until then.

    Communicates: forward an all-gather; backward an all-gather and a reduce-scatter, each beside a
        matrix product.

    Args:
        x: [B, S/tp, H]
        weight: [F/tp, H]
        bias: [F/tp] or None.
        group: The ranks of tp.
        product: The matrix products to compute with.

    Returns:
        [B, S, F/tp]

    Held by: tests/ranks/test_tensor.py::test_sequence_parallel_keeps_only_its_part_for_backward
    """
    # narrowed before the gather: it halves the message
    x_narrow, bias_narrow = narrowed(x, bias)
    if not isinstance(product, MatrixProduct):
        # an FP8 product keeps the whole x for backward, in 8 bits
        assert x_narrow is not None
        return product(all_gather(x_narrow, group, SEQUENCE_DIM), weight, bias)
    store = current_store.get()
    return _GatheredLinear.apply(x_narrow, weight, bias_narrow, group, product, store)


class _GatheredLinear(torch.autograd.Function):
    """All-gather and linear layer in one, in the dtype of x; the weight may be wider."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: nn.Parameter,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup,
        product: MatrixProduct,
        store: GradientStore | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.param = weight
        ctx.group = group
        ctx.product = product
        ctx.store = store
        whole = start_all_gather(x, group, SEQUENCE_DIM)()  # [B, S, H]
        return product.forward(whole, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        group = ctx.group
        product = ctx.product
        grad_rows = grad.flatten(0, -2)  # [B*S, F/tp]
        # The order is that of Megatron-LM: two messages, each beside a product that does not need
        # it. x is gathered beside dx = dy W, then dx is scattered beside dW = dy^T x.
        waiting = _Gathered(x, group)

        def grad_weight() -> torch.Tensor:
            x_rows = waiting.whole().flatten(0, -2)  # [B, S, H] -> [B*S, H]
            return product.grad_weight(grad_rows, x_rows)

        put_off = ctx.param.requires_grad and (
            ctx.store is not None and ctx.store.keep(ctx.param, grad_weight)
        )
        needs_weight = ctx.param.requires_grad and not put_off
        if needs_weight:
            waiting.start()  # x travels while its gradient is computed
        grad_whole = product.grad_input(grad, weight.to(x.dtype))  # [B, S, F/tp] @ [F/tp, H]
        if needs_weight:
            # Arrived before the next message starts: two buffers of [B, S, H] at the peak of
            # backward, not three.
            waiting.whole()
        wait_for_own = start_reduce_scatter(grad_whole, group, SEQUENCE_DIM)
        del grad_whole
        grad_w = grad_weight() if needs_weight else None  # while the gradient travels
        grad_bias = grad_rows.sum(0) if ctx.needs_input_grad[2] else None
        return wait_for_own(), grad_w, grad_bias, None, None, None


class _Gathered:
    """The whole of a sharded tensor, gathered at the latest when it is used."""

    def __init__(self, part: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.part = part
        self.group = group
        self._wait: Callable[[], torch.Tensor] | None = None
        self._whole: torch.Tensor | None = None

    def start(self) -> None:
        """Start the all-gather without waiting for it."""
        self._wait = start_all_gather(self.part, self.group, SEQUENCE_DIM)

    def whole(self) -> torch.Tensor:
        """[B, S, H]"""
        if self._whole is not None:
            return self._whole
        wait = self._wait or start_all_gather(self.part, self.group, SEQUENCE_DIM)
        self._wait = None  # and the buffers behind it
        self._whole = wait()
        return self._whole
