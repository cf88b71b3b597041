"""Our loader against a plain loop, a DataLoader over single samples, and DALI: who waits how long.

    python benchmarks/loader.py [--rounds 7] [--steps 12] [--megabytes 400] [--compute-ms 60]

Parts of 90 x 180 grid points are cut from a generated file of 0.5 degrees that is not held in
memory, 8 a step. Each contestant reads the same steps, and between two steps the process computes
for a while (matrix products on one thread), as a training does. What counts is the time of a step:
reading and computing one after another is their sum, reading ahead at best the longer of the two.

    plain loop          dataset[indices] in the loop
    labcode, N          `Loader` with N workers, each of which reads whole steps
    DataLoader, N       torch's DataLoader as it is mostly used: workers read single samples, and
                        stack those of a batch
    DALI, N             `Loader` with DALI's pipeline and N threads, where it is installed

The file is written once with a chunk for each part, and once with 24 times in a chunk.
"""

import gc
import importlib.util
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine, options, outer_quartiles, taking_turns, write
from torch.utils.data import DataLoader, Dataset

from labcode.config import LoaderConfig, WeatherData
from labcode.data import weather
from labcode.data.generate import generate
from labcode.data.loader import Loader
from labcode.data.sampler import Batches

RESULT = Path(__file__).parent / "results" / "loader_cpu.json"
CROP = (90, 180)
BATCH = 8
WORKERS = (1, 2, 4)
CHUNKS = {"1 time x 90 x 180": None, "24 times x 360 x 720": (24, 360, 720)}
HEAD = (
    "| chunks | contestant | ms per step, median | quartiles | of it waiting for data "
    "| plain loop / this |\n|---|---|---:|---:|---:|---:|"
)

Contestant = Callable[[], Iterator[Any]]


class _Single(Dataset):
    """One sample at a time, as a DataLoader asks for them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(index)]


def plain(dataset: Any, order: Batches) -> Iterator[Any]:
    """Read in the loop."""
    for step in itertools.count():
        yield dataset[order.indices(step)]


def ours(dataset: Any, order: Batches, config: LoaderConfig) -> Iterator[Any]:
    """Our loader."""
    with Loader(dataset, order, 1, config) as loader:
        for step in itertools.count():
            yield loader.take(step)


def theirs(dataset: Any, order: Batches, workers: int) -> Iterator[Any]:
    """torch's, over single samples; workers are forked from a server, as ours are."""
    steps = [order.indices(step).tolist() for step in range(200)]
    yield from DataLoader(
        _Single(dataset),
        batch_sampler=steps,
        num_workers=workers,
        multiprocessing_context="forkserver",
    )


def contestants(dataset: Any, order: Batches) -> dict[str, Contestant]:
    """{name: what begins to read}."""
    found: dict[str, Contestant] = {"plain loop": lambda: plain(dataset, order)}
    for count in WORKERS:
        config = LoaderConfig(workers=count)
        found[f"labcode, {count}"] = lambda config=config: ours(dataset, order, config)
        found[f"DataLoader, {count}"] = lambda count=count: theirs(dataset, order, count)
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"):
        for count in WORKERS:
            config = LoaderConfig(workers=count, backend="dali")
            found[f"DALI, {count}"] = lambda config=config: ours(dataset, order, config)
    return found


def compute(seconds: float) -> None:
    """Matrix products for so long."""
    a = torch.ones(256, 256)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        a = (a @ a).clamp(-1, 1)


def run(begin: Contestant, steps: int, compute_s: float) -> tuple[float, float]:
    """(Seconds of a step, seconds of it that were waited), after two steps to get started."""
    batches = begin()
    for _ in range(2):
        next(batches)
    waited = 0.0
    started = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - asked
        compute(compute_s)
    seconds = time.perf_counter() - started
    batches.close()  # pyright: ignore[reportAttributeAccessIssue]
    del batches
    gc.collect()  # torch ends its workers when nobody holds them
    return seconds / steps, waited / steps


def measure(layout: str, path: Path, settings: Any) -> list[dict[str, Any]]:
    """The rows of one file; contestants take turns."""
    config = WeatherData(path=str(path), crop=CROP, sun=True, roll=True)
    dataset = weather.load(config).train
    order = Batches(len(dataset), BATCH)
    everyone = contestants(dataset, order)
    compute_s = settings.compute_ms / 1e3
    found = taking_turns(
        everyone, settings.rounds, lambda epoch: run(epoch, settings.steps, compute_s)
    )
    rows = []
    plain_s = [step_s for step_s, _ in found["plain loop"]]
    for name, values in found.items():
        step_s = [step for step, _ in values]
        waited_s = [waited for _, waited in values]
        speedups = [one / other for one, other in zip(plain_s, step_s)]
        row = {
            "chunks": layout,
            "contestant": name,
            "median_ms": round(statistics.median(step_s) * 1e3, 1),
            "quartiles_ms": outer_quartiles([seconds * 1e3 for seconds in step_s]),
            "waited_ms": round(statistics.median(waited_s) * 1e3, 1),
            "speedup": round(statistics.median(speedups), 2),
        }
        low, high = row["quartiles_ms"]
        times = f"{row['median_ms']} | {low:.0f} to {high:.0f} | {row['waited_ms']}"
        print(f"| {layout} | {name} | {times} | {row['speedup']} |", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Measure and write the record."""
    defaults = {"rounds": 7, "steps": 12, "megabytes": 400, "compute_ms": 60}
    settings = options(__doc__, **defaults).parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(HEAD)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (layout, chunks) in enumerate(CHUNKS.items()):
            path = Path(folder) / f"{number}.zarr"
            generate(path, settings.megabytes / 1e3, chunks=chunks, progress=False)
            rows += measure(layout, path, settings)
    record = machine() | {"load_before": round(load, 2), "settings": vars(settings), "rows": rows}
    write(RESULT, record)


if __name__ == "__main__":
    main()
