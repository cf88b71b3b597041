"""The exercise of lesson 13b with units of FSDP2: which module belongs to which unit."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from course.answer import Hint
from course.exercises.expect import refuse
from course.pool.ranks import RankError, Ranks
from labcode.comm.counting import counted
from labcode.runtime.units import listed

NUM_LAYERS = 3
WIDTH = 16
MEANINGS = {  # what FSDP2 says, and what it means here
    "overlapping meshes": "a module was given to fully_shard whose parameters belong to a unit "
    "already: a unit takes what no unit inside it has, so begin inside and end with the model",
    "requires a single root module": "the model was not given to fully_shard: what is in no unit "
    "is whole on every rank, and nobody leads the units from one to the next",
}
SHARDS = 2  # of four ranks: who forgets the mesh shards over four


class Layer(nn.Module):
    """Two products, so that a layer and a product are not the same unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """An embedding, layers, a norm and a head, no two of which have the same number of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Step(NamedTuple):
    """What one forward and backward did.

    Args:
        whole: Names of parameters that are not sharded.
        shards: Over how many ranks the others are.
        forward: Bytes of each all-gather in forward.
        backward: Bytes of each all-gather in backward.
    """

    whole: list[str]
    shards: set[int]
    forward: list[int]
    backward: list[int]


def num_bytes(*modules: nn.Module) -> int:
    """Bytes of their parameters together."""
    parameters = itertools.chain.from_iterable(module.parameters() for module in modules)
    return sum(param.nbytes for param in parameters)


def _step(answer: Callable[..., Any]) -> Step:
    mesh = init_device_mesh("cpu", (2, SHARDS), mesh_dim_names=("copies", "shards"))["shards"]
    model = Model()
    answer(model, mesh)
    whole = []
    shards = set()
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            shards.add(param.device_mesh.size())
        else:
            whole.append(name)
    tokens = torch.arange(8).view(2, 4)
    with counted() as in_forward:
        loss = model(tokens).sum()
    with counted() as in_backward:
        loss.backward()
    forward = [call.num_bytes for call in in_forward if call.kind == "all_gather"]
    backward = [call.num_bytes for call in in_backward if call.kind == "all_gather"]
    return Step(whole, shards, forward, backward)


def units(answer: Callable[..., Any], ranks: Ranks) -> None:
    """The learner's `shard(model, mesh)`, by what a step then gathers."""
    try:
        step = ranks.run(_step, answer)[0]
    except RankError as error:
        for text, meaning in MEANINGS.items():
            if text in str(error):
                raise Hint(meaning) from None
        raise
    model = Model()
    layer = num_bytes(model.layers[0])
    norm = num_bytes(model.norm)
    head = num_bytes(model.head)
    last = norm + head
    rest = num_bytes(model.embedding)
    gathered = Counter(step.forward)
    again = Counter(step.backward)
    mistakes = {
        "no parameter is sharded: give the modules to fully_shard": not step.shards,
        f"{listed(step.whole)} {'is' if len(step.whole) == 1 else 'are'} whole on every rank: what "
        "is in no unit is not sharded, and the model takes what is left": step.whole,
        f"the parameters are sharded over {listed(sorted(step.shards))} ranks, and the mesh has "
        f"{SHARDS}: give fully_shard the mesh, each time": step.shards != {SHARDS},
        "the whole model is one unit: all weights are whole at once": (
            num_bytes(model) in gathered
        ),
        "the layers are one unit: all of them are whole at once": (
            gathered[NUM_LAYERS * layer] > 0
        ),
        "the two products of a layer are gathered one by one: a unit is a whole layer": (
            gathered[layer // 2] > 0
        ),
        "norm and head are two units, which makes two messages of them: fully_shard takes a list "
        "of modules as well": gathered[head] > 0,
        "norm and head are in the unit of the model: they are to be a unit of their own": (
            gathered[rest + last] + gathered[rest + norm] + gathered[rest + head] > 0
        ),
        f"each layer is gathered once, so all {NUM_LAYERS} stay whole from forward to backward: "
        "only norm and head are to stay": again[layer] == 0,
        "norm and head are gathered again as soon as backward begins, though forward has just had "
        "them: reshard_after_forward": again[last] > 0,
    }
    refuse(mistakes)
    expected = sorted([rest, last] + NUM_LAYERS * [layer])
    found = sorted(step.forward)
    text = f"forward gathers {listed(found)} bytes, expected are {listed(expected)}"
    refuse({text: found != expected})
