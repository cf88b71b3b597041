"""A recipe with single fields changed, as typed after `python -m labcode.train`. No torch.

    gpt_tiny --train.steps 20 --parallel.tp=2 --parallel.sequence_parallel --train.out None

Every field of the recipe can be set: `--section.field value` or `--section.field=value`, a flag
also as `--section.flag` and `--section.no-flag`, several values one after the other, no value as
None. Of an option that is given twice the last one counts, so that a script can put its own words
behind those of its caller. A wrong word is an error of one line that says what exists.
"""

import ast
import inspect
import os
import re
import textwrap
import tokenize
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from io import StringIO
from typing import Any, Literal, NamedTuple

import pydantic

from labcode import recipes
from labcode.config import Config
from labcode.runtime.arguments import UsageError
from labcode.runtime.fields import SHOWN_CHARACTERS, alternatives, described, shown
from labcode.runtime.files import print_out
from labcode.runtime.suggest import did_you_mean, meant

PROGRAM = "python -m labcode.train"
HELP = ("-h", "--help")
DASHES = "-\N{EN DASH}\N{EM DASH}"  # a word processor makes one long dash of two
MOST_NAME_CHARACTERS = 100  # of an option


def parse(args: Sequence[str]) -> Config:
    """The config for command-line arguments: `["gpt_tiny", "--train.steps", "20"]`.

    Raises:
        UsageError: Unknown recipe, field or value.
        SystemExit: With code 0, after `--help` has been printed.
    """
    if not args or args[0] in HELP:
        print_out(_recipe_help())
        raise SystemExit(0)
    _check_recipe(args)
    try:
        recipe = recipes.get(args[0])
    except ValueError as error:
        raise UsageError(str(error)) from None
    words = args[1:]
    if any(word in HELP for word in words):
        print_out(_field_help(args[0], recipe))
        raise SystemExit(0)
    try:
        return recipes.with_changes(recipe, read_changes(recipe, words))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _check_recipe(args: Sequence[str]) -> None:
    """Raises UsageError for a first word that is known, but is no recipe."""
    first = args[0]
    if first.startswith("-") and first.lstrip("-") not in recipes.RECIPES:
        named = next((word for word in args if word in recipes.RECIPES), "RECIPE")
        raise UsageError(f"the recipe comes before {shown(first)}: {PROGRAM} {named} {first} ...")
    # os.path, as pathlib raises where a name is too long
    if os.path.isfile(os.path.join(first, "config.json")):
        raise UsageError(
            f"{shown(first)} is a run and no recipe: to go on with it, "
            f"{PROGRAM} RECIPE --checkpoint.resume --train.out {first}"
        )


# ---- reading


class _Option(NamedTuple):
    """One option with its values.

    Args:
        name: With underscores and without the dashes, as "train.global_batch".
        values: What stands after "=", and the words up to the next option.
    """

    name: str
    values: list[str]


def read_changes(config: object, words: Sequence[str]) -> dict[str, object]:
    """The fields that a command line sets, as `{"train.steps": 20}`; nothing is applied yet.

    Args:
        config: A dataclass, whose fields may be dataclasses.
        words: Arguments of the command line.

    Raises:
        UsageError: An unknown field, or a word that is no value of it.
    """
    known = recipes.field_paths(config)
    changes: dict[str, object] = {}
    for option in _options(words):
        path, negated = _path(option.name, config, known)
        if negated:
            if option.values:
                raise UsageError(
                    f"--{option.name} takes no value, but got {shown(option.values[0])}"
                )
            changes[path] = False
        else:
            changes[path] = _value(path, option.values, field_type(config, path))
    return changes


def _options(words: Sequence[str]) -> list[_Option]:
    """The words in groups, each an option and its values.

    Only "--" begins an option, so that a negative number is a value.
    """
    options: list[_Option] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            if not name.isprintable() or len(name) > MOST_NAME_CHARACTERS:
                raise UsageError(f"what is {shown(word)}? write --section.field value")
            options.append(_Option(name.replace("-", "_"), [value] if equals else []))
        elif not options:
            raise UsageError(f"what is {shown(word)}? write {_as_option(word)}")
        else:
            options[-1].values.append(word)
    return options


def _as_option(word: str) -> str:
    """How a word that stands where an option was expected may have been meant."""
    bare = word.lstrip(DASHES)
    if re.fullmatch(r"\w+\.\w+(=.*)?", bare):
        return f"--{bare}" if "=" in bare else f"--{bare} value"
    return "--section.field value"


def _path(name: str, config: object, known: Mapping[str, object]) -> tuple[str, bool]:
    """(The field that an option names, whether it is a flag that is switched off)."""
    if name in known:
        return name, False
    section, dot, field = name.rpartition(".")
    positive = f"{section}{dot}{field.removeprefix('no_')}"
    if field.startswith("no_") and positive in known and field_type(config, positive) is bool:
        return positive, True
    raise UsageError(recipes.unknown_field(name, known, dashes="--"))


def field_type(config: object, path: str) -> Any:
    """The declared type of a field: `field_type(config, "train.steps")` is int."""
    *sections, name = path.split(".")
    for section in sections:
        config = getattr(config, section)
    return typing.get_type_hints(type(config))[name]


def _value(path: str, words: Sequence[str], wanted: Any) -> object:
    """The words after an option as a value of the type `wanted`.

    Raises:
        UsageError: They are none.
    """
    kinds = alternatives(wanted)
    if type(None) in kinds:
        if list(words) == ["None"]:
            return None
        (wanted,) = [kind for kind in kinds if kind is not type(None)]
    if wanted is bool and not words:
        return True
    if not words:
        raise UsageError(f"--{path} needs a value: {described(wanted)}")
    if typing.get_origin(wanted) is tuple:
        element = typing.get_args(wanted)[0]
        return tuple(_parsed(path, word, element) for word in words)
    if len(words) > 1:
        typed = " ".join(words)
        if not typed.isprintable() or len(typed) > SHOWN_CHARACTERS:
            typed = shown(typed)
        raise UsageError(f"--{path} takes one value, but got {typed}")
    return _parsed(path, words[0], wanted)


def _parsed(path: str, word: str, wanted: Any) -> object:
    try:
        return pydantic.TypeAdapter(wanted).validate_strings(word)
    except pydantic.ValidationError:
        choices = typing.get_args(wanted) if typing.get_origin(wanted) is Literal else ()
        hint = did_you_mean(meant(word, choices)).strip()
        refused = f"--{path}: {shown(word)} is not {described(wanted)}"
        raise UsageError(f"{refused}: {hint}" if hint else refused) from None


# ---- help


def _recipe_help() -> str:
    width = max(map(len, recipes.RECIPES))
    lines = [f"usage: {PROGRAM} RECIPE [--section.field value ...]", "", "recipes:"]
    for name, recipe in recipes.RECIPES.items():
        lines.append(f"  {name:{width}}  {_summary(recipe)}")
    lines += ["", f"All fields of a recipe: {PROGRAM} RECIPE --help"]
    return "\n".join(lines)


def _field_help(name: str, recipe: Config) -> str:
    """All fields with their values in this recipe and what they mean, section by section."""
    lines = [
        f"usage: {PROGRAM} {name} [--section.field value ...]",
        "",
        "A flag is switched on by its name alone and off by --section.no-flag; no value is None.",
        "Of an option that is given twice the last one counts.",
    ]
    lines += field_table(recipe)
    return "\n".join(lines)


def field_table(config: object, prefix: str = "") -> list[str]:
    """The lines of a help text: each field of a dataclass, its type, its value and its comment.

    Args:
        config: A dataclass, whose fields may be dataclasses: each of those is a section.
        prefix: What comes before the fields' names, such as "train.".
    """
    comments = _comments(type(config))
    lines = []
    sections = []
    for field in fields(config):  # pyright: ignore[reportArgumentType]
        value = getattr(config, field.name)
        path = prefix + field.name
        if is_dataclass(value):
            sections += ["", f"{path}: {_summary(type(value))}"]
            sections += field_table(value, f"{path}.")
            continue
        kinds = alternatives(field_type(config, field.name))
        allowed = " or ".join(described(kind) for kind in reversed(kinds))  # None first
        lines.append(f"  --{path} {_written(value)}    ({allowed})")
        if field.name in comments:
            lines.append(f"        {comments[field.name]}")
    return lines + sections


def _summary(documented: object) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _written(value: object) -> str:
    """A value as it is typed."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _comments(kind: type) -> dict[str, str]:
    """What stands behind `#` above and on the lines of each field, read from its dataclass."""
    source = textwrap.dedent(inspect.getsource(kind))
    by_line = {}
    whole_lines = set()  # that are comments and nothing else
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            by_line[token.start[0]] = token.string.lstrip("# ")
            if token.line.lstrip().startswith("#"):
                whole_lines.add(token.start[0])
    found = {}
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        first = node.lineno
        while first - 1 in whole_lines:
            first -= 1
        lines = range(first, (node.end_lineno or node.lineno) + 1)
        text = " ".join(by_line[line] for line in lines if line in by_line)
        if text:
            found[node.target.id] = text
    return found
