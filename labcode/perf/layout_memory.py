"""Bytes of the fullest rank of a layout, by what they are.

    weights, gradients, optimizer   of the stage's weights, divided by ZeRO (`state_memory`): those
                                    of experts over edp, all others over dp
    activations                     what each layer keeps (Korthikanti et al.), times the
                                    micro-batches that are under way on the stage
    layer, or logits                what the layer whose backward runs needs besides, with
                                    activation checkpointing; or the logits, which come and go
                                    before that: the larger of the two
    gathered                        weights and gradients that ZeRO-3 has whole
    reserved                        CUDA context, NCCL, allocator

Each stage is counted, and the fullest one is told: the first keeps most micro-batches and has the
embedding, the last has the logits.

Of a mixture an even load of the experts is taken for granted (`memory.layer_activations`).

Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4; Rajbhandari et al. 2019
    (arXiv:1910.02054), figure 1.
Held by: tests/unit/test_layout_memory.py
"""

import functools

from labcode.perf.adapters import EXPANDED_BYTES, frozen_bytes, layer_adapters
from labcode.perf.layer_time import WIDTHS
from labcode.perf.memory import layer_activations
from labcode.perf.pipeline import peak_microbatches
from labcode.perf.settings import Settings
from labcode.perf.stages import kept_of_a_layer, stage_experts, stage_layers, stage_parameters
from labcode.perf.state_memory import StateBytes, state_bytes
from labcode.perf.transformer import Transformer
from labcode.topology import GridShape


@functools.lru_cache(maxsize=4096)
def layer_bytes(
    model: Transformer,
    tp: int,
    cp: int,
    micro_batch: int,
    sequence_parallel: bool,
    fused_attention: bool,
    value_bytes: int,
    checkpointing: str,
    residual_bytes: int | None = None,
) -> float:
    """Bytes that a layer keeps for its backward on one rank: `memory.layer_activations`, added up.

    Held by: tests/unit/test_layout_memory.py::test_a_layer_keeps_what_the_paper_says
    """
    if checkpointing == "selective" and fused_attention:
        # nothing but the log-sum-exp would be dropped, and the kernel computes scores again anyway
        checkpointing = "none"
    kept = layer_activations(
        model,
        GridShape(tp=tp, cp=cp),
        batch=micro_batch,
        sequence_parallel=sequence_parallel,
        value_bytes=value_bytes,
        residual_bytes=residual_bytes,
        fused_attention=fused_attention,
        activation_checkpointing=checkpointing,
    )
    return sum(kept.values())


def layout_memory(model: Transformer, shape: GridShape, settings: Settings) -> dict[str, float]:
    """{part: bytes} of the fullest rank.

    Args:
        model: Shape of the model.
        shape: The grid.
        settings: The training.
    """
    value_bytes = WIDTHS[settings.dtype]
    residual_bytes = int(settings.weight_bytes) if settings.autocast else value_bytes
    arguments = (
        model,
        shape.tp,
        shape.cp,
        settings.micro_batch,
        settings.sequence_parallel,
        settings.attention != "unfused",
        value_bytes,
    )
    kept = layer_bytes(*arguments, settings.activation_checkpointing, residual_bytes)
    again = layer_bytes(*arguments, "none", residual_bytes) - kept
    layers = stage_layers(model, shape.pp)
    tokens = settings.micro_batch * model.sequence_length / shape.cp
    whole = model.hidden_size / shape.tp if settings.sequence_parallel else model.hidden_size
    fullest: dict[str, float] = {}
    # those between the second and the last have as many layers and keep fewer micro-batches
    for stage in sorted({0, min(1, shape.pp - 1), shape.pp - 1}):
        state = _state(model, shape, stage, settings)
        ends = 0
        if stage == 0:
            ends += 1
        logits = 0.0
        if stage == shape.pp - 1:
            ends += 1
            logits = _logits(model, shape, settings, tokens)
        # logits are gone before the first layer is computed again
        parts = {
            "weights": state.weights,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "activations": layers[stage] * _under_way(shape, stage, settings) * kept
            + ends * tokens * whole * residual_bytes,
            "layer": again if again > logits else 0.0,
            "logits": 0.0 if again > logits else logits,
            "gathered": _gathered(model, shape, settings),
            "reserved": settings.reserved_bytes,
        }
        if sum(parts.values()) > sum(fullest.values()):
            fullest = parts
    return fullest


def _state(model: Transformer, shape: GridShape, stage: int, settings: Settings) -> StateBytes:
    """What a rank of a stage keeps of weights, gradients and the optimizer's state.

    ZeRO divides an expert over the ranks that have copies of it, edp of dp.

    Of a model beside adapters, which is frozen, it is the weights alone.

    Held by: tests/ranks/test_zero_memory.py, tests/ranks/test_lora_memory.py
    """
    if settings.adapter_rank:
        return _state_with_adapters(model, shape, stage, settings)
    experts = stage_experts(model, shape)[stage] if shape.ep > 1 else 0
    others = stage_parameters(model, shape)[stage] - experts
    widths = {
        "weight_bytes": settings.weight_bytes,
        "gradient_bytes": settings.gradient_bytes,
        "optimizer_bytes": settings.optimizer_bytes,
    }
    state = state_bytes(round(others), settings.zero_stage, shape.dp * shape.cp, **widths)
    if not experts:
        return state
    more = state_bytes(round(experts), settings.zero_stage, shape.edp * shape.cp, **widths)
    return StateBytes(*(one + other for one, other in zip(state, more, strict=True)))


def _state_with_adapters(
    model: Transformer, shape: GridShape, stage: int, settings: Settings
) -> StateBytes:
    """What a rank of a stage keeps where adapters train; both are divided by ZeRO alike."""
    ranks = shape.dp * shape.cp
    layers = stage_layers(model, shape.pp)[stage]
    frozen = frozen_bytes(
        stage_parameters(model, shape)[stage],
        layers * model.layer_products / shape.tp,
        weight_bytes=settings.weight_bytes,
        four_bit=settings.four_bit,
    )
    trained = state_bytes(
        round(layers * layer_adapters(model, settings.adapter_rank, shape.tp)),
        settings.zero_stage,
        ranks,
        weight_bytes=settings.weight_bytes,
        gradient_bytes=settings.gradient_bytes,
        optimizer_bytes=settings.optimizer_bytes,
    )
    kept = frozen / ranks if settings.zero_stage == 3 else frozen
    return trained._replace(weights=trained.weights + kept)


def _under_way(shape: GridShape, stage: int, settings: Settings) -> float:
    """Micro-batches of the whole stage that are kept at once."""
    micro_batches = settings.num_micro_batches(shape)
    chunks = settings.stages_per_rank
    name = "1f1b" if chunks == 1 else "interleaved"
    return peak_microbatches(name, shape.pp, micro_batches, chunks, stage) / chunks


def _logits(model: Transformer, shape: GridShape, settings: Settings, tokens: float) -> float:
    """Logits, those of the loss and their gradient: 2 + 4 + 4 bytes in mixed precision, 6 where the
    loss is computed in 16 bits too.
    """
    width = WIDTHS[settings.dtype]
    wide = max(4, width)
    if settings.optimizer_bytes < 8:
        wide = width
    return tokens * model.outputs / shape.tp * (width + 2 * wide)


def _gathered(model: Transformer, shape: GridShape, settings: Settings) -> float:
    """Under ZeRO-3: two layers' weights, one that computes and one that comes, and a gradient.

    What is in no layer, embedding and head, stays gathered from the beginning of forward to the end
    of backward, and its gradient whole until then. So does the whole stage of a pipeline: to gather
    it for each micro-batch would cost too much.
    """
    if settings.adapter_rank:
        return _gathered_frozen(model, shape, settings)
    if settings.zero_stage < 3:
        return 0.0
    whole = settings.gathered_bytes + settings.reduced_bytes
    if shape.pp > 1:
        return max(stage_parameters(model, shape)) * whole
    layer = kept_of_a_layer(model, shape.ep) / shape.tp
    (all_weights,) = stage_parameters(model, shape)
    in_no_layer = all_weights - model.num_layers * layer
    return in_no_layer * whole + layer * (settings.gathered_bytes + whole)


def _gathered_frozen(model: Transformer, shape: GridShape, settings: Settings) -> float:
    """Like `_gathered`, for frozen weights without gradients; in 4 bits one product's weight is
    expanded beside them, whatever ZeRO does.
    """
    expanded = 0.0
    if settings.four_bit:
        largest = max(model.qkv, model.ffn * (model.mlp_matrices - 1))
        expanded = EXPANDED_BYTES * largest * model.hidden_size / shape.tp
    if settings.zero_stage < 3:
        return expanded
    products = model.layer_products / shape.tp
    options = {"weight_bytes": settings.gathered_bytes, "four_bit": settings.four_bit}
    layer = frozen_bytes(model.layer_parameters / shape.tp, products, **options)
    counts = stage_parameters(model, shape)
    if shape.pp > 1:
        layers = max(stage_layers(model, shape.pp))
        return expanded + frozen_bytes(max(counts), layers * products, **options)
    in_no_layer = model.end_parameters / shape.tp * settings.gathered_bytes
    return expanded + in_no_layer + 2 * layer
