"""What more ranks have brought: one table from runs of one recipe. No torch.

    python -m labcode.run.scaling runs/weak_scaling-1-* runs/weak_scaling-4-* ...

`slurm/weak_scaling` submits such runs. Speed and convergence stand side by side: more ranks do more
samples a second, and need more samples to the same loss.
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labcode.measure import metrics
from labcode.run import sweep_table
from labcode.run.sweep_table import Row
from labcode.runtime.command import HELP
from labcode.runtime.files import print_out
from labcode.runtime.suggest import run_near

PROGRAM = "python -m labcode.run.scaling"
USAGE = (
    f"usage: {PROGRAM} RUN RUN ... [--loss 0.1]   # folders of runs; the loss to compare times at"
)


@dataclass(frozen=True)
class Run:
    """One run of a comparison.

    Args:
        folder: Folder of the run.
        row: Batch, rate, losses and seconds of a step of the run.
        samples_per_s: Median over the rows of metrics, without the first, in which all warms up.
    """

    folder: Path
    row: Row
    samples_per_s: float

    @property
    def seconds(self) -> list[tuple[float, float]]:
        """(seconds of training, validation loss): the seconds without those of validation."""
        step_s = self.row.batch / self.samples_per_s
        return [(step * step_s, loss) for step, loss in self.row.val_losses]

    def seconds_to(self, loss: float) -> float | None:
        """Seconds of training until a validation loss was reached first; None if it was not."""
        steps = sweep_table.steps_to(self.row, loss)
        return None if steps is None else steps * self.row.batch / self.samples_per_s


def read(folder: str | Path) -> Run:
    """A run from its folder.

    Raises:
        ValueError: It holds no run, or one without a second row of metrics yet.

    Held by: tests/unit/test_scaling.py
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no run: {run_near(folder)}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} cannot be read: {error}") from None
    history = metrics.read(folder)
    measured = [row for row in history if "samples_per_s" in row]
    if len(measured) < 2:
        raise ValueError(
            f"{folder} has {len(measured)} rows of metrics, and the first is left out: wait until "
            "the run has more, or lower --train.log_every"
        )
    row = sweep_table.row_of_history(
        {
            "run": folder.name,
            "recipe": config["name"],
            "batch": config["train"]["global_batch"],
            "lr": max(entry["lr"] for entry in measured),
            "seed": config["train"]["seed"],
            "devices": round(measured[-1]["tokens_per_s"] / measured[-1]["tokens_per_s_per_rank"]),
        },
        history,
        int(history[-1]["step"]),
    )
    rate = statistics.median(entry["samples_per_s"] for entry in measured[1:])
    return Run(folder, row, rate)


def common_loss(runs: Sequence[Run]) -> float:
    """The lowest validation loss that every run has reached; infinite if one has none.

    Held by: tests/unit/test_scaling.py
    """
    lowest = []
    for run in runs:
        losses = [loss for _, loss in run.row.val_losses]
        lowest.append(min(losses, default=math.inf))
    return max(lowest)


def table(runs: Sequence[Run], loss: float | None = None) -> list[str]:
    """The runs as lines for people, fewest ranks first.

    The efficiency is the rate of one rank over that of one rank in the smallest run. The last
    two columns are the time to a loss that all have reached, and what it costs.

    Args:
        runs: Runs of one recipe, at least one.
        loss: Loss to compare times at; None is the lowest that all have reached.

    Raises:
        ValueError: Runs of more than one recipe.

    Held by: tests/unit/test_scaling.py
    """
    recipes = sorted({run.row.recipe for run in runs})
    if len(recipes) > 1:
        raise ValueError(f"these are runs of {' and '.join(recipes)}: compare runs of one recipe")
    runs = sorted(runs, key=lambda run: run.row.devices)
    target = common_loss(runs) if loss is None else loss
    alone = runs[0].samples_per_s / runs[0].row.devices
    lines = [
        f"{'ranks':>5} {'batch':>6} {'rate':>9} {'steps':>6} {'samples/s':>10} {'efficiency':>10} "
        f"{'val loss':>9} {'s to ' + format(target, '.4f'):>12} {'rank-seconds':>13}"
    ]
    for run in runs:
        row = run.row
        efficiency = run.samples_per_s / row.devices / alone
        val_loss = f"{row.val_losses[-1][1]:.4f}" if row.val_losses else "-"
        seconds = run.seconds_to(target)
        time = "-" if seconds is None else f"{seconds:.1f}"
        cost = "-" if seconds is None else f"{seconds * row.devices:.1f}"
        lines.append(
            f"{row.devices:>5} {row.batch:>6} {row.lr:>9.2e} {row.steps:>6} "
            f"{run.samples_per_s:>10.1f} {efficiency:>10.2f} {val_loss:>9} {time:>12} {cost:>13}"
        )
    return lines


def main(args: Sequence[str]) -> int:
    """Run the program.

    Returns:
        0, or 2 for a user error.
    """
    if not args or args[0] in HELP:
        print_out(USAGE)
        return 0
    try:
        folders, loss = _parse(args)
        print("\n".join(table([read(folder) for folder in folders], loss)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(args: Sequence[str]) -> tuple[list[str], float | None]:
    """The folders, and the loss if one is named."""
    folders = list(args)
    loss = None
    if "--loss" in folders:
        place = folders.index("--loss")
        value = folders[place + 1] if place + 1 < len(folders) else ""
        del folders[place : place + 2]
        try:
            loss = float(value)
        except ValueError:
            raise ValueError(f"--loss needs a number, such as 0.1, and found {value!r}") from None
    if not folders:
        raise ValueError(f"name the folders of the runs: {PROGRAM} runs/weak_scaling-*")
    return folders, loss


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
