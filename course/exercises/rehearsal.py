"""A script that is meant for torchrun, played on simulated ranks before real ones are started.

    outcome = rehearse(path.read_text(), str(path), nproc=2)
    tell("on 2 ranks: ", path.name, outcome)    # who waits for whom, and in which line of the file

On real ranks a collective that only one of them calls ends after a minute, with the word of gloo or
of the kernel that killed the process. Here it is known at once. What else goes wrong in the script
is left to the real ranks, whose tracebacks say it.
"""

import contextlib
import functools
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from course.answer import Hint
from course.exercises.expect import settle
from course.exercises.simulated import Endless, Mismatch, Outcome, here, join, simulate

JOINED = "joined"  # a note of the rank that calls init_process_group
Names = dict[str, Any]  # what a script defines


def call_main(script: Names, *args: Any) -> Any:
    """What is called of a script: `main(folder, *args)`."""
    return script["main"](Path("."), *args)


def rehearse(
    source: str,
    file: str,
    nproc: int,
    *args: Any,
    call: Callable[..., Any] = call_main,
    **names: Any,
) -> Outcome:
    """Execute a script on simulated ranks, in a folder of their own, and call what it defines.

    Args:
        source: Text of the code.
        file: The name under which tracebacks know its lines.
        nproc: How many ranks.
        args: What `call` is given besides.
        call: Called with all names that the script defines, on each rank; what it returns is the
            result of that rank.
        names: What the script finds under these names in place of what it imports.

    Held by: tests/unit/test_rehearsal.py
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.chdir(folder))
        # simulated ranks are on the CPU
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", _no))
        stack.enter_context(_joined_by_the_script())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        return simulate(nproc, _play, source, file, call, args, names, joined=False)


def tell(case: str, whose: str, outcome: Outcome) -> None:
    """Who waits for whom, and that nobody has joined.

    Args:
        case: What a hint begins with.
        whose: The lines that are named: "train_04.py", or "your cell".
        outcome: Outcome of its rehearsal.

    Raises:
        Hint: One of the two.
    """
    first = outcome.errors.get(min(outcome.errors, default=0))
    if first is not None and not isinstance(first, (Mismatch, Endless)):
        return
    if not first and not any(one.kind == JOINED for one in outcome.events):
        raise Hint(
            f"{case}no rank joins the others: without dist.init_process_group() each of them "
            "trains for itself, as if it were alone"
        )
    try:
        settle(outcome, f"{case}(lines are those of {whose}) ")
    except Hint as hint:
        text = f"{hint}. Is one of these calls inside an `if rank == 0`?"
        raise Hint(text if outcome.stuck or isinstance(first, Mismatch) else str(hint)) from None


def _play(
    rank: int, source: str, file: str, call: Callable[..., Any], args: tuple, names: Names
) -> Any:
    """What torchrun starts on a rank; `run_file` seeds the ranks in the same way."""
    torch.manual_seed(rank)
    script: Names = {"__name__": "rehearsal", "__file__": file}
    exec(compile(source, file, "exec"), script)
    script.update(names)
    return call(script, *args)


@contextlib.contextmanager
def _joined_by_the_script() -> Iterator[None]:
    """A simulated rank is alone until it calls `init_process_group`."""
    plain = dist.init_process_group
    with mock.patch.object(dist, "init_process_group", functools.partial(_join, plain)):
        yield


def _join(plain: Callable[..., None], *args: Any, **options: Any) -> None:
    if dist.is_initialized():
        plain(*args, **options)  # which refuses a second one
    here().note(JOINED)
    join()


def _no() -> bool:
    return False
