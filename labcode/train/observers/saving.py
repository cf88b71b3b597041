"""Checkpoints where they are due, or where a signal asks for one and ends the run."""

from pathlib import Path

from labcode.train.build import Training
from labcode.train.checkpoint.store import Checkpoints
from labcode.train.observer import Observer
from labcode.train.signals import StopSignals
from labcode.train.step import Step


class Saving(Observer):
    """Writes the checkpoints of a run.

    Args:
        training: What trains.
        out: The folder of the run.
        signals: The signals heard since the process was started; None: it listens while it trains.
    """

    def __init__(self, training: Training, out: Path, signals: StopSignals | None) -> None:
        self._training = training
        config = training.config
        self.checkpoints = Checkpoints(config, training.grid, out, training.task.data_sha256)
        self.checkpoints.resumed_from(training.steps_before)
        self._own = StopSignals() if signals is None else None
        self._signals = signals or self._own

    def begin(self) -> str:
        """Stop at once if a signal came while the run started: nothing is to be saved yet."""
        if self._own:
            self._own.listen()
        return self._asked_to_stop()

    def after(self, step: Step) -> str:
        """Write a checkpoint where one is due."""
        del step
        training = self._training
        stopped_by = self._asked_to_stop()
        self.checkpoints.finish_if_written()
        is_last = bool(stopped_by) or training.is_done
        if is_last or training.is_due(training.config.checkpoint.every):
            # The last one is waited for: after it the process may end.
            if training.config.checkpoint.in_background and not is_last:
                self.checkpoints.begin(training.state)
            else:
                self.checkpoints.save(training.state)
        return stopped_by

    def _asked_to_stop(self) -> str:
        """The signal that asks the run to stop, the same on all ranks; "" if there is none.

        After the last step no signal counts, because the run finishes anyway.
        """
        if self._training.is_done or self._signals is None:
            return ""
        return self._signals.agreed() or ""

    def roll_back(self) -> str:
        """Take the weights and the optimizer of the newest checkpoint; the position in the data
        stays.

        Communicates: what reading a checkpoint does.

        Returns:
            What was done, in words; "" if there is no checkpoint.
        """
        # the newest may be the one that is under way
        self.checkpoints.finish()
        start = self.checkpoints.newest()
        if start is None:
            return ""
        training = self._training
        last = training.steps_done
        counted = training.guard.state
        taken = self.checkpoints.load(training.state, start)
        training.model.gather_parameters()
        training.guard.state = counted  # the bad step is not forgotten
        # Where the checkpoint is; then the position is set to where the run was. Reading the same
        # batches again would meet the same spike.
        first = training.steps_done + 1
        training.batches.load_state_dict({"step": last})
        return f"back to {taken.name}, the batches of steps {first} to {last} are left out"

    def end(self) -> None:
        """Give the signals back to the handlers that they had."""
        if self._own:
            self._own.stop()

    def close(self) -> None:
        """Remove a checkpoint that is still being written."""
        self.checkpoints.abandon()
