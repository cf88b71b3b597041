"""`python -m tools.reference_runs [RECIPE ...]`: train the reference runs anew, and keep them.

TensorBoard shows them under the runs of one's own. Minutes each on two cores. What is kept is
small: rows of what is the same on every machine, the same as a TensorBoard log, and with which
torch it was made.

    python -m tools.reference_runs gpt_tiny --run runs/gpt_tiny-003    # keep a run that is there
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

from labcode.measure import metrics

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "labcode" / "assets" / "reference_runs"
# What is the same on every machine; speeds are not.
KEPT = ("step", "loss", "val_loss", "grad_norm", "lr")
RECIPES = ("gpt_tiny", "vit_tiny")
BOARD = "events.out.tfevents.reference"


def keep(run: Path, name: str) -> Path:
    """Write the reference run of a recipe from the folder of a run that has finished.

    Raises:
        ValueError: The run was not that recipe as it is, or has not finished.
    """
    about = json.loads((run / "config.json").read_text())
    rows = metrics.read(run)
    if about["name"] != name or rows[-1]["step"] != about["train"]["steps"]:
        raise ValueError(f"{run} is no finished run of {name}: train it with no other option")
    target = FOLDER / name
    shutil.rmtree(target, ignore_errors=True)
    (target / "tensorboard").mkdir(parents=True)
    kept = []
    for row in rows:
        kept.append({key: row[key] for key in KEPT if key in row})
    lines = [json.dumps(row) for row in kept]
    (target / metrics.FILE_NAME).write_text("\n".join(lines) + "\n")
    _write_board(target / "tensorboard", kept)
    about["train"]["out"] = None  # where it lay is nobody's business
    made = {"recipe": name, "torch": torch.__version__, "config": about}
    (target / "about.json").write_text(json.dumps(made, indent=1) + "\n")
    return target


def _write_board(folder: Path, rows: Sequence[metrics.Row]) -> None:
    """The rows as a TensorBoard log with a name that says nothing of the machine."""
    with tempfile.TemporaryDirectory() as scratch:
        writer = SummaryWriter(scratch)
        for row in rows:
            for name, value in row.items():
                if name != "step":
                    writer.add_scalar(metrics.tag(name), value, row["step"], walltime=row["step"])
        writer.close()
        (log,) = Path(scratch).iterdir()
        shutil.copyfile(log, folder / BOARD)


def main(arguments: Sequence[str]) -> int:
    """Train and keep; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--run", type=Path, help="keep this run instead of training one")
    given = parser.parse_args(arguments)
    for name in given.recipes:
        with tempfile.TemporaryDirectory() as scratch:
            run = given.run
            if run is None:
                run = Path(scratch) / "run"
                command = [sys.executable, "-m", "labcode.train", name, "--train.out", str(run)]
                subprocess.run(command, check=True)
            print(keep(run, name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
