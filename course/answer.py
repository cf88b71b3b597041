"""What an exercise is, and what is said of an answer: for `check` and for the checks that it calls.

    Exercise   its check, its praise, hints and mistakes
    Hint       what a check raises
    due        values that the learner had to fill in
    is_stub    whether an error comes from code that is still to be written
    reason     an error in one line

It stands below the checks of the lessons, and `course.check`, which looks them up, above.
"""

import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from course import tracebacks
from course.pool.answers import RankError

RETURNED_NONE = "it returned None: is there a `return`?"
MAX_HINT_CHARACTERS = 520
ADVICE_CHARACTERS = 180  # of these the end: there stands what to do
ON_RANK = re.compile(r"(rank \d+): (\w+):? *(.*)")
MEANINGS = {  # what gloo and the store write, and what it means
    r"[Tt]imed out waiting \d+ms for \w+ operation": "it waited for a message that nobody sent",
    r"element 0 of tensors does not require grad": (
        "backward was started from a tensor that has no graph: was it detached, or computed "
        "without autograd?"
    ),
    r"of type torch\.Tensor but got <class '(int|float|bool)'>": (
        r"torch.distributed wants a tensor and was given an object of type \1: torch.tensor(...) "
        "makes one"
    ),
    r"parameter `(\w+)` of type List\[torch\.Tensor\] but got <class 'tuple'>": (
        r"`\1` was given a tuple, as `split` and `chunk` return it: list(...) makes a list of it"
    ),
    r"Invalid function argument\. Expected parameter `\w+` of type torch\.Tensor": (
        "torch.distributed was given what is no tensor: if it is the .grad of an x, was "
        "requires_grad_ called on this very x, and does another rank wait for it?"
    ),
    r"'NoneType' object has no attribute 'contiguous'": (
        "None is what was to be sent: if it is the .grad of an x, was requires_grad_ called on "
        "this very x, and does another rank wait for it?"
    ),
    r"wait timeout": "it waited for something that no rank put into the store",
    r"Connection (closed by peer|reset by peer)": "another rank ended while this one waited for it",
    r"returned an incorrect number of gradients \(expected (\d+), got (\d+)\)": (
        r"backward gives \2 where \1 are expected, one for each argument of forward but `ctx`: "
        "is there a `return`, and a None for what has no gradient?"
    ),
    r"'NoneType' object has no attribute 'wait'": (
        "there is nothing to wait for: a collective returns its request only with async_op=True"
    ),
    r"shape '(\[[\d, ]*\])' is invalid for input of size (\d+)": (
        r"a tensor of \2 numbers was to have the shape \1: how many numbers belong to it?"
    ),
    r"Global rank \d+ is not part of group|should not be the same as the rank of the current": (
        "a message between a rank and itself, or one outside of the group: dst and src are ranks "
        "of the world, group_dst and group_src count within the group"
    ),
    r"invalid input tensor list size, must be world size": (
        "the list has not one tensor for each rank of the group: along which dim was it cut, and "
        "into how many parts?"
    ),
}


class Hint(Exception):
    """What is wrong with an answer, and where to look: the text that the learner reads."""


@dataclass(frozen=True)
class Exercise:
    """What is said about an exercise; in `course.exercises.lNN.EXERCISES`, by its number.

    Args:
        praise: What a right answer is told, for instance what the number means.
        hints: Each says a little more than the one before; none of them the answer.
        check: What judges an answer: it is given what the check cell gives after the number, raises
            `Hint` where that is wrong, and may return what else there is to say of a right one.
        mistakes: What the check looks for, with examples (`course.exercises.contract`); the
            tests try them.
    """

    praise: str = ""
    hints: tuple[str, ...] = ()
    check: Callable[..., Any] | None = None
    mistakes: Sequence[Any] = ()


# ---- what is not done


def due(*values: Any) -> Any:
    """Values that the learner had to fill in.

    Returns:
        The value, or a tuple of several.

    Raises:
        NotImplementedError: One is `...`; `check` then says "not done yet".
        Hint: One is None, which is what a function without `return` gives.
    """
    if any(value is ... for value in values):
        raise NotImplementedError("exercise")
    if any(value is None for value in values):
        raise Hint(RETURNED_NONE)
    if len(values) == 1:
        return values[0]
    return values


def is_stub(error: BaseException) -> bool:
    """Whether an error, or one that caused it, comes from code that is still to be written.

    That is NotImplementedError of a stub, also as the text of a rank's error, or `...` used as a
    value. PyTorch raises NotImplementedError too, for what it cannot do; that is no stub.
    """
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if isinstance(cause, NotImplementedError) and (not text or text.startswith("exercise")):
            return True
        if "NotImplementedError: exercise" in text:
            return True
        if isinstance(cause, (TypeError, AttributeError)) and "ellipsis" in text.lower():
            return True
        cause = cause.__cause__ or cause.__context__
    return False


# ---- what is wrong


def reason(error: BaseException) -> str:
    """One line, the same at each run: the assertion's text, or the error and the learner's line."""
    # torch breaks this one in two
    text = _first_line(re.sub(r"\n +but got <", " but got <", str(error)))
    text = re.sub(r"\bat 0x[0-9a-f]+", "", text)  # addresses differ from run to run
    if isinstance(error, Hint):
        return _cut(text)
    if isinstance(error, AssertionError):
        return _cut(text) or f"this does not hold: {_failed_condition(error)}"
    place = tracebacks.place_in_cells(error)
    is_their_own = False
    if not place and error.__cause__ is not None:  # of an error on a simulated rank
        place = tracebacks.place_in_cells(error.__cause__)
        is_their_own = tracebacks.raised_in_a_cell(error.__cause__)
    on_rank = ON_RANK.match(text)
    if on_rank:
        rank, name, message = on_rank.groups()
        if name == "AssertionError" and place and (is_their_own or not message):
            said = f', "{message}"' if message else ""
            return f"on {rank}: an assertion of yours does not hold{said}{place}"
        if name in ("AssertionError", Hint.__name__):
            return _cut(f"on {rank}: {message or 'a check failed'}")
        return f"on {rank}: {_cut(_in_words(name, message))}{place}"
    if isinstance(error, RankError):  # the pool speaks in words of its own
        return f"{_cut(text)}{place}"
    if "NoneType" in text and not place:
        # what the learner's function gave back could not be used
        text = f"{text}; if that is your function's result, {RETURNED_NONE}"
    return f"{_cut(_in_words(type(error).__name__, text))}{place}"


def _in_words(name: str, message: str) -> str:
    """An error of a library with what it means: gloo names its own source files, not the fault."""
    for sign, meaning in MEANINGS.items():
        found = re.search(sign, message)
        if found is None:
            continue
        meaning = found.expand(meaning)
        # the pool adds what each rank did, where it knows: "...: rank 0 waits in recv, ..."
        _, _, done = message[found.end() :].partition(": ")
        return f"{meaning}: {done}" if done else meaning
    return f"{name}: {message}" if message else name


def _cut(text: str) -> str:
    """A long text without its middle."""
    if len(text) <= MAX_HINT_CHARACTERS:
        return text
    gap = " ... "
    start = text[: MAX_HINT_CHARACTERS - ADVICE_CHARACTERS - len(gap)]
    end = text[-ADVICE_CHARACTERS:]
    return f"{start.rstrip()}{gap}{end.partition(' ')[2].lstrip()}"


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
