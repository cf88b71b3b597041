"""What to say of the name of a model that is not known: never one of another order of size.

Held by: tests/unit/test_find_model.py
"""

import difflib
import math
import re
from collections.abc import Mapping

from labcode.runtime.suggest import closest, unknown

# "7b", "1.5B", "124m", "8x7b": a number of weights at the end of a word
SIZE_IN_NAME = re.compile(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)([mbt])(?![a-z0-9])")
UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
SAME_SIZE = 1.4  # a factor: LLaMA calls 6.7 and 8.0 billion weights 7B and 8B
FARTHEST = 3.0  # a factor beyond which another size is no suggestion
ALIKE = 0.8  # of difflib: what may be a slip of the keyboard


def unknown_model(name: str, sizes: Mapping[str, float | None]) -> str:
    """The one-line message for a model that is not known.

    Args:
        name: What was typed.
        sizes: {known model: its weights}; None: as many as its name says, if it does.
    """
    wanted = size_in_name(name)
    if wanted is None:
        return unknown("model", name, sizes)
    there = f"there are {', '.join(sizes)}"
    meant = nearest(name, sizes)
    if meant is None:
        return f"unknown model {name!r}, and none has nearly that size: {there}"
    if difflib.SequenceMatcher(None, name.lower(), meant).ratio() > ALIKE:
        return unknown("model", name, sizes, instead=meant)
    return f"unknown model {name!r}: the nearest in size is {meant}; {there}"


def nearest(name: str, sizes: Mapping[str, float | None]) -> str | None:
    """The known model that is meant: of those that have about that size the most alike.

    Returns:
        None where a size is typed and none is within a factor of 3.
    """
    wanted = size_in_name(name)
    if wanted is None:
        return closest(name, sizes)
    off = {}
    for known, weights in sizes.items():
        size = weights or size_in_name(known)
        if size is not None:
            off[known] = abs(math.log(size / wanted))
    if min(off.values()) > math.log(FARTHEST):
        return None
    farthest = max(min(off.values()), math.log(SAME_SIZE))
    near = [known for known, distance in off.items() if distance <= farthest]
    return difflib.get_close_matches(name.lower(), near, n=1, cutoff=0)[0]


def size_in_name(name: str) -> float | None:
    """Weights, as far as a name tells: "llama-7b" has 7e9, "8x7b" 56e9; None: it does not."""
    found = SIZE_IN_NAME.search(name.lower())
    if found is None:
        return None
    times, number, unit = found.groups()
    return int(times or 1) * float(number) * UNITS[unit]
