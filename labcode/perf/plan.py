"""Every layout in which a model can be trained on a cluster, the fastest first.

    found = plan(load_model("llama3-70b"), load_cluster("dgx-h100"), gpus=1024, global_batch=1024)
    found.ranked[0], found.refused[0]

A layout is a grid (dp, cp, tp, pp, the order of its axes, and for a mixture of experts ep), a
micro-batch, a number of stages on each rank, a stage of ZeRO and a kind of activation
checkpointing. Legal are those that divide what they cut. Those that need more memory than a GPU has
are refused with the number; the rest is ranked by the predicted step.

Some choices are not searched, because one answer is never worse: sequence parallelism goes with
every tp, a tp group stays inside a node (Narayanan et al. 2021, arXiv:2104.04473, section 3), a
rank of cp has at least 256 tokens, which fill one tile of a product, and activation checkpointing
of the core of attention alone comes only with an attention that stores its scores. ZeRO-2 needs a
single pipeline stage: between micro-batches a stage keeps whole gradients.

Held by: tests/unit/test_plan.py
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from labcode.config import GPTConfig, ViTConfig
from labcode.perf.cluster import Cluster
from labcode.perf.estimate import INTERVAL, Estimate, estimate, step_seconds
from labcode.perf.layout_memory import layout_memory
from labcode.perf.settings import Settings
from labcode.perf.transformer import Transformer
from labcode.perf.two_level import group_link, places
from labcode.runtime.units import GIB
from labcode.topology import GridShape

# the usual one first: of orders that cost the same it is the one that is shown
ORDERS = tuple("-".join(order) for order in itertools.permutations(("tp", "cp", "dp", "pp")))
LEAST_TOKENS = 256  # of a rank of cp


# a NamedTuple: a hundred thousand of them are made
class Layout(NamedTuple):
    """A layout that fits.

    Args:
        shape, settings: What it is.
        step_s: Predicted seconds of a step.
        memory_bytes: Bytes on the fullest rank.
    """

    shape: GridShape
    settings: Settings
    step_s: float
    memory_bytes: float

    @property
    def interval_s(self) -> tuple[float, float]:
        """From when to when the step ends in 8 cases of 10; see `Estimate.interval_s`."""
        least, most = INTERVAL
        return least * self.step_s, most * self.step_s

    def estimate(self, model: Transformer | GPTConfig | ViTConfig, cluster: Cluster) -> Estimate:
        """With all its parts."""
        return estimate(model, self.shape, cluster, self.settings)


class Refusal(NamedTuple):
    """A layout that does not fit.

    Args:
        shape, settings: What it is; of its orders the first.
        needed_bytes, limit_bytes: Bytes on the fullest rank, and of its GPU.
        and_larger: Whether every larger micro-batch is meant as well.
    """

    shape: GridShape
    settings: Settings
    needed_bytes: float
    limit_bytes: float
    and_larger: bool = False

    @property
    def reason(self) -> str:
        """Why."""
        # as many digits as tell the two numbers apart
        digits = 1
        while digits < 3 and f"{self.needed_bytes / GIB:.{digits}f}" == (
            f"{self.limit_bytes / GIB:.{digits}f}"
        ):
            digits += 1
        needed = (
            f"needs {self.needed_bytes / GIB:.{digits}f} GiB of {self.limit_bytes / GIB:.{digits}f}"
        )
        return f"{needed}, as does every larger micro-batch" if self.and_larger else needed


@dataclass(frozen=True)
class Plan:
    """What `plan` has found.

    Args:
        ranked: Layouts that fit, the fastest first.
        refused: Layouts that do not.
    """

    ranked: tuple[Layout, ...]
    refused: tuple[Refusal, ...]


def plan(
    model: Transformer | GPTConfig | ViTConfig,
    cluster: Cluster,
    *,
    gpus: int,
    global_batch: int,
    settings: Settings | None = None,
    scale: float = 1.0,
) -> Plan:
    """All layouts, ranked.

    Args:
        model: Shape of the model.
        cluster: Cluster on which it runs.
        gpus: How many of it.
        global_batch: Samples of a step.
        settings: What is not searched: dtype, attention, bytes, overlap; None: the defaults.
        scale: Factor of the software stack, as in `estimate`.

    Raises:
        ValueError: Fewer than one GPU, or no layout that divides what it cuts.
    """
    if gpus < 1:
        raise ValueError(f"gpus={gpus}: give at least 1")
    transformer = Transformer.of(model)
    base = replace(settings or Settings(global_batch), global_batch=global_batch)
    ranked: list[Layout] = []
    refused: list[Refusal] = []
    legal = list(grids(transformer, gpus, min(gpus, cluster.gpus_per_node), global_batch))
    if not legal:
        raise ValueError(
            f"no grid of {gpus} GPUs divides global_batch={global_batch}, "
            f"{transformer.num_heads} heads, {transformer.num_layers} layers and "
            f"{transformer.sequence_length} tokens: change the GPUs or the batch"
        )
    variant = _variants(base)
    for shape in legal:
        placed_shapes = _placed(shape, cluster)
        for fitting in _fitting(transformer, shape, cluster, base, variant, refused):
            for placed in placed_shapes:
                step_s = scale * step_seconds(transformer, placed, cluster, fitting[0])
                ranked.append(Layout(placed, fitting[0], step_s, fitting[1]))
    ranked.sort(key=_step_s)
    return Plan(tuple(ranked), tuple(refused))


def _step_s(layout: Layout) -> tuple[float, float]:
    """Sort by seconds; of equally fast layouts the one that needs least memory comes first."""
    return layout.step_s, layout.memory_bytes


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def grids(model: Transformer, gpus: int, largest_tp: int, global_batch: int) -> Iterator[GridShape]:
    """Every grid of that many ranks that divides heads, tokens, layers, experts and batch."""
    largest_cp = max(1, model.sequence_length // LEAST_TOKENS)
    for tp in _divisors(gpus):
        if tp > largest_tp:
            break
        if model.num_heads % tp or model.kv % tp or model.ffn % tp:
            continue
        for cp in _divisors(gpus // tp):
            if cp > largest_cp or model.sequence_length % (cp * tp):
                continue
            for pp in _divisors(gpus // (tp * cp)):
                dp = gpus // (tp * cp * pp)
                if pp > model.num_layers or global_batch % dp:
                    continue
                # without experts 1 alone divides both
                for ep in _divisors(math.gcd(model.experts, dp) if model.experts else 1):
                    yield GridShape(dp, pp, cp, tp, ep=ep)


def _placed(shape: GridShape, cluster: Cluster) -> list[GridShape]:
    """The shape in each order; of those that give all groups the same links, the first."""
    found: dict[tuple[object, ...], GridShape] = {}
    for order in ORDERS:
        placed = replace(shape, order=order)
        place = places(placed, cluster.gpus_per_node)
        links = (
            group_link(cluster, place.tp),
            group_link(cluster, place.cp),
            place.pp.nodes > 1,
            place.data,
            place.ep,
            place.copies,
        )
        found.setdefault(links, placed)
    return list(found.values())


def kinds_of_checkpointing(base: Settings) -> Sequence[str]:
    """Activation checkpointing from least to most."""
    if base.attention == "unfused":
        return ("none", "selective", "full")
    return ("none", "operators", "full")


def stages_of_zero(shape: GridShape) -> Sequence[int]:
    """Stages of ZeRO that a grid can have."""
    if shape.dp * shape.cp == 1:
        return (0,)
    if shape.pp > 1:
        return (0, 1, 3)
    return (0, 1, 2, 3)


def _chunks(model: Transformer, shape: GridShape, micro_batches: int) -> list[int]:
    """How many stages a rank may have."""
    if shape.pp == 1 or micro_batches % shape.pp or model.num_layers % shape.pp:
        return [1]
    return _divisors(model.num_layers // shape.pp)


def _fitting(
    model: Transformer,
    shape: GridShape,
    cluster: Cluster,
    base: Settings,
    variant: Callable[..., Settings],
    refused: list[Refusal],
) -> Iterator[tuple[Settings, float]]:
    """(settings, bytes) of all that fit on a grid; the others are added to `refused`."""
    samples = base.global_batch // shape.dp
    limit = cluster.gpu.memory_bytes
    for micro_batch in _divisors(samples):
        anything_fits = False
        for chunks in _chunks(model, shape, samples // micro_batch):
            for zero_stage in stages_of_zero(shape):
                for checkpointing in kinds_of_checkpointing(base):
                    settings = variant(micro_batch, chunks, zero_stage, checkpointing, shape.tp > 1)
                    needed = sum(layout_memory(model, shape, settings).values())
                    if needed <= limit:
                        anything_fits = True
                        yield settings, needed
                    else:
                        refused.append(Refusal(shape, settings, needed, limit))
        if not anything_fits:
            # activations only grow from here on
            refused[-1] = refused[-1]._replace(and_larger=True)
            return


def _variants(base: Settings) -> Callable[..., Settings]:
    """`variant(micro_batch, ...)`, which makes settings once and not for each grid again."""

    @functools.cache
    def variant(
        micro_batch: int,
        stages_per_rank: int,
        zero_stage: int,
        activation_checkpointing: str,
        sequence_parallel: bool,
    ) -> Settings:
        return replace(
            base,
            micro_batch=micro_batch,
            stages_per_rank=stages_per_rank,
            zero_stage=zero_stage,
            activation_checkpointing=activation_checkpointing,
            sequence_parallel=sequence_parallel,
        )

    return variant
