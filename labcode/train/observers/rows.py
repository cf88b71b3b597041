"""The rows of metrics: one every `train.log_every` steps, and the bar that moves with each step."""

import contextlib
from collections.abc import Iterator

import torch

from labcode.measure.device_samples import DeviceSampler, ProcessMeter, meter_for
from labcode.measure.metrics import Log
from labcode.measure.slow import SlowRankWatch
from labcode.measure.steps import StepClock, peak_memory_bytes
from labcode.models.lora import is_adapter
from labcode.perf.flops import frozen_flops_per_sample, training_flops_per_sample
from labcode.runtime import hardware
from labcode.train import finite
from labcode.train.build import Training, build_meta
from labcode.train.observer import Observer
from labcode.train.step import Step, mean_loss


class Rows(Observer):
    """Writes the metrics of a step.

    Args:
        training: What trains.
        log: Log that the rows go to.
    """

    def __init__(self, training: Training, log: Log) -> None:
        self._training = training
        self._log = log
        self._clock = StepClock()
        self._sampler = self._device_sampler()
        self._slow = self._watch_slow_ranks()
        self._running = contextlib.ExitStack()
        self._flops_per_sample = _flops_per_sample(training)

    def _device_sampler(self) -> DeviceSampler:
        """What samples this rank's device, where the samples are written."""
        training = self._training
        # rank 0 alone: nobody would write what the others sample
        period_s = training.config.train.sample_device_s if self._log.writes else 0.0
        meter = meter_for(training.world.device) if period_s else ProcessMeter()
        return DeviceSampler(meter, period_s, lambda: training.steps_done, self._log.write_device)

    def _watch_slow_ranks(self) -> SlowRankWatch | None:
        """What finds a slow rank, where several have the same work."""
        training = self._training
        factor = training.config.train.slow_factor
        if not factor or training.grid.size("dp") == 1:
            return None
        return SlowRankWatch(training.grid, factor, training.config.parallel.divides_weights)

    def begin(self) -> str:
        """Show the bar, and sample the device."""
        self._running.enter_context(self._log.bar())
        self._running.enter_context(self._sampler)
        return ""

    @contextlib.contextmanager
    def during(self, number: int) -> Iterator[None]:
        """Measure a step."""
        del number
        with self._clock.step():
            yield

    def after(self, step: Step) -> str:
        """Write a row where one is due; one that was left out has its own (`BadSteps`)."""
        was_left_out = bool(step.left_out) or step.rescaled
        if not was_left_out and self._training.is_due(self._training.config.train.log_every):
            self._log.write(self._row(step, self._clock.take()))
        self._log.advance()
        return ""

    def end(self) -> None:
        """The bar is what it was last, and nothing is sampled any more."""
        self._running.close()

    def finish(self) -> None:
        """Nothing is written after this."""
        if self._sampler.problem:
            self._log.say(f"the device was not sampled to the end: {self._sampler.problem}")
        self._log.close()

    def close(self) -> None:
        """Close the files."""
        self._log.close()

    def _row(self, step: Step, step_s: float) -> dict[str, float]:
        """The metrics of a step; all ranks call it.

        Raises:
            Diverged: The loss is not finite.
        """
        training = self._training
        # A collective, so it is made in these steps alone; what the guard looks at in every step is
        # the gradient, which a loss that is not finite spoils too.
        loss = mean_loss(training, step.loss)
        finite.check_loss("the loss", loss)
        parts_s = training.ranges.take()
        for line in self._slow.look(parts_s) if self._slow else ():
            self._log.say(line)
        # From the global batch and the time of rank 0: ranks of dp wait for each other in each
        # step, so that all take as long.
        samples_per_s = training.config.train.global_batch / step_s
        tokens_per_s = samples_per_s * training.task.model_config.sequence_length
        row = {
            "step": training.steps_done,
            "loss": loss,
            "grad_norm": step.grad_norm,
            "lr": step.lr,
            "step_s": step_s,
            **{f"{part}_s": seconds for part, seconds in parts_s.items()},
            "samples_per_s": samples_per_s,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_rank": tokens_per_s / training.world.world_size,
            "memory_bytes": peak_memory_bytes(training.world.device),
        }
        row |= training.model.expert_load()
        if training.noise:
            row |= training.noise.metrics()
        flops = samples_per_s * self._flops_per_sample
        return row | self._shares_of_peak(flops / training.world.world_size)

    def _shares_of_peak(self, flops_per_s: float) -> dict[str, float]:
        """How well this rank uses its device: by the datasheet, by what it can reach, by samples.

        MFU is defined by the datasheet's peak, and a CPU has none here. What a large matrix product
        reaches on this device is a peak too, and a lower one.

        Args:
            flops_per_s: FLOP/s that the model needs, on one rank.
        """
        training = self._training
        found = {"flops_per_s": flops_per_s}
        if training.world.device.type == "cuda":
            name = torch.cuda.get_device_name()
            mfu = hardware.mfu(flops_per_s, name, training.precision.name)
            if mfu is not None:
                found["mfu"] = mfu
        if training.matmul_flops_per_s:
            found["matmul_share"] = flops_per_s / training.matmul_flops_per_s
        utilisation = self._sampler.utilisation()
        if utilisation is not None:
            found["utilisation"] = utilisation
        return found


def _flops_per_sample(training: Training) -> int:
    """FLOPs of a sample, forward and backward: with adapters, less what frozen weights spare."""
    model_config = training.task.model_config
    flops = training_flops_per_sample(model_config)
    if not training.config.train.freeze and not training.config.lora.rank:
        return flops
    weights = []
    # from a model on the meta device: this rank may hold a stage of the real one, cut by tp
    for name, weight in build_meta(training.config, training.task).named_parameters():
        weights.append((name, weight.shape, weight.requires_grad))
        if is_adapter(name):  # forward, and backward for both of its operands
            flops += 3 * 2 * model_config.sequence_length * weight.numel()
    return flops - frozen_flops_per_sample(model_config, weights)
