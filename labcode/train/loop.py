"""The training loop: the same for every model and every grid.

One optimizer step reads `global_batch` samples, whatever the number of ranks: each dp rank takes its share, in
micro-batches whose gradients add up before they are averaged over the ranks once.
"""

import contextlib
import io
import math
import re
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
from labcode.models.parallelize import parallelize
from labcode.perf.flops import training_flops_per_sample
from labcode.train.checkpoint import Checkpoints, RunState, StopSignals
from labcode.train.metrics import MetricsWriter, shown
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
        start: Checkpoint to go on from.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        grid: Grid,
        task: Task,
        out: Path | None,
        start: Path | None = None,
    ):
        self.config, self.world, self.grid, self.task, self.out = config, world, grid, task, out
        self.dtype = pick_dtype(config.train.dtype, world.device)
        with torch.device("meta"):
            model = task.build()
        self.model = parallelize(
            model,
            grid,
            config.parallel,
            seed=config.train.seed,
            device=world.device,
            dtype=torch.float64 if self.dtype == torch.float64 else torch.float32,
        )
        self.optimizer = make_optimizer(self.model, config.optim)
        share = {
            "dp_size": grid.size("dp"),
            "dp_coord": grid.coord("dp"),
            "seed": config.train.seed,
        }
        self.batches = Batches(len(task.train), config.train.global_batch, **share)
        self.accumulation = config.train.accumulation(grid.size("dp"))
        self.state = RunState(self.model, self.optimizer, self.batches, world.device)
        self.checkpoints = Checkpoints(config, grid, out) if out and config.checkpoint.on else None
        if start:
            self.state.load(start)
        self.stopped_by: str | None = None
        self.history: list[dict[str, float]] = []
        self.writer = MetricsWriter(out, self.steps_done) if out and world.rank == 0 else None
        self.terminal = sys.stderr.isatty()  # which gets a bar; a log file gets a line for each row

    @property
    def steps_done(self) -> int:
        """Optimizer steps of the whole run, those before it went on from a checkpoint included."""
        return self.batches.step

    def fit(self) -> list[dict[str, float]]:
        """Train to the end, or until a signal asks to stop (`stopped_by`); returns the rows of metrics that were logged.

        Raises:
            Diverged: The gradient norm is not finite; on every rank at the same step.
        """
        with StopSignals() if self.checkpoints else contextlib.nullcontext() as signals:
            self._train(signals)
        if not self.stopped_by:
            self._finish()
        return self.history

    def _train(self, signals):
        steps, main = self.config.train.steps, self.world.rank == 0
        kind = {
            "total": steps,
            "initial": self.steps_done,
            "desc": self.config.name,
            "unit": "step",
        }
        bar = tqdm(
            **kind, disable=not (main and self.terminal), mininterval=0.3, dynamic_ncols=True
        )
        since, started = 0, time.perf_counter()
        with bar:
            while self.steps_done < steps and not self.stopped_by:
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
                if self.checkpoints:
                    before = time.perf_counter()
                    self.stopped_by = signals.agreed()
                    if self.stopped_by or self._due(self.config.checkpoint.every):
                        self.checkpoints.save(self.state)
                    started += time.perf_counter() - before  # nor is writing checkpoints
                bar.update()

    def step(self) -> tuple[torch.Tensor, float, float]:
        """One optimizer step; returns (this rank's mean loss, gradient norm before clipping, learning rate)."""
        lr = learning_rate(self.steps_done, self.config.train.steps, self.config.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        micro_batches = np.array_split(self.batches.next_indices(), self.accumulation)
        batches = [self._read(self.task.train, indices) for indices in micro_batches]
        total = self.model.forward_backward(batches, self._loss, self._autocast)
        grad_norm = self.model.gradient_norm().item()
        if not math.isfinite(grad_norm):
            raise Diverged(f"the gradient norm is {grad_norm}: lower optim.lr, or look at the data")
        clip_gradients(self.model.parameters(), grad_norm, self.config.optim.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, grad_norm, lr

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the first `eval_batches` global batches of held-out data, the same for every grid."""
        self.model.eval()
        data, batch = self.task.val, self.config.train.global_batch
        share = {"dp_size": self.grid.size("dp"), "dp_coord": self.grid.coord("dp")}
        sums = torch.zeros(
            2, dtype=torch.float64, device=self.world.device
        )  # of losses, of samples
        for mine in validation_batches(
            len(data), batch, **share, max_batches=self.config.train.eval_batches
        ):
            if len(mine):  # a rank's part of the last batch may be empty
                parts = np.array_split(mine, min(self.accumulation, len(mine)))
                losses = self.model.losses(
                    [self._read(data, part) for part in parts], self._loss, self._autocast
                )
                sizes = torch.tensor(
                    [len(part) for part in parts], dtype=torch.float64, device=losses.device
                )
                sums += torch.stack([losses @ sizes, sizes.sum()])
        dist.all_reduce(sums, group=self.grid.group("dp"))
        self.model.train()
        return (sums[0] / sums[1]).item()

    def close(self) -> None:
        """Close the metrics files; what was written stays."""
        if self.writer:
            self.writer.close()

    def _loss(self, output, targets):
        return self.task.loss(self.model.loss, output, targets)

    def _autocast(self):
        return torch.autocast(
            self.world.device.type, self.dtype, enabled=self.dtype == torch.bfloat16
        )

    def _read(self, data, indices):
        return tuple(self._to_device(x) for x in data[indices])

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
        return hardware.mfu(
            flops_per_s, torch.cuda.get_device_name(), str(self.dtype).removeprefix("torch.")
        )

    def _log(self, row):
        self.history.append(row)
        if self.writer:
            self.writer.write(row)
            if not self.terminal:
                print(shown(row, self.config.train.steps), flush=True)

    def _finish(self):
        weights = {}
        for name, tensor in self.model.whole_weights():  # every rank takes part, rank 0 keeps them
            if self.writer:
                weights[name] = tensor.cpu().clone()
        if not self.writer:
            return
        self.close()
        file = io.BytesIO()
        torch.save(weights, file)
        write_atomically(self.out / "weights.pt", file.getbuffer())
        del file
        result = self.task.finish(
            self._whole(weights), self.config.train.sample_tokens, self.config.train.seed
        )
        write_atomically(self.out / "result.txt", (result + "\n").encode())
        print(f"{result}\n\nmetrics, weights and TensorBoard files: {self.out}", flush=True)

    def _whole(self, weights):
        """The model as one process has it; one that was cut may not fit this device, and is put together on the CPU."""
        if self.grid.size("pp", "cp", "tp") == 1:
            return self.model.module.eval()
        with torch.device("meta"):
            whole = self.task.build()
        whole = whole.to_empty(device="cpu").to(next(iter(weights.values())).dtype).eval()
        whole.load_state_dict(weights)
        return whole


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products: "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes in use so far: of the device's allocator on a GPU, resident memory of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path(
        "/proc/self/status"
    )  # on Linux: ru_maxrss counts the process that started this one as well
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB
