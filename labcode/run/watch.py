"""Watch a run while it trains: loss, speed, how busy the device is, over the reference run.

    from labcode.run.watch import watch
    watch("runs/gpt_tiny-003")                           # in a notebook: a figure that follows

    python -m labcode.run.watch runs/gpt_tiny-003      # in a terminal: a table that follows
    python -m labcode.run.watch runs/mine --wait       # also for a run that is about to begin

It reads the files of the run and writes none, and it ends with the run or with Ctrl-C, which
leaves the run alone.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labcode.run.run_files import Look, look, newest_run, table
from labcode.runtime.arguments import Parser
from labcode.runtime.files import is_held

BEGINS_WITHIN_S = 60.0


def watch(
    run: str | Path | None = None,
    every_s: float = 2.0,
    over: str | Path | None = "",
    wait: bool = False,
) -> None:
    """Follow a run until it ends: a figure in a notebook, a table in a terminal.

    Stop watching with Ctrl-C, or with the square button of a notebook; the run continues.

    Args:
        run: Folder of the run; None: the newest below `runs`.
        every_s: Seconds between two looks.
        over: As in `look`.
        wait: Whether the run may be about to begin: wait for its folder, for a minute at most.

    Raises:
        ValueError: No such run, in one line that says which there are.

    Held by: tests/unit/test_watch.py
    """
    folder = newest_run() if run is None else Path(run)
    screen = _Figure() if _in_notebook() else _Terminal()
    try:
        # a run holds its folder while it sets everything up
        if wait or (os.path.isdir(folder) and is_held(folder)):
            _wait_for(folder, every_s)
        while True:
            seen = look(folder, over)
            screen.show(seen)
            if not seen.is_running:
                return
            time.sleep(every_s)
    except KeyboardInterrupt:
        return


def _wait_for(folder: Path, every_s: float) -> None:
    """A run writes its config when it has set everything up; `look` says if it never does."""
    deadline = time.monotonic() + BEGINS_WITHIN_S
    if not folder.exists():
        waits = f"{folder} does not exist yet: waiting {BEGINS_WITHIN_S:g} s for the run to begin"
        print(waits, file=sys.stderr, flush=True)
    while not (folder / "config.json").is_file() and time.monotonic() < deadline:
        time.sleep(min(every_s, 0.2))


class _Terminal:
    """A table that replaces itself; where there is no terminal, one each time it has changed."""

    def __init__(self) -> None:
        self._lines = 0
        self._last = ""

    def show(self, seen: Look) -> None:
        text = table(seen)
        if text == self._last:
            return
        if self._lines and sys.stdout.isatty():
            sys.stdout.write(f"\x1b[{self._lines}F\x1b[J")  # up, and clear what is below
        print(text, flush=True)
        self._last = text
        self._lines = text.count("\n") + 1


class _Figure:
    """A figure below the cell that replaces itself."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._last = ""

    def show(self, seen: Look) -> None:
        from IPython.display import display

        from labcode.run.watch_figure import Picture

        text = table(seen)
        if text == self._last:
            return
        self._last = text
        picture = Picture(seen)
        if self._handle is None:
            self._handle = display(picture, display_id=True)
        else:
            self._handle.update(picture)


def _in_notebook() -> bool:
    """Whether what is shown goes to a notebook, which has a display for pictures."""
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    return hasattr(get_ipython(), "kernel")


def main(arguments: Sequence[str]) -> int:
    """Watch from a terminal; returns the exit code."""
    parser = Parser(prog="python -m labcode.run.watch", description="Follow a run until it ends.")
    wait = ""
    parser.add_argument("run", nargs="?", help="its folder; the newest in runs/ if it is left out")
    parser.add_argument(
        "--wait", action="store_true", help="for a run that is about to begin: a minute at most"
    )
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--over", default="", help="a reference run, a folder, or none")
    try:
        given = parser.parse_args(arguments)
        over = None if given.over == "none" else given.over
        if given.run and not given.wait and not os.path.exists(given.run):
            wait = "; --wait waits for a run that is about to begin"
        watch(given.run, given.every, over, given.wait)
    except ValueError as error:
        print(f"error: {error}{wait}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
