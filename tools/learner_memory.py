"""`python -m tools.learner_memory [NN ...]`: the memory and the cores that one learner needs.

Executes solution notebooks one after the other, as a learner's kernel would, and watches the kernel
and all processes that it starts (ranks, torchrun, data workers).
The table goes into INSTRUCTORS.md.
"""

import argparse
import sys
import threading
import time
from typing import NamedTuple

import nbformat
import psutil

from tools.notebook_run import ROOT, run

EVERY_S = 0.25
GIB = 2**30
LESSONS = ("01", "05", "09", "12")


class Usage(NamedTuple):
    """What a lesson took at its peak, added over the kernel and what it had started.

    Args:
        lesson: Number of the lesson.
        resident_bytes: The sum of resident sizes; shared pages count once for each process.
        proportional_bytes: The same with each shared page divided by its users: what the machine
            must have (PSS, Linux).
        processes: The largest number of them at a time.
        cores: Processor seconds for each second, on the mean.
        wall_s: How long the lesson ran.
    """

    lesson: str
    resident_bytes: int
    proportional_bytes: int
    processes: int
    cores: float
    wall_s: float


class Watcher(threading.Thread):
    """Looks at all descendants of this process until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.resident_bytes = 0
        self.proportional_bytes = 0
        self.processes = 0
        self.cpu_s: dict[tuple[int, float], float] = {}

    def run(self) -> None:
        while not self.over.wait(EVERY_S):
            self._look()

    def _look(self) -> None:
        resident = 0
        proportional = 0
        family = psutil.Process().children(recursive=True)
        for process in family:
            try:
                memory = process.memory_full_info()
                times = process.cpu_times()
                key = (process.pid, process.create_time())
            except psutil.Error:  # it has just ended
                continue
            resident += memory.rss
            proportional += getattr(memory, "pss", memory.rss)
            self.cpu_s[key] = times.user + times.system
        self.resident_bytes = max(self.resident_bytes, resident)
        self.proportional_bytes = max(self.proportional_bytes, proportional)
        self.processes = max(self.processes, len(family))


def measure(lesson: str) -> Usage:
    """Execute the solution of a lesson and say what it took."""
    path = next((ROOT / "solutions").glob(f"{lesson}_*.ipynb"))
    notebook = nbformat.read(path, as_version=4)
    watcher = Watcher()
    watcher.start()
    start = time.perf_counter()
    run(notebook)
    wall_s = time.perf_counter() - start
    watcher.over.set()
    watcher.join()
    return Usage(
        lesson,
        watcher.resident_bytes,
        watcher.proportional_bytes,
        watcher.processes,
        sum(watcher.cpu_s.values()) / wall_s,
        wall_s,
    )


def row(usage: Usage) -> str:
    """A line of the table."""
    return (
        f"| {usage.lesson} | {usage.processes} | {usage.proportional_bytes / GIB:.1f} "
        f"| {usage.resident_bytes / GIB:.1f} | {usage.cores:.1f} | {usage.wall_s:.0f} |"
    )


def main(wanted: list[str]) -> int:
    """The command line; returns the exit code."""
    print("| lesson | processes | GiB needed | GiB, sum of RSS | cores, mean | seconds |")
    print("|---|---:|---:|---:|---:|---:|")
    for lesson in wanted or LESSONS:
        print(row(measure(lesson)), flush=True)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.learner_memory", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("lesson", nargs="*", help="numbers of lessons (default 01 05 09 12)")
    sys.exit(main(parser.parse_args().lesson))
