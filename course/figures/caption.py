"""The words of a figure, by name: `plot.bars(by_cost, caption="08.orders")`.

They stand in captions/08.yaml, one file for each lesson, and not in the cell: a title often says
what the learner is to predict, and a cell can be read before it is run.

    orders:
      title: Little crosses with tp fastest
      alt: Six orders on a logarithmic axis; with tp fastest tens of gigabytes cross
      ylabel: GB between nodes in one step
      logy: true

Each entry is a keyword argument of the function that draws. A `{field}` in a text is filled from a
keyword of that name: `plot.bars(rates, caption="00.peaks", cpus=3000)`.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from labcode.runtime.suggest import unknown

FOLDER = Path(__file__).parent / "captions"
FIELD = re.compile(r"\{([a-z]\w*)\}")  # "{:.0f}", the format of a number, is none


@functools.cache
def of_lesson(number: str) -> dict[str, dict[str, Any]]:
    """{name: keyword arguments} of a lesson's captions; empty where it has none."""
    path = FOLDER / f"{number}.yaml"
    if not path.exists():
        return {}
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def with_caption(caption: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a figure: those of its caption, and those that the cell gives.

    Args:
        caption: "NN.name", a lesson and one of the names in its file.
        given: What the cell gives; it goes before what the caption says.

    Raises:
        ValueError: There is no such caption, or a field of it is not given.
    """
    number, _, name = caption.partition(".")
    captions = of_lesson(number)
    if name not in captions:
        raise ValueError(unknown("caption", caption, [f"{number}.{known}" for known in captions]))
    rest = dict(given)
    words: dict[str, Any] = {}
    for key, value in captions[name].items():
        words[key] = value
        if not isinstance(value, str):
            continue
        for field in FIELD.findall(value):
            if field not in given:
                raise ValueError(f"caption {caption} says {{{field}}}: give {field}=")
            words[key] = words[key].replace(f"{{{field}}}", str(given[field]))
            rest.pop(field, None)
    return words | rest
