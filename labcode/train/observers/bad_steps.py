"""Says which updates were left out, and goes back to a checkpoint where the rule asks for it."""

from labcode.measure.metrics import Log
from labcode.train.build import Training
from labcode.train.observer import Observer
from labcode.train.observers.saving import Saving
from labcode.train.step import Step


class BadSteps(Observer):
    """Tells of a step whose update was left out.

    Args:
        training: What trains.
        log: The metrics of the run.
        saving: The checkpoints to go back to; None: there are none.
    """

    def __init__(self, training: Training, log: Log, saving: Saving | None) -> None:
        self._training = training
        self._log = log
        self._saving = saving

    def after(self, step: Step) -> str:
        """Tell of a step that was left out."""
        if step.left_out:
            self._report_left_out(step)
        elif step.rescaled:
            self._report_overflow()
        return ""

    def _report_left_out(self, step: Step) -> None:
        """Go back to a checkpoint if the rule asks for it and there is one; say what was done."""
        training = self._training
        how = ""
        if training.config.train.on_bad_step == "rollback" and self._saving:
            how = self._saving.roll_back()
        # also under "rollback", as long as there is no checkpoint to go back to
        how = how or "its update is left out"
        number = training.steps_done
        row: dict[str, float] = {"step": number, "bad_steps": training.guard.bad_steps}
        self._log.write(row, f"step {number} is bad, {step.left_out}: {how}")

    def _report_overflow(self) -> None:
        """Say that the loss scale was too large; `TrainStep` has halved it already."""
        scaler = self._training.scaler
        assert scaler is not None
        number = self._training.steps_done
        line = (
            f"step {number}: a gradient overflows float16 with a loss scale of "
            f"{2 * scaler.scale:g}; its update is left out, the scale is {scaler.scale:g} now"
        )
        row = {"step": number, "loss_scale": scaler.scale, "overflows": scaler.overflows}
        self._log.write(row, line)
