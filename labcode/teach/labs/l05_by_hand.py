"""Lesson 05: averages in buckets and overlapped data parallelism, as a learner would write them.

The lesson shows them after its exercises. `labcode.parallel.data` is the one for real models: it
broadcasts the weights, keeps one order of sending, and allows for frozen parameters.
"""

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


def average_buckets(buckets: Sequence[Sequence[nn.Parameter]], group: dist.ProcessGroup) -> None:
    """Replace every gradient by its mean over the group, with one all-reduce for each bucket."""
    p = dist.get_world_size(group)
    for bucket in buckets:
        row = torch.cat([param.grad.flatten() for param in bucket])  # pyright: ignore
        dist.all_reduce(row, group=group)
        row /= p
        sizes = [param.numel() for param in bucket]
        for param, mean in zip(bucket, row.split(sizes)):
            param.grad.copy_(mean.view_as(param))  # pyright: ignore


class Overlapped:
    """Averages the gradients of `module` over `group` while backward runs."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        buckets: Sequence[Sequence[nn.Parameter]],
    ) -> None:
        self.module = module
        self.group = group
        self.buckets = buckets
        self.missing = [len(bucket) for bucket in buckets]
        self.under_way: list[tuple] = []
        for number, bucket in enumerate(buckets):
            hook = functools.partial(self.gradient_ready, number)
            for param in bucket:
                param.register_post_accumulate_grad_hook(hook)

    def gradient_ready(self, number: int, param: nn.Parameter) -> None:
        """A gradient of bucket `number` is final: send the bucket if it is complete."""
        self.missing[number] -= 1
        if self.missing[number] == 0:
            bucket = self.buckets[number]
            row = torch.cat([other.grad.flatten() for other in bucket])  # pyright: ignore
            work = dist.all_reduce(row, group=self.group, async_op=True)
            self.under_way.append((work, row, bucket))

    def finish_gradient_sync(self) -> None:
        """Wait for all buckets and put the means into `.grad`."""
        p = dist.get_world_size(self.group)
        for work, row, bucket in self.under_way:
            work.wait()
            row /= p
            sizes = [param.numel() for param in bucket]
            for param, mean in zip(bucket, row.split(sizes)):
                param.grad.copy_(mean.view_as(param))
        self.under_way.clear()
        self.missing = [len(bucket) for bucket in self.buckets]
