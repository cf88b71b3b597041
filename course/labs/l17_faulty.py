"""Lesson 17: `labcode.train` with a fault in it, for torchrun.

    python -m course.labs.l17_faulty kill:1:7 RECIPE ...    rank 1 dies after step 7
    python -m course.labs.l17_faulty signal:0:7 RECIPE ...  rank 0 is told to stop: SIGUSR1
    python -m course.labs.l17_faulty stuck:1:7 RECIPE ...   rank 1 reads its batch for 9 s
    python -m course.labs.l17_faulty none RECIPE ...        nothing happens

The fault comes in the first attempt only.

Held by: tests/unit/test_l17_labs.py; that ranks are started again, tests/ranks/test_restarts.py
"""

import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from labcode.runtime import bootstrap, launch
from labcode.train.__main__ import main as train

STUCK_S = 9.0
COLUMNS = 100  # of a cell's output
TOLD_STEPS = 4  # in a row; of more, the first and the last two
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
SHORT = (
    "gpt_tiny",
    *("--train.log_every", 1),
    *("--train.eval_every", 0),
    *("--train.eval_batches", 1),
    *("--train.sample_tokens", 4),
)


def run(fault: str, *args: object, nproc: int = 2, restarts: int = 0, goes_on: bool = False) -> str:
    """Train gpt_tiny with a fault under torchrun, and print what the ranks said.

    Args:
        fault: KIND:RANK:STEP or none.
        args: More of the command line of `labcode.train`, with the folder: `--train.out`, FOLDER.
        nproc: Ranks.
        restarts: How often torchrun starts all ranks again.
        goes_on: In what an earlier run has left in the folder; otherwise that is removed, so that a
            cell shows the same when it runs once more.

    Returns:
        All that they have printed.
    """
    if not goes_on:
        shutil.rmtree(str(args[args.index("--train.out") + 1]), ignore_errors=True)
    done = launch.run(
        "course.labs.l17_faulty",
        fault,
        *SHORT,
        *args,
        nproc=nproc,
        restarts=restarts,
        echo=False,
        env_extra=ON_CPU,
    )
    print(told(done.output))
    return done.output


def main(args: Sequence[str]) -> int:
    """Train; returns the exit code.

    Args:
        args: KIND:RANK:STEP or none, then the command line of `labcode.train`.
    """
    place = bootstrap.read_environment()
    if args[0] == "none" or place.attempt > 0:
        return train(args[1:])
    kind, rank, step = args[0].split(":")
    if place.rank == int(rank):
        # the loop imports torch, which `labcode.train` puts off until its arguments are parsed
        threading.Thread(target=_prepare, args=[FAULTS[kind], int(step)], daemon=True).start()
    return train(args[1:])


def _prepare(fault: Callable[[], None], step: int) -> None:
    while not hasattr(sys.modules.get("labcode.train.step"), "TrainStep"):
        time.sleep(0.005)
    train_step: Any = sys.modules["labcode.train.step"].TrainStep
    original = train_step.__call__

    def with_fault(self: Any) -> Any:
        if self.training.steps_done == step:
            fault()
        return original(self)

    train_step.__call__ = with_fault


def read_from_a_slow_disk() -> None:
    """Is called by one rank, while the others are in the collective that comes next."""
    time.sleep(STUCK_S)


def kill_this_process() -> None:
    """End at once, as when the kernel needs the memory or the node dies."""
    os.kill(os.getpid(), signal.SIGKILL)


def warn_this_process() -> None:
    """Send what SLURM sends some time before the limit."""
    os.kill(os.getpid(), signal.SIGUSR1)


FAULTS: dict[str, Callable[[], None]] = {
    "kill": kill_this_process,
    "signal": warn_this_process,
    "stuck": read_from_a_slow_disk,
}


def told(output: str) -> str:
    """What the ranks said, without what differs from run to run, most steps and the sample text.

    Args:
        output: What `launch.run` returned.
    """
    lines = []
    steps = []  # that have not been told yet
    for line in output.splitlines():
        text = line.removeprefix("[rank 0] ")
        if re.match(r"step \d+/\d+ \| loss", text):
            steps.append(" | ".join(text.split(" | ")[:2]))
            continue
        if re.match(r"\d+ ranks? on", text):
            text = text.partition(";")[0]
        elif not re.match(r"resuming|rank \d|stopped|(\[rank \d\] )?hang", text):
            continue
        lines.extend(_first_and_last(steps))
        steps = []
        lines.extend(textwrap.wrap(text, COLUMNS, subsequent_indent="    "))
    lines.extend(_first_and_last(steps))
    return "\n".join(lines)


def _first_and_last(steps: Sequence[str]) -> list[str]:
    """The lines of steps in a row, and of many only the first and the last two."""
    if len(steps) <= TOLD_STEPS:
        return list(steps)
    return [steps[0], f"    ... {len(steps) - 3} more steps ...", *steps[-2:]]


def resumed_from(output: str) -> int | None:
    """The step of the checkpoint that a run has resumed from; None if it began at step 1."""
    found = re.search(r"resuming from \S+step-0*(\d+)", output)
    return int(found[1]) if found else None


def losses(output: str) -> list[tuple[int, str]]:
    """(step, its loss) of all attempts, in the order in which they were made."""
    found = re.findall(r"step (\d+)/\d+ \| loss (\S+)", output)
    return [(int(step), loss) for step, loss in found]


def who_waits(output: str) -> tuple[int, int]:
    """(the rank that waits, the rank that has not come), as the watch says it.

    Raises:
        ValueError: It has said nothing.
    """
    missing = re.search(r"hang: .*?rank (\d+) has not come", output)
    waits = re.search(r"hang: .*; rank (\d+) waits", output)
    if missing is None or waits is None:
        raise ValueError("no line begins with 'hang:': was the rank stuck for long enough?")
    return int(waits[1]), int(missing[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
