"""What an error of DDP's own reducer means: it names the reducer's state, not the mistake.

Source: torch/csrc/distributed/c10d/reducer.cpp and torch/nn/parallel/distributed.py, PyTorch 2.13.
Held by: tests/ranks/test_doctor_loops.py
"""

from typing import NamedTuple


class Meaning(NamedTuple):
    """How an error is told.

    Args:
        words: Words of the error's text.
        name: Name of the finding.
        what: What is wrong.
        cure: What to change.
    """

    words: str
    name: str
    what: str
    cure: str


TWICE = "DDP was told twice in one backward pass that the gradient of a parameter is ready"
TWICE_CURE = (
    "checkpoint(..., use_reentrant=False); call the wrapped model once a step, or give it "
    "static_graph=True"
)
MEANINGS = (
    Meaning(
        "Expected to have finished reduction in the prior iteration",
        "unused parameters",
        "a forward pass began before all gradients of the one before were there: some parameter "
        "took no part in its loss, or its backward pass was left out or ended in an error",
        "use every parameter and every output in the loss, or set find_unused_parameters=True",
    ),
    Meaning("Expected to mark a variable ready only once", "ready twice", TWICE, TWICE_CURE),
    Meaning("marked as ready twice", "ready twice", TWICE, TWICE_CURE),
    Meaning(
        "Your training graph has changed in this iteration",
        "graph changes",
        "with static_graph=True every step has to use the same parameters, and one did not",
        "set find_unused_parameters=True in place of static_graph=True",
    ),
)


def meaning_of(error: BaseException | None) -> list[str]:
    """[name, what, cure] of an error of the reducer; [] of any other.

    Args:
        error: What ended the loop.
    """
    if isinstance(error, RuntimeError):
        for meaning in MEANINGS:
            if meaning.words in str(error):
                return [meaning.name, meaning.what, meaning.cure]
    return []
