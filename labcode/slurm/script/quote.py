"""Text as one word of bash, or as one value of an #SBATCH line, whatever characters it has."""

import re

# Needs no quotes, neither in bash nor on an #SBATCH line. Bash takes a word with =, unless it is an
# option, for an assignment.
PLAIN = re.compile(r"(-[\w.-]*=)?[\w@%+:,./-]+", re.ASCII)
VARIABLE = re.compile(r"(\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\})", re.ASCII)
# control characters, odd spaces and typographic signs: ShellCheck asks whether they are meant
ODD = re.compile(r"[^\x20-\x7e\u00a1-\u1fff\u2c00-\ud7ff\U0001f300-\U0001faff]")
_ESCAPES = {"\n": "\\n", "\t": "\\t"}


def literal(text: str) -> str:
    """A word of bash that is this text and nothing else, in the plainest quotes that do."""
    if PLAIN.fullmatch(text):
        return text
    if ODD.search(text):  # $'...': the odd characters as their bytes
        escaped = re.sub(r"([\\'])", r"\\\1", text)
        return "$'" + ODD.sub(_as_bytes, escaped) + "'"
    if re.search(r"[$`'\\]", text):
        return f'"{_in_double_quotes(text)}"'
    return f"'{text}'"


def expanded(text: str) -> str:
    """A word of bash in which `$NAME` and `${NAME}` are looked up and all else is literal."""
    if not VARIABLE.search(text):
        return literal(text)
    odd = ODD.search(text)  # double quotes cannot hold it: each piece gets quotes of its own
    pieces = []
    for piece in VARIABLE.split(text):
        if VARIABLE.fullmatch(piece):
            pieces.append(f'"{piece}"' if odd else piece)
        elif piece:
            pieces.append(literal(piece) if odd else _in_double_quotes(piece))
    word = "".join(pieces)
    return word if odd else f'"{word}"'


def inside(folder: str, name: str) -> str:
    """A word of bash for the path `folder/name`; variables in both are looked up."""
    return expanded(f"{folder.rstrip('/')}/{name}")


def for_sbatch(value: str) -> str:
    """The value of a directive; sbatch knows double quotes, and backslashes inside them."""
    if PLAIN.fullmatch(value):
        return value
    return '"' + re.sub(r'([\\"])', r"\\\1", value) + '"'


def _in_double_quotes(text: str) -> str:
    return re.sub(r'([\\"$`])', r"\\\1", text)


def _as_bytes(match: re.Match[str]) -> str:
    if match[0] in _ESCAPES:
        return _ESCAPES[match[0]]
    return "".join(f"\\x{byte:02x}" for byte in match[0].encode())
