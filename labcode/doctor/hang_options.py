"""What stands behind `python -m labcode.doctor hang`, read before torch is imported.

Held by: tests/unit/test_doctor_command.py, tests/ranks/test_ask.py
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from labcode.doctor.find_run import find_run
from labcode.runtime.arguments import Parser

APART_S = 5.0
PATIENCE_S = 10.0  # a rank looks each second; a network disk may show it later


def read(arguments: Sequence[str]) -> tuple[argparse.Namespace, Path]:
    """The options, and the run that is meant.

    Args:
        arguments: Arguments behind the word `hang`.

    Raises:
        ValueError: An option is wrong, or no such run is under way; the message says what to give.
    """
    parser = Parser(
        prog="python -m labcode.doctor hang",
        description="Who is where in a job that stands still.",
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="RUN | PID | JOB",
        help="a run's folder, a process on this machine (a rank or its torchrun), or a SLURM job",
    )
    parser.add_argument("--apart", type=float, default=APART_S, help="seconds between two looks")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE_S, help="seconds that ranks have to answer"
    )
    parser.add_argument("--threads", action="store_true", help="the stacks of all threads")
    options = parser.parse_args(arguments)
    return options, find_run(options.target, Path.cwd())
