"""A model that the library does not know: `x.py` and `x_plan.py` are all that it takes.

They are about 100 lines. The model is an MLP-mixer for tokens: in each block one MLP mixes the
tokens, another one the features. Source: Tolstikhin et al. 2021 (arXiv:2105.01601).
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.grid import Grid
from labcode.config import ParallelConfig
from labcode.models.layers import MLP, initialize
from labcode.models.parallelize import parallelize
from labcode.parallel.plan import ModelPlan, PlanEntry, StagePlan
from labcode.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from labcode.topology import GridShape

# ---- mixer.py


@dataclass(frozen=True)
class MixerConfig:
    tokens: int = 6
    features: int = 8
    hidden: int = 12
    num_layers: int = 4
    outputs: int = 3


class MixerBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.features)
        self.over_tokens = MLP(config.tokens, config.hidden)
        self.norm2 = nn.LayerNorm(config.features)
        self.over_features = MLP(config.features, config.hidden)

    def forward(self, x):
        x = x + self.over_tokens(self.norm1(x).mT).mT
        return x + self.over_features(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Linear(config.features, config.features)
        self.blocks = nn.ModuleList(MixerBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.features)
        self.head = nn.Linear(config.features, config.outputs)

    def forward(self, inputs, x=None, layers=None):
        layers = layers or range(self.config.num_layers)
        if layers.start == 0:
            x = self.embed(inputs)
        for number in layers:
            x = self.blocks[number](x)
        if layers.stop < self.config.num_layers:
            return x
        return self.head(self.norm(x))


# ---- mixer_plan.py


def mixer_plan(config, grid, parallel):
    column = partial(ColumnParallelLinear, group=grid.group("tp"))
    row = partial(RowParallelLinear, group=grid.group("tp"))
    entries = []
    for mlp in ("over_tokens", "over_features"):
        entries.append(PlanEntry(f"blocks.*.{mlp}.up", "column-parallel", column))
        entries.append(PlanEntry(f"blocks.*.{mlp}.down", "row-parallel, then all-reduce", row))
    stages = StagePlan(
        layers=parallel.stage_layers(config.num_layers, grid.size("pp")),
        schedule=parallel.pipeline_schedule,
        first=("embed",),
        last=("norm", "head"),
        boundary=lambda inputs: tuple(inputs.shape),
    )
    return ModelPlan(
        entries=tuple(entries),
        stages=stages,
        loss=nn.functional.mse_loss,
        partial_over=lambda is_sharded: (),
    )


# ---- the test


def three_steps(rank, shape, options):
    """How far the weights are from those of one process after three steps."""
    torch.manual_seed(0)
    inputs = torch.randn(8, 6, 8, dtype=torch.float64)
    targets = torch.randn(8, 6, 3, dtype=torch.float64)

    def build():
        return initialize(Mixer(MixerConfig()), 3).double()

    whole = build()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    grid = Grid.create(shape)
    model = parallelize(build(), grid, ParallelConfig(**options), make_plan=mixer_plan)
    own_optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-2)
    mine = torch.arange(8).chunk(shape.dp)[grid.coord("dp")].split(2)
    for _ in range(3):
        optimizer.zero_grad()
        expected = nn.functional.mse_loss(whole(inputs), targets)
        expected.backward()
        optimizer.step()
        own_optimizer.zero_grad()
        loss = model.forward_backward([(inputs[part], targets[part]) for part in mine])
        dist.all_reduce(loss, group=grid.group("dp"))
        own_optimizer.step()
    off = [abs(loss / shape.dp - expected).item()]
    trained = whole.state_dict()
    for name, weight in model.full_state_dict():
        off.append((weight - trained[name]).abs().max().item())
    return max(off)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (GridShape(dp=2, tp=2), {}),
        (GridShape(pp=2, tp=2), {"pipeline_schedule": "zero_bubble"}),
        (GridShape(dp=2, pp=2), {"activation_checkpointing": "full"}),
    ],
    ids=str,
)
def test_a_new_model_is_a_file_and_its_plan(ranks4, shape, options):
    assert max(ranks4.run(three_steps, shape, options)) < 1e-9


def test_a_model_without_a_plan_is_refused_in_one_line(ranks1):
    def attempt(rank):
        with pytest.raises(
            ValueError, match="no plan is known for a Mixer, there are plans for GPT, ViT: give one"
        ):
            parallelize(Mixer(MixerConfig()), Grid.create(GridShape()))
        return True

    assert ranks1.run(attempt) == [True]
