"""PyTorch's DistributedDataParallel with the interface of `parallel.data`, and hooks for it.

A communication hook replaces what DDP does with a full bucket. DDP divides by the number of ranks
and sends gradients as they are. The hooks here divide by the number of shares, or send in fewer
bits.

Source: Li et al. 2020 (arXiv:2006.15704), section 4.1.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TorchDataParallel(DistributedDataParallel):
    """PyTorch's DDP with the interface of ours: its backward returns with the average done.

    Held by: tests/ranks/test_data_parallel.py, tests/ranks/test_gradient_compression.py

    Args:
        module, process_group, bucket_cap_mb: See DDP.
        num_shares, reduce_dtype: See `DataParallel`.
        options: More arguments of DDP, such as `find_unused_parameters`.
    """

    accumulates_shards = False
    trains_alone = False

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        num_shares: int | None = None,
        reduce_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            module, process_group=process_group, bucket_cap_mb=bucket_cap_mb, **options
        )
        self.shards: dict[str, nn.Parameter] = {}
        # Without a hook DDP divides by the number of ranks, which is right where each rank has one
        # share of the batch. Under cp several ranks have one share together, and a hook divides.
        num_ranks = dist.get_world_size(process_group)
        num_shares = num_shares or num_ranks
        if reduce_dtype is not None:
            state = _NarrowSum(process_group, num_shares, reduce_dtype)
            self.register_comm_hook(state, _sum_in_narrow_dtype)
        elif num_shares != num_ranks:
            self.register_comm_hook((process_group, num_shares), _sum_then_divide)

    def finish_gradient_sync(self) -> None:
        """Nothing is left to do."""

    def gather_parameters(self) -> None:
        """Nothing is left to do."""


def _sum_then_divide(
    state: tuple[dist.ProcessGroup | None, int], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP: the sum over the group, divided by the number of shares."""
    group, num_shares = state
    flat = bucket.buffer().div_(num_shares)  # before the sum, as in `Bucket.send`
    work = dist.all_reduce(flat, group=group, async_op=True)
    assert work is not None, "this rank is not in the group of its DDP"
    return work.get_future().then(_first_value)


def _first_value(future: torch.futures.Future) -> torch.Tensor:
    return future.value()[0]


class _NarrowSum(NamedTuple):
    """The state of `_sum_in_narrow_dtype`."""

    group: dist.ProcessGroup | None
    num_shares: int
    dtype: torch.dtype


def _sum_in_narrow_dtype(
    state: _NarrowSum, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP like `_sum_then_divide`, but what travels has another dtype.

    PyTorch's own `bf16_compress_hook` does not run on gloo.
    """
    # Divided in the wide dtype, sent in the narrow one, and widened again when it has arrived: the
    # weights and the optimizer see the wide dtype only.
    flat = bucket.buffer().div_(state.num_shares)
    work = dist.all_reduce(flat.to(state.dtype), group=state.group, async_op=True)
    assert work is not None, "this rank is not in the group of its DDP"

    def widened(future: torch.futures.Future) -> torch.Tensor:
        return flat.copy_(_first_value(future))

    return work.get_future().then(widened)
