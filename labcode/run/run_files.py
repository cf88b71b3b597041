"""A run as its files show it, while it trains or after: what `watch` draws and prints.

Nothing here writes, and nothing imports torch.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labcode.measure import device_samples, metrics
from labcode.run import reference_runs
from labcode.runtime.files import is_held, written_at
from labcode.runtime.suggest import run_near
from labcode.runtime.units import si

BARS = "▁▂▃▄▅▆▇█"
TREND = 24  # values in the trend of a number


@dataclass(frozen=True)
class Look:
    """A run as its files show it at one moment.

    Args:
        folder: Folder of the run.
        steps: Number of steps that it is to do; 0 where that is not known.
        is_running: Whether a process holds its folder.
        rows: Rows of its metrics.
        device: Samples of its device.
        reference_rows: Rows of the reference run of its recipe, or none.
    """

    folder: Path
    steps: int
    is_running: bool
    rows: list[dict[str, float]]
    device: list[dict[str, float]]
    reference_rows: list[dict[str, float]]

    @property
    def step(self) -> int:
        """The last step of which there is a row."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def state(self) -> str:
        """What the run does: "running", "finished" or "ended before its last step"."""
        if self.is_running:
            return "running"
        return "finished" if self.step >= self.steps > 0 else "ended before its last step"

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """(steps, values) of one metric, or of the device.

        Args:
            name: Name of a metric, such as "loss"; or "utilisation" (0 to 1) or "memory_bytes", of
                which a run without samples of its device has its own.
        """
        rows = self.device if name in device_samples.UNITS and self.device else self.rows
        return series(rows, name)


def series(rows: Sequence[metrics.Row], name: str) -> tuple[list[float], list[float]]:
    """(steps, values) of the rows that have a value of this name.

    Args:
        rows: Rows in the order of their steps.
        name: Name of a metric.
    """
    steps = []
    values = []
    for row in rows:
        if name in row:
            steps.append(row["step"])
            values.append(row[name])
    return steps, values


def look(run: str | Path, over: str | Path | None = "") -> Look:
    """Read what a run has written so far.

    Args:
        run: Folder of the run.
        over: The run to compare it with: the name of a reference run, or a folder; "" takes the
            reference run of the same recipe where there is one, None none.

    Returns:
        The run as it is now; files that it has not written yet are empty.

    Raises:
        ValueError: The folder is that of no run, or what is in a file is no row of metrics.
    """
    folder = Path(run)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        steps = int(config["train"]["steps"])
        name = str(config["name"])
    except (OSError, ValueError, KeyError, TypeError):
        problem = "is not the folder of a run" if os.path.exists(folder) else "does not exist"
        raise ValueError(f"{folder} {problem}: {run_near(folder)}") from None
    # first: a run that ends while its files are read has written them to the end
    is_running = is_held(folder)
    return Look(
        folder=folder,
        steps=steps,
        is_running=is_running,
        rows=_rows(folder / metrics.FILE_NAME),
        device=_rows(folder / device_samples.FILE_NAME),
        reference_rows=_reference_rows(name, over),
    )


def _reference_rows(name: str, over: str | Path | None) -> list[dict[str, float]]:
    """The rows of the run that another one is compared with, or none.

    Args:
        name: Name of the recipe.
        over: As in `look`.

    Raises:
        ValueError: It names a folder that has no metrics.
    """
    if over is None:
        return []
    if over == "":
        return reference_runs.rows(name) if name in reference_runs.names() else []
    if over in reference_runs.names():
        return reference_runs.rows(str(over))
    return metrics.read(over)


def _rows(path: Path) -> list[dict[str, float]]:
    """The rows of a file that may not be there yet.

    Args:
        path: The file.
    """
    return metrics.read(path) if path.exists() else []


def newest_run(under: Path = Path("runs")) -> Path:
    """The run that was written last.

    Args:
        under: The folder of the runs; each of them has a folder of its own in it.

    Returns:
        Its folder.

    Raises:
        ValueError: There is no run.
    """
    found = sorted(under.glob("*/config.json"), key=written_at)
    if not found:
        raise ValueError(f"no run in {under.absolute()}: give the folder of one")
    return found[-1].parent


# ---- in words


def table(seen: Look) -> str:
    """A run in a few lines, each number with its trend and, where there is one, the reference.

    Args:
        seen: The run.
    """
    lines = [f"{seen.folder.name}: step {seen.step}/{seen.steps}, {seen.state}"]
    for name, title in TITLES.items():
        steps, values = seen.series(name)
        if not values:
            continue
        line = f"  {title:16}{shown(name, values[-1]):>12}  {trend(values):{TREND}}"
        # the reference at the same step, and not at its end: a run is compared while it trains
        beside = _at(seen.reference_rows, name, steps[-1])
        if beside is not None:
            line += f"  reference {shown(name, beside)}"
        lines.append(line.rstrip())
    return "\n".join(lines)


TITLES = {
    "loss": "loss",
    "val_loss": "validation loss",
    "tokens_per_s": "tokens/s",
    "utilisation": "device busy",
    "memory_bytes": "memory",
}


def shown(name: str, value: float) -> str:
    """A value of `TITLES` with its unit.

    Args:
        name: Name of the metric.
        value: A fraction of 1, bytes, tokens per second, or a loss in its own unit.
    """
    if name == "utilisation":
        return f"{value:.0%}"
    if name == "memory_bytes":
        return si(value, "B")
    if name == "tokens_per_s":
        return f"{value:,.0f}"
    return f"{value:.4f}"


def _at(rows: Sequence[metrics.Row], name: str, step: float) -> float | None:
    """The value of the last row up to a step; None if there is none.

    Args:
        rows: Rows in the order of their steps.
        name: Name of a metric.
        step: Optimizer steps.
    """
    found = None
    for row in rows:
        if row["step"] <= step and name in row:
            found = row[name]
    return found


def trend(values: Sequence[float], width: int = TREND) -> str:
    """The course of some numbers as a row of bars, each the mean of as many neighbours.

    Args:
        values: At least one number.
        width: How many bars at most.
    """
    # the mean and not every n-th one, which would show the noise of single steps
    count = min(width, len(values))
    means = []
    for number in range(count):
        part = values[number * len(values) // count : (number + 1) * len(values) // count]
        means.append(sum(part) / len(part))
    low = min(means)
    span = max(means) - low
    bars = ""
    for mean in means:
        # from the least to the largest: a loss that falls by a percent would be a flat line from 0
        height = 0.0 if span == 0 else (mean - low) / span
        bars += BARS[round(height * (len(BARS) - 1))]
    return bars
