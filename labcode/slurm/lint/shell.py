"""Lines of a script as bash takes them apart: simple commands, their words, variables filled in.

Not a shell: nothing runs, both branches of an `if` are read, and what `$(...)` would print is
unknown. A variable that the script sets has its last value; any other one stays as it is written.
"""

import re
from dataclasses import dataclass

LATER = "\ue000"  # a `$` that this script does not expand: escaped, or between single quotes
BLANK = "\ue001"  # a blank inside `$(...)`, which separates no words
_KEYWORDS = {"if", "then", "else", "elif", "fi", "while", "until", "do", "done", "{", "}", "!"}
_KEYWORDS |= {"time", "esac"}
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]")
_BRACED = re.compile(r"([A-Za-z_]\w*)(\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Simple:
    """One simple command, `A=1 srun -n 2 python train.py &`.

    Args:
        words: Words of the command, without quotes, variables filled in.
        end: What follows it: "&", "|", "&&", "||", or ";" for anything else.
    """

    words: tuple[str, ...]
    end: str


class Shell:
    """Reads one line after the other and remembers the variables that they set."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}

    def copy(self) -> "Shell":
        """A second shell that knows the same variables."""
        second = Shell()
        second.variables = dict(self.variables)
        return second

    def read(self, source: str) -> list[Simple]:
        """The simple commands of a line of the script."""
        return _Reader(source, self.variables, "$").read()

    def read_later(self, source: str) -> list[Simple]:
        """Those of a text that another shell reads on the nodes, the one of `bash -c`.

        What this script has expanded stays; what it has left is expanded now.
        """
        return _Reader(source, dict(self.variables), LATER).read()


class _Reader:
    """Goes through a text letter by letter."""

    def __init__(self, source: str, variables: dict[str, str], dollar: str) -> None:
        self.source = source
        self.variables = variables
        self.dollar = dollar
        self.at = 0
        self.word: str | None = None
        self.words: list[str] = []
        self.dropped = False  # whether the next word is the file of a redirection
        self.found: list[Simple] = []

    def read(self) -> list[Simple]:
        while self.at < len(self.source):
            self._letter(self.source[self.at])
        self._end_command(";")
        return self.found

    def _letter(self, letter: str) -> None:
        if letter in " \t":
            self._end_word()
            self.at += 1
        elif letter == "\n":
            self._end_command(";")
            self.at += 1
        elif letter == "#" and self.word is None:
            self._to_end_of_line()
        elif letter in ";&|":
            self._operator()
        elif letter in "<>":
            self._redirection()
        elif letter == "(" and self.word is not None and _ASSIGNMENT.fullmatch(self.word):
            self._array()
        elif letter in "()":
            self._end_command(";")
            self.at += 1
        else:
            self._part_of_word(letter, quoted=False)

    def _part_of_word(self, letter: str, *, quoted: bool) -> None:
        if letter == "\\":
            self._escaped(quoted=quoted)
        elif letter in ("$", LATER) and self.source[self.at + 1 : self.at + 2] == "(":
            self._take_to(_closing(self.source, self.at + 1, "(", ")"))
        elif letter == self.dollar:
            self._variable(quoted=quoted)
        elif letter == "`":
            end = self.source.find("`", self.at + 1)
            self._take_to(end + 1 if end > 0 else len(self.source))
        elif letter == "'" and not quoted:
            end = self.source.find("'", self.at + 1)
            end = end if end > 0 else len(self.source)
            self._add(self.source[self.at + 1 : end].replace("$", LATER))
            self.at = end + 1
        elif letter == '"' and not quoted:
            self._double_quoted()
        else:
            self._add(letter)
            self.at += 1

    def _double_quoted(self) -> None:
        self._add("")
        self.at += 1
        while self.at < len(self.source) and self.source[self.at] != '"':
            self._part_of_word(self.source[self.at], quoted=True)
        self.at += 1

    def _escaped(self, *, quoted: bool) -> None:
        escaped = self.source[self.at + 1 : self.at + 2]
        self.at += 2
        if escaped in ("$", LATER):
            self._add(LATER)
        elif escaped == "\n":
            return
        elif quoted and escaped not in '"\\`':
            self._add("\\" + escaped)
        else:
            self._add(escaped)

    def _variable(self, *, quoted: bool) -> None:
        """`$NAME` or `${NAME...}` at the present place."""
        if self.source[self.at + 1 : self.at + 2] == "{":
            end = _closing(self.source, self.at + 1, "{", "}")
            inside = self.source[self.at + 2 : end - 1]
        else:
            name = _NAME.match(self.source, self.at + 1)
            if name is None:
                self._take_to(self.at + 1)
                return
            end = name.end()
            inside = name[0]
        value = self._value(inside)
        if value is None:
            self._take_to(end)
            return
        self.at = end
        whole = quoted or (self.word is not None and _ASSIGNMENT.fullmatch(self.word) is not None)
        if whole and not inside.endswith("[@]"):
            self._add(value)
        else:
            self._add_split(value)

    def _value(self, inside: str) -> str | None:
        """What stands between the braces, filled in; None if it is not known."""
        braced = _BRACED.fullmatch(inside)
        if braced is None:
            return None
        name, _, operator, default = braced.groups()
        value = self.variables.get(name)
        if value or operator is None:
            return value
        default = (
            re.sub(r"\s", BLANK, default.strip("\"'")) if "$(" in default else default.strip(" \"'")
        )
        if operator.endswith("="):
            self.variables[name] = default
        return default

    def _add(self, text: str) -> None:
        self.word = (self.word or "") + text

    def _add_split(self, value: str) -> None:
        """Adds a value as bash does without quotes: it becomes several words at its blanks."""
        first, *more = re.split(r"\s+", value)
        if first or not more:
            self._add(first)
        for part in more:
            self._end_word()
            if part:
                self._add(part)

    def _take_to(self, end: int) -> None:
        self._add(re.sub(r"\s", BLANK, self.source[self.at : end]))
        self.at = end

    def _to_end_of_line(self) -> None:
        end = self.source.find("\n", self.at)
        self.at = end if end >= 0 else len(self.source)

    def _operator(self) -> None:
        two = self.source[self.at : self.at + 2]
        if two == "&>":
            self.at += 1
            self._redirection()
        elif two in ("&&", "||", "|&", ";;"):
            self._end_command({"|&": "|", ";;": ";"}.get(two, two))
            self.at += 2
        else:
            self._end_command(self.source[self.at])
            self.at += 1

    def _redirection(self) -> None:
        if self.source[self.at + 1 : self.at + 2] == "(":  # <(...)
            self._take_to(_closing(self.source, self.at + 1, "(", ")"))
            return
        if self.word is not None and self.word.isdigit():  # the 2 of 2>
            self.word = None
        self._end_word()
        while self.source[self.at : self.at + 1] in ("<", ">", "&") and self.at < len(self.source):
            self.at += 1
        self.dropped = True

    def _array(self) -> None:
        """The rest of `name=(one two)`: the value is its words with blanks between them."""
        end = _closing(self.source, self.at, "(", ")")
        inside = _Reader(self.source[self.at + 1 : end - 1], self.variables, self.dollar)
        self._add(" ".join(" ".join(simple.words) for simple in inside.read()))
        self.at = end

    def _end_word(self) -> None:
        if self.word is None:
            return
        if not self.dropped:
            self.words.append(self.word)
        self.word = None
        self.dropped = False

    def _end_command(self, end: str) -> None:
        self._end_word()
        self.dropped = False
        words = self.words
        self.words = []
        while words and words[0] in _KEYWORDS:
            words = words[1:]
        if not words:
            return
        declaring = words[0] in _DECLARING
        if declaring:
            words = words[1:]
        assigned: dict[str, str] = {}
        while words:
            assignment = _ASSIGNMENT.fullmatch(words[0])
            if assignment is None and not (declaring and words[0].startswith("-")):
                break
            if assignment:
                name, added, value = assignment.groups()
                before = f"{self.variables.get(name, '')} " if added else ""
                assigned[name] = before + value
            words = words[1:]
        if declaring or not words:
            self._set(assigned)
            words = []
        self.found.append(Simple(tuple(words), end))

    def _set(self, assigned: dict[str, str]) -> None:
        for name, value in assigned.items():
            if value or name not in self.variables:  # an empty one is the other branch of an `if`
                self.variables[name] = value


def _closing(source: str, begin: int, opening: str, closing: str) -> int:
    """The place behind the bracket that closes the one at `begin`."""
    depth = 0
    for at in range(begin, len(source)):
        if source[at] == opening:
            depth += 1
        elif source[at] == closing:
            depth -= 1
            if depth == 0:
                return at + 1
    return len(source)
