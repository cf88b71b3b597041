"""The one place that knows both a model and the grid: it turns a single-process model into this rank's share.

What happens to each module stands in a table, one for GPT and one for ViT; whatever is not in it stays as it is.
"""

from functools import partial

import torch
from torch import nn

from labcode.comm.collectives import gather_from, reduce_from
from labcode.comm.grid import Grid
from labcode.config import ParallelConfig
from labcode.models import gpt, vit
from labcode.models.layers import initial_value
from labcode.parallel.context import GatherAttention, RingAttention, take_own, tell_length
from labcode.parallel.data import DataParallel, TorchDataParallel
from labcode.parallel.dropout import DrawApart, Stream, seed_for
from labcode.parallel.model import ParallelModel, Stages
from labcode.parallel.plan import Row, change, gives, recomputed, takes
from labcode.parallel.sequence import SEQUENCE_DIM
from labcode.parallel.sharding import Placement, start_equal
from labcode.parallel.tensor import (
    IGNORED,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)

DEFAULTS = ParallelConfig()
TIED = ("embed.weight", "head.weight")
ATTENTION = {"ring": RingAttention, "all_gather": GatherAttention}


def parallelize(
    model: nn.Module,
    grid: Grid,
    parallel: ParallelConfig = DEFAULTS,
    *,
    seed: int | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> ParallelModel:
    """Put a model on the grid: layers dealt out over pp and cut over tp, the sequence over cp, copies over dp.

    A model on the meta device is cut first and drawn after, one weight at a time, with the values that
    `layers.initialize(model, seed)` gives the whole: no rank ever holds more than its part and one whole weight. The parts
    of any other model are copied out of it.

    Args:
        model: A whole GPT or ViT; it is changed in place.
        grid: The grid of the job.
        sequence_parallel: Norms, dropout and residuals on a part of the sequence over tp (`parallel.sequence`).
        context: Attention over cp: "ring" or "gather" (`parallel.context`).
        data_parallel: "ddp" for PyTorch's DistributedDataParallel, "labcode" for `parallel.data.DataParallel`; with pp it is
            always ours, because stages run backward several times before their gradients may be averaged.
        bucket_mb: Size of a gradient bucket in MB.
        pipeline: How layers are dealt out over pp and in which order stages run; whether layers are recomputed in backward.
        seed: Of a meta model's weights and of dropout; the generator of this process is seeded by it. None leaves it alone.
        device, dtype: Of a meta model's weights; None: the CPU, and the dtype that it was built in.

    Raises:
        ValueError: The model does not fit the grid, or a meta model comes without a seed.

    Held by: tests/ranks/test_parallel_parity.py
    """
    config = model.config
    parallel.check(config, grid.shape)
    sequence_parallel, context = parallel.sequence_parallel, parallel.context_attention
    on_meta = next(model.parameters()).is_meta
    device = torch.device(device or "cpu") if on_meta else next(model.parameters()).device
    shapes = {
        name: tuple(param.shape) for name, param in model.named_parameters(remove_duplicate=False)
    }
    ranges = parallel.stage_layers(config.num_layers, grid.size("pp"))
    _prune(model, grid, ranges)
    make_table, loss = _KINDS[type(model)]
    table = make_table(config, grid, sequence_parallel, context)
    table += _dropout_table(
        config, grid, sequence_parallel, Stream(_seed(seed, grid, "dp", "pp", "cp", "tp"), device)
    )
    table += (Row("blocks.*", "recomputed in backward", recomputed),) * (
        parallel.activation_checkpointing == "full"
    )
    change(model, table)
    _tidy(model, grid, sequence_parallel)
    placements = _placements(model, shapes, sequence_parallel, grid)
    if on_meta:
        _draw(model.to_empty(device=device).to(device, dtype), placements, grid, seed)
    start_equal(dict(model.named_parameters()), placements, grid)
    if seed is not None:
        torch.manual_seed(_seed(seed, grid, "dp", "pp", "cp"))  # alike on tp, where activations are
    replica = _replicate(
        model,
        grid,
        "labcode" if grid.size("pp") > 1 else parallel.data_parallel,
        parallel.bucket_mb,
    )
    homes = {name: (_home(name, ranges, grid.size("pp")), shape) for name, shape in shapes.items()}
    stages = Stages(ranges, parallel.pipeline_schedule, _boundary(model, grid, sequence_parallel))
    return ParallelModel(
        replica, grid, table, placements, homes, partial(loss, config, grid), stages
    )


def gpt_table(config, grid: Grid, sequence: bool, context: str) -> tuple[Row, ...]:
    """What becomes of a GPT. Every rank gets whole sequences of tokens; attention is causal, so cp cuts them zig-zag."""
    cp, tp = grid.group("cp"), grid.group("tp")
    own = partial(take_own, group=cp, layout="zigzag")
    own_of_both = _own_of_both(own, tp, sequence)
    if config.positions == "learned":
        positions = Row(
            "positions",
            "looked up for its own tokens",
            lambda m: takes(m, partial(own_of_both, dim=0)),
        )
    else:
        positions = Row(
            "positions", "angles of its own tokens of cp", lambda m: takes(m, partial(own, dim=0))
        )
    return (
        Row(
            "embed",
            "its own tokens of cp; rows of the vocabulary over tp",
            lambda m: takes(
                VocabParallelEmbedding(m, tp, sequence=sequence), partial(own, dim=SEQUENCE_DIM)
            ),
        ),
        positions,
        *_block_table(config, grid, sequence, context, config.kv_heads, "zigzag"),
        Row(
            "head",
            "column-parallel: logits of its own part of the vocabulary",
            lambda m: ColumnParallelLinear(m, tp, sequence=sequence),
        ),
    )


def vit_table(config, grid: Grid, sequence: bool, context: str) -> tuple[Row, ...]:
    """What becomes of a ViT. Every rank gets the whole state; attention sees everything, so cp cuts patches in a row."""
    cp, tp = grid.group("cp"), grid.group("tp")
    own = _own_of_both(partial(take_own, group=cp, layout="contiguous"), tp, sequence)
    groups = (tp, cp) if sequence else (cp,)
    return (
        Row("embed", "its own patches", lambda m: takes(m, partial(own, dim=SEQUENCE_DIM))),
        Row("positions", "looked up for its own patches", lambda m: takes(m, partial(own, dim=0))),
        *_block_table(config, grid, sequence, context, config.num_heads, "contiguous"),
        Row(
            "head",
            "its own patches, then gathered",
            lambda m: gives(m, partial(_join, groups=groups)),
        ),
    )


def _block_table(config, grid, sequence, context, kv_heads, layout):
    cp, tp = grid.group("cp"), grid.group("tp")
    rows_of_qkv = tuple(
        heads * config.head_size for heads in (config.num_heads, kv_heads, kv_heads)
    )
    enters = "all-gather, then column-parallel" if sequence else "column-parallel"
    leaves = "row-parallel, then reduce-scatter" if sequence else "row-parallel, then all-reduce"
    around = Row(
        "blocks.*.attention.core",
        f"{context} over cp, {layout}",
        lambda m: ATTENTION[context](m, cp, layout),
    )
    column, row = (
        partial(ColumnParallelLinear, sequence=sequence),
        partial(RowParallelLinear, sequence=sequence),
    )
    return (
        Row(
            "blocks.*.attention.qkv",
            f"{enters}: whole heads of q, k and v",
            lambda m: column(m, tp, rows_of_qkv),
        ),
        *(
            [around] if grid.size("cp") > 1 else []
        ),  # alone it would copy keys and values for nobody, and know no dropout
        Row("blocks.*.attention.proj", leaves, lambda m: row(m, tp)),
        Row("blocks.*.mlp.up", enters, lambda m: column(m, tp)),
        Row("blocks.*.mlp.down", leaves, lambda m: row(m, tp)),
    )


def _dropout_table(config, grid, sequence, stream):
    """Heads are cut over tp, so attention draws apart; the residual stream is cut under sequence parallelism only."""
    if not config.dropout:
        return ()
    names = ["blocks.*.attention.core"]
    if sequence:
        names += ["dropout", "blocks.*.attention.dropout", "blocks.*.mlp.dropout"]
    return tuple(
        Row(name, "dropout draws apart on tp", lambda m: DrawApart(m, stream)) for name in names
    )


def _gpt_loss(config, grid, logits, targets):
    """As `gpt.loss`, of logits [B, S/cp, V/tp] and whole targets [B, S]: the same number on every rank of cp and tp."""
    own = take_own(targets, group=grid.group("cp"), dim=SEQUENCE_DIM, layout="zigzag")
    losses = vocab_parallel_cross_entropy(
        logits, own, grid.group("tp"), config.vocab_size
    )  # [B, S/cp]
    return reduce_from(losses.sum() / (targets != IGNORED).sum(), grid.group("cp"))


def _vit_loss(config, grid, prediction, target, weights=None):
    return vit.loss(prediction, target, weights)


_KINDS = {gpt.GPT: (gpt_table, _gpt_loss), vit.ViT: (vit_table, _vit_loss)}


def _prune(model, grid, ranges):
    """Leave what belongs to other stages out; the rest keeps its place and its name."""
    coord, pp = grid.coord("pp"), grid.size("pp")
    own = {number for layers in ranges[coord::pp] for number in layers}
    others = [f"blocks.{number}" for number in range(model.config.num_layers) if number not in own]
    if coord > 0:
        others += ["embed"] + (
            ["positions"] if isinstance(model.positions, nn.Embedding) else []
        )  # all need the angles
    if coord < pp - 1:
        others += ["norm", "head"]
    for name in others:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Identity())


def _home(name, ranges, pp):
    """The pp coordinate that has a weight of the whole model."""
    room, number, *_ = name.split(".")
    if room == "blocks":
        return next(stage for stage, layers in enumerate(ranges) if int(number) in layers) % pp
    return 0 if room in ("embed", "positions") else pp - 1


def _boundary(model, grid, sequence):
    """What one stage hands to the next for one micro-batch: [B, S/cp, H], or [B, S/cp/tp, H] under sequence parallelism."""
    config, param = model.config, next(model.parameters())
    parts = grid.size("cp") * (grid.size("tp") if sequence else 1)

    def like(inputs):
        length = inputs.shape[1] if isinstance(model, gpt.GPT) else config.sequence_length
        return param.new_empty(inputs.shape[0], length // parts, config.hidden_size)

    return like


def _tidy(model, grid, sequence):
    """What the rows cannot see, each with its one module: weights tied anew, and how long the sequence is."""
    if not isinstance(model, gpt.GPT):
        return tell_length(model, model.config.sequence_length)
    parts = grid.size("cp", "tp") if sequence else 1

    def before(model, args):
        length = args[0].shape[1]
        if (
            length % parts
        ):  # on every rank alike; without it some would raise in a layer and the others wait for them
            raise ValueError(
                f"{length} tokens are not divisible by cp*tp = {parts}: sequence parallelism needs equal parts"
            )
        tell_length(model, length)

    model.tie_weights()
    return model.register_forward_pre_hook(before)


def _replicate(model, grid, data_parallel, bucket_mb):
    if data_parallel == "labcode":
        return DataParallel(model, grid.group("dp"), bucket_mb)
    if data_parallel == "ddp":
        return TorchDataParallel(model, process_group=grid.group("dp"), bucket_cap_mb=bucket_mb)
    raise ValueError(f"data_parallel={data_parallel!r}: choose ddp or labcode")


def _placements(model, shapes, sequence, grid):
    """Every weight is shared over cp; one that is not cut over tp is shared there too if each rank has other tokens."""
    tied = getattr(model.config, "tie_embeddings", False) and grid.size("pp") > 1
    placements = {}
    for name, _ in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        split = getattr(model.get_submodule(owner), "splits", {}).get(kind)
        summed = ("cp", "tp") if sequence and split is None else ("cp",)
        placements[name] = Placement(shapes[name], split, summed, tied and name in TIED)
    return placements


@torch.no_grad()
def _draw(model, placements, grid, seed):
    if seed is None:
        raise ValueError(
            "a model on the meta device has no values: give the seed from which to draw them"
        )
    for name, param in model.named_parameters():
        first = (
            TIED[0] if placements[name].tied else name
        )  # a tied weight has the values of its first name
        param.copy_(
            placements[name].own(
                initial_value(first, placements[name].shape, model.config, seed), grid
            )
        )


def _seed(seed, grid, *axes):
    return seed_for(seed or 0, **{axis: grid.coord(axis) for axis in axes})


def _own_of_both(own, tp, sequence):
    """Takes this rank's part of the sequence over cp, and of that its part over tp under sequence parallelism."""
    if not sequence:
        return own
    return lambda x, dim: take_own(own(x, dim=dim), group=tp, dim=dim, layout="contiguous")


def _join(x, groups):
    for group in groups:
        x = gather_from(x, group, SEQUENCE_DIM)
    return x
