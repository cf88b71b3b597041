"""Whether the value of a field is of its type and in its range, in one line if it is not. No torch.

The types are those of the configs: bool, int, float, str, Literal, tuple[X, ...], each with None or
without. Ranges say what torch, numpy and common sense take, so that no field fails only later, with
a traceback and without its name.
"""

import functools
import math
import numbers
import sys
import types
import typing
import unicodedata
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from labcode.runtime.suggest import did_you_mean, meant
from labcode.runtime.units import type_in_words

# characters that no name or path needs and that would break a message into lines: control
# characters, bytes that are no UTF-8, separators of lines and paragraphs
UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")
MOST_CHARACTERS = 4096  # of a path, on Linux
SHOWN_CHARACTERS = 60  # of a wrong value in a message


class Range(NamedTuple):
    """From where to where a number may go.

    Args:
        least, most: The bounds.
        advice: What to give instead of a number below it.
        above: Whether `least` itself is too small.
        below: Whether `most` itself is too large.
    """

    least: float
    most: float
    advice: str
    above: bool = False
    below: bool = False

    def problem(self, value: float) -> str | None:
        """What to do about a value outside; None inside."""
        if value != value or value in (math.inf, -math.inf):
            return "give a finite number"
        if value < self.least or (self.above and value == self.least):
            return self.advice
        if self.below and value >= self.most:
            return self.advice
        return f"give at most {self.most}" if value > self.most else None


SIZE = Range(1, 2**31 - 1, "give a number above 0")
COUNT = Range(1, 2**63 - 1, "give a number above 0")
COUNT_OR_ZERO = Range(0, 2**63 - 1, "must not be negative")
SEED = Range(0, 2**64 - 1, "give a number from 0 to 18446744073709551615")
POSITIVE = Range(0, sys.float_info.max, "give a number above 0", above=True)
NOT_NEGATIVE = Range(0, sys.float_info.max, "must not be negative")
PROBABILITY = Range(0, 1, "give a probability from 0 to below 1", below=True)
FRACTION = Range(0, 1, "give a fraction between 0 and 1", above=True, below=True)


def check_fields(config: Any, section: str, ranges: Mapping[str, Range]) -> None:
    """Check every field of a frozen dataclass against its declared type, and numbers for a range.

    Numbers of numpy become Python's, and a list becomes a tuple.

    Args:
        config: The dataclass, while it is made.
        section: What its fields are called on the command line: "train" for "train.steps".
        ranges: {field: its range}.

    Raises:
        ValueError: One line that names the field as it is written on the command line.

    Held by: tests/unit/test_fields.py
    """
    hints = _type_hints(type(config))
    for field in fields(config):
        path = f"{section}.{field.name}" if section else field.name
        value = _of_type(path, getattr(config, field.name), hints[field.name])
        object.__setattr__(config, field.name, value)
        if field.name in ranges:
            for number in value if isinstance(value, tuple) else [value]:
                _check_range(path, number, ranges[field.name])


_type_hints = functools.cache(typing.get_type_hints)


def _check_range(path: str, value: float | None, allowed: Range) -> None:
    if value is None:
        return
    problem = allowed.problem(value)
    if problem:
        raise ValueError(f"{path}={shown(value)}: {problem}")


def _of_type(path: str, value: object, wanted: Any) -> Any:
    """A value as one of the type `wanted`."""
    alternatives_ = alternatives(wanted)
    if value is None and type(None) in alternatives_:
        return None
    kinds = [kind for kind in alternatives_ if kind is not type(None)]
    if len(kinds) > 1:  # sections, which are dataclasses
        if isinstance(value, tuple(kinds)):
            return value
        raise _wrong_type(path, value, wanted)
    (kind,) = kinds
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong_type(path, value, kind)
        element = typing.get_args(kind)[0]
        return tuple(_of_type(path, part, element) for part in value)
    return _single(path, value, kind)


def _single(path: str, value: object, kind: Any) -> Any:
    """A value that is no tuple."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if not isinstance(value, str) or value not in choices:
            hint = did_you_mean(meant(value, choices)) if isinstance(value, str) else ""
            raise ValueError(f"{path}={shown(value)}: {hint}choose {' or '.join(choices)}")
        return value
    is_flag = isinstance(value, bool)
    if kind is int and isinstance(value, numbers.Integral) and not is_flag:
        return int(value)
    if kind is float and isinstance(value, numbers.Real) and not is_flag:
        return value if isinstance(value, int) else float(value)
    if kind is str and isinstance(value, str):
        _check_text(path, value)
        return value
    if kind not in (int, float, str) and isinstance(value, kind):
        return value
    raise _wrong_type(path, value, kind)


def _wrong_type(path: str, value: object, wanted: Any) -> ValueError:
    if value is None or isinstance(value, bool | int | float | str):
        return ValueError(f"{path}={shown(value)} is not {described(wanted)}")
    # any object may come here, and its text may be long, or not exist
    return ValueError(f"{path} is {type_in_words(value)}: give {described(wanted)}")


def _check_text(path: str, value: str) -> None:
    if not value:
        raise ValueError(
            f"{path} is empty: give a value or leave it out (a shell variable may not be set)"
        )
    if len(value) > MOST_CHARACTERS:
        raise ValueError(f"{path} has {len(value)} characters: give at most {MOST_CHARACTERS}")
    if any(unicodedata.category(character) in UNPRINTABLE for character in value):
        raise ValueError(
            f"{path}={shown(value)} has a line break or another character that cannot be printed: "
            "leave it out"
        )


def shown(value: object) -> str:
    """A value in a message: on one line, and cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 8 * SHOWN_CHARACTERS:
        return f"a number of {round(value.bit_length() * math.log10(2))} digits"
    text = repr(value) if isinstance(value, str) else str(value)
    if len(text) > SHOWN_CHARACTERS:
        return f"{text[:SHOWN_CHARACTERS]}..."
    return text


# ---- types


def alternatives(wanted: Any) -> tuple[Any, ...]:
    """The types of a union, such as (int, NoneType) of `int | None`; otherwise the type alone."""
    if isinstance(wanted, types.UnionType) or typing.get_origin(wanted) is typing.Union:
        return typing.get_args(wanted)
    return (wanted,)


_DESCRIBED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    type(None): "None",
}


def described(wanted: Any) -> str:
    """What a user may write for a type: "a whole number"."""
    if typing.get_origin(wanted) is Literal:
        return f"one of {', '.join(typing.get_args(wanted))}"
    if typing.get_origin(wanted) is tuple:
        element = typing.get_args(wanted)[0]
        return f"one or more values, each {described(element)}"
    kinds = alternatives(wanted)
    if len(kinds) > 1:
        none_last = sorted(kinds, key=lambda kind: kind is type(None))
        return " or ".join(described(kind) for kind in none_last)
    return _DESCRIBED.get(wanted, getattr(wanted, "__name__", str(wanted)))
