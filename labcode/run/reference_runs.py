"""The reference runs that ship with the course: each recipe that a laptop can do, trained once.

Of each there are the loss, the validation loss, the gradient norm and the learning rate, as rows
and as a TensorBoard log: what should be the same on every machine. Speeds are not kept.

`gpt_10m` has none: at half a minute a step it is no run for a laptop.

Made anew by `python -m tools.reference_runs`.
"""

from pathlib import Path

from labcode.measure import metrics
from labcode.runtime import suggest

FOLDER = Path(__file__).resolve().parents[1] / "assets" / "reference_runs"
KEPT = ("step", "loss", "val_loss", "grad_norm", "lr")


def names() -> list[str]:
    """The recipes that have a reference run."""
    return sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir())


def folder(name: str) -> Path:
    """The folder of a recipe's reference run; TensorBoard and `metrics.read` take it.

    Raises:
        ValueError: The recipe has none.
    """
    if name not in names():
        raise ValueError(suggest.unknown("reference run", name, names()))
    return FOLDER / name


def rows(name: str) -> list[dict[str, float]]:
    """The rows of a recipe's reference run.

    Held by: tests/ranks/test_reference_runs.py, which does its first steps again
    """
    return metrics.read(folder(name))
