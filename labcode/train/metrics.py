"""What a run measures of itself: one JSON object a line in `metrics.jsonl`, the same numbers to TensorBoard."""

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from labcode.files import write_atomically

FILE_NAME = "metrics.jsonl"

# name: unit, as axis labels and the lessons print them
UNITS = {
    "loss": "nats per token (text), weighted squared error (weather)",
    "val_loss": "as loss, on held-out data",
    "grad_norm": "2-norm of the whole gradient, before clipping",
    "lr": "learning rate",
    "step_s": "seconds per optimizer step",
    "tokens_per_s": "tokens/s, all ranks",
    "tokens_per_s_per_rank": "tokens/s, one rank",
    "memory_bytes": "peak bytes of rank 0 (device memory on a GPU, resident memory on a CPU)",
    "mfu": "fraction of the device's peak",
}


# name: how a line of a log shows it
SHOWN = {
    "loss": "loss {:.4f}",
    "val_loss": "validation loss {:.4f}",
    "grad_norm": "gradient norm {:.3f}",
    "lr": "lr {:.2e}",
    "step_s": "{:.4f} s/step",
    "tokens_per_s": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
}


class MetricsWriter:
    """Writes rows as they come; whatever ends the run, the lines written so far are whole.

    Args:
        folder: An existing folder; `metrics.jsonl` and `tensorboard/` are made in it.
        after_step: Go on after this step of a run that wrote there before; what it wrote of later steps is removed.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """

    def __init__(self, folder: Path, after_step: int = 0):
        from torch.utils.tensorboard import SummaryWriter

        self._path = folder / FILE_NAME
        rows = (
            [row for row in read(self._path) if row["step"] <= after_step]
            if after_step and self._path.exists()
            else []
        )
        write_atomically(self._path, b"".join(map(_line, rows)))
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (open as long as the run)
        self._board = SummaryWriter(
            str(folder / "tensorboard"), purge_step=after_step + 1 if after_step else None
        )

    def write(self, row: Mapping[str, float]) -> None:
        """Add one row; `step` counts optimizer steps done, the other keys are those of `UNITS`.

        Raises:
            OSError: The disk is full; the rows before this one are kept whole.
        """
        line = _line(row)
        end = self._file.tell()
        if self._file.write(line) < len(
            line
        ):  # unbuffered: a full disk takes a part, and says no only to the next write
            self._file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        for name, value in row.items():
            if name != "step":
                self._board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        self._board.close()


def _line(row):
    return json.dumps(dict(row)).encode() + b"\n"


def shown(row: Mapping[str, float], steps: int) -> str:
    """A row as one line for people: "step 10/300 | loss 3.2101 | ..."; what is not in `SHOWN` is left out."""
    return " | ".join(
        [
            f"step {row['step']}/{steps}",
            *(text.format(row[name]) for name, text in SHOWN.items() if name in row),
        ]
    )


def read(path: str | Path) -> list[dict[str, float]]:
    """The rows of a run, from its folder or its `metrics.jsonl`; a last line cut short by a kill is left out.

    Raises:
        ValueError: No such file, or a line that is not JSON before the last.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the folder that a training run printed")
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not JSON: {line[:60]!r}") from None
    return rows


def plot(
    runs: Mapping[str, str | Path | list],
    names: Sequence[str] = ("loss", "val_loss", "lr", "tokens_per_s"),
):
    """Curves of several runs over the steps, one panel a quantity; returns the matplotlib figure.

    Args:
        runs: `{label: folder, metrics file, or rows already read}`.
        names: Keys of `UNITS`; one that no run has is left out.
    """
    from matplotlib.figure import Figure

    rows = {label: run if isinstance(run, list) else read(run) for label, run in runs.items()}
    names = [name for name in names if any(name in row for run in rows.values() for row in run)]
    figure = Figure(figsize=(3.6 * len(names), 3.0), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names):
        for label, run in rows.items():
            points = [(row["step"], row[name]) for row in run if name in row]
            axes.plot(
                *zip(*points), label=label, marker="o" if len(points) < 20 else None, markersize=3
            )
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    return figure
