"""The plan for a ViT: what becomes of its modules on a grid.

Every rank gets the whole state. Attention sees everything, so cp cuts the patches in a row.
"""

from functools import partial

import torch
from torch import nn

from labcode.comm.grid import Grid
from labcode.config import ParallelConfig, ViTConfig
from labcode.models import vit
from labcode.models.transformer_plan import (
    SequenceParts,
    block_entries,
    cut,
    isolated_dropout,
    partial_over,
)
from labcode.parallel.context import tell_length
from labcode.parallel.plan import ModelPlan, PlanEntry, StagePlan, with_output, with_sharded_input
from labcode.parallel.sequence import SEQUENCE_DIM


def vit_plan(config: ViTConfig, grid: Grid, parallel: ParallelConfig) -> ModelPlan:
    """What becomes of a ViT on a grid.

    Raises:
        ValueError: The model does not fit the grid.
    """
    parallel.check(config, grid.shape)
    parts = SequenceParts(grid, "contiguous", parallel.sequence_parallel)

    def boundary(state: torch.Tensor) -> tuple[int, ...]:
        """[B, S/cp, H], or [B, S/cp/tp, H] under sequence parallelism."""
        return (state.shape[0], parts.length(config.sequence_length), config.hidden_size)

    def own_patches(module: nn.Module) -> nn.Module:
        return with_sharded_input(module, cut(parts.over_both, SEQUENCE_DIM))

    def own_positions(module: nn.Module) -> nn.Module:
        return with_sharded_input(module, cut(parts.over_both, 0))

    def joined(module: nn.Module) -> nn.Module:
        # The whole prediction on each rank, and the loss of it: a state is small beside what the
        # layers send, and the weights of latitudes need no cutting.
        return with_output(module, parts.joined)

    stages = StagePlan(
        layers=parallel.stage_layers(config.num_layers, grid.size("pp")),
        schedule=parallel.pipeline_schedule,
        first=("embed", "positions"),
        last=("norm", "head"),
        boundary=boundary,
    )
    return ModelPlan(
        entries=(
            PlanEntry("embed", "its own patches", own_patches),
            PlanEntry("positions", "looked up for its own patches", own_positions),
            *block_entries(config, grid, parallel, "contiguous"),
            PlanEntry("head", "its own patches, then gathered", joined),
        ),
        stages=stages,
        loss=vit.loss,
        partial_over=partial(partial_over, parallel.sequence_parallel),
        isolated_dropout=isolated_dropout(config, parallel.sequence_parallel),
        prepare=partial(tell_length, length=config.sequence_length),
    )
