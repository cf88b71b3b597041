"""How checks call a learner's code in the notebook's own process: it must come to an end there.

    with bounded("does the loop also end for rank 0?"):
        found = learners_function(6)

What is counted are the lines that the learner's code executes. A clock would stop whatever happens
to be running when it rings, and an import that is broken off in its middle leaves half a module
behind, with which nothing works until the kernel is started anew.
"""

import contextlib
import functools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import labcode

MAX_LINES = 1_000_000  # of one call: far above what any exercise needs, and done within seconds


@contextlib.contextmanager
def bounded(hint: str) -> Iterator[None]:
    """Within this block the learner's code may execute `MAX_LINES` lines, and no more.

    Lines of libraries do not count, and are not slowed down.

    Raises:
        AssertionError: It goes on; the text ends with `hint`.
    """
    num_lines = 0

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_lines
        if event == "line":
            num_lines += 1
            assert num_lines <= MAX_LINES, (
                f"it did not come to an end after {MAX_LINES:,} lines: {hint}"
            )
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return None if _is_library(frame.f_code.co_filename) else on_line

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


@functools.cache
def _is_library(filename: str) -> bool:
    return filename.startswith(("<frozen", *_library_folders()))


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.add(str(Path(labcode.__file__).parent))
    return tuple(folders)
