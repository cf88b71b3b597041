"""The training loop: the same for every model and every grid.

One optimizer step reads `global_batch` samples, whatever the number of ranks: each dp rank takes
its part, in micro-batches whose gradients add up before they are averaged over the ranks once.
"""

import contextlib
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from labcode import hardware
from labcode.comm.agreement import on_every_rank
from labcode.comm.bootstrap import World
from labcode.comm.grid import Grid
from labcode.config import Config, TrainConfig
from labcode.data.loader import Loader
from labcode.data.sampler import Batches, validation_batches
from labcode.doctor.hang import HangWatch
from labcode.models.parallelize import parallelize
from labcode.parallel.local import OuterOptimizer
from labcode.parallel.model import Batch, ParallelModel
from labcode.parallel.torch_data import PowerSGD
from labcode.perf.flops import training_flops_per_sample
from labcode.precision.fp8 import Fp8, make_recipe
from labcode.precision.record import FOLDER as RECORD
from labcode.precision.record import Recorder
from labcode.train import finite
from labcode.train.checkpoint import Checkpoints
from labcode.train.cuda_graph import GraphedStep, leave_default_stream
from labcode.train.debugging import Debugging
from labcode.train.device_samples import DeviceSampler, ProcessMeter, meter_for
from labcode.train.device_speed import matmul_flops_per_s
from labcode.train.gpt2_files import Gpt2File
from labcode.train.guard import Guard
from labcode.train.loss_scale import LossScaler
from labcode.train.measure import StepClock, peak_memory_bytes
from labcode.train.memory_marks import MemoryMarks
from labcode.train.metrics import Log
from labcode.train.noise_scale import NoiseScale
from labcode.train.optim import clip_gradients, learning_rate, make_optimizer
from labcode.train.precision import pick_precision, set_matmul_precision
from labcode.train.profile import StepProfiler
from labcode.train.ranges import StepRanges
from labcode.train.result import write_result
from labcode.train.second_look import SecondLook
from labcode.train.signals import StopSignals
from labcode.train.slow import SlowRankWatch
from labcode.train.state import RunState
from labcode.train.tasks import Task

_FIRST_SAMPLE = np.zeros(1, dtype=np.int64)


class Step(NamedTuple):
    """What one optimizer step did.

    Args:
        loss: Mean over this dp rank's samples, a float64 scalar.
        grad_norm: 2-norm of the whole model's gradient, before clipping; with local steps that of
            this rank's copy.
        lr: Learning rate.
        left_out: Why its update was left out because the step is bad; "" if it is not.
        rescaled: Whether its update was left out because the loss scale was too large for float16.
    """

    loss: torch.Tensor
    grad_norm: float
    lr: float
    left_out: str = ""
    rescaled: bool = False


class Trainer:
    """One rank's part of a run. `fit()` does everything; the other methods are its steps.

    Args:
        config: The run, checked against the number of ranks.
        world: This process, its device and backend.
        grid: The process groups.
        task: The model to build and its data.
        out: Existing folder; rank 0 writes metrics, weights and samples into it. None writes
            nothing.
        start: Checkpoint to resume from.
        signals: What has been heard since the process was started; None listens during `fit` only.
        watch: Is told of each step, so that it can say who waits for whom; None: nobody watches.

    Attributes:
        steps_done: Optimizer steps of the whole run, with those before it was resumed.
        stopped_by: The signal that ended the run before its last step, or None.
        history: The rows of metrics that were logged.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        grid: Grid,
        task: Task,
        out: Path | None,
        start: Path | None = None,
        signals: StopSignals | None = None,
        watch: HangWatch | None = None,
    ) -> None:
        self.config = config
        self.world = world
        self.grid = grid
        self.task = task
        self.signals = signals
        self.watch = watch
        self.precision = pick_precision(config.train.dtype, world.device)
        set_matmul_precision(self.precision, world.device)
        self.accumulation = config.train.accumulation(grid.size("dp"))
        self.optim = config.optim.for_batch(config.train.global_batch)
        self.stopped_by: str | None = None
        self.matmul_flops_per_s = None
        if world.place.rank == 0:  # which writes the metrics; before the model takes its memory
            self.matmul_flops_per_s = matmul_flops_per_s(world.device, self.precision.matmul)

        # before the model, which may take minutes: a batch may be too large for the data
        self.batches = on_every_rank(self._batches)
        self.loader = on_every_rank(self._loader)
        self.ranges = StepRanges(on_gpu=world.device.type == "cuda")
        self.fp8 = self._make_fp8()
        if config.train.cuda_graphs and world.device.type == "cuda":
            leave_default_stream()
        self.model = self._build()
        self.model.ranges = self.ranges
        self.optimizer = on_every_rank(self._make_optimizer)
        self.slow = self._watch_slow_ranks()
        self.graphed = GraphedStep(self.model) if config.train.cuda_graphs else None
        self.guard = _guard(config.train)
        self.scaler = LossScaler() if self.precision.scales_loss else None
        self.noise = self._measure_noise()
        self.second_look = SecondLook(self.model, world.device) if config.debug.probe else None
        self.debugging = Debugging(config.debug, self.model) if config.debug.config else None
        self.state = RunState(
            self.model,
            self.optimizer,
            self.batches,
            world.device,
            self.guard,
            self.scaler,
            self.noise,
            self.fp8,
        )
        if start:
            self._checkpoints_in(start.parents[1]).load(self.state, start)
            self.model.gather_parameters()  # under ZeRO each rank has read its own rows
        elif config.train.start_from:
            folder = Path(config.train.start_from)
            on_every_rank(lambda: Gpt2File(folder).read_into(self.model))
            self.model.gather_parameters()
        self.outer = self._make_outer()
        self.steps_before = self.steps_done
        self.open(out)

    def _batches(self) -> Batches:
        """This dp rank's samples of every step."""
        return Batches(
            len(self.task.train),
            self.config.train.global_batch,
            dp_size=self.grid.size("dp"),
            dp_coord=self.grid.coord("dp"),
            seed=self.config.train.seed,
        )

    def _loader(self) -> Loader:
        """What brings them to the device."""
        return Loader(
            self.task.train,
            self.batches,
            self.accumulation,
            self.config.loader,
            self.world.device,
            self.precision.wide,
        )

    def _build(self) -> ParallelModel:
        """This rank's part of the model, with its initial weights."""
        with torch.device("meta"):
            model = self.task.build()
        if self.fp8 is not None:
            self.fp8.check_skipped(model)
        return parallelize(
            model,
            self.grid,
            self.config.parallel,
            seed=self.config.train.seed,
            device=self.world.device,
            dtype=self.precision.wide,
            autocast_dtype=self.precision.autocast,
            reduce_dtype=_reduce_dtype(self.config.train),
            powersgd=_powersgd(self.config.train),
            trains_alone=self.config.local.steps > 0,
            compiled=self.config.train.compile,
            loss_options=self.task.loss_options,
            fp8=self.fp8,
        )

    def _make_fp8(self) -> Fp8 | None:
        """What lets the linear layers compute in 8 bits, where that is asked for."""
        if self.config.train.dtype != "fp8":
            return None
        settings = self.config.fp8
        groups = {"all": ("dp", "cp", "tp"), "tp": ("tp",), "none": ()}
        group = self.grid.group(*groups[settings.share])
        return Fp8(make_recipe(settings), group, settings.skip)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        parallel = self.config.parallel
        by_torch = parallel.zero_stage == 1 and parallel.data_parallel == "ddp"
        group = self.grid.group("dp") if by_torch else None
        return make_optimizer(self.model.weights.values(), self.optim, group)

    def _make_outer(self) -> OuterOptimizer | None:
        """What the copies of the model do together, where each trains alone."""
        local = self.config.local
        if not local.steps:
            return None
        group = self.grid.group("dp")
        params = self.model.weights.values()
        return OuterOptimizer(params, group, local.outer_lr, local.outer_momentum)

    def _watch_slow_ranks(self) -> SlowRankWatch | None:
        """What finds a slow rank, where several have the same work."""
        factor = self.config.train.slow_factor
        if not factor or self.grid.size("dp") == 1:
            return None
        module = None if self.config.parallel.divides_weights else self.model.module
        return SlowRankWatch(self.grid, self.world.device, factor, module)

    def _measure_noise(self) -> NoiseScale | None:
        """What measures the gradient noise scale, where that is asked for."""
        if not self.config.train.noise_scale:
            return None
        num_microbatches = self.accumulation * self.grid.size("dp")
        return NoiseScale(
            self.model.module.parameters(),
            self.config.train.global_batch,
            num_microbatches,
            self.grid.group("dp"),
        )

    def open(self, out: Path | None) -> None:
        """From now on write into this folder; None writes nothing.

        Raises:
            OSError: It cannot be written, on rank 0.
        """
        config = self.config
        self.out = out
        self.checkpoints: Checkpoints | None = None
        if out and config.checkpoint.on:
            self.checkpoints = self._checkpoints_in(out)
            self.checkpoints.resumed_from(self.steps_before)
        folder = out if self.world.rank == 0 else None
        weights = [*self.model.module.parameters(), *self.model.weights.values()]
        marks = MemoryMarks(weights, self.optimizer)
        self.profiler = StepProfiler(
            config.profile, self.world.rank, self.world.device, self.ranges, marks, out
        )
        self.log = Log(folder, config.name, config.train.steps, self.steps_done)
        if self.steps_before and config.train.powersgd_rank:
            self.log.say(
                "PowerSGD begins anew: what it left out of gradients is not in checkpoints, and "
                f"{config.train.powersgd_exact_steps} steps travel whole first"
            )
        self.sampler = self._device_sampler()
        if out and self.debugging:
            self.debugging.open(out, self.steps_done)
        self.recorder = None
        if out and config.debug.record_steps:
            self.recorder = Recorder(self.model, out / RECORD, self.precision.name)

    def _device_sampler(self) -> DeviceSampler:
        """What samples this rank's device during `fit`, where the samples are written."""
        period_s = self.config.train.sample_device_s if self.log.writes else 0.0
        meter = meter_for(self.world.device) if period_s else ProcessMeter()
        return DeviceSampler(meter, period_s, lambda: self.steps_done, self.log.write_device)

    def _checkpoints_in(self, out: Path) -> Checkpoints:
        return Checkpoints(self.config, self.grid, out, self.task.data_sha256)

    @property
    def steps_done(self) -> int:
        return self.batches.step

    @property
    def history(self) -> list[dict[str, float]]:
        return self.log.history

    @property
    def has_begun(self) -> bool:
        """Whether this process has done an optimizer step."""
        return self.steps_done > self.steps_before

    def fit(self) -> list[dict[str, float]]:
        """Train to the end, or until a signal asks to stop (`stopped_by`).

        Returns:
            The rows of metrics that were logged.

        Raises:
            Diverged: A loss, the gradient norm or a weight is not finite; on every rank at the same
                step.
        """
        settings = self.config.train
        clock = StepClock()
        with self.log.bar(), self.sampler, self._stop_signals() as signals:
            if self.checkpoints and signals:
                self._stop_if_asked(signals)  # while it started: nothing is to be saved yet
            while self.steps_done < settings.steps and not self.stopped_by:
                with self.profiler.step(self.steps_done + 1):
                    step = self.step()
                clock.count()
                if self.watch:
                    self.watch.step(self.steps_done)
                if step.left_out:
                    self._go_on_without(step)
                elif step.rescaled and self.scaler:
                    self._say_overflow(self.scaler)
                elif self._due(settings.log_every):
                    self.log.write(self._row(step, clock.seconds_per_step()))
                    clock.restart()
                with clock.paused():
                    if self._due(settings.eval_every):
                        self.log.write({"step": self.steps_done, "val_loss": self.validate()})
                    if self.checkpoints and signals:
                        self._save_if_due(self.checkpoints, signals)
                self.log.advance()
        if not self.stopped_by:
            if self.sampler.problem:
                self.log.say(f"the device was not sampled to the end: {self.sampler.problem}")
            with StopSignals():  # what is left is short, and would have to be done again
                self._finish()
        return self.history

    def _save_if_due(self, checkpoints: Checkpoints, signals: StopSignals) -> None:
        """Write a checkpoint where one is due, or asked for by a signal, which ends the run."""
        self._stop_if_asked(signals)
        checkpoints.finish_if_written()
        is_last = self.stopped_by or self.steps_done == self.config.train.steps
        if is_last or self._due(self.config.checkpoint.every):
            if self.config.checkpoint.in_background and not is_last:
                checkpoints.begin(self.state)
            else:
                checkpoints.save(self.state)

    def _stop_if_asked(self, signals: StopSignals) -> None:
        """Agree with all ranks whether the run stops; after the last step it finishes instead."""
        if self.steps_done < self.config.train.steps:
            self.stopped_by = signals.agreed()

    def step(self) -> Step:
        """One optimizer step: forward and backward, clip, update.

        The update of a bad step is left out (`Guard`); its batch counts as read.

        Raises:
            Diverged: The gradient is bad and the rule is to stop, or there were too many; the
                weights are as before the step.
        """
        lr = learning_rate(self.steps_done, self.config.train.steps, self.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.slow:
            self.slow.clock.begin()
        with self.ranges("data"):
            batches = self.loader.take(self.steps_done)
        if self.slow:
            self.slow.clock.has_read()
        loss_scale = self.scaler.scale if self.scaler else 1.0
        if self.second_look:
            self.second_look.begin()
        loss = self._forward_backward(batches, loss_scale)
        if self.debugging:
            self.debugging.step()
        with self.ranges("optimizer"):
            grad_norm = self.model.gradient_norm().item()
            if self.second_look:
                self._look_again_if_bad(self.second_look, batches, loss, grad_norm)
            if self.slow:
                self.slow.clock.end()
            rescaled = False
            if self.scaler:
                grad_norm, rescaled = self._unscale(self.scaler, grad_norm, loss)
            # with local steps a copy cannot leave one out that the others take
            left_out = "" if rescaled or self.outer else self.guard.judge(grad_norm)
            if self.noise:
                self.noise.end_step(grad_norm, loss_scale, keep=not left_out and not rescaled)
            if not left_out and not rescaled:
                clip_gradients(self.model.weights.values(), grad_norm, self.config.optim.clip_norm)
                self.optimizer.step()
            if self.fp8:
                self.fp8.finish_step()
            self.optimizer.zero_grad(set_to_none=True)
        self.model.gather_parameters()
        self.ranges.end_step()
        # only now: a step that was broken off does not count
        self.batches.advance()
        self._average_if_due()
        return Step(loss, grad_norm, lr, left_out, rescaled)

    def _look_again_if_bad(
        self, look: SecondLook, batches: list[Batch], loss: torch.Tensor, grad_norm: float
    ) -> None:
        """Run a bad step once more with a probe, and print what it found; all ranks call it.

        An overflow that a smaller loss scale cures is no bad step.
        """
        if not look.is_bad(loss, grad_norm):
            return
        if self.scaler and self.scaler.can_cure(grad_norm, self._mean_loss(loss)):
            return
        line = look.line(batches, self.scaler.scale if self.scaler else 1.0)
        self.log.say(f"step {self.steps_done + 1}: {line}")

    def _average_if_due(self) -> None:
        """With local steps: what all copies do together, every so many steps and after the last.

        Raises:
            Diverged: A weight of one of them is not finite; on every rank.
        """
        if self.outer and self._due(self.config.local.steps):
            with self.ranges("communication"):
                self.outer.step()
            finite.check(self.model)

    def _forward_backward(self, batches: list[Batch], loss_scale: float) -> torch.Tensor:
        """The gradients of a step, and its loss; recorded or not."""
        if self.recorder and self.steps_done < self.config.debug.record_steps:
            with self.recorder.step(self.steps_done + 1, batches, loss_scale):
                return self.model.forward_backward(batches, loss_scale)
        if self.graphed is None:
            return self.model.forward_backward(batches, loss_scale)
        with self.ranges("forward"):  # and backward: a recording is one
            return self.graphed.forward_backward(batches, loss_scale)

    def _unscale(
        self, scaler: LossScaler, scaled_norm: float, loss: torch.Tensor
    ) -> tuple[float, bool]:
        """Undo the loss scale in the gradients, and choose the next one.

        Communicates: only where the gradient has overflowed, one all-reduce of the loss over dp.

        Returns:
            The true norm of the gradient; whether it has overflowed and a smaller scale may help.
        """
        grad_norm = scaler.unscale(self.model.weights.values(), scaled_norm)
        if math.isfinite(grad_norm):
            scaler.update(overflowed=False)
            return grad_norm, False
        can_cure = scaler.can_cure(grad_norm, self._mean_loss(loss))
        if can_cure:
            scaler.update(overflowed=True)
        return grad_norm, can_cure

    def _say_overflow(self, scaler: LossScaler) -> None:
        """Say that an update was left out because the loss scale was too large."""
        line = (
            f"step {self.steps_done}: a gradient overflows float16 with a loss scale of "
            f"{2 * scaler.scale:g}; its update is left out, the scale is {scaler.scale:g} now"
        )
        row = {"step": self.steps_done, "loss_scale": scaler.scale, "overflows": scaler.overflows}
        self.log.write(row, line)

    def _mean_loss(self, loss: torch.Tensor) -> float:
        """The loss of a step over all ranks of dp, from this rank's; all ranks call it."""
        total = loss.clone()
        dist.all_reduce(total, group=self.grid.group("dp"))
        return total.item() / self.grid.size("dp")

    def _go_on_without(self, step: Step) -> None:
        """Say that a step was left out; by rule go back to a checkpoint, past all batches since.

        Before the first checkpoint there is nothing to go back to, and the step alone is left out.
        """
        how = "its update is left out"
        start = None
        if self.config.train.on_bad_step == "rollback" and self.checkpoints:
            self.checkpoints.finish()
            start = self.checkpoints.newest()
        if start and self.checkpoints:
            how = self._roll_back(self.checkpoints, start)
        line = f"step {self.steps_done} is bad, {step.left_out}: {how}"
        self.log.write({"step": self.steps_done, "bad_steps": self.guard.bad_steps}, line)

    def _roll_back(self, checkpoints: Checkpoints, start: Path) -> str:
        """Take the weights and the optimizer of a checkpoint; the position in the data stays.

        Communicates: what reading a checkpoint does.
        """
        last = self.steps_done
        counted = self.guard.state
        taken = checkpoints.load(self.state, start)
        self.model.gather_parameters()
        self.guard.state = counted  # the bad step is not forgotten
        first = self.steps_done + 1
        self.batches.load_state_dict({"step": last})
        return f"back to {taken.name}, the batches of steps {first} to {last} are left out"

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the first `eval_batches` global batches of held-out data.

        It is the same for every grid.

        Communicates: what the forward does, and one all-reduce of two numbers over dp.
        Held by: tests/ranks/test_parallel_parity.py::
            test_a_rank_without_a_sample_takes_part_in_the_forward_of_validation

        Raises:
            Diverged: It is not finite; on every rank.
        """
        self.model.eval()
        # sum of the losses, number of samples: a rank's part of the last batch may be smaller
        sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        own_batches = validation_batches(
            len(self.task.val),
            self.config.train.global_batch,
            dp_size=self.grid.size("dp"),
            dp_coord=self.grid.coord("dp"),
            max_batches=self.config.train.eval_batches,
        )
        for indices in own_batches:
            sums += self._sum_of_losses(indices)
        dist.all_reduce(sums, group=self.grid.group("dp"))
        self.model.train()
        loss = (sums[0] / sums[1]).item()
        if not math.isfinite(loss):
            finite.check(self.model)  # names the weight that is the reason
        finite.check_loss("the validation loss", loss)
        return loss

    def close(self) -> None:
        """End the loader, close the files of metrics and profile; what was written stays."""
        self.loader.close()
        if self.checkpoints:
            self.checkpoints.abandon()
        self.log.close()
        self.profiler.close()
        if self.debugging:
            self.debugging.close()

    def _sum_of_losses(self, indices: np.ndarray) -> torch.Tensor:
        """(sum of the losses of some validation samples, their number), [2] float64.

        Every rank runs as many forwards as in a training step, however few samples it has: under
        ZeRO each of them gathers weights over dp. A part without a sample gets the first one, which
        then counts nothing.
        """
        parts = np.array_split(indices, self.accumulation)
        sizes = [len(part) for part in parts]
        filled = [part if len(part) else _FIRST_SAMPLE for part in parts]
        losses = self.model.losses(self.loader.read(self.task.val, filled))
        counts = torch.tensor(sizes, dtype=torch.float64, device=losses.device)
        return torch.stack([losses @ counts, counts.sum()])

    def _stop_signals(self) -> contextlib.AbstractContextManager[StopSignals | None]:
        """Signals are remembered only where a checkpoint can answer them; else they end the
        process.
        """
        if self.signals:
            return contextlib.nullcontext(self.signals)
        return StopSignals() if self.checkpoints else contextlib.nullcontext()

    def _due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and after the last one, happens
        now.
        """
        if self.steps_done == self.config.train.steps:
            return True
        return every > 0 and self.steps_done % every == 0

    def _row(self, step: Step, step_s: float) -> dict[str, float]:
        """The metrics of a step; all ranks call it.

        Raises:
            Diverged: The loss is not finite.
        """
        loss = self._mean_loss(step.loss)
        finite.check_loss("the loss", loss)
        for line in self.slow.look() if self.slow else ():
            self.log.say(line)
        samples_per_s = self.config.train.global_batch / step_s
        tokens_per_s = samples_per_s * self.task.model_config.sequence_length
        parts_s = {f"{part}_s": seconds for part, seconds in self.ranges.take().items()}
        row = {
            "step": self.steps_done,
            "loss": loss,
            "grad_norm": step.grad_norm,
            "lr": step.lr,
            "step_s": step_s,
            **parts_s,
            "samples_per_s": samples_per_s,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_rank": tokens_per_s / self.world.world_size,
            "memory_bytes": peak_memory_bytes(self.world.device),
        }
        if self.noise:
            row |= self.noise.metrics()
        flops = samples_per_s * training_flops_per_sample(self.task.model_config)
        return row | self._shares_of_peak(flops / self.world.world_size)

    def _shares_of_peak(self, flops_per_s: float) -> dict[str, float]:
        """How well this rank uses its device: by the datasheet, by what it can reach, by samples.

        MFU is defined by the datasheet's peak, and a CPU has none here. What a large matrix product
        reaches on this device is a peak too, and a lower one.

        Args:
            flops_per_s: That the model needs, on one rank.
        """
        found = {"flops_per_s": flops_per_s}
        if self.world.device.type == "cuda":
            mfu = hardware.mfu(flops_per_s, torch.cuda.get_device_name(), self.precision.name)
            if mfu is not None:
                found["mfu"] = mfu
        if self.matmul_flops_per_s:
            found["matmul_share"] = flops_per_s / self.matmul_flops_per_s
        utilisation = self.sampler.utilisation()
        if utilisation is not None:
            found["utilisation"] = utilisation
        return found

    def _finish(self) -> None:
        """Gather the whole model; rank 0 writes it, and what it can do.

        Raises:
            Diverged: A weight is not finite: the gradient of the last step was, its update was not.
        """
        finite.check(self.model)
        weights = {}
        for name, tensor in self.model.full_state_dict():
            # every rank takes part, rank 0 keeps them
            if self.log.writes:
                weights[name] = tensor.cpu().clone()
        self.log.close()
        if self.out and self.log.writes:
            divided = self.config.parallel.divides_weights
            sharded = self.grid.size("pp", "cp", "tp") > 1 or divided
            own = None if sharded else self.model.module
            write_result(self.out, self.task, self.config.train, weights, own)


def _guard(settings: TrainConfig) -> Guard:
    """What judges the gradients of a run."""
    return Guard(
        settings.on_bad_step, settings.spike_factor, settings.bad_in_a_row, settings.bad_in_all
    )


def _reduce_dtype(settings: TrainConfig) -> torch.dtype | None:
    """In which gradients are summed over dp; None: as they are."""
    return None if settings.reduce_dtype == "float32" else getattr(torch, settings.reduce_dtype)


def _powersgd(settings: TrainConfig) -> PowerSGD | None:
    """How gradients are compressed over dp; None: not at all."""
    if not settings.powersgd_rank:
        return None
    return PowerSGD(settings.powersgd_rank, settings.powersgd_exact_steps)
