"""Self-checking exercises, and a prediction set beside a measurement. Nothing here raises: Run All reaches the end.

check("1.2", lambda: l01.ring(my_ring, ranks))     [v] 1.2   |   [x] 1.2 hint   |   [ ] 1.2 not done yet
compare("bytes per rank", guess, measured)         predicted, measured, their ratio, within the tolerance or not
"""

import math
import re
import traceback
from typing import Any

from labcode.units import seconds, si

NOT_DONE = "not done yet"


def check(exercise: str, test, praise: str = "") -> None:
    """Run `test` and print one line: passed, failed with a hint, or not done yet.

    A stub counts as not done: a function that raises NotImplementedError (here or on a rank), a name that is still `...`.

    Args:
        exercise: Its number, "1.2".
        test: Called without arguments; raises AssertionError with a hint when the learner's code is wrong.
        praise: Said after a pass, for instance what the number means.
    """
    if any(value is ... for value in _names_used(test)):
        print(f"[ ] {exercise} {NOT_DONE}")
        return
    try:
        result = test()
    except (Exception, SystemExit) as error:
        print(f"[ ] {exercise} {NOT_DONE}" if _is_stub(error) else f"[x] {exercise} {_hint(error)}")
    else:
        print(
            f"[ ] {exercise} {NOT_DONE}" if result is ... else f"[v] {exercise} {praise}".rstrip()
        )


def due(*values: Any) -> Any:
    """Values that the learner had to fill in: raises NotImplementedError, so "not done yet", while one is `...` or None.

    Returns:
        The value, or a tuple of several.
    """
    if any(value is None or value is ... for value in values):
        raise NotImplementedError("exercise")
    return values[0] if len(values) == 1 else values


def compare(what: str, predicted, measured: float, rel: float = 0.25, unit: str = "") -> None:
    """Print a prediction beside its measurement, their ratio, and whether it is within `rel` of 1.

    Args:
        what: What was measured, a few words.
        predicted: The number guessed or calculated beforehand; `...` while there is none.
        measured: The number found.
        rel: How much larger than the other either may be: 0.25 accepts ratios from 1/1.25 to 1.25, 1 a factor of two.
        unit: "s" is printed in ms, us, ...; any other unit gets an SI prefix ("B", "FLOP/s"); "" prints plain numbers.
    """
    if predicted is None or predicted is ...:
        print(f"{what:<30} predicted {'nothing yet':>11}  measured {_number(measured, unit):>11}")
        return
    ratio = measured / predicted if predicted else (1.0 if measured == 0 else math.inf)
    apart = max(ratio, 1 / ratio) if ratio > 0 else math.inf
    verdict = "within" if apart <= 1 + rel or measured == predicted else "NOT within"
    print(  # narrow enough for one line beside JupyterLab's file list
        f"{what:<30} predicted {_number(predicted, unit):>11}  measured {_number(measured, unit):>11}"
        f"  ratio {ratio:5.2f}, {verdict} {rel:.0%}"
    )


def _number(value, unit):
    value = value.item() if hasattr(value, "item") else value
    if unit == "s":
        return seconds(value)
    if unit:
        return si(value, unit)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _names_used(test):
    """Values of the names that a lambda reads: its own notebook's globals and closure."""
    code = getattr(test, "__code__", None)
    if code is None:
        return []
    cells = [cell.cell_contents for cell in test.__closure__ or () if not _is_empty(cell)]
    return [test.__globals__[name] for name in code.co_names if name in test.__globals__] + cells


def _is_empty(cell):
    try:
        cell.cell_contents  # noqa: B018  (asking is the only way to know)
    except ValueError:
        return True
    return False


def _is_stub(error):
    """NotImplementedError anywhere in the chain, also as the text of a rank's error, or `...` used as a value."""
    while error is not None:
        if isinstance(error, NotImplementedError) or "NotImplementedError: exercise" in str(error):
            return True
        if isinstance(error, (TypeError, AttributeError)) and "ellipsis" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def _hint(error):
    """One line, the same at each run: the assertion's text, or the error, its type and the learner's line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = re.sub(r"\bat 0x[0-9a-f]+", "", text)[:300]
    on_rank = re.match(r"(rank \d+): AssertionError:? *(.*)", text)
    if on_rank:
        return f"on {on_rank[1]}: {on_rank[2] or 'a check failed'}"
    if isinstance(error, AssertionError):
        return text or f"this does not hold: {_failed_line(error)}"
    return f"{type(error).__name__}: {text}{_place(error)}"


def _failed_line(error):
    line = traceback.extract_tb(error.__traceback__)[-1].line or "a check without a hint"
    return line.removeprefix("assert ")


def _place(error):
    """Where in the learner's own cells the error arose, if it did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if "ipykernel" in frame.filename or "<ipython" in frame.filename
    ]
    own = [frame for frame in own if not frame.name.startswith(("<lambda>", "<module>", "<cell"))]
    return f" (line {own[-1].lineno} of your cell, in {own[-1].name})" if own else ""
