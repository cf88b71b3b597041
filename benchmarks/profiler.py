"""What it costs to know where the time goes: named ranges, and recorded steps.

    python benchmarks/profiler.py [--rounds 9] [--steps 10]

First the seconds of one empty `StepRanges` block: as the loop always has it, marked for a profiler
that does not record, and marked while one records. Then steps of `gpt_tiny` (forward, backward,
fused AdamW) on one thread, in turns without and with a profiler, as `--profile.steps` records them:

    off     ranges only
    on      operations and ranges
    memory  allocations, and marks that say what they are for, too

The ratio is the median over the rounds of the time with / without, within a round. Starting the
profiler and writing the file are not in it: they are told beside it, for all steps of a round.
"""

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine, options, outer_quartiles, taking_turns, write
from torch.profiler import ProfilerActivity, profile, record_function

from labcode import recipes
from labcode.config import GPTConfig
from labcode.measure.memory_marks import MemoryMarks
from labcode.measure.ranges import StepRanges
from labcode.models import gpt, layers
from labcode.train.optim import make_optimizer

RESULT = Path(__file__).parent / "results" / "profiler_cpu.json"
BLOCKS = 20_000
VOCABULARY = 84
VARIANTS = ("off", "on", "memory")


def range_ns(marked: bool, recording: bool) -> float:
    """Nanoseconds of one empty block."""
    ranges = StepRanges()
    ranges.marked = marked
    recorder = profile(activities=[ProfilerActivity.CPU])
    with recorder if recording else contextlib.nullcontext():
        started = time.perf_counter()
        for _ in range(BLOCKS):
            with ranges("forward"):
                pass
        seconds = time.perf_counter() - started
    return seconds / BLOCKS * 1e9


class Training:
    """Steps of `gpt_tiny` on random tokens."""

    def __init__(self) -> None:
        config = recipes.gpt_tiny()
        assert isinstance(config.model, GPTConfig)
        model_config = dataclasses.replace(config.model, vocab_size=VOCABULARY)
        length = model_config.context_length
        tokens = torch.randint(VOCABULARY, (config.train.global_batch, length + 1))
        self.inputs = tokens[:, :-1]
        self.targets = tokens[:, 1:]
        self.model = layers.initialize(gpt.GPT(model_config), 0)
        self.optimizer = make_optimizer(self.model.parameters(), config.optim)
        self.marks = MemoryMarks(self.model.parameters(), self.optimizer)
        self.ranges = StepRanges()

    def step(self) -> None:
        """Forward, backward, update."""
        with self.ranges("forward"):
            loss = gpt.loss(self.model(self.inputs), self.targets)
        with self.ranges("backward"):
            loss.backward()
        with self.ranges("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.ranges.end_step()

    @contextlib.contextmanager
    def recorded(self, variant: str) -> Iterator[Callable[[], None]]:
        """A profiler of this kind runs in the block; what makes a step in it."""
        self.ranges.marked = variant != "off"
        marking = self.marks.watch if variant == "memory" else contextlib.nullcontext

        def step() -> None:
            with record_function("ProfilerStep#1"), marking():
                self.step()

        if variant == "off":
            yield self.step
            return
        recorder = profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=variant == "memory",
        )
        with recorder:
            yield step
        with tempfile.TemporaryDirectory() as folder:
            recorder.export_chrome_trace(str(Path(folder) / "trace.json.gz"))


def measure(rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """{variant: (seconds of a step, seconds of start and file) of each round}."""
    torch.set_num_threads(1)
    training = Training()

    def run(variant: str) -> tuple[float, float]:
        begun = time.perf_counter()
        with training.recorded(variant) as step:
            step()  # what a profiler does once, it does here
            started = time.perf_counter()
            for _ in range(steps):
                step()
            seconds = time.perf_counter() - started
        return seconds / steps, time.perf_counter() - begun - seconds

    for variant in VARIANTS:
        run(variant)  # warms up
    return taking_turns({variant: variant for variant in VARIANTS}, rounds, run)


def main() -> None:
    """Measure, print, write."""
    asked = options(__doc__, rounds=9, steps=10).parse_args()
    ranges: dict[str, float] = {}
    for name, marked, recording in (
        ("as the loop has it", False, False),
        ("marked, nothing records", True, False),
        ("marked, recorded", True, True),
    ):
        ranges[name] = statistics.median(range_ns(marked, recording) for _ in range(5))
        print(f"a range, {name}: {ranges[name]:,.0f} ns")
    found = measure(asked.rounds, asked.steps)
    variants: dict[str, Any] = {}
    print("\n| profiler | ms a step, median | with / without | quartiles | start, file, ms |")
    print("|---|---:|---:|---:|---:|")
    for variant, kept in found.items():
        ratios = []
        for (with_s, _), (without_s, _) in zip(kept, found["off"]):
            ratios.append(with_s / without_s)
        step_ms = statistics.median(step_s for step_s, _ in kept) * 1e3
        rest_ms = statistics.median(rest_s for _, rest_s in kept) * 1e3
        low, high = outer_quartiles(ratios)
        ratio = statistics.median(ratios)
        print(
            f"| {variant} | {step_ms:.1f} | {ratio:.2f} | {low:.2f} to {high:.2f} | {rest_ms:.0f} |"
        )
        variants[variant] = {"step_ms": step_ms, "ratio": ratio, "quartiles": [low, high]}
        variants[variant]["rest_ms"] = rest_ms
    record = machine() | {"rounds": asked.rounds, "steps": asked.steps}
    write(RESULT, record | {"range_ns": ranges, "profilers": variants})


if __name__ == "__main__":
    main()
