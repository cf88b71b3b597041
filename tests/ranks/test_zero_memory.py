"""What each stage of ZeRO keeps on a rank, against the formula, within 3 %."""

from dataclasses import replace

import pytest
import torch

from labcode.config import GPTConfig, LoraConfig, OptimConfig, ParallelConfig
from labcode.perf.layout_memory import layout_memory
from labcode.perf.settings import STATES, Settings
from labcode.perf.state_memory import state_bytes
from labcode.perf.transformer import Transformer
from labcode.topology import GridShape

MODEL = GPTConfig(vocab_size=512, context_length=16, num_layers=2, num_heads=4, hidden_size=64)
MIXTURE = replace(
    MODEL,
    bias=False,
    mlp="swiglu",
    num_experts=8,
    expert_ffn_size=48,
    shared_ffn_size=32,
    router_bias_rate=0.01,
)
SLACK = 0.03


def held(
    parallel: ParallelConfig,
    config: GPTConfig = MODEL,
    shape: GridShape | None = None,
    lora: LoraConfig | None = None,
) -> tuple[int, int, int]:
    """Weights, gradients and optimizer state of this rank, in bytes, in the second step."""
    import torch.distributed as dist

    from labcode.comm.grid import Grid
    from labcode.measure.steps import held_bytes
    from labcode.models.gpt import GPT
    from labcode.models.lora import add_adapters
    from labcode.models.parallelize import parallelize
    from labcode.train.optim import make_optimizer

    grid = Grid.create(shape or GridShape(dp=dist.get_world_size()))
    with torch.device("meta"):
        model = GPT(config)
    if lora is not None:
        add_adapters(model, lora)
    model = parallelize(model, grid, parallel, seed=0)
    by_torch = parallel.zero_stage == 1 and parallel.data_parallel == "ddp"
    group = grid.group("dp") if by_torch else None
    optimizer = make_optimizer(model.weights.values(), OptimConfig(), group)
    tokens = torch.arange(2 * config.context_length).view(2, -1)
    batches = [(tokens, tokens)] * grid.size("pp")
    for _ in range(2):
        optimizer.zero_grad()
        model.forward_backward(batches)
        found = held_bytes(model, optimizer)
        optimizer.step()
        model.gather_parameters()
    return found


def held_and_recorded(parallel: ParallelConfig) -> tuple[tuple[int, int, int], list[int]]:
    """(What `held_bytes` counts, the same from a recording of the second step)."""
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function

    from labcode.comm.grid import Grid
    from labcode.measure.memory_marks import MemoryMarks
    from labcode.measure.steps import held_bytes
    from labcode.models.gpt import GPT
    from labcode.models.parallelize import parallelize
    from labcode.perf.memory_timeline import memory_timeline
    from labcode.train.optim import make_optimizer

    grid = Grid.create(GridShape(dp=dist.get_world_size()))
    with torch.device("meta"):
        model = GPT(MODEL)
    model = parallelize(model, grid, parallel, seed=0)
    optimizer = make_optimizer(model.weights.values(), OptimConfig())
    marks = MemoryMarks([*model.module.parameters(), *model.weights.values()], optimizer)
    tokens = torch.zeros(2, MODEL.context_length, dtype=torch.int64)
    model.forward_backward([(tokens, tokens)])
    optimizer.step()
    optimizer.zero_grad()
    model.gather_parameters()
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
        record_function("ProfilerStep#2"),
        marks.watch(),
    ):
        model.forward_backward([(tokens, tokens)])
        found = held_bytes(model, optimizer)
        optimizer.step()
    timeline = memory_timeline(recorded)
    names = ("parameters", "gradients", "optimizer")
    return tuple(found), [timeline.used_bytes[name][-1] for name in names]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_recording_counts_what_the_rank_keeps(ranks2, stage):
    parallel = ParallelConfig(zero_stage=stage, data_parallel="labcode")
    for found, recorded in ranks2.run(held_and_recorded, parallel):
        assert recorded == pytest.approx(list(found), rel=0.01)


@pytest.mark.parametrize(
    ("stage", "whose"),
    [(0, "ddp"), (1, "labcode"), (2, "labcode"), (3, "labcode"), (3, "ddp")],
)
def test_a_rank_keeps_what_the_formula_says(ranks4, stage, whose):
    predicted = state_bytes(MODEL.num_parameters, stage, 4)
    for found in ranks4.run(held, ParallelConfig(zero_stage=stage, data_parallel=whose)):
        for name in ("weights", "gradients", "optimizer"):
            measured = getattr(found, name)
            expected = getattr(predicted, name)
            assert measured == pytest.approx(expected, rel=SLACK), f"{name}: {found}, {predicted}"


LAYOUTS = {
    "ep 2 of dp 4": (GridShape(dp=4, ep=2), (0, 1, 2, 3)),
    "ep 4": (GridShape(dp=4, ep=4), (0, 3)),
    "ep 2, tp 2": (GridShape(dp=2, ep=2, tp=2), (0, 1, 2)),
    "ep 2, pp 2": (GridShape(dp=2, ep=2, pp=2), (0, 1)),
    "no ep": (GridShape(dp=4), (0, 3)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_keeps_its_experts_over_edp_and_all_else_over_dp(ranks4, layout):
    shape, stages = LAYOUTS[layout]
    model = Transformer.of(MIXTURE)
    for stage in stages:
        settings = Settings(8, 2, "float32", zero_stage=stage, **STATES["float32"])
        predicted = layout_memory(model, shape, settings)
        parallel = ParallelConfig(zero_stage=stage, data_parallel="labcode")
        fullest = max(ranks4.run(held, parallel, MIXTURE, shape), key=sum)
        for name, measured in zip(("weights", "gradients", "optimizer"), fullest, strict=True):
            assert measured == pytest.approx(predicted[name], rel=SLACK), (stage, name, fullest)


def test_fsdp2_keeps_what_the_formula_says_of_experts_too(ranks4):
    shape = GridShape(dp=4, ep=2)
    settings = Settings(8, 2, "float32", zero_stage=3, **STATES["float32"])
    predicted = layout_memory(Transformer.of(MIXTURE), shape, settings)
    for found in ranks4.run(held, ParallelConfig(zero_stage=3), MIXTURE, shape):
        for name, measured in zip(("weights", "gradients", "optimizer"), found, strict=True):
            assert measured == pytest.approx(predicted[name], rel=SLACK), (name, found)
