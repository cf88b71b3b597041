"""What the benchmarks share: their options, the machine, the table of two implementations."""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from labcode.runtime.hardware import usable_cores

HEAD = (
    "| layout | implementation | ms per step, median | fastest "
    "| ours / theirs, median | quartiles |\n"
    "|---|---|---:|---:|---:|---:|"
)


Who = TypeVar("Who")  # the name of a contestant
Contestant = TypeVar("Contestant")
Found = TypeVar("Found")


def options(description: str | None, **defaults: int) -> argparse.ArgumentParser:
    """A command line of whole numbers: `options(__doc__, rounds=15, stage_ms=150)`.

    Args:
        description: The docstring of the script; its first line is shown.
        defaults: {option: its default}; an underscore becomes a dash.
    """
    first_line = (description or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first_line)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    return {
        "cores": len(usable_cores()),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads_per_rank": 1,
    }


def write(path: Path, record: dict[str, Any]) -> None:
    """Write the record of a run, for people and for programs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def taking_turns(
    field: dict[Who, Contestant], rounds: int, measure: Callable[[Contestant], Found]
) -> dict[Who, list[Found]]:
    """{contestant: what was measured in each round}, all contestants within each round.

    Each round begins with the next contestant. What else the machine does in a round meets all of
    them, which is why ratios are taken within a round.
    """
    found: dict[Who, list[Found]] = {who: [] for who in field}
    order = list(field)
    for _ in range(rounds):
        for who in order:
            found[who].append(measure(field[who]))
        order = order[1:] + order[:1]
    return found


def seconds_together(run: Callable[[], Any]) -> float:
    """Seconds of a run on this rank, which all ranks begin together."""
    wait_for_device()
    dist.barrier()
    return seconds_of(run)


def seconds_of(run: Callable[[], Any]) -> float:
    """Seconds of a run, until the device has done it."""
    wait_for_device()
    started = time.perf_counter()
    run()
    wait_for_device()
    return time.perf_counter() - started


def wait_for_device() -> None:
    """Wait for the kernels of this process, if it has launched any on a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def outer_quartiles(values: list[float]) -> list[float]:
    """The first and the third quartile."""
    first, _, third = statistics.quantiles(values, n=4)
    return [round(first, 3), round(third, 3)]


def slowest_rank(found: list[dict[Any, list[float]]]) -> dict[Any, list[float]]:
    """{contestant: seconds of its slowest rank in each round}, from what each rank measured."""
    slowest = {}
    for who in found[0]:
        rounds = zip(*[rank[who] for rank in found], strict=True)
        slowest[who] = [max(seconds) for seconds in rounds]
    return slowest


def report(layout: str, found: list[dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Print a row for each implementation and return them; the ratio is the median over the rounds.

    Args:
        layout: Name of what was run.
        found: For each rank {implementation: seconds of each round}, ours first.
    """
    slowest = slowest_rank(found)
    ours, theirs = slowest.values()
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ratios)
    quartiles = outer_quartiles(ratios)
    rows = []
    for who, seconds in slowest.items():
        row = {
            "layout": layout,
            "implementation": who,
            "median_ms": round(statistics.median(seconds) * 1e3, 1),
            "fastest_ms": round(min(seconds) * 1e3, 1),
            "ratio": round(ratio, 3),
            "ratio_quartiles": quartiles,
        }
        shown = " | "
        if not rows:  # ours
            shown = f"**{ratio:.3f}** | {quartiles[0]:.3f} to {quartiles[1]:.3f}"
        times = f"{row['median_ms']} | {row['fastest_ms']}"
        print(f"| {layout} | {who} | {times} | {shown} |", flush=True)
        rows.append(row)
    return rows
