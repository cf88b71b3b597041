"""A recipe with single fields changed, as typed after `python -m labcode.train`; errors are one line. No torch."""

import contextlib
import difflib
import io
import re
import threading
from collections.abc import Sequence

from labcode import recipes
from labcode.config import Config

PROGRAM = "python -m labcode.train"

_ONE_AT_A_TIME = threading.Lock()  # tyro's caches, and stderr, are shared by all threads


class UsageError(ValueError):
    """What the user typed cannot be run; the message is one line that says what exists."""


def parse(args: Sequence[str]) -> Config:
    """The config for command-line arguments: `["gpt_tiny", "--train.steps", "20"]`.

    Raises:
        UsageError: Unknown recipe, field or value.
        SystemExit: With code 0, after `--help` has been printed.
    """
    import tyro

    if not args or args[0] in ("-h", "--help"):
        print(_overview())
        raise SystemExit(0)
    try:
        recipe = recipes.get(args[0])
    except ValueError as error:
        raise UsageError(str(error)) from None
    box = io.StringIO()
    try:
        with _ONE_AT_A_TIME, contextlib.redirect_stderr(box):
            return tyro.cli(
                Config,
                default=recipe,
                args=list(args[1:]),
                prog=f"{PROGRAM} {args[0]}",
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(_one_line(box.getvalue(), recipe)) from None


def _overview() -> str:
    width = max(map(len, recipes.RECIPES))
    rows = (
        f"  {name:{width}}  {recipe.__doc__.splitlines()[0]}"
        for name, recipe in recipes.RECIPES.items()
    )
    lines = [f"usage: {PROGRAM} RECIPE [--section.field value ...]", "", "recipes:", *rows, ""]
    return "\n".join([*lines, f"All fields of a recipe: {PROGRAM} RECIPE --help"])


def in_frame(box: str) -> str:
    """The message inside the frame that tyro draws around an error, on one line, without the title and the help below it.

    Where Python takes the terminal for one of ASCII (`LC_ALL=C`), the frame has dashes above and below, and no sides.
    """
    lines = [line.strip("│| ") for line in box.splitlines()]
    rules = [at for at, line in enumerate(lines) if re.match(r"[╭├─]─|--", line)]
    return " ".join(line for line in lines[rules[0] + 1 : [*rules, len(lines)][1]] if line)


def _one_line(box: str, recipe: Config) -> str:
    message = in_frame(box)
    unknown = re.search(r"--([\w.-]+)", message) if message.startswith("Unrecognized") else None
    if unknown:
        return _unknown_field(unknown[1], recipe)
    return re.sub(
        r"Error parsing (--)?[\w.-]+: (?=\w+=)", "", message
    )  # our own messages name their field already


def _unknown_field(name: str, recipe: Config) -> str:
    paths = recipes.field_paths(recipe)
    name = name.replace("-", "_")
    close = difflib.get_close_matches(name, paths, n=1)
    section = name.split(".")[0]
    exist = [path for path in paths if path.startswith(section + ".")] or sorted(
        {path.split(".")[0] for path in paths}
    )
    hint = f"did you mean --{close[0]}? " if close else ""
    return f"unknown field --{name}: {hint}there are {', '.join(exist)}"
