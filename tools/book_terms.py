"""The glossary of the book: its terms, and links to them from where a lesson first uses them.

book/glossary.md is written by hand, so that it can be read in JupyterLab as it is. A term is a
paragraph with its name, its other forms in parentheses, and what it means:

    **all-reduce** (all-reduced): A collective after which each rank holds the sum of what all
    ranks gave.

Longer words in which a form means something else stand in a comment, and are never linked:

    **message** <!-- not: error message -->: Bytes that one rank sends to another at once.

A plural with s is found without being listed. A form with a capital letter is found as it is
written; others at the beginning of a sentence too. A name with a hyphen is found as the function of
PyTorch too: `all_reduce`, `dist.all_reduce`.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from sphinx.util.nodes import _make_id

from tools import book_text

_FUNCTION = re.compile(r"`(?:dist\.)?([a-z]+(?:_[a-z]+)+)`")
_ENTRY = re.compile(r"(?m)^\*\*(.+?)\*\*(?: \(([^)]+)\))?(?: <!-- not: (.+?) -->)?: (.+(?:\n.+)*)")


class Term(NamedTuple):
    """An entry of the glossary.

    Args:
        name: Name as the glossary lists it.
        forms: How lessons write it, the name among them.
        elsewhere: Longer words with a form in them that mean something else.
        text: What it means, Markdown.
    """

    name: str
    forms: tuple[str, ...]
    elsewhere: tuple[str, ...]
    text: str


def terms(text: str) -> list[Term]:
    """The terms of a glossary, by name.

    Raises:
        ValueError: Two terms have a form in common.
    """
    found = []
    owners: dict[str, str] = {}
    for match in _ENTRY.finditer(text):
        forms = (match[1], *_listed(match[2]))
        meaning = " ".join(line.strip() for line in match[4].splitlines())
        found.append(Term(forms[0], forms, _listed(match[3]), meaning))
        for form in forms:
            if form in owners:
                raise ValueError(f"{form!r} is a form of {owners[form]!r} and of {forms[0]!r}")
            owners[form] = forms[0]
    return sorted(found, key=_alphabetically)


def _listed(words: str | None) -> tuple[str, ...]:
    return tuple(words.split(", ")) if words else ()


def _alphabetically(term: Term) -> str:
    return term.name.lower()


def address(name: str) -> str:
    """Where the glossary of the book explains a term, from a page beside it."""
    return f"glossary.html#{_make_id(f'term-{name}')}"


class FirstUses:
    """Links the first use of each term on a page, and remembers which terms it has met.

    Args:
        known: The terms.
    """

    def __init__(self, known: Sequence[Term]) -> None:
        self.met: list[str] = []
        self._names = {}
        patterns = []
        for term in known:
            for form in term.forms:
                self._names[form] = term.name
                patterns.append(form)
            patterns += term.elsewhere
        patterns.sort(key=len, reverse=True)  # "ring all-reduce" before "all-reduce"
        self._use = re.compile(rf"(?<![\w-])({'|'.join(map(_pattern, patterns))})(?:e?s)?(?![\w-])")

    def link(self, text: str) -> str:
        """Markdown with a link on each term that the page has not used so far."""
        paragraphs = re.split(r"(\n\s*\n)", text)
        for i, paragraph in enumerate(paragraphs):
            if not paragraph.startswith("<"):  # HTML up to the next empty line
                linked = book_text.in_prose(paragraph, self._link_prose)
                paragraphs[i] = book_text.with_code(linked, self._link_function)
        return "".join(paragraphs)

    def _link_prose(self, prose: str) -> str:
        return self._use.sub(self._link_once, prose)

    def _link_function(self, code: str) -> str:
        function = _FUNCTION.fullmatch(code)
        form = function[1].replace("_", "-") if function else ""
        name = self._names.get(form)
        if name is None or name in self.met:
            return code
        self.met.append(name)
        # the role `term` would take the look of code away
        return f'<a href="{address(name)}"><code>{code.strip("`")}</code></a>'

    def _link_once(self, match: re.Match) -> str:
        form = " ".join(match[1].split())
        name = self._names.get(form) or self._names.get(form[0].lower() + form[1:])
        if name is None or name in self.met:  # it means something else, or was linked before
            return match[0]
        self.met.append(name)
        return f"{{term}}`{' '.join(match[0].split())} <{name}>`"


def _pattern(form: str) -> str:
    words = [re.escape(word) for word in form.split()]
    first = words[0]
    if form == form.lower() and first[0].isalpha():
        words[0] = f"[{first[0].upper()}{first[0]}]{first[1:]}"
    return r"\s+".join(words)


def page(known: Sequence[Term], first: dict[str, str]) -> str:
    """The page of the glossary.

    Args:
        known: The terms.
        first: {name: Markdown of a link to the lesson that uses it first}.
    """
    lines = ["# Glossary", "", "Each lesson links a term where it first uses it.", ""]
    lines.append("::::{glossary}")
    for term in known:
        where = f" First used in {first[term.name]}." if term.name in first else ""
        lines += [term.name, f"  {term.text}{where}", ""]
    lines.append("::::")
    return "\n".join(lines) + "\n"
