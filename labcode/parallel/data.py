"""Data parallelism written out: every rank holds the model and reads its own samples.

    g = 1/p * sum over ranks of g_r     p ranks; equal shares of the batch, each loss a mean over it

Gradients travel in buckets: one all-reduce of 25 MB is faster than a hundred small ones, and a
bucket can leave while backward still computes the layers below. PyTorch's DistributedDataParallel
works in the same way.

Source: Li et al. 2020 (arXiv:2006.15704), sections 3.2 and 4.2.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class DataParallel(nn.Module):
    """A module whose gradients are averaged over a group while backward runs.

    Call it like the module; after `loss.backward()` call `finish_gradient_sync()`, then step the
    optimizer.

    Communicates: at construction a broadcast of parameters and buffers from the group's first rank;
        forward nothing; backward one all-reduce per bucket, in total `2 (p-1)/p` times the
        gradients' bytes per rank on a ring.
    Held by: tests/ranks/test_data_parallel.py::test_averaged_gradients_equal_those_of_one_process

    Args:
        module: The same module on every rank; parameters that need no gradient are left alone.
        group: The ranks that hold copies of the module.
        bucket_mb: Size at which a bucket is full, in MB (1e6 bytes).
        num_shares: Into how many shares the batch is cut: the sum over the group is divided by it.
            None: as many as ranks. With context parallelism it is dp, in a group of dp and cp: the
            ranks of cp each see a part of the tokens, so their gradients are summed.
        reduce_dtype: In which gradients travel and are summed; None: in their own.

    Raises:
        RuntimeError: In backward: a second backward ran before `finish_gradient_sync()`, outside
            `no_sync()`; its gradient would be lost.
    """

    accumulates_shards = False

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        bucket_mb: float = 25,
        num_shares: int | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.group = group
        self.reduce_dtype = reduce_dtype
        self.num_shares = num_shares or dist.get_world_size(group)
        self.shards: dict[str, nn.Parameter] = {}  # every rank keeps whole weights
        self._syncing = True
        first = dist.get_global_rank(group, 0)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor, src=first, group=group)
        self.buckets = make_buckets(module, bucket_mb)
        for number, bucket in enumerate(self.buckets):
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(_when_ready(weakref.ref(self), number))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the module computes."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward only accumulates: for all micro-batches of a step but the last."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def finish_gradient_sync(self) -> None:
        """Wait for the buckets under way and put the averages into `.grad`.

        Every rank calls it once per step. A parameter that took no part in this backward counts as
        a gradient of zero: the other ranks may have one.
        """
        for bucket in self.buckets:
            if bucket.work is None:
                bucket.send(self.group, self.num_shares, self.reduce_dtype)
        for bucket in self.buckets:
            bucket.receive()

    def gather_parameters(self) -> None:
        """Nothing is left to do after an optimizer step: every rank has updated all weights."""

    def _gradient_ready(self, bucket: "Bucket", param: nn.Parameter) -> None:
        if not self._syncing:
            return
        if param not in bucket.missing:
            raise RuntimeError(
                "a second backward ran before finish_gradient_sync(), its gradient would be lost: "
                "call finish_gradient_sync() after each backward, or run all but the last one "
                "inside no_sync()"
            )
        bucket.missing.remove(param)
        # Collectives match by order, so all ranks must send in one order: a bucket waits for those
        # before it.
        for candidate in self.buckets:
            if candidate.work is not None:
                continue
            if candidate.missing:
                break
            candidate.send(self.group, self.num_shares, self.reduce_dtype)


def _when_ready(parallel: weakref.ref, number: int) -> Callable[[nn.Parameter], None]:
    """The hook of a parameter in bucket `number`.

    It must not refer to the model, the bucket or the parameter. Autograd would hold it where
    Python's garbage collector does not look, and none of them would ever be freed, nor the process
    group with its threads.
    """

    def hook(param: nn.Parameter) -> None:
        alive = parallel()
        if alive is not None:
            alive._gradient_ready(alive.buckets[number], param)

    return hook


class TorchDataParallel(DistributedDataParallel):
    """PyTorch's DDP with the interface of ours: its backward returns with the average done.

    Args:
        module, process_group, bucket_cap_mb: As those of DDP.
        num_shares, reduce_dtype: As those of `DataParallel`.
        options: More arguments of DDP, such as `find_unused_parameters`.
    """

    accumulates_shards = False

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
        num_ranks = dist.get_world_size(process_group)
        num_shares = num_shares or num_ranks
        # DDP divides by the number of ranks; a hook replaces its average by one of our own
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
    """The same, but what travels has another dtype.

    PyTorch's own `bf16_compress_hook` does not run on gloo.
    """
    flat = bucket.buffer().div_(state.num_shares)
    work = dist.all_reduce(flat.to(state.dtype), group=state.group, async_op=True)
    assert work is not None, "this rank is not in the group of its DDP"

    def widened(future: torch.futures.Future) -> torch.Tensor:
        return flat.copy_(_first_value(future))

    return work.get_future().then(widened)


class Bucket:
    """Some parameters whose gradients travel as one flat tensor.

    Attributes:
        params: The parameters.
        missing: Those whose gradient is not ready yet.
        flat: The message, while it is under way.
        work: The all-reduce under way; None before it is sent.
    """

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.missing = set(params)
        self.flat: torch.Tensor | None = None
        self.work: dist.Work | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the message."""
        return sum(param.numel() * param.element_size() for param in self.params)

    def send(
        self, group: dist.ProcessGroup, num_shares: int, dtype: torch.dtype | None = None
    ) -> None:
        """Start the all-reduce without waiting for it; dtype: of the message."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        self.flat = torch.cat([grad.flatten() for grad in grads])
        self.flat /= num_shares  # before the sum: a sum of p large gradients could overflow in fp16
        self.flat = self.flat.to(dtype or self.flat.dtype)
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def receive(self) -> None:
        """Wait for the all-reduce and hand the averages back to the parameters."""
        assert self.work is not None and self.flat is not None, "send() comes first"
        self.work.wait()
        sizes = [param.numel() for param in self.params]
        for param, mean in zip(self.params, self.flat.split(sizes)):
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(mean.view_as(param))
        self.flat = None
        self.work = None
        self.missing = set(self.params)


def make_buckets(module: nn.Module, bucket_mb: float) -> list[Bucket]:
    """Parameters that need a gradient, last layer first, since backward finishes it first.

    A bucket is cut at `bucket_mb` MB; it holds one dtype, and at least one parameter, however
    large.
    """
    groups: list[list[nn.Parameter]] = []
    filled_bytes = 0
    trained = [param for param in module.parameters() if param.requires_grad]
    for param in reversed(trained):
        size_bytes = param.numel() * param.element_size()
        fits = (
            len(groups) > 0
            and filled_bytes + size_bytes <= bucket_mb * 1e6
            and groups[-1][0].dtype == param.dtype
        )
        if not fits:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(param)
        filled_bytes += size_bytes
    return [Bucket(params) for params in groups]
