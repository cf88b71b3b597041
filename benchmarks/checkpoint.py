"""Checkpoints against the disk itself, and what a save in the background leaves of the stall.

    python benchmarks/checkpoint.py [--rounds 7] [--hidden 768] [--layers 11]

Two ranks hold the shards of one GPT (ZeRO-3) with AdamW: about 1 GB of weights and moments in
float32. In each round both ranks, at the same time,

    disk    write files of the same bytes one after another and bring them to the disk; read them
    save    write a checkpoint while training waits
    begin   copy the run, and write the checkpoint in the background; training continues
    load    read the checkpoint into the run, with its checksums compared

The slowest rank's time counts. The stall of a save in the background is the time of `begin` and of
the step that gives the checkpoint its name; the time of the steps between is told beside it, since
the thread that writes takes its share of the cores and of the disk. Files that were just written
are read from memory, by the checkpoint and by the disk alike.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine, options, outer_quartiles, slowest_rank, write

from course.pool.ranks import Ranks
from labcode import recipes
from labcode.config import Config, GPTConfig
from labcode.runtime import combinations

RESULT = Path(__file__).parent / "results" / "checkpoint_cpu.json"
RANKS = 2
BLOCK = 16 * 1024 * 1024


def write_plainly(path: Path, num_bytes: int) -> None:
    """A file of zeros' bytes, as fast as the disk takes it."""
    import os

    block = os.urandom(BLOCK)
    with open(path, "wb") as file:
        left = num_bytes
        while left > 0:
            left -= file.write(block[:left])
        file.flush()
        os.fsync(file.fileno())


def read_plainly(path: Path) -> None:
    """All of a file, into one block of memory."""
    block = bytearray(BLOCK)
    with open(path, "rb") as file:
        while file.readinto(block):
            pass


def measure(config: Config, folder: Path, rounds: int) -> tuple[dict[str, list[float]], int]:
    """({what: seconds of each round}, bytes of a checkpoint), as this rank sees them."""
    import shutil
    import time

    import torch.distributed as dist

    from labcode.comm.grid import Grid
    from labcode.runtime.bootstrap import Place, World
    from labcode.train.build import build
    from labcode.train.checkpoint.store import Checkpoints
    from labcode.train.step import TrainStep
    from labcode.train.tasks import make_task

    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(Place(rank, size, rank, size), torch.device("cpu"), "gloo")
    resolved = combinations.resolve(config, size)
    grid = Grid.create(resolved.shape)
    training = build(resolved, world, grid, make_task(config))
    step = TrainStep(training)
    checkpoints = Checkpoints(config, grid, folder)
    found: dict[str, list[float]] = {}

    def timed(what: str, work: Any) -> None:
        dist.barrier()
        start = time.perf_counter()
        work()
        found.setdefault(what, []).append(time.perf_counter() - start)

    def finish() -> None:
        """Steps go on until the files are written; then the checkpoint gets its name."""
        writing = checkpoints._writing
        assert writing is not None
        done = torch.tensor(0)
        while not done.item():
            timed("step while it is written", step)
            done = torch.tensor(int(writing.is_done()))
            dist.all_reduce(done, dist.ReduceOp.MIN)
        timed("finish", checkpoints.finish)

    plain = folder / f"plain-{rank}"
    num_bytes = 0
    for number in range(rounds + 1):
        timed("step", step)
        timed("save", lambda: checkpoints.save(training.state))
        newest = checkpoints.newest()
        assert newest is not None
        num_bytes = sum(file.stat().st_size for file in newest.iterdir())
        share = num_bytes // size
        timed("disk writes", lambda share=share: write_plainly(plain, share))
        timed("disk reads", lambda: read_plainly(plain))
        timed("load", lambda: checkpoints.load(training.state, checkpoints.newest()))
        step()
        timed("begin", lambda: checkpoints.begin(training.state))
        finish()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(checkpoints.folder)
        if number == 0:  # the first round meets new memory everywhere
            found.clear()
    return found, num_bytes


def median_of(seconds: list[float]) -> float:
    return statistics.median(seconds)


def main() -> None:
    given = options(__doc__, rounds=7, hidden=768, layers=11).parse_args()
    model = GPTConfig(
        vocab_size=512,
        context_length=16,
        num_layers=given.layers,
        num_heads=12,
        hidden_size=given.hidden,
    )
    changes = {
        "parallel.zero_stage": 3,
        "parallel.data_parallel": "labcode",
        "train.global_batch": 2,
        "train.micro_batch": 1,
        "train.steps": 10_000,
        "train.dtype": "float32",
        "checkpoint.every": 1,
    }
    for name in ("num_layers", "num_heads", "hidden_size", "context_length"):
        changes[f"model.{name}"] = getattr(model, name)
    config = recipes.with_changes(recipes.gpt_tiny(), changes)
    with tempfile.TemporaryDirectory() as folder, Ranks(RANKS, timeout_s=300) as ranks:
        answers = ranks.run(measure, config, Path(folder), given.rounds)
    num_bytes = answers[0][1]
    lengths = {len(seconds) for seconds in answers[0][0].values()}
    slowest = slowest_rank([found for found, _ in answers])
    print(f"{num_bytes / 1e9:.2f} GB in a checkpoint; {min(lengths)} rounds")
    medians = {}
    print("| what | s, median | GB/s |\n|---|---:|---:|")
    for what, seconds in slowest.items():
        medians[what] = round(median_of(seconds), 4)
        speed = num_bytes / medians[what] / 1e9
        shown = f"{speed:.2f}" if what in ("save", "disk writes", "disk reads", "load") else ""
        print(f"| {what} | {medians[what]:.3f} | {shown} |")
    ratios = {
        "disk writes / save": _ratios(slowest["disk writes"], slowest["save"]),
        "disk reads / load": _ratios(slowest["disk reads"], slowest["load"]),
        "stall in the background / save": _ratios(_sums(slowest), slowest["save"]),
    }
    print("\n| ratio | median | quartiles |\n|---|---:|---:|")
    results = []
    for what, values in ratios.items():
        median = round(median_of(values), 3)
        quartiles = outer_quartiles(values)
        results.append({"what": what, "ratio": median, "ratio_quartiles": quartiles})
        print(f"| {what} | {median:.3f} | {quartiles[0]:.3f} to {quartiles[1]:.3f} |")
    record = {
        "machine": machine(),
        "setup": vars(given),
        "checkpoint_bytes": num_bytes,
        "median_s": medians,
        "results": results,
    }
    write(RESULT, record)


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def _sums(slowest: dict[str, list[float]]) -> list[float]:
    return [a + b for a, b in zip(slowest["begin"], slowest["finish"], strict=True)]


if __name__ == "__main__":
    main()
