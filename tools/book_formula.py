"""Formulas as one line of plain text, for where no MathML can be: excerpts of the search.

`\\frac{2(p-1)}{p}\\,\\frac{n}{\\beta}` becomes `2(p − 1)/p n/β`. The text is read from the same
MathML that the book shows, so a formula that the book can draw can be quoted.

Held by: tests/unit/test_book.py
"""

import re
import xml.etree.ElementTree as ET
from html.entities import html5

from latex2mathml import converter

# Code, in which a dollar sign begins no formula, or a formula.
FORMULA = re.compile(r"(?s)(`[^`]+`)|\$\$(.+?)\$\$|\$(.+?)\$")
# Letters side by side are one name, such as `tp`; LaTeX would take them for a product.
_NAME = re.compile(
    r"\\mathrm\{(\w+)\}|\\(?:text|operatorname|begin|end)\{[^{}]*\}|\\[a-zA-Z]+|([a-zA-Z]{2,})"
)
_NAMED_CHARACTER = re.compile(r"&(\w+);")
_OF_XML = ("amp", "lt", "gt", "quot", "apos")
_ALIGNMENT = re.compile(r"&(?!#?\w+;)")
_SPACED = set("=+−≈≤≥<>·×→∈≪≫±≠")
_SUM = re.compile(r"[+−=]")
_IN_PARENTHESES = re.compile(r"\([^()]*\)")
_ATOM = re.compile(r"[\d.]+|[^\W\d_]+|.")
_ACCENTS = {"^": "\u0302", "¯": "\u0304", "~": "\u0303"}
_BRACES = ("⏟", "⏞")


def in_words(text: str) -> str:
    """Markdown whose formulas are plain text; code stays as it is."""
    return FORMULA.sub(_replaced, text)


def _replaced(match: re.Match) -> str:
    is_code = match[1] is not None
    return match[0] if is_code else plain((match[2] or match[3]).strip())


def plain(latex: str) -> str:
    """A formula in LaTeX as one line of text."""
    mathml = converter.convert(_NAME.sub(_as_text, latex))
    xml = _NAMED_CHARACTER.sub(_character, _ALIGNMENT.sub("", mathml))
    return " ".join(_text(ET.fromstring(xml)).split())


def _as_text(match: re.Match) -> str:
    name = match[1] or match[2]
    return f"\\text{{{name}}}" if name else match[0]


def _character(match: re.Match) -> str:
    """XML knows five names of characters, HTML some two thousand."""
    if match[1] in _OF_XML:
        return match[0]
    return html5.get(f"{match[1]};") or match[0]


def _kind(node: ET.Element) -> str:
    return node.tag.rpartition("}")[2]


def _text(node: ET.Element) -> str:
    kind = _kind(node)
    parts = list(node)
    if kind == "mspace":
        return " "
    if kind == "mfrac":
        above = _text(parts[0]).strip()
        return f"{_grouped(above) if _is_sum(above) else above}/{_grouped(_text(parts[1]))}"
    if kind == "msqrt":
        return f"√{_grouped(_row(parts))}"
    if kind in ("msub", "munder"):
        return _with_index(parts[0], "_", parts[1])
    if kind in ("msup", "mover"):
        return _with_index(parts[0], "^", parts[1])
    if kind in ("msubsup", "munderover"):
        return f"{_with_index(parts[0], '_', parts[1])}^{_grouped(_text(parts[2]))}"
    if kind == "mtable":
        return "; ".join(map(_text, parts))
    if kind == "mtr":
        return ", ".join(_row(cell) for cell in parts)
    if parts:
        return _row(parts)
    text = (node.text or "").replace("\xa0", " ")
    return f" {text} " if text in _SPACED else text


def _row(parts: list[ET.Element] | ET.Element) -> str:
    """Neighbours side by side, with a space where two words meet and behind a comma."""
    row = ""
    before = ""
    for part in parts:
        text = _text(part)
        is_first = row.strip() == "" or row.rstrip()[-1] in "([=,"
        if is_first and text == " − ":
            text = "−"
        words_meet = row[-1:].isalnum() and text[:1].isalnum() and before != "mn"
        ends_a_term = row[-1:].isalnum() or row[-1:] in (")", "]")
        term_begins = ends_a_term and text[:1] in ("∑", "∇", "√")
        if words_meet or term_begins or row.endswith(","):
            row += " "
        row += text
        before = _kind(part)
    return row


def _with_index(base: ET.Element, sign: str, index: ET.Element) -> str:
    """`x_i`, `x^2`, or a letter below its accent; what a brace spans stays as it is."""
    text = _text(base).strip()
    what = _text(index).strip()
    if what in _ACCENTS and len(text) == 1:
        return text + _ACCENTS[what]
    if what in _BRACES:
        return f"({text})"
    return f"{text}{sign}{_grouped(what)}"


def _is_sum(text: str) -> bool:
    """Whether a sign of a sum stands outside of parentheses."""
    while _IN_PARENTHESES.search(text):
        text = _IN_PARENTHESES.sub("", text)
    return bool(_SUM.search(text))


def _grouped(text: str) -> str:
    """In parentheses, unless it is one word, number or sign."""
    text = text.strip()
    return text if _ATOM.fullmatch(text) else f"({text})"
