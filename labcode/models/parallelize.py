"""From a single-process model to this rank's part of it.

What becomes of each module stands in a plan, one file per model (`gpt_plan.py`, `vit_plan.py`);
these files and this one are the only places that know both a model and the grid.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from labcode.comm.agreement import on_every_rank
from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig, ViTConfig
from labcode.models.gpt import GPT
from labcode.models.gpt_plan import gpt_plan
from labcode.models.layers import initial_value
from labcode.models.vit import ViT
from labcode.models.vit_plan import vit_plan
from labcode.parallel.data import DataParallel, TorchDataParallel
from labcode.parallel.dropout import IsolatedRng, RngStream, seed_for
from labcode.parallel.model import ParallelModel, Replica
from labcode.parallel.plan import (
    ModelPlan,
    PlanEntry,
    apply_plan,
    checkpointed,
    full_weights,
    keep_own_stages,
)
from labcode.parallel.sharding import FullWeight, ParamSharding, broadcast_parameters

MakePlan = Callable[[Any, Grid, ParallelConfig], ModelPlan]

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
    loss_options: Mapping[str, Any] | None = None,
    make_plan: MakePlan | None = None,
) -> ParallelModel:
    """Put a model on the grid: stages over pp, shards over tp, tokens over cp, copies over dp.

    A model on the meta device is cut first and drawn after, one weight at a time, with the values
    that `layers.initialize(model, seed)` gives the whole: no rank ever holds more than its part and
    one whole weight. The parts of any other model are copied out of it.

    Args:
        model: A whole model; it is changed in place.
        grid: The grid of the job. Its sizes count, not those of `parallel`.
        parallel: What happens along the axes. With pp the gradients are always averaged by our own
            DataParallel, because stages run backward several times before that.
        seed: Of a meta model's weights and of dropout; the generator of this process is seeded by
            it. None leaves it alone.
        device, dtype: Of a meta model's weights; None: the CPU, and the dtype it was built in.
        autocast_dtype: In which the matrix products are computed; None: that of the weights.
        loss_options: More arguments of the model's loss, such as the weights of latitudes.
        make_plan: The plan of a model that `PLANS` does not know: `make_plan(model.config, grid,
            parallel)`.

    Raises:
        ValueError: The model does not fit the grid, no plan is known for it, or a meta model comes
            without a seed.

    Held by: tests/ranks/test_parallel_parity.py
    """
    on_meta = next(model.parameters()).is_meta
    device = torch.device(device or "cpu") if on_meta else next(model.parameters()).device
    plan = (make_plan or _known_plan(model))(model.config, grid, parallel)
    plan = _with_dropout_and_checkpointing(plan, grid, parallel, seed, device)
    weights = full_weights(model, plan.stages, grid.size("pp"))

    keep_own_stages(model, plan.stages, grid.coord("pp"), grid.size("pp"))
    apply_plan(model, plan.entries)
    if plan.prepare is not None:
        plan.prepare(model)
    shardings = _describe_parameters(model, plan, weights, grid)
    if on_meta:
        # no rank waits in the broadcasts below for one that has not enough memory
        on_every_rank(lambda: _draw_on(device, dtype, model, shardings, grid, seed, plan.tied))
    broadcast_parameters(dict(model.named_parameters()), shardings, grid)
    if seed is not None:
        # the same on tp, where the same activations are
        torch.manual_seed(_seed_at(seed, grid, "dp", "pp", "cp"))
    replica = _replicate(model, grid, parallel)
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
    if type(model) not in PLANS:
        known = ", ".join(kind.__name__ for kind in PLANS)
        raise ValueError(
            f"no plan is known for a {type(model).__name__}, there are plans for {known}: "
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
    stream = RngStream(_seed_at(seed or 0, grid, "dp", "pp", "cp", "tp"), device)

    def isolated(module: nn.Module) -> nn.Module:
        return IsolatedRng(module, stream)

    def repeated_in_backward(module: nn.Module) -> nn.Module:
        return checkpointed(module, stream)

    added = []
    for name in plan.isolated_dropout:
        added.append(PlanEntry(name, "dropout differs between ranks of tp", isolated))
    if parallel.activation_checkpointing == "full":
        added.append(PlanEntry("blocks.*", "activation checkpointing", repeated_in_backward))
    return replace(plan, entries=(*plan.entries, *added))


def _describe_parameters(
    model: nn.Module, plan: ModelPlan, weights: Mapping[str, FullWeight], grid: Grid
) -> dict[str, ParamSharding]:
    """{name: how it is spread over the grid} for each weight that this rank has."""
    shardings = {}
    for name, _ in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        shard = getattr(model.get_submodule(owner), "shards", {}).get(kind)
        shardings[name] = ParamSharding(
            shape=weights[name].shape,
            shards={} if shard is None else {"tp": shard},
            partial_over=plan.partial_over(shard is not None),
            tied=name in plan.tied and grid.size("pp") > 1,
        )
    return shardings


def _draw_on(
    device: torch.device,
    dtype: torch.dtype | None,
    model: nn.Module,
    shardings: Mapping[str, ParamSharding],
    grid: Grid,
    seed: int | None,
    tied: tuple[str, ...],
) -> None:
    """Take the memory for a meta model's weights, and draw them; nothing is communicated."""
    model.to_empty(device=device).to(device, dtype)
    _draw(model, shardings, grid, seed, tied)


@torch.no_grad()
def _draw(
    model: nn.Module,
    shardings: Mapping[str, ParamSharding],
    grid: Grid,
    seed: int | None,
    tied: tuple[str, ...],
) -> None:
    """Give each weight this rank's part of its initial value."""
    if seed is None:
        raise ValueError(
            "a model on the meta device has no values: give the seed from which to draw them"
        )
    config = cast(GPTConfig | ViTConfig, model.config)
    for name, param in model.named_parameters():
        drawn_as = tied[0] if name in tied else name  # tied weights have the values of the first
        whole = initial_value(drawn_as, shardings[name].shape, config, seed)
        param.copy_(shardings[name].own(whole, grid))


def _replicate(model: nn.Module, grid: Grid, parallel: ParallelConfig) -> Replica:
    """Average gradients over dp, and sum them over cp in the same message.

    Every weight is partial over cp, since its ranks see different tokens. Megatron-LM and
    torchtitan put cp and dp into one group in the same way.
    """
    group = grid.group("dp", "cp")
    num_shares = grid.size("dp")
    if parallel.data_parallel == "ddp" and grid.size("pp") == 1:
        return TorchDataParallel(model, group, parallel.bucket_mb, num_shares)
    return DataParallel(model, group, parallel.bucket_mb, num_shares)


def _seed_at(seed: int, grid: Grid, *axes: str) -> int:
    coords = {axis: grid.coord(axis) for axis in axes}
    return seed_for(seed, **coords)
