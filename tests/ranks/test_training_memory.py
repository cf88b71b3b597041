"""The most that a rank has allocated within a step, against labcode.perf.training_memory."""

import itertools
from dataclasses import replace

import pytest
import torch
from covering import covering

from labcode.comm.grid import Grid
from labcode.config import GPTConfig, OptimConfig, ParallelConfig, ViTConfig
from labcode.measure.steps import allocated_bytes, held_bytes
from labcode.models import gpt, vit
from labcode.models.parallelize import parallelize
from labcode.perf.layout_memory import layout_memory
from labcode.perf.settings import Settings
from labcode.perf.training_memory import training_memory
from labcode.perf.transformer import Transformer
from labcode.topology import GridShape
from labcode.train.optim import make_optimizer

CPU = torch.device("cpu")
GPT = GPTConfig(
    vocab_size=83,
    context_length=128,
    num_layers=2,
    num_heads=4,
    hidden_size=64,
    positions="rotary",
)
WIDE = replace(GPT, num_layers=4, hidden_size=256, context_length=16)
LEARNED = replace(GPT, positions="learned", tie_embeddings=False, num_kv_heads=2, vocab_size=512)
VIT = ViTConfig(
    num_variables=4,
    num_forcings=2,
    lat=30,
    lon=60,
    num_layers=4,
    num_heads=4,
    hidden_size=128,
)


def batches(config, micro_batch, count, dtype):
    made = []
    for _ in range(count):
        if isinstance(config, GPTConfig):
            tokens = torch.randint(config.vocab_size, (micro_batch, config.context_length + 1))
            made.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        else:
            fields = config.num_variables + config.num_forcings
            states = torch.randn(micro_batch, fields, config.lat, config.lon, dtype=dtype)
            made.append((states, states[:, : config.num_variables].clone()))
    return made


def peak_of_a_step(rank, config, parallel, micro_batch, count, dtype):
    """All that a rank has at the worst moment of its third step, as its allocator saw it."""
    narrow = torch.bfloat16 if dtype == "bfloat16" else None
    wide = torch.float64 if dtype == "float64" else torch.float32
    with torch.device("meta"):
        model = gpt.GPT(config) if isinstance(config, GPTConfig) else vit.ViT(config)
    grid = Grid.create(parallel.shape(torch.distributed.get_world_size()))
    made = {}

    def step():
        own = batches(config, micro_batch, count, wide)
        made["model"].forward_backward(own)
        made["model"].gradient_norm()
        made["optimizer"].step()
        made["optimizer"].zero_grad(set_to_none=True)
        made["model"].gather_parameters()

    made["model"] = parallelize(model, grid, parallel, seed=0, dtype=wide, autocast_dtype=narrow)
    made["optimizer"] = make_optimizer(made["model"].weights.values(), OptimConfig())
    step()
    step()
    held = held_bytes(made["model"], made["optimizer"])
    buckets = held.weights  # kept from step to step
    return held.weights + held.optimizer + buckets + allocated_bytes(step, CPU).peak


# name: model, micro-batch, micro-batches, dtype, the moment of the peak
ONE_RANK = {
    "gpt": (GPT, 16, 1, "float32", "loss backward"),
    "a large vocabulary": (replace(GPT, vocab_size=2000), 4, 1, "float32", "loss backward"),
    "float64": (GPT, 4, 1, "float64", "loss backward"),
    "two micro-batches": (GPT, 8, 2, "float32", "loss backward"),
    "autocast": (GPT, 16, 1, "bfloat16", "loss backward"),
    "deep": (
        replace(GPT, num_layers=8, hidden_size=128),
        4,
        1,
        "float32",
        "last layer backward",
    ),
    "deep, autocast": (
        replace(GPT, num_layers=8, hidden_size=128),
        4,
        1,
        "bfloat16",
        "last layer backward",
    ),
    "few tokens": (WIDE, 2, 1, "float32", "gradients complete"),
    "few tokens, autocast": (WIDE, 4, 2, "bfloat16", "last layer backward"),
    "learned positions, not tied": (LEARNED, 8, 1, "float32", "loss backward"),
    "vit": (VIT, 4, 1, "float32", "last layer backward"),
    "vit, small": (
        replace(VIT, hidden_size=64, num_layers=1),
        2,
        1,
        "float32",
        "loss backward",
    ),
    "vit, three micro-batches": (VIT, 2, 3, "float32", "last layer backward"),
    "vit, autocast": (VIT, 4, 1, "bfloat16", "last layer backward"),
}


def kind_of(name):
    """(family of the model, micro-batches, dtype, when the peak is)"""
    config, _, count, dtype, moment = ONE_RANK[name]
    return type(config).__name__, count, dtype, moment


@pytest.mark.parametrize("name", covering([(name,) for name in ONE_RANK], kind_of))
def test_the_peak_of_one_rank_is_the_predicted_one(ranks1, name):
    config, micro_batch, count, dtype, moment = ONE_RANK[name]
    predicted = training_memory(
        config, micro_batch=micro_batch, num_micro_batches=count, dtype=dtype
    )
    assert predicted.moment == moment
    given = (config, ParallelConfig(), micro_batch, count, dtype)
    (measured,) = ranks1.run(peak_of_a_step, *given)
    assert measured == pytest.approx(predicted.total, rel=0.02)


MODELS = {"gpt": WIDE, "vit": VIT}
OPTIONS = list(itertools.product(MODELS, ("ddp", "labcode"), ("full", "selective")))


@pytest.mark.parametrize(("model", "data_parallel", "kind"), covering(OPTIONS))
def test_checkpointing_and_our_data_parallelism_are_predicted_too(
    ranks1, model, data_parallel, kind
):
    config = MODELS[model]
    parallel = ParallelConfig(data_parallel=data_parallel, activation_checkpointing=kind)
    options = {"data_parallel": data_parallel, "activation_checkpointing": kind}
    predicted = training_memory(config, micro_batch=2, **options)
    given = (config, parallel, 2, 1, "float32")
    (measured,) = ranks1.run(peak_of_a_step, *given)
    assert measured == pytest.approx(predicted.total, rel=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_micro_batch_keeps_narrow_weights(ranks2, dtype):
    """Two micro-batches under way would both keep them: a quarter more than is planned."""
    deep = replace(WIDE, num_layers=8)
    measured = ranks2.run(peak_of_a_step, deep, ParallelConfig(pp=2), 2, 4, dtype)
    settings = Settings(
        global_batch=8,
        micro_batch=2,
        dtype=dtype,
        sequence_parallel=False,
        weight_bytes=4,
        gradient_bytes=4,
        optimizer_bytes=8,
        autocast=dtype == "bfloat16",
        reserved_bytes=0,
    )
    planned = layout_memory(Transformer.of(deep), GridShape(pp=2), settings)
    assert max(measured) == pytest.approx(sum(planned.values()), rel=0.05)
