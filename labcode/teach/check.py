"""Exercises that check themselves, and a prediction beside a measurement.

check("1.2", lambda: l01.ring(my_ring, ranks))   prints [v] 1.2 or [x] 1.2 hint or [ ] not done yet
compare("bytes per rank", guess, measured)       prints both, their ratio, and whether it is close

Neither raises, so that Run All reaches the end of a notebook whatever a learner has written.
"""

import math
import re
import traceback
from collections.abc import Callable
from types import CellType
from typing import Any

from labcode.units import seconds, si

NOT_DONE = "not done yet"
MAX_HINT_CHARACTERS = 300


# ---- check


def check(exercise: str, test: Callable[[], Any], praise: str = "") -> None:
    """Run `test` and print one line: passed, failed with a hint, or not done yet.

    A stub counts as not done: a function that raises NotImplementedError (here or on a rank), or a
    name that is still `...`.

    Args:
        exercise: Its number, "1.2".
        test: Called without arguments; raises AssertionError with a hint when the learner's code is
            wrong.
        praise: Printed after a pass, for instance what the number means.
    """
    print(_verdict(exercise, test, praise))


def _verdict(exercise: str, test: Callable[[], Any], praise: str) -> str:
    not_done = f"[ ] {exercise} {NOT_DONE}"
    if _uses_unset_name(test):
        return not_done
    try:
        result = test()
    except (Exception, SystemExit) as error:  # but not KeyboardInterrupt
        if _is_stub(error):
            return not_done
        return f"[x] {exercise} {_hint(error)}"
    if result is ...:
        return not_done
    return f"[v] {exercise} {praise}".rstrip()


def due(*values: Any) -> Any:
    """Values that the learner had to fill in.

    Returns:
        The value, or a tuple of several.

    Raises:
        NotImplementedError: One is `...` or None; `check` then says "not done yet".
    """
    for value in values:
        if value is None or value is ...:
            raise NotImplementedError("exercise")
    if len(values) == 1:
        return values[0]
    return values


# ---- what is not done


def _uses_unset_name(test: Callable[[], Any]) -> bool:
    """Whether a lambda reads a name that is `...`, a global of its notebook or of its closure."""
    code = getattr(test, "__code__", None)
    if code is None:  # not a Python function
        return False
    for name in code.co_names:
        if test.__globals__.get(name) is ...:
            return True
    return any(_content(cell) is ... for cell in test.__closure__ or ())


def _content(cell: CellType) -> Any:
    """The value in a cell of a closure; None where none has been assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:  # asking is the only way to know
        return None


def _is_stub(error: BaseException) -> bool:
    """Whether an error, or one that caused it, comes from code that is still to be written.

    That is NotImplementedError, also as the text of a rank's error, or `...` used as a value.
    """
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if isinstance(cause, NotImplementedError) or "NotImplementedError: exercise" in text:
            return True
        if isinstance(cause, (TypeError, AttributeError)) and "ellipsis" in text.lower():
            return True
        cause = cause.__cause__ or cause.__context__
    return False


# ---- hints


def _hint(error: BaseException) -> str:
    """One line, the same at each run: the assertion's text, or the error and the learner's line."""
    text = _first_line(str(error))
    text = re.sub(r"\bat 0x[0-9a-f]+", "", text)  # addresses differ from run to run
    text = text[:MAX_HINT_CHARACTERS]
    on_rank = re.match(r"(rank \d+): AssertionError:? *(.*)", text)
    if on_rank:
        rank, assertion = on_rank.groups()
        return f"on {rank}: {assertion or 'a check failed'}"
    if isinstance(error, AssertionError):
        return text or f"this does not hold: {_failed_condition(error)}"
    return f"{type(error).__name__}: {text}{_place(error)}"


def _first_line(text: str) -> str:
    """The first line that is not blank."""
    for line in text.splitlines():
        if line.strip():
            return line.strip()
    return ""


def _failed_condition(error: BaseException) -> str:
    """What an assertion without a text asserts."""
    line = traceback.extract_tb(error.__traceback__)[-1].line
    if not line:
        return "a check without a hint"
    return line.removeprefix("assert ")


def _place(error: BaseException) -> str:
    """Where in a function of the learner's own cells the error was raised, if it was there."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        in_a_cell = "ipykernel" in frame.filename or "<ipython" in frame.filename
        in_a_function = not frame.name.startswith(("<lambda>", "<module>", "<cell"))
        if in_a_cell and in_a_function:
            place = f" (line {frame.lineno} of your cell, in {frame.name})"
    return place


# ---- compare


def compare(
    what: str,
    predicted: float | None,
    measured: float,
    rel: float = 0.25,
    unit: str = "",
) -> None:
    """Print a prediction beside its measurement, their ratio, and whether it is within `rel` of 1.

    Args:
        what: What was measured, a few words.
        predicted: The number guessed or calculated beforehand; `...` or None while there is none.
        measured: The number found.
        rel: How much larger than the other either may be: 0.25 accepts ratios from 1/1.25 to 1.25,
            1 a factor of two.
        unit: "s" is printed in ms, us, ...; any other unit gets an SI prefix ("B", "FLOP/s"); ""
            prints plain numbers.
    """
    found = f"measured {_number(measured, unit):>11}"
    if predicted is None or predicted is ...:
        print(f"{what:<30} predicted {'nothing yet':>11}  {found}")
        return
    ratio = _ratio(predicted, measured)
    factor = max(ratio, 1 / ratio) if ratio > 0 else math.inf
    is_close = factor <= 1 + rel or measured == predicted
    verdict = "within" if is_close else "NOT within"
    # Narrow enough for one line beside JupyterLab's file list.
    expected = f"predicted {_number(predicted, unit):>11}"
    print(f"{what:<30} {expected}  {found}  ratio {ratio:5.2f}, {verdict} {rel:.0%}")


def _ratio(predicted: float, measured: float) -> float:
    """Measured over predicted; 1 where both are 0."""
    if predicted:
        return measured / predicted
    return 1.0 if measured == 0 else math.inf


def _number(value: Any, unit: str) -> str:
    if hasattr(value, "item"):  # of a tensor or of numpy
        value = value.item()
    if unit == "s":
        return seconds(value)
    if unit:
        return si(value, unit)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}"
