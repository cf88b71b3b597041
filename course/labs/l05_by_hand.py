"""Solutions that cells of lesson 05 show and use; `make notebooks` writes this."""

import functools
import torch
import torch.distributed as dist


def average_buckets(buckets, group):
    """Replace every gradient by its mean over the group, a bucket at a time."""
    p = dist.get_world_size(group)
    for bucket in buckets:
        row = torch.cat([param.grad.flatten() for param in bucket])
        dist.all_reduce(row, group=group)
        row /= p
        numbers = [param.numel() for param in bucket]
        for param, mean in zip(bucket, row.split(numbers)):
            param.grad.copy_(mean.view_as(param))


class OverlappedDataParallel:
    """Averages the gradients of `module` over `group` while backward runs."""

    def __init__(self, module, group, buckets):
        self.module = module
        self.group = group
        self.buckets = buckets
        self.missing = [len(bucket) for bucket in buckets]
        self.under_way = []
        for number, bucket in enumerate(buckets):
            hook = functools.partial(self.gradient_ready, number)
            for param in bucket:
                param.register_post_accumulate_grad_hook(hook)

    def gradient_ready(self, number, param):
        """A gradient of bucket `number` is final: send the bucket if it is complete."""
        self.missing[number] -= 1
        if self.missing[number] == 0:
            bucket = self.buckets[number]
            row = torch.cat([other.grad.flatten() for other in bucket])
            work = dist.all_reduce(row, group=self.group, async_op=True)
            self.under_way.append((work, row, bucket))

    def finish_gradient_sync(self):
        """Wait for all buckets and put the means into `.grad`."""
        p = dist.get_world_size(self.group)
        for work, row, bucket in self.under_way:
            work.wait()
            row /= p
            numbers = [param.numel() for param in bucket]
            for param, mean in zip(bucket, row.split(numbers)):
                param.grad.copy_(mean.view_as(param))
        self.under_way.clear()
        self.missing = [len(bucket) for bucket in self.buckets]


def compress(group, bucket):
    """A Future of `bucket.buffer()` averaged over the group, sent in bfloat16."""
    full = bucket.buffer()
    half = (full / group.size()).bfloat16()
    work = dist.all_reduce(half, group=group, async_op=True)
    return work.get_future().then(lambda done: full.copy_(done.value()[0]))
