"""Data parallelism written out: every rank holds the model and reads its own samples.

    g = 1/p * sum over ranks of g_r     p ranks; equal shares of the batch, each loss a mean over it

Gradients travel in buckets (`parallel.buckets`): one all-reduce of 25 MB is faster than a hundred
small ones, and a bucket can leave while backward still computes the layers below. PyTorch's
DistributedDataParallel works in the same way.

    step 1   buckets in the guessed order, last parameter first; hooks note the true order
    step 2   the first rank's order is broadcast, and buckets are made again in it
    step 3   and later: nothing changes, unless parameters are frozen, unfrozen or moved

Source: Li et al. 2020 (arXiv:2006.15704), sections 3.2 and 4.2.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labcode.parallel.buckets import (
    SECOND_BACKWARD,
    Bucket,
    Synchronized,
    broadcast_together,
    cut_into_buckets,
    make_buckets,
    make_copies_equal,
    next_to_send,
    on_gradient,
    trained_last_first,
)

__all__ = ["Bucket", "DataParallel", "make_buckets"]


class DataParallel(Synchronized):
    """A module whose gradients are averaged over a group while backward runs.

    Call it like the module; after `loss.backward()` call `finish_gradient_sync()`, then step the
    optimizer. From then on each `.grad` is a view into a bucket: it is overwritten by the next
    step, so clone what is to stay.

    A parameter that takes no part in backward counts as a gradient of zero, since other ranks may
    have one; see `find_unused_parameters`. One that needs no gradient is left alone. Parameters may
    be frozen, unfrozen, or moved to another dtype or device between two steps, on all ranks alike:
    the next forward makes the buckets again.

    Communicates: at construction a broadcast of parameters and buffers from the group's first rank;
        forward the buffers, once per step, if there are any; backward one all-reduce per bucket, in
        total `2 (p-1)/p` times the gradients' bytes per rank on a ring. Once, before the second
        step, a broadcast of the order of the parameters.
    Held by: tests/ranks/test_data_parallel.py::test_averaged_gradients_equal_those_of_one_process,
        tests/ranks/test_data_parallel_by_hand.py, tests/ranks/test_buckets.py

    Args:
        module: The same module on every rank.
        group: The ranks that hold copies of the module.
        bucket_mb: Size at which a bucket is full, in MB (1e6 bytes).
        num_shares: The number of shares into which the batch is cut: the sum over the group is
            divided by it. None: as many as ranks. With context parallelism it is dp, in a group of
            dp and cp: the ranks of cp each see a part of the tokens, so their gradients are summed.
        reduce_dtype: The dtype in which gradients travel and are summed; None: their own.
        first_bucket_mb: Size of the bucket that leaves first, if that is less.
        broadcast_buffers: Before the first forward of each step in training mode, give all ranks
            the buffers of the first: running statistics of BatchNorm, which would diverge.
        find_unused_parameters: Leave a parameter alone that no rank has used, as one process does:
            without it such a parameter gets a gradient of zero, and weight decay changes it. Costs
            one more all-reduce per step, of a number per parameter.
        groups: {parameter: its own group}, for parameters of which fewer ranks hold copies, as of
            experts that are divided over neighbours. Their gradients are divided by `num_shares`
            too.

    Raises:
        ValueError: The ranks wrap modules with different parameters; on every rank.
        RuntimeError: In backward: a second backward ran before `finish_gradient_sync()`, outside
            `no_sync()`, whose gradient would be lost; or a gradient is sparse. In
            `finish_gradient_sync()`: a parameter was frozen, unfrozen or moved after the forward.
    """

    accumulates_shards = False
    trains_alone = False

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        bucket_mb: float = 25,
        num_shares: int | None = None,
        reduce_dtype: torch.dtype | None = None,
        *,
        first_bucket_mb: float = 1,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        groups: Mapping[nn.Parameter, dist.ProcessGroup] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.group = group
        self.groups = groups or {}
        self.bucket_mb = bucket_mb
        self.first_bucket_mb = first_bucket_mb
        self.reduce_dtype = reduce_dtype
        self.num_shares = num_shares or dist.get_world_size(group)
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.shards: dict[str, nn.Parameter] = {}  # every rank keeps whole weights
        self._in_a_step = False  # between the first forward of a step and finish_gradient_sync()
        self._hooked: set[nn.Parameter] = set()  # a hook stays when buckets are made again
        self._used: set[nn.Parameter] = set()  # have a gradient of this rank in this step

        _require_same_parameters(module, group)
        make_copies_equal(module, group, (), self.groups)
        self._params = list(module.parameters())
        self._learn_order_from(trained_last_first(module))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the module computes."""
        # Once a step, not once a micro-batch: within one the buckets hold gradients that add up.
        if self.training and torch.is_grad_enabled() and not self._in_a_step:
            self._begin_step()
        return self.module(*args, **kwargs)

    def finish_gradient_sync(self) -> None:
        """Wait for the buckets under way; then each `.grad` is the average.

        Every rank calls it once per step. A parameter that took no part in this backward counts as
        a gradient of zero: the other ranks may have one.
        """
        self._require_unchanged()
        # A bucket with a parameter that this rank has not used is still here, and so are all that
        # come after it. Other ranks may have sent theirs, and wait for ours.
        for bucket in self.buckets:
            if not bucket.is_sent:
                self._send(bucket)
        unused = self._unused_on_all_ranks() if self.find_unused_parameters else set()
        for bucket in self.buckets:
            bucket.receive(unused)
        self._used.clear()
        self._in_a_step = False
        self._steps_seen += 1

    def gather_parameters(self) -> None:
        """Nothing is left to do after an optimizer step: every rank has updated all weights."""

    def _gradient_ready(self, param: nn.Parameter) -> None:
        _require_dense(self.module, param)
        if not self._order_is_known:
            self._ready_order[param] = None
        if self.find_unused_parameters:
            self._used.add(param)
        bucket = self._bucket_of[param]
        # The second condition finds a second backward while the bucket still waits for another
        # parameter.
        if bucket.is_sent or (self._syncing and param not in bucket.missing):
            raise RuntimeError(SECOND_BACKWARD)
        bucket.adopt(param)
        if not self._syncing:
            return
        bucket.missing.remove(param)
        for full in next_to_send(self.buckets):
            self._send(full)

    def _send(self, bucket: Bucket) -> None:
        bucket.send(self._group_of(bucket.params[0]), self.num_shares, self.reduce_dtype)

    def _group_of(self, param: nn.Parameter) -> dist.ProcessGroup:
        """The ranks that hold copies of a parameter."""
        return self.groups.get(param, self.group)

    # ---- between two steps

    def _begin_step(self) -> None:
        """Prepare buckets and buffers before the first forward of a step, on all ranks alike."""
        self._in_a_step = True
        if _kinds(self._params) != self._kinds:
            self._learn_order_from(trained_last_first(self.module))
        elif self._steps_seen and not self._order_is_known:
            self._take_order_of_first_rank()
        buffers = list(self.module.buffers())
        if self.broadcast_buffers and buffers:
            broadcast_together(buffers, self.group)

    def _learn_order_from(self, guess: list[nn.Parameter]) -> None:
        """Make buckets in a guessed order, and note the true one in the next backward."""
        self._kinds = _kinds(self._params)
        self._order_is_known = False
        self._steps_seen = 0
        self._ready_order: dict[nn.Parameter, None] = {}  # a set that keeps its order
        self._make_buckets(guess)

    def _take_order_of_first_rank(self) -> None:
        """Make the buckets again, in the order in which gradients became ready in the first step.

        Ranks may have seen different orders, and collectives match by order: the first rank's is
        that of all. DDP does the same before its second step.

        Communicates: one broadcast of a number per trained parameter.
        """
        trained = trained_last_first(self.module)
        seen = [param for param in self._ready_order if param in self._bucket_of]
        unseen = [param for param in trained if param not in self._ready_order]
        place_of = {param: place for place, param in enumerate(trained)}
        places = [place_of[param] for param in (*seen, *unseen)]
        self._order_is_known = True
        if not places:
            return
        # A parameter travels as its place in `trained`, which is the same list on all ranks.
        order = torch.tensor(places, device=trained[0].device)
        broadcast_together([order], self.group)
        self._make_buckets([trained[place] for place in order.tolist()])

    def _make_buckets(self, order: list[nn.Parameter]) -> None:
        """Cut the parameters into buckets, and hook those that have no hook yet.

        Gradients that are there already stay where they are until a bucket adopts them.
        """
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        for params in cut_into_buckets(order, self.bucket_mb, self.first_bucket_mb, self.groups):
            bucket = Bucket(params)
            self.buckets.append(bucket)
            for param in params:
                self._bucket_of[param] = bucket
        for param in order:
            if param not in self._hooked:
                on_gradient(param, self._gradient_ready)
                self._hooked.add(param)

    def _require_unchanged(self) -> None:
        """Check that the buckets are still those of the parameters."""
        for param, built_for, now in zip(self._params, self._kinds, _kinds(self._params)):
            if built_for != now:
                name = _name_of(self.module, param)
                raise RuntimeError(
                    f"{name} was frozen, unfrozen or moved after the forward of this step: do it "
                    "before, and call the DataParallel object, not its .module"
                )

    def _unused_on_all_ranks(self) -> set[nn.Parameter]:
        """The trained parameters whose gradient no rank has computed in this step.

        Communicates: one all-reduce of a number per trained parameter.
        """
        trained = list(self._bucket_of)
        if not trained:
            return set()
        flags = [int(param in self._used) for param in trained]
        is_used = torch.tensor(flags, dtype=torch.int32, device=trained[0].device)
        dist.all_reduce(is_used, op=dist.ReduceOp.MAX, group=self.group)
        return {param for param, used in zip(trained, is_used.tolist()) if not used}


def _require_dense(module: nn.Module, param: nn.Parameter) -> None:
    if param.grad is not None and param.grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {_name_of(module, param)} is sparse, and buckets are dense: build "
            "its layer with sparse=False, or use PyTorch's DDP"
        )


def _name_of(module: nn.Module, wanted: nn.Parameter) -> str:
    for name, param in module.named_parameters():
        if param is wanted:
            return name
    return "a parameter"


def _kinds(params: list[nn.Parameter]) -> list[tuple[bool, torch.dtype, torch.device]]:
    """The properties of each parameter that decide in which bucket it is, if in any."""
    return [(param.requires_grad, param.dtype, param.device) for param in params]


def _require_same_parameters(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Check that all ranks wrap the same parameters; otherwise the broadcast would hang.

    Communicates: one all-gather of two numbers.

    Raises:
        ValueError: On every rank, with the first that differs from the first of the group.
    """
    # Two numbers stand for all names and shapes, so that the check itself fits any two modules.
    lines = []
    for name, param in module.named_parameters():
        lines.append(f"{name} {list(param.shape)} {param.dtype} {param.requires_grad}")
    if not lines:
        return
    digest = zlib.crc32("\n".join(lines).encode())
    device = next(module.parameters()).device
    own = torch.tensor([len(lines), digest], device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    for index, other in enumerate(found):
        if not torch.equal(other, found[0]):
            first = dist.get_global_rank(group, 0)
            rank = dist.get_global_rank(group, index)
            raise ValueError(
                f"rank {first} wraps {found[0][0]} parameters and rank {rank} {other[0]}, and "
                "their names, shapes, dtypes or requires_grad differ: build and freeze the same "
                "module on every rank before it is wrapped"
            )
