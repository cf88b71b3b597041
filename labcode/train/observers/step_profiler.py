"""Recording chosen steps of a run; `measure.profile` says what the recording says.

    python -m labcode.train gpt_tiny --profile.steps 10:13

Each rank of `profile.ranks` writes one trace, OUT/profile/HOST_RANK.pt.trace.json.gz: TensorBoard's
profiler tab finds it by that name, Perfetto (ui.perfetto.dev) and chrome://tracing open the file.
"""

import contextlib
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from labcode.config import ProfileConfig
from labcode.measure.memory_marks import MemoryMarks
from labcode.measure.ranges import StepRanges, marked
from labcode.perf.chrome_trace import FOLDER
from labcode.train.observer import Observer


class StepProfiler(Observer):
    """Records the steps that a config names, on the ranks that it names.

    Args:
        settings: Which steps, which ranks, and what of them.
        rank: Rank of this process.
        device: What it computes on.
        ranges: The named parts of a step; they are marked while the profiler runs.
        marks: What says which memory is for what, for `profile.memory`; None: nobody.
        out: The folder of the run; None records nothing.

    Raises:
        ValueError: profile.nvtx without a GPU.

    Held by: tests/ranks/test_step_profiler.py
    """

    def __init__(
        self,
        settings: ProfileConfig,
        rank: int,
        device: torch.device,
        ranges: StepRanges,
        marks: MemoryMarks | None,
        out: Path | None,
    ) -> None:
        self._settings = settings
        self._device = device
        self._ranges = ranges
        self._marks = marks if settings.memory else None
        self._path: Path | None = None
        if out and rank in settings.ranks:
            self._path = out / FOLDER / f"{socket.gethostname()}_{rank}.pt.trace.json.gz"
        self._recorder: profile | NsysRange | None = None
        self._steps = settings.recorded
        warmup = 0 if settings.nvtx else settings.warmup
        first = max(1, self._steps[0] - warmup) if self._steps else 1
        self._watched = range(first, self._steps[-1] + 1) if self._steps else self._steps
        if settings.nvtx and device.type != "cuda":
            raise ValueError(
                f"profile.nvtx is for Nsight Systems, which looks at GPUs, and this run is on "
                f"{device.type}: leave it out, and PyTorch's profiler records the steps"
            )

    @contextlib.contextmanager
    def during(self, number: int) -> Iterator[None]:
        """Around one step of the run; `number` is that of the metrics."""
        if self._path is None or number not in self._watched:
            yield
            return
        if self._recorder is None:
            self._recorder = self._begin(number)
        marking = self._marks.watch() if self._marks else contextlib.nullcontext()
        # TensorBoard knows steps by this name
        with marked(f"ProfilerStep#{number}", self._device.type == "cuda"), marking:
            yield
        self._recorder.step()
        if number == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Stop recording; what was recorded so far is written, if a run ends before its time."""
        recorder = self._recorder
        self._recorder = None
        self._ranges.marked = False
        if recorder is not None:
            recorder.stop()
        self._path = None

    def _begin(self, number: int) -> "profile | NsysRange":
        """Start the recorder; that of PyTorch only warms up until the first step that counts."""
        self._ranges.marked = True
        if self._settings.nvtx:
            return NsysRange()
        warmup = max(0, self._steps[0] - number)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with warnings.catch_warnings():
            # there is no step before the first, and none before a resumed one
            warnings.filterwarnings("ignore", "Profiler won't be using warmup")
            active = self._steps[-1] + 1 - number - warmup
            plan = schedule(wait=0, warmup=warmup, active=active, repeat=1)
        recorder = profile(
            activities=activities,
            schedule=plan,
            on_trace_ready=self._write,
            profile_memory=self._settings.memory,
        )
        recorder.record_steps = False  # it would count its own steps, and time what is between them
        recorder.start()
        return recorder

    def _write(self, recorded: profile) -> None:
        """Write the trace; who looks for it finds it whole or not at all."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_name(f".{self._path.name}")
        recorded.export_chrome_trace(str(unfinished))
        os.replace(unfinished, self._path)


class NsysRange:
    """In place of a profiler: Nsight Systems records from here to `stop`.

    It must have started the run, with `--capture-range=cudaProfilerApi`.
    """

    def __init__(self) -> None:
        torch.cuda.profiler.start()

    def step(self) -> None:
        """Nothing is to do between two steps."""

    def stop(self) -> None:
        """Nsight Systems writes what it has recorded."""
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
