"""How lessons speak: HTML and the same words as plain text in a notebook, plain text elsewhere.

No JavaScript, no style sheet and nothing that needs trust: colours are inline, and legible on a
light and on a dark page.
"""

import html
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from IPython.core.getipython import get_ipython
from IPython.display import display
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from pygments.style import Style
from pygments.token import Comment, Keyword, Name, Number, Operator, String


class Badge(NamedTuple):
    """A verdict at a glance: a symbol before its word, white on a colour.

    Args:
        symbol: One character, so that the colour is never alone.
        colour: Dark enough for white letters (WCAG: a contrast of at least 4.5).
    """

    symbol: str
    colour: str

    def html(self, word: str) -> str:
        """The word with its symbol on a coloured ground."""
        style = (
            f"background-color: {self.colour}; color: #ffffff; font-weight: bold; "
            "padding: 1px 6px; border-radius: 3px; white-space: nowrap"
        )
        return f'<span style="{style}">{self.symbol} {html.escape(word)}</span>'


RIGHT = Badge("✓", "#1a7f37")
WRONG = Badge("✗", "#b3261e")
OFF = Badge("≠", "#8a5a00")  # no mistake for certain: a measurement depends on the machine
OPEN = Badge("○", "#5f6368")


def in_notebook() -> bool:
    """Whether a kernel runs this, so that something richer than text can be shown."""
    return hasattr(get_ipython(), "kernel")


def say(plain: str, rich: str) -> None:
    """Show `rich` (HTML) in a notebook, with `plain` for all that shows no HTML; else print it."""
    if in_notebook():
        display({"text/html": rich, "text/plain": plain}, raw=True)
    else:
        print(plain)


def folded(summary: str, rich: str) -> str:
    """HTML of which only the summary shows, until somebody clicks on it."""
    return f'<details><summary style="cursor: pointer">{summary}</summary>{rich}</details>'


def note(text: str) -> None:
    """One plain line about something that is nobody's mistake."""
    say(f"note: {text}", f"<div><b>note:</b> {sentence(text)}</div>")


def sentence(text: str) -> str:
    """A line of text as HTML, with what stands in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def link(text: str, address: str) -> str:
    """HTML of a link, which JupyterLab follows from the folder of the notebook."""
    return f'<a href="{html.escape(address)}">{html.escape(text)}</a>'


class _Colours(Style):
    """Colours of code that can be read on white and on black alike."""

    styles: Any = {  # noqa: RUF012  (what pygments expects)
        Comment: "italic #7a7a7a",
        Keyword: "bold #1a8a3c",
        Operator.Word: "bold #1a8a3c",
        Name.Builtin: "#1a8a3c",
        Name.Class: "bold #2f7fd1",
        Name.Function: "#2f7fd1",
        Name.Decorator: "#a05ac8",
        Number: "#b06a10",
        String: "#c2503c",
    }


def show_source(obj: Any, fold: str = "") -> None:
    """Show the source of a function, a method or a class, with its docstring and its colours.

    Args:
        obj: It may come from labcode, from another library, or from a cell of this notebook.
        fold: Why a learner may not want to see it yet; it then waits for a click.

    Raises:
        TypeError: There is no Python source, as for `len`.
    """
    wanted: Any = obj.fget if isinstance(obj, property) else obj
    try:
        code = textwrap.dedent(inspect.getsource(wanted)).rstrip()
    except (TypeError, OSError):
        raise TypeError(
            f"show_source({obj!r}): there is no Python source; pass a function, a method or a class"
        ) from None
    formatter = HtmlFormatter(style=_Colours, noclasses=True, nobackground=True)
    rich = highlight(code, PythonLexer(), formatter)
    place = _place(wanted)
    if place:
        code = f"# {place}\n{code}"
        rich = f"<div><small><code>{html.escape(place)}</code></small></div>{rich}"
    say(code, folded(html.escape(fold, quote=False), rich) if fold else rich)


def _place(obj: Any) -> str:
    """The file of an object from its package on, as "labcode/runtime/units.py"; "" for a cell's."""
    module = sys.modules.get(getattr(inspect.unwrap(obj), "__module__", ""))
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return ""
    depth = len(module.__name__.split("."))
    if Path(file).name == "__init__.py":
        depth += 1
    return "/".join(Path(file).parts[-depth:])
