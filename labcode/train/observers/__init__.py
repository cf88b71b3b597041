"""The observers of a run: each has a file here, and the loop knows none of them."""

from pathlib import Path

from labcode.doctor.hang import HangWatch
from labcode.measure.memory_marks import MemoryMarks
from labcode.measure.metrics import Log
from labcode.train.build import Training
from labcode.train.observer import Observer
from labcode.train.observers.bad_steps import BadSteps
from labcode.train.observers.hang import Heartbeat
from labcode.train.observers.result import Result
from labcode.train.observers.rows import Rows
from labcode.train.observers.saving import Saving
from labcode.train.observers.step_profiler import StepProfiler
from labcode.train.observers.validation import Validation
from labcode.train.signals import StopSignals


def open_log(training: Training, out: Path | None) -> Log:
    """The rows of a run; rank 0 writes them.

    Raises:
        OSError: The folder cannot be written, on rank 0.
    """
    config = training.config
    folder = out if training.world.rank == 0 else None
    return Log(folder, config.name, config.train.steps, training.steps_done)


def observers_of(
    training: Training,
    log: Log,
    out: Path | None,
    signals: StopSignals | None = None,
    watch: HangWatch | None = None,
    target: float | None = None,
) -> list[Observer]:
    """The observers of a run, in the order in which they are told of a step.

    Args:
        training: What trains.
        log: The metrics of the run.
        out: Folder of the run, which exists; None: nothing is written.
        signals: The signals heard since the process was started; None: it listens while it trains.
        watch: It is told of each step, so that it can say which rank waits for which; None: no
            watch.
        target: Validation loss at which the run may stop; None: there is none.

    Raises:
        OSError: Something cannot be written.
    """
    config = training.config
    weights = [*training.model.module.parameters(), *training.model.weights.values()]
    marks = MemoryMarks(weights, training.optimizer)
    world = training.world
    training.debugging.open(out, training.steps_done, log.say)
    saving = Saving(training, out, signals) if out and config.checkpoint.on else None
    # The profiler comes first and so stands around what the others do in a step. A run goes back
    # (BadSteps) before its weights are validated or saved, and a row is written before a checkpoint
    # of its step, so that a resumed run finds it. The result is last: it reads the rows.
    observers: list[Observer] = [
        StepProfiler(config.profile, world.rank, world.device, training.ranges, marks, out)
    ]
    if watch:
        observers.append(Heartbeat(training, watch))
    observers += [BadSteps(training, log, saving), Rows(training, log)]
    observers.append(Validation(training, log, target))
    if saving:
        observers.append(saving)
    observers.append(Result(training, log, out))
    return observers
