"""Whether a run can fit into memory at all, known before anything is made.

What is predicted is a lower bound, so that nothing is refused that could run: each weight, its
gradient and its two AdamW moments, the data of one step, and what every micro-batch keeps for
backward even with activation checkpointing. The operating system would end a run that needs more
without a word, in the middle of set-up or hours later.

Shapes: B samples of a micro-batch, S tokens, H hidden features, V vocabulary.
"""

from dataclasses import replace

import torch

from labcode.comm.bootstrap import World
from labcode.config import Config, GPTConfig, ViTConfig
from labcode.hardware import memory_bytes
from labcode.topology import GridShape
from labcode.units import si

INDEX_BYTES = 8  # tokens, targets and sample numbers are int64
LOSS_BYTES = 4  # the loss is computed in float32 or wider


def check_memory(
    model_config: GPTConfig | ViTConfig,
    config: Config,
    shape: GridShape,
    local_world_size: int,
    available_bytes: int | None = None,
    *,
    num_samples: int = 0,
) -> None:
    """Refuse a run that the memory of this node, or of a GPU, cannot hold.

    A node holds `local_world_size` neighbouring ranks; of all its places in the grid the one with
    the least to hold counts, so that every rank decides the same on nodes of the same size.

    Args:
        model_config: With every size filled in from the data.
        config: The run.
        shape: The grid.
        local_world_size: Ranks that share the memory: all of a node, or those of one GPU.
        available_bytes: Size of that memory; None: `hardware.memory_bytes()`.
        num_samples: Length of the training data: each rank keeps a permutation of it.

    Raises:
        ValueError: With both numbers.

    Held by: tests/unit/test_capacity.py
    """
    if available_bytes is None:
        available_bytes = memory_bytes()
    per_coord = []
    for coord in range(shape.pp):
        needed = _rank_bytes(model_config, config, shape, coord) + INDEX_BYTES * num_samples
        per_coord.append(needed)
    totals = []
    for first in range(0, shape.world_size, local_world_size):
        ranks = range(first, min(first + local_world_size, shape.world_size))
        totals.append(sum(per_coord[shape.coords(rank)["pp"]] for rank in ranks))
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
        f"the run needs {who}: lower {_largest_fields(model_config, config, shape)}, "
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


def _rank_bytes(
    model: GPTConfig | ViTConfig, config: Config, shape: GridShape, coord: int
) -> float:
    """A lower bound for the ranks at a coordinate of pp, averaged over tp.

        weights + max(gradients + moments, activations) + data of a step

    Gradients are freed before the next forward, and before the first step there are no moments.
    ZeRO divides moments, gradients and weights over dp, from stage 1, 2 and 3 on. ep divides
    experts over some ranks of dp, and ZeRO what each of those keeps over the others.
    """
    value_bytes = _value_bytes(config)
    parameters = _parameters(model, config, shape, coord)
    stage = config.parallel.zero_stage
    part = value_bytes * parameters / (shape.dp // config.parallel.zero_replicas)
    whole = value_bytes * (parameters - _experts_elsewhere(model, config, shape, coord))
    moments = 2 * (part if stage >= 1 else whole)
    gradients = part if stage >= 2 else whole
    weights = part if stage >= 3 else whole
    activations = _activation_bytes(model, config, shape, coord)
    # what is frozen has neither, and its layers may keep nothing; adapters are small
    if config.train.freeze or config.lora.rank:
        return weights + _data_bytes(model, config, shape)
    return weights + max(gradients + moments, activations) + _data_bytes(model, config, shape)


def _value_bytes(config: Config) -> int:
    """Of a weight, its gradient or a moment; bfloat16 is for matrix products only."""
    return 8 if config.train.dtype == "float64" else 4


def _parameters(
    model: GPTConfig | ViTConfig, config: Config, shape: GridShape, coord: int
) -> float:
    """Weights of a rank at least: its layers, and with pp what of the rest is sure to be there."""
    one = replace(model, num_layers=1).num_parameters
    layer = replace(model, num_layers=2).num_parameters - one
    parameters = _own_layers(model, config, shape, coord) * layer
    if shape.pp == 1:
        parameters += one - layer
    elif isinstance(model, GPTConfig) and coord in (0, shape.pp - 1):
        # the embedding or the head
        parameters += (model.vocab_size or 0) * model.hidden_size
    return parameters / shape.tp


def _experts_elsewhere(
    model: GPTConfig | ViTConfig, config: Config, shape: GridShape, coord: int
) -> float:
    """Weights of experts in the layers of a rank that other ranks of ep keep."""
    if not isinstance(model, GPTConfig):
        return 0.0
    layers = _own_layers(model, config, shape, coord)
    experts = layers * model.num_expert_parameters / (model.num_layers * shape.tp)
    return experts - experts / shape.ep


def _own_layers(model: GPTConfig | ViTConfig, config: Config, shape: GridShape, coord: int) -> int:
    stages = config.parallel.stage_layers(model.num_layers, shape.pp)
    return sum(len(layers) for layers in stages[coord :: shape.pp])


def _activation_bytes(
    model: GPTConfig | ViTConfig, config: Config, shape: GridShape, coord: int
) -> float:
    """What one micro-batch keeps: the input of each layer, and at the last stage of a GPT the
    softmax over the vocabulary.

        layers * B S H / cp [/ tp under sequence parallelism]  +  B S V / (cp tp)
    """
    samples = config.train.global_batch / (shape.dp * config.train.accumulation(shape.dp))
    tokens = samples * model.sequence_length / shape.cp
    whole_tokens = tokens / shape.tp if config.parallel.sequence_parallel else tokens
    value_bytes = _value_bytes(config)
    layers = _own_layers(model, config, shape, coord)
    kept = layers * whole_tokens * model.hidden_size * value_bytes
    if isinstance(model, GPTConfig) and coord == shape.pp - 1:
        vocabulary = (model.vocab_size or 0) / shape.tp
        kept += tokens * vocabulary * max(LOSS_BYTES, value_bytes)
    return kept


def _data_bytes(model: GPTConfig | ViTConfig, config: Config, shape: GridShape) -> float:
    """Inputs and targets of one step, all micro-batches together."""
    samples = config.train.global_batch / shape.dp
    if isinstance(model, GPTConfig):
        return samples * 2 * model.context_length * INDEX_BYTES
    fields = 2 * (model.num_variables or 0) + (model.num_forcings or 0)
    return samples * fields * (model.lat or 0) * (model.lon or 0) * _value_bytes(config)


def _largest_fields(model: GPTConfig | ViTConfig, config: Config, shape: GridShape) -> str:
    """The fields on which the largest part depends."""
    weights = 4 * _value_bytes(config) * _parameters(model, config, shape, coord=0)
    activations = _activation_bytes(model, config, shape, coord=shape.pp - 1)
    data = _data_bytes(model, config, shape)
    is_gpt = isinstance(model, GPTConfig)
    if data > max(weights, activations):
        return "train.global_batch or model.context_length" if is_gpt else "train.global_batch"
    if activations > weights:
        if is_gpt:
            return "train.micro_batch, model.context_length or model.vocab_size"
        return "train.micro_batch or model.hidden_size"
    fields = "model.hidden_size or model.num_layers"
    return f"model.vocab_size, {fields}" if is_gpt else fields
