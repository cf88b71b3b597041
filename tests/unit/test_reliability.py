"""The README's table of faults is that of the committed result, and nothing in it was lost."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from labcode.train.chaos import account
from tools import reliability  # tools/ is not installed


def test_the_readme_shows_the_result_that_is_committed():
    found = account.read(reliability.RESULT)
    readme = reliability.README.read_text(encoding="utf-8")
    assert reliability.shown(readme, found) == readme, "run: python -m tools.reliability"


def test_no_byte_was_lost_and_no_more_steps_than_one_interval():
    found = account.read(reliability.RESULT)
    assert found.complaints() == []
    assert len(found.outcomes) >= 50


def test_a_readme_without_a_place_for_it_is_refused():
    found = account.read(reliability.RESULT)
    with pytest.raises(ValueError, match=r"^README\.md has no lines"):
        reliability.shown("# A course\n", found)
