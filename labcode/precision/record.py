"""Writes the tensors of a training step, each with its place in the whole, for `precision.bisect`.

A rank writes what it holds and where that lies in the tensor of one process: which samples, which
tokens, which features. Two runs on different grids can then be compared value by value, and nothing
is communicated while the training runs.

    FOLDER/step-000001/rank-0000.pt

Of each step: the weights before it; of each micro-batch the outputs of all layers, the inputs of
linear layers that hold a part of the features, and the gradients of both; the gradients of the
weights as the optimizer gets them. Names are those of the whole model's state dict. Of a tensor
with more than `most_values` values only every k-th feature is kept, the same ones on any grid.

Shapes: B samples of the global batch, S tokens, F features.
Held by: tests/ranks/test_bisect.py
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labcode.parallel.attention_block import own_chunks
from labcode.parallel.dropout import IsolatedRng
from labcode.parallel.model import Batch, ParallelModel
from labcode.parallel.sharding import ParamSharding
from labcode.parallel.tensor import ColumnParallelLinear, RowParallelLinear

FOLDER = "record"  # of a run
MOST_VALUES = 2**20  # of a whole tensor, beyond which features are left out
# the parts of a step in their order
BEFORE = 0
FORWARD = 1
BACKWARD = 2
AFTER = 3

Places = list[torch.Tensor]  # for each dim the indices in the whole tensor


@dataclass(frozen=True)
class StepSizes:
    """What the indices of a step are counted in.

    Args:
        first_sample: Of the global batch, of each micro-batch of this rank.
        num_samples: The global batch, B.
        tokens: The whole sequence, S.
        own_tokens: This rank's part of it over cp.
        sequence_tokens: Its part over cp and, under sequence parallelism, over tp.
    """

    first_sample: list[int]
    num_samples: int
    tokens: int
    own_tokens: torch.Tensor
    sequence_tokens: torch.Tensor


class Recorder:
    """Writes chosen steps of a model.

        recorder = Recorder(model, Path("run_a/record"), "float32")
        with recorder.step(1, batches):
            model.forward_backward(batches)

    Communicates: nothing.

    Args:
        model: This rank's part; without activation checkpointing, which computes outputs twice.
        folder: Of this run, seen by all ranks; made if it does not exist.
        precision: A name of `train.dtype` but "auto": in what the products are computed.
        most_values: Of a whole tensor, beyond which features are left out.
    """

    def __init__(
        self, model: ParallelModel, folder: Path, precision: str, most_values: int = MOST_VALUES
    ) -> None:
        self._model = model
        self._grid = model.grid
        self._folder = folder
        self._precision = precision
        self._most_values = most_values
        self._sequence = any("tp" in each.partial_over for each in model.shardings.values())
        self._entries: list[dict[str, Any]] = []
        self._loss_scale = 1.0
        self._calls: dict[str, int] = {}
        self._seen = 0

    @contextmanager
    def step(
        self, number: int, batches: Sequence[Batch], loss_scale: float = 1.0
    ) -> Iterator[None]:
        """Record what runs within the block: one step's forward and backward.

        Args:
            number: Of the optimizer step, from 1.
            batches: The micro-batches of this rank.
            loss_scale: By which the loss is multiplied; gradients are written without it.
        """
        self._loss_scale = loss_scale
        self._entries = []
        self._calls = {}
        self._seen = 0
        sizes = self._sizes(batches)
        for name, param in self._model.weights.items():
            self._keep_weight(BEFORE, name, "weight", param.detach())
        hooks = []
        for name, module in self._model.module.named_modules():
            if name and not isinstance(module, (nn.Dropout, nn.Identity, IsolatedRng)):
                hooks.append(module.register_forward_hook(partial(self._leaving, name, sizes)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for name, param in reversed(self._model.weights.items()):
            if param.grad is not None:
                self._keep_weight(AFTER, name, "gradient", param.grad / loss_scale)
        self._write(number)

    # ---- activations

    def _leaving(
        self, name: str, sizes: StepSizes, module: nn.Module, args: tuple, output: Any
    ) -> None:
        number = self._calls.get(name, 0)  # every schedule runs the forwards of a stage in order
        self._calls[name] = number + 1
        if number >= len(sizes.first_sample):
            return
        if isinstance(module, RowParallelLinear):
            self._keep(name, "input", number, sizes, module, args[0])
        if isinstance(output, torch.Tensor) and output.is_floating_point() and output.dim() == 3:
            self._keep(name, "output", number, sizes, module, output)

    def _keep(
        self,
        name: str,
        kind: str,
        number: int,
        sizes: StepSizes,
        module: Any,
        tensor: torch.Tensor,
    ) -> None:
        """Keep an activation now, and its gradient when it is there."""
        first = sizes.first_sample[number]
        samples = torch.arange(first, first + tensor.shape[0])
        is_cut = isinstance(module, ColumnParallelLinear) or kind == "input"
        tokens = sizes.own_tokens if is_cut else sizes.sequence_tokens
        if len(tokens) != tensor.shape[1]:
            return  # not a part of the sequence: heads inside attention, or the whole picture
        num_features, features = tensor.shape[2], torch.arange(tensor.shape[2])
        if is_cut:
            # the full weights know a tied head by its own name, too
            dim = 0 if isinstance(module, ColumnParallelLinear) else 1
            num_features = self._model.full_weights[f"{name}.weight"].shape[dim]
            shard = replace(module.shards["weight"], dim=0)
            whole = torch.arange(num_features)
            features = shard.take(whole, self._grid.coord("tp"), self._grid.size("tp"))
        shape = (sizes.num_samples, sizes.tokens, num_features)
        places = [samples, tokens, features]
        self._add(FORWARD, name, kind, shape, places, tensor.detach())
        if tensor.requires_grad:

            def keep_gradient(grad: torch.Tensor) -> None:
                # its loss is the mean over the samples of this rank, not of all of dp
                grad = grad / (self._loss_scale * self._grid.size("dp"))
                self._add(BACKWARD, name, f"gradient of the {kind}", shape, places, grad)

            tensor.register_hook(keep_gradient)

    def _sizes(self, batches: Sequence[Batch]) -> StepSizes:
        first_sample = []
        count = 0
        for inputs, _ in batches:
            first_sample.append(count)
            count += len(inputs)
        start = self._grid.coord("dp") * count
        inputs = batches[0][0]
        are_tokens = not inputs.is_floating_point()
        tokens = inputs.shape[1] if are_tokens else self._model.config.sequence_length
        # under a causal mask cp cuts the sequence zig-zag
        layout = "zigzag" if are_tokens else "contiguous"
        own = []
        for run in own_chunks(tokens, self._grid.size("cp"), self._grid.coord("cp"), layout):
            own += run
        own_tokens = torch.tensor(own)
        parts = self._grid.size("tp") if self._sequence else 1
        part = self._grid.coord("tp") if self._sequence else 0
        return StepSizes(
            [start + first for first in first_sample],
            count * self._grid.size("dp"),
            tokens,
            own_tokens,
            own_tokens.tensor_split(parts)[part],
        )

    # ---- weights

    def _keep_weight(self, part: int, name: str, kind: str, tensor: torch.Tensor) -> None:
        sharding = self._model.shardings[name]
        places = self._weight_places(sharding)
        if [len(indices) for indices in places] == list(tensor.shape):
            self._add(part, name, kind, sharding.shape, places, tensor)

    def _weight_places(self, sharding: ParamSharding) -> Places:
        """Where this rank's part of a weight lies in the whole."""
        places = [torch.arange(size) for size in sharding.shape]
        for axis, shard in sharding.shards.items():
            along = replace(shard, dim=0)
            indices = places[shard.dim]
            index, parts = self._grid.coord(axis), self._grid.size(axis)
            places[shard.dim] = along.take(indices, index, parts)
        return places

    # ---- the file

    def _add(
        self,
        part: int,
        name: str,
        kind: str,
        shape: Sequence[int],
        places: Places,
        values: torch.Tensor,
    ) -> None:
        every = math.ceil(math.prod(shape) / self._most_values)
        features = places[-1]
        kept = (features % every == 0).nonzero().flatten()
        stage = self._model.plan.stages.stage_of(name)
        self._seen += 1
        self._entries.append(
            {
                "name": name,
                "kind": kind,
                "order": [part, -stage if part == BACKWARD else stage, self._seen],
                "shape": [*shape[:-1], math.ceil(shape[-1] / every)],
                "places": [*places[:-1], features[kept] // every],
                "values": values.detach().cpu().index_select(-1, kept),
            }
        )

    def _write(self, number: int) -> None:
        folder = self._folder / f"step-{number:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        coords = self._grid.shape.coords(self._grid.rank)
        about = {"precision": self._precision, "rank": self._grid.rank, "coords": coords}
        path = folder / f"rank-{self._grid.rank:04d}.pt"
        torch.save({"about": about, "entries": self._entries}, path)
        self._entries = []
