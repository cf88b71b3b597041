"""What it costs a training to look at its device: one look, and steps with it and without.

    python benchmarks/device_samples.py [--rounds 15 --steps 40]

A GPT as small as gpt_tiny takes steps in turns without a sampling thread, with one look a second,
which is the default, and with a hundred a second. The ratio is the median over the rounds. No
target: on shared cores one round differs from the next by more. About a minute.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
from side_by_side import machine, options, outer_quartiles, taking_turns, write

from labcode import recipes
from labcode.comm.grid import Grid
from labcode.measure.device_samples import DeviceSampler, meter_for
from labcode.measure.metrics import MetricsWriter
from labcode.runtime import bootstrap, combinations
from labcode.runtime.bootstrap import Place, World
from labcode.train.build import build
from labcode.train.step import TrainStep
from labcode.train.tasks import make_task

RESULT = Path(__file__).parent / "results"
PERIODS_S = (0.0, 1.0, 0.01)
LOOKS = 200


def look_s(world: World, folder: Path) -> float:
    """Median seconds of reading, and of writing the row."""
    writer = MetricsWriter(folder)
    sampler = DeviceSampler(meter_for(world.device), 1.0, lambda: 1, writer.write_device)
    seconds = []
    for _ in range(LOOKS):
        started = time.perf_counter()
        sampler.take()
        seconds.append(time.perf_counter() - started)
    writer.close()
    return statistics.median(seconds)


def round_s(step: TrainStep, period_s: float, steps: int, scratch: Path) -> float:
    """Seconds of a step while the device is sampled."""
    writer = MetricsWriter(Path(tempfile.mkdtemp(dir=scratch)))
    meter = meter_for(step.training.world.device)
    started = time.perf_counter()
    with DeviceSampler(meter, period_s, lambda: 1, writer.write_device):
        for _ in range(steps):
            step()
    seconds = time.perf_counter() - started
    writer.close()
    return seconds / steps


def main() -> None:
    given = options(__doc__, threads=1, rounds=15, steps=40).parse_args()
    torch.set_num_threads(given.threads)
    world = bootstrap.start(Place())
    config = recipes.with_changes(recipes.gpt_tiny(), {"train.steps": 10**6})
    resolved = combinations.resolve(config, 1)
    step = TrainStep(build(resolved, world, Grid.create(resolved.shape), make_task(config)))
    step()
    with tempfile.TemporaryDirectory() as scratch:
        cost_s = look_s(world, Path(scratch))
        found = taking_turns(
            {period_s: period_s for period_s in PERIODS_S},
            given.rounds,
            lambda period_s: round_s(step, period_s, given.steps, Path(scratch)),
        )
    bootstrap.stop()
    print(f"one look, with its row: {cost_s * 1e6:.0f} microseconds\n")
    print("| a look each | ms per step, median | with / without, median | quartiles |")
    print("|---|---:|---:|---:|")
    rows = []
    for period_s, seconds in found.items():
        ratios = [with_it / without for with_it, without in zip(seconds, found[0.0], strict=True)]
        median_ms = statistics.median(seconds) * 1e3
        ratio = statistics.median(ratios)
        title = f"{period_s:g} s" if period_s else "never"
        shown = "" if period_s == 0 else f"{ratio:.3f} | {ratio_range(ratios)}"
        print(f"| {title} | {median_ms:.2f} | {shown or '|'} |")
        rows.append({"period_s": period_s, "ms": round(median_ms, 2), "ratio": round(ratio, 3)})
    record = machine() | {"look_us": round(cost_s * 1e6, 1), "rows": rows}
    write(RESULT / f"device_samples_{world.device.type}.json", record)


def ratio_range(ratios: list[float]) -> str:
    first, third = outer_quartiles(ratios)
    return f"{first:.3f} to {third:.3f}"


if __name__ == "__main__":
    main()
