"""What lesson 09 measures with: the error of a share, its collectives, a few steps of training."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from course.labs.l09_shards import (
    SeparateAttention,
    adamw_steps,
    count_collectives,
    difference,
    is_exact,
    spelled,
)
from labcode.comm.grid import Grid
from labcode.config import GPTConfig
from labcode.models import gpt, layers
from labcode.models.parallelize import parallelize
from labcode.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from labcode.topology import GridShape


def make():
    return layers.MLP(64, 128)


def shard(mlp):
    mlp.up = ColumnParallelLinear(mlp.up, dist.group.WORLD)
    mlp.down = RowParallelLinear(mlp.down, dist.group.WORLD)
    return mlp


def without_f(mlp):
    mlp = shard(mlp)
    mlp.up.multiply = lambda x, weight, bias, *rest: nn.functional.linear(x, weight, bias)
    return mlp


def with_half_the_gradient(mlp):
    mlp = shard(mlp)
    mlp.down.weight.register_hook(lambda grad: grad / 2)
    return mlp


def test_the_error_of_a_share(ranks2):
    for errors in ranks2.run(difference, make, shard):
        assert is_exact(errors)
    for errors in ranks2.run(difference, make, without_f):
        assert [float(error) < 1e-12 for error in errors] == [True, False, True]
    for errors in ranks2.run(difference, make, with_half_the_gradient):
        assert [float(error) < 1e-12 for error in errors] == [True, True, False]
    assert ranks2.run(difference, make, lambda module: module) == [("0e+00",) * 3] * 2


def test_collectives_of_a_share(ranks2):
    size = 3 * 64 * 4
    expected = ({"all_reduce": (1, size)}, {"all_reduce": (1, size)})
    assert ranks2.run(lambda: count_collectives(shard(make()), torch.ones(3, 64))) == [expected] * 2


@pytest.mark.parametrize(
    ("name", "spellings"),
    {
        "Shard(0)": (Shard(0), "shard 0", "S(0)", "Shard(dim=0)", "Shard(-2)", [Shard(0)]),
        "Shard(1)": (Shard(1), "Shard1", "S(1)", "Shard(dim=1)", " Shard(-1)", (Shard(-1),)),
        "Replicate()": (Replicate(), Replicate, "replicate", "R"),
        "Partial()": (Partial(), Partial, "partial", "Partial(sum)", "P(sum)"),
    }.items(),
)
def test_a_layout_may_be_spelled_in_many_ways(name, spellings):
    for spelling in (name, *spellings):
        assert spelled(spelling) == name


@pytest.mark.parametrize("other", ["Shard(2)", "Shard", Partial("max"), "sharp", 1, None, ..., ""])
def test_what_is_no_layout_of_a_matrix_is_left_alone(other):
    assert spelled(other) is other


def test_separate_attention_is_the_fused_one():
    fused, separate = layers.Attention(64, 4, causal=True), SeparateAttention()
    for name, weight, bias in zip("qkv", fused.qkv.weight.chunk(3), fused.qkv.bias.chunk(3)):
        getattr(separate, name).load_state_dict({"weight": weight, "bias": bias})
    separate.proj.load_state_dict(fused.proj.state_dict())
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(separate(x), fused(x))


def test_training_on_a_grid_equals_one_process(ranks2):
    config = GPTConfig(vocab_size=11, num_layers=1, num_heads=2, hidden_size=16, context_length=8)
    tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))
    batches = [(tokens[:, :-1], tokens[:, 1:])] * 3
    build = lambda: layers.initialize(gpt.GPT(config), 0).double()  # noqa: E731

    def on_grid():
        model = parallelize(build(), Grid.create(GridShape(tp=2)))
        return adamw_steps(model, model.loss, batches, finish=model.finish_gradient_sync)

    truth = adamw_steps(build(), gpt.loss, batches)
    assert truth[-1] < truth[0]
    for losses in ranks2.run(on_grid):
        torch.testing.assert_close(losses, truth, rtol=0, atol=1e-9)
