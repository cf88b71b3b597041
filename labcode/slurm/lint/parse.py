"""A batch script as sbatch and bash read it: directives and commands, with their lines."""

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from labcode.slurm.lint.options import SBATCH

# a value that another program fills in, or a person: {{ time }}, {nodes}, <account>, XX:XX
_PLACEHOLDER = re.compile(
    r"\{\{|\{%|\{\w*\}|<[^<>]*>|\bX{2,}\b|__\w+__|@\w+@|\byour\w*[_-]", re.IGNORECASE
)


@dataclass(frozen=True)
class Directive:
    """One option of a `#SBATCH` line: `-N 2` and `--nodes=2` are both ("nodes", "2")."""

    line: int
    name: str
    value: str

    @property
    def is_template(self) -> bool:
        """Whether the value is still to be filled in: `{{ time }}`, `<account>`."""
        return _PLACEHOLDER.search(self.value) is not None


@dataclass(frozen=True)
class Command:
    """One logical line of the script, continued lines joined, without its comment.

    Args:
        line: Number of its first line.
        text: The command, with a blank where a line was joined to the next.
        source: The command with the line breaks that bash sees, those in quotes and arrays.
    """

    line: int
    text: str
    source: str = ""

    def match(self, pattern: str) -> re.Match[str] | None:
        """The first place at which the regular expression is found in the command."""
        return re.search(pattern, self.text)

    def has(self, pattern: str) -> bool:
        """Whether the regular expression is found in the command."""
        return self.match(pattern) is not None


class Script:
    """A script taken apart once, for the rules to ask.

    Args:
        text: The whole script.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.late: list[int] = []  # lines of directives that sbatch does not read
        self.parts: list[list[Directive]] = [[]]  # one for each component of a het job
        self.commands: list[Command] = []
        self._read()

    def _read(self) -> None:
        number = 0  # of lines that are read
        while number < len(self.lines):
            line = self.lines[number].rstrip("\r")
            if line.startswith("#SBATCH"):
                self._read_directive(line, number + 1)
                number += 1
            elif not line.strip() or line.lstrip().startswith("#"):
                number += 1
            else:
                number = self._read_command(number)

    def _read_directive(self, line: str, number: int) -> None:
        if self.commands:
            self.late.append(number)
            return
        said = line.removeprefix("#SBATCH")
        if re.match(r"\s+(hetjob|packjob)\b", said):
            self.parts.append([])
            return
        for name, value in directive_options(said):
            self.parts[-1].append(Directive(number, name, value))

    @property
    def directives(self) -> list[Directive]:
        """Those of all components, in order."""
        return list(itertools.chain.from_iterable(self.parts))

    def _read_command(self, start: int) -> int:
        """Adds the command that begins with that line; returns the number of the next line.

        A command continues in the next line after a backslash, in a quote that is open, in an array
        that is not closed; a here-document belongs to the command before it.
        """
        text, quote = _without_comment(self.lines[start].rstrip("\r"))
        source = text
        number = start + 1
        while number < len(self.lines) and (quote or text.endswith("\\") or _open_list(text)):
            more, quote = _without_comment(self.lines[number].rstrip("\r"), quote)
            source = f"{source[:-1]} {more}" if source.endswith("\\") else f"{source}\n{more}"
            text = text.removesuffix("\\").rstrip() + " " + more.strip()
            number += 1
        self.commands.append(Command(start + 1, text.strip(), source))
        here = re.search(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1", text)
        if here is None:
            return number
        while number < len(self.lines) and self.lines[number].strip() != here[2]:
            number += 1
        return number + 1

    def found(self, pattern: str) -> list[Command]:
        """The commands in which the regular expression is found."""
        return [command for command in self.commands if command.has(pattern)]


def directive_options(text: str) -> Iterator[tuple[str, str]]:
    """(name, value) of each option in the rest of a `#SBATCH` line."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # a quote that is not closed
        words = text.split()
    while words:
        options, words = SBATCH.take(words)
        yield from options


def _without_comment(line: str, quote: str = "") -> tuple[str, str]:
    """(The line up to a `#` that begins a comment, the quote that is open at its end).

    Args:
        line: One line of the script.
        quote: The quote that is open at its beginning, "" for none.
    """
    for at, letter in enumerate(line):
        escaped = at > 0 and line[at - 1] == "\\"
        if quote:
            if letter == quote and (quote == "'" or not escaped):
                quote = ""
        elif letter in "'\"" and not escaped:
            quote = letter
        elif letter == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at].rstrip(), ""
    return line.rstrip(), quote


def _open_list(text: str) -> bool:
    """Whether an array continues in the next line: `command=(` without its `)`."""
    declaring = r"(?:(?:local|declare|export|readonly|typeset)\s+(?:-\w+\s+)*)?"
    begin = re.match(rf"\s*{declaring}\w+\+?=\(", text)
    return bool(begin) and text.count("(") > text.count(")")
