"""The table of a sweep: a row for each run, and what can be read from all of them. No torch.

The file is `results.jsonl` in the sweep's folder, one JSON object a line.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from labcode.runtime.files import write_atomically
from labcode.runtime.units import type_in_words

TABLE = "results.jsonl"
DONE = "done"
DIVERGED = "diverged"
FAILED = "failed"


@dataclass(frozen=True)
class Row:
    """One run of a sweep.

    Args:
        run: Number of its config: the same config has the same, any other has another.
        recipe: Name of the recipe.
        batch: Samples per optimizer step.
        lr: Learning rate as it was asked for, before any `optim.lr_rule`.
        seed: Seed of the initial weights and the order of the data.
        status: "done", "diverged" or "failed".
        reason: Why it is not "done", in one line.
        steps: Optimizer steps that it did.
        loss: Training loss, mean of the last tenth of the logged ones; None if there is none.
        val_loss: Validation loss at the end; None if the end was not reached.
        step_s: Seconds per optimizer step, mean.
        devices: GPUs, or processes on CPU cores, that it took.
        at_once: Runs that shared the machine; their `step_s` are longer for it.
        noise_scale: In samples, at the end, where `train.noise_scale` measures it.
        losses: (step, training loss) of each logged step.
        val_losses: (step, validation loss).
    """

    run: str
    recipe: str
    batch: int
    lr: float
    seed: int
    status: str = DONE
    reason: str = ""
    steps: int = 0
    loss: float | None = None
    val_loss: float | None = None
    step_s: float | None = None
    devices: int = 1
    at_once: int = 1
    noise_scale: float | None = None
    losses: tuple[tuple[int, float], ...] = ()
    val_losses: tuple[tuple[int, float], ...] = ()


def read(path: str | Path) -> list[Row]:
    """The rows of a sweep, from its folder or its `results.jsonl`.

    Raises:
        ValueError: No such file, or a line that is no row.

    Held by: tests/unit/test_sweep_table.py
    """
    path = Path(path)
    if path.is_dir():
        path = path / TABLE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the folder that a sweep has printed")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(from_json(line))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is no row of a sweep ({error}): remove that line, and run "
                "the sweep again"
            ) from None
    return rows


def from_json(line: str) -> Row:
    """A row from its line.

    Raises:
        ValueError, TypeError: It is none.
    """
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(type_in_words(found))
    for name in ("losses", "val_losses"):
        found[name] = tuple((int(step), float(loss)) for step, loss in found.get(name, ()))
    return Row(**found)


def to_json(row: Row) -> str:
    """A row as a line, without its end."""
    return json.dumps(asdict(row))


def write(folder: Path, rows: Iterable[Row]) -> None:
    """Replace the table of a folder; whatever happens, it is the old one or the new one.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """
    lines = [to_json(row) + "\n" for row in rows]
    write_atomically(folder / TABLE, "".join(lines).encode())


# ---- to a loss


def steps_to(row: Row, target: float, *, of: str = "val_losses") -> float | None:
    """Steps until a loss was reached for the first time, by a line between two measured points.

    Args:
        row: The run.
        target: The loss.
        of: "val_losses", or "losses" of training.

    Returns:
        None: It was never reached.

    Held by: tests/unit/test_sweep_table.py::test_the_way_to_a_loss_is_interpolated
    """
    before: tuple[int, float] | None = None
    for step, loss in getattr(row, of):
        if loss <= target:
            if before is None or before[1] <= loss:
                return float(step)
            fraction = (before[1] - target) / (before[1] - loss)
            return before[0] + fraction * (step - before[0])
        before = (step, loss)
    return None


@dataclass(frozen=True)
class ToLoss:
    """What it took to reach a loss with one batch, at the learning rate that needs fewest steps.

    Args:
        batch: Samples per step.
        lr: The rate.
        steps: Mean over the seeds.
        samples: `steps` times `batch`.
        seconds: `steps` times the mean seconds of a step.
    """

    batch: int
    lr: float
    steps: float
    samples: float
    seconds: float


def to_loss(rows: Sequence[Row], target: float, *, of: str = "val_losses") -> list[ToLoss]:
    """Steps, samples and seconds to a loss for each batch of a sweep, smallest batch first.

    A rate at which one of the seeds does not reach the loss does not count, and a batch without a
    rate that does is left out.

    Args:
        rows: Rows of one sweep.
        target: The loss.
        of: "val_losses", or "losses" of training.

    Held by: tests/unit/test_sweep_table.py::test_each_batch_is_taken_at_its_best_rate
    """
    by_batch: dict[int, list[ToLoss]] = {}
    for (batch, lr), same in grouped(rows).items():
        counts = [steps_to(row, target, of=of) for row in same]
        steps = [count for count in counts if count is not None]
        if len(steps) < len(same):
            continue
        mean_steps = statistics.fmean(steps)
        seconds = mean_steps * statistics.fmean(row.step_s or math.nan for row in same)
        way = ToLoss(batch, lr, mean_steps, mean_steps * batch, seconds)
        by_batch.setdefault(batch, []).append(way)
    best = []
    for batch in sorted(by_batch):
        best.append(min(by_batch[batch], key=_steps))
    return best


def _steps(way: ToLoss) -> float:
    return way.steps


def good_rates(
    rows: Sequence[Row], target: float, *, slack: float = 1.1, of: str = "val_losses"
) -> dict[int, list[float]]:
    """{batch: rates that need at most `slack` times the steps of the best one}, both ascending.

    The best rate of a grid says more than a sweep knows: its neighbour is often nearly as good.

    Args:
        rows: Rows of one sweep; a rate counts where all of its seeds reach the loss.
        target: The loss.
        slack: Times the fewest steps of the batch, means over the seeds.
        of: "val_losses", or "losses" of training.

    Held by: tests/unit/test_sweep_table.py::test_good_rates_are_nearly_as_fast_as_the_best
    """
    means: dict[int, dict[float, float]] = {}
    for (batch, lr), same in sorted(grouped(rows).items()):
        counts = [steps_to(row, target, of=of) for row in same]
        steps = [count for count in counts if count is not None]
        if len(steps) == len(same):
            means.setdefault(batch, {})[lr] = statistics.fmean(steps)
    good = {}
    for batch, by_rate in means.items():
        most = slack * min(by_rate.values())
        good[batch] = [lr for lr, steps in by_rate.items() if steps <= most]
    return good


def grouped(rows: Iterable[Row]) -> dict[tuple[int, float], list[Row]]:
    """{(batch, lr): its runs, one for each seed}."""
    found: dict[tuple[int, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row.batch, row.lr), []).append(row)
    return found


# ---- many steps or many samples


@dataclass(frozen=True)
class Tradeoff:
    """Steps against samples: (S / S_min - 1) (E / E_min - 1) = 1.

    Args:
        least_steps: S_min, what a batch without end would take.
        least_samples: E_min, what the smallest batch takes.
        relative_error: Root mean square of (fitted - measured) / measured of the steps.

    Source: McCandlish et al. 2018 (arXiv:1812.06162), equation 2.11.
    """

    least_steps: float
    least_samples: float
    relative_error: float

    @property
    def critical_batch(self) -> float:
        """E_min / S_min: there both steps and samples are twice their least."""
        return self.least_samples / self.least_steps

    def steps(self, batch: float) -> float:
        """S of a batch: with E = B S the equation says S = S_min + E_min / B."""
        return self.least_steps + self.least_samples / batch


def fit_tradeoff(batches: Sequence[float], steps: Sequence[float]) -> Tradeoff:
    """The curve nearest to measured steps, by least squares of the relative errors.

    Args:
        batches: Samples per step, of at least two sizes.
        steps: Steps to the same loss.

    Raises:
        ValueError: Fewer than two sizes of batch.

    Held by: tests/unit/test_sweep_table.py::test_the_curve_is_found_again
    """
    sizes = np.asarray(batches, dtype=float)
    counts = np.asarray(steps, dtype=float)
    if len(set(sizes.tolist())) < 2 or sizes.shape != counts.shape:
        raise ValueError(
            f"{len(sizes)} batches and {len(counts)} numbers of steps: a curve with two unknowns "
            "needs as many of both, of two sizes at least"
        )
    # S = S_min + E_min / B, each equation divided by its measured S
    columns = np.stack([1 / counts, 1 / (sizes * counts)], axis=1)
    (least_steps, least_samples), *_ = np.linalg.lstsq(columns, np.ones_like(counts), rcond=None)
    if least_steps <= 0 or least_samples <= 0:
        least_steps, least_samples = _at_the_bound(counts, sizes)
    errors = (least_steps + least_samples / sizes) / counts - 1
    return Tradeoff(float(least_steps), float(least_samples), float(np.sqrt(np.mean(errors**2))))


def _at_the_bound(counts: np.ndarray, sizes: np.ndarray) -> tuple[float, float]:
    """The better of the two curves with one unknown: steps fall as 1 / B, or not at all.

    The other unknown is tiny instead of negative, which it cannot be.
    """
    found = []
    for scale in (np.ones_like(sizes), 1 / sizes):
        shares = scale / counts
        factor = shares.sum() / (shares**2).sum()
        error = ((factor * shares - 1) ** 2).sum()
        found.append((error, factor))
    (constant_error, constant), (falling_error, falling) = found
    if falling_error <= constant_error:
        return 1e-6 * counts.min(), falling
    return constant, 1e-6 * (sizes * counts).min()


# ---- final losses


def final_losses(
    rows: Iterable[Row], *, of: str = "val_loss"
) -> tuple[list[int], list[float], list[list[float]]]:
    """(Batches, rates, losses [rates, batches]): means over the seeds.

    A cell is infinite where a seed diverged or failed, and NaN where there was no run.

    Held by: tests/unit/test_sweep_table.py::test_losses_are_laid_out_by_batch_and_rate
    """
    cells = grouped(rows)
    batches = sorted({batch for batch, _ in cells})
    rates = sorted({lr for _, lr in cells})
    matrix = []
    for lr in rates:
        matrix.append([_cell(cells.get((batch, lr), []), of) for batch in batches])
    return batches, rates, matrix


def _cell(same: Sequence[Row], of: str) -> float:
    if not same:
        return math.nan
    losses = [getattr(row, of) for row in same if row.status == DONE]
    if len(losses) < len(same) or None in losses:
        return math.inf
    return statistics.fmean(losses)


def shown(rows: Iterable[Row]) -> list[str]:
    """The rows as lines of a table for people."""
    header = f"{'batch':>6} {'lr':>9} {'seed':>5} {'steps':>6} {'val loss':>9} {'s/step':>8}"
    lines = [f"{header}  status"]
    for row in rows:
        val_loss = "-" if row.val_loss is None else f"{row.val_loss:.4f}"
        step_s = "-" if row.step_s is None else f"{row.step_s:.4f}"
        told = f"{row.status}: {row.reason}" if row.reason else row.status
        lines.append(
            f"{row.batch:>6} {row.lr:>9.3g} {row.seed:>5} {row.steps:>6} {val_loss:>9} "
            f"{step_s:>8}  {told}"
        )
    return lines


def row_of_history(
    named: Mapping[str, Any], history: Sequence[Mapping[str, float]], steps: int
) -> Row:
    """A row from the metrics of a run.

    Args:
        named: Fields that the metrics do not hold: `run`, `recipe`, `batch` and so on.
        history: The history as `Trainer.history` has it.
        steps: Number of steps done.
    """
    losses = []
    val_losses = []
    seconds = 0.0
    counted = 0
    noise_scale = None
    for entry in history:
        step = int(entry["step"])
        if "loss" in entry:
            losses.append((step, entry["loss"]))
            seconds += entry["step_s"] * (step - counted)
            counted = step
            noise_scale = entry.get("noise_scale", noise_scale)
        if "val_loss" in entry:
            val_losses.append((step, entry["val_loss"]))
    found: dict[str, Any] = dict(named)
    if losses:
        last = losses[-max(1, len(losses) // 10) :]
        found["loss"] = statistics.fmean(loss for _, loss in last)
        found["step_s"] = seconds / counted
        found["noise_scale"] = noise_scale
    if val_losses and val_losses[-1][0] == steps:
        found["val_loss"] = val_losses[-1][1]
    return Row(**found, steps=steps, losses=tuple(losses), val_losses=tuple(val_losses))
