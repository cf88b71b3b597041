"""A script of the learner's: a function becomes a file, and torchrun starts it on several ranks.

What is wrong with it is a `Hint`.
"""

import builtins
import inspect
import math
import symtable
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from course import tracebacks
from course.answer import Hint
from course.labs.run_file import COUNTED
from labcode.runtime import launch

LEFT_OPEN = "LEFT OPEN"  # what a footer asserts: the process group is gone at the end
TIMEOUT_S = 120
OF_MODULE = ("__name__", "__file__", "__doc__")
# What gloo says when the ranks do not call the same things.
OUT_OF_STEP = (
    "Timed out",
    "timed out",
    "timeout",
    "Connection closed by peer",
    "op.preamble.length",
    "Connection reset by peer",
)


def source_of(main: Callable[..., Any] | str) -> str:
    """The source of a function, or the text that was given in its place.

    Raises:
        NotImplementedError: It is still to be written.
    """
    source = main if isinstance(main, str) else textwrap.dedent(inspect.getsource(main))
    if 'NotImplementedError("exercise' in source:
        raise NotImplementedError("exercise: your code here")
    return source


def write(path: Path, header: str, source: str, footer: str) -> None:
    """Write the file.

    Raises:
        Hint: The function uses a name that the file does not know.
    """
    unknown = missing_names(source, header)
    if unknown:
        raise Hint(
            f"the file would not know the name `{unknown[0]}`: only `main` is copied into it, so "
            "what it uses is imported or defined inside it"
        )
    path.parent.mkdir(exist_ok=True)
    path.write_text(header + source + footer)


def run(
    case: str,
    path: Path,
    *args: str,
    nproc: int,
    counts: bool = False,
    meanings: Mapping[str, str] | None = None,
) -> str:
    """Start the file on ranks of this machine.

    Args:
        case: How a hint begins.
        path: The file.
        args: What it finds in `sys.argv[1:]`.
        nproc: How many ranks.
        counts: Whether rank 0 says at the end which collectives it has started; see `run_file`.
        meanings: What an error of this exercise means, by some words of it.

    Returns:
        What all ranks have printed, each line as "[rank 1] ...".

    Raises:
        Hint: A rank has failed.
        NotImplementedError: Something is still to be written.
    """
    runner = "course.labs.run_file"
    try:
        done = launch.run(
            runner,
            *((COUNTED,) if counts else ()),
            path,
            *args,
            nproc=nproc,
            echo=False,
            timeout_s=TIMEOUT_S,
        )
    except launch.LaunchError as error:
        raise _explained(case, error, path.name, meanings or {}) from None
    return done.output


def _explained(
    case: str, error: launch.LaunchError, file: str, meanings: Mapping[str, str]
) -> Exception:
    """The error of a launch, in words of the lesson, with the line of the file."""
    text = str(error)
    place = tracebacks.place_in_file(error, file)
    if "NotImplementedError: exercise" in text:
        return NotImplementedError("exercise: your code here")
    if LEFT_OPEN in text:
        return Hint(
            case + "the process group is still there at the end: dist.destroy_process_group()"
        )
    for sign, meaning in meanings.items():
        if sign in text:
            return Hint(f"{case}{meaning} (the error: {text}){place}")
    if any(sign in text for sign in OUT_OF_STEP):
        return Hint(
            f"{case}the ranks wait for each other{place}: is there a collective that not all of "
            "them call?"
        )
    return Hint(f"{case}{text}{place}")


def missing_names(source: str, header: str) -> list[str]:
    """The names that a function uses and its file does not know, in alphabetical order.

    Args:
        source: Source of the function.
        header: What stands above it in the file.
    """
    known = {*dir(builtins), *OF_MODULE}
    for symbol in symtable.symtable(header, "header", "exec").get_symbols():
        known.add(symbol.get_name())
    used = set()
    for table in _tables(symtable.symtable(source, "source", "exec")):
        for symbol in table.get_symbols():
            at_top = table.get_type() == "module"
            is_bound = symbol.is_assigned() or symbol.is_imported()
            if is_bound and (at_top or symbol.is_declared_global()):
                known.add(symbol.get_name())
            elif symbol.is_global() and symbol.is_referenced():
                used.add(symbol.get_name())
    return sorted(used - known)


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative distance of some weights from others; infinite if one of them is not finite."""
    difference = 0.0
    total = 0.0
    for name, weight in expected.items():
        difference += (found[name].double() - weight.double()).square().sum().item()
        total += weight.double().square().sum().item()
    if not math.isfinite(difference):
        return math.inf
    return (difference / total) ** 0.5
