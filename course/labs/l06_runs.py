"""Lesson 06: the small GPT and the small ViT that it trains, and the sweeps that come with it.

    python -m labcode.run.sweep gpt_tiny --sweep.batch 4,8,16,32,64,128,256,512,1024
        --sweep.lr 1e-3,3e-3,5.5e-3,1e-2,1.7e-2,3e-2 ... --sweep.out gpt

made the table of the GPT; the whole command is `COMMAND`, and takes some ten minutes of two cores.
`VIT_COMMAND` made that of the ViT, in a minute. The steps and losses in them are those of any
machine; the seconds are not, and nobody reads them.
"""

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from labcode import recipes
from labcode.config import Config, GPTConfig
from labcode.measure import metrics
from labcode.run import sweep as sweeps
from labcode.run import sweep_table
from labcode.run.sweep import Sweep, SweepConfig
from labcode.run.sweep_table import Row
from labcode.train.tasks import make_task

FOLDER = Path(__file__).resolve().parents[2] / "labcode" / "assets" / "sweeps"
TARGET = 2.3  # nats per character, of the sweep
LIMIT_S = 120.0  # for one run; it takes some five seconds

GPT_FIELDS: dict[str, object] = {
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.hidden_size": 32,
    "model.context_length": 32,
    "optim.warmup_steps": 20,
    "train.eval_batches": 16,
    "train.log_every": 25,
}
COMMAND = (
    "python -m labcode.run.sweep gpt_tiny --sweep.batch 4,8,16,32,64,128,256,512,1024 "
    "--sweep.lr 1e-3,3e-3,5.5e-3,1e-2,1.7e-2,3e-2 --seeds 1,2,3 --sweep.samples 200000 "
    f"--sweep.most_steps 2000 --sweep.target {TARGET} --sweep.evals 60 --sweep.end_lr 1 "
    + " ".join(f"--{name} {value}" for name, value in GPT_FIELDS.items())
)

VIT_FIELDS: dict[str, object] = {
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.hidden_size": 32,
    "model.patch_size": 15,
    "train.eval_batches": 4,
    "train.log_every": 5,
}
VIT_COMMAND = (
    "python -m labcode.run.sweep vit_tiny --sweep.batch 1,2,4,8,16 "
    "--sweep.lr 1e-3,3e-3,1e-2,3e-2,1e-1 --seeds 1,2,3 --sweep.samples 320 --sweep.evals 4 "
    "--sweep.warmup 0.1 --sweep.end_lr 1 "
    + " ".join(f"--{name} {value}" for name, value in VIT_FIELDS.items())
)


def gpt() -> Config:
    """The small GPT of the lesson: one layer, 32 characters of Shakespeare."""
    return recipes.with_changes(recipes.gpt_tiny(), GPT_FIELDS)


def whole_model() -> GPTConfig:
    """The model of `gpt()`, with the vocabulary of the text."""
    task = make_task(gpt())
    assert isinstance(task.model_config, GPTConfig)
    return task.model_config


def shipped(name: str) -> list[Row]:
    """The rows of a sweep that comes with the course: "gpt" or "vit"."""
    return sweep_table.read(FOLDER / f"{name}.jsonl")


def mean_noise_scale(out: str) -> float | None:
    """The noise scale of a run in this folder, mean of its rows; None where nobody has made it.

    Args:
        out: Folder of a run with `--train.noise_scale`, whose rows are equally many steps apart.
    """
    if not Path(out).exists():
        return None
    found = [row["noise_scale"] for row in metrics.read(out) if "noise_scale" in row]
    return statistics.fmean(found) if found else None


def trained(changes: Mapping[str, object], steps: int = 400, samples: int = 16) -> Row:
    """The row of one run of the small GPT, in a process of its own.

    Args:
        changes: Fields of the config, as `{"optim.lr": 1e-2}`.
        steps: Number of steps of the run, unless `changes` say otherwise; ten validations, at even
            distances.
        samples: Per step, likewise.

    Raises:
        ValueError: No such field, or values that do not fit.
    """
    fields: dict[str, object] = {
        "train.steps": steps,
        "train.global_batch": samples,
        "train.sample_tokens": 0,
        "train.seed": 1,
    }
    base = recipes.with_changes(gpt(), fields | dict(changes))
    with tempfile.TemporaryDirectory(prefix="labcode-l06-") as folder:
        # as if there were one for each core, so that it has one thread: it is tiny
        asked = SweepConfig(evals=10, limit_s=LIMIT_S, out=folder)
        (row,) = sweeps.run(base, Sweep(sweep=asked), show=False)
    return row
