"""The rows of metrics of a run: kept, written, shown.

Each row is one JSON object on a line of `metrics.jsonl`; samples of the device are those of
`device.jsonl`. The same numbers go to TensorBoard.
"""

import contextlib
import errno
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from labcode.measure import device_samples
from labcode.runtime.files import write_atomically
from labcode.runtime.suggest import run_near
from labcode.runtime.units import seconds

FILE_NAME = "metrics.jsonl"
Row = Mapping[str, float]  # its keys: "step", and those of UNITS

# name: unit, as axis labels and the lessons print them
UNITS = {
    "loss": "nats per token (text), weighted squared error (weather)",
    "val_loss": "as loss, on held-out data",
    "grad_norm": "2-norm of the whole gradient, before clipping",
    "lr": "learning rate",
    "step_s": "seconds per optimizer step",
    "data_s": "seconds a step that rank 0 waits for its samples",
    "forward_s": "seconds a step in forward, with the messages of tp and cp",
    "backward_s": "seconds a step in backward, with the messages of tp, cp and PyTorch's DDP",
    "graph_s": "seconds a step in both, where a CUDA graph holds them",
    "communication_s": "seconds a step that wait for gradients, weights and stages, and no more",
    "optimizer_s": "seconds a step for gradient norm, clipping and update",
    "samples_per_s": "samples/s, all ranks",
    "tokens_per_s": "tokens/s, all ranks",
    "tokens_per_s_per_rank": "tokens/s, one rank",
    "memory_bytes": "peak bytes of rank 0 (device memory on a GPU, resident memory on a CPU)",
    "flops_per_s": "model FLOP/s, one rank",
    "mfu": "model FLOP/s, fraction of the peak in the device's datasheet",
    "matmul_share": "model FLOP/s, fraction of the rate that a large matrix product reaches here",
    "utilisation": "fraction of the device that was busy, mean of the samples since the last row",
    "bad_steps": "steps of the run whose update was left out",
    "loss_scale": "by which the loss is multiplied in float16",
    "noise_scale": "samples of a batch whose noise is as large as its gradient, B_simple",
    "gradient_square": "squared 2-norm of the gradient without noise, smoothed",
    "gradient_variance": "trace of the covariance of one sample's gradient, smoothed",
    "expert_load": "rows of the fullest expert over an even share: 1 is even",
    "dropped_share": "fraction of the rows that found no room at their expert",
    "router_loss": "losses of all routers, as they are added to the loss",
    "overflows": "steps of the run left out because the loss scale was too large",
}


# name: how a line of a log shows it
SHOWN = {
    "loss": "loss {:.4f}",
    "val_loss": "validation loss {:.4f}",
    "grad_norm": "gradient norm {:.3f}",
    "lr": "lr {:.2e}",
    "step_s": "{:.4f} s/step",
    "tokens_per_s": "{:,.0f} tokens/s",
    "expert_load": "fullest expert {:.2f} x even",
    "dropped_share": "{:.1%} of rows dropped",
    "router_loss": "router loss {:.4f}",
    "mfu": "MFU {:.1%}",
    "matmul_share": "{:.0%} of the matmul rate",
}

# in the order of a step; the line at a run's end names those that a run has
STEP_PARTS = ("data", "forward", "backward", "graph", "communication", "optimizer")


def tag(name: str) -> str:
    """Under which name TensorBoard shows a number of `UNITS`.

    It sorts by name: the loss comes first, before all that is in "step/" and "system/".

    Held by: tests/notebooks/test_tensorboard.py
    """
    return name if name in ("loss", "lr", "val_loss") else f"step/{name}"


class Log:
    """The rows of one run: on a terminal a progress bar shows them, elsewhere a line each.

    Args:
        folder: Folder for the rows; None only keeps them, as every rank but the first does.
        name: The name of the run.
        steps: Number of optimizer steps of the run.
        steps_done: Steps done already, when it is resumed.

    Attributes:
        history: All rows, oldest first.
        writes: Whether this rank writes and shows anything.

    Raises:
        ValueError: The metrics of the resumed run cannot be read; they are left as they are.
        OSError: The folder cannot be written, or the disk is full.
    """

    def __init__(self, folder: Path | None, name: str, steps: int, steps_done: int) -> None:
        self.history: list[dict[str, float]] = []
        self.writes = folder is not None
        self._steps = steps
        self._beside_bar: dict[str, str] = {}
        self._on_terminal = sys.stderr.isatty()
        self._writer = MetricsWriter(folder, steps_done) if folder else None
        self._bar = tqdm(
            total=steps,
            initial=steps_done,
            desc=name,
            unit="step",
            disable=not (self.writes and self._on_terminal),
            # a small model does dozens of steps in that time, and each drawing would hold them up
            mininterval=0.3,
            dynamic_ncols=True,
        )

    @contextlib.contextmanager
    def bar(self) -> Iterator[None]:
        """The progress bar is shown within the block."""
        with self._bar:
            yield

    def advance(self) -> None:
        """Move the bar by one step."""
        self._bar.update()

    def write(self, row: dict[str, float], line: str = "") -> None:
        """Keep, write and show a row.

        Args:
            row: The row as it stands in `metrics.jsonl`.
            line: Shown in its place, on a terminal too.

        Raises:
            OSError: The disk is full.
        """
        self.history.append(row)
        for name in ("loss", "val_loss"):
            if name in row:
                self._beside_bar[name] = f"{row[name]:.3f}"
        self._bar.set_postfix(self._beside_bar, refresh=False)
        if self._writer:
            self._writer.write(row)
            if line:
                self.say(line)
            elif not self._on_terminal:
                print(shown(row, self._steps), flush=True)

    def write_device(self, row: dict[str, float]) -> None:
        """Write a sample of the device; any thread may call it.

        Raises:
            OSError: The disk is full.
        """
        if self._writer:
            self._writer.write_device(row)

    def say(self, line: str) -> None:
        """Print a line, above the progress bar where there is one; only on the rank that writes."""
        if self.writes:
            tqdm.write(line)
            sys.stdout.flush()

    def close(self) -> None:
        """Close the files; what was written stays."""
        if self._writer:
            self._writer.close()


class MetricsWriter:
    """Writes rows as they come; whatever ends the run, the lines written so far are whole.

    Args:
        folder: An existing folder; `metrics.jsonl` and `tensorboard/` are made in it.
        after_step: Continue after this step of a run that wrote there before; what it wrote of
            later steps is removed.

    Raises:
        ValueError: What was written there is no file of metrics; it is left as it is.
        OSError: The folder cannot be written, or the disk is full.
    """

    def __init__(self, folder: Path, after_step: int = 0) -> None:
        # here, as it takes a quarter of a second and every rank but the first does without
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._after_step = after_step
        self._rows = RowFile(folder / FILE_NAME, after_step)
        self._device_rows: RowFile | None = None
        purge_step = after_step + 1 if after_step else None
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)
        self._hook_before = threading.excepthook
        threading.excepthook = self._thread_failed

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread, keeps its error, and raises it at the next `add_scalar`.

        The traceback that Python prints of the thread besides would stand in the middle of a line.
        """
        of_tensorboard = type(failure.thread).__module__.startswith("tensorboard.")
        if not (of_tensorboard and isinstance(failure.exc_value, OSError)):
            self._hook_before(failure)

    def write(self, row: Row) -> None:
        """Add one row; `step` counts optimizer steps done, the other keys are those of `UNITS`.

        Raises:
            OSError: The disk is full; the rows before this one are kept whole.
        """
        # The file first: `add_scalar` may raise for the disk that was full at an earlier row.
        self._rows.write(row)
        for name, value in row.items():
            if name != "step":
                self._board.add_scalar(tag(name), value, row["step"])

    def write_device(self, row: Row) -> None:
        """Add one sample of the device, with the keys of `device_samples.UNITS`.

        Raises:
            ValueError: The file of a run before this one holds something else.
            OSError: The disk is full; the rows before this one are kept whole.
        """
        if self._device_rows is None:
            self._device_rows = RowFile(self._folder / device_samples.FILE_NAME, self._after_step)
        self._device_rows.write(row)
        for name, value in row.items():
            if name not in ("step", "time_s"):
                self._board.add_scalar(f"system/{name}", value, row["step"])

    def close(self) -> None:
        """Close all files."""
        self._rows.close()
        if self._device_rows:
            self._device_rows.close()
        self._board.close()
        if threading.excepthook == self._thread_failed:
            threading.excepthook = self._hook_before


class RowFile:
    """A file of rows, one JSON object a line, each of them whole.

    Args:
        path: It is made anew, or continued.
        after_step: Keep what is there of the steps up to this one; 0 keeps nothing.

    Raises:
        ValueError: What is there is no file of rows; it is left as it is.
        OSError: It cannot be written, or the disk is full.
    """

    def __init__(self, path: Path, after_step: int = 0) -> None:
        self._path = path
        kept = []  # a run of a week has 600,000 rows
        if after_step and path.exists():
            for line, row in _rows(path):
                if row["step"] <= after_step:
                    kept.append(line + b"\n")
        # written anew even if nothing is left out: the last line may lack its end, after a kill
        write_atomically(path, b"".join(kept))
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (open as long as the run)

    def write(self, row: Row) -> None:
        """Add one row.

        Raises:
            OSError: The disk is full; the rows before this one are kept whole.
        """
        line = _line(row)
        end = self._file.tell()
        written = self._file.write(line)
        # without a buffer, a disk that fills up accepts part of a line; ENOSPC comes with the next
        if written < len(line):
            self._file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(row: Row) -> bytes:
    return json.dumps(dict(row)).encode() + b"\n"


def shown(row: Row, steps: int) -> str:
    """A row as one line for people: "step 10/300 | loss 3.2101 | ..."; only what is in `SHOWN`."""
    parts = [f"step {row['step']}/{steps}"]
    for name, text in SHOWN.items():
        if name in row:
            parts.append(text.format(row[name]))
    return " | ".join(parts)


def where_time_went(rows: Sequence[Row]) -> str:
    """The line at the end of a run, over all of its steps; "" if no step was timed.

    "41.8 ms a step: 1% data, 37% forward, 55% backward, 5% optimizer; 40% of the matmul rate"

    The share is that of the datasheet's peak, and where there is none that of the large matrix
    product which is timed when a run begins.
    """
    timed = [row for row in rows if "step_s" in row]
    if not timed:
        return ""
    total_s = sum(row["step_s"] for row in timed)
    parts = {}
    for part in STEP_PARTS:
        parts[part] = sum(row.get(f"{part}_s", 0.0) for row in timed) / total_s
    parts["other"] = 1 - sum(parts.values())
    named = [f"{share:.0%} {part}" for part, share in parts.items() if share >= 0.005]
    line = f"{seconds(total_s / len(timed))} a step: {', '.join(named)}"
    for name, peak in (
        ("mfu", "the datasheet's peak (MFU)"),
        ("matmul_share", "the matmul rate"),
    ):
        if name in timed[-1]:
            # work over time: a slow row counts for as long as it took
            reached = sum(row.get(name, 0.0) * row["step_s"] for row in timed) / total_s
            return f"{line}; {reached:.0%} of {peak}"
    return line


def read(path: str | Path) -> list[dict[str, float]]:
    """The rows of a run, from its folder or its `metrics.jsonl` (or `device.jsonl`).

    A last line that was cut short by a kill is left out.

    Raises:
        ValueError: No such file, or a line before the last that is not a row of metrics.
    Held by: tests/unit/test_metrics.py
    """
    given = Path(path)
    path = given / FILE_NAME if given.is_dir() else given
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {run_near(given)}")
    return [row for _, row in _rows(path)]


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, float]]]:
    """Each line that is whole, as it stands in the file and as it reads."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file: move it away")  # a pipe would have no end
    *lines, cut_short = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield line, _row(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is not {error}: {_start_of(line)}: "
                "remove that line, or put the file back as it was"
            ) from None
    try:
        # all of the last line may be there, without its end
        yield cut_short, _row(cut_short)
    except ValueError:
        return


def _row(line: bytes) -> dict[str, float]:
    """A line as a row.

    Raises:
        ValueError: It is none; the text says what it is not.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("JSON") from None
    if not isinstance(row, dict):
        raise ValueError(f"a row of metrics but of type {type(row).__name__}")
    if type(row.get("step")) is not int:
        raise ValueError("a row of metrics, as it has no step")
    for name, value in row.items():
        # not isinstance: true is an int in Python
        if type(value) not in (int, float):
            raise ValueError(f"a row of metrics, as {name} is no number")
    return row


def _start_of(line: bytes) -> str:
    """What can be shown of a line that may be anything."""
    return repr(line[:60].decode(errors="replace"))
