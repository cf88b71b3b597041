"""BatchNorm whose statistics are those of the whole batch, not of each rank's share.

    mean = sum n_r mean_r / n                            n = sum n_r: values of a channel
    var  = sum (n_r var_r + n_r (mean_r - mean)^2) / n   r: the ranks, which may differ in n_r
    y    = weight x_hat + bias,  x_hat = (x - mean) / sqrt(var + eps)
    dx   = weight / sqrt(var + eps) * (dy - sum(dy) / n - x_hat sum(dy x_hat) / n)

Under data parallelism a plain BatchNorm sees its rank's share alone: with two samples a rank its
statistics are those of two samples, however large the batch is, and every rank keeps running
statistics of its own. PyTorch's `nn.SyncBatchNorm` does what this file does, on GPUs only.

Source: Ioffe and Szegedy 2015 (arXiv:1502.03167), algorithm 1; the combination of means and
variances: Chan, Golub and LeVeque 1979, equation 2.1.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


class _WholeBatchNorm(torch.autograd.Function):
    """The normalisation in training, with the statistics that it used."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        num_channels = x.shape[1]
        count = x.numel() // num_channels
        # sums of many values, and the number of values itself, need more digits than 16 bits have
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, var, total = _of_all_ranks(wide, count, group)
        scale = torch.rsqrt(var + eps)
        x_hat = (wide - _wide(mean, x)) * _wide(scale, x)
        ctx.save_for_backward(x_hat, weight, scale, total)
        ctx.group = group
        ctx.dtype = x.dtype
        ctx.mark_non_differentiable(mean, var, total)
        output = x_hat * _wide(weight, x) + _wide(bias, x)
        return output.to(x.dtype), mean, var, total

    @staticmethod
    @once_differentiable  # a second derivative is an error, not a wrong number
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        x_hat, weight, scale, total = ctx.saved_tensors
        grad = grad.to(x_hat.dtype)
        # Those of this rank's samples: data parallelism sums them, as it does for every weight.
        grad_bias = grad.sum(_all_but_channels(grad))
        grad_weight = (grad * x_hat).sum(_all_but_channels(grad))
        sums = torch.stack([grad_bias, grad_weight])  # [2, C]
        dist.all_reduce(sums, group=ctx.group)
        mean_grad, mean_product = sums / total
        inner = grad - _wide(mean_grad, grad) - x_hat * _wide(mean_product, grad)
        grad_x = (_wide(weight * scale, grad) * inner).to(ctx.dtype)
        return grad_x, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None


def _of_all_ranks(
    x: torch.Tensor, count: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and variance of each channel over all ranks' values, and the number of values.

    Each rank subtracts its own mean before it squares: the difference of two large sums would have
    lost the digits of a small variance.

    Communicates: an all-gather of 2 C + 1 numbers.
    """
    # The counts travel too, because the shares of the ranks may differ in size.
    dims = _all_but_channels(x)
    own_mean = x.sum(dims) / max(count, 1)  # a rank may have no sample at all
    squares = (x - _wide(own_mean, x)).square().sum(dims)
    own = torch.cat([own_mean, squares, own_mean.new_full((1,), count)])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    every = torch.stack(gathered)  # [p, 2 C + 1]
    means, all_squares, counts = every.split([x.shape[1], x.shape[1], 1], dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    apart = counts * (means - mean).square()
    var = (all_squares + apart).sum(0) / total
    return mean, var, total


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[C] as [1, C, 1, ...], to be used beside [N, C, ...]."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


class WholeBatchNorm(_BatchNorm):
    """A BatchNorm over the samples of all ranks of a group; made of a plain one by `convert`.

    Shapes: x [N, C] or [N, C, ...]; N may differ between ranks, and may be 0 on some.

    Communicates: in training, forward an all-gather of 2 C + 1 numbers, backward an all-reduce of
        2 C; in evaluation nothing, unless there are no running statistics: then it does as in
        training.
    Held by: tests/ranks/test_batch_norm.py::test_shares_give_what_one_process_gives

    Args:
        group: The ranks whose samples make the batch.
        num_features, others: See `nn.BatchNorm1d`.

    Raises:
        ValueError: In training, on every rank: all of them together have a single value of a
            channel, which has no variance.
    """

    def __init__(self, group: dist.ProcessGroup, num_features: int, **others: Any) -> None:
        super().__init__(num_features, **others)
        self.group = group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Args: input [N, C, ...]; returns the same shape."""
        tracks = self.running_mean is not None and self.running_var is not None
        if not self.training and tracks:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        weight = self.weight
        bias = self.bias
        if weight is None:
            weight = input.new_ones(self.num_features)
            bias = input.new_zeros(self.num_features)
        output, mean, var, total = _WholeBatchNorm.apply(input, weight, bias, self.eps, self.group)
        if total <= 1:
            raise ValueError(
                f"all ranks together have {int(total)} value of each channel, and a variance needs "
                "two: give more samples"
            )
        if self.training and tracks:
            self._remember(mean, var * total / (total - 1))
        return output

    @torch.no_grad()
    def _remember(self, mean: torch.Tensor, unbiased_var: torch.Tensor) -> None:
        """Move the running statistics, by the same numbers on every rank."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked += 1
        share = self.momentum
        if share is None:  # PyTorch's word for a plain average over all batches
            share = 1 / int(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased_var.to(self.running_var.dtype), share)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Any number of dims from two on."""


def convert(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Let every BatchNorm of a module use the statistics of the whole batch.

    On a GPU it is PyTorch's `nn.SyncBatchNorm`; on a CPU, which that refuses, ours.

    Args:
        module: It is changed in place, its weights and running statistics are kept.
        group: The ranks whose samples make the batch.

    Returns:
        The module, or what takes its place if it is a BatchNorm itself.

    Held by: tests/ranks/test_batch_norm.py; tests/gpu/test_batch_norm_gpu.py
    """
    if any(tensor.is_cuda for tensor in [*module.parameters(), *module.buffers()]):
        return nn.SyncBatchNorm.convert_sync_batchnorm(module, group)
    return _convert(module, group, {})


def _convert(
    module: nn.Module, group: dist.ProcessGroup, made: dict[nn.Module, nn.Module]
) -> nn.Module:
    """`made` remembers what was converted: a module may be held under several names."""
    if module in made:
        return made[module]
    made[module] = module
    if isinstance(module, _BatchNorm):
        made[module] = _converted(module, group)
    for name, child in list(module._modules.items()):  # named_children leaves out second names
        if child is not None:
            setattr(module, name, _convert(child, group, made))
    return made[module]


def _converted(plain: _BatchNorm, group: dist.ProcessGroup) -> WholeBatchNorm:
    made = WholeBatchNorm(
        group,
        plain.num_features,
        eps=plain.eps,
        momentum=plain.momentum,
        affine=plain.affine,
        track_running_stats=plain.track_running_stats,
    )
    # the same tensors, so that an optimizer that was made of them still trains them
    made.weight = plain.weight
    made.bias = plain.bias
    for name, buffer in plain.named_buffers():
        setattr(made, name, buffer)
    made.train(plain.training)
    return made
