"""Lesson 19: short trainings on a pool of ranks, with faults on demand, and what they have written.

Held by: tests/unit/test_l19_labs.py
"""

import contextlib
import inspect
import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from labcode.comm.grid import Grid
from labcode.data.text import TextDataset
from labcode.debug import on_layers
from labcode.run import run
from labcode.runtime import combinations
from labcode.runtime.bootstrap import Place, World
from labcode.runtime.command import parse
from labcode.train.build import Training, build
from labcode.train.tasks import make_task

# the GPT of the recipe with half the context and half the batch, so that 50 steps take five seconds
SMALL = (
    "gpt_tiny --model.context_length 64 --train.global_batch 8 --train.eval_batches 4 "
    "--train.eval_every 0 --train.overwrite"
)
GRID = "--parallel.dp 2 --parallel.tp 2"
LAYERS = (
    "blocks.0.attention.qkv",
    "blocks.0.attention.proj",
    "blocks.0.mlp.up",
    "blocks.0.mlp.down",
    "blocks.1.attention.qkv",
    "blocks.1.attention.proj",
    "blocks.1.mlp.up",
    "blocks.1.mlp.down",
)
TENSORS = ("activation", "weight", "gradient")

FEATURE_HEAD = '''\
"""A feature of one's own; nvdlfw_inspect runs this file."""

import torch
from nvdlfw_inspect.logging import MetricLogger
from nvdlfw_inspect.registry import Registry, api_method

from labcode.debug.feature import Feature


@Registry.register_feature(namespace="transformer_engine")
class '''


class Fault(NamedTuple):
    """A product of a layer that is wrong on one rank.

    Args:
        rank: Global rank.
        layer: Name of the layer.
        product: "forward", "grad_input" or "grad_weight".
        factor: Factor by which its result is multiplied.
    """

    rank: int
    layer: str
    product: str
    factor: float


class Trained(NamedTuple):
    """What a short training has left.

    Args:
        losses: Losses of all steps; none if it broke off.
        val_loss: Validation loss after the last step; nan if it broke off.
        said: All that this rank printed.
        num_bad_gradients: Weights of this rank whose gradient has a value that is not finite.
    """

    losses: list[float]
    val_loss: float
    said: str
    num_bad_gradients: int


def train(options: str, out: str, fault: Fault | None = None) -> Trained:
    """What `python -m labcode.train` does with these options, on a rank of a pool.

    Args:
        options: Options as on the command line.
        out: Folder of the run.
        fault: Planted before the first step; None: none.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    config = parse([*SMALL.split(), "--train.log_every", "1", *options.split(), "--train.out", out])
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    world = World(Place(rank, size, rank, size), torch.device("cpu"), "gloo")
    said = io.StringIO()
    history: list[dict[str, float]] = []
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        resolved = combinations.resolve(config, size)
        training = build(resolved, world, Grid.create(resolved.shape), make_task(config))
        if fault is not None and fault.rank == rank:
            plant(training, fault)
        try:
            history = run.train(training, folder)
        except ArithmeticError as error:  # a loss that is not finite
            print(error)
    num_bad = 0
    for weight in training.model.weights.values():
        if weight.grad is not None and not weight.grad.isfinite().all():
            num_bad += 1
    losses = [row["loss"] for row in history if "loss" in row]
    val_loss = history[-1]["val_loss"] if history else float("nan")
    return Trained(losses, val_loss, said.getvalue(), num_bad)


def lines_written(yaml: str, out: str) -> dict[str, int]:
    """How many lines this rank's file of statistics has at two moments of a step.

    Args:
        yaml: The file of features.
        out: Folder for the logs.
    """
    config = parse([*SMALL.split(), *GRID.split(), "--train.out", out])
    size = dist.get_world_size()
    rank = dist.get_rank()
    world = World(Place(rank, size, rank, size), torch.device("cpu"), "gloo")
    with contextlib.redirect_stdout(io.StringIO()):
        resolved = combinations.resolve(config, size)
        training = build(resolved, world, Grid.create(resolved.shape), make_task(config))
        chosen = on_layers.chosen_layers(training.model, Path(yaml))
        debugger = on_layers.Debugger(training.model, chosen, Path(out))
    training.model.forward_backward(training.loader.take(0))
    found = {"after backward": len(on_layers.read_statistics(Path(out), rank))}
    debugger.step()
    found["after step()"] = len(on_layers.read_statistics(Path(out), rank))
    debugger.close()
    training.close()
    return found


def plant(training: Training, fault: Fault) -> None:
    """Make a product of a layer of this rank wrong.

    Args:
        training: Training before its first step.
        fault: Fault of this rank.
    """
    module: Any = training.model.module.get_submodule(fault.layer)
    right = getattr(module.product, fault.product)

    def wrong(*args: Any) -> Tensor:
        return right(*args) * fault.factor

    module.product = replace(module.product, **{fault.product: wrong})


def frequencies_loss() -> float:
    """The loss in nats of a model that knows how often each character of the text occurs."""
    task = make_task(parse(SMALL.split()))
    assert isinstance(task.train, TextDataset)
    return task.train.unigram_entropy()


# ---- what is in the files


def table(found: Mapping[tuple[str, int], float], statistic: str, step: int) -> list[list[float]]:
    """One statistic of all layers: a row for each of LAYERS, a column for each of TENSORS.

    Args:
        found: By `debug.on_layers.read_statistics`.
        statistic: Name of the statistic, such as "underflows%".
        step: Step as in the file: the first step is 0.
    """
    rows = []
    for layer in LAYERS:
        rows.append([found[f"{layer}_{tensor}_{statistic}", step] for tensor in TENSORS])
    return rows


def tensorboard(folder: str) -> dict[tuple[str, int], float]:
    """{(name, step): value} of all scalars that TensorBoard shows of a folder.

    Args:
        folder: Folder of one writer.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder)
    events.Reload()
    found = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found[name, event.step] = event.value
    return found


def write_feature(feature: type, folder: str) -> Path:
    """Write a class of a notebook into a file, with the imports that a feature needs.

    Args:
        feature: Whose methods use nothing else of the notebook.
        folder: Folder, made if it does not exist.
    """
    lines = [f"{FEATURE_HEAD}{feature.__name__}(Feature):"]
    for value in vars(feature).values():
        if isinstance(value, FunctionType):
            source = textwrap.dedent(inspect.getsource(value))
            lines.append(textwrap.indent(source, "    "))
    path = Path(folder) / f"{feature.__name__.lower()}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    return path


# ---- two runs


class Recorded(NamedTuple):
    """One tensor of two runs.

    Args:
        name: Such as "output of blocks.0.mlp.up".
        whole: Record of the first run, as one process has it.
        parts: {rank of the second run: (where, what the rank holds)}: `whole[where]` is what the
            same part was in the first run.
    """

    name: str
    whole: Tensor
    parts: dict[int, tuple[tuple[slice, ...], Tensor]]


def made_up_rows(num_ranks: int = 4, faults: Sequence[tuple[int, int, float]] = ()) -> list:
    """Six tensors of two runs that differ by rounding alone, but for the faults.

    Args:
        num_ranks: Each holds an equal part of the columns.
        faults: (number of the tensor, rank, factor by which its part is wrong).
    """
    generator = torch.Generator().manual_seed(6)
    rows = []
    for number in range(6):
        whole = torch.randn(8, 4 * num_ranks, generator=generator)
        whole[:, :4] *= 1e-4  # the part of rank 0 is small
        if number == 1:
            whole = torch.zeros_like(whole)
        parts = {}
        for rank in range(num_ranks):
            where = (slice(0, 8), slice(4 * rank, 4 * rank + 4))
            part = whole[where].clone()
            # rounding: a share of the size of the whole, as of sums with large parts
            part += 1e-7 * whole.abs().max() * torch.randn(part.shape, generator=generator)
            for fault, wrong_rank, factor in faults:
                if fault == number and wrong_rank == rank:
                    part = part * factor
            parts[rank] = (where, part)
        kind = "output" if number < 3 else "gradient of the output"
        rows.append(Recorded(f"{kind} of layer {number}", whole, parts))
    return rows


# ---- finished versions

MEND = """
mend:
  enabled: True
  layers:
    layer_name_regex_pattern: blocks
  transformer_engine:
    PerTensorScaling:
      enabled: True
      tensors: [activation, weight]
      gemms: [fprop, dgrad, wgrad]
"""


def mend_file() -> str:
    """The path of a YAML file with exercise 19.4 finished."""
    path = Path("runs") / "labcode-mend.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(MEND)
    return str(path)
