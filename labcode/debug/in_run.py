"""What a run does with the section `debug` of its config.

debug.config          features on chosen layers, which see each step before its update
debug.record_steps    the tensors of the first steps are written, for `debug.bisect`
debug.probe           a step that is not finite is run once more, to find where that began
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from labcode.config import DebugConfig
from labcode.debug.debug_config import ConfigBlock
from labcode.debug.record import FOLDER as RECORD
from labcode.debug.record import Recorder
from labcode.debug.step_replay import StepReplay
from labcode.parallel.model import Batch, ParallelModel
from labcode.runtime.agreement import on_every_rank

if TYPE_CHECKING:
    from labcode.debug.on_layers import Debugger

FOLDER = "debug"  # of a run


class Debugging:
    """The tools of a run; what is not asked for does nothing.

    Args:
        settings: The debug settings of the run.
        model: This rank's part.
        device: Device that it computes on.
        precision: A name of `train.dtype` but "auto".

    Raises:
        ValueError: See `Features`.
    """

    def __init__(
        self, settings: DebugConfig, model: ParallelModel, device: torch.device, precision: str
    ) -> None:
        self._settings = settings
        self._model = model
        self._precision = precision
        self.replay = StepReplay(model, device) if settings.probe else None
        self._features = Features(settings, model) if settings.config else None
        self._recorder: Recorder | None = None
        self.say: Callable[[str], None] = _say_nothing

    def open(self, out: Path | None, steps_done: int, say: Callable[[str], None]) -> None:
        """Begin to write into the folder of the run.

        Args:
            out: The folder; None: nothing is written.
            steps_done: The number of steps that the run has done.
            say: Prints a line of its log.
        """
        self.say = say
        if out and self._features:
            self._features.open(out, steps_done)
        if out and self._settings.record_steps:
            self._recorder = Recorder(self._model, out / RECORD, self._precision)

    def records(self, number: int) -> bool:
        """Whether the tensors of a step are written."""
        return self._recorder is not None and number <= self._settings.record_steps

    def recording(
        self, number: int, batches: Sequence[Batch], loss_scale: float
    ) -> contextlib.AbstractContextManager[None]:
        """Around the forward and backward of a step that may be recorded.

        Args:
            number: The number of the step, from 1.
            batches: The micro-batches of this rank.
            loss_scale: The factor of the loss.
        """
        if self._recorder is None or not self.records(number):
            return contextlib.nullcontext()
        return self._recorder.step(number, batches, loss_scale)

    def before_update(self) -> None:
        """Called when the gradients of a step are there, before the optimizer."""
        if self._features:
            self._features.step()

    def close(self) -> None:
        """Close the files."""
        if self._features:
            self._features.close()


class Features:
    """`debug.config`: checked when it is made, and opened with the folder of the run.

    Args:
        settings: The debug settings of the run, with a `config`.
        model: This rank's part.

    Raises:
        ValueError: nvdlfw_inspect is not installed, or the file is wrong.

    Held by: tests/ranks/test_debug.py::test_a_training_writes_what_its_yaml_asks_for
    """

    def __init__(self, settings: DebugConfig, model: ParallelModel) -> None:
        assert settings.config is not None
        self._settings = settings
        self._model = model
        on_every_rank(_check_installed)
        from labcode.debug.on_layers import chosen_layers

        own = self._feature_dir
        self._chosen: Mapping[str, ConfigBlock] = chosen_layers(model, Path(settings.config), own)
        self._debugger: Debugger | None = None
        self._writer: Any = None

    def open(self, out: Path, steps_done: int) -> None:
        """Begin to inspect the layers, and to write what is found."""
        from labcode.debug.on_layers import Debugger, Reduction

        settings = self._settings
        self.close()
        log_dir = Path(settings.log_dir) if settings.log_dir else out / FOLDER
        grid = self._model.grid
        if settings.tensorboard and max(grid.coord(axis) for axis in ("dp", "cp", "tp")) == 0:
            from torch.utils.tensorboard import SummaryWriter

            stage = f"stage-{grid.coord('pp')}"
            self._writer = SummaryWriter(str(log_dir / "tensorboard" / stage))
        self._debugger = Debugger(
            self._model,
            self._chosen,
            log_dir,
            Reduction(settings.reduce_over or (), settings.reduce_weights),
            self._feature_dir,
            steps_done,
            self._writer,
        )

    def step(self) -> None:
        """End a step, before the optimizer."""
        if self._debugger:
            self._debugger.step()

    def close(self) -> None:
        """Close the files."""
        if self._debugger:
            self._debugger.close()
        if self._writer is not None:
            self._writer.close()
        self._debugger = None
        self._writer = None

    @property
    def _feature_dir(self) -> Path | None:
        return Path(self._settings.feature_dir) if self._settings.feature_dir else None


def _say_nothing(_line: str) -> None:
    """Say nothing: the default of a run without a log."""


def _check_installed() -> None:
    try:
        import nvdlfw_inspect.api  # noqa: F401
    except ImportError:
        raise ValueError(
            "debug.config needs nvdlfw_inspect: pip install 'labcode[debug]', or leave it out"
        ) from None
