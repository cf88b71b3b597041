"""Predicted against measured steps of the course's own recipes on this machine, up to 4 ranks.

    python benchmarks/planner_here.py [--steps 30]        # about six minutes on two quiet cores

For each number of ranks the machine is measured (`python -m labcode.perf calibrate`), then each
layout is predicted and trained for some steps with one thread a rank. More ranks than cores share
them, in the calibration as in the training. The last column is after one factor for the whole
table, fitted on all other rows.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from side_by_side import machine, options, write

from labcode import recipes
from labcode.perf.cluster import load_cluster
from labcode.perf.estimate import estimate, fit_scale
from labcode.perf.of_config import model_of, settings_of
from labcode.runtime import launch
from labcode.runtime.command import read_changes

RESULT = Path(__file__).parent / "results" / "planner_here_cpu.json"
SMALLER = "--train.global_batch 8 --train.micro_batch 4"  # of gpt_10m, which is meant for a GPU
LAYOUTS = (
    ("gpt_tiny", 1, ""),
    ("gpt_tiny", 1, "--parallel.activation_checkpointing full"),
    ("gpt_tiny", 2, ""),
    ("gpt_tiny", 2, "--parallel.zero_stage 1"),
    ("gpt_tiny", 2, "--parallel.tp 2"),
    ("gpt_tiny", 2, "--parallel.pp 2 --train.micro_batch 4"),
    ("vit_tiny", 1, ""),
    ("vit_tiny", 2, ""),
    ("vit_tiny", 2, "--parallel.tp 2"),
    ("gpt_10m", 1, SMALLER),
    ("gpt_10m", 2, SMALLER),
    ("gpt_10m", 2, SMALLER + " --parallel.tp 2"),
    ("gpt_tiny", 4, ""),
    ("gpt_tiny", 4, "--parallel.tp 2"),
    ("gpt_tiny", 4, "--parallel.tp 2 --parallel.pp 2 --train.micro_batch 4"),
)
ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def main() -> None:
    words = options(__doc__, steps=30).parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        clusters = {}
        for ranks in (1, 2, 4):
            file = str(Path(folder) / f"{ranks}.toml")
            launch.run("labcode.run.calibrate", file, nproc=ranks, echo=False, env_extra=ENV)
            clusters[ranks] = load_cluster(file)
        for number, (recipe, ranks, changes) in enumerate(LAYOUTS):
            print(f"{number + 1} of {len(LAYOUTS)}: {recipe} {changes}", file=sys.stderr)
            base = recipes.get(recipe)
            config = recipes.with_changes(base, read_changes(base, changes.split()))
            shape = config.parallel.shape(ranks)
            cluster = clusters[ranks]
            settings = settings_of(config, shape, cluster.gpu)
            predicted = estimate(model_of(config), shape, cluster, settings).step_s
            out = Path(folder) / str(number)
            measured = _measured_s(recipe, ranks, changes, words.steps, out)
            rows.append((f"{recipe}, {shape} {changes}", measured, predicted))
    _report(rows)


def _measured_s(recipe: str, ranks: int, changes: str, steps: int, out: Path) -> float:
    """The median step of a training, without its first row."""
    fixed = f"--train.steps {steps} --train.log_every 5"
    launch.run(
        "labcode.train",
        recipe,
        *changes.split(),
        *fixed.split(),
        "--train.out",
        str(out),
        nproc=ranks,
        echo=False,
        env_extra=ENV,
    )
    found = []
    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "step_s" in row:
            found.append(row["step_s"])
    return statistics.median(found[1:])


def _report(rows: list[tuple[str, float, float]]) -> None:
    print("| layout | measured, ms | predicted, ms | predicted / measured | with one factor |")
    print("|---|---:|---:|---:|---:|")
    plain = []
    calibrated = []
    record: list[dict[str, Any]] = []
    for number, (name, measured, predicted) in enumerate(rows):
        others = rows[:number] + rows[number + 1 :]
        _, others_measured, others_predicted = zip(*others, strict=True)
        scale = fit_scale(others_measured, others_predicted)
        ratio = predicted / measured
        plain.append(abs(ratio - 1))
        calibrated.append(abs(scale * ratio - 1))
        times = f"{measured * 1e3:.1f} | {predicted * 1e3:.1f}"
        print(f"| {name} | {times} | {ratio:.2f} | {scale * ratio:.2f} |")
        record.append({"layout": name, "measured_s": measured, "predicted_s": predicted})
    medians = (statistics.median(plain), statistics.median(calibrated))
    print(f"\nmedian error {100 * medians[0]:.0f} %, with one factor {100 * medians[1]:.0f} %")
    result = {"median_error": medians[0], "with_one_factor": medians[1], "rows": record}
    write(RESULT, machine() | result)


if __name__ == "__main__":
    main()
