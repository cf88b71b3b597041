"""How quantities are printed: rounded, then split into units; read back they are the number."""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import numpy
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from labcode.runtime import units

SI_SIZES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
BINARY_SIZES = {"B": 1, "KiB": units.KIB, "MiB": units.MIB, "GiB": units.GIB, "TiB": units.TIB}
TIME_SIZES = {"h": 3600, "min": 60, "s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.75e11, "175 GB"),
        (999.4, "999 B"),
        (999.9, "1 kB"),
        (-999.9, "-1 kB"),
        (999_999, "1 MB"),
        (0, "0 B"),
        (0.5, "0.5 B"),
        (3.2e18, "3.2 EB"),
        (float("inf"), "inf B"),
    ],
)
def test_si(value, text):
    assert units.si(value, "B") == text


def test_si_without_a_unit_and_with_a_long_one():
    assert units.si(1.75e11) == "175 G"
    assert units.si(12) == "12"
    assert units.si(9.89e14, "FLOP/s") == "989 TFLOP/s"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (12, "12 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * units.GIB, "3.00 GiB"),
        (units.GIB - 1, "1.00 GiB"),
        (1023.6, "1.00 KiB"),
        (5000 * units.TIB, "5000.00 TiB"),
        (float("inf"), "inf TiB"),
    ],
)
def test_binary_bytes(num_bytes, text):
    assert units.binary_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (3.2e-3, "3.2 ms"),
        (0.9999, "1 s"),
        (9.999e-4, "1 ms"),
        (59.94, "59.9 s"),
        (59.97, "1 min 00 s"),
        (65, "1 min 05 s"),
        (119.4, "1 min 59 s"),
        (119.7, "2 min 00 s"),
        (3599.8, "1 h 00 min"),
        (7199, "2 h 00 min"),
        (7800, "2 h 10 min"),
        (0, "0 ns"),
        (-119.7, "-2 min 00 s"),
        (float("inf"), "inf s"),
    ],
)
def test_seconds(duration_s, text):
    assert units.seconds(duration_s) == text


@given(st.floats(1e-3, 9e20))
@example(999.9)
def test_si_is_read_back_to_three_digits_and_needs_no_exponent(value):
    number, _, prefix = units.si(value).partition(" ")
    assert float(number) * SI_SIZES[prefix] == pytest.approx(value, rel=5.1e-3)
    assert "e" not in number
    assert float(number) < 1000 or prefix == "E"


@given(st.floats(1, 1e15))
@example(units.MIB - 1.0)
def test_binary_bytes_are_read_back(num_bytes):
    number, _, unit = units.binary_bytes(num_bytes).partition(" ")
    half_a_digit = 0.5 if unit == "B" else 0.005 * BINARY_SIZES[unit]
    assert abs(float(number) * BINARY_SIZES[unit] - num_bytes) <= half_a_digit * 1.0001
    assert float(number) < 1024


@given(st.floats(1e-9, 1e7))
@example(119.7)
@example(3599.8)
@example(0.9999)
def test_seconds_are_read_back_and_no_part_is_a_whole_unit_of_the_next(duration_s):
    text = units.seconds(duration_s)
    parts = re.findall(r"([\d.]+) (h|min|s|ms|us|ns)", text)
    assert " ".join(f"{number} {unit}" for number, unit in parts) == text
    total_s = sum(float(number) * TIME_SIZES[unit] for number, unit in parts)
    last = TIME_SIZES[parts[-1][1]]
    tolerance_s = 0.5 * last if len(parts) == 2 else 5.1e-3 * duration_s
    assert abs(total_s - duration_s) <= tolerance_s * 1.0001
    for number, unit in parts[1:]:
        assert float(number) < 60, unit
    first, unit = parts[0]
    assert float(first) < {"h": 1e9, "min": 60, "s": 60}.get(unit, 1000)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([4], "rank 4"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 1, 2], "ranks 0-2"),
        ([5, 0, 1, 2], "ranks 0-2 and 5"),
        ([0, 1, 3, 5, 6, 7], "ranks 0, 1, 3 and 5-7"),
        (range(1, 17, 2), "ranks 1, 3, 5, 7, 9, 11 and others"),
    ],
)
def test_ranks_are_listed_as_one_would_say_them(ranks: Iterable[int], text: str) -> None:
    assert units.ranks_text(ranks) == text


def test_one_thing_has_no_s():
    assert [units.plural(number, "rank") for number in range(3)] == ["0 ranks", "1 rank", "2 ranks"]
    assert units.plural(2, "micro-batch") == "2 micro-batches"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "a list"),
        (1, "an int"),
        (iter(()), "a tuple_iterator"),
        (itertools.islice((), 1), "an islice"),
        (numpy.zeros(1), "an ndarray"),
        (None, "a NoneType"),
    ],
)
def test_a_type_is_told_with_its_article(value: object, words: str) -> None:
    assert units.type_in_words(value) == words


def test_no_message_puts_an_article_before_a_type_by_hand() -> None:
    by_hand = re.compile(r"\ban? \{type\(\w+(?:\.\w+)*\)\.__name__\}")
    root = Path(units.__file__).parents[2]
    found = []
    for folder in ("labcode", "course"):
        for file in sorted((root / folder).rglob("*.py")):
            if by_hand.search(file.read_text(encoding="utf-8")):
                found.append(str(file.relative_to(root)))
    assert not found, f"units.type_in_words knows the article: {', '.join(found)}"
