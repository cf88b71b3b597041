"""From a config to everything that a run trains with, built once."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from labcode.comm.grid import Grid
from labcode.config import Config, OptimConfig, TrainConfig
from labcode.data.loader import Loader
from labcode.data.sampler import Batches
from labcode.debug.in_run import Debugging
from labcode.measure.device_speed import matmul_flops_per_s
from labcode.measure.ranges import StepRanges
from labcode.models.layers import freeze
from labcode.models.lora import add_adapters
from labcode.models.parallelize import parallelize
from labcode.parallel.local import OuterOptimizer
from labcode.parallel.model import ParallelModel
from labcode.precision.fp8 import Fp8, make_recipe
from labcode.runtime.agreement import on_every_rank
from labcode.runtime.bootstrap import World
from labcode.runtime.combinations import Resolved
from labcode.train.checkpoint.hub_files import open_start
from labcode.train.checkpoint.state import RunState
from labcode.train.checkpoint.store import Checkpoints
from labcode.train.cuda_graph import leave_default_stream
from labcode.train.guard import Guard
from labcode.train.loss_scale import LossScaler
from labcode.train.noise_scale import NoiseScale
from labcode.train.optim import make_optimizer
from labcode.train.precision import Precision, pick_precision, set_matmul_precision
from labcode.train.tasks import Task


@dataclass(frozen=True)
class Training:
    """Everything that one rank trains with.

    The fields are set once; weights, optimizer state and counters inside them change.

    Args:
        config: The run, checked against the number of ranks.
        world: This process, its device and backend.
        grid: The process groups.
        task: The model and its data.
        precision: The dtypes in which it computes.
        matmul_flops_per_s: What a large matrix product reaches here; None on all ranks but 0.
        accumulation: Micro-batches of a step.
        optim: The settings of the optimizer, for this batch.
        batches: The samples of this dp rank in each step, and the position in them.
        loader: What brings them to the device.
        ranges: The clock of the parts of a step.
        model: This rank's part.
        optimizer: The optimizer of this rank's weights.
        fp8: Scales and histories of linear layers in 8 bits, or None.
        guard: Decides whether the gradient of a step is bad.
        scaler: The loss scale of float16, or None.
        noise: Measures the gradient noise scale, or None.
        outer: The optimizer that averages copies which train alone, or None.
        debugging: The tools of `config.debug`.
        state: All of it that a checkpoint holds.
        steps_before: Optimizer steps before this process began.
    """

    config: Config
    world: World
    grid: Grid
    task: Task
    precision: Precision
    matmul_flops_per_s: float | None
    accumulation: int
    optim: OptimConfig
    batches: Batches
    loader: Loader
    ranges: StepRanges
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    fp8: Fp8 | None
    guard: Guard
    scaler: LossScaler | None
    noise: NoiseScale | None
    outer: OuterOptimizer | None
    debugging: Debugging
    state: RunState
    steps_before: int

    @property
    def steps_done(self) -> int:
        """Optimizer steps of the whole run, with those before it was resumed."""
        return self.batches.step

    @property
    def has_begun(self) -> bool:
        """Whether this process has done an optimizer step."""
        return self.steps_done > self.steps_before

    @property
    def is_done(self) -> bool:
        """Whether all steps of the run are done."""
        return self.steps_done >= self.config.train.steps

    def is_due(self, every: int) -> bool:
        """Whether something is due that happens every `every` steps and after the last one."""
        if self.steps_done == self.config.train.steps:
            return True
        return every > 0 and self.steps_done % every == 0

    def close(self) -> None:
        """End the workers of the loader, and close the files of the debug features."""
        self.loader.close()
        self.debugging.close()


def build(
    resolved: Resolved, world: World, grid: Grid, task: Task, start: Path | None = None
) -> Training:
    """Build what a run trains with; nothing is written.

    Communicates: what building the model does, and what reading a checkpoint does.

    Args:
        resolved: The run, as `combinations.resolve` gives it.
        world: This process, its device and backend.
        grid: The process groups of its shape.
        task: The model to build and its data.
        start: Checkpoint to resume from.

    Raises:
        ValueError, OSError, MemoryError: On the rank that found something; PeerError on the others.
    """
    config = resolved.config
    settings = config.train
    precision = pick_precision(settings.dtype, world.device)
    set_matmul_precision(precision, world.device)
    speed = None
    # Rank 0 writes the metrics. It measures before the model takes its memory.
    if world.place.rank == 0:
        speed = matmul_flops_per_s(world.device, precision.matmul)

    # Before the model, which may take minutes to build: the batch may be too large for the data.
    # What can fail on one rank alone runs under `on_every_rank`, so that all ranks end together.
    batches, loader = on_every_rank(_loading, resolved, world, grid, task, precision)
    fp8 = _fp8(config, grid)
    # Before the model, whose gradients belong to the stream that was current when it was built.
    if settings.cuda_graphs and world.device.type == "cuda":
        leave_default_stream()
    ranges = StepRanges(on_gpu=world.device.type == "cuda")
    model = _model(config, world, grid, task, precision, fp8)
    model.ranges = ranges
    optim = config.optim.for_batch(settings.global_batch)
    optimizer = on_every_rank(_optimizer, config, grid, model, optim)
    guard = Guard(
        settings.on_bad_step, settings.spike_factor, settings.bad_in_a_row, settings.bad_in_all
    )
    scaler = LossScaler() if precision.scales_loss else None
    noise = _noise(resolved, grid, model)
    debugging = Debugging(config.debug, model, world.device, precision.name)
    state = RunState(
        model,
        optimizer,
        batches,
        world.device,
        guard,
        scaler,
        noise,
        fp8,
        trained_alone=config.lora.rank > 0,
    )
    # After everything that a checkpoint holds exists: reading fills it in place.
    # Adapters are saved alone: a run that resumes has to read the model beside them again.
    if settings.start_from and (start is None or config.lora.rank):
        on_every_rank(_read_start, config, task, model)
        model.gather_parameters()
    if start:
        checkpoints = Checkpoints(config, grid, start.parents[1], task.data_sha256)
        checkpoints.load(state, start)
        model.gather_parameters()  # under ZeRO each rank has read its own rows
    return Training(
        config=config,
        world=world,
        grid=grid,
        task=task,
        precision=precision,
        matmul_flops_per_s=speed,
        accumulation=resolved.accumulation,
        optim=optim,
        batches=batches,
        loader=loader,
        ranges=ranges,
        model=model,
        optimizer=optimizer,
        fp8=fp8,
        guard=guard,
        scaler=scaler,
        noise=noise,
        # Last, because it copies the weights: those of the checkpoint, where one was read.
        outer=_outer(config, grid, model),
        debugging=debugging,
        state=state,
        steps_before=batches.step,
    )


def _loading(
    resolved: Resolved, world: World, grid: Grid, task: Task, precision: Precision
) -> tuple[Batches, Loader]:
    """This dp rank's samples of every step, and what brings them to the device."""
    config = resolved.config
    batches = Batches(
        len(task.train),
        config.train.global_batch,
        dp_size=grid.size("dp"),
        dp_coord=grid.coord("dp"),
        seed=config.train.seed,
    )
    loader = Loader(
        task.train,
        batches,
        resolved.accumulation,
        config.loader,
        world.device,
        precision.wide,
    )
    return batches, loader


def _read_start(config: Config, task: Task, model: ParallelModel) -> None:
    """Fill this rank's part with the weights of a checkpoint from elsewhere (`start_from`)."""
    open_start(config, task.model_config, task.tokenizer).read_into(model)


def build_meta(config: Config, task: Task) -> nn.Module:
    """The whole model without values, of which some weights may be frozen, with its adapters.

    Raises:
        ValueError: `train.freeze` names no weight, or all.
    """
    with torch.device("meta"):
        model = task.build()
        if config.lora.rank:
            add_adapters(model, config.lora)
    freeze(model, config.train.freeze)
    return model


def _model(
    config: Config, world: World, grid: Grid, task: Task, precision: Precision, fp8: Fp8 | None
) -> ParallelModel:
    """This rank's part of the model, with its initial weights."""
    model = build_meta(config, task)
    if fp8 is not None:
        fp8.check_skipped(model)
    return parallelize(
        model,
        grid,
        config.parallel,
        seed=config.train.seed,
        device=world.device,
        dtype=precision.wide,
        autocast_dtype=precision.autocast,
        base_dtype=_base_dtype(config, precision),
        reduce_dtype=_reduce_dtype(config.train),
        trains_alone=config.local.steps > 0,
        compiled=config.train.compile,
        loss_options=task.loss_options,
        fp8=fp8,
    )


def _base_dtype(config: Config, precision: Precision) -> torch.dtype | None:
    """The dtype of the frozen weights beside adapters; None: that of the others.

    Each product narrows them anyway, so that it changes no number to keep them narrow: 2 bytes
    instead of 4. FP8 is left out, whose scales come from the wide weights.
    """
    if not config.lora.rank or config.train.dtype == "fp8":
        return None
    return precision.autocast


def _fp8(config: Config, grid: Grid) -> Fp8 | None:
    """FP8 for the linear layers, if the config asks for it."""
    if config.train.dtype != "fp8":
        return None
    groups = {"all": ("dp", "cp", "tp"), "tp": ("tp",), "none": ()}
    # the ranks whose largest number counts for the scale of a tensor; () is this rank alone
    group = grid.group(*groups[config.fp8.share])
    return Fp8(make_recipe(config.fp8), group, config.fp8.skip)


def _optimizer(
    config: Config, grid: Grid, model: ParallelModel, optim: OptimConfig
) -> torch.optim.Optimizer:
    """The optimizer of this rank's weights."""
    # Under our ZeRO the weights of a rank are its shards, on which any optimizer steps. PyTorch's
    # stage 1 leaves them whole and divides the step, so it has to know who else takes part.
    by_torch = config.parallel.zero_stage == 1 and config.parallel.data_parallel == "ddp"
    group = grid.group("dp") if by_torch else None
    return make_optimizer(model.weights.values(), optim, group)


def _outer(config: Config, grid: Grid, model: ParallelModel) -> OuterOptimizer | None:
    """The optimizer that averages the copies of the model, if each trains alone."""
    local = config.local
    if not local.steps:
        return None
    params = model.weights.values()
    return OuterOptimizer(params, grid.group("dp"), local.outer_lr, local.outer_momentum)


def _noise(resolved: Resolved, grid: Grid, model: ParallelModel) -> NoiseScale | None:
    """The measurement of the gradient noise scale, if the config asks for it."""
    settings = resolved.config.train
    if not settings.noise_scale:
        return None
    num_microbatches = resolved.accumulation * grid.size("dp")
    params = model.module.parameters()
    return NoiseScale(params, settings.global_batch, num_microbatches, grid.group("dp"))


def _reduce_dtype(settings: TrainConfig) -> torch.dtype | None:
    """The dtype in which gradients are summed over dp; None: their own."""
    return None if settings.reduce_dtype == "float32" else getattr(torch, settings.reduce_dtype)
