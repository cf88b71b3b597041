"""What the ranks of a pool answer: results, prints and failures, and the one error made of them."""

import json
import math
import sys
import traceback

from labcode.pool.engine import CellFailed


class RankError(RuntimeError):
    """The first failure among the ranks: "rank 2: ValueError: ..."; that rank's traceback is a note of it.

    Args:
        message: The line above.
        rank: The rank that failed first; None when an engine died.
    """

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


def answer_of(child) -> dict:
    """What one rank answered: "out" and "err", and "result" or "failure"; empty while there is no answer."""
    if not child.done():
        return {}
    value = child.result()
    if not isinstance(value, Exception):
        return value if isinstance(value, dict) else {}
    if getattr(value, "ename", "") == CellFailed.__name__:
        return {"failure": json.loads(value.evalue)}
    name, message = (
        getattr(value, "ename", type(value).__name__),
        getattr(value, "evalue", str(value)),
    )
    rank = (getattr(value, "engine_info", None) or {}).get("engine_id")
    return {
        "failure": {"time": math.inf, "rank": rank, "error": name, "message": message, "frames": []}
    }


def any_failed(reply) -> bool:
    """Whether a rank has answered with a failure."""
    return any("failure" in answer_of(child) for child in reply._children)


def raise_first(reply) -> None:
    """Raise the earliest failure in a reply, if there is one; later ones are mostly ranks that lost their peer."""
    answers = [answer_of(child) for child in reply._children]
    failures = [answer["failure"] for answer in answers if "failure" in answer]
    if not failures:
        return
    first = min(failures, key=lambda failure: failure["time"])
    same = [
        failure
        for failure in failures
        if (failure["error"], failure["message"]) == (first["error"], first["message"])
    ]
    first = min(
        same, key=lambda failure: failure["rank"] or 0
    )  # when all fail alike the message should not vary
    error = RankError(f"rank {first['rank']}: {first['error']}: {first['message']}", first["rank"])
    # formatted here and not on the rank: the source of notebook cells is known here only
    frames = traceback.StackSummary.from_list(
        [traceback.FrameSummary(*where, line=line) for *where, line in first["frames"]]
    )
    if first["frames"]:
        error.add_note(
            f"Traceback of rank {first['rank']} (most recent call last):\n{''.join(frames.format()).rstrip()}"
        )
    if finished := [rank for rank, answer in enumerate(answers) if "result" in answer]:
        error.add_note(f"finished before: {', '.join(f'rank {rank}' for rank in finished)}")
    raise error


def print_outputs(answers: dict[int, dict]) -> None:
    """Print what each rank printed, in rank order, each line with its rank."""
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        for rank, answer in sorted(answers.items()):
            for line in answer.get(name, "").splitlines():
                print(f"[rank {rank}] {line}", file=stream)
