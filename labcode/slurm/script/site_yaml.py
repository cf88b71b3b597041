"""A site profile: from YAML to frozen dataclasses, with the line of whatever is wrong.

The dataclass is the schema, and pydantic checks against it. pydantic knows no lines, so they are
noted while the tree of the YAML is read. Scalars stay the text that was typed: an account 0123 is
no octal number, and a qos no is no truth value.
"""

import dataclasses
import re
import typing
from collections.abc import Mapping

import pydantic
import yaml

from labcode.runtime.suggest import unknown

T = typing.TypeVar("T")
Path = tuple[str | int, ...]  # where a value stands: ("gpus", "per_node") or ("modules", 0)

MAX_DEPTH = 5  # env.NAME.value is 3 deep; an alias that contains itself would have no end
_FIELDS = "{path} has fields of its own: write `name: value` lines"
_MESSAGES = {  # pydantic's type of error: what we say
    "bool_parsing": "{path}: {value!r}: write true or false",
    "dataclass_type": _FIELDS,
    "dict_type": _FIELDS,
    "int_parsing": "{path}: {value!r}: give a whole number",
    "literal_error": "{path}: {value!r} does not exist: there are {choices}",
    "missing": "{parent} needs {name}",
    "string_type": "{path} is one value, not a list and not fields of its own",
    "tuple_type": "{path} is a list: write [one, two], or a line `- one` for each",
}


class FieldError(ValueError):
    """A value that its field does not allow; `read` adds the file and the line.

    Args:
        field: Name of the field.
        message: What was found, and what to do.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def read(text: str, kind: type[T], file_name: str, given: Mapping[str, object]) -> T:
    """An instance of the dataclass `kind` from YAML.

    Args:
        text: The YAML.
        kind: A dataclass; pydantic must understand the types of its fields.
        file_name: Name of the file, for errors.
        given: Fields that the caller sets, in place of what the file says.

    Raises:
        ValueError: "FILE, line N: what is wrong and what is allowed".
    """
    lines: dict[Path, int] = {(): 1}
    try:
        data = _plain(yaml.compose(text, Loader=yaml.SafeLoader), (), lines)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file_name}, line {mark.line + 1}" if mark else file_name
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{where}: this is not YAML: {problem}") from None
    if isinstance(data, dict):
        data |= given
    try:
        return pydantic.TypeAdapter(kind).validate_python(data)
    except pydantic.ValidationError as error:
        problems = [_problem(details, kind, lines) for details in error.errors()]
    line, message = min(problems)
    raise ValueError(f"{file_name}, line {line}: {message}")


def _plain(node: yaml.Node | None, path: Path, lines: dict[Path, int]) -> object:
    """The node as dicts, lists, text and None; fills `lines` with the line of each field."""
    if node is None:  # an empty file
        return {}
    if len(path) > MAX_DEPTH:
        raise yaml.MarkedYAMLError(None, None, "it is nested too deeply", node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        items = enumerate(node.value)
        return [_plain(item, (*path, number), lines) for number, item in items]
    if not isinstance(node, yaml.MappingNode):
        return None if node.tag.endswith(":null") else node.value
    values: dict[str, object] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            problem = "the name of a field is a plain word"
            raise yaml.MarkedYAMLError(None, None, problem, key.start_mark)
        inside = (*path, key.value)
        if inside in lines:
            problem = f"{key.value} is there twice, first on line {lines[inside]}"
            raise yaml.MarkedYAMLError(None, None, problem, key.start_mark)
        lines[inside] = key.start_mark.line + 1
        values[key.value] = _plain(value, inside, lines)
    return values


def _problem(
    error: Mapping[str, typing.Any], kind: type, lines: Mapping[Path, int]
) -> tuple[int, str]:
    """(line, message) for one of pydantic's errors."""
    context = error.get("ctx", {})
    path: Path = error["loc"]
    cause = context.get("error")
    if isinstance(cause, FieldError):
        path = (*path, cause.field)
    line_of = path
    while line_of not in lines:  # a missing field, or one that the caller gave
        line_of = line_of[:-1]
    words = [word for word in path if isinstance(word, str)]  # without the numbers of list items
    *parents, name = words or [""]
    parent = ".".join(parents)
    dotted = ".".join(words) or "a profile"
    if isinstance(cause, FieldError):
        message = f"{parent}.{cause}" if parent else str(cause)
    elif error["type"] == "unexpected_keyword_argument":
        known = [field.name for field in dataclasses.fields(_section(kind, parents))]
        inside = [".".join([*parents, field]) for field in known]
        message = unknown("field", dotted, inside, quoted=False)
    elif error["input"] is None:
        message = f"{dotted} is empty: give a value, or leave the line out"
    else:
        template = _MESSAGES.get(error["type"], "{path}: {value!r}: {problem}")
        choices = re.findall(r"'([^']*)'", context.get("expected", ""))
        message = template.format(
            path=dotted,
            parent=parent,
            name=name,
            value=error["input"],
            problem=error["msg"],
            choices=", ".join(choices),
        )
    return lines[line_of], message


def _section(kind: type, parents: list[str]) -> typing.Any:
    """The dataclass of a section: `Gpus` for ["gpus"], `Setting` for ["env", "NAME"]."""
    if not parents:
        return kind
    hint = typing.get_type_hints(kind)[parents[0]]
    options = (hint, *typing.get_args(hint))
    return next(option for option in options if dataclasses.is_dataclass(option))
