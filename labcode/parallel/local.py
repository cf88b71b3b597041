"""Data parallelism for slow links: copies of the model that train alone, and average their weights.

    inner    H steps on own samples          w_r <- AdamW(w_r, gradient of rank r), from w
    outer    g = w - 1/p * sum of w_r        how far the copies have moved, on average
             w <- Nesterov(w, g)             with a rate and a momentum of its own

An average of weights takes the place of H averages of gradients, so that a step sends 1/H of the
bytes. The price: the copies drift apart, and the result is not that of one process. With H = 1, an
outer rate of 1, no momentum and plain SGD inside it is data parallelism to the last digits. An
outer rate of 1 without momentum is local SGD; the whole is DiLoCo.

Source: Stich 2018 (arXiv:1805.09767), algorithm 1; Douillard et al. 2023 (arXiv:2311.08105),
    algorithm 1.
Held by: tests/ranks/test_local.py
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.one_message import in_one_message


class LocalReplica(nn.Module):
    """A module whose gradients are those of this rank's samples alone; nothing is averaged.

    It has the interface of `parallel.data.DataParallel`, so that a training loop can use either.

    Args:
        module: The module of this rank's copy; all copies have the same weights at first.
    """

    accumulates_shards = False
    trains_alone = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.shards: dict[str, nn.Parameter] = {}

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the module computes."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing is ever sent by a backward."""
        yield

    def finish_gradient_sync(self) -> None:
        """Nothing is left to do."""

    def gather_parameters(self) -> None:
        """Nothing is left to do: the optimizer has updated all weights of this copy."""


class OuterOptimizer:
    """What the copies do together after every H steps of their own optimizers.

    Buffers, such as BatchNorm's running statistics, stay what they are on each rank, and so does
    the state of the inner optimizer.

    Communicates: at each `step()` one all-reduce of the bytes of the weights, in total
        `2 (p-1)/p` times as many per rank on a ring.
    Held by: tests/ranks/test_local.py::test_two_copies_do_what_one_process_does_by_hand,
        ::test_with_one_step_and_sgd_it_is_data_parallelism, ::test_bytes_are_those_of_the_weights

    Args:
        params: The weights of this rank's copy, in one order on all ranks and with the same values
            on all of them; frozen ones are left alone.
        group: The ranks that hold copies.
        lr: The outer rate; 1 takes the average as it is.
        momentum: Nesterov's; 0 is none.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        lr: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        self.group = group
        self.params = [param for param in params if param.requires_grad]
        # the weights at the last average, the same on all ranks: a second copy of the model
        self.common = [param.detach().clone() for param in self.params]
        self._optimizer = torch.optim.SGD(
            self.common, lr=lr, momentum=momentum, nesterov=momentum > 0
        )

    @torch.no_grad()
    def step(self) -> None:
        """Average how far the copies have moved, step by that, and give all copies the result."""
        # Minus the movement takes the place of a gradient: it points where the loss grows.
        gone = [common - param for common, param in zip(self.common, self.params, strict=True)]
        in_one_message(gone, self._average)
        for common, average in zip(self.common, gone, strict=True):
            common.grad = average
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for common, param in zip(self.common, self.params, strict=True):
            param.copy_(common)

    def _average(self, flat: torch.Tensor) -> None:
        flat /= dist.get_world_size(self.group)  # before the sum, which could overflow
        dist.all_reduce(flat, group=self.group)
