"""A recipe at many batches and learning rates, with one command, into one table.

    python -m labcode.run.sweep gpt_tiny --sweep.batch 8,16,32 --sweep.lr 1e-3,3e-3 --seeds 1,2

Each run is a process. `results.jsonl` in the sweep's folder gets a row as soon as one ends, and the
same command begins only the runs that are missing there: after a kill, or with more batches. Other
options are those of `labcode.train`, and hold for all runs.
"""

import hashlib
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tqdm import tqdm

from labcode import recipes
from labcode.config import Config
from labcode.run import sweep_table
from labcode.run.sweep_table import DONE, FAILED, Row
from labcode.runtime import combinations, command
from labcode.runtime.arguments import UsageError
from labcode.runtime.fields import (
    COUNT,
    COUNT_OR_ZERO,
    FRACTION,
    POSITIVE,
    SEED,
    SIZE,
    check_fields,
)
from labcode.runtime.hardware import usable_cores

LOOK_S = 0.05
END_S = 5.0  # how long a run that is broken off may take to end
ROWS = "rows"  # folder of rows that are not yet in the table, and of what the runs have printed
INTERRUPTED = 130
USAGE = """\
usage: python -m labcode.run.sweep RECIPE [--sweep.batch 8,16] [--sweep.lr 1e-3,3e-3]
       [--seeds 1,2] [--section.field value ...]
"""


@dataclass(frozen=True)
class SweepConfig:
    """What a sweep varies, and how it runs."""

    batch: tuple[int, ...] = ()  # samples per optimizer step; none: that of the recipe
    lr: tuple[float, ...] = ()  # learning rates; none: that of the recipe
    # samples that each run sees, whatever its batch: it decides train.steps; None: that decides
    samples: int | None = None
    most_steps: int | None = None  # of a run, which would take more for its samples; None: any
    target: float | None = None  # a run ends when its validation loss is at most this
    warmup: float | None = None  # of the steps of each run; None: optim.warmup_steps
    end_lr: float | None = None  # optim.min_lr as a part of the rate; None: as in the recipe
    evals: int = 0  # validations of each run, at even distances; 0: as train.eval_every says
    at_once: int | None = None  # runs at the same time; None: one for each core, or one on a GPU
    limit_s: float | None = None  # a run that takes longer is ended, and has failed
    retry: bool = False  # begin again what has failed
    out: str | None = None  # folder of the table; None: runs/sweep-NAME

    def __post_init__(self) -> None:
        ranges = {
            "batch": SIZE,
            "lr": POSITIVE,
            "samples": COUNT,
            "most_steps": COUNT,
            "target": POSITIVE,
            "end_lr": POSITIVE,
            "warmup": FRACTION,
            "evals": COUNT_OR_ZERO,
            "at_once": COUNT,
            "limit_s": POSITIVE,
        }
        check_fields(self, "sweep", ranges)
        if self.end_lr is not None and self.end_lr > 1:
            raise ValueError(f"sweep.end_lr={self.end_lr}: give a part of the rate, at most 1")
        cores = len(usable_cores())
        if self.at_once is not None and self.at_once > cores:
            raise ValueError(
                f"sweep.at_once={self.at_once} runs on {cores} cores would only wait for each "
                f"other: give at most {cores}"
            )


@dataclass(frozen=True)
class Sweep:
    """All that a command line may say beside the recipe's own fields."""

    seeds: tuple[int, ...] = ()  # of each run; none: train.seed
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        check_fields(self, "", {"seeds": SEED})


@dataclass(frozen=True)
class Planned:
    """One run to be done.

    Args:
        config: The run.
        named: What its row says of it beforehand.
        target: Validation loss at which it ends; None: it does all its steps.
    """

    config: Config
    named: dict[str, Any]
    target: float | None = None

    @property
    def run(self) -> str:
        """The number of its config."""
        return self.named["run"]


def plan(base: Config, sweep: Sweep, at_once: int = 1) -> list[Planned]:
    """The runs of a sweep, smallest batch first.

    Raises:
        ValueError: A run that cannot be.

    Held by: tests/ranks/test_sweep.py::test_runs_differ_in_what_is_swept_alone
    """
    asked = sweep.sweep
    planned = []
    for batch in asked.batch or (base.train.global_batch,):
        for lr in asked.lr or (base.optim.lr,):
            for seed in sweep.seeds or (base.train.seed,):
                config = recipes.with_changes(base, _changes(base, asked, batch, lr, seed))
                combinations.check(config, 1)
                named = {
                    "run": number_of(config, asked.target),
                    "recipe": base.name,
                    "batch": batch,
                    "lr": lr,
                    "seed": seed,
                    "at_once": at_once,
                }
                planned.append(Planned(config, named, asked.target))
    return planned


def _changes(
    base: Config, asked: SweepConfig, batch: int, lr: float, seed: int
) -> dict[str, object]:
    """The fields of one run that differ from the recipe."""
    steps = base.train.steps
    if asked.samples is not None:
        steps = max(1, round(asked.samples / batch))
    if asked.most_steps is not None:
        steps = min(steps, asked.most_steps)
    # the loss of every run is that of the same held-out samples, in batches of its own size
    held_out = base.train.eval_batches * base.train.global_batch
    end = base.optim.min_lr / base.optim.lr if asked.end_lr is None else asked.end_lr
    changes: dict[str, object] = {
        "train.global_batch": batch,
        "train.steps": steps,
        "train.seed": seed,
        "train.sample_tokens": 0,
        "train.eval_batches": max(1, math.ceil(held_out / batch)),
        "optim.lr": lr,
        "optim.min_lr": lr * min(1.0, end),
    }
    if asked.warmup is not None:
        changes["optim.warmup_steps"] = round(asked.warmup * steps)
    if asked.evals:
        changes["train.eval_every"] = max(1, steps // asked.evals)
    return changes


def number_of(config: Config, target: float | None = None) -> str:
    """12 hexadecimal digits that say which run it is; where it writes does not count."""
    found = asdict(config)
    found["target"] = target
    found["train"].pop("out")
    found["train"].pop("overwrite")
    text = json.dumps(found, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run(base: Config, sweep: Sweep, *, show: bool = True) -> list[Row]:
    """Do the runs of a sweep that are not in its table yet.

    A run that diverges or fails is a row that says why, and the others go on.

    Args:
        base: The recipe, with what all runs share.
        sweep: What differs.
        show: A progress bar over the runs.

    Returns:
        The rows of this sweep, in the order of `plan`.

    Raises:
        ValueError: A run that cannot be, or another sweep at work in the folder.
        OSError: The folder cannot be written.
    """
    at_once = sweep.sweep.at_once or _default_at_once()
    planned = plan(base, sweep, at_once)
    folder = Path(sweep.sweep.out or f"runs/sweep-{base.name}")
    (folder / ROWS).mkdir(parents=True, exist_ok=True)
    from labcode.run.run_lock import RunLock  # imports torch, for which an error need not wait

    lock = RunLock(folder)
    lock.take()
    try:
        table = Table(folder)
        missing = []
        for one in planned:
            row = table.rows.get(one.run)
            again = row is not None and row.status == FAILED and sweep.sweep.retry
            if row is None or again:
                missing.append(one)
        with tqdm(
            total=len(planned),
            initial=len(planned) - len(missing),
            desc=f"sweep of {base.name}",
            unit="run",
            disable=not show,
            dynamic_ncols=True,
        ) as bar:
            _do(missing, table, at_once, sweep.sweep.limit_s, bar)
    finally:
        lock.release()
    return [table.rows[one.run] for one in planned]


class Table:
    """The rows of a folder, each in the file as soon as it is there.

    Args:
        folder: Folder with `results.jsonl`, or without.

    Raises:
        ValueError: That file holds something else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[str, Row] = {}
        if (folder / sweep_table.TABLE).exists():
            self.rows = {row.run: row for row in sweep_table.read(folder)}
        # of runs that ended when nobody was there to take their rows
        for path in sorted((folder / ROWS).glob("*.json")):
            self.take(path)

    def path(self, run: str) -> Path:
        """Where a run leaves its row."""
        return self.folder / ROWS / f"{run}.json"

    def take(self, path: Path) -> None:
        """Take over the row that a run has left."""
        self.add(sweep_table.from_json(path.read_text(encoding="utf-8")))
        path.unlink()

    def add(self, row: Row) -> None:
        """Add a row, or replace that of the same run, and write the table."""
        self.rows[row.run] = row
        sweep_table.write(self.folder, self.rows.values())


@dataclass
class _Working:
    """A run under way."""

    planned: Planned
    process: BaseProcess
    started: float


def _do(
    missing: Sequence[Planned], table: Table, at_once: int, limit_s: float | None, bar: tqdm
) -> None:
    """Do some runs, a few at a time, and add their rows; after an error none is left at work."""
    waiting = list(missing)
    working: list[_Working] = []
    start = _starter(table, max(1, len(usable_cores()) // at_once))
    try:
        while waiting or working:
            while waiting and len(working) < at_once:
                working.append(start(waiting.pop(0)))
            for one in list(working):
                if _has_ended(one, limit_s):
                    working.remove(one)
                    _keep(one, table, limit_s)
                    bar.update()
            time.sleep(LOOK_S)
    finally:
        for one in working:
            _end(one.process)


def _starter(table: Table, threads: int) -> Callable[[Planned], _Working]:
    """What starts a run, in a process that is copied from one that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    assert isinstance(context, ForkServerContext)
    context.set_forkserver_preload(["labcode.run.sweep_run"])

    def start(planned: Planned) -> _Working:
        process = context.Process(
            target=_run,
            args=(planned, table.path(planned.run), threads, os.getpid()),
            name=planned.run,
        )
        process.start()
        return _Working(planned, process, time.monotonic())

    return start


def _run(planned: Planned, path: Path, threads: int, starter: int) -> None:
    """One run; only here is torch imported."""
    from labcode.run import sweep_run

    sweep_run.run(planned.config, planned.named, planned.target, path, threads, starter)


def _has_ended(one: _Working, limit_s: float | None) -> bool:
    """Whether a run is over, also because its time is."""
    if not one.process.is_alive():
        return True
    if limit_s is None or time.monotonic() - one.started < limit_s:
        return False
    _end(one.process)
    return True


def _end(process: BaseProcess) -> None:
    process.terminate()
    process.join(END_S)
    if process.is_alive():
        process.kill()
        process.join()


def _keep(one: _Working, table: Table, limit_s: float | None) -> None:
    """Add the row of a run that has ended; one without a row has failed."""
    one.process.join()
    path = table.path(one.planned.run)
    if path.exists():
        table.take(path)
        return
    code = one.process.exitcode
    if limit_s is not None and time.monotonic() - one.started >= limit_s:
        reason = f"did not end within sweep.limit_s={limit_s:g} s"
    elif code is not None and code < 0:
        reason = f"was ended by signal {-code}"
    else:
        reason = f"ended with code {code}"
    reason += f": see {path.with_suffix('.log')}"
    table.add(Row(**one.planned.named, status=FAILED, reason=reason))


def _default_at_once() -> int:
    """Runs at the same time: one on a GPU, which they would share, or one for each core."""
    from labcode.runtime import bootstrap

    return 1 if bootstrap.device_type() == "cuda" else len(usable_cores())


# ---- the command


def parse(words: Sequence[str]) -> tuple[Config, Sweep]:
    """(The recipe with what all runs share, what they differ in) for a command line.

    Raises:
        UsageError: Unknown recipe, field or value.
    """
    own: list[str] = []
    others: list[str] = []
    taken = others
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").partition("=")[0]
            taken = own if name == "seeds" or name.startswith("sweep.") else others
        if taken is own:
            head, equals, values = word.partition("=")
            own += [head] if word.startswith("--") else head.split(",")
            own += values.split(",") if equals else []
        else:
            taken.append(word)
    base = command.parse(others)
    try:
        changes = command.read_changes(Sweep(), [word for word in own if word])
        sweep: Any = recipes.with_changes(Sweep(), changes)  # pyright: ignore[reportArgumentType]
        if base.parallel.shape(1).world_size != 1:
            raise ValueError("a run of a sweep is one process: leave out --parallel")
        plan(base, sweep)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return base, sweep


def main(words: Sequence[str]) -> int:
    """Run the program; returns its exit code: 0, 2 after a user error, 130 after Ctrl-C."""
    if not words or words[0] in command.HELP:
        print(USAGE)
        print("\n".join(command.field_table(Sweep())))
        return 0
    try:
        base, sweep = parse(words)
        rows = run(base, sweep)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on with the missing runs", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = sweep.sweep.out or f"runs/sweep-{base.name}"
    print("\n".join(sweep_table.shown(rows)))
    left = sum(row.status != DONE for row in rows)
    note = f", {left} of them diverged or failed" if left else ""
    print(f"\n{len(rows)} runs{note}: {Path(folder) / sweep_table.TABLE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
