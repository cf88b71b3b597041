"""Markdown of the book: what may be changed in a text, and plain text that stays as it is."""

import re
from collections.abc import Callable

from nbformat import NotebookNode

# Code, formulas, links, tags and headings: no word in them becomes a link.
_TAKEN = re.compile(
    r"(?ms)(^(?P<fence>```+|~~~+).*?^(?P=fence)[ ]*$|`[^`]*`|\$\$.*?\$\$|\$[^$\n]+\$"
    r"|!?\[[^\]]*\]\([^)]*\)|<[a-z/!][^>]*>|^\#[^\n]*$|^[ ]{4}[^\n]*$)"
)
_CODE = re.compile(r"(`[^`]+`)")
_SPECIAL = re.compile(r"([\\*_\[\]<>$#{}|~%])")
_RULE = re.compile(r"(?m)^(\s*)([-=+]{3,}\s*)$")


def in_prose(text: str, change: Callable[[str], str]) -> str:
    """Markdown whose prose went through `change`, piece by piece; all else stays."""
    done = []
    end = 0
    for match in _TAKEN.finditer(text):
        done.append(change(text[end : match.start()]))
        done.append(match[0])
        end = match.end()
    done.append(change(text[end:]))
    return "".join(done)


def escaped(text: str) -> str:
    """Plain text as Markdown that shows the same; `code` between backticks stays code."""
    pieces = _CODE.split(text)
    for i in range(0, len(pieces), 2):  # the others are code
        pieces[i] = _RULE.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", pieces[i]))
    return "".join(pieces)


def with_code(text: str, change: Callable[[str], str]) -> str:
    """Markdown whose `code` in the text went through `change`, which gets it with its backticks."""

    def changed(match: re.Match) -> str:
        is_code = match[0].startswith("`") and not match["fence"]
        return change(match[0]) if is_code else match[0]

    return _TAKEN.sub(changed, text)


def joined(notebook: NotebookNode) -> str:
    """The prose of a notebook, without the instructor's notes."""
    prose = []
    for cell in notebook.cells:
        is_note = "solution-only" in cell.metadata.get("tags", [])
        if cell.cell_type == "markdown" and not is_note:
            prose.append(cell.source)
    return "\n\n".join(prose)
