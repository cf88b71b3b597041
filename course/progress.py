"""How far a learner is, and how far a long cell is.

`status("step 10/300")` shows one line that replaces itself. When the work is done the line goes and
leaves nothing in the notebook that is stored. A pool of ranks that starts shows itself this way.

    with following():
        done = launch.run("labcode.train", "gpt_tiny", nproc=2)    # "step 10/300 | loss 3.21"
"""

import contextlib
import html
import io
import re
import sys
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import clear_output, display

from course import catalog, show
from course.pool.ranks import Ranks

STEP = re.compile(r"(?:^|\] )(step \d+/\d+.*)")
HTML = "text/html"


class _Line:
    """The line of the cell that runs; made at its first text, gone when it is cleared.

    What else a cell shows is counted: `clear_output` takes everything away, so it may only be used
    where the line is alone. Elsewhere the line becomes empty.
    """

    def __init__(self) -> None:
        self._id = ""
        self._cell = -1  # the last cell that showed anything else
        self._own = False  # this very message is the line
        self._is_watching = False

    def write(self, text: str) -> None:
        """Show `text` in place of the text before it."""
        self.watch()
        rich = f'<span style="color: #7a7a7a">… {html.escape(text)}</span>'
        self._show({HTML: rich, "text/plain": f"... {text}"})

    def clear(self) -> None:
        """Take the line away."""
        if not self._id:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        if self._cell == _cell_number():
            self._show({HTML: "", "text/plain": ""})
        else:
            self._own = True
            clear_output()
            self._own = False
        self._id = ""

    def watch(self) -> None:
        """Notice from now on what cells print and show."""
        if self._is_watching:
            return
        self._is_watching = True
        publisher = getattr(get_ipython(), "display_pub", None)
        register = getattr(publisher, "register_hook", None)
        if register is not None:
            register(self._shown)
        for stream in (sys.stdout, sys.stderr):
            thread = getattr(stream, "pub_thread", None)  # sends what is printed
            register = getattr(stream, "register_hook", None)
            if thread is not None and register is not None:
                # a hook belongs to the thread that registers it
                thread.schedule(partial(register, self._printed))

    def _show(self, data: dict[str, str]) -> None:
        self._own = True
        is_update = bool(self._id)
        self._id = self._id or uuid.uuid4().hex
        display(data, raw=True, display_id=self._id, update=is_update)
        self._own = False

    def _shown(self, message: Any) -> Any:
        if not self._own:
            self._cell = _cell_number()
        return message

    def _printed(self, message: Any) -> Any:
        self._cell = _cell_number()
        return message


def _cell_number() -> int:
    return getattr(get_ipython(), "execution_count", 0)


_line = _Line()


def watch() -> None:
    """Notice what cells show from now on, so that clearing the line clears nothing else.

    And show when a pool of ranks starts, which takes seconds, and what its user should know of it.
    """
    if show.in_notebook():
        _line.watch()
        Ranks.announce = staticmethod(status)
        Ranks.warn = staticmethod(show.note)


def status(text: str = "") -> None:
    """Show one line that replaces the one before; without a text, take it away.

    In a notebook it leaves nothing in what is stored, in a terminal nothing on the screen; where
    output goes to a file nothing is written at all.
    """
    if show.in_notebook():
        if text:
            _line.write(text)
        else:
            _line.clear()
    elif sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


class _Steps(io.TextIOBase):
    """Takes what a training prints, and shows the step that it is at."""

    def write(self, text: str, /) -> int:
        for line in text.splitlines():
            step = STEP.search(line)
            if step:
                status(step[1])
        return len(text)


@contextlib.contextmanager
def following(text: str = "starting") -> Iterator[None]:
    """Show the step that a training prints to stdout, in place of all that it prints.

    Args:
        text: Shown until the first step comes.
    """
    status(text)
    try:
        with contextlib.redirect_stdout(_Steps()):
            yield
    finally:
        status()


def record(exercise: str) -> None:
    """Note that an exercise has passed, in a learner's notebook; elsewhere nothing is noted.

    Who has chosen a way is told where it goes on, at the end of each section.
    """
    if not show.in_notebook():
        return
    with contextlib.suppress(OSError):  # the folder has been removed
        catalog.record(exercise, Path.cwd())
        follows = catalog.what_follows(exercise, Path.cwd())
        if follows is None:
            return
        link = show.link(follows.place, follows.address) if follows.place else ""
        rich = f"<div>{show.sentence(follows.head)}{link}</div>"
        show.say(f"{follows.head}{follows.place}", rich)
