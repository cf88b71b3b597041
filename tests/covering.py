"""The part of a test matrix that runs in `make test`; the rest of it is marked `release`."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest

Pair = tuple[int, Hashable, int, Hashable]


def pairs_of(values: Sequence[Hashable]) -> set[Pair]:
    """Every pair of values of one case, each value with its position."""
    found = set()
    for (i, first), (j, second) in itertools.combinations(enumerate(values), 2):
        found.add((i, first, j, second))
    return found


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases in their order; those after the first `count` are marked `release`."""
    parameters = []
    for number, case in enumerate(cases):
        marks = (pytest.mark.release,) if number >= count else ()
        parameters.append(pytest.param(case, marks=marks))
    return parameters


def covering(cases: Sequence[tuple], features: Callable[..., tuple] | None = None) -> list[Any]:
    """The cases in their order; those that a pairwise covering can do without are marked `release`.

    Most mistakes in a matrix of settings show where two of them meet. The covering is greedy: it
    takes the case with the most pairs that nobody has covered yet, the first one of equals.

    Args:
        cases: The arguments of each test.
        features: features(*case) gives the values whose pairs count; default: the case itself.
    """
    pairs = [pairs_of(features(*case) if features else case) for case in cases]
    missing = set().union(*pairs)
    chosen = set()
    while missing:
        gains = [len(missing & own) for own in pairs]
        best = gains.index(max(gains))
        chosen.add(best)
        missing -= pairs[best]
    parameters = []
    for number, case in enumerate(cases):
        marks = () if number in chosen else (pytest.mark.release,)
        parameters.append(pytest.param(*case, marks=marks))
    return parameters
