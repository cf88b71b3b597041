"""How to print quantities and ranks. GB is 1e9 bytes, GiB is 2**30: memory is sold in GiB.

Every number is rounded before its unit is chosen: 999.9 rounded to three digits is 1000, and that
is "1 k", not "1e+03".
"""

import math
from collections.abc import Iterable

KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40

# Smallest first: the first unit in which the number stays below the next one is taken.
_SI = (
    (1.0, ""),
    (1e3, "k"),
    (1e6, "M"),
    (1e9, "G"),
    (1e12, "T"),
    (1e15, "P"),
    (1e18, "E"),
)
_BINARY = (
    (KIB, "KiB"),
    (MIB, "MiB"),
    (GIB, "GiB"),
    (TIB, "TiB"),
)
_TIME = (
    (1e-9, "ns"),
    (1e-6, "us"),
    (1e-3, "ms"),
    (1.0, "s"),
)


def plural(number: int, name: str) -> str:
    """The number and its noun: "1 bucket", "2 buckets", "2 switches".

    Held by: tests/unit/test_units.py
    """
    if number == 1:
        return f"{number} {name}"
    ending = "es" if name.endswith("ch") else "s"
    return f"{number} {name}{ending}"


def type_in_words(value: object) -> str:
    """What a value is, with its article: "a list", "an int", "an ndarray".

    Held by: tests/unit/test_units.py
    """
    name = type(value).__name__
    article = "an" if name.lower().startswith(("a", "e", "i", "o", "nd")) else "a"
    return f"{article} {name}"


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def _in_thousands(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """`value` to three digits in the unit that keeps it below 1000, as "3.2 ms"."""
    for size, name in units[:-1]:
        number = _three_digits(value / size)
        if abs(number) < 1000:
            return f"{number:.3g} {name}"
    size, name = units[-1]
    return f"{value / size:.3g} {name}"


def si(value: float, unit: str = "") -> str:
    """A number to three digits with an SI prefix.

    `si(1.75e11)` is "175 G", `si(9.9e14, "FLOP/s")` is "990 TFLOP/s".

    Held by: tests/unit/test_units.py
    """
    if not math.isfinite(value):
        return f"{value} {unit}".rstrip()
    return f"{_in_thousands(value, _SI)}{unit}".rstrip()


def binary_bytes(num_bytes: float) -> str:
    """Bytes in powers of two: `binary_bytes(3 * 2**30)` is "3.00 GiB".

    Held by: tests/unit/test_units.py
    """
    if abs(num_bytes) < KIB - 0.5:
        return f"{num_bytes:.0f} B"
    for size, name in _BINARY[:-1]:
        number = round(num_bytes / size, 2)
        if abs(number) < 1024:
            return f"{number:.2f} {name}"
    size, name = _BINARY[-1]
    return f"{num_bytes / size:.2f} {name}"


def seconds(duration_s: float) -> str:
    """A duration from nanoseconds to hours: "3.2 ms", "1 min 05 s", "2 h 10 min".

    Held by: tests/unit/test_units.py
    """
    if not math.isfinite(duration_s):
        return f"{duration_s} s"
    if duration_s < 0:
        return f"-{seconds(-duration_s)}"
    if _three_digits(duration_s) < 60:
        return _in_thousands(duration_s, _TIME)
    minutes, rest_s = divmod(round(duration_s), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02} s"
    hours, minutes = divmod(round(duration_s / 60), 60)
    return f"{hours} h {minutes:02} min"


MOST_RUNS = 6  # of ranks in one text: of 1,024 ranks those with odd numbers may be missing


def listed(words: Iterable[object]) -> str:
    """ "0", "0 and 1", "0, 1 and 2".

    Held by: tests/unit/test_units.py
    """
    texts = [str(word) for word in words]
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0-2 and 5": neighbours together, and no more than `MOST_RUNS` of them.

    Held by: tests/unit/test_units.py
    """
    numbers = sorted(ranks)
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {listed(_runs(numbers))}"


def _runs(numbers: list[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = []
    for run in runs[:MOST_RUNS]:
        texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    if len(runs) > MOST_RUNS:
        texts.append("others")
    return texts
