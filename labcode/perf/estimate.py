"""How long a training step takes and how much memory it needs, for any layout on any cluster.

    estimate(load_model("gpt3-175b"), GridShape(dp=8, pp=16, tp=8), load_cluster("selene"),
             Settings(global_batch=1536, micro_batch=1, attention="unfused"))

A step is m micro-batches through the slowest pipeline stage, and what comes before, between and
after. Every second has a name, and the names add up to the step:

    product, attention, elementwise   forward and backward of the slowest stage (`layer_time`)
    checkpointing                     the second forward of activation checkpointing
    launch                            the device waits for the host
    tp, cp, pp                        communication that nothing hides
    ep                                of a mixture of experts: rows to their experts and back
    fsdp                              weights gathered and gradients scattered, where layers do not
                                      hide them, and what the hidden part costs the products
    bubble                            the pipeline fills and drains, slower stages are waited for
    dp                                gradients (and ZeRO-1's and 2's weights) after the last
                                      backward
    optimizer                         reading and writing the optimizer's state, and what the host
                                      does once a step, where that was measured

What overlaps: with ZeRO-3 the weights of the next layer travel while a layer computes. Gradients
overlap with the backward of the last micro-batch if `overlap_data_parallel`. tp, cp by all-gather,
ep and pp overlap with nothing; of a ring only what is longer than the attention of a block counts.

Source: Narayanan et al. 2021 (arXiv:2104.04473), section 3; Rajbhandari et al. 2019
    (arXiv:1910.02054), section 7, for the bytes of ZeRO; each part's own source beside it.
Held by: tests/unit/test_estimate.py; against published runs by benchmarks/planner.py
"""

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labcode.config import GPTConfig, ViTConfig
from labcode.perf.cluster import Cluster
from labcode.perf.flops import transformer_flops_per_sample
from labcode.perf.layer_time import LAUNCH_S, WIDTHS, Cut, Work, head_work, layer_work
from labcode.perf.layout_memory import layout_memory
from labcode.perf.settings import Settings, check
from labcode.perf.stages import kept_of_a_layer, stage_experts, stage_layers, stage_parameters
from labcode.perf.transformer import Transformer
from labcode.perf.two_level import Placement, Places, collective_s, places, send_s
from labcode.topology import GridShape

# What a collective inside a node takes of the multiprocessors while it overlaps with products.
# Source: calculon-ai/calculon, systems/a100_80g.json and h100_80g_nvl8.json, "processor_usage".
BUSY_WITH_COLLECTIVES = 0.15
# Bytes that are read and written for a weight after the backward: the gradient is read for its norm
# (4) and scaled (8); AdamW reads weight, gradient and two moments (16) and writes three (12); a
# 16-bit gradient is widened and checked for overflow (2 + 4 + 8), a weight written in 16 bits (6).
WIDE_OPTIMIZER_BYTES = 4 + 8 + 16 + 12
COUNT_BYTES = 8  # how many rows an expert gets is an int64
MIXED_OPTIMIZER_BYTES = WIDE_OPTIMIZER_BYTES + 14 + 6

# Measured over predicted seconds, 10th and 90th percentile of the published runs.
# Held by: tests/unit/test_accuracy.py::test_the_interval_is_that_of_the_published_runs
INTERVAL = (0.94, 1.27)


@dataclass(frozen=True)
class Estimate:
    """What a layout is predicted to need.

    Args:
        parts: {part: seconds} of a step; they add up to `step_s`.
        memory_parts: {part: bytes} of the fullest rank; they add up to `memory_bytes`.
        model_flops: FLOPs of a step over all ranks, without activation checkpointing, the whole
            square of attention.
        peak_flops_per_s: Peak of all GPUs together, by the datasheet.
        memory_limit_bytes: What a GPU has.
    """

    parts: Mapping[str, float]
    memory_parts: Mapping[str, float]
    model_flops: float
    peak_flops_per_s: float
    memory_limit_bytes: float

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return sum(self.parts.values())

    @property
    def interval_s(self) -> tuple[float, float]:
        """From when to when the step of a stack nobody has calibrated ends, in 8 cases of 10.

        Of dense models: no published run of a mixture of experts has been compared.
        """
        least, most = INTERVAL
        return least * self.step_s, most * self.step_s

    @property
    def memory_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory_parts.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the datasheet's peak would allow in that time."""
        return self.model_flops / self.step_s / self.peak_flops_per_s

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits into its GPU."""
        return self.memory_bytes <= self.memory_limit_bytes


def estimate(
    model: Transformer | GPTConfig | ViTConfig,
    shape: GridShape,
    cluster: Cluster,
    settings: Settings,
    *,
    scale: float = 1.0,
) -> Estimate:
    """Predict a training step.

    Args:
        model: Shape of the model.
        shape: The grid; ranks fill the nodes in order.
        cluster: Cluster on which it runs.
        settings: How.
        scale: What runs of this software took over what was predicted of them; `fit_scale`.

    Raises:
        ValueError: A layout that cannot run, or a number of the cluster that nobody knows.
    """
    transformer = Transformer.of(model)
    check(transformer, shape, settings)
    parts = {}
    for name, seconds in step_parts(transformer, shape, cluster, settings).items():
        parts[name] = scale * seconds
    return Estimate(
        parts=parts,
        memory_parts=layout_memory(transformer, shape, settings),
        model_flops=settings.global_batch * transformer_flops_per_sample(transformer),
        peak_flops_per_s=shape.world_size * cluster.gpu.peak(settings.dtype),
        memory_limit_bytes=cluster.gpu.memory_bytes,
    )


def fit_scale(measured_s: Sequence[float], predicted_s: Sequence[float]) -> float:
    """One number for a software stack, from as little as one run of it: the median ratio.

    Raises:
        ValueError: No run, or not as many of the one as of the other.

    Held by: tests/unit/test_estimate.py::test_one_run_calibrates_a_stack
    """
    if not measured_s or len(measured_s) != len(predicted_s):
        raise ValueError(
            f"{len(measured_s)} measured and {len(predicted_s)} predicted times: give one of each "
            "for every run"
        )
    ratios = [one / other for one, other in zip(measured_s, predicted_s, strict=True)]
    return statistics.median(ratios)


def step_parts(
    model: Transformer, shape: GridShape, cluster: Cluster, settings: Settings
) -> dict[str, float]:
    """{part: seconds} of a step, without a check."""
    stage, micro_batches, others = _pieces(model, shape, cluster, settings)
    parts = {name: micro_batches * seconds for name, seconds in stage.parts.items()}
    return parts | others._asdict()


def step_seconds(
    model: Transformer, shape: GridShape, cluster: Cluster, settings: Settings
) -> float:
    """All parts of a step together, for a search: without their names, without a check."""
    stage, micro_batches, others = _pieces(model, shape, cluster, settings)
    return micro_batches * stage.seconds + sum(others)


class _Others(NamedTuple):
    """Seconds of a step that are not those of a micro-batch on its slowest stage."""

    pp: float
    bubble: float
    dp: float
    optimizer: float


def _pieces(
    model: Transformer, shape: GridShape, cluster: Cluster, settings: Settings
) -> "tuple[_Stage, int, _Others]":
    micro_batches = settings.num_micro_batches(shape)
    place = places(shape, cluster.gpus_per_node)
    parameters = _fullest_stage(model, shape)
    layer = _layer(shape, place, settings)
    stage = _slowest_stage(model, cluster, shape.pp, layer)
    message_s = _message_s(model, cluster, place.pp, layer.cut, settings)
    chunks = settings.stages_per_rank
    others = _Others(
        # forward and backward each end in an exchange with the neighbours, for each chunk of layers
        pp=micro_batches * 2 * chunks * message_s,
        bubble=stage.waiting_s / chunks + 2 * (shape.pp - 1) * message_s,
        dp=_data_parallel_s(model, shape, cluster, settings, place, parameters, stage.seconds),
        optimizer=_optimizer_s(shape, cluster, settings, parameters) + cluster.once_s,
    )
    return stage, micro_batches, others


class _Parameters(NamedTuple):
    """Weights of a rank.

    Args:
        copied: Parameters of which all ranks of dp and cp have copies; without ep all.
        experts: Parameters of which the ranks of edp and cp have copies.
    """

    copied: float
    experts: float


def _fullest_stage(model: Transformer, shape: GridShape) -> _Parameters:
    parameters = stage_parameters(model, shape)
    if shape.ep == 1:
        return _Parameters(max(parameters), 0.0)
    experts = stage_experts(model, shape)
    stage = parameters.index(max(parameters))
    return _Parameters(parameters[stage] - experts[stage], experts[stage])


class _Stage(NamedTuple):
    """The slowest stage of a pipeline, for one micro-batch.

    Args:
        parts: {part: seconds}.
        seconds: Seconds of all parts.
        waiting_s: What the other stages take: the first forward and the last backward of each,
            which fill and drain the pipeline.
    """

    parts: Mapping[str, float]
    seconds: float
    waiting_s: float


@functools.lru_cache(maxsize=65536)
def _slowest_stage(model: Transformer, cluster: Cluster, pp: int, layer: "_Layer") -> _Stage:
    one = _layer_parts(model, cluster, layer)
    # in a pipeline the embedding is on a stage that does not wait for it
    head = _head_parts(model, cluster, layer, with_embedding=pp == 1)
    layer_s = sum(one.values())
    head_s = sum(head.values())
    stages = stage_layers(model, pp)
    layers = max(stages)
    with_head = stages[-1] * layer_s + head_s > layers * layer_s
    if with_head:
        layers = stages[-1]
    parts = {name: layers * value for name, value in one.items()}
    if with_head:
        for name, value in head.items():
            parts[name] += value
    seconds = sum(parts.values())
    waiting_s = model.num_layers * layer_s + head_s - seconds
    return _Stage(parts, seconds, max(0.0, waiting_s))


class _Sharded(NamedTuple):
    """How ZeRO-3 keeps the weights of a layer.

    Args:
        place: Where the ranks are over which it is divided.
        copies: Where the ranks are over which experts are kept, if ep divides them.
        gathered_bytes, reduced_bytes: As in Settings.
    """

    place: Placement
    copies: Placement
    gathered_bytes: float
    reduced_bytes: float


class _Layer(NamedTuple):
    """All on which the time of one layer depends.

    Args:
        cut: What a rank has of it.
        activation_checkpointing, context_attention: As in Settings.
        tp, cp, ep: Where these groups are.
        sharded: How its weights are kept, if it is not whole.
    """

    cut: Cut
    activation_checkpointing: str
    context_attention: str
    tp: Placement
    cp: Placement
    ep: Placement
    sharded: _Sharded | None


def _layer(shape: GridShape, place: Places, settings: Settings) -> _Layer:
    sharded = None
    if settings.zero_stage >= 3 and shape.pp == 1:
        widths = (settings.gathered_bytes, settings.reduced_bytes)
        sharded = _Sharded(place.data, place.copies, *widths)
    return _Layer(
        cut=settings.cut(shape),
        activation_checkpointing=settings.activation_checkpointing,
        context_attention=settings.context_attention,
        tp=place.tp,
        cp=place.cp,
        ep=place.ep,
        sharded=sharded,
    )


@functools.lru_cache(maxsize=65536)
def _layer_parts(model: Transformer, cluster: Cluster, layer: _Layer) -> Mapping[str, float]:
    """{part: seconds} of one layer for one micro-batch, forward and backward."""
    forward, backward = layer_work(model, cluster.gpu, layer.cut)
    again = _computed_again(forward, layer.activation_checkpointing)
    launch_s = cluster.launch_s or LAUNCH_S
    both = forward.plus(backward)
    waits_s = both.plus(again).waits_s(launch_s, cluster.host_computes)
    tp_s = _tensor_parallel_s(model, cluster, layer)
    cp_s = _context_parallel_s(model, cluster, layer, forward.attention)
    ep_s = _expert_parallel_s(model, cluster, layer)
    compute_s = both.device_s + again.device_s + waits_s + tp_s + cp_s + ep_s
    parts = {
        "product": both.product,
        "attention": both.attention,
        "elementwise": both.elementwise,
        "checkpointing": again.device_s,
        "launch": waits_s,
        "tp": tp_s,
        "cp": cp_s,
        "fsdp": _fsdp_s(model, cluster, layer, compute_s),
    }
    if model.experts:
        parts["ep"] = ep_s
    return parts


def _computed_again(forward: Work, activation_checkpointing: str) -> Work:
    """What activation checkpointing repeats: all of forward, or the core of attention."""
    if activation_checkpointing == "full":
        return forward
    if activation_checkpointing == "operators":
        return Work(forward.product / 2, 0.0, forward.elementwise, forward.launches / 2)
    if activation_checkpointing == "selective":
        return Work(0.0, forward.attention, 0.0, forward.launches / 3)
    return forward.times(0.0)


@functools.lru_cache(maxsize=4096)
def _head_parts(
    model: Transformer, cluster: Cluster, layer: _Layer, with_embedding: bool
) -> Mapping[str, float]:
    """{part: seconds} of what comes after the last layer, for one micro-batch.

    With tp the gradient of what the output head reads is summed in backward, and the rows of the
    embedding in forward; the loss needs a maximum and a sum of 4 bytes for each token.
    """
    cut = layer.cut
    forward, backward = head_work(model, cluster.gpu, cut)
    both = forward.plus(backward)
    tokens = cut.micro_batch * model.sequence_length / cut.cp
    sums = 2 if with_embedding else 1
    loss_s = collective_s(cluster, "all_reduce", layer.tp, 4 * tokens)
    return {
        "product": both.product,
        "elementwise": both.elementwise,
        "tp": sums * _sum_over_tp_s(model, cluster, layer) + 2 * loss_s,
        "launch": both.waits_s(cluster.launch_s or LAUNCH_S, cluster.host_computes),
    }


def _act_bytes(model: Transformer, cut: Cut) -> float:
    tokens = cut.micro_batch * model.sequence_length / cut.cp
    return tokens * model.hidden_size * WIDTHS[cut.dtype]


def _tensor_parallel_s(model: Transformer, cluster: Cluster, layer: _Layer) -> float:
    """Two sums over tp forward, two backward, two more where forward is repeated.

    An MLP beside the experts, which all tokens use, has sums of its own: three in place of two.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
    """
    ways = 3 if layer.activation_checkpointing == "full" else 2
    times = ways * model.sums_over_tp
    return times * _sum_over_tp_s(model, cluster, layer)


def _sum_over_tp_s(model: Transformer, cluster: Cluster, layer: _Layer) -> float:
    """One sum of activations over tp: an all-reduce.

    Sequence parallelism makes of it an all-gather and a reduce-scatter of as many bytes in all.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
    """
    act = _act_bytes(model, layer.cut)
    if not layer.cut.sequence_parallel:
        return collective_s(cluster, "all_reduce", layer.tp, act)
    gather_s = collective_s(cluster, "all_gather", layer.tp, act)
    scatter_s = collective_s(cluster, "reduce_scatter", layer.tp, act)
    return gather_s + scatter_s


def _context_parallel_s(
    model: Transformer, cluster: Cluster, layer: _Layer, attention_s: float
) -> float:
    """Keys and values go round: gathered before the attention, or in a ring behind its blocks.

    Forward once, backward there and back with the gradients, which are 4 bytes wide in a ring; see
    `traffic.step_traffic`. In a ring each block's output is merged into the sum of those before it:
    read, read and written in 4 bytes, and its gradient as often.
    """
    cut = layer.cut
    if cut.cp == 1:
        return 0.0
    tokens = cut.micro_batch * model.sequence_length
    kv_bytes = 2 * tokens * model.kv * model.head_size / cut.tp * WIDTHS[cut.dtype]
    gather_s = collective_s(cluster, "all_gather", layer.cp, kv_bytes)
    forwards = 1 if layer.activation_checkpointing == "none" else 2
    if layer.context_attention == "all_gather":
        scatter_s = collective_s(cluster, "reduce_scatter", layer.cp, kv_bytes)
        return forwards * gather_s + scatter_s
    outputs = tokens / cut.cp * model.heads_size / cut.tp
    merge_s = (cut.cp - 1) * 3 * 4 * outputs / cluster.gpu.stream_bytes_per_s
    forward_s = max(0.0, gather_s - attention_s) + merge_s
    backward_s = max(0.0, 3 * gather_s - 2.5 * attention_s) + merge_s
    return forwards * forward_s + backward_s


def _expert_parallel_s(model: Transformer, cluster: Cluster, layer: _Layer) -> float:
    """Rows go to their experts and back: two all-to-alls forward, two backward.

    Two more where forward is repeated, and before each pair one of a number for each expert. tp
    cuts the features inside an expert, so that each of its ranks sends all rows. Even loads: of an
    uneven one the fullest rank is waited for.

    Source: Lepikhin et al. 2020 (arXiv:2006.16668), section 3.2.
    """
    if layer.ep.ranks == 1:
        return 0.0
    rows = model.active_experts * _act_bytes(model, layer.cut)
    forwards = 2 if layer.activation_checkpointing == "full" else 1
    rows_s = collective_s(cluster, "all_to_all", layer.ep, rows)
    counts_s = collective_s(cluster, "all_to_all", layer.ep, COUNT_BYTES * model.experts)
    return (2 * forwards + 2) * rows_s + forwards * counts_s


def _fsdp_s(model: Transformer, cluster: Cluster, layer: _Layer, compute_s: float) -> float:
    """What a layer loses to gathering its weights and scattering its gradients.

    Forward gathers, backward gathers again and scatters, each behind the products of a
    neighbouring layer: only what takes longer than them counts, and the multiprocessors that the
    collectives keep busy.

    Source: Zhao et al. 2023 (arXiv:2304.11277), sections 3.3 and 4.1.
    """
    sharded = layer.sharded
    if sharded is None:
        return 0.0
    experts = 0.0
    if layer.cut.ep > 1:
        experts = model.expert_weights // layer.cut.ep / layer.cut.tp
    gather_s = 0.0
    scatter_s = 0.0
    others = kept_of_a_layer(model, layer.cut.ep) / layer.cut.tp - experts
    for place, weights in ((sharded.place, others), (sharded.copies, experts)):
        if not weights:
            continue
        gathered = weights * sharded.gathered_bytes
        gather_s += collective_s(cluster, "all_gather", place, gathered)
        reduced = weights * sharded.reduced_bytes
        scatter_s += collective_s(cluster, "reduce_scatter", place, reduced)
    forward_s = compute_s / 4 if layer.activation_checkpointing == "full" else compute_s / 3
    backward_s = compute_s - forward_s
    exposed_s = max(0.0, gather_s - forward_s)
    exposed_s += max(0.0, gather_s + scatter_s - backward_s)
    hidden_s = 2 * gather_s + scatter_s - exposed_s
    return exposed_s + BUSY_WITH_COLLECTIVES * hidden_s


def _message_s(
    model: Transformer, cluster: Cluster, place: Placement, cut: Cut, settings: Settings
) -> float:
    """One message of activations to the next stage."""
    if place.ranks == 1:
        return 0.0
    act = _act_bytes(model, cut)
    if settings.scatter_gather or settings.sequence_parallel:
        act /= cut.tp
    return send_s(cluster, place, act)


def _data_parallel_s(
    model: Transformer,
    shape: GridShape,
    cluster: Cluster,
    settings: Settings,
    place: Places,
    parameters: _Parameters,
    micro_batch_s: float,
) -> float:
    """Gradients over dp and cp: an all-reduce, or a reduce-scatter and the new weights' all-gather.

    Those of experts go over edp and cp, after the others. The same once a step for ZeRO-3 in a
    pipeline, where a stage stays gathered.

    Source: Rajbhandari et al. 2019 (arXiv:1910.02054), section 7: as many bytes either way.
    """
    if settings.zero_stage >= 3 and shape.pp == 1:
        return 0.0
    reduce_s = 0.0
    gather_s = 0.0
    for group, weights in zip((place.data, place.copies), parameters, strict=True):
        if not weights:
            continue
        gradients = weights * settings.reduced_bytes
        if settings.zero_stage == 0:
            reduce_s += collective_s(cluster, "all_reduce", group, gradients)
            continue
        reduce_s += collective_s(cluster, "reduce_scatter", group, gradients)
        gathered = weights * settings.gathered_bytes
        gather_s += collective_s(cluster, "all_gather", group, gathered)
    if settings.overlap_data_parallel:
        # the first layers' gradients come last, and nothing is left to hide them
        last = reduce_s / max(stage_layers(model, shape.pp))
        backward_s = micro_batch_s * 2 / 3
        hidden_s = min(reduce_s - last, backward_s)
        reduce_s += BUSY_WITH_COLLECTIVES * hidden_s - hidden_s
    if settings.zero_stage == 2:
        # a rank has no room for the whole gradients, so that each micro-batch scatters its own
        reduce_s *= settings.num_micro_batches(shape)
    return reduce_s + gather_s


def _optimizer_s(
    shape: GridShape, cluster: Cluster, settings: Settings, weights: _Parameters
) -> float:
    """AdamW over a rank's part of the weights, at the memory's bandwidth."""
    parameters = sum(weights)
    if settings.zero_stage >= 1:
        parameters = weights.copied / (shape.dp * shape.cp)
        parameters += weights.experts / (shape.edp * shape.cp)
    mixed = settings.weight_bytes < 4
    num_bytes = MIXED_OPTIMIZER_BYTES if mixed else WIDE_OPTIMIZER_BYTES
    return parameters * num_bytes / cluster.gpu.stream_bytes_per_s
