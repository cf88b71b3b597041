"""A parallel model, used like the whole model: its gradients are right over the whole grid."""

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.grid import Grid
from labcode.parallel.experts import Routed, load_of, take_routed
from labcode.parallel.pipeline import OnAction, Pipeline, Ranges, unnamed
from labcode.parallel.plan import ModelPlan
from labcode.parallel.sharding import (
    FullWeight,
    ParamSharding,
    all_reduce_partial_gradients,
    full_state_dict,
    gradient_norm,
)
from labcode.schedules import plan_pipeline

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets of one micro-batch


class Replica(Protocol):
    """A module whose gradients are averaged over the ranks that hold copies of it.

    `parallel.data.DataParallel`, `parallel.torch_data.TorchDataParallel`, those of `parallel.zero`;
    `parallel.local.LocalReplica`, which averages nothing.

    Attributes:
        module: What is wrapped.
        shards: {name: this rank's rows of a weight} of the weights that are divided over dp; their
            `.grad` is the average. Empty without ZeRO.
        accumulates_shards: Gradients are averaged at each backward and added up in `shards`.
        trains_alone: Nothing is averaged over dp; a batch is that of one copy of the model.
    """

    module: nn.Module
    shards: dict[str, nn.Parameter]
    accumulates_shards: bool
    trains_alone: bool

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the module computes."""
        ...

    def no_sync(self) -> AbstractContextManager:
        """Within it backward only accumulates gradients."""
        ...

    def finish_gradient_sync(self) -> None:
        """Wait until the gradients are averaged."""
        ...

    def gather_parameters(self) -> None:
        """After the optimizer: let all ranks have the weights that each has updated."""
        ...


class ParallelModel(nn.Module):
    """This rank's part of a model, used like the whole; made by `models.parallelize`.

    After the last backward of a step call `finish_gradient_sync()`; then every rank holds the
    gradient of its weights as one process would have computed it. `forward_backward` does both.

    Attributes:
        replica: The sharded model, with what averages its gradients around it.
        plan: What was done to which modules (`parallel.plan.ModelPlan`).
        shardings: {name of a weight of this rank in the whole model: how it is spread}.
        full_weights: {name: stage and shape} of all weights of the whole model.
        grid: The process groups.
        weights: {name: what this rank trains and keeps of it}: the weight of the module or, where
            ZeRO divides it, this rank's rows.
        loss: `loss(output, targets) -> scalar` of this rank's output: the loss of its dp rank's
            samples, the same on every rank of tp and cp.
        on_action: With a pipeline: called as `on_action(action, started_s, stopped_s)` after each
            action of `forward_backward`; None: not called.
        ranges: Called as `ranges(part)` around each part of `forward_backward`: forward, backward
            and communication. With PyTorch's DDP and ZeRO the gradients travel, and are waited
            for, inside backward; messages of tp and cp travel inside forward and backward.
    """

    def __init__(
        self,
        replica: Replica,
        plan: ModelPlan,
        shardings: dict[str, ParamSharding],
        full_weights: dict[str, FullWeight],
        grid: Grid,
        *,
        autocast_dtype: torch.dtype | None = None,
        loss_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.replica = replica
        self.plan = plan
        self.shardings = shardings
        self.full_weights = full_weights
        self.grid = grid
        own = dict(replica.module.named_parameters())
        self.weights = {name: replica.shards.get(name, param) for name, param in own.items()}
        self.loss = partial(plan.loss, **(loss_options or {}))
        self.autocast_dtype = autocast_dtype
        self.on_action: OnAction | None = None
        self.ranges: Ranges = unnamed
        self._pipelines: dict[int, Pipeline] = {}
        # the routers of mixtures of experts, by name, and the experts
        self.routers: dict[str, Any] = {}
        self._experts: list[Any] = []
        for name, module in self.module.named_modules():
            if hasattr(module, "move_of_bias"):
                self.routers[name] = module
            if hasattr(module, "num_dropped"):
                self._experts.append(module)
        self._routed = Routed()

    @property
    def module(self) -> nn.Module:
        """The sharded model itself, without what averages its gradients."""
        return self.replica.module

    @property
    def config(self) -> Any:
        """The config of the whole model."""
        return self.module.config

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """The output for whole samples of this dp rank, the same on every rank of tp and cp.

        Not for a pipeline.

        Returns:
            GPT: logits of its own tokens and columns, [B, S/cp, V/tp]. ViT: the whole next state,
            [B, C, Y, X].
        """
        return self.replica(*args)

    def forward_backward(
        self, batches: Sequence[Batch], loss_scale: torch.Tensor | float = 1.0
    ) -> torch.Tensor:
        """One step's gradients: all micro-batches forward and backward.

        Args:
            batches: (inputs, targets) of each micro-batch, the same number on every rank.
            loss_scale: Factor of all gradients, a power of two (`train.loss_scale`).

        Returns:
            This dp rank's share of the loss, a float64 scalar, the same on every rank of pp, cp and
            tp; its mean over dp is the loss of the step.
        """
        with self.ranges("communication"):
            weights = [weight * loss_scale for weight in self._weights(batches)]
        for router in self.routers.values():
            router.loss_scale = loss_scale / len(batches)  # a mean over sequences, all alike
        # The factor is in the weights of the losses, so that it costs no operation of its own. It
        # comes out of the returned loss again, and the caller takes it out of the gradients.
        if self.grid.size("pp") > 1:
            total = self._through_the_pipeline(batches, weights)
            self.finish_gradient_sync()
            return total / loss_scale
        total = torch.zeros((), dtype=torch.float64, device=batches[0][0].device)
        for number, (inputs, targets) in enumerate(batches):
            is_last = number == len(batches) - 1
            # All but the last micro-batch only add up their gradients, and one average is sent.
            # With ZeRO-3 that would keep the whole gradient of the model on every rank, so there
            # each micro-batch sends its own (`accumulates_shards`).
            syncs = is_last or self.replica.accumulates_shards
            with contextlib.nullcontext() if syncs else self.no_sync():
                with self.ranges("forward"), self._autocast():
                    loss = self.loss(self(inputs), targets)
                with self.ranges("backward"):
                    (loss * weights[number]).backward()
            total += loss.detach() * weights[number]
        self.finish_gradient_sync()
        return total / loss_scale

    def forward_backward_alone(
        self, batches: Sequence[Batch], loss_scale: torch.Tensor
    ) -> torch.Tensor:
        """Forward and backward on a rank that is alone: its weights are whole, and it has no peers.

        It asks for no value on the way, so that a GPU can record it (`train.cuda_graph`).
        """
        total = torch.zeros((), dtype=torch.float64, device=batches[0][0].device)
        with self.no_sync():
            for (inputs, targets), weight in zip(batches, self._weights(batches), strict=True):
                with self._autocast():
                    loss = self.loss(self.module(inputs), targets)
                (loss * weight * loss_scale).backward()
                total += loss.detach() * weight
        return total

    @torch.no_grad()
    def losses(self, batches: Sequence[Batch]) -> torch.Tensor:
        """The loss of each micro-batch, without gradients; the same on every rank of the model.

        Returns:
            [micro-batches] float64
        """
        if self.grid.size("pp") == 1:
            values = []
            with self._autocast():
                for inputs, targets in batches:
                    values.append(self.loss(self(inputs), targets).double())
            return torch.stack(values)
        # Any number of micro-batches can be evaluated, whatever the training schedule asks for.
        # Every schedule accepts p micro-batches; `evaluate` makes a plan of its own anyway.
        pipeline = self._pipeline(self.grid.size("pp"))
        inputs, targets = zip(*batches)
        values = pipeline.evaluate(inputs, targets)
        dist.all_reduce(values, group=self.grid.group("pp"))
        return values

    @property
    def cuts_sequence_over_tp(self) -> bool:
        """Whether ranks of tp hold different tokens between layers: sequence parallelism."""
        # nothing else makes the gradient of a weight that tp does not cut a part of a sum over tp
        return any("tp" in each.partial_over for each in self.shardings.values())

    def no_sync(self) -> AbstractContextManager:
        """Within it backward only accumulates: for all micro-batches of a step but the last."""
        return self.replica.no_sync()

    def finish_gradient_sync(self) -> None:
        """Finish the average over dp and the sums of partial gradients over cp, tp and stages."""
        with self.ranges("communication"):
            self.replica.finish_gradient_sync()
            all_reduce_partial_gradients(self.weights, self.shardings, self.grid)

    def gather_parameters(self) -> None:
        """After the optimizer's step: let all ranks of dp have the weights that each updated."""
        with self.ranges("communication"):
            self.replica.gather_parameters()

    @torch.no_grad()
    def rebalance(self) -> None:
        """After the optimizer's step: move the biases of all routers by the load of this step.

        What the routers counted is kept for `expert_load` and begins anew.

        Communicates: one all-reduce over all ranks that hold tokens of the batch, of `layers * E`
            numbers; nothing without such biases, or where no backward has come to them.
        """
        loads = {}
        for name, router in self.routers.items():
            if router.bias is not None and router.load is not None:  # a frozen part has no backward
                loads[name] = router.load
        self._routed = take_routed(self.routers.values(), self._experts)
        if not loads:
            return
        first = next(iter(loads))
        axes = {"dp", *self.shardings[f"{first}.weight"].partial_over}
        total = torch.stack(list(loads.values()))  # [layers, E]
        dist.all_reduce(total, group=self.grid.group(*axes))
        for name, load in zip(loads, total):
            bias = f"{name}.bias"
            move = self.shardings[bias].own(self.routers[name].move_of_bias(load), self.grid)
            param = self.weights[bias]
            param += move.to(param)

    def expert_load(self) -> dict[str, float]:
        """How the routers spread the rows of the last step; every rank calls it.

        The numbers are read, so that a GPU is waited for: ask where a row is written.

        Communicates: an all-reduce of `layers * E + 3` numbers over all ranks that hold tokens of
            the batch, and two of 1 and 3 over the stages; nothing without experts.

        Returns:
            `{"expert_load": .., "dropped_share": .., "router_loss": ..}`, as in
            `parallel.experts.load_of`, the latter two where there is a capacity and a loss; empty
            without experts, or if nothing was routed.
        """
        config = self.config
        if not getattr(config, "num_experts", 0):
            return {}
        first = next(iter(self.routers), None)
        axes = {"dp"}
        if first is not None:
            axes |= set(self.shardings[f"{first}.weight"].partial_over)
        found = load_of(
            self._routed,
            self.grid.group(*axes),
            self.grid.group("pp"),
            copies=self.grid.size("dp"),
            device=next(self.module.parameters()).device,
        )
        if not config.expert_capacity:
            found.pop("dropped_share", None)
        if not config.router_balance and not config.router_z_loss:
            found.pop("router_loss", None)
        return found

    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of the whole model's gradient, a float64 scalar; every rank calls it."""
        return gradient_norm(self.weights, self.shardings, self.grid)

    def full_state_dict(self) -> Any:
        """(name, tensor) of the whole model's state dict, one at a time.

        All ranks iterate over it together.
        """
        return full_state_dict(
            self.module, self.weights, self.shardings, self.full_weights, self.grid
        )

    def describe(self) -> str:
        """The plan, and this rank's weights: shapes, and where their gradients are summed."""
        lines = [f"{entry.modules:26}{entry.how}" for entry in self.plan.entries]
        lines.append("")
        for name, param in self.weights.items():
            sharding = self.shardings[name]
            shapes = f"{list(sharding.shape)} -> {list(param.shape)}"
            axes = list(sharding.partial_over)
            if sharding.tied:
                axes.append("first and last of pp")
            lines.append(f"{name:32}{shapes:28}gradient summed over: {', '.join(axes) or '-'}")
        return "\n".join(lines)

    def _through_the_pipeline(
        self, batches: Sequence[Batch], weights: Sequence[torch.Tensor | float]
    ) -> torch.Tensor:
        pipeline = self._pipeline(len(batches))
        inputs, targets = zip(*batches)
        # A stage runs backward once for each micro-batch before its gradient is whole, so nothing
        # is sent before `finish_gradient_sync`. The price is the overlap: the average over dp
        # begins only when the pipeline has drained.
        with self.replica.no_sync():
            total = pipeline.step(inputs, targets, weights, self.on_action, self.ranges)
        with self.ranges("communication"):
            dist.all_reduce(total, group=self.grid.group("pp"))
        return total

    def _weights(self, batches: Sequence[Batch]) -> list[torch.Tensor | float]:
        """The weight of each micro-batch's mean loss in the mean over the whole global batch.

        With m micro-batches of equal size it is 1/m. Where targets can be left out (-100), a mean
        of means would count a target more if fewer of its neighbours count.

        Communicates: the number of targets, an all-reduce of one number over dp, if the plan counts
            targets.
        """
        if self.plan.count_targets is None:
            return [1 / len(batches)] * len(batches)
        counts = [self.plan.count_targets(targets) for _, targets in batches]
        counts = torch.stack(counts).to(torch.float64)
        total = counts.sum()
        if self.replica.trains_alone:
            return list(counts / total)
        dist.all_reduce(total, group=self.grid.group("dp"))
        # times dp, because the average over dp divides by it
        return list(counts * self.grid.size("dp") / total)

    def _pipeline(self, num_microbatches: int) -> Pipeline:
        """The pipeline for a number of micro-batches; planned at the first step, then kept."""
        if num_microbatches not in self._pipelines:
            stages = self.plan.stages
            num_stages = len(stages.layers)
            pp = self.grid.size("pp")
            own_stages = {}
            for stage in range(self.grid.coord("pp"), num_stages, pp):
                own_stages[stage] = partial(self._run_stage, stages.layers[stage])
            plan = plan_pipeline(stages.schedule, num_stages, num_microbatches, pp)
            group = self.grid.group("pp")
            self._pipelines[num_microbatches] = Pipeline(
                own_stages, plan, group, self.loss, self._boundary
            )
        return self._pipelines[num_microbatches]

    def _run_stage(
        self, layers: range, x: torch.Tensor | None, inputs: torch.Tensor
    ) -> torch.Tensor:
        with self._autocast():
            return self.replica(inputs, x=x, layers=layers)

    def _boundary(self, inputs: torch.Tensor) -> torch.Tensor:
        """An empty tensor of the shape and dtype of what a stage hands to the next one."""
        example = next(self.module.parameters())  # perhaps without memory, but with a dtype
        return example.new_empty(self.plan.stages.boundary(inputs))

    def _autocast(self) -> AbstractContextManager:
        device = self.grid.mesh.device_type
        enabled = self.autocast_dtype is not None
        return torch.autocast(device, self.autocast_dtype, enabled=enabled)
