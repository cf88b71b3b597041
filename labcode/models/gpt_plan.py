"""The plan for a GPT: what becomes of its modules on a grid.

Every rank gets whole sequences of tokens. Attention is causal, so cp cuts them zig-zag.
"""

from functools import partial
from typing import cast

import torch
from torch import nn

from labcode.comm.collectives import reduce_from
from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig
from labcode.models.gpt import GPT
from labcode.models.transformer_plan import (
    SequenceParts,
    block_entries,
    cut,
    isolated_dropout,
    partial_over,
)
from labcode.parallel.context import tell_length
from labcode.parallel.plan import ModelPlan, PlanEntry, StagePlan, with_sharded_input
from labcode.parallel.sequence import SEQUENCE_DIM
from labcode.parallel.tensor import (
    IGNORED,
    ColumnParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)

TIED = ("embed.weight", "head.weight")


def gpt_plan(config: GPTConfig, grid: Grid, parallel: ParallelConfig) -> ModelPlan:
    """What becomes of a GPT on a grid.

    Raises:
        ValueError: The model does not fit the grid.
    """
    parallel.check(config, grid.shape)
    parts = SequenceParts(grid, "zigzag", parallel.sequence_parallel)
    learned = config.positions == "learned"

    def boundary(tokens: torch.Tensor) -> tuple[int, ...]:
        """[B, S/cp, H], or [B, S/cp/tp, H] under sequence parallelism."""
        return (tokens.shape[0], parts.length(tokens.shape[1]), config.hidden_size)

    stages = StagePlan(
        layers=parallel.stage_layers(config.num_layers, grid.size("pp")),
        schedule=parallel.pipeline_schedule,
        # rotary positions have no weights, and every stage needs their angles
        first=("embed", "positions") if learned else ("embed",),
        last=("norm", "head"),
        boundary=boundary,
    )
    return ModelPlan(
        entries=(
            _embed(parts, parallel.sequence_parallel),
            _positions(parts, learned),
            *block_entries(config, grid, parallel, "zigzag"),
            _head(grid, parallel.sequence_parallel),
        ),
        stages=stages,
        loss=partial(gpt_loss, config, grid),
        partial_over=partial(partial_over, parallel.sequence_parallel),
        isolated_dropout=isolated_dropout(config, parallel.sequence_parallel),
        tied=TIED if config.tie_embeddings else (),
        count_targets=count_targets,
        prepare=partial(_prepare, grid, parallel.sequence_parallel),
    )


def _embed(parts: SequenceParts, sequence_parallel: bool) -> PlanEntry:
    def transform(module: nn.Embedding) -> nn.Module:
        tp = parts.grid.group("tp")
        embedding = VocabParallelEmbedding(module, tp, sequence=sequence_parallel)
        return with_sharded_input(embedding, cut(parts.over_cp, SEQUENCE_DIM))

    return PlanEntry("embed", "its own tokens of cp; rows of the vocabulary over tp", transform)


def _positions(parts: SequenceParts, learned: bool) -> PlanEntry:
    def own_rows(module: nn.Module) -> nn.Module:
        return with_sharded_input(module, cut(parts.over_both, 0))

    def own_angles(module: nn.Module) -> nn.Module:
        # inside attention the sequence is cut over cp only
        return with_sharded_input(module, cut(parts.over_cp, 0))

    if learned:
        return PlanEntry("positions", "looked up for its own tokens", own_rows)
    return PlanEntry("positions", "angles of its own tokens of cp", own_angles)


def _head(grid: Grid, sequence_parallel: bool) -> PlanEntry:
    def transform(module: nn.Linear) -> nn.Module:
        return ColumnParallelLinear(module, grid.group("tp"), sequence=sequence_parallel)

    return PlanEntry("head", "column-parallel: logits of its own part of the vocabulary", transform)


def _prepare(grid: Grid, sequence_parallel: bool, model: GPT) -> None:
    """Set up what involves several modules: tied weights, and the length of the sequence."""
    parts = grid.size("cp", "tp") if sequence_parallel else 1

    def tell(model: nn.Module, args: tuple) -> None:
        length = args[0].shape[1]
        if length % parts:
            # on every rank; else some would raise in a layer and the others wait for them
            raise ValueError(
                f"{length} tokens are not divisible by cp*tp = {parts}: "
                "sequence parallelism needs equal parts"
            )
        tell_length(model, length)

    # anew: the entries have put sharded modules in the place of embedding and head
    model.tie_weights()
    model.register_forward_pre_hook(tell)


def gpt_loss(
    config: GPTConfig, grid: Grid, logits: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """What `gpt.loss` computes: the mean cross-entropy in nats per target that counts.

    Communicates: what `vocab_parallel_cross_entropy` does over tp, and one number over cp.

    Args:
        logits: [B, S/cp, V/tp]
        targets: [B, S] int64, whole.

    Returns:
        The same number on every rank of cp and tp.
    """
    own = take_own_targets(grid, targets)
    vocab_size = cast(int, config.vocab_size)  # a GPT has been built from this config
    losses = vocab_parallel_cross_entropy(logits, own, grid.group("tp"), vocab_size)  # [B, S/cp]
    # Divided by the count over the whole sequence, then summed over cp. A mean of the ranks' means
    # would weight a target more where few of its neighbours count.
    return reduce_from(losses.sum() / count_targets(targets), grid.group("cp"))


def take_own_targets(grid: Grid, targets: torch.Tensor) -> torch.Tensor:
    """Cut whole targets to those of this rank's tokens: [B, S] to [B, S/cp]."""
    return SequenceParts(grid, "zigzag", sequence_parallel=False).over_cp(targets, SEQUENCE_DIM)


def count_targets(targets: torch.Tensor) -> torch.Tensor:
    """How many targets count: all but those of -100."""
    return (targets != IGNORED).sum()
