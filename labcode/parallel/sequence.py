"""Sequence parallelism: what tensor parallelism leaves whole on every rank is cut along the sequence.

Tensor parallelism cuts the matrix products, but norms, dropout and residuals still hold [B, S, H] on every rank of tp.
Here they hold [B, S/tp, H]; the sequence is gathered where a matrix product begins and scattered where it ends:

    tensor parallel          copy_to    -> linear .. linear -> reduce_from         all-reduce
    + sequence parallel      all-gather -> linear .. linear -> reduce-scatter      the same bytes on a ring: an all-reduce
                                                                                   is a reduce-scatter and an all-gather
Backward gathers a second time what it did not keep, so that in all a rank sends a quarter more (`gathered_linear`).
Weights that only see S/tp tokens get a part of their gradient: `parallel.weights` adds it up.
Shapes: B samples, S tokens, H features, F features of the product, tp ranks.
Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labcode.comm.collectives import reduce_scatter, start_all_gather, start_reduce_scatter

SEQUENCE_DIM = 1


def scatter_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum partial results and keep this rank's part of the sequence: [B, S, H] to [B, S/tp, H].

    Communicates: forward a reduce-scatter, backward an all-gather.
    """
    return reduce_scatter(x, group, SEQUENCE_DIM)


def gathered_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup
):
    """`gather(x) @ weight.T + bias`, of which only this rank's part of x is kept for backward.

    An all-gather followed by a linear layer would keep [B, S, H] for the weight's gradient and lose half of what sequence
    parallelism saves. This one gathers x a second time in backward, while it computes x's gradient.

    Communicates: forward an all-gather; backward an all-gather and a reduce-scatter, each beside a matrix product.

    Args:
        x: [B, S/tp, H]
        weight: [F/tp, H]
        bias: [F/tp] or None.

    Returns:
        [B, S, F/tp]

    Held by: tests/ranks/test_tensor.py::test_sequence_parallel_keeps_only_its_part_for_backward
    """
    x, weight, bias = narrowed(x, weight, bias)  # before the gather: it halves the message
    return _GatheredLinear.apply(x, weight, bias, group)


def narrowed(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors in the dtype of autocast, if it is on; for what goes into a Function, where autocast does not look."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(
        None if tensor is None else tensor.to(torch.get_autocast_dtype(device))
        for tensor in tensors
    )


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(start_all_gather(x, group, SEQUENCE_DIM)(), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        wait_for_whole = start_all_gather(x, ctx.group, SEQUENCE_DIM)
        grad_whole = grad @ weight  # [B, S, F/tp] @ [F/tp, H], while x travels
        whole = wait_for_whole()  # [B, S, H]
        wait_for_own = start_reduce_scatter(grad_whole, ctx.group, SEQUENCE_DIM)
        del (
            wait_for_whole,
            grad_whole,
        )  # the buffers behind them: two of [B, S, H] at the peak of backward
        rows = grad.flatten(0, -2)  # [B*S, F/tp]
        grad_weight = (
            rows.T @ whole.flatten(0, -2) if ctx.needs_input_grad[1] else None
        )  # while the gradient travels
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return wait_for_own(), grad_weight, grad_bias, None
