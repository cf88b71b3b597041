"""Gradients that travel together: some parameters and one flat tensor that holds their gradients.

    flat     | grad of w3 | grad of b3 | grad of w2 |      one all-reduce sends it
    views      w3.grad      b3.grad      w2.grad           so nothing is copied before or after

The flat tensor stays from step to step, and each `.grad` is a view into it, as with
`gradient_as_bucket_view` of PyTorch's DDP. So gradients and messages together need the memory of
the gradients once. Autograd does not know of that: where `.grad` is None it puts a tensor of its
own there, which is copied into the view and freed, one parameter at a time.

Source: Li et al. 2020 (arXiv:2006.15704), section 3.2.3.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.one_message import in_one_message

SECOND_BACKWARD = (
    "a second backward ran before finish_gradient_sync(), its gradient would be lost: call "
    "finish_gradient_sync() after each backward, or run all but the last one inside no_sync()"
)


class Synchronized(nn.Module):
    """A module around another one, whose gradients are averaged outside of `no_sync()`."""

    _syncing = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward only accumulates: for all micro-batches of a step but the last."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True


def on_gradient(param: nn.Parameter, method: Callable[[nn.Parameter], None]) -> None:
    """Call a bound method whenever backward has finished the gradient of a parameter.

    The hook refers to nothing but weakly. Autograd holds hooks in C++, where Python's garbage
    collector does not look: with a strong reference neither the model nor its buckets would ever be
    freed, nor the process group with its threads.
    """
    alive = weakref.WeakMethod(method)  # a plain weakref of a bound method dies at once

    def hook(param: nn.Parameter) -> None:
        call = alive()
        if call is not None:
            call(param)

    param.register_post_accumulate_grad_hook(hook)


def next_to_send(buckets: Iterable[Any]) -> Iterator[Any]:
    """The full buckets that are not under way, up to the first bucket that still misses a gradient.

    Collectives match by order, so all ranks must send in one order: a bucket that is full waits for
    those before it, and one late gradient holds up all that follow.
    """
    for bucket in buckets:
        if bucket.is_sent:
            continue
        if bucket.missing:
            return
        yield bucket


class Bucket:
    """Some parameters of one dtype whose gradients travel as one flat tensor.

    Args:
        params: The parameters.

    Attributes:
        flat: Memory of all their gradients, [numbers of all parameters]; allocated with the first
            gradient.
        views: {parameter: its part of `flat`, in its shape}.
        missing: Parameters whose gradient is not ready yet.
        work: The all-reduce under way; None before it is sent.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = list(params)
        self.flat = self.params[0].new_empty(0)
        self.views: dict[nn.Parameter, torch.Tensor] = {}
        self.missing = set(self.params)
        self.message: torch.Tensor | None = None
        self.work: dist.Work | None = None

    @property
    def is_sent(self) -> bool:
        """Whether its all-reduce is under way."""
        return self.work is not None

    @property
    def num_bytes(self) -> int:
        """Size of the message, if it travels as it is."""
        return sum(param.nbytes for param in self.params)

    @torch.no_grad()
    def adopt(self, param: nn.Parameter) -> None:
        """Move a gradient into the bucket: from here on `.grad` is a view.

        A `.grad` that is another tensor is newer, put there by autograd or by the user: its values
        are copied.
        """
        view = self._view_of(param)
        if param.grad is not None and param.grad is not view:
            view.copy_(param.grad)
            param.grad = view

    @torch.no_grad()
    def send(
        self, group: dist.ProcessGroup, num_shares: int, dtype: torch.dtype | None = None
    ) -> None:
        """Start the all-reduce without waiting for it.

        Args:
            group: The ranks that hold copies of the parameters.
            num_shares: The divisor of the sum.
            dtype: The dtype of the message; None: that of the gradients.
        """
        for param in self.params:
            if param.grad is None:
                # No gradient in this backward: zeros, because another rank may have one.
                self._view_of(param).zero_()
            else:
                self.adopt(param)
        self.flat /= num_shares  # before the sum: a sum of p large gradients could overflow in fp16
        self.message = self.flat.to(dtype or self.flat.dtype)
        self.work = dist.all_reduce(self.message, group=group, async_op=True)

    @torch.no_grad()
    def receive(self, unused: Iterable[nn.Parameter] = ()) -> None:
        """Wait for the all-reduce; afterwards each `.grad` is the average.

        Args:
            unused: Parameters without a gradient on any rank: what they have stays as it is.
        """
        assert self.work is not None and self.message is not None, "send() comes first"
        self.work.wait()
        # With a dtype of its own the message is a second tensor: memory for half of the gradients
        # more, if it has 16 bits. `.to` of the same dtype returns the tensor itself.
        if self.message is not self.flat:
            self.flat.copy_(self.message)
        for param in self.params:
            if param not in unused:
                param.grad = self.views[param]
        self.message = None
        self.work = None
        self.missing = set(self.params)

    def _view_of(self, param: nn.Parameter) -> torch.Tensor:
        if not self.views:
            self.flat = self.params[0].new_empty(sum(other.numel() for other in self.params))
            self.views = _views_into(self.flat, self.params)
        return self.views[param]


def make_buckets(module: nn.Module, bucket_mb: float) -> list[Bucket]:
    """Parameters that need a gradient, last layer first, since backward finishes it first.

    Args:
        module: The module that has the parameters; tied weights are one.
        bucket_mb: See `cut_into_buckets`.
    """
    cut = cut_into_buckets(trained_last_first(module), bucket_mb)
    return [Bucket(params) for params in cut]


def trained_last_first(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that need a gradient, from the last to the first."""
    trained = [param for param in module.parameters() if param.requires_grad]
    trained.reverse()
    return trained


def cut_into_buckets(
    params: Iterable[nn.Parameter],
    bucket_mb: float,
    first_bucket_mb: float | None = None,
    groups: Mapping[nn.Parameter, dist.ProcessGroup] | None = None,
) -> list[list[nn.Parameter]]:
    """Cut parameters, in the order in which their gradients come, into buckets.

    A bucket holds one dtype on one device, and at least one parameter, however large.

    Args:
        params: The parameters, in that order.
        bucket_mb: Size at which a bucket is full, in MB (1e6 bytes).
        first_bucket_mb: Size at which the first bucket is full, if that is less. A small one leaves
            early, so that the link is busy while backward goes through the other layers.
        groups: {parameter: its group}, for parameters that are summed over another group than the
            rest; a bucket holds those of one group.
    """
    groups = groups or {}
    if first_bucket_mb is None:
        first_bucket_mb = bucket_mb
    limit_bytes = 1e6 * min(bucket_mb, first_bucket_mb)
    buckets: list[list[nn.Parameter]] = []
    filled_bytes = 0
    # First come, first served. Packing by size would fill buckets better, but a bucket is sent when
    # its last gradient is there, so it must not mix layers that backward reaches far apart.
    for param in params:
        size_bytes = param.numel() * param.element_size()
        fits = (
            len(buckets) > 0
            and filled_bytes + size_bytes <= limit_bytes
            and buckets[-1][0].dtype == param.dtype
            and buckets[-1][0].device == param.device
            and groups.get(buckets[-1][0]) is groups.get(param)
        )
        if not fits:
            if buckets:
                limit_bytes = 1e6 * bucket_mb  # the first one is closed
            buckets.append([])
            filled_bytes = 0
        buckets[-1].append(param)
        filled_bytes += size_bytes
    return buckets


@torch.no_grad()
def make_copies_equal(
    module: nn.Module,
    group: dist.ProcessGroup,
    replicas: Iterable[dist.ProcessGroup],
    groups: Mapping[nn.Parameter, dist.ProcessGroup],
) -> None:
    """Give all copies of a module the values of the first.

    Communicates: a broadcast of each parameter and buffer in each group of ranks that hold copies.

    Args:
        module: The same module on every rank.
        group: The ranks over which it is divided.
        replicas: More groups that hold copies.
        groups: {parameter: its group, in place of `group`}.
    """
    # One message for each tensor. A flat one (`broadcast_together`) would take a second copy of the
    # model, to save some latency once in a run.
    for param in module.parameters():
        _broadcast(param, (groups.get(param, group), *replicas))
    for buffer in module.buffers():
        _broadcast(buffer, (group, *replicas))


def _broadcast(tensor: torch.Tensor, groups: Iterable[dist.ProcessGroup]) -> None:
    # Group after group: the first rank of the later group has its value from the earlier one.
    for copies in groups:
        dist.broadcast(tensor, src=dist.get_global_rank(copies, 0), group=copies)


def broadcast_together(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks the values of the group's first, in one message for each dtype.

    Communicates: one broadcast per dtype.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    first = dist.get_global_rank(group, 0)
    for alike in by_kind.values():
        in_one_message(alike, dist.broadcast, src=first, group=group)


def _views_into(
    flat: torch.Tensor, params: Sequence[nn.Parameter]
) -> dict[nn.Parameter, torch.Tensor]:
    """{parameter: its part of the flat tensor}, laid out in memory as the parameter is.

    An optimizer that updates many weights in one kernel wants gradients laid out like them.
    """
    views = {}
    offset = 0
    for param in params:
        strides = torch.empty_like(param, device="meta").stride()  # without gaps
        views[param] = flat.as_strided(param.shape, strides, offset)
        offset += param.numel()
    return views
