"""Data parallelism written out: every rank holds the model, reads its own samples, and gradients are averaged.

    g = 1/p * sum over ranks of g_r          p ranks; equal shares of the batch, each loss a mean over its share

Gradients travel in buckets: one all-reduce of 25 MB is faster than a hundred small ones, and a bucket can leave while
backward still computes the layers below. PyTorch's DistributedDataParallel works the same way.
Source: Li et al. 2020 (arXiv:2006.15704), sections 3.2 and 4.2.
"""

import weakref
from collections.abc import Callable
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class DataParallel(nn.Module):
    """A module whose gradients are averaged over a group while backward runs.

    Call it like the module; after `loss.backward()` call `finish_gradient_sync()`, then step the optimizer.

    Communicates: at construction a broadcast of parameters and buffers from the group's first rank; forward nothing;
        backward one all-reduce per bucket, in total `2 (p-1)/p` times the gradients' bytes per rank on a ring.
    Held by: tests/ranks/test_data_parallel.py::test_averaged_gradients_equal_those_of_one_process

    Args:
        module: The same module on every rank; parameters that need no gradient are left alone.
        group: The ranks that share the batch.
        bucket_mb: Size at which a bucket is full, in MB (1e6 bytes).
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, bucket_mb: float = 25):
        super().__init__()
        self.module, self.group = module, group
        self._syncing = True
        first = dist.get_global_rank(group, 0)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor, src=first, group=group)
        self.buckets = make_buckets(module, bucket_mb)
        for number, bucket in enumerate(self.buckets):
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(_when_ready(weakref.ref(self), number))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self):
        """Within it backward only accumulates: for all micro-batches of a step but the last."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def finish_gradient_sync(self) -> None:
        """Wait for the buckets under way and put the averages into `.grad`; every rank calls it once per step.

        A parameter that took no part in this backward counts as a gradient of zero: the other ranks may have one.
        """
        for bucket in self.buckets:
            if bucket.work is None:
                bucket.send(self.group)
        for bucket in self.buckets:
            bucket.receive()

    def _gradient_ready(self, bucket):
        if not self._syncing:
            return
        bucket.missing -= 1
        # Collectives match by order, so all ranks must send in one order: a bucket waits for those before it.
        for candidate in self.buckets:
            if candidate.work is None:
                if candidate.missing > 0:
                    break
                candidate.send(self.group)


def _when_ready(parallel: weakref.ref, number: int) -> Callable[[torch.Tensor], None]:
    """The hook of a parameter in bucket `number`.

    It must not refer to the model, the bucket or the parameter. Autograd would hold it where Python's garbage collector
    does not look, and none of them would ever be freed, nor the process group with its threads.
    """

    def hook(_param: torch.Tensor) -> None:
        owner = parallel()
        if owner is not None:
            owner._gradient_ready(owner.buckets[number])

    return hook


class TorchDataParallel(DistributedDataParallel):
    """PyTorch's DDP with the interface of ours: its backward returns with the gradients averaged already."""

    def finish_gradient_sync(self) -> None:
        """Nothing is left to do."""


class Bucket:
    """Some parameters whose gradients travel as one flat tensor."""

    def __init__(self, params: list[nn.Parameter]):
        self.params = params
        self.flat = None
        self.work = None
        self.missing = len(params)

    @property
    def num_bytes(self) -> int:
        return sum(param.numel() * param.element_size() for param in self.params)

    def send(self, group: dist.ProcessGroup) -> None:
        """Start the all-reduce without waiting for it."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        self.flat = torch.cat([grad.flatten() for grad in grads])
        self.flat /= dist.get_world_size(
            group
        )  # before the sum: a sum of p large gradients could overflow in fp16
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def receive(self) -> None:
        """Wait for the all-reduce and hand the averages back to the parameters."""
        self.work.wait()
        for param, mean in zip(self.params, self.flat.split([p.numel() for p in self.params])):
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(mean.view_as(param))
        self.flat, self.work, self.missing = None, None, len(self.params)


def make_buckets(module: nn.Module, bucket_mb: float) -> list[Bucket]:
    """Parameters that need a gradient, last layer first, since backward finishes it first; cut at `bucket_mb` MB.

    A bucket holds one dtype, and one parameter at least, however large.
    """
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for param in reversed([p for p in module.parameters() if p.requires_grad]):
        size = param.numel() * param.element_size()
        fits = buckets and filled + size <= bucket_mb * 1e6 and buckets[-1][0].dtype == param.dtype
        if not fits:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += size
    return [Bucket(params) for params in buckets]
