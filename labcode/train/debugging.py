"""The debug features of a run: `--debug.config FILE`, on layers that are chosen once."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labcode.comm.agreement import on_every_rank
from labcode.config import DebugConfig
from labcode.parallel.model import ParallelModel
from labcode.precision.debug_config import Block

if TYPE_CHECKING:
    from labcode.precision.debug import Debugger

FOLDER = "debug"  # of a run


class Debugging:
    """What a run does with `debug.config`: checks it when it is made, and opens it with the folder.

    Args:
        settings: With a config.
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
        from labcode.precision.debug import chosen_layers

        own = self._feature_dir
        self._chosen: Mapping[str, Block] = chosen_layers(model, Path(settings.config), own)
        self._debugger: Debugger | None = None
        self._writer: Any = None

    def open(self, out: Path, steps_done: int) -> None:
        """From now on look at the layers and write."""
        from labcode.precision.debug import Debugger, Reduction

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


def _check_installed() -> None:
    try:
        import nvdlfw_inspect.api  # noqa: F401
    except ImportError:
        raise ValueError(
            "debug.config needs nvdlfw_inspect: pip install 'labcode[debug]', or leave it out"
        ) from None
