"""What the ranks of a pool answer: results, prints and failures, and the one error made of them."""

import re
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from labcode.runtime.units import ranks_text

CALLED_EXIT = "exit()"  # in place of the name of an error: the message is the exit code
MAX_TEXT = 4000  # characters of an error's message; a data set in it helps nobody
WAITED_IN_VAIN = re.compile(r"[Tt]imed out|wait timeout")  # of gloo, NCCL and the store
LOST_PEER = re.compile(r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|Socket closed")
MISMATCH = "CollectiveMismatch"  # of `recorder`: its text names the ranks, not only one of them

Answer = dict[str, Any]  # "result" or "failure"; empty as long as there is none
Failure = dict[str, Any]


class RankError(RuntimeError):
    """The first failure among the ranks: "rank 2: ValueError: ...".

    That rank's traceback is a note of the error.

    Args:
        message: The line above.
        rank: The rank that failed first; None when an engine died.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class HangError(RankError):
    """Ranks waited for a call that another rank never made; the text says what each did."""


class LateError(RankError):
    """Ranks were still at work when the time of their call was over; the text names them."""


def text_of(error: BaseException) -> str:
    """The message of an error, cut in its middle if it is long.

    `__str__` may be the user's and raise whatever it likes, also what is no Exception.
    """
    try:
        text = str(error)
    except BaseException as broken:
        return f"<no message: its __str__ raised {type(broken).__name__}>"
    left_out = len(text) - MAX_TEXT
    if left_out <= 0:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]} ... [{left_out} characters left out] ... {text[-half:]}"


def failure_of(error: BaseException, rank: int) -> Failure:
    """An error of a rank as plain data; the time in it tells which of several was the first."""
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        if "/course/pool/" not in frame.filename:
            frames.append((frame.filename, frame.lineno, frame.name, frame.line))
    name = type(error).__name__
    message = text_of(error)
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        name = CALLED_EXIT
        message = "" if error.code is None else message
    return {
        "time": time.monotonic(),
        "rank": rank,
        "error": name,
        "message": message,
        "frames": frames,
    }


def raise_first(
    answers: Sequence[Answer], explain: Callable[[list[int]], str] | None = None
) -> None:
    """Raise the earliest failure among the answers; does nothing if there is none.

    Args:
        answers: Answers of all ranks; empty: a rank that has not answered.
        explain: What to say if the failure is that a rank waited in vain; it is given the ranks
            that have finished.
    """
    failures = [answer["failure"] for answer in answers if "failure" in answer]
    if not failures:
        return
    first = _first(failures)
    text = _text(first)
    if explain is not None and WAITED_IN_VAIN.search(first["message"]):
        finished = [rank for rank, answer in enumerate(answers) if "result" in answer]
        text = f"{text}: {explain(finished)}"
    raise _with_notes(RankError(text, first["rank"]), first["frames"], answers)


def raise_stopped(
    kind: type[RankError], text: str, rank: int, places: Sequence[Answer], answers: Sequence[Answer]
) -> None:
    """Raise an error of the pool's own, with the place in which a rank was stopped."""
    raise _with_notes(kind(text, rank), places[rank].get("frames", []), answers)


def where_ranks_were(places: Sequence[Answer], answers: Sequence[Answer]) -> str:
    """In which line each rank was stopped: "rank 0 was in f, line 2, ranks 1-3 were done".

    Args:
        places: What each rank has said of its frames; empty: nothing.
        answers: Answers of all ranks; empty: a rank that has not answered.
    """
    alike: dict[str, list[int]] = {}
    for rank, (place, answer) in enumerate(zip(places, answers)):
        where = "done" if answer else _where(place.get("frames", []))
        alike.setdefault(where, []).append(rank)
    parts = []
    for where, ranks in alike.items():
        verb = "was" if len(ranks) == 1 else "were"
        parts.append(f"{ranks_text(ranks)} {verb} {where}")
    return ", ".join(parts)


def _where(frames: Sequence[Any]) -> str:
    """The innermost line of a rank that belongs to no library: "in f, line 2"."""
    paths = sysconfig.get_paths()
    libraries = (paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"])
    for filename, line_number, name, _ in reversed(frames):
        if filename.startswith(libraries):
            continue
        is_named = not name.startswith("<")  # "<module>" is a cell, "<lambda>" a lambda
        return f"in {name}, line {line_number}" if is_named else f"in line {line_number}"
    return "at work"


def _text(failure: Failure) -> str:
    """ "rank 2: ValueError: ..."."""
    rank = failure["rank"]
    if failure["error"] == CALLED_EXIT:
        return f"rank {rank} called exit({failure['message']}): its process is needed: use return"
    if failure["error"] == MISMATCH:
        return failure["message"]
    return f"rank {rank}: {failure['error']}: {failure['message']}"


def _with_notes(error: RankError, frames: Sequence[Any], answers: Sequence[Answer]) -> RankError:
    """The error with the traceback of its rank, and who had finished by then."""
    if frames:
        error.add_note(
            f"Traceback of rank {error.rank} (most recent call last):\n{_traceback(frames)}"
        )
    finished = [f"rank {rank}" for rank, answer in enumerate(answers) if "result" in answer]
    if finished:
        error.add_note(f"finished before: {', '.join(finished)}")
    return error


def _first(failures: list[Failure]) -> Failure:
    """The earliest failure.

    Of several with the same message it is that of the lowest rank, so that the text does not vary.
    """
    earliest = min(failures, key=lambda failure: failure["time"])
    same = []
    for failure in failures:
        if failure["error"] == earliest["error"] and failure["message"] == earliest["message"]:
            same.append(failure)
    return min(same, key=lambda failure: failure["rank"])


def _traceback(frames: Sequence[Any]) -> str:
    """The traceback as text. It is made here because only here the source of cells is known."""
    shown = []
    for filename, line_number, name, line in frames:
        shown.append(traceback.FrameSummary(filename, line_number, name, line=line))
    return "".join(traceback.StackSummary.from_list(shown).format()).rstrip()


def print_lines(text: str, rank: int, stream: TextIO) -> None:
    """Print what a rank printed, each line with its rank."""
    for line in text.splitlines():
        print(f"[rank {rank}] {line}", file=stream)
