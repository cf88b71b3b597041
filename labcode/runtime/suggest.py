"""One way to answer a misspelled name: what was meant, and what exists. No torch."""

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from labcode.runtime.files import written_at

LAST_PART_CUTOFF = 0.7  # a short word is easily like another: 0.6, difflib's own, finds nonsense
MOST_LISTED = 8  # names that can stand behind a suggestion without hiding it
LEAST_OF_A_WORD = 3  # letters by which a word within a name is known: "seq" of "sequence"
LEAST_BEGUN = 2  # letters that are the beginning of a name; one may be a slip
RUN_FOLDERS = ("runs", "notebooks/runs", "solutions/runs")  # where runs of the course lie
# what torch, other frameworks and papers call a dtype: no letters tell that half is float16
OTHER_NAMES = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}


def meant(word: str, known: Iterable[str]) -> list[str]:
    """The names in `known` that `word` may stand for; empty if none does.

    Names are compared without case, and _ counts as -. A name that goes by `word` elsewhere comes
    first; then all that `word` begins, as "h100" does h100-80gb: what is alike otherwise, such as
    h200, is something else. A word that begins more than can be listed tells too little. Then
    likeness.
    """
    by_folded = {}
    for name in known:
        by_folded.setdefault(_folded(name), name)
    folded = _folded(word)
    other = OTHER_NAMES.get(folded)
    if other in by_folded:
        return [by_folded[other]]
    if len(folded.lstrip("-")) >= LEAST_BEGUN and not _same_last_part(folded, by_folded):
        begun = [name for name in by_folded if name.startswith(folded)]
        if 0 < len(begun) <= MOST_LISTED:
            return [by_folded[name] for name in begun]
    match = _most_alike(folded, list(by_folded))
    return [] if match is None else [by_folded[match]]


def _folded(name: str) -> str:
    return name.casefold().replace("_", "-")


def closest(word: str, known: Iterable[str]) -> str | None:
    """The one name in `known` that `word` stands for; None if none does, or several may."""
    names = meant(word, known)
    return names[0] if len(names) == 1 else None


def _most_alike(word: str, names: list[str]) -> str | None:
    """The name that looks most like `word`; None if none is similar.

    Of a dotted name the last part counts first: who types "lr" or "train.lr" means "optim.lr".
    """
    last = _last_part(word)
    same = _same_last_part(word, names)
    if not same and "." not in word:
        last_parts = {_last_part(name) for name in names}
        similar = difflib.get_close_matches(last, sorted(last_parts), n=1, cutoff=LAST_PART_CUTOFF)
        same = [name for name in names if _last_part(name) in similar]
    if not same and len(last) > 2:  # "parallel.zero" or "zero" is the beginning of a name
        begun = [name for name in names if name.startswith(word)]
        same = begun or [name for name in names if _last_part(name).startswith(word.lstrip("-"))]
    if same:
        return difflib.get_close_matches(word, same, n=1, cutoff=0)[0]
    same = _of_the_same_words(last, names)
    if len(same) == 1:
        return same[0]
    # what is alike in the section alone is not meant: "optim.zzz" is no "optim.lr"
    alike = [name for name in names if _are_alike(last, _last_part(name))]
    section = word.rpartition(".")[0]
    beside = [name for name in alike if section and name.rpartition(".")[0] == section]
    matches = difflib.get_close_matches(word, beside or alike, n=1)
    return matches[0] if matches else None


def _of_the_same_words(typed: str, names: Iterable[str]) -> list[str]:
    """The names whose words are those of what was typed, which may be shortened or more or fewer.

    "max-seq-len" is "sequence-length", and "batch" is "global-batch": others put num, n or max
    before many things. The last word says what the thing is, so it is there on both sides.
    """
    beginnings = [part for part in typed.split("-") if len(part) >= LEAST_OF_A_WORD]
    if not beginnings:
        return []
    found = []
    for name in names:
        *others, thing = _last_part(name).split("-")
        extra = [part for part in others if not part.startswith(tuple(beginnings))]
        if thing.startswith(beginnings[-1]) and (not extra or len(beginnings) == 1):
            found.append(name)
    return found


def _same_last_part(word: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if _last_part(name) == _last_part(word)]


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
    instead: str | None = None,
    all_in: str | None = None,
) -> str:
    """The one-line message for a name that does not exist.

    `unknown("recipe", "gpt_tny", RECIPES)` is
    "unknown recipe 'gpt_tny': did you mean gpt_tiny? there are gpt_tiny, gpt_10m, vit_tiny".

    Args:
        what: The kind of name: "recipe", "field", "command".
        word: What was typed.
        known: All names that exist; those that are suggested are among them.
        listed: The names to list in the message where `known` is too long; None lists all.
        quoted: Whether `word` stands in quotes; names of fields and options stand without.
        instead: The name to suggest, where that is known; None looks for those that are meant.
        all_in: A command that lists all names. A long list gives way to it where one is suggested.

    Held by: tests/unit/test_suggest.py
    """
    names = list(known)
    shown = names if listed is None else list(listed)
    typed = repr(word) if quoted else word
    hint = did_you_mean([instead] if instead else meant(word, names))
    if not shown:
        return f"unknown {what} {typed}: {hint}there are none"
    if hint and all_in and len(shown) > MOST_LISTED:
        return f"unknown {what} {typed}: {hint}{all_in} lists all"
    return f"unknown {what} {typed}: {hint}there are {', '.join(shown)}"


def did_you_mean(names: Sequence[str]) -> str:
    """The question to put before what exists: "did you mean a, b or c? "; "" for no name."""
    if not names:
        return ""
    *others, last = names
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"did you mean {listed}? "


def run_near(path: Path) -> str:
    """What to give in place of a path that is no run's folder: the nearest run, and the newest.

    Looked for in the folder itself, beside it, and where runs of the course lie.

    Args:
        path: The path as it was given.
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
    hint = did_you_mean([named[name] for name in meant(path.name, named)])
    shown = ", ".join(runs[:MOST_LISTED])
    if len(runs) > MOST_LISTED:
        return f"{hint}the newest of {len(runs)} runs are {shown}"
    return f"{hint}there are {shown}"
