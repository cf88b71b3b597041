"""What `tests/exercises/NN.py` says about each exercise of a lesson: right and wrong answers.

ANSWERS = {
    "1.1": Answers(
        check=lambda answer, ranks: l01.hand_out(answer, ranks),
        right={"add": ..., ...},
        wrong={"look, then write": (look_then_write, "given out more than once"), ...},
    ),
}
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labcode.pool.ranks import Ranks

SOLUTIONS = Path(__file__).resolve().parents[1] / "solutions"
MIN_RIGHT = 3
MIN_WRONG = 5


@dataclass(frozen=True)
class Answers:
    """Answers to one exercise, as people write them.

    Args:
        check: `check(answer, ranks)` is what the lesson's check cell calls, on four ranks.
        right: {what is special about it: answer}; each must pass.
        wrong: {the mistake: (answer, a part of the hint that it must get)}.
    """

    check: Callable[[Any, Ranks], None]
    right: Mapping[str, Any]
    wrong: Mapping[str, tuple[Any, str]]


def solution_of(lesson: str, name: str) -> str:
    """The source of a function as a lesson solves it; it is the last one of its cell."""
    (path,) = SOLUTIONS.glob(f"{lesson}_*.py")
    text = path.read_text(encoding="utf-8")
    start = text.index(f"def {name}(")
    cell = text[start : text.index("\n# %%", start)]
    lines = [line for line in cell.splitlines(keepends=True) if "### " not in line]
    return "".join(lines)
