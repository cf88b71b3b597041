"""From a single-process model to this rank's part of it.

What becomes of each module stands in a plan, one file per model (`gpt_plan.py`, `vit_plan.py`);
these files and this one are the only places that know both a model and the grid.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig, ViTConfig
from labcode.models.gpt import GPT
from labcode.models.gpt_plan import gpt_plan
from labcode.models.layers import LORA_A, initial_value
from labcode.models.vit import ViT
from labcode.models.vit_plan import vit_plan
from labcode.parallel.data import DataParallel
from labcode.parallel.dropout import IsolatedRng, RngStream, seed_for
from labcode.parallel.local import LocalReplica
from labcode.parallel.model import ParallelModel, Replica
from labcode.parallel.plan import (
    ModelPlan,
    PlanEntry,
    apply_plan,
    checkpointed,
    full_weights,
    keep_own_stages,
    with_compiled_forward,
)
from labcode.parallel.sharding import FullWeight, ParamSharding, Shard, broadcast_parameters
from labcode.parallel.torch_data import TorchDataParallel
from labcode.parallel.zero import FullyShardedModule, ShardedDataParallel
from labcode.parallel.zero.fsdp import TorchFullyShardedModule
from labcode.parallel.zero.parameters import Materialize
from labcode.precision.fp8 import Fp8
from labcode.runtime.agreement import on_every_rank
from labcode.runtime.units import type_in_words

MakePlan = Callable[[Any, Grid, ParallelConfig], ModelPlan]

# the modules of which only the inputs are kept, by the value of activation_checkpointing
REPEATED_IN_BACKWARD = {
    "none": None,
    "selective": "blocks.*.attention.core",
    "full": "blocks.*",
}
PLANS: dict[type[nn.Module], MakePlan] = {GPT: gpt_plan, ViT: vit_plan}
DEFAULTS = ParallelConfig()


def parallelize(
    model: nn.Module,
    grid: Grid,
    parallel: ParallelConfig = DEFAULTS,
    *,
    seed: int | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    autocast_dtype: torch.dtype | None = None,
    base_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    trains_alone: bool = False,
    compiled: str = "none",
    compiler: str = "inductor",
    loss_options: Mapping[str, Any] | None = None,
    make_plan: MakePlan | None = None,
    fp8: Fp8 | None = None,
) -> ParallelModel:
    """Put a model on the grid: stages over pp, shards over tp, tokens over cp, copies over dp.

    A model on the meta device is cut first and drawn after, one weight at a time, with the values
    that `layers.initialize(model, seed)` gives the whole: no rank ever holds more than its part and
    one whole weight. The parts of any other model are copied out of it.

    Args:
        model: A whole model; it is changed in place.
        grid: The grid of the job. Its sizes count, not those of `parallel`.
        parallel: What happens along the axes. With pp the gradients are always averaged by our own
            DataParallel, because stages run backward several times before that; with ep too,
            because DDP has one group for all weights.
        seed: The seed of a meta model's weights and of dropout; the generator of this process is
            seeded by it. None leaves it alone.
        device, dtype: Where a meta model's weights are made, and in which dtype; None: the CPU, and
            the dtype it was built in.
        autocast_dtype: The dtype of the matrix products; None: that of the weights.
        base_dtype: The dtype of a meta model's frozen weights beside adapters; None: `dtype`.
        reduce_dtype: The dtype in which gradients are summed over dp and cp; None: that of the
            weights.
        trains_alone: Average no gradients over dp; `parallel.local` averages weights instead.
        compiled: What torch.compile compiles: "none", each "block", or the whole "model"; on a grid
            without pp, cp and tp (`combinations.check`).
        compiler: What torch.compile calls a backend.
        loss_options: More arguments of the model's loss, such as the weights of latitudes.
        make_plan: The plan of a model that `PLANS` does not know: `make_plan(model.config, grid,
            parallel)`.
        fp8: What lets the linear layers compute in 8 bits; None: they compute as the others.

    Raises:
        ValueError: The model does not fit the grid, no plan is known for it, or a meta model comes
            without a seed.

    Held by: tests/ranks/test_parallel_parity.py
    """
    # the first stands for all: a model that is in part on the meta device is none that we build
    on_meta = next(model.parameters()).is_meta
    device = torch.device(device or "cpu") if on_meta else next(model.parameters()).device
    plan = (make_plan or _known_plan(model))(model.config, grid, parallel)
    if compiled != "none":
        plan = _with_plain_layers(plan)
    if compiled == "block":
        plan = _with_compiled_blocks(plan, compiler)
    plan = _with_dropout_and_checkpointing(plan, grid, parallel, seed, device)
    # Noted while the model is whole. From here on the order matters: stages go first, so that no
    # entry draws or cuts a layer that is not here; FP8 exchanges the layers that the entries have
    # made; shardings describe the result.
    weights = full_weights(model, plan.stages, grid.size("pp"))

    keep_own_stages(model, plan.stages, grid.coord("pp"), grid.size("pp"))
    apply_plan(model, plan.entries)
    if plan.prepare is not None:
        plan.prepare(model)
    if fp8 is not None:
        fp8.convert(model)
    shardings = _describe_parameters(model, plan, weights, grid)
    if on_meta:
        _set_dtypes(model, dtype, base_dtype)
    draw = _Draw(model, shardings, grid, seed, plan.tied, device)
    if on_meta and _is_our_zero_3(parallel):
        of_experts = _groups_of_experts(model, grid, shardings)
        replica = _draw_rows_of_each(model, grid, parallel, draw, reduce_dtype, of_experts)
    else:
        if on_meta:
            # Agreed on, so that no rank waits in the broadcasts below for one that has run out of
            # memory.
            on_every_rank(draw.all)
        broadcast_parameters(dict(model.named_parameters()), shardings, grid)
        if trains_alone:
            replica = LocalReplica(model)
        else:
            replica = _replicate(model, grid, parallel, reduce_dtype, shardings)
    if compiled == "model":
        with_compiled_forward(model, compiler)
    if seed is not None:
        # not by tp, whose ranks hold the same activations and must drop the same ones
        torch.manual_seed(_seed_at(seed, grid, "dp", "pp", "cp"))
    _describe_shards(shardings, replica, parallel)
    return ParallelModel(
        replica,
        plan,
        shardings,
        weights,
        grid,
        autocast_dtype=autocast_dtype,
        loss_options=loss_options,
    )


def _known_plan(model: nn.Module) -> MakePlan:
    # the very class: a subclass may have modules of which its parent's plan knows nothing
    if type(model) not in PLANS:
        known = ", ".join(kind.__name__ for kind in PLANS)
        raise ValueError(
            f"no plan is known for {type_in_words(model)}, there are plans for {known}: "
            "give one as make_plan"
        )
    return PLANS[type(model)]


def _with_dropout_and_checkpointing(
    plan: ModelPlan,
    grid: Grid,
    parallel: ParallelConfig,
    seed: int | None,
    device: torch.device,
) -> ModelPlan:
    """The plan, with entries for what has to do with random numbers added behind its own."""
    # With tp in it, unlike the seed of the process: here its ranks must draw different numbers.
    stream = RngStream(_seed_at(seed or 0, grid, "dp", "pp", "cp", "tp"), device)

    def isolated(module: nn.Module) -> nn.Module:
        return IsolatedRng(module, stream)

    def repeated_in_backward(module: nn.Module) -> nn.Module:
        return checkpointed(module, stream)

    added = []
    for name in plan.isolated_dropout:
        added.append(PlanEntry(name, "dropout differs between ranks of tp", isolated))
    # behind the others, so that it goes around them: what it repeats includes the switch of streams
    repeated = REPEATED_IN_BACKWARD[parallel.activation_checkpointing]
    if repeated is not None:
        added.append(PlanEntry(repeated, "activation checkpointing", repeated_in_backward))
    return replace(plan, entries=(*plan.entries, *added))


def _with_plain_layers(plan: ModelPlan) -> ModelPlan:
    """The plan without what it does to layers, for a grid that cuts none of them.

    Groups of one rank give the same numbers, but each of their collectives is one more place where
    torch.compile has to leave its graph.
    """
    # by their names, which every plan gives its layers
    entries = [entry for entry in plan.entries if not entry.modules.startswith("blocks.")]
    return replace(plan, entries=tuple(entries))


def _with_compiled_blocks(plan: ModelPlan, compiler: str) -> ModelPlan:
    """The plan, with the compilation of each layer; activation checkpointing goes around it."""

    def compile_it(module: nn.Module) -> nn.Module:
        return with_compiled_forward(module, compiler)

    added = PlanEntry("blocks.*", "compiled", compile_it)
    return replace(plan, entries=(*plan.entries, added))


def _describe_parameters(
    model: nn.Module, plan: ModelPlan, weights: Mapping[str, FullWeight], grid: Grid
) -> dict[str, ParamSharding]:
    """{name: how it is spread over the grid} for each weight that this rank has."""
    shardings = {}
    for name, _ in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        # A sharded layer says itself how it cuts its weights; experts name the axes as well.
        layer = model.get_submodule(owner)
        cut = getattr(layer, "shards", {}).get(kind, {})
        shards = {"tp": cut} if isinstance(cut, Shard) else cut
        partial_over = plan.partial_over(len(shards) > 0)
        # It also says of which whole weights each rank of tp sees a part of the gradient.
        if kind in getattr(layer, "partial", ()) and "tp" not in partial_over:
            partial_over = (*partial_over, "tp")
        shardings[name] = ParamSharding(
            shape=weights[name].shape,
            shards=shards,
            partial_over=partial_over,
            tied=name in plan.tied and grid.size("pp") > 1,
        )
    return shardings


def _set_dtypes(
    model: nn.Module, dtype: torch.dtype | None, base_dtype: torch.dtype | None
) -> None:
    """Give the weights of a meta model, and its buffers, the dtypes in which they will be made."""
    model.to(dtype)
    for module in model.modules():
        if base_dtype is not None and hasattr(module, LORA_A):
            frozen = cast(nn.Parameter, module.weight)
            module.weight = nn.Parameter(frozen.detach().to(base_dtype), requires_grad=False)


class _Draw:
    """The initial values of a meta model's weights: this rank's parts of them."""

    def __init__(
        self,
        model: nn.Module,
        shardings: Mapping[str, ParamSharding],
        grid: Grid,
        seed: int | None,
        tied: tuple[str, ...],
        device: torch.device,
    ) -> None:
        self._model = model
        self._shardings = shardings
        self._grid = grid
        self._seed = seed
        self._tied = tied
        self._device = device
        # noted here: ZeRO-3 exchanges the parameters before it asks for their values
        self._dtypes = {name: param.dtype for name, param in model.named_parameters()}

    @torch.no_grad()
    def all(self) -> None:
        """Take the memory for all weights, and draw them; nothing is communicated."""
        # All memory at once: a rank that has too little says so before minutes of drawing.
        self._model.to_empty(device=self._device)
        for name, param in self._model.named_parameters():
            param.copy_(self.one(name))

    def one(self, name: str) -> torch.Tensor:
        """This rank's part of a weight's initial value, as tp and pp cut it."""
        if self._seed is None:
            raise ValueError(
                "a model on the meta device has no values: give the seed from which to draw them"
            )
        config = cast(GPTConfig | ViTConfig, self._model.config)
        # The whole weight, on the CPU, of which this rank keeps its part: every rank draws the same
        # numbers, whatever the grid. This costs each rank the drawing of p parts.
        drawn_as = name
        if name in self._tied:
            drawn_as = self._tied[0]  # tied weights have the values of the first
        whole = initial_value(drawn_as, self._shardings[name].shape, config, self._seed)
        return self._shardings[name].own(whole, self._grid).to(self._device, self._dtypes[name])


def _is_our_zero_3(parallel: ParallelConfig) -> bool:
    """Whether weights are divided by `FullyShardedModule`, which can draw them one at a time."""
    return parallel.zero_stage == 3 and parallel.data_parallel == "labcode"


def _draw_rows_of_each(
    model: nn.Module,
    grid: Grid,
    parallel: ParallelConfig,
    draw: _Draw,
    reduce_dtype: torch.dtype | None,
    of_experts: Mapping[nn.Parameter, dist.ProcessGroup],
) -> Replica:
    """Divide a meta model over dp; no rank ever holds more than one whole weight beside its rows.

    All ranks draw the same values, so that nothing has to be broadcast.
    """
    return on_every_rank(
        lambda: _shard_over_dp(model, grid, parallel, reduce_dtype, of_experts, draw.one)
    )


def _groups_of_zero(
    grid: Grid, parallel: ParallelConfig
) -> tuple[dist.ProcessGroup, list[dist.ProcessGroup]]:
    """(the ranks over which weights are divided, the groups of ranks that hold the same rows)."""
    group, replicas = grid.split("dp", parallel.zero_replicas)
    others = [copies for copies in (replicas, grid.group("cp")) if copies.size() > 1]
    return group, others


def _replicate(
    model: nn.Module,
    grid: Grid,
    parallel: ParallelConfig,
    reduce_dtype: torch.dtype | None,
    shardings: Mapping[str, ParamSharding],
) -> Replica:
    """Average gradients over dp, and sum them over cp in the same message.

    Every weight is partial over cp, since its ranks see different tokens. Megatron-LM and
    torchtitan put cp and dp into one group in the same way. An expert has the tokens of all its
    ranks of ep already, and is summed over the others of dp; it is divided by all of dp as well.
    """
    of_experts = _groups_of_experts(model, grid, shardings)
    if parallel.zero_stage and not _is_zero_redundancy_optimizer(parallel):
        return _shard_over_dp(model, grid, parallel, reduce_dtype, of_experts)
    # Summed over dp * cp ranks and divided by dp: ranks of cp add parts of one sample's gradient.
    group = grid.group("dp", "cp")
    num_shares = grid.size("dp")
    uses_ddp = parallel.data_parallel == "ddp" and grid.size("pp") == 1
    if uses_ddp and grid.size("ep") == 1:
        return TorchDataParallel(model, group, parallel.bucket_mb, num_shares, reduce_dtype)
    # Our own where DDP has no room: it would average a weight after the first backward of a
    # pipeline.
    with_cp = dict.fromkeys(of_experts, grid.group("edp", "cp"))
    return DataParallel(model, group, parallel.bucket_mb, num_shares, reduce_dtype, groups=with_cp)


def _groups_of_experts(
    model: nn.Module, grid: Grid, shardings: Mapping[str, ParamSharding]
) -> dict[nn.Parameter, dist.ProcessGroup]:
    """{weight of experts that ep divides: the ranks of dp that hold copies of it}."""
    groups = {}
    for name, param in model.named_parameters():
        if "ep" in shardings[name].shards and grid.size("ep") > 1:
            groups[param] = grid.group("edp")
    return groups


def _is_zero_redundancy_optimizer(parallel: ParallelConfig) -> bool:
    """Whether ZeRO-1 is PyTorch's ZeroRedundancyOptimizer.

    That is an optimizer (`train.optim`): gradients stay whole, as in DDP.
    """
    return parallel.zero_stage == 1 and parallel.data_parallel == "ddp"


def _shard_over_dp(
    model: nn.Module,
    grid: Grid,
    parallel: ParallelConfig,
    reduce_dtype: torch.dtype | None,
    of_experts: Mapping[nn.Parameter, dist.ProcessGroup],
    materialize: Materialize | None = None,
) -> Replica:
    """Divide weights, gradients or the optimizer's state over dp; cp holds copies of the parts."""
    num_shares = grid.size("dp")
    stays_whole = parallel.zero_stage < 3
    if parallel.data_parallel == "ddp":
        return TorchFullyShardedModule(
            model,
            grid,
            num_replicas=parallel.zero_replicas,
            num_shares=num_shares,
            reshard_after_forward=not stays_whole,
            reduce_dtype=reduce_dtype,
            experts=_modules_of(model, of_experts),
        )
    group, others = _groups_of_zero(grid, parallel)
    if stays_whole:
        return ShardedDataParallel(
            model,
            group,
            parallel.bucket_mb,
            num_shares=num_shares,
            replicas=others,
            keep_gradients=parallel.zero_stage == 1,
            reduce_dtype=reduce_dtype,
            groups=of_experts,
        )
    return FullyShardedModule(
        model,
        group,
        reduce_dtype=reduce_dtype,
        num_shares=num_shares,
        replicas=others,
        materialize=materialize,
        groups=of_experts,
    )


def _modules_of(
    model: nn.Module, params: Mapping[nn.Parameter, dist.ProcessGroup]
) -> list[nn.Module]:
    """The modules that some weights belong to."""
    found = []
    for module in model.modules():
        if any(param in params for param in module.parameters(recurse=False)):
            found.append(module)
    return found


def _describe_shards(
    shardings: dict[str, ParamSharding], replica: Replica, parallel: ParallelConfig
) -> None:
    """Note which weights are cut over dp as well, within the parts that tp makes."""
    # Behind the cut of tp in the dict, since ZeRO cuts what tp has left (`ParamSharding.shards`).
    copies = None if parallel.zero_replicas == 1 else (parallel.zero_replicas,)
    over_dp = Shard(0, copies=copies, apart=True, in_chunks=True)
    for name in replica.shards:
        sharding = shardings[name]
        axis = "edp" if "ep" in sharding.shards else "dp"
        shardings[name] = replace(sharding, shards={**sharding.shards, axis: over_dp})


def _seed_at(seed: int, grid: Grid, *axes: str) -> int:
    coords = {axis: grid.coord(axis) for axis in axes}
    return seed_for(seed, **coords)
