"""The drawings of ZeRO: what each rank keeps, and what travels in a step."""

import pytest

from course.figures.plot import hybrid_sharding, tokens_that_hide, zero, zero_steps
from course.figures.sharded import SENT, UNITS

ALT = "Four words at least"


def filled(picture):
    """{kind: total width of what is drawn of it}."""
    found = {}
    for patch in picture.axes[0].patches:
        if patch.get_gid():
            found[patch.get_gid()] = found.get(patch.get_gid(), 0) + patch.get_width()
    return found


def test_what_is_divided_is_drawn_once_over_all_ranks():
    # without ZeRO each of 4 ranks keeps all; from its stage on the ranks keep it once together
    widths = filled(zero(4, alt=ALT))
    assert widths["optimizer"] == pytest.approx(12 * (4 + 1 + 1 + 1))
    assert widths["gradients"] == pytest.approx(2 * (4 + 4 + 1 + 1))
    assert widths["weights"] == pytest.approx(2 * (4 + 4 + 4 + 1))


def test_the_bytes_of_a_rank_stand_beside_it():
    texts = [text.get_text() for text in zero(4, alt=ALT).axes[0].texts]
    for total in ("16 bytes", "7 bytes", "5.5 bytes", "4 bytes"):
        assert total in texts
    with pytest.raises(ValueError, match="draw 2 to 6"):
        zero(7, alt=ALT)


def test_stage_3_gathers_twice_and_nothing_after_the_optimizer():
    texts = [text.get_text() for text in zero_steps(alt=ALT).axes[0].texts]
    assert sorted(text for text in texts if text[0] in "GR") == ["G1", "G1", "G2", "G2", "R1", "R2"]
    assert sum(text.startswith("all-gather") for text in texts) == 1  # of stages 1 and 2
    assert sum(text.startswith("reduce-scatter") for text in texts) == 1
    assert sum("all-reduce" in text for text in texts) == 1


def test_a_unit_of_stage_3_computes_when_its_weights_have_come():
    ends = {}
    for label, _, (start, stop) in SENT["stage 3"]:
        ends.setdefault(label, []).append((start, stop))
    units = dict(UNITS)
    for unit in "12":
        (_, first), (_, second) = ends[f"G{unit}"]
        assert first <= units[f"F{unit}"][0]
        assert second <= units[f"B{unit}"][0]
        assert units[f"B{unit}"][1] <= ends[f"R{unit}"][0][0]


def test_the_lines_reach_one_where_the_tokens_are_enough():
    picture = tokens_that_hide(692e12, {"full nodes": 365e9, "alone": 50e9}, alt=ALT)
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert texts[:2] == ["1,896", "13,840"]


def test_ranks_of_one_place_keep_the_same_part():
    texts = [text.get_text() for text in hybrid_sharding(2, 4, alt=ALT).axes[0].texts]
    assert "rank 1\npart 1" in texts
    assert "rank 5\npart 1" in texts
