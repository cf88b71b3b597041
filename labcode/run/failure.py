"""How a run that failed says so: one line for the job, whichever rank failed and however early.

There are three kinds of errors. Some are known to every rank: a grid that does not fit, a gradient
that is not finite, whatever the ranks have told each other (`runtime.agreement`). Rank 0 reports
those. Others are known to one rank alone: a GPU that is gone, a port in use, a full disk. That
rank reports them itself, with its number, since the others may never hear of them. The others only
see that it is gone, which is the third kind, and no reason for a traceback.
"""

import contextlib
import sys

from labcode.data.errors import DataError
from labcode.run import attempts
from labcode.runtime import bootstrap
from labcode.runtime.agreement import SharedError, is_shared
from labcode.runtime.bootstrap import Place
from labcode.runtime.ctrl_c import INTERRUPTED
from labcode.runtime.errors import is_out_of_memory, text_of

FAILED = 2
TOLD_BY = 2  # ranks of each node that report a lost one: one of the two may be the one


class RefusedError(SharedError, ValueError):
    """What was asked for cannot be run; every rank finds the same."""


def refuse_command(error: Exception) -> int:
    """Report an error in the command line, which all ranks of a job share.

    Args:
        error: The error with the text to show.

    Returns:
        The exit code of this rank.
    """
    try:
        place = bootstrap.read_environment()
    except ValueError:  # the command line comes first
        place = Place()
    return fail(place, RefusedError(str(error)))


def fail(place: Place, error: Exception, steps_done: int | None = None, hang: str = "") -> int:
    """Print one line about an error, for the whole job if all ranks know it.

    torchrun says the same line once more, below its own account of the failure.

    Args:
        place: Where this process stands: its rank and host.
        error: The error with the text to show. One that all know is reported by rank 0.
        steps_done: Optimizer steps before the error; None before training began.
        hang: Who waited for whom before it (`doctor.hang`); "" if that is not known.

    Returns:
        The exit code of this rank.

    Held by: tests/unit/test_failure.py
    """
    when = "" if steps_done is None else f"after step {steps_done}: "
    who = f"rank {place.rank}: " if place.world_size > 1 else ""
    if is_shared(error):
        line = f"error: {when}{text_of(error)}"
        # the restarts of a job meet the same error again
        is_told = place.rank == 0 and not attempts.is_said_before(line, place)
    elif knows_only_lost_peer(error):
        line = f"{who}{when}{bootstrap.lost_peer_message(error, hang)}"
        is_told = place.local_rank < TOLD_BY
    else:
        line = f"error: {who}{when}{text_of(error)}"
        is_told = True
    # by every rank, told or not: torchrun shows the line of the rank that ended first
    bootstrap.hand_to_agent(line)
    if is_told:
        _tell(line)
    # One that this rank alone knows the others hear by its end: it must not wait for them.
    return bootstrap.leave_together(place, FAILED) if is_shared(error) else FAILED


def interrupted(place: Place, message: str) -> int:
    """Say that Ctrl-C has ended the run.

    Args:
        place: Where this process stands; rank 0 speaks for the job.
        message: How far the run had come.

    Returns:
        The exit code of every rank.
    """
    say(place, f"interrupted {message}")
    return INTERRUPTED


def is_expected(error: BaseException, is_set_up: bool) -> bool:
    """Whether an error is no bug, so that one line says it better than a traceback.

    Args:
        error: What ended the run.
        is_set_up: Whether training began. A ValueError before that is about what was asked for.
    """
    if isinstance(error, OSError | SharedError | DataError):
        return True
    if is_out_of_memory(error) or knows_only_lost_peer(error):
        return True
    return isinstance(error, ValueError) and not is_set_up


def knows_only_lost_peer(error: BaseException) -> bool:
    """Whether this rank knows no more than that another one is gone, or does not answer.

    Args:
        error: What ended the run on this rank.
    """
    own = is_shared(error) or isinstance(error, OSError)  # a broken pipe is that of the output
    return not own and bootstrap.is_lost_peer(error)


def say(place: Place, message: str) -> None:
    """Print a line to stderr, once for the whole job.

    Args:
        place: Where this process stands: its rank and host.
        message: The line; one that an agent repeats goes through `fail`.
    """
    if place.rank == 0:
        _tell(message)


def _tell(line: str) -> None:
    """Print a line to stderr."""
    with contextlib.suppress(OSError):  # nobody reads it: the exit code says enough
        print(line, file=sys.stderr, flush=True)
