"""One way to answer a misspelled name: what was meant, and what exists. No torch."""

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str | None:
    """The name in `known` that looks most like `word`; None if none is similar."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return matches[0] if matches else None


def unknown(
    what: str,
    word: str,
    known: Iterable[str],
    *,
    listed: Iterable[str] | None = None,
    quoted: bool = True,
) -> str:
    """The one-line message for a name that does not exist.

    `unknown("recipe", "gpt_tny", RECIPES)` is
    "unknown recipe 'gpt_tny': did you mean gpt_tiny? there are gpt_tiny, gpt_10m, vit_tiny".

    Args:
        what: The kind of name: "recipe", "field", "command".
        word: What was typed.
        known: All names that exist; the suggestion is one of them.
        listed: The names to list in the message where `known` is too long; None lists all.
        quoted: Whether `word` stands in quotes; names of fields and options stand without.

    Held by: tests/unit/test_suggest.py
    """
    names = list(known)
    shown = names if listed is None else list(listed)
    typed = repr(word) if quoted else word
    match = closest(word, names)
    hint = f"did you mean {match}? " if match else ""
    if not shown:
        return f"unknown {what} {typed}: {hint}there are none"
    return f"unknown {what} {typed}: {hint}there are {', '.join(shown)}"
