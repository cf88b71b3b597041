"""Tells the watch over a run that hangs that this rank has done a step."""

from labcode.doctor.hang import HangWatch
from labcode.train.build import Training
from labcode.train.observer import Observer
from labcode.train.step import Step


class Heartbeat(Observer):
    """Tells the watch of each step.

    Args:
        training: What trains.
        watch: Speaks when nothing moves.
    """

    def __init__(self, training: Training, watch: HangWatch) -> None:
        self._training = training
        self._watch = watch

    def after(self, step: Step) -> str:
        """Tell the watch that this rank has done a step."""
        del step
        self._watch.step(self._training.steps_done)
        return ""
