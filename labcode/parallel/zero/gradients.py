"""ZeRO-1 and 2: data parallelism in which a rank gets its own part of the averaged gradients.

An all-reduce is a reduce-scatter and an all-gather. After the first half each rank has the sum for
its own rows; that is all it needs if it updates only them. The second half gathers the new weights
in place of the gradients:

    DDP       all-reduce of gradients                                2 (p-1)/p  N
    ZeRO-1,2  reduce-scatter of gradients, all-gather of weights     2 (p-1)/p  N

So optimizer state and gradients shrink to 1/p and nothing more is sent. The stages differ in what
becomes of the other rows' gradients: stage 1 keeps the memory until the optimizer has stepped,
stage 2 frees each bucket as soon as it has been sent.

Source: Rajbhandari et al. 2019 (arXiv:1910.02054), sections 5.1, 5.2 and 7.1.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.collectives import start_reduce_scatter
from labcode.parallel.buckets import (
    SECOND_BACKWARD,
    Synchronized,
    cut_into_buckets,
    make_copies_equal,
    next_to_send,
    on_gradient,
    trained_last_first,
)
from labcode.parallel.zero.cut import Cut, piece_of
from labcode.parallel.zero.optimizer import gather_weights


class ShardedDataParallel(Synchronized):
    """A module whose averaged gradients, and so the optimizer's state, are divided over a group.

    Call it like the module. After the last backward of a step call `finish_gradient_sync()`, let an
    optimizer step that was made of `shards`, and call `gather_parameters()`. Averages add up until
    they are zeroed, by the optimizer or here.

    Communicates: at construction a broadcast of parameters and buffers; backward one reduce-scatter
        per bucket, `(p-1)/p` times the gradients' bytes; `gather_parameters` as much. With replicas
        an all-reduce of each rank's part over each of these groups.
    Held by: tests/ranks/test_zero.py::test_sharded_gradients_are_those_of_one_process,
        tests/ranks/test_parallel_parity.py

    Args:
        module: The same module on every rank.
        group: The ranks over which gradients and state are divided.
        bucket_mb: Size at which a bucket is full, in MB (1e6 bytes).
        num_shares: The number of shares into which the batch is cut: the sum of the gradients is
            divided by it. None: as many as ranks.
        replicas: More groups of ranks that hold the same weights: the part of each rank is summed
            over them too.
        keep_gradients: Keep each gradient's memory until the optimizer has stepped (ZeRO-1).
        reduce_dtype: The dtype in which gradients travel and are summed; None: their own.
        groups: {parameter: its own group}, for parameters of which fewer ranks hold copies, as of
            experts that are divided over neighbours.

    Attributes:
        shards: {name: this rank's rows of a trained weight}; they share the weight's memory. Their
            `.grad` is the average.
    """

    accumulates_shards = False  # whole gradients add up, and are sent once
    trains_alone = False

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        bucket_mb: float = 25,
        *,
        num_shares: int | None = None,
        replicas: Sequence[dist.ProcessGroup] = (),
        keep_gradients: bool = False,
        reduce_dtype: torch.dtype | None = None,
        groups: Mapping[nn.Parameter, dist.ProcessGroup] | None = None,
    ) -> None:
        super().__init__()
        groups = groups or {}
        self.module = module
        self.group = group
        self.num_shares = num_shares or group.size()
        self.replicas = tuple(replicas)
        self.keep_gradients = keep_gradients
        self.reduce_dtype = reduce_dtype
        make_copies_equal(module, group, self.replicas, groups)
        own: dict[nn.Parameter, nn.Parameter] = {}
        for param in module.parameters():
            if param.requires_grad:
                ranks = groups.get(param, group)
                # A Parameter around a view: an optimizer that updates it writes into the weight.
                own[param] = nn.Parameter(piece_of(param.detach(), ranks.rank(), ranks.size()))
        self.shards = shards_by_name(module, own)
        self.buckets: list[ShardedBucket] = []
        cut = cut_into_buckets(trained_last_first(module), bucket_mb, groups=groups)
        self._bucket_of: dict[nn.Parameter, ShardedBucket] = {}
        for params in cut:
            bucket = ShardedBucket(params, own, groups.get(params[0], group))
            self.buckets.append(bucket)
            for param in params:
                self._bucket_of[param] = bucket
                on_gradient(param, self._gradient_ready)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the module computes."""
        return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and the averages in `shards`."""
        super().zero_grad(set_to_none)
        for shard in self.shards.values():
            shard.grad = None

    def finish_gradient_sync(self) -> None:
        """Wait until each of the `shards` has its average; every rank calls it once per step.

        Held by: tests/ranks/test_zero.py::test_gradients_add_up_until_they_are_zeroed
        """
        # What is not sent yet has a parameter that this rank did not use, or comes after one that
        # has: it goes now, with zeros, since other ranks may wait for it.
        for bucket in self.buckets:
            if not bucket.is_sent:
                bucket.send(self.num_shares, self.reduce_dtype)
        for bucket in self.buckets:
            bucket.receive(self.replicas, self.keep_gradients)

    def gather_parameters(self) -> None:
        """Give all ranks the rows that each has updated; every rank calls it after the optimizer.

        Communicates: one all-gather for each bucket.
        """
        for bucket in self.buckets:
            gather_weights(bucket.params, bucket.group)

    def _gradient_ready(self, param: nn.Parameter) -> None:
        if not self._syncing:
            return
        bucket = self._bucket_of[param]
        if param not in bucket.missing:
            raise RuntimeError(SECOND_BACKWARD)
        bucket.missing.remove(param)
        for full in next_to_send(self.buckets):
            full.send(self.num_shares, self.reduce_dtype)


class ShardedBucket:
    """Some weights of one dtype whose gradients travel together.

    Attributes:
        params: The weights.
        missing: Parameters whose gradient is not ready yet.
        finish: Waits for the reduce-scatter under way; None before it has begun.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        own: Mapping[nn.Parameter, nn.Parameter],
        group: dist.ProcessGroup,
    ) -> None:
        self.params = params
        self.shards = [own[param] for param in params]
        self.group = group
        self.cut = Cut([param.shape for param in params], group.size())
        self.missing = set(params)
        self.finish: Callable[[], torch.Tensor] | None = None

    @property
    def is_sent(self) -> bool:
        """Whether its reduce-scatter is under way."""
        return self.finish is not None

    def send(self, num_shares: int, dtype: torch.dtype | None = None) -> None:
        """Start the reduce-scatter without waiting for it; dtype: of the message."""
        # Unlike the buckets of `parallel.data`, gradients are copied: an all-reduce can work in the
        # memory of `.grad`, a reduce-scatter wants the rows of each rank together.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        message = self.cut.pack_all(grads, grads[0].dtype)
        message /= num_shares  # before the sum, which might overflow in fp16
        message = message.to(dtype or message.dtype)
        self.finish = start_reduce_scatter(message, self.group, dim=0)

    def receive(self, replicas: Sequence[dist.ProcessGroup], keep: bool) -> None:
        """Wait, and add this rank's averages to the gradients of its shards."""
        assert self.finish is not None, "send() comes first"
        segment = self.finish()  # [L]
        # Hybrid sharding: within a copy of the model the whole gradient has travelled, between the
        # copies only the p-th part of it does.
        for group in replicas:
            dist.all_reduce(segment, group=group)
        segment = segment.to(self.shards[0].dtype)
        index = self.group.rank()
        for param, shard, mean in zip(self.params, self.shards, self.cut.unpack(segment, index)):
            if keep and param.grad is not None:
                # ZeRO-1: a view, which keeps the memory of the whole gradient.
                own = piece_of(param.grad, index, self.group.size())
                own.copy_(mean)
            else:
                # ZeRO-2: a tensor of its own. Without the clone it would be a view of the segment,
                # and keep that alive as long as any of its weights has a gradient.
                own = mean.clone()
            if shard.grad is not None:
                own += shard.grad
            shard.grad = own
            param.grad = None
        self.finish = None
        self.missing = set(self.params)


def shards_by_name(
    module: nn.Module, own: Mapping[nn.Parameter, nn.Parameter]
) -> dict[str, nn.Parameter]:
    """{name of a weight: this rank's part of it}, for the weights that are divided."""
    shards = {}
    for name, param in module.named_parameters():
        if param in own:
            shards[name] = own[param]
    return shards
