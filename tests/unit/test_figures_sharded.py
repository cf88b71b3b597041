"""The drawings of ZeRO: what each rank keeps, and what travels in a step."""

import pytest

from labcode.teach.figures.plot import zero, zero_steps

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
    assert texts.count("G") == 4  # two units, in forward and in backward
    assert texts.count("R") == 2
    assert sum(text.startswith("all-gather") for text in texts) == 1  # of stages 1 and 2
    assert sum(text.startswith("reduce-scatter") for text in texts) == 1
    assert sum("all-reduce" in text for text in texts) == 1
