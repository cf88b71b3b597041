"""A sharded model seen from outside: called like the whole, with gradients and weights right over the whole grid."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.grid import Grid
from labcode.parallel.pipeline import Pipeline
from labcode.parallel.sharding import Placement, gradient_norm, sum_shared_gradients, whole_weights
from labcode.schedules import schedule


@dataclass(frozen=True)
class Stages:
    """How a model is cut into the stages of a pipeline.

    Args:
        layers: The range of layers of each stage; stage s lives at pp coordinate s % pp.
        schedule: Its name in `labcode.schedules`.
        boundary: `boundary(inputs)`, an empty tensor like what a stage hands on.
    """

    layers: tuple[range, ...]
    schedule: str
    boundary: Callable[[torch.Tensor], torch.Tensor]


class ParallelModel(nn.Module):
    """This rank's share of a model, used like the whole: made by `parallelize`.

    After the last backward of a step call `finish_gradient_sync()`; then every rank holds the gradient of its weights as
    one process would have computed it. `forward_backward` does both.

    Attributes:
        table: What was done to which modules, rows with `.modules` and `.how`.
        placements: Where each weight of this rank lives, by its name in the whole model.
        homes: {name: (pp coordinate, shape of the whole)} of all weights of the whole model.
        loss: `loss(output, targets, ...)` of this rank's outputs: the loss of its dp rank's samples, alike on tp and cp.
        recording: With a pipeline, whether to write down when each action ran, into `recorded`.
    """

    def __init__(
        self,
        replica: nn.Module,
        grid: Grid,
        table: tuple,
        placements: dict[str, Placement],
        homes,
        loss: Callable,
        stages: Stages,
    ):
        super().__init__()
        self.replica, self.grid, self.table, self.placements, self.homes = (
            replica,
            grid,
            table,
            placements,
            homes,
        )
        self.loss, self.stages = loss, stages
        self.recording, self.recorded = False, []

    @property
    def module(self) -> nn.Module:
        """The sharded GPT or ViT itself, without what averages its gradients."""
        return self.replica.module

    def forward(self, *args):
        """Takes the whole samples of this dp rank, on every rank of tp and cp alike; not for a pipeline.

        Returns:
            GPT: logits of its own tokens and columns, [B, S/cp, V/tp]. ViT: the whole next state, [B, C, Y, X].
        """
        return self.replica(*args)

    def forward_backward(
        self, batches: Sequence[tuple], loss: Callable, context: Callable = contextlib.nullcontext
    ):
        """One step's gradients: all micro-batches forward and backward, through the pipeline if there is one.

        Args:
            batches: (inputs, targets) of each micro-batch, the same number on every rank.
            loss: `loss(output, targets) -> scalar`, the mean over a micro-batch.
            context: Makes the context of each forward, such as that of autocast.

        Returns:
            The mean loss, a float64 scalar, the same on every rank of pp, cp and tp.
        """
        if self.grid.size("pp") > 1:
            with self.replica.no_sync():
                total = self._pipeline(len(batches), loss, context).step(*zip(*batches))
            dist.all_reduce(total, group=self.grid.group("pp"))
        else:
            total = torch.zeros((), dtype=torch.float64, device=batches[0][0].device)
            for number, (inputs, targets) in enumerate(batches, 1):
                with contextlib.nullcontext() if number == len(batches) else self.no_sync():
                    with context():
                        value = loss(self(inputs), targets) / len(batches)
                    value.backward()
                total += value.detach()
        self.finish_gradient_sync()
        return total

    @torch.no_grad()
    def losses(
        self, batches: Sequence[tuple], loss: Callable, context: Callable = contextlib.nullcontext
    ) -> torch.Tensor:
        """The loss of each micro-batch, [micro-batches] float64, without gradients, the same on every rank of the model."""
        if self.grid.size("pp") > 1:
            any_number = self.grid.size(
                "pp"
            )  # of micro-batches: every schedule takes it, and evaluating has its own order
            values = self._pipeline(any_number, loss, context).evaluate(*zip(*batches))
            dist.all_reduce(values, group=self.grid.group("pp"))
            return values
        with context():
            return torch.stack(
                [loss(self(inputs), targets).double() for inputs, targets in batches]
            )

    def no_sync(self):
        """Within it backward only accumulates: for all micro-batches of a step but the last."""
        return self.replica.no_sync()

    def finish_gradient_sync(self) -> None:
        """Finish averaging over dp, and add up what ranks of cp and tp, and tied stages, saw of the weights they share."""
        self.replica.finish_gradient_sync()
        sum_shared_gradients(self._params(), self.placements, self.grid)

    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of the whole model's gradient, a float64 scalar; every rank calls it."""
        return gradient_norm(self._params(), self.placements, self.grid)

    def whole_weights(self):
        """(name, tensor) of the whole model's state dict, one at a time; all ranks run through it together."""
        return whole_weights(self.module, self.placements, self.homes, self.grid)

    def describe(self) -> str:
        """The table, and beside it the weights of this rank: shapes, and the axes over which gradients are summed."""
        lines = [f"{row.modules:26}{row.how}" for row in self.table] + [""]
        for name, param in self._params().items():
            place = self.placements[name]
            shapes = f"{list(place.shape)} -> {list(param.shape)}"
            axes = [*place.summed, *(["first and last of pp"] if place.tied else [])]
            lines.append(f"{name:32}{shapes:28}gradient summed over: {', '.join(axes) or '-'}")
        return "\n".join(lines)

    def _pipeline(self, num_microbatches, loss, context):
        stages, pp = self.stages, self.grid.size("pp")
        return Pipeline(
            {
                s: self._stage(stages.layers[s], context)
                for s in range(self.grid.coord("pp"), len(stages.layers), pp)
            },
            schedule(stages.schedule, len(stages.layers), num_microbatches, pp),
            len(stages.layers),
            num_microbatches,
            self.grid.group("pp"),
            loss,
            stages.boundary,
            self.recorded if self.recording else None,
        )

    def _stage(self, layers, context):
        def run(x, inputs):
            with context():
                return self.replica(inputs, x=x, layers=layers)

        return run

    def _params(self):
        return dict(self.module.named_parameters())
