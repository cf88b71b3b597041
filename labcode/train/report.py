"""How a run that failed says so: one line for the job, whichever rank failed and however early.

There are two kinds of errors. Some are known to every rank: a grid that does not fit, a gradient
that is not finite, whatever the ranks have told each other (`comm.agreement`). Rank 0 reports
those. The others are known to one rank alone: a GPU that is gone, a port in use, a full disk. That
rank reports them itself, with its number, since the others may never hear of them.
"""

import sys

from labcode.comm import bootstrap
from labcode.comm.agreement import SharedError
from labcode.comm.bootstrap import Place

FAILED = 2
INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C


class RefusedError(SharedError, ValueError):
    """What was asked for cannot be run; every rank finds the same."""


def refuse_command(error: Exception) -> int:
    """Report an error in the command line, which all ranks of a job share."""
    try:
        place = bootstrap.read_environment()
    except ValueError:  # the command line comes first
        place = Place()
    return fail(place, RefusedError(str(error)))


def fail(place: Place, error: Exception, steps_done: int | None = None) -> int:
    """Print one line about an error and return this rank's exit code.

    Args:
        place: Of this process.
        error: With the text to show. A `SharedError` is reported by rank 0 for all.
        steps_done: Optimizer steps before the error; None before training began.

    Held by: tests/unit/test_report.py
    """
    when = "" if steps_done is None else f"after step {steps_done}: "
    if isinstance(error, SharedError):
        say(place, f"error: {when}{text_of(error)}")
        return bootstrap.leave_together(place, FAILED)
    who = f"rank {place.rank}: " if place.world_size > 1 else ""
    print(f"error: {who}{when}{text_of(error)}", file=sys.stderr, flush=True)
    return FAILED


def say(place: Place, message: str) -> None:
    """Print a line to stderr, once for the whole job."""
    if place.rank == 0:
        print(message, file=sys.stderr, flush=True)


def text_of(error: Exception) -> str:
    """The text of an error on one line; one of the operating system without its number."""
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror.lower()
        return f"{error.filename}: {reason}" if error.filename else reason
    return str(error)
