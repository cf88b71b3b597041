"""One way to answer a misspelled name: what was meant, and what exists. No torch."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

from labcode.files import written_at

LAST_PART_CUTOFF = 0.7  # a short word is easily like another: 0.6, difflib's own, finds nonsense
MOST_LISTED = 8  # names that can stand behind a suggestion without hiding it
RUN_FOLDERS = ("runs", "notebooks/runs", "solutions/runs")  # where runs of the course lie


def closest(word: str, known: Iterable[str]) -> str | None:
    """The name in `known` that looks most like `word`; None if none is similar.

    Of a dotted name the last part counts first: whoever types "lr" or "train.lr" means "optim.lr".
    """
    names = list(known)
    last = _last_part(word)
    same = [name for name in names if _last_part(name) == last]
    if not same and "." not in word:
        last_parts = {_last_part(name) for name in names}
        similar = difflib.get_close_matches(last, sorted(last_parts), n=1, cutoff=LAST_PART_CUTOFF)
        same = [name for name in names if _last_part(name) in similar]
    if not same and len(last) > 2:  # "parallel.zero" or "zero" is the beginning of a name
        begun = [name for name in names if name.startswith(word)]
        same = begun or [name for name in names if _last_part(name).startswith(word.lstrip("-"))]
    if same:
        return difflib.get_close_matches(word, same, n=1, cutoff=0)[0]
    # what is alike in the section alone is not meant: "optim.zzz" is no "optim.lr"
    alike = [name for name in names if _are_alike(last, _last_part(name))]
    section = word.rpartition(".")[0]
    beside = [name for name in alike if section and name.rpartition(".")[0] == section]
    matches = difflib.get_close_matches(word, beside or alike, n=1)
    return matches[0] if matches else None


def _are_alike(word: str, other: str) -> bool:
    """Whether one may be a slip for the other; difflib finds no likeness in "rl" and "lr"."""
    if sorted(word) == sorted(other):
        return True
    return bool(difflib.get_close_matches(word, [other]))


def _last_part(name: str) -> str:
    return name.lstrip("-").rpartition(".")[2]


def unknown(
    what: str,
    word: str,
    known: Iterable[str],
    *,
    listed: Iterable[str] | None = None,
    quoted: bool = True,
    meant: str | None = None,
    all_in: str | None = None,
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
        meant: The name to suggest, where that is known; None looks for the most similar one.
        all_in: A command that lists all names. A long list gives way to it where one is suggested.

    Held by: tests/unit/test_suggest.py
    """
    names = list(known)
    shown = names if listed is None else list(listed)
    typed = repr(word) if quoted else word
    match = meant or closest(word, names)
    hint = f"did you mean {match}? " if match else ""
    if not shown:
        return f"unknown {what} {typed}: {hint}there are none"
    if match and all_in and len(shown) > MOST_LISTED:
        return f"unknown {what} {typed}: {hint}{all_in} lists all"
    return f"unknown {what} {typed}: {hint}there are {', '.join(shown)}"


def run_near(path: Path) -> str:
    """What to give in place of a path that is no run's folder: the nearest run, and the newest.

    Looked for in the folder itself, beside it, and where runs of the course lie.

    Args:
        path: As it was given.
    """
    places = [path, path.parent, *map(Path, RUN_FOLDERS)]
    configs: dict[Path, Path] = {}  # one path to each, as short as it was given
    for place in filter(os.path.isdir, places):  # pathlib raises where a name is too long
        for config in place.glob("*/config.json"):
            configs.setdefault(config.resolve(), config)
    newest_first = sorted(configs.values(), key=written_at, reverse=True)
    runs = [str(config.parent) for config in newest_first]
    if not runs:
        return "give the folder that a training printed; no run lies near it"
    named = {Path(run).name: run for run in reversed(runs)}
    match = closest(path.name, named)
    hint = f"did you mean {named[match]}? " if match else ""
    shown = ", ".join(runs[:MOST_LISTED])
    if len(runs) > MOST_LISTED:
        return f"{hint}the newest of {len(runs)} runs are {shown}"
    return f"{hint}there are {shown}"
