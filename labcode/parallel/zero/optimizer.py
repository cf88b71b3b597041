"""ZeRO-1 around any optimizer: each rank keeps the optimizer's state of a part of each weight.

AdamW keeps two numbers for each parameter. Data-parallel ranks hold the same weights and the same
averaged gradients, so they compute the same update p times and keep the same state p times. Here a
rank updates its own rows only, and the ranks exchange the results:

    state per rank    K N / p  bytes, K = 8 for AdamW in float32        instead of K N
    communication     (p-1)/p  N  numbers more per step, an all-gather

Source: Rajbhandari et al. 2019 (arXiv:1910.02054), section 5.1, P_os.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.collectives import start_all_gather
from labcode.parallel.zero.cut import Cut, piece_of

# Optimizers that look at a matrix as a whole: the update of its rows is not the rows of its update.
WHOLE_MATRIX = ("Adafactor", "LBFGS", "Muon")


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is divided over a group; every rank holds the whole weights.

    Use it in the place of `optimizer_cls(params, **kwargs)`, after the gradients were averaged. Its
    `param_groups` hold the whole weights, so that schedules of the learning rate work on them.

    Communicates: in `step` one all-gather of the weights per parameter group and dtype, `(p-1)/p`
        times their bytes per rank.
    Held by: tests/ranks/test_zero.py::test_a_sharded_optimizer_trains_like_a_whole_one

    Args:
        params: Tensors, or groups of them with options of their own, as any optimizer takes them.
        optimizer_cls: An optimizer that treats each number by itself, such as AdamW or SGD.
        group: The ranks that hold the same weights.
        kwargs: Arguments of `optimizer_cls`.

    Raises:
        ValueError: An optimizer that looks at whole matrices.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        group: dist.ProcessGroup,
        **kwargs: Any,
    ) -> None:
        if optimizer_cls.__name__ in WHOLE_MATRIX:
            raise ValueError(
                f"{optimizer_cls.__name__} looks at a matrix as a whole, and here each rank "
                "updates some rows of it: use an optimizer that treats each number by itself, "
                "such as AdamW"
            )
        self.group = group
        self.optimizer_cls = optimizer_cls
        self.options = kwargs
        self.inner: torch.optim.Optimizer | None = None
        super().__init__(params, kwargs)  # calls add_param_group below, once for each group

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more weights; every rank adds the same."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        # Views of the whole weights: where the inner optimizer steps, it changes rows of the model.
        # A rank may have no rows of a small weight, and then an optimizer of an empty tensor.
        shards = [nn.Parameter(self._own(param)) for param in added["params"]]
        options = {name: value for name, value in added.items() if name != "params"}
        inner_group = {"params": shards, **options}
        if self.inner is None:
            self.inner = self.optimizer_cls([inner_group], **self.options)
            self.state = self.inner.state  # the same dict, for those who look at `optimizer.state`
        else:
            self.inner.add_param_group(inner_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's rows, and get the others' from the ranks that have them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self.inner is not None
        for whole_group, shard_group in zip(self.param_groups, self.inner.param_groups):
            for name, value in whole_group.items():
                if name != "params":
                    shard_group[name] = value  # a schedule may have changed it
            for param, shard in zip(whole_group["params"], shard_group["params"]):
                shard.grad = None if param.grad is None else self._own(param.grad)
        self.inner.step()
        for whole_group in self.param_groups:
            gather_weights(whole_group["params"], self.group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's rows."""
        assert self.inner is not None
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank."""
        assert self.inner is not None
        self.inner.load_state_dict(state_dict)
        self.state = self.inner.state

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        return piece_of(whole.detach(), self.group.rank(), self.group.size())


@torch.no_grad()
def gather_weights(params: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Fill weights of which this rank has updated its own rows with the rows of the others.

    Communicates: one all-gather for each dtype.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for param in params:
        by_dtype.setdefault(param.dtype, []).append(param.detach())
    for dtype, wholes in by_dtype.items():
        # Packed into [L], gathered to [p L], copied back into place: the weights exist twice for a
        # moment. One message a tensor would need no packing, and start hundreds of small ones.
        cut = Cut([whole.shape for whole in wholes], group.size())
        own = cut.pack(cut.pieces(wholes, group.rank()), dtype)
        cut.unpack_all(start_all_gather(own, group, dim=0)(), wholes)
