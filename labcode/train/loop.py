"""The training loop: the same for every model and every grid.

One optimizer step reads `global_batch` samples, whatever the number of ranks: each dp rank takes its share, in
micro-batches whose gradients add up before they are averaged over the ranks once.
"""

import contextlib
import io
import math
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from labcode import hardware
from labcode.comm.bootstrap import World
from labcode.comm.grid import Grid
from labcode.config import Config
from labcode.data.sampler import Batches, validation_batches
from labcode.files import write_atomically
from labcode.models.layers import initialize
from labcode.models.parallelize import parallelize
from labcode.perf.flops import training_flops_per_sample
from labcode.train.metrics import MetricsWriter
from labcode.train.optim import clip_gradients, learning_rate, make_optimizer
from labcode.train.tasks import Task


class Diverged(ArithmeticError):
    """The loss or its gradient is not a number any more."""


class Trainer:
    """One rank's part of a run: `fit()` does it all, the other methods are its steps.

    Args:
        config: The run, checked against the number of ranks.
        world: This process, its device and backend.
        grid: The process groups.
        task: The model to build and its data.
        out: Existing folder; rank 0 writes metrics, weights and samples into it. None writes nothing.
    """

    def __init__(self, config: Config, world: World, grid: Grid, task: Task, out: Path | None):
        self.config, self.world, self.grid, self.task, self.out = config, world, grid, task, out
        self.dtype = pick_dtype(config.train.dtype, world.device)
        model = task.build()
        initialize(model, config.train.seed)
        stored = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.model = parallelize(
            model.to(world.device, stored),
            grid,
            data_parallel=config.train.data_parallel,
            bucket_mb=config.train.bucket_mb,
        )
        self.optimizer = make_optimizer(self.model, config.optim)
        share = {"dp_size": grid.size("dp"), "dp_coord": grid.coord("dp"), "seed": config.train.seed}
        self.batches = Batches(len(task.train), config.train.global_batch, **share)
        self.accumulation = config.train.accumulation(grid.size("dp"))
        self.steps_done = 0
        self.history: list[dict[str, float]] = []
        self.writer = MetricsWriter(out) if out and world.rank == 0 else None

    def fit(self) -> list[dict[str, float]]:
        """Train to the end; returns the rows of metrics that were logged.

        Raises:
            Diverged: The gradient norm is not finite; on every rank at the same step.
        """
        steps, main = self.config.train.steps, self.world.rank == 0
        every = 0.3 if sys.stderr.isatty() else 10.0  # in a log file a bar that moves often is noise
        bar = tqdm(total=steps, desc=self.config.name, unit="step", disable=not main, mininterval=every, dynamic_ncols=True)
        since, started = 0, time.perf_counter()
        with bar:
            while self.steps_done < steps:
                loss, grad_norm, lr = self.step()
                since += 1
                if self._due(self.config.train.log_every):
                    row = self._row(loss, grad_norm, lr, (time.perf_counter() - started) / since)
                    self._log(row)
                    bar.set_postfix(loss=f"{row['loss']:.3f}", refresh=False)
                    since, started = 0, time.perf_counter()
                if self._due(self.config.train.eval_every):
                    before = time.perf_counter()
                    self._log({"step": self.steps_done, "val_loss": self.validate()})
                    started += time.perf_counter() - before  # validation is no training time
                bar.update()
        self._finish()
        return self.history

    def step(self) -> tuple[torch.Tensor, float, float]:
        """One optimizer step; returns (this rank's mean loss, gradient norm before clipping, learning rate)."""
        lr = learning_rate(self.steps_done, self.config.train.steps, self.config.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        micro_batches = np.array_split(self.batches.next_indices(), self.accumulation)
        for number, indices in enumerate(micro_batches, 1):
            last = number == self.accumulation
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = self._loss(self.task.train, indices) / self.accumulation
                loss.backward()
            total += loss.detach()
        self.model.finish_gradient_sync()
        grad_norm = clip_gradients(self.model.parameters(), self.config.optim.clip_norm)
        if not math.isfinite(grad_norm):
            raise Diverged(f"the gradient norm is {grad_norm}: lower optim.lr, or look at the data")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        return total, grad_norm, lr

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the first `eval_batches` global batches of held-out data, the same for every grid."""
        self.model.eval()
        data, batch = self.task.val, self.config.train.global_batch
        share = {"dp_size": self.grid.size("dp"), "dp_coord": self.grid.coord("dp")}
        sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)  # of losses, of samples
        for mine in validation_batches(len(data), batch, **share, max_batches=self.config.train.eval_batches):
            for indices in np.array_split(mine, min(self.accumulation, max(1, len(mine)))):
                if len(indices):  # a rank's part of the last batch may be empty
                    mean = self._loss(data, indices).double()
                    sums += torch.stack([mean * len(indices), torch.full_like(mean, len(indices))])
        dist.all_reduce(sums, group=self.grid.group("dp"))
        self.model.train()
        return (sums[0] / sums[1]).item()

    def close(self) -> None:
        """Close the metrics files; what was written stays."""
        if self.writer:
            self.writer.close()

    def _loss(self, data, indices):
        inputs, targets = (self._to_device(x) for x in data[indices])
        with torch.autocast(self.world.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            return self.task.loss(self.model, inputs, targets)

    def _to_device(self, x):
        wide = torch.float64 if self.dtype == torch.float64 else None
        return x.to(self.world.device, wide if x.is_floating_point() else None, non_blocking=True)

    def _due(self, every):
        last = self.steps_done == self.config.train.steps
        return last or (every and self.steps_done % every == 0)

    def _row(self, loss, grad_norm, lr, step_s):
        mean = loss.clone()
        dist.all_reduce(mean, group=self.grid.group("dp"))
        samples_per_s = self.config.train.global_batch / step_s
        tokens_per_s = samples_per_s * self.task.model_config.sequence_length
        row = {
            "step": self.steps_done,
            "loss": mean.item() / self.grid.size("dp"),
            "grad_norm": grad_norm,
            "lr": lr,
            "step_s": step_s,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_rank": tokens_per_s / self.world.world_size,
            "memory_bytes": peak_memory_bytes(self.world.device),
        }
        mfu = self._mfu(samples_per_s / self.world.world_size)
        return row if mfu is None else row | {"mfu": mfu}

    def _mfu(self, samples_per_s_per_rank):
        if self.world.device.type != "cuda":
            return None
        flops_per_s = samples_per_s_per_rank * training_flops_per_sample(self.task.model_config)
        return hardware.mfu(flops_per_s, torch.cuda.get_device_name(), str(self.dtype).removeprefix("torch."))

    def _log(self, row):
        self.history.append(row)
        if self.writer:
            self.writer.write(row)

    def _finish(self):
        if not self.writer:
            return
        self.close()
        module = self.model.module.eval()
        weights = io.BytesIO()
        torch.save(module.state_dict(), weights)
        write_atomically(self.out / "weights.pt", weights.getbuffer())
        shown = self.task.finish(module, self.config.train.sample_tokens, self.config.train.seed)
        write_atomically(self.out / "result.txt", (shown + "\n").encode())
        print(f"{shown}\n\nmetrics, weights and TensorBoard files: {self.out}", flush=True)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products: "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes in use so far: of the device's allocator on a GPU, resident memory of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
