"""How checks call a learner's code in the notebook's own process: it must come to an end there.

    found = bounded("does the loop also end for rank 0?", learners_function, 6)

What is counted are the lines that the learner's code executes. A clock would stop whatever happens
to be running when it rings, and an import that is broken off in its middle leaves half a module
behind, with which nothing works until the kernel is started anew.

No exception ends what goes on for too long, since a loop around a bare `except:` would go on with
it. The code runs in a thread of its own, which is put to sleep for good in the middle of a line,
and takes no more time from anybody.
"""

import contextlib
import functools
import inspect
import queue
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import course
import labcode
from course.answer import Hint

# Limit of one call: far above what any exercise needs, and reached within seconds. Lines count, and
# on Python 3.11 the instructions of a line as well: `while True: pass` stays on one line forever.
MAX_STEPS = 5_000_000
LOOP = "does each loop end?"  # for `bounded`, where there is no better question


def bounded(hint: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a learner's function returns or raises, if it ends within `MAX_STEPS`.

    Lines of libraries do not count, and are not slowed down. What watches the calls of this thread,
    such as `without`, watches those of the function.

    Raises:
        Hint: It goes on; the text ends with `hint`.
    """
    ended: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
    num_steps = 0

    def on_step(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > MAX_STEPS:
            text = f"it did not come to an end after {MAX_STEPS:,} steps: {hint}"
            ended.put(functools.partial(_raise, Hint(text)))
            threading.Event().wait()
        return on_step

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        if is_library(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        return on_step

    def run(watch: Any) -> None:
        sys.setprofile(watch)
        sys.settrace(on_call)
        try:
            found = function(*args)
        except BaseException as error:
            ended.put(functools.partial(_raise, error))
        else:
            ended.put(lambda: found)

    context = copy_context()  # what is printed belongs to the cell that runs
    threading.Thread(target=context.run, args=(run, sys.getprofile()), daemon=True).start()
    return ended.get()()


def _raise(error: BaseException) -> None:
    raise error


OURS = ("labcode.", "course.")  # what the names of our modules begin with


@functools.cache
def is_library(filename: str) -> bool:
    """Whether a file is Python's, of a package, of labcode or of the course: no learner's."""
    return filename.startswith(("<frozen", *_library_folders()))


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.add(str(Path(labcode.__file__).parent))
    folders.add(str(Path(course.__file__).parent))
    return tuple(folders)


@contextlib.contextmanager
def without(*functions: Callable[..., Any]) -> Iterator[None]:
    """Within this block none of these functions may be called, by whatever name or detour.

    It is for finished solutions of an exercise, labcode's own and PyTorch's.

    Args:
        functions: Written in Python.

    Raises:
        Hint: At the end of the block, if one was called.
    """
    forbidden: dict[CodeType, str] = {}
    for function in functions:
        module = function.__module__.rpartition(".")[2]
        # a decorator such as torch.no_grad() has one wrapper for all functions
        own: Any = inspect.unwrap(function)
        whose = "labcode's own" if function.__module__.startswith(OURS) else "PyTorch's"
        forbidden[own.__code__] = f"{module}.{function.__qualname__} is {whose}"
    called = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in forbidden:
            called.append(forbidden[frame.f_code])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
    if called:
        raise Hint(f"{called[0]} answer to this exercise: write yours")
