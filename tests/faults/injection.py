"""Faults that are put into a rank: functions for `patch`, to be bound with `functools.partial`.

Moments are counted in events: what Python's audit hooks report of files opened for writing,
renamed, made or removed below the working folder. The same command has the same events in every
run, so that a number names a moment.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .fixtures import in_step

# event: which of its arguments are paths
EVENTS = {
    "open": (0,),
    "os.mkdir": (0,),
    "os.rename": (0, 1),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.truncate": (0,),
    "os.link": (0, 1),
    "os.symlink": (1,),
    "shutil.rmtree": (0,),
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def on_rank(rank: int, patch: Callable[[], object]) -> None:
    """A patch of one rank alone."""
    if os.environ.get("RANK", "0") == str(rank):
        patch()


def all_of(*patches: Callable[[], object]) -> None:
    """Several patches."""
    for patch in patches:
        patch()


def at_event(number: int, act: Callable[[], object]) -> None:
    """Do something in the event of this number, counted from 1; the event itself comes after it."""
    here = os.getcwd() + os.sep
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in EVENTS or not _counts(event, args, here):
            return
        count += 1
        if count == number:
            act()

    sys.addaudithook(hook)


def count_events(file: str) -> None:
    """Write the number of events so far to a file, which does not count itself."""
    here = os.getcwd() + os.sep
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS and _counts(event, args, here):
            count += 1
            os.pwrite(descriptor, b"%8d" % count, 0)

    sys.addaudithook(hook)


def _counts(event: str, args: tuple[Any, ...], here: str) -> bool:
    if event == "open" and not (isinstance(args[2], int) and args[2] & WRITING):
        return False
    for index in EVENTS[event]:
        path = args[index]
        if isinstance(path, (str, bytes, Path)):
            text = os.path.join(here, os.fsdecode(path))
            if text.startswith(here):
                return True
    return False


# ---- what happens


def die() -> None:
    """SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail(error: str, *args: Any) -> None:
    """Raise an error of Python by its name."""
    kinds = {"OSError": OSError, "MemoryError": MemoryError, "ValueError": ValueError}
    kinds["RuntimeError"] = RuntimeError
    kinds["KeyboardInterrupt"] = KeyboardInterrupt  # pyright: ignore
    raise kinds[error](*args)


# ---- where it happens


def during(module: str, name: str, act: Callable[[], object], call: int = 1) -> None:
    """Do something at the beginning of the n-th call of a function or method of labcode.

    Args:
        module: Such as "labcode.run.run".
        name: Such as "build", or "RunFolder.look".
        act: What.
        call: Which call, counted from 1.
    """
    import importlib

    owner: Any = importlib.import_module(module)
    *outer, last = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, last)
    calls = 0

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            act()
        return original(*args, **options)

    setattr(owner, last, wrapped)


def at_step(step: int, act: Callable[[], object], *, before: bool = True) -> None:
    """Do something in the optimizer's step of that number, before or after the update."""
    in_step(step, act, before=before)


def unreadable(text: str, error_number: int) -> None:
    """Opening a file for reading whose path contains a text fails, as on a broken disk.

    The tests may run as root, whom no permission keeps out.
    """
    import builtins
    import io

    original = io.open

    def open_or_fail(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if isinstance(file, (str, bytes, os.PathLike)) and text in os.fsdecode(file):
            writes = any(letter in mode for letter in "wax+")
            if not writes:
                raise OSError(error_number, os.strerror(error_number), os.fsdecode(file))
        return original(file, mode, *args, **options)

    builtins.open = open_or_fail
    io.open = open_or_fail


def poison(step: int, value: float, where: str) -> None:
    """Put a number into the model after a step: in "weights", "one weight" or "moments"."""
    import torch

    original = torch.optim.AdamW.step
    steps = 0

    def poisoned(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal steps
        result = original(self, *args, **options)
        steps += 1
        if steps == step:
            with contextlib.suppress(StopIteration), torch.no_grad():
                _put(self, value, where)
        return result

    torch.optim.AdamW.step = poisoned  # pyright: ignore


def _put(optimizer: Any, value: float, where: str) -> None:
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    if where == "weights":
        for param in parameters:
            param.fill_(value)
    elif where == "one weight":
        parameters[len(parameters) // 2].view(-1)[0] = value
    else:
        optimizer.state[parameters[0]]["exp_avg"].fill_(value)


def left_out_steps_move_nothing():
    """A patch: a step that is left out changes neither a weight nor what the optimizer keeps."""
    import torch

    from labcode.train.step import TrainStep

    original = TrainStep.__call__

    def held(training):
        found = [param.detach() for param in training.model.weights.values()]
        for state in training.optimizer.state.values():
            found += list(state.values())
        return [tensor.clone() for tensor in found]

    def watched(self):
        before = held(self.training)
        step = original(self)
        same = all(map(torch.equal, before, held(self.training)))
        if self.training.steps_done > 1:  # the optimizer has nothing before its first step
            assert same == (step.rescaled or bool(step.left_out)), (
                f"step {self.training.steps_done}"
            )
        return step

    TrainStep.__call__ = watched
