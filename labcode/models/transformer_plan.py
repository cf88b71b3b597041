"""What the plans of GPT and ViT have in common: the blocks, and who holds which tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from labcode.comm.collectives import gather_from
from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig, ViTConfig
from labcode.models.lora import LoraLinear
from labcode.parallel.attention_block import own_chunks
from labcode.parallel.context import GatherAttention, RingAttention, take_own
from labcode.parallel.experts import divide_experts, summed
from labcode.parallel.lora import LoraColumnParallelLinear, LoraRowParallelLinear
from labcode.parallel.plan import PlanEntry, with_attributes
from labcode.parallel.sequence import SEQUENCE_DIM
from labcode.parallel.tensor import ColumnParallelLinear, RowParallelLinear

CONTEXT_ATTENTION = {"ring": RingAttention, "all_gather": GatherAttention}


@dataclass(frozen=True)
class SequenceParts:
    """Which part of the sequence this rank holds between the layers.

    Args:
        grid: The process groups.
        layout: How cp cuts the sequence: "zigzag" under a causal mask, else "contiguous".
        sequence_parallel: Whether tp cuts that part once more.
    """

    grid: Grid
    layout: str
    sequence_parallel: bool

    def over_cp(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part over cp: `[.., S, ..]` to `[.., S/cp, ..]`."""
        return take_own(x, self.grid.group("cp"), dim, self.layout)

    def over_both(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part over cp, and of that its part over tp under sequence parallelism."""
        # tp cuts the tokens that are here in a row, whatever order cp has left them in: they are
        # gathered again before attention, which alone looks at positions.
        own = self.over_cp(x, dim)
        if not self.sequence_parallel:
            return own
        return take_own(own, self.grid.group("tp"), dim, "contiguous")

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """The whole sequence from all parts; for a contiguous layout, replicated afterwards."""
        # The inner cut first. gather_from and not all_gather: all ranks compute the same with it.
        if self.sequence_parallel:
            x = gather_from(x, self.grid.group("tp"), SEQUENCE_DIM)
        return gather_from(x, self.grid.group("cp"), SEQUENCE_DIM)

    def length(self, whole: int) -> int:
        """How many of `whole` tokens this rank holds."""
        cp = self.grid.size("cp")
        runs = own_chunks(whole, cp, self.grid.coord("cp"), self.layout)
        tokens = sum(len(run) for run in runs)
        return tokens // self.grid.size("tp") if self.sequence_parallel else tokens


def partial_over(sequence_parallel: bool, is_sharded: bool) -> tuple[str, ...]:
    """Axes whose ranks each see a part of the gradient of a transformer's weight.

    Over cp every rank sees other tokens. Over tp it does so under sequence parallelism, for the
    weights that tp does not cut.
    """
    if sequence_parallel and not is_sharded:
        return ("cp", "tp")
    return ("cp",)


def block_entries(
    config: GPTConfig | ViTConfig, grid: Grid, parallel: ParallelConfig, layout: str
) -> tuple[PlanEntry, ...]:
    """The plan for the blocks: heads and features of the MLP over tp, the sequence over cp."""
    cp = grid.group("cp")
    tp = grid.group("tp")
    sequence = parallel.sequence_parallel
    heads = HeadParts.of(config, grid.size("tp"))
    enters = "all-gather, then column-parallel" if sequence else "column-parallel"
    leaves = "row-parallel, then reduce-scatter" if sequence else "row-parallel, then all-reduce"
    # groups of one too: a layer on one rank of tp is the same class with nothing to send
    column = partial(_column, group=tp, sequence=sequence)
    row = partial(_row, group=tp, sequence=sequence)

    def qkv(module: nn.Linear) -> nn.Module:
        return column(module, sections=heads.sections, copies=heads.copies)

    def up(module: nn.Linear) -> nn.Module:
        gated = isinstance(config, GPTConfig) and config.gated
        return column(module, sections=(config.ffn, config.ffn) if gated else None)

    def around_the_heads(module: nn.Module) -> nn.Module:
        return with_attributes(module, {"queries_per_kv": heads.queries_per_kv})

    def context_attention(module: nn.Module) -> nn.Module:
        return CONTEXT_ATTENTION[parallel.context_attention](module, cp, layout)

    def experts(module: nn.Module) -> nn.Module:
        return divide_experts(module, grid.group("ep"), tp, sequence)

    def router(module: nn.Module) -> nn.Module:
        axes = ("cp", "tp") if sequence else ("cp",)
        return with_attributes(module, {"sum_counts": partial(summed, group=grid.group(*axes))})

    def shared_up(module: nn.Linear) -> nn.Module:
        assert isinstance(config, GPTConfig)
        rows = config.shared_ffn_size
        return column(module, sections=(rows, rows) if config.gated else None)

    entries = [
        PlanEntry("blocks.*.attention.qkv", f"{enters}: whole heads of q, k and v", qkv),
        PlanEntry("blocks.*.attention.proj", leaves, row),
        PlanEntry("blocks.*.mlp.up", enters, up),
        PlanEntry("blocks.*.mlp.down", leaves, row),
    ]
    if isinstance(config, GPTConfig) and config.num_experts:
        whose = f"{config.num_experts // grid.size('ep')} of {config.num_experts} experts"
        entries += [
            PlanEntry("blocks.*.mlp.router", "looks at its own tokens", router),
            PlanEntry("blocks.*.mlp.experts", f"{whose}; their features over tp", experts),
            PlanEntry("blocks.*.mlp.shared.up", enters, shared_up),
            PlanEntry("blocks.*.mlp.shared.down", leaves, row),
        ]
    if heads.copies is not None:
        how = f"{heads.copies[1]} ranks share a key/value head"
        entries.append(PlanEntry("blocks.*.attention", how, around_the_heads))
    if grid.size("cp") > 1:
        # With one rank it would copy keys and values for nothing, and the ring refuses dropout.
        how = f"{parallel.context_attention} over cp, {layout}"
        entries.append(PlanEntry("blocks.*.attention.core", how, context_attention))
    return tuple(entries)


def _column(layer: nn.Linear, **options: Any) -> nn.Module:
    if isinstance(layer, LoraLinear):
        return LoraColumnParallelLinear(layer, **options)
    return ColumnParallelLinear(layer, **options)


def _row(layer: nn.Linear, **options: Any) -> nn.Module:
    if isinstance(layer, LoraLinear):
        return LoraRowParallelLinear(layer, **options)
    return RowParallelLinear(layer, **options)


@dataclass(frozen=True)
class HeadParts:
    """How the rows of a fused qkv are cut over tp.

    Args:
        sections: Rows of q, k and v.
        copies: How many ranks hold the same rows of each; None: every row is on one rank.
        queries_per_kv: Query heads that read one key/value head, on one rank.
    """

    sections: tuple[int, int, int]
    copies: tuple[int, int, int] | None
    queries_per_kv: int

    @classmethod
    def of(cls, config: GPTConfig | ViTConfig, tp: int) -> "HeadParts":
        """With fewer key/value heads than ranks, neighbouring ranks hold copies of a head.

        Source: Megatron-LM, which replicates key/value heads in the same case.
        """
        kv_heads = config.kv_heads if isinstance(config, GPTConfig) else config.num_heads
        query_rows = config.num_heads * config.head_size
        kv_rows = kv_heads * config.head_size
        sections = (query_rows, kv_rows, kv_rows)
        if kv_heads >= tp:
            return cls(sections, None, config.num_heads // kv_heads)
        shared_by = tp // kv_heads
        # Rows of q are on one rank each, those of k and v on `shared_by` neighbours.
        return cls(sections, (1, shared_by, shared_by), config.num_heads // tp)


def isolated_dropout(config: GPTConfig | ViTConfig, sequence_parallel: bool) -> tuple[str, ...]:
    """Modules whose dropout must differ between ranks of tp.

    Heads are cut over tp, so attention is one of them; the residual stream is cut under sequence
    parallelism only.
    """
    # nothing to isolate, and a switch of generators around each module costs time
    if config.dropout == 0:
        return ()
    if not sequence_parallel:
        return ("blocks.*.attention.core",)
    residual = ("dropout", "blocks.*.attention.dropout", "blocks.*.mlp.dropout")
    return ("blocks.*.attention.core", *residual)


def cut(shard: Callable[..., torch.Tensor], dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of a tensor alone that takes a part of it along `dim`."""
    return partial(shard, dim=dim)
