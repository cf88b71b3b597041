"""What the benchmarks of parallel steps report alike: the slowest rank's times of two implementations, and their ratio."""

import os
import platform
import statistics

import torch

HEAD = (
    "| layout | implementation | ms per step, median | fastest | ours / theirs, median | quartiles |\n"
    + "|---|---|---:|---:|---:|---:|"
)


def machine() -> dict:
    """What the numbers belong to."""
    return {
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads_per_rank": 1,
    }


def report(layout: str, found: list[dict[str, list[float]]]) -> list[dict]:
    """Print a row for each implementation and return them; the ratio is the median over the rounds.

    Args:
        layout: Name of what was run.
        found: For each rank {implementation: seconds of each round}, ours first.
    """
    slowest = {
        who: [max(seconds) for seconds in zip(*(rank[who] for rank in found))] for who in found[0]
    }
    ours, theirs = slowest.values()
    ratios = [a / b for a, b in zip(ours, theirs)]
    ratio, quartiles = (
        statistics.median(ratios),
        [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
    )
    rows = []
    for who, seconds in slowest.items():
        row = {
            "layout": layout,
            "implementation": who,
            "median_ms": round(statistics.median(seconds) * 1e3, 1),
        }
        row |= {
            "fastest_ms": round(min(seconds) * 1e3, 1),
            "ratio": round(ratio, 3),
            "ratio_quartiles": quartiles,
        }
        shown = " | " if rows else f"**{ratio:.3f}** | {quartiles[0]:.3f} to {quartiles[1]:.3f}"
        print(
            f"| {layout} | {who} | {row['median_ms']} | {row['fastest_ms']} | {shown} |", flush=True
        )
        rows.append(row)
    return rows
