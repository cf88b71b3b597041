"""From YAML to frozen dataclasses, with the line of whatever is wrong: `site.yaml, line 7: unknown field qso: ...`.

The dataclass is the schema. Scalars are taken as they are typed, so that an account 0123 or a qos no stays what it is.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping

import yaml

VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
YES, NO = ("true", "yes", "on"), ("false", "no", "off")


class Wrong(ValueError):
    """A value that its field does not allow; the reader adds file and line.

    Args:
        field: Name of the field.
        message: What was found, and what to do.
    """

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


def read(text: str, kind: type, where: str, given: Mapping[str, object]):
    """An instance of the dataclass `kind` from YAML.

    Args:
        text: The YAML.
        kind: A dataclass; nested ones, tuples, mappings, Literals and None are understood.
        where: Name of the file, for errors.
        given: Fields that are set here and not in the file, or in place of those there.

    Raises:
        ValueError: "FILE, line N: what is wrong and what is allowed".
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(
            f"{where}{line}: this is not YAML: {error.problem or error.context}"
        ) from None
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: this is not YAML: {str(error).splitlines()[0]}") from None
    unknown = sorted(set(given) - {field.name for field in dataclasses.fields(kind)})
    if unknown:
        raise ValueError(f"unknown field {unknown[0]}: there are {', '.join(_names(kind))}")
    if node is None:
        node = yaml.MappingNode(
            "tag:yaml.org,2002:map", [], *[yaml.Mark(where, 0, 0, 0, None, None)] * 2
        )
    return _Reader(where).dataclass(node, kind, "", given)


class _Reader:
    def __init__(self, where):
        self.where = where

    def fail(self, node, message):
        raise ValueError(f"{self.where}, line {node.start_mark.line + 1}: {message}")

    def pairs(self, node, what):
        """`{key: (key node, value node)}` of a mapping."""
        if not isinstance(node, yaml.MappingNode):
            self.fail(
                node,
                f"{what or 'a profile'} has fields of its own: write `name: value` lines{' below it' * bool(what)}",
            )
        found = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.fail(key, "the name of a field is a plain word")
            if key.value in found:
                self.fail(
                    key,
                    f"{key.value} is there twice, first on line {found[key.value][0].start_mark.line + 1}",
                )
            found[key.value] = key, value
        return found

    def dataclass(self, node, kind, path, given=()):
        pairs, hints = self.pairs(node, path), typing.get_type_hints(kind)
        for name, (key, _) in pairs.items():
            if name not in _names(kind):
                close = difflib.get_close_matches(name, _names(kind), n=1)
                hint = f"did you mean {close[0]}? " if close else ""
                section = f" in {path}" if path else ""
                self.fail(
                    key, f"unknown field {name}{section}: {hint}there are {', '.join(_names(kind))}"
                )
        values = {
            name: self.value(value, hints[name], f"{path}.{name}" if path else name)
            for name, (_, value) in pairs.items()
        }
        values |= dict(given)
        for f in dataclasses.fields(kind):
            if (
                f.default is dataclasses.MISSING
                and f.default_factory is dataclasses.MISSING
                and f.name not in values
            ):
                self.fail(node, f"{path} needs {f.name}")
        try:
            return kind(**values)
        except Wrong as wrong:
            inside = wrong.field in pairs and wrong.field not in given
            self.fail(
                pairs[wrong.field][0] if inside else node, f"{path + '.' if path else ''}{wrong}"
            )

    def value(self, node, hint, path):
        """The node as the type that the field has."""
        origin, options = typing.get_origin(hint), typing.get_args(hint)
        empty = isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")
        if origin in (types.UnionType, typing.Union):
            return None if empty else self.value(node, options[0], path)
        if empty:
            self.fail(node, f"{path} is empty: give a value, or leave the line out")
        if origin is tuple:
            if not isinstance(node, yaml.SequenceNode):
                self.fail(node, f"{path} is a list: write [one, two], or a line `- one` for each")
            return tuple(self.value(item, options[0], path) for item in node.value)
        if origin is Mapping:
            return {
                key: self.value(value, options[1], f"{path}.{key}")
                for key, (_, value) in self.pairs(node, path).items()
            }
        if dataclasses.is_dataclass(hint):
            return self.dataclass(node, hint, path)
        if not isinstance(node, yaml.ScalarNode):
            self.fail(node, f"{path} is one value, not a list and not fields of its own")
        return self.scalar(node, hint, path, options)

    def scalar(self, node, hint, path, options):
        text = node.value
        if options and text not in options:
            self.fail(node, f"{path}: {text!r} does not exist: there are {', '.join(options)}")
        if hint is bool:
            if text.lower() not in YES + NO:
                self.fail(node, f"{path}: {text!r}: write true or false")
            return text.lower() in YES
        if hint is int:
            if not re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
                self.fail(node, f"{path}: {text!r}: give a whole number")
            return int(text)
        return text


def _names(kind):
    """The fields that a profile may have; `name` is that of its file."""
    return [field.name for field in dataclasses.fields(kind) if field.name != "name"]
