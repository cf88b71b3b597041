"""The guide's table of faults is that of the committed result, and nothing in it was lost."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools import reliability  # tools/ is not installed


def test_the_guide_shows_the_results_that_are_committed():
    page = reliability.PAGE.read_text(encoding="utf-8")
    shown = reliability.shown(page, reliability.committed())
    assert shown == page, "run: python -m tools.reliability"


def test_no_byte_was_lost_and_no_more_steps_than_one_interval():
    one_machine, cluster = reliability.committed()
    assert one_machine.complaints() == cluster.complaints() == []
    assert len(one_machine.outcomes) >= 50 and one_machine.nodes == 0
    assert cluster.nodes == 2
    assert sum(outcome.kind == "cut" for outcome in cluster.outcomes) >= 2


def test_a_page_without_a_place_for_it_is_refused():
    with pytest.raises(ValueError, match=r"^the page has no lines"):
        reliability.shown("# A course\n", reliability.committed())
