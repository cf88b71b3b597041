"""Short tracebacks in a notebook: the learner's own lines, without those of the library.

IPython hides frames that hold `__tracebackhide__`, but never the last one, and an error of the
library is raised in the library. So the frames are taken out before IPython sees them. `%tb` shows
all of them.
"""

import linecache
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from IPython.core.getipython import get_ipython

COURSE = Path(__file__).resolve().parent
LIBRARY = (COURSE, COURSE.parent / "labcode")
MAX_QUOTED = 50  # characters of a line of the learner's: its number says which one it is
FILE_LINE = re.compile(r'(?m)^ *File "([^"\n]*)", line (\d+), in (.*)$(?:\n +(.*))?')
CELL_LINE = re.compile(r'(?m)^( *)File "([^"\n]*ipykernel[^"\n]*)", line (\d+), in (.*)$')


def shorten() -> None:
    """From now on show short tracebacks, if this runs in the kernel of a notebook."""
    shell: Any = get_ipython()
    kernel = getattr(shell, "kernel", None)
    # the ranks of a pool have kernels of their own, which send their errors on
    if type(kernel).__module__.startswith("ipykernel"):
        shell.set_custom_exc((Exception, KeyboardInterrupt), _show)


def _show(
    shell: Any, kind: type, error: BaseException, trace: TracebackType, tb_offset: int | None = None
) -> None:
    """Called by IPython when a cell raises."""
    notes = [with_source(note) for note in getattr(error, "__notes__", [])]
    missing = _name_of_another_cell(error, trace)
    if missing:
        notes.append(f"if a cell above defines `{missing}`, run that one first")
    if notes:
        error.__notes__ = notes
    was_interrupted = isinstance(error, KeyboardInterrupt)
    shorter = down_to_cells(trace) if was_interrupted else without_library(trace)
    shell.showtraceback((kind, error, shorter), tb_offset=tb_offset)
    sys.last_traceback = trace


def _name_of_another_cell(error: BaseException, trace: TracebackType) -> str | None:
    """A name that the lines of a cell use outside of named functions, and nobody has defined."""
    *_, (frame, _) = traceback.walk_tb(trace)
    if isinstance(error, NameError) and frame.f_code.co_name.startswith("<"):
        return error.name
    return None


def is_ours(file: str) -> bool:
    """Whether a file belongs to labcode or to course."""
    return any(Path(file).is_relative_to(package) for package in LIBRARY)


def without_library(trace: TracebackType) -> TracebackType:
    """A traceback without labcode's frames; the whole one if nothing else would be left."""
    kept = []
    step: TracebackType | None = trace
    while step is not None:
        if not is_ours(step.tb_frame.f_code.co_filename):
            kept.append(step)
        step = step.tb_next
    shorter: TracebackType | None = None
    for frame in reversed(kept):
        shorter = TracebackType(shorter, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shorter or trace


def down_to_cells(trace: TracebackType) -> TracebackType:
    """A traceback that ends at the last line of a cell; the whole one if no cell is in it.

    Where in the code that a cell has called an interrupt comes is chance.
    """
    kept = []
    last = 0
    step: TracebackType | None = trace
    while step is not None:
        kept.append(step)
        if _is_cell(step.tb_frame.f_code.co_filename):
            last = len(kept)
        step = step.tb_next
    shorter: TracebackType | None = None
    for frame in reversed(kept[:last]):
        shorter = TracebackType(shorter, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shorter or trace


def place_in_cells(error: BaseException) -> str:
    """Where in a function of the learner's own cells an error was raised, here or on a rank.

    Returns:
        " (line 3 of your cell, in ring: `x = y`)", to put after the error; "" for other code.
    """
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        in_a_cell = _is_cell(frame.filename)
        in_a_function = not frame.name.startswith(("<lambda>", "<module>", "<cell"))
        if in_a_cell and in_a_function:
            place = _line_of(frame.filename, frame.lineno or 0, frame.name)
    for note in getattr(error, "__notes__", []):
        for line in CELL_LINE.finditer(note):
            place = _line_of(line[2], int(line[3]), line[4])
    return place


def place_in_file(error: BaseException, file: str) -> str:
    """Where in a function of a script of the learner's an error was raised, on a rank.

    Args:
        error: Error with the rank's traceback as its note.
        file: The script's name, without its folder.

    Returns:
        " (line 3 of train.py, in main: `x = y`)", to put after the error; "" for other code.
    """
    place = ""
    for note in getattr(error, "__notes__", []):
        for path, number, function, source in FILE_LINE.findall(note):
            if Path(path).name == file and function != "<module>":
                place = _place(int(number), file, function, source)
    return place


def raised_in_a_cell(error: BaseException) -> bool:
    """Whether a line of the learner's own cells has raised an error, and not what it called."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_cell(frames[-1].filename)


def _is_cell(file: str) -> bool:
    return "ipykernel" in file or "<ipython" in file


def _line_of(file: str, number: int, function: str) -> str:
    return _place(number, "your cell", function, linecache.getline(file, number).strip())


def _place(number: int, whose: str, function: str, source: str) -> str:
    if len(source) > MAX_QUOTED:
        source = f"{source[: MAX_QUOTED - 4].rstrip()} ..."
    shown = f": `{source}`" if source else ""
    return f" (line {number} of {whose}, in {function}{shown})"


def with_source(note: str) -> str:
    """A rank's traceback with the lines of this notebook's cells, which the rank cannot know."""
    lines = []
    all_lines = note.splitlines()
    for number, line in enumerate(all_lines):
        lines.append(line)
        place = CELL_LINE.match(line)
        if place is None:
            continue
        indent = place[1]
        source = linecache.getline(place[2], int(place[3])).strip()
        following = all_lines[number + 1] if number + 1 < len(all_lines) else ""
        if source and following.strip() != source:
            lines.append(f"{indent}  {source}")
    return "\n".join(lines)
