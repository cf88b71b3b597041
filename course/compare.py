"""A prediction beside its measurement: `compare("bytes per rank", guess, measured, unit="B")`."""

import html
import math
from collections.abc import Collection
from typing import Any

from course import show
from labcode.runtime.units import seconds, si, type_in_words

EXACT_REL = 1e-9  # what rounding may do to a float that is meant to be exact
LARGEST = 10**300
WAYS = ("measured", "counted", "computed", "simulated", "published")


def compare(
    what: str,
    predicted: Any,
    measured: Any,
    *,
    unit: str = "",
    within: float = 1.25,
    found: str = "measured",
    options: Collection[str] = (),
) -> None:
    """Show a prediction beside what was found, and say whether it is right or close.

    Numbers are close when neither is more than `within` times the other. Text, truth values and
    sequences are compared exactly, whatever `within` says. A measurement that is not close may be
    the machine's doing, and is amber; anything else is red. Without a prediction, or with text in
    place of a number, what was found is folded away. Whatever a learner predicts, this does not
    raise.

    Args:
        what: What was measured, a few words.
        predicted: What was guessed or calculated beforehand; `...` or None while there is nothing.
        measured: What was found.
        unit: "s" is printed in ms, us, ...; any other unit gets an SI prefix ("B", "FLOP/s"); ""
            prints plain numbers.
        within: A factor: 1.25 accepts measurements from 1/1.25 to 1.25 times the prediction, 2 is
            "within a factor of 2", 1 asks for the number itself (floats to 1e-9).
        found: How the value was found: one of `WAYS`.
        options: The answers that a question of kind offers. Whoever writes another one is asked to
            choose, and is not told yet which is right.

    Raises:
        ValueError: `within` is below 1, `found` is no such word, or `measured` is no option.
    """
    if found not in WAYS:
        raise ValueError(f"found={found!r} is not known: choose {', '.join(WAYS)}")
    if not within >= 1:
        raise ValueError(f"within={within:g} is no factor: 1 asks for the exact number, 2 is twice")
    predicted = _plain(predicted)
    measured = _plain(measured)
    finding = f"{found} {_text(measured, unit):>11}"
    if predicted is None or predicted is ...:
        _say_folded(what, "no prediction yet", finding)
        return
    expected = f"predicted {_text(predicted, unit):>11}"
    if options and not _is_one_of(measured, options):
        raise ValueError(f"{what}: {measured!r} is none of the options {', '.join(options)}")
    asked = _asked_for(predicted, measured, options)
    if asked:
        _say_folded(what, f"{expected}  {asked}", finding)
        return
    badge = show.WRONG
    if within == 1 or not (_is_number(predicted) and _is_number(measured)):
        is_right = _same(predicted, measured)
        verdict = "right"
        if not is_right:
            verdict = f"wrong, it is {_distinct(measured, predicted, unit)}"
    else:
        is_right = _factor(predicted, measured) <= within or predicted == measured
        verdict = f"within a factor of {within:g}"
        if not is_right:
            verdict = f"NOT {verdict}: {_how_much(predicted, measured, unit)}"
            badge = show.OFF if found == "measured" else show.WRONG
    # Narrow enough for one line beside JupyterLab's file list.
    _say(what, f"{expected}  {finding}", verdict, show.RIGHT if is_right else badge)


def _say(what: str, numbers: str, verdict: str, badge: show.Badge) -> None:
    """One aligned line, with the verdict in colour where there are colours."""
    line = f"{what:<30} {numbers}"
    rich = f"{html.escape(line, quote=False)}  {badge.html(verdict)}"
    show.say(f"{line}  {verdict}", f'<pre style="margin: 0; white-space: pre-wrap">{rich}</pre>')


def _say_folded(what: str, state: str, finding: str) -> None:
    """That there is no prediction to judge yet; a click shows what was found all the same."""
    line = f"{what:<30} {state}"
    style = "font-family: monospace; white-space: pre-wrap"
    summary = f'<span style="{style}">{html.escape(line, quote=False)}; show what was found:</span>'
    show.say(line, show.folded(summary, f"<pre>{html.escape(finding, quote=False)}</pre>"))


# ---- whether it is right


def _asked_for(predicted: Any, measured: Any, options: Collection[str]) -> str:
    """What kind of value is wanted, if a prediction is of another; it may well be right."""
    if options and not _is_one_of(predicted, options):
        return f"choose one of: {', '.join(options)}"
    given, wanted = _kind(predicted), _kind(measured)
    if wanted == "True or False" and given != wanted:
        return f"give {wanted}, not {given}"
    if wanted == "a number" and given in ("True or False", "text", "a list"):
        return f"give {wanted}, not {given}"
    if wanted == "a list" and given in ("a number", "text"):
        return f"give {wanted}, not {given.replace('a ', 'one ')}"
    return ""


def _kind(value: Any) -> str:
    """What it is, in words."""
    if isinstance(value, bool):
        return "True or False"
    if isinstance(value, str):
        return "text"
    if _is_number(value):
        return "a number"
    return "a list" if _is_list(value) else type_in_words(value)


def _is_one_of(answer: Any, options: Collection[str]) -> bool:
    return any(_same(answer, option) for option in options)


def _plain(value: Any) -> Any:
    """A Python number, or a list, for what comes from torch or numpy."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, int) and abs(value) > LARGEST:
        return math.inf if value > 0 else -math.inf  # no float can hold it
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _same(predicted: Any, measured: Any) -> bool:
    """Equal; floats to 1e-9, a list is as good as a tuple, and text in any case, with or without
    "the"."""
    if _is_number(predicted) and _is_number(measured):
        return predicted == measured or math.isclose(predicted, measured, rel_tol=EXACT_REL)
    if isinstance(predicted, (list, tuple)) and isinstance(measured, (list, tuple)):
        if len(predicted) != len(measured):
            return False
        return all(_same(_plain(one), _plain(other)) for one, other in zip(predicted, measured))
    if isinstance(predicted, str) and isinstance(measured, str):
        return _words(predicted) == _words(measured)
    # True == 1, but a truth value is no answer to "how many"
    return isinstance(predicted, bool) == isinstance(measured, bool) and predicted == measured


def _words(text: str) -> str:
    """Without what makes no difference: "Same." is as good as "the same", "DP4" as "dp 4"."""
    words = text.strip(" .!").lower().removeprefix("the ")
    return "".join(words.split())


def _factor(predicted: float, measured: float) -> float:
    """How many times the one is the other, the larger by the smaller; infinite if there is none."""
    if predicted * measured <= 0:
        return math.inf
    ratio = measured / predicted
    if ratio == 0 or math.isnan(ratio):  # so small that it vanishes; not a number
        return math.inf
    return max(ratio, 1 / ratio)


def _how_much(predicted: float, measured: float, unit: str) -> str:
    """The measurement in terms of the prediction: "2.1 × the prediction"."""
    if not math.isfinite(_factor(predicted, measured)):
        return f"it is {_text(measured, unit)}"
    times = measured / predicted
    digits = 4 if 0.9 < times < 1.1 else 3  # 1.013 is not within 1.01
    return f"{times:.{digits}g} × the prediction"


# ---- how it is printed


def _distinct(measured: Any, predicted: Any, unit: str) -> str:
    """The measurement, with all its digits where it would look like the prediction."""
    if isinstance(measured, str):
        return f'"{measured}"'
    text = _text(measured, unit)
    if text != _text(predicted, unit):
        return text
    if _is_number(measured):
        return f"{measured:,.12g} {unit}".rstrip()
    return repr(measured)


def _text(value: Any, unit: str) -> str:
    if not _is_number(value):
        return str(value)
    if unit == "s":
        return seconds(value)
    if unit:
        return si(value, unit)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}"
