"""Looks at every tensor of a training step: for the first that departs, or is not finite.

    weights -> forward of each layer -> loss -> backward of each layer -> gradients of the weights

Where it has a folder, a rank writes what it holds and where that lies in the tensor of one process:
which samples, which tokens, which features. Two runs on different grids can then be compared value
by value (`debug.bisect`), and nothing is communicated while the training runs.

    FOLDER/step-000001/rank-0000.pt

Of each step: the weights before it; of each micro-batch the outputs of all layers, the inputs of
linear layers that hold a part of the features, and the gradients of both; the gradients of the
weights as the optimizer gets them. Names are those of the whole model's state dict. Of a tensor
with more than `MOST_VALUES` values only every k-th feature is kept, the same ones on any grid.

Whether a tensor is finite is asked of these and of some more: what goes into each layer, the loss,
and each of the three products of a linear layer before ranks of tp add their parts: after that sum
they all have the NaN, and none of them is the first.

Shapes: B samples of the global batch, S tokens, F features.
Held by: tests/ranks/test_bisect.py, tests/ranks/test_not_finite.py
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labcode.debug.not_finite import (
    AFTER,
    BACKWARD,
    BEFORE,
    FORWARD,
    Amount,
    Finding,
    amount,
    floating,
    is_finite,
    is_readable,
)
from labcode.parallel.attention_block import own_chunks
from labcode.parallel.dropout import IsolatedRng
from labcode.parallel.linear import MatrixProduct
from labcode.parallel.model import Batch, ParallelModel
from labcode.parallel.sharding import ParamSharding
from labcode.parallel.tensor import ColumnParallelLinear, RowParallelLinear

FOLDER = "record"  # of a run
MOST_VALUES = 2**20  # features of a larger tensor are left out

Places = list[torch.Tensor]  # for each dim the indices in the whole tensor


@dataclass(frozen=True)
class StepSizes:
    """The sizes and indices that place this rank's tensors of a step in the whole ones.

    Args:
        first_sample: The place in the global batch of the first sample of each micro-batch.
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
    """Looks at chosen steps of a model.

        recorder = Recorder(model, Path("run_a/record"), "float32")
        with recorder.step(1, batches):
            model.forward_backward(batches)
        finding = recorder.first_not_finite()  # all ranks call it
        if finding:
            print(finding.line)

    Costs a reading of each tensor, and a GPU waits each time. A step computes what it would compute
    without it, up to the rounding of the linear layers' own backward. What torch.compile has
    compiled shows nothing of what is inside.

    Communicates: within the step nothing; `first_not_finite` an all-gather of a short object.

    Args:
        model: This rank's part.
        folder: A folder that all ranks see, made if it does not exist; None: nothing is written.
        precision: The dtype of the products, a name of `train.dtype` but "auto".
    """

    def __init__(
        self,
        model: ParallelModel,
        folder: Path | None = None,
        precision: str = "float32",
    ) -> None:
        self._model = model
        self._grid = model.grid
        self._folder = folder
        self._precision = precision
        self._sequence = model.cuts_sequence_over_tp
        self._entries: list[dict[str, Any]] = []
        self._found: list[Finding] = []
        self._loss_scale = 1.0
        self._calls: Counter[tuple[str, str]] = Counter()
        self._seen = 0

    @contextmanager
    def step(
        self, number: int, batches: Sequence[Batch], loss_scale: float = 1.0
    ) -> Iterator[None]:
        """Look at what runs within the block: one step's forward and backward.

        Args:
            number: The number of the optimizer step, from 1.
            batches: The micro-batches of this rank.
            loss_scale: The factor of the loss; gradients are written without it.
        """
        self._loss_scale = loss_scale
        self._entries = []
        self._found = []
        self._calls.clear()
        self._seen = 0
        sizes = self._sizes(batches)
        for name, param in self._model.weights.items():
            self._weight(BEFORE, name, "weight", "{}, its value before the step,", param.detach())
        with ExitStack() as stack:
            for name, module in self._model.module.named_modules():
                if name and not isinstance(module, (nn.Dropout, nn.Identity, IsolatedRng)):
                    self._watch(name, sizes, module, stack)
            self._watch_loss(stack)
            yield
        summed = "gradient of the {}, summed over ranks and micro-batches,"
        for name, param in reversed(self._model.weights.items()):
            if param.grad is not None:
                self._weight(AFTER, name, "gradient", summed, param.grad / loss_scale)
        if self._folder is not None:
            self._write(self._folder / f"step-{number:06d}")

    def first_not_finite(self) -> Finding | None:
        """The first over all ranks that was not finite in the last step; None: all was.

        Communicates: an all-gather of a short object over all ranks.
        """
        own = min(self._found, key=attrgetter("order"), default=None)
        found: list[Finding | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        known = [finding for finding in found if finding is not None]
        return min(known, key=attrgetter("order"), default=None)

    # ---- looking

    def _look(
        self,
        part: int,
        module: str,
        tensor_name: str,
        tensor: torch.Tensor,
        went_in: Mapping[str, torch.Tensor | None] | None = None,
        microbatch: int | None = None,
    ) -> None:
        """Note a tensor if it is not finite."""
        self._seen += 1
        if is_finite(tensor):
            return
        # Sorting by it gives the first over all ranks: before, forward, backward, after; then by
        # pipeline stage in the order in which data passes; then by the order on one rank. No clock.
        order = (part, self._stage(part, module), self._seen, self._grid.rank)
        amounts: list[Amount] = []
        for name, other in (went_in or {}).items():
            if other is not None and is_readable(other):
                amounts.append(amount(name, other))
        found = amount(tensor_name, tensor)
        self._found.append(Finding(order, module, tensor_name, microbatch, found, tuple(amounts)))

    def _stage(self, part: int, name: str) -> int:
        """The stage of the pipeline, in the order in which stages do this part of a step."""
        stage = self._model.plan.stages.stage_of(name)
        return -stage if part == BACKWARD else stage

    def _number(self, name: str, what: str) -> int:
        """The number of the micro-batch, by counting calls.

        Each stage takes the micro-batches in their order, forward and backward, in all schedules.
        """
        self._calls[name, what] += 1
        return self._calls[name, what] - 1

    def _watch(self, name: str, sizes: StepSizes, module: Any, stack: ExitStack) -> None:
        before = module.register_forward_pre_hook(partial(self._entering, name))
        after = module.register_forward_hook(partial(self._leaving, name, sizes))
        stack.callback(before.remove)
        stack.callback(after.remove)
        product = getattr(module, "product", None)
        if isinstance(product, MatrixProduct):
            module.product = self._watched(name, product)
            stack.callback(setattr, module, "product", product)

    def _watched(self, name: str, product: MatrixProduct) -> MatrixProduct:
        """The three products of a layer, each with a look at what comes out."""

        def forward(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            y = product.forward(x, weight, bias)
            # Activation checkpointing repeats forwards inside backward. They were noted already,
            # and would shift the count of micro-batches.
            if not _in_backward():
                parts = {"input": x, "weight": weight}
                self._look(FORWARD, name, "own product", y, parts, self._number(name, "forward"))
            return y

        def grad_input(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            found = product.grad_input(grad, weight)
            parts = {"gradient of the output": grad, "weight": weight}
            number = self._number(name, "grad_input")
            self._look(BACKWARD, name, "own gradient of the input", found, parts, number)
            return found

        def grad_weight(grad_rows: torch.Tensor, x_rows: torch.Tensor) -> torch.Tensor:
            found = product.grad_weight(grad_rows, x_rows)
            parts = {"gradient of the output": grad_rows, "input": x_rows}
            number = self._number(name, "grad_weight")
            self._look(BACKWARD, name, "gradient of the weight", found, parts, number)
            return found

        return replace(product, forward=forward, grad_input=grad_input, grad_weight=grad_weight)

    def _watch_loss(self, stack: ExitStack) -> None:
        loss = self._model.loss

        def watched(output: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
            value = loss(output, targets, **options)
            number = self._number("", "loss")
            self._look(FORWARD, "", "loss", value, {"output": output}, number)
            return value

        # a pipeline that has run before keeps the loss that it was made with
        self._model.loss = watched  # type: ignore[assignment]
        stack.callback(setattr, self._model, "loss", loss)

    # ---- activations

    def _entering(self, name: str, module: nn.Module, args: tuple) -> None:
        if _in_backward():
            return
        number = self._number(name, "input")
        for tensor in floating(args):
            self._look(FORWARD, name, "input", tensor, None, number)

    def _leaving(
        self, name: str, sizes: StepSizes, module: nn.Module, args: tuple, output: Any
    ) -> None:
        if _in_backward():
            return
        number = self._number(name, "output")
        went_in: dict[str, torch.Tensor | None] = {"input": next(floating(args), None)}
        went_in |= dict(module.named_parameters(recurse=False))
        for tensor in floating(output):
            self._look(FORWARD, name, "output", tensor, went_in, number)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._look_at_gradient, name))
        if self._folder is None or number >= len(sizes.first_sample):
            return
        if isinstance(module, RowParallelLinear):
            self._keep(name, "input", number, sizes, module, args[0])
        if isinstance(output, torch.Tensor) and output.is_floating_point() and output.dim() == 3:
            self._keep(name, "output", number, sizes, module, output)

    def _look_at_gradient(self, name: str, grad: torch.Tensor) -> None:
        number = self._number(name, "gradient")
        self._look(BACKWARD, name, "gradient of the output", grad, None, number)

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
        num_features = tensor.shape[2]
        features = torch.arange(num_features)
        if is_cut:
            # The indices are cut like the weight, so that both never disagree (`boxes` does the
            # same). The full weights know a tied head by its own name, too.
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

    def _weight(self, part: int, name: str, kind: str, words: str, tensor: torch.Tensor) -> None:
        """Look at a weight or its gradient, and keep it where this rank's part is known."""
        module, _, own_name = name.rpartition(".")
        self._look(part, module, words.format(own_name), tensor)
        sharding = self._model.shardings[name]
        places = self._weight_places(sharding)
        is_whole_part = [len(indices) for indices in places] == list(tensor.shape)
        if self._folder is not None and is_whole_part:
            self._add(part, name, kind, sharding.shape, places, tensor)

    def _weight_places(self, sharding: ParamSharding) -> Places:
        """Where this rank's part of a weight lies in the whole."""
        places = [torch.arange(size) for size in sharding.shape]
        for axis, shard in sharding.shards.items():
            along = replace(shard, dim=0)
            indices = places[shard.dim]
            index = self._grid.coord(axis)
            parts = self._grid.size(axis)
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
        every = math.ceil(math.prod(shape) / MOST_VALUES)
        features = places[-1]
        kept = (features % every == 0).nonzero().flatten()
        self._seen += 1
        self._entries.append(
            {
                "name": name,
                "kind": kind,
                "order": [part, self._stage(part, name), self._seen],
                "shape": [*shape[:-1], math.ceil(shape[-1] / every)],
                "places": [*places[:-1], features[kept] // every],
                "values": values.detach().cpu().index_select(-1, kept),
            }
        )

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        coords = self._grid.shape.coords(self._grid.rank)
        about = {"precision": self._precision, "rank": self._grid.rank, "coords": coords}
        path = folder / f"rank-{self._grid.rank:04d}.pt"
        torch.save({"about": about, "entries": self._entries}, path)
        self._entries = []


def _in_backward() -> bool:
    """Whether a forward is that of activation checkpointing, which computes a layer once more."""
    return torch._C._current_graph_task_id() != -1
