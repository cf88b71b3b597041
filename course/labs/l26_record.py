"""Rewards of GRPO on brackets over the steps, by seed and by the generator's lag (lesson 26).

    python -m course.labs.l26_record [--seeds 8]

Each run starts from the same GPT (2 layers, 32 features, 90 supervised steps) and differs from the
others of its lag by the seed of prompts and answers. Steps, rewards and ratios are those of any
machine up to rounding; no time is measured. Lesson 26 draws them behind a run of its own.
"""

import argparse
import json

import torch

from course.labs import l26_two_fleets as lab


def main() -> None:
    """Train with each lag and seed, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    torch.set_num_threads(1)
    num_seeds = parser.parse_args().seeds
    runs = {}
    for lag in lab.LAGS:
        of_lag = []
        for seed in range(1, num_seeds + 1):
            rows = lab.train(lab.STEPS, seed, lag)
            of_lag.append([_rounded(row) for row in rows])
        runs[lag] = of_lag
        print(f"lag {lag}: {num_seeds} runs", flush=True)
    about = {
        "made by": "course/labs/l26_record.py",
        "columns": list(lab.Row._fields),
        "torch": torch.__version__.partition("+")[0],
    }
    lab.RECORDED.write_text(json.dumps({"about": about, "runs": runs}) + "\n")


def _rounded(row: lab.Row) -> list[float]:
    return [round(value, 5) for value in row]


if __name__ == "__main__":
    main()
