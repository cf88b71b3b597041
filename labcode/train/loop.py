"""The training loop: a loop over steps, and its observers.

    training = build(resolved, world, grid, task)      # train/build.py
    fit(training, observers_of(training, out))       # train/observers/

The loop is the same for every model and every grid. One optimizer step reads `global_batch`
samples, whatever the number of ranks: each dp rank takes its part, in micro-batches whose gradients
add up before they are averaged over the ranks once.
"""

import contextlib
from collections.abc import Sequence

from labcode.train.build import Training
from labcode.train.observer import Observer
from labcode.train.signals import StopSignals
from labcode.train.step import TrainStep


def fit(training: Training, observers: Sequence[Observer]) -> str:
    """Train to the end, or until an observer asks to stop.

    Args:
        training: What it trains with.
        observers: They are told of each step, in this order.

    Returns:
        Why it stopped before its last step; "" if it did not.

    Raises:
        Diverged: A loss, the gradient norm or a weight is not finite; on every rank at the same
            step.
    """
    step = TrainStep(training)
    try:
        # Every observer is asked, not only up to the first reason: some communicate, and all ranks
        # must make the same calls.
        stopped_by = _first([observer.begin() for observer in observers])
        while not training.is_done and not stopped_by:
            with contextlib.ExitStack() as around:
                for observer in observers:
                    around.enter_context(observer.during(training.steps_done + 1))
                # inside all of `during`, so that a profiler or a clock of an observer sees the step
                # and no more
                done = step()
            stopped_by = _first([observer.after(done) for observer in observers])
    finally:
        # After an error too; the last one that began ends first, as with nested `with` blocks.
        for observer in reversed(observers):
            observer.end()
    if not stopped_by:
        # A signal is held back: what is left is short, and would have to be done again.
        with StopSignals():
            for observer in observers:
                observer.finish()
    return stopped_by


def _first(reasons: Sequence[str]) -> str:
    """The first reason to stop; "" if there is none."""
    for reason in reasons:
        if reason:
            return reason
    return ""
