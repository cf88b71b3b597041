"""One run of a sweep, in a process of its own, whatever becomes of it."""

import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from labcode.comm.grid import Grid
from labcode.config import Config
from labcode.run import sweep_table
from labcode.run.sweep_table import DIVERGED, DONE, FAILED, Row
from labcode.runtime import bootstrap, combinations, errors, processes
from labcode.runtime.bootstrap import Place
from labcode.runtime.files import write_atomically
from labcode.train.build import build
from labcode.train.finite import Diverged
from labcode.train.loop import fit
from labcode.train.observers import observers_of, open_log
from labcode.train.tasks import make_task

WORSE = 1.1  # times the first loss: more than batches differ by


def run(
    config: Config,
    named: dict[str, Any],
    target: float | None,
    path: Path,
    threads: int,
    starter: int,
) -> None:
    """Train, and write the row of the run; what it prints goes to `path` with the ending .log.

    Args:
        config: The run.
        named: What the row says of it beforehand.
        target: Validation loss at which it ends; None: it does all its steps.
        path: Path of the file for the row.
        threads: Number of threads of this process on the CPU.
        starter: Number of the process of the sweep, with which this one ends.
    """
    processes.end_with_parents(starter)
    _print_into(path.with_suffix(".log"))
    row = train(config, named, target, threads)
    write_atomically(path, sweep_table.to_json(row).encode())


def train(config: Config, named: dict[str, Any], target: float | None, threads: int) -> Row:
    """The row of a run; an error is one of its fields."""
    training = None
    history: list[dict[str, float]] = []
    status = DONE
    reason = ""
    try:
        world = bootstrap.start(Place())
        torch.set_num_threads(threads)
        resolved = combinations.resolve(config, 1)
        training = build(resolved, world, Grid.create(resolved.shape), make_task(config))
        log = open_log(training, None)
        history = log.history
        fit(training, observers_of(training, log, None, target=target))
    except Diverged as error:
        status = DIVERGED
        reason = errors.text_of(error)
    except Exception as error:
        traceback.print_exc()
        status = FAILED
        reason = errors.text_of(error) or type(error).__name__
    finally:
        if training is not None:
            training.close()
        bootstrap.stop()
    row = sweep_table.row_of_history(named, history, training.steps_done if training else 0)
    # of training: that of validation rises where a model learns its text by heart, too
    if status == DONE and row.loss is not None and row.loss > WORSE * row.losses[0][1]:
        status = DIVERGED
        reason = f"ends at {row.loss:.4g}, above its first loss of {row.losses[0][1]:.4g}"
    return replace(row, status=status, reason=reason)


def _print_into(path: Path) -> None:
    """Let all that this process prints go to a file, that of C++ too."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
