"""Whether a run can fit into memory at all, known before anything is made.

What is predicted is a lower bound, so that nothing is refused that could run: each weight, its
gradient and its two AdamW moments, the data of one step, and what every micro-batch keeps for
backward even with activation checkpointing. The operating system would end a run that needs more
without a word, in the middle of set-up or hours later.

Shapes: B samples of a micro-batch, S tokens, H hidden features, V vocabulary.
In the functions below `model` has every size filled in, which that of the run may lack, and `coord`
is the coordinate of a rank on the axis pp, from 0.
"""

from dataclasses import replace

import torch

from labcode.config import Config, GPTConfig, ViTConfig
from labcode.runtime.bootstrap import World
from labcode.runtime.combinations import Resolved
from labcode.runtime.hardware import memory_bytes
from labcode.runtime.units import si

INDEX_BYTES = 8  # tokens, targets and sample numbers are int64
LOSS_BYTES = 4  # the loss is computed in float32 or wider


def check_memory(
    model: GPTConfig | ViTConfig,
    resolved: Resolved,
    local_world_size: int,
    available_bytes: int | None = None,
    *,
    num_samples: int = 0,
) -> None:
    """Refuse a run that the memory of this node, or of a GPU, cannot hold.

    A node holds `local_world_size` neighbouring ranks; of all its places in the grid the one with
    the least to hold counts, so that every rank decides the same on nodes of the same size.

    Args:
        model: Config of the model, with every size filled in from the data.
        resolved: The run.
        local_world_size: Ranks that share the memory: all of a node, or those of one GPU.
        available_bytes: Size of that memory; None: `hardware.memory_bytes()`.
        num_samples: Length of the training data: each rank keeps a permutation of it.

    Raises:
        ValueError: One line with both numbers.

    Held by: tests/unit/test_capacity.py
    """
    if available_bytes is None:
        available_bytes = memory_bytes()
    shape = resolved.shape
    # all the ranks at a coordinate of pp hold as much: a job of thousands has a few numbers
    per_coord = []
    for coord in range(shape.pp):
        needed = _rank_bytes(model, resolved, coord) + INDEX_BYTES * num_samples
        per_coord.append(needed)
    # of each node, which need not hold whole stages
    totals = []
    for first in range(0, shape.world_size, local_world_size):
        ranks = range(first, min(first + local_world_size, shape.world_size))
        totals.append(sum(per_coord[shape.coords(rank)["pp"]] for rank in ranks))
    # the smallest and not this rank's own, so that no rank refuses what another one begins
    if min(totals) <= available_bytes:
        return
    each = si(min(totals) / local_world_size, "B")
    if local_world_size == 1:
        who = f"at least {each} on a rank, which has {si(available_bytes, 'B')} of memory"
    else:
        who = (
            f"at least {each} on each of {local_world_size} ranks, "
            f"which share {si(available_bytes, 'B')} of memory"
        )
    raise ValueError(
        f"the run needs {who}: lower {_largest_fields(model, resolved)}, "
        "or use more nodes with parallel.tp or parallel.pp"
    )


def shared_memory(world: World, share_gpus: bool = False) -> tuple[int, int]:
    """(Ranks that share a memory with this one, size of that memory in bytes).

    On a GPU it is the GPU's, on the CPU that of the node.

    Args:
        world: This process.
        share_gpus: Whether several ranks may compute on one GPU (`parallel.share_gpus`).
    """
    if world.device.type != "cuda":
        return world.place.local_world_size, memory_bytes()
    total_bytes = torch.cuda.get_device_properties(world.device).total_memory
    if not share_gpus:
        return 1, total_bytes
    # as many as on the GPU that has the fewest
    return max(1, world.place.local_world_size // torch.cuda.device_count()), total_bytes


# ---- what a rank holds at least


def _rank_bytes(model: GPTConfig | ViTConfig, resolved: Resolved, coord: int) -> float:
    """A lower bound for the ranks at a coordinate of pp, averaged over tp.

        weights + max(gradients + moments, activations) + data of a step

    Gradients are freed before the next forward, and before the first step there are no moments.
    ZeRO divides moments, gradients and weights over dp, from stage 1, 2 and 3 on. ep divides
    experts over some ranks of dp, and ZeRO what each of those keeps over the others.
    """
    config = resolved.config
    value_bytes = _value_bytes(config)
    parameters = _parameters(model, resolved, coord)
    stage = config.parallel.zero_stage
    # ZeRO divides over all of dp what ep has divided over a part of it: together over dp once
    part = value_bytes * parameters / (resolved.shape.dp // config.parallel.zero_replicas)
    whole = value_bytes * (parameters - _experts_elsewhere(model, resolved, coord))
    moments = 2 * (part if stage >= 1 else whole)
    gradients = part if stage >= 2 else whole
    weights = part if stage >= 3 else whole
    activations = _activation_bytes(model, resolved, coord)
    # what is frozen has neither, and its layers may keep nothing; adapters are small
    if config.train.freeze or config.lora.rank:
        return weights + _data_bytes(model, resolved)
    return weights + max(gradients + moments, activations) + _data_bytes(model, resolved)


def _value_bytes(config: Config) -> int:
    """Bytes of a weight, its gradient or a moment; bfloat16 is for matrix products only."""
    return 8 if config.train.dtype == "float64" else 4


def _parameters(model: GPTConfig | ViTConfig, resolved: Resolved, coord: int) -> float:
    """Weights of a rank at least: its layers, and with pp what of the rest is sure to be there.

    Returns:
        Numbers, not bytes; a mean over tp, which may cut into unequal parts.
    """
    shape = resolved.shape
    # the difference of two models is a layer, whatever a layer consists of
    one = replace(model, num_layers=1).num_parameters
    layer = replace(model, num_layers=2).num_parameters - one
    parameters = _own_layers(model, resolved, coord) * layer
    if shape.pp == 1:
        parameters += one - layer
    elif isinstance(model, GPTConfig) and coord in (0, shape.pp - 1):
        # the embedding or the head
        parameters += (model.vocab_size or 0) * model.hidden_size
    return parameters / shape.tp


def _experts_elsewhere(model: GPTConfig | ViTConfig, resolved: Resolved, coord: int) -> float:
    """Weights of experts in the layers of a rank that other ranks of ep keep.

    Returns:
        Numbers, not bytes.
    """
    if not isinstance(model, GPTConfig):
        return 0.0
    shape = resolved.shape
    layers = _own_layers(model, resolved, coord)
    experts = layers * model.num_expert_parameters / (model.num_layers * shape.tp)
    return experts - experts / shape.ep


def _own_layers(model: GPTConfig | ViTConfig, resolved: Resolved, coord: int) -> int:
    """How many layers a rank has."""
    pp = resolved.shape.pp
    stages = resolved.config.parallel.stage_layers(model.num_layers, pp)
    # an interleaved schedule gives a rank every pp-th stage
    return sum(len(layers) for layers in stages[coord::pp])


def _activation_bytes(model: GPTConfig | ViTConfig, resolved: Resolved, coord: int) -> float:
    """What one micro-batch keeps: the input of each layer, and at the last stage of a GPT the
    softmax over the vocabulary.

        layers * B S H / cp [/ tp under sequence parallelism]  +  B S V / (cp tp)
    """
    config = resolved.config
    shape = resolved.shape
    tokens = resolved.micro_batch * model.sequence_length / shape.cp
    whole_tokens = tokens / shape.tp if config.parallel.sequence_parallel else tokens
    value_bytes = _value_bytes(config)
    layers = _own_layers(model, resolved, coord)
    kept = layers * whole_tokens * model.hidden_size * value_bytes
    if isinstance(model, GPTConfig) and coord == shape.pp - 1:
        vocabulary = (model.vocab_size or 0) / shape.tp
        kept += tokens * vocabulary * max(LOSS_BYTES, value_bytes)
    return kept


def _data_bytes(model: GPTConfig | ViTConfig, resolved: Resolved) -> float:
    """Bytes of the inputs and targets of one step, all micro-batches together.

    Neither pp nor cp divides them: the loader brings whole samples.
    """
    config = resolved.config
    samples = config.train.global_batch / resolved.shape.dp
    if isinstance(model, GPTConfig):
        return samples * 2 * model.context_length * INDEX_BYTES
    fields = 2 * (model.num_variables or 0) + (model.num_forcings or 0)
    return samples * fields * (model.lat or 0) * (model.lon or 0) * _value_bytes(config)


def _largest_fields(model: GPTConfig | ViTConfig, resolved: Resolved) -> str:
    """The fields on which the largest part depends, for the sentence that says what to lower."""
    # the 4 of a weight, its gradient and two moments
    weights = 4 * _value_bytes(resolved.config) * _parameters(model, resolved, coord=0)
    # at the last stage, which has the softmax over the vocabulary
    activations = _activation_bytes(model, resolved, coord=resolved.shape.pp - 1)
    data = _data_bytes(model, resolved)
    is_gpt = isinstance(model, GPTConfig)
    if data > max(weights, activations):
        return "train.global_batch or model.context_length" if is_gpt else "train.global_batch"
    if activations > weights:
        if is_gpt:
            return "train.micro_batch, model.context_length or model.vocab_size"
        return "train.micro_batch or model.hidden_size"
    fields = "model.hidden_size or model.num_layers"
    return f"model.vocab_size, {fields}" if is_gpt else fields
