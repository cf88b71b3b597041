"""What each stage of a pipeline has: layers and weights."""

import functools

from labcode.perf.transformer import Transformer
from labcode.topology import GridShape


@functools.lru_cache(maxsize=4096)
def stage_layers(model: Transformer, pp: int) -> tuple[int, ...]:
    """Layers of each stage: as many each; where that is impossible, embedding and head count as a
    layer, so that the first and the last stage have fewer.

    Held by: tests/unit/test_stages.py
    """
    layers = model.num_layers
    if layers % pp == 0:
        return (layers // pp,) * pp
    most = -(-(layers + 2) // pp)
    stages = [most] * pp
    stages[0] -= 1
    stages[-1] -= 1
    # what is still too much is taken from the end, where the loss is computed
    for place in range(sum(stages) - layers):
        stages[-1 - place % pp] -= 1
    return tuple(stages)


def kept_of_a_layer(model: Transformer, ep: int) -> int:
    """Weights of a layer without those of the experts that other ranks of ep keep."""
    return model.layer_parameters - model.expert_weights + model.expert_weights // ep


@functools.lru_cache(maxsize=65536)
def stage_parameters(model: Transformer, shape: GridShape) -> tuple[float, ...]:
    """Weights of a rank of each stage; tp counts as if it cut all of them, and ep cuts experts.

    Tied weights are on both ends of a pipeline, so that the gradients meet.

    Held by: tests/unit/test_stages.py
    """
    layer = kept_of_a_layer(model, shape.ep)
    if shape.pp == 1:
        return ((model.num_layers * layer + model.end_parameters) / shape.tp,)
    found = []
    for layers in stage_layers(model, shape.pp):
        found.append(layers * layer / shape.tp)
    head = model.head_weights / shape.tp
    rest = model.end_parameters / shape.tp - head
    found[0] += head + rest if model.tied else rest
    found[-1] += head
    return tuple(found)


@functools.lru_cache(maxsize=65536)
def stage_experts(model: Transformer, shape: GridShape) -> tuple[float, ...]:
    """Those of `stage_parameters` that are in experts: the ranks of edp have copies of them."""
    own = model.expert_weights // shape.ep / shape.tp
    return tuple(layers * own for layers in stage_layers(model, shape.pp))
