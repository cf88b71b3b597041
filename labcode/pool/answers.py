"""What the ranks of a pool answer: results, prints and failures, and the one error made of them."""

import math
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from labcode.pool.stopping import CALLED_EXIT, CellFailed, from_cell_failure

WAITED_IN_VAIN = re.compile(r"[Tt]imed out|wait timeout")  # of gloo, NCCL and the store
MISMATCH = "CollectiveMismatch"  # of `recorder`: its text names the ranks, not only one of them

Answer = dict[str, Any]  # "out", "err" and "groups", with "result" or "failure"


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


def answers_of(reply: Any) -> list[Answer]:
    """What the ranks answered, in rank order."""
    return [_answer_of(child) for child in reply._children]


def _answer_of(child: Any) -> Answer:
    """What one rank answered; empty while there is no answer."""
    if not child.done():
        return {}
    value = child.result()
    if isinstance(value, dict):
        return value
    if not isinstance(value, Exception):
        return {}
    error = getattr(value, "ename", type(value).__name__)
    message = getattr(value, "evalue", str(value))
    if error == CellFailed.__name__:
        return {"failure": from_cell_failure(message)}
    # An error outside the user's code, such as an engine that died: it comes after all others.
    engine_info = getattr(value, "engine_info", None) or {}
    failure = {
        "time": math.inf,
        "rank": engine_info.get("engine_id"),
        "error": error,
        "message": message,
        "frames": [],
    }
    return {"failure": failure}


def any_failed(reply: Any) -> bool:
    """Whether a rank has answered with a failure."""
    return any("failure" in answer for answer in answers_of(reply))


def raise_first(reply: Any, explain: Callable[[list[int]], str] | None = None) -> None:
    """Raise the earliest failure in a reply; later ones are mostly ranks that lost their peer.

    Args:
        reply: Of ipyparallel.
        explain: What to say if the failure is that a rank waited in vain; it is given the ranks
            that have finished.
    """
    answers = answers_of(reply)
    failures = [answer["failure"] for answer in answers if "failure" in answer]
    if not failures:
        return
    first = _first(failures)
    text = _text(first)
    if explain is not None and WAITED_IN_VAIN.search(first["message"]):
        finished = [rank for rank, answer in enumerate(answers) if "result" in answer]
        text = f"{text}: {explain(finished)}"
    raise _with_notes(RankError(text, first["rank"]), first, answers)


def raise_stopped(reply: Any, kind: type[RankError], text: str, rank: int) -> None:
    """Raise an error of the pool's own, with the traceback of a rank as it was stopped."""
    answers = answers_of(reply)
    failure = answers[rank].get("failure", {"frames": [], "rank": rank})
    raise _with_notes(kind(text, rank), failure, answers)


def _text(failure: Answer) -> str:
    """ "rank 2: ValueError: ..."."""
    rank = failure["rank"]
    if failure["error"] == CALLED_EXIT:
        return f"rank {rank} called exit({failure['message']}): its process is needed: use return"
    if failure["error"] == MISMATCH:
        return failure["message"]
    return f"rank {rank}: {failure['error']}: {failure['message']}"


def _with_notes(error: RankError, first: Answer, answers: Sequence[Answer]) -> RankError:
    """The error with the traceback of its rank, and who had finished by then."""
    if first["frames"]:
        error.add_note(
            f"Traceback of rank {first['rank']} (most recent call last):\n{_traceback(first)}"
        )
    finished = [f"rank {rank}" for rank, answer in enumerate(answers) if "result" in answer]
    if finished:
        error.add_note(f"finished before: {', '.join(finished)}")
    return error


def _first(failures: list[Answer]) -> Answer:
    """The earliest failure.

    Of several with the same message it is that of the lowest rank, so that the text does not vary.
    """
    earliest = min(failures, key=lambda failure: failure["time"])
    same = []
    for failure in failures:
        if failure["error"] == earliest["error"] and failure["message"] == earliest["message"]:
            same.append(failure)
    return min(same, key=lambda failure: failure["rank"] or 0)


def _traceback(failure: Answer) -> str:
    """The traceback as text. It is made here because only here the source of cells is known."""
    frames = []
    for filename, line_number, name, line in failure["frames"]:
        frames.append(traceback.FrameSummary(filename, line_number, name, line=line))
    return "".join(traceback.StackSummary.from_list(frames).format()).rstrip()


def print_outputs(answers: dict[int, Answer]) -> None:
    """Print what each rank printed, in rank order, each line with its rank."""
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        for rank, answer in sorted(answers.items()):
            for line in answer.get(name, "").splitlines():
                print(f"[rank {rank}] {line}", file=stream)
