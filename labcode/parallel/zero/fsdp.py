"""PyTorch's FSDP2 with the interface of ours, for comparison: the same numbers by other code.

`fully_shard` turns each weight into a DTensor that is cut along its first dim, one unit per layer,
as `parallel.zero.parameters` does.

Source: docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from labcode.comm.grid import Grid
from labcode.parallel.buckets import make_copies_equal
from labcode.runtime import bootstrap


class TorchFullyShardedModule(nn.Module):
    """FSDP2 around each layer in an `nn.ModuleList` and around the whole.

    Args:
        module: The same module on every rank.
        grid: Weights are divided over its dp; the ranks of cp hold copies.
        experts: Modules whose weights are divided over edp in place of dp, because each rank of ep
            has other experts.
        num_replicas: The number of copies of the model that dp holds (hybrid sharding).
        num_shares: The divisor of the sum of the gradients.
        reshard_after_forward: False keeps the weights whole until backward is done.
        reduce_dtype: The dtype in which gradients travel and are summed; None: that of the weights.

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
        experts: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__()
        groups = {}
        for each in experts:
            groups |= dict.fromkeys(each.parameters(), grid.group("edp", "cp"))
        make_copies_equal(module, grid.group("dp", "cp"), (), groups)
        # Two dims, "replicate" and "shard", make FSDP2 hybrid. The ranks of cp hold copies as well;
        # `ParallelConfig.check` allows one of the two kinds of copies at a time.
        group, replicas = grid.split("dp", num_replicas)
        mesh = _mesh_of(grid, group, replicas if num_replicas > 1 else grid.group("cp"))
        shard = partial(
            fully_shard,
            reshard_after_forward=reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        )
        of_experts = _mesh_of(grid, grid.group("edp"), grid.group("cp")) if experts else mesh
        # From the inside out: each call takes the parameters that no earlier call has taken.
        for each in experts:
            shard(each, mesh=of_experts)
        for child in module.modules():
            if isinstance(child, nn.ModuleList):
                for layer in child:
                    if list(layer.parameters()):
                        shard(layer, mesh=mesh)
        shard(module, mesh=mesh)
        self.module = module
        # FSDP2 divides by the size of the mesh unless a factor is set. It is set only where that is
        # another number: with a factor, and weights that are not cut but only copied, FSDP2 divides
        # by it twice if sums are in float64 or float16. So the gradients of experts, of which this
        # rank may hold the only copy, are scaled below and not by a factor.
        if num_shares != mesh.size():
            for child in module.modules():
                if isinstance(child, FSDPModule) and child not in experts:
                    child.set_gradient_divide_factor(float(num_shares))
        self._times: dict[str, float] = {}
        for name, param in module.named_parameters():
            is_expert = cast(DTensor, param).device_mesh == of_experts
            self._times[name] = of_experts.size() / num_shares if is_expert and experts else 1.0
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
        """Hand the averages that backward has made to the shards."""
        for name, param in self.module.named_parameters():
            if param.grad is not None:
                self.shards[name].grad = cast(DTensor, param.grad).to_local() * self._times[name]
            param.grad = None

    def gather_parameters(self) -> None:
        """Nothing is left to do."""


def _mesh_of(grid: Grid, group: dist.ProcessGroup, copies: dist.ProcessGroup) -> DeviceMesh:
    """The mesh of FSDP2: the ranks that hold copies, then those over which weights are divided."""
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
