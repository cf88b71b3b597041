"""Whether a model can be trained on so many GPUs, and with which settings, as an answer in words.

    print(answer(find_model("llama2-7b"), 8, gpu_memory("a100-40gb")))

Only memory is asked for, so that a kind of GPU is enough and no cluster is needed: how fast it is,
`plan` says. Looked at are, in this order, plain data parallelism with each stage of ZeRO, and, if
none of them fits, every grid with expert, tensor, context and pipeline parallelism. What would make
it fit is tried, not guessed: more GPUs, shorter sequences, narrower states, larger GPUs.

Held by: tests/unit/test_fits.py, against published reports of who ran out of memory
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from labcode.perf.adapters import NF4_BYTES, layer_adapters
from labcode.perf.cluster import gpu_names, load_gpu
from labcode.perf.find_model import NamedModel, described
from labcode.perf.layout_memory import layout_memory
from labcode.perf.plan import grids, kinds_of_checkpointing, stages_of_zero
from labcode.perf.settings import CHECKPOINTING, STATES, Settings
from labcode.perf.transformer import Transformer
from labcode.runtime.suggest import unknown
from labcode.runtime.units import GIB, binary_bytes, si
from labcode.topology import GridShape

MOST_MICRO_BATCH = 1024
RANK = 16  # of the adapters that are proposed
MOST_GPUS = 65536
LEAST_TOKENS = 256
TIGHT = 0.9  # of a GPU's memory: predictions for stacks nobody calibrated are off by as much
# of the memory on the box CUDA reports so much; A100 39.4 of 40, V100 15.8 of 16: gpus.toml
REPORTED = 0.985
MEMORY = re.compile(r"(\d+(?:\.\d+)?)-?gi?b")
SHARDED = {
    0: "DDP (nothing is sharded)",
    1: "ZeRO-1 (the optimizer's state is sharded)",
    2: "ZeRO-2 (gradients too)",
    3: "ZeRO-3 or FSDP (weights too)",
}
SHORT = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3 (FSDP)"}
RECOMPUTED = {
    "none": "without activation checkpointing",
    "selective": "with selective activation checkpointing",
    "operators": "with selective activation checkpointing",
    "full": "with full activation checkpointing",
}


class GpuMemory(NamedTuple):
    """A kind of GPU, as far as this question needs it.

    Args:
        title: What it is called.
        bytes: What a process can have of it.
    """

    title: str
    bytes: float


class Way(NamedTuple):
    """A way to train.

    Args:
        shape, settings: What it is.
        needed_bytes: Bytes of the fullest GPU.
    """

    shape: GridShape
    settings: Settings
    needed_bytes: float


class Fitting(NamedTuple):
    """A way that fits.

    Args:
        one: The layout with a micro-batch of 1.
        largest: The layout with the largest micro-batch that fits, a power of two.
        tight: Whether little more would not fit.
    """

    one: Way
    largest: Way
    tight: bool


@dataclass(frozen=True)
class Found:
    """What was looked at.

    Args:
        stages: {stage of ZeRO: the ways that fit, from the least activation checkpointing to the
            most}, of plain data parallelism.
        least: For each such stage the way that needs least.
        grid: If no stage fits with room to spare, the way with least model parallelism that does,
            if need be a tight one; None: none does.
        least_of_all: The way that needs least, whether it fits or not.
    """

    stages: dict[int, list[Fitting]]
    least: dict[int, Way]
    grid: Fitting | None
    least_of_all: Way

    @property
    def best(self) -> Fitting | None:
        """The way that computes and communicates least, if it can be not a tight one; None: nothing
        fits.
        """
        ways = list(itertools.chain.from_iterable(self.stages.values()))
        if self.grid is not None:
            ways.append(self.grid)
        return min(ways, key=_effort, default=None)


def gpu_memory(name: str) -> GpuMemory:
    """A kind of GPU by name, or by its memory alone: "a100-40gb", "A100 40GB", "24gb".

    Raises:
        ValueError: Neither.
    """
    word = re.sub(r"[\s_]+", "-", name.strip().lower()).removeprefix("nvidia-")
    if word in gpu_names():
        return GpuMemory(word, load_gpu(word).memory_bytes)
    size = MEMORY.fullmatch(word)
    if size:
        return GpuMemory(f"{size[1]} GB GPU", REPORTED * float(size[1]) * GIB)
    raise ValueError(unknown("GPU", name, gpu_names()) + ", or its memory alone, such as 24gb")


def search(
    model: Transformer, gpus: int, memory_bytes: float, base: Settings, gpus_per_node: int = 8
) -> Found:
    """All ways to train a model on that many GPUs.

    Args:
        model: Shape of the model.
        gpus: How many.
        memory_bytes: Memory of one GPU.
        base: Bytes of a weight, dtype, attention: what is not searched.
        gpus_per_node: How far tensor parallelism reaches.

    Raises:
        ValueError: Fewer than one GPU, or more than there are.
    """
    if not 1 <= gpus <= MOST_GPUS:
        raise ValueError(f"--gpus {gpus}: give 1 to {MOST_GPUS:,}")
    plain = GridShape(dp=gpus)
    stages = {}
    least = {}
    for zero_stage in stages_of_zero(plain):
        ways = list(_ways(model, plain, base, zero_stage))
        least[zero_stage] = min(ways, key=_needed)
        stages[zero_stage] = []
        for way in ways:
            if way.needed_bytes <= memory_bytes:
                stages[zero_stage].append(_fitting(model, way, memory_bytes))
    least_of_all = min(least.values(), key=_needed)
    found = Found(stages, least, None, least_of_all)
    if _has_room(found):
        return found
    grid = None
    for shape in sorted(grids(model, gpus, min(gpus, gpus_per_node), gpus), key=_cuts):
        for zero_stage in stages_of_zero(shape):
            for way in _ways(model, shape, base, zero_stage):
                least_of_all = min(least_of_all, way, key=_needed)
                if way.needed_bytes > memory_bytes or shape == plain:
                    continue
                each = _fitting(model, way, memory_bytes)
                if not each.tight:
                    return Found(stages, least, each, least_of_all)
                grid = grid or each
    return Found(stages, least, grid, least_of_all)


def _ways(model: Transformer, shape: GridShape, base: Settings, zero_stage: int) -> Iterator[Way]:
    """A micro-batch of 1 with each kind of activation checkpointing, from least to most."""
    for checkpointing in kinds_of_checkpointing(base):
        settings = replace(
            base,
            activation_checkpointing=checkpointing,
            zero_stage=zero_stage,
            sequence_parallel=shape.tp > 1,
        )
        yield _with_batch(model, shape, settings, 1)


def _with_batch(model: Transformer, shape: GridShape, settings: Settings, micro_batch: int) -> Way:
    # as many micro-batches as fill a pipeline
    global_batch = micro_batch * shape.dp * 2 * shape.pp
    settings = replace(settings, micro_batch=micro_batch, global_batch=global_batch)
    return Way(shape, settings, sum(layout_memory(model, shape, settings).values()))


def _fitting(model: Transformer, one: Way, memory_bytes: float) -> Fitting:
    largest = one
    while largest.settings.micro_batch < MOST_MICRO_BATCH:
        larger = _with_batch(model, one.shape, one.settings, 2 * largest.settings.micro_batch)
        if larger.needed_bytes > memory_bytes:
            break
        largest = larger
    return Fitting(one, largest, one.needed_bytes > TIGHT * memory_bytes)


def _needed(way: Way) -> float:
    return way.needed_bytes


def _effort(fitting: Fitting) -> tuple[bool, int, int]:
    settings = fitting.one.settings
    computed_again = CHECKPOINTING.index(settings.activation_checkpointing)
    return fitting.tight, computed_again, settings.zero_stage


def _cuts(shape: GridShape) -> tuple[int, int, int, int]:
    return shape.tp * shape.cp * shape.pp, shape.pp, shape.cp, shape.ep


def answer(
    found: NamedModel,
    gpus: int,
    gpu: GpuMemory,
    *,
    state: str = "mixed",
    base: Settings | None = None,
    gpus_per_node: int = 8,
) -> str:
    """Whether it fits and how, in sentences.

    Args:
        found: The model.
        gpus, gpu: How many of what.
        state: Who keeps the weights and how wide, one of `settings.STATES`.
        base: dtype and attention; None: the defaults.
        gpus_per_node: How far tensor parallelism reaches.

    Raises:
        ValueError: Fewer than one GPU, or more than there are.
    """
    settings = replace(base or Settings(1), **STATES[state])
    ways = search(found.shape, gpus, gpu.bytes, settings, gpus_per_node)
    limit = f"{gpu.bytes / GIB:.1f} GiB"
    lines = [
        described(found),
        *[f"({note})" for note in found.notes],
        f"Training of {_trained(found.shape, settings)} with AdamW on {gpus} x {gpu.title}, "
        f"{limit} each: {_bytes_in_words(settings)}, which is --state {state}.",
        "",
    ]
    lines.append(_verdict(ways, limit))
    lines.append("")
    for zero_stage, fitting in ways.stages.items():
        name = SHARDED[zero_stage] if gpus > 1 else "one GPU"
        lines.append(f"  {name}: {_of_a_stage(fitting, ways.least[zero_stage])}")
    if ways.grid is not None:
        lines.append(f"  {_cut(ways.grid.one)}: {_of_a_stage([ways.grid], ways.grid.one)}")
    if ways.best is None or ways.best.tight:
        cures = list(_cures(found.shape, gpus, gpu, settings, state, gpus_per_node))
        lines.append("")
        lines.append("Each of these alone makes it fit:" if cures else "No single change helps.")
        lines += [f"  {cure}" for cure in cures]
    lines += ["", *_small_print(found.shape, settings, gpu)]
    return "\n".join(lines)


def _trained(model: Transformer, settings: Settings) -> str:
    """What trains, and how the rest is kept."""
    if not settings.adapter_rank:
        return "all weights"
    adapters = model.num_layers * layer_adapters(model, settings.adapter_rank)
    kept = f"{NF4_BYTES:.3f} bytes (QLoRA)" if settings.four_bit else f"{settings.weight_bytes:g}"
    share = f"{si(adapters)}, {adapters / model.num_parameters:.2%} of the model"
    bytes_ = "" if settings.four_bit else " bytes (LoRA)"
    return (
        f"adapters of rank {settings.adapter_rank} ({share}) beside frozen weights of "
        f"{kept}{bytes_}"
    )


def _verdict(ways: Found, limit: str) -> str:
    if ways.best is None:
        least = ways.least_of_all
        return f"It does not fit: {_gib(least.needed_bytes)} at the least, {_how(least)}."
    way = ways.best.one
    numbers = f"{_gib(way.needed_bytes)} of {limit} on a GPU"
    if ways.best.tight:
        return (
            f"It is on the edge, and will probably run out of memory: {_how(way)}, it takes "
            f"{numbers}."
        )
    return f"It fits {_how(way)}: {numbers}."


def _of_a_stage(fitting: Sequence[Fitting], least: Way) -> str:
    if not fitting:
        checkpointing = RECOMPUTED[least.settings.activation_checkpointing]
        return f"does not fit, {_gib(least.needed_bytes)} {checkpointing}"
    parts = []
    all_tight = all(each.tight for each in fitting)
    for _, largest, tight in fitting:
        checkpointing = RECOMPUTED[largest.settings.activation_checkpointing]
        batch = largest.settings.micro_batch
        up_to = f"up to {batch}" if batch > 1 else "1"
        edge = ", on the edge" if tight and not all_tight else ""
        parts.append(f"{up_to} {checkpointing} ({_gib(largest.needed_bytes)}{edge})")
    return f"{'on the edge' if all_tight else 'fits'}, micro-batch {', '.join(parts)}"


def _how(way: Way) -> str:
    first = f"with {_cut(way)}" if way.shape.world_size > 1 else "on one GPU"
    settings = way.settings
    checkpointing = RECOMPUTED[settings.activation_checkpointing]
    return f"{first}, {checkpointing}, micro-batch {settings.micro_batch}"


def _cut(way: Way) -> str:
    cuts = []
    names = {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}
    for axis, name in names.items():
        size = getattr(way.shape, axis)
        if size > 1:
            cuts.append(f"{name} parallelism over {size} GPUs")
    if way.shape.dp * way.shape.cp > 1:
        cuts.append(SHORT[way.settings.zero_stage])
    return " and ".join(cuts)


def _cures(
    model: Transformer,
    gpus: int,
    gpu: GpuMemory,
    settings: Settings,
    state: str,
    gpus_per_node: int,
) -> Iterator[str]:
    """Changes after which it fits."""
    more = 2 * gpus
    while more <= MOST_GPUS:
        way = search(model, more, gpu.bytes, settings, gpus_per_node).best
        if way is not None and not way.tight:
            yield f"{more} x {gpu.title}, {_how(way.one)}: --gpus {more}"
            break
        more *= 2
    tokens = model.sequence_length // 2
    while tokens >= LEAST_TOKENS:
        shorter = replace(model, sequence_length=tokens)
        if _has_room(search(shorter, gpus, gpu.bytes, settings, gpus_per_node)):
            yield f"sequences of {tokens:,} tokens: --sequence-length {tokens}"
            break
        tokens //= 2
    if state != "bf16":
        narrow = replace(settings, **STATES["bf16"])
        if _has_room(search(model, gpus, gpu.bytes, narrow, gpus_per_node)):
            yield f"everything in bfloat16, {_bytes_in_words(narrow)}: --state bf16"
    if not settings.adapter_rank and not model.experts:
        adapted = replace(settings, adapter_rank=RANK)
        four_bit = replace(adapted, four_bit=True)
        if _has_room(search(model, gpus, gpu.bytes, adapted, gpus_per_node)):
            yield f"adapters beside the frozen model (LoRA): --lora {RANK}"
        elif _has_room(search(model, gpus, gpu.bytes, four_bit, gpus_per_node)):
            yield f"adapters beside the frozen model in 4 bits (QLoRA): --lora {RANK} --four-bit"
    larger = []
    for name in gpu_names():
        memory_bytes = load_gpu(name).memory_bytes
        if memory_bytes <= gpu.bytes:
            continue
        if _has_room(search(model, gpus, memory_bytes, settings, gpus_per_node)):
            larger.append((memory_bytes, name))
    if larger:
        memory_bytes, name = min(larger)
        yield f"{gpus} x {name}, {memory_bytes / GIB:.1f} GiB each: --gpu {name}"


def _has_room(found: Found) -> bool:
    return found.best is not None and not found.best.tight


def _small_print(model: Transformer, settings: Settings, gpu: GpuMemory) -> Iterator[str]:
    yield (
        f"Each number has {_gib(settings.reserved_bytes)} for CUDA, NCCL and the allocator in it. "
        "It is a prediction: what is within a tenth of the limit may still run out of memory."
    )
    if settings.attention != "unfused":
        yield (
            "Selective activation checkpointing keeps attention and every second product, as "
            "torchtitan does."
        )
    whole = 4.0 * model.num_parameters
    if whole > gpu.bytes / 10:
        yield (
            f"A GPU that loads or saves the model in one piece needs up to {_gib(whole)} more for "
            "a moment: load and save shards."
        )
    yield (
        "Not counted: 8-bit optimizers, offloading to the CPU, inference (the weights alone "
        f"are {_gib(2.0 * model.num_parameters)} in 16 bits)."
    )


def _bytes_in_words(settings: Settings) -> str:
    parts = (settings.weight_bytes, settings.gradient_bytes, settings.optimizer_bytes)
    weight, gradient, optimizer = parts
    which = "a weight that trains" if settings.adapter_rank else "a weight"
    return (
        f"{sum(parts):g} bytes {which} ({weight:g} of its own, {gradient:g} of its gradient, "
        f"{optimizer:g} of the optimizer)"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else binary_bytes(num_bytes)
