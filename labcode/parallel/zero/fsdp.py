"""PyTorch's FSDP2 with the interface of ours, for comparison: the same numbers, another code.

`fully_shard` turns each weight into a DTensor that is cut along its first dim, one unit per layer,
as `parallel.zero.parameters` does.

Source: docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from labcode.comm import bootstrap
from labcode.comm.grid import Grid


class TorchFullyShardedModule(nn.Module):
    """FSDP2 around each layer in an `nn.ModuleList` and around the whole.

    Args:
        module: The same module on every rank.
        grid: Weights are divided over its dp; the ranks of cp hold copies.
        num_replicas: Hybrid sharding: dp is so many copies.
        num_shares: By what the sum of the gradients is divided.
        reshard_after_forward: False keeps the weights whole until backward is done.
        reduce_dtype: In which gradients travel and are summed; None: that of the weights.

    Attributes:
        shards: {name: this rank's rows of a weight}; they share the memory of the DTensor.
    """

    accumulates_shards = True
    trains_alone = False

    def __init__(
        self,
        module: nn.Module,
        grid: Grid,
        *,
        num_replicas: int,
        num_shares: int,
        reshard_after_forward: bool,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        with torch.no_grad():
            copies = grid.group("dp", "cp")
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor, src=dist.get_global_rank(copies, 0), group=copies)
        mesh = _mesh(grid, num_replicas)
        shard = partial(
            fully_shard,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        )
        for child in module.modules():
            if isinstance(child, nn.ModuleList):
                for layer in child:
                    if list(layer.parameters()):
                        shard(layer)
        shard(module)
        self.module = module
        if num_shares != mesh.size():
            # FSDP2 divides by the size of the mesh by itself. It is not told to do what it does:
            # with a factor set, and weights that are not cut but only copied, it divides twice by
            # it if sums are in float64 or float16.
            for child in module.modules():
                if isinstance(child, FSDPModule):
                    child.set_gradient_divide_factor(float(num_shares))
        self.shards: dict[str, nn.Parameter] = {}
        for name, param in module.named_parameters():
            rows = cast(DTensor, param).to_local().detach()
            self.shards[name] = nn.Parameter(rows, requires_grad=param.requires_grad)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward only accumulates whole gradients."""
        whole = cast(FSDPModule, cast(object, self.module))  # fully_shard has changed its class
        whole.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            whole.set_requires_gradient_sync(True)

    def finish_gradient_sync(self) -> None:
        """Hand the averages, which backward has made, to the shards."""
        for name, param in self.module.named_parameters():
            if param.grad is not None:
                self.shards[name].grad = cast(DTensor, param.grad).to_local()
            param.grad = None

    def gather_parameters(self) -> None:
        """Nothing is left to do."""


def _mesh(grid: Grid, num_replicas: int) -> DeviceMesh:
    """The mesh of FSDP2: the ranks over which weights are divided, after those that hold copies."""
    group, replicas = grid.split("dp", num_replicas)
    copies = replicas if num_replicas > 1 else grid.group("cp")
    device = bootstrap.device_type()
    if copies.size() == 1:
        return DeviceMesh.from_group(group, device, mesh_dim_names=("shard",))
    own = torch.tensor(dist.get_process_group_ranks(group))
    # the ranks of another copy lie at the same distance from each other
    distances = torch.tensor(dist.get_process_group_ranks(copies)) - grid.rank
    ranks = own + distances[:, None]  # [copies, ranks of a copy]
    return DeviceMesh.from_group(
        [copies, group], device, mesh=ranks, mesh_dim_names=("replicate", "shard")
    )
