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
from typing import Any

from labcode.pool.ranks import Ranks

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
