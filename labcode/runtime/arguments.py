"""argparse whose mistakes are one line, in the words of `labcode.train`. No torch.

    parser = Parser(prog="python -m labcode.perf")
    try:
        options = parser.parse_args(words)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)

A word that does not exist is answered with the one that was meant, and `--help` stays argparse's.

Held by: tests/unit/test_arguments.py
"""

import argparse
import itertools
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from labcode.runtime.fields import described, shown
from labcode.runtime.suggest import unknown

KINDS = {"int": int, "float": float}
INVALID = re.compile(r"argument ([\w/, -]+): invalid (\w+) value: (.*)", re.DOTALL)
REQUIRED = "the following arguments are required: "


class UsageError(ValueError):
    """What was typed cannot be run; the message is one line that says what exists."""


class Parser(argparse.ArgumentParser):
    """An argument parser, and those of its commands, that raise instead of printing their usage."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would have printed below its usage.

        Raises:
            UsageError: Always.
        """
        if message.startswith(REQUIRED):
            raise UsageError(
                f"{message.removeprefix(REQUIRED)} missing: {self.prog} --help says what they are"
            )
        invalid = INVALID.fullmatch(message)
        if invalid:
            name, kind, value = invalid.groups()
            wanted = described(KINDS[kind]) if kind in KINDS else f"a {kind}"
            raise UsageError(f"{_long(name)}: {value} is not {wanted}")
        raise UsageError(message.removeprefix("argument "))

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Like argparse's, but what it does not know is a mistake, whatever else is missing."""
        words = sys.argv[1:] if args is None else args
        # what stands behind a command is the command's
        own = words if self._subparsers is None else itertools.takewhile(_is_option, words)
        for word in own:
            self._check_option(word)
        options, left = super().parse_known_args(words, namespace)
        for word in left:
            self._check_option(word)
            raise UsageError(f"what is {shown(word)}? {self.prog} --help says what can be given")
        return options, left

    def _check_option(self, word: str) -> None:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        name = word.partition("=")[0]
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            commands = self._commands()
            check_no_command(name, commands, self.prog)
            for command, parser in commands.items():
                if name in parser._option_string_actions:
                    raise UsageError(
                        f"{name} stands behind a command: {self.prog} {command} {name}"
                    )
            typed = shown(name).strip("'")
            all_in = f"{self.prog} --help"
            raise UsageError(unknown("option", typed, known, quoted=False, all_in=all_in))

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        """{command: its parser}, if it has any."""
        if self._subparsers is None:
            return {}
        (action,) = self._subparsers._group_actions
        return dict(action.choices or {})  # pyright: ignore[reportArgumentType, reportCallIssue]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        if action.option_strings:
            raise UsageError(f"{action.option_strings[-1]}: {unknown('value', str(value), names)}")
        raise UsageError(unknown(action.dest, str(value), names))


def check_no_command(word: str, commands: Iterable[str], program: str) -> None:
    """Raises UsageError for a command that was written as an option.

    Args:
        word: The word as it was typed: "--plan".
        commands: Commands of the program.
        program: How it is called.
    """
    name = word.lstrip("-")
    if word != name and name in commands:
        raise UsageError(f"{word} is a command and no option: {program} {name}")


def count(word: str) -> int:
    """The type of an option that takes a whole number above 0.

    Raises:
        ArgumentTypeError: It is none; argparse puts the name of the option before it.
    """
    if not word.isascii() or not word.isdigit() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{shown(word)} is not a whole number above 0")
    return int(word)


def factor(word: str) -> float:
    """The type of an option that takes a number above 0.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{shown(word)} is not a number above 0")
    return number


def new_file(word: str) -> Path:
    """The type of an option that names a file to write: its folder is asked for before any work.

    Raises:
        ArgumentTypeError: It cannot be written there.
    """
    path = Path(word)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{shown(word)} is a folder: name a file in it")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"there is no folder {path.parent}: make it, or name another"
        )
    return path


def _is_option(word: str) -> bool:
    return word.startswith("-")


def _long(names: str) -> str:
    """The long name in "-n/--number"."""
    return names.rpartition("/")[2]
