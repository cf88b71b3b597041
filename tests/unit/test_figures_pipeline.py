"""The drawings of a pipeline: fixed colours, a number on every block, letters in gaps."""

import pytest
from matplotlib.colors import to_hex

from course.figures import plot
from course.figures.pipeline import KINDS, Note
from course.figures.style import PALE
from labcode.perf.pipeline import StageTimes, simulate
from labcode.schedules import schedule

UNIT = StageTimes(1e-3, 1e-3, 1e-3)
ALT = "Four words at least"


def drawn(name, num_stages=4, **options):
    line = simulate(schedule(name, num_stages, 8, 4), UNIT)
    return plot.pipeline({"simulated": line}, title="a finding", alt=ALT, **options)


def colours(picture):
    return {to_hex(bar.get_facecolor()).upper() for bar in picture.axes[0].patches}


def test_a_kind_has_its_colour_whatever_stands_beside_it():
    waits = PALE.upper()
    of = {letter: kind.colour.upper() for letter, kind in KINDS.items()}
    assert colours(drawn("1f1b")) == {waits, of["F"], of["B"]}
    assert colours(drawn("zero_bubble")) == {waits, of["F"], of["I"], of["W"]}


def test_every_block_carries_its_micro_batch():
    for name, num_stages in (("1f1b", 4), ("zero_bubble", 4), ("interleaved", 8)):
        texts = [text.get_text() for text in drawn(name, num_stages).axes[0].texts]
        kinds = 3 if name == "zero_bubble" else 2
        for number in range(8):
            blocks = [text for text in texts if text.lstrip("FBIW") == str(number)]
            assert len(blocks) == kinds * num_stages


def test_later_stages_of_a_rank_are_pale_and_the_key_says_so():
    picture = drawn("interleaved", 8)
    assert len(colours(picture)) == 5  # two kinds, full and pale, and waiting
    names = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert "pale: the rank's later stage" in names


def test_a_note_stands_in_its_gap():
    picture = drawn("1f1b", notes=[Note(1, 0.0, 1e-3, "a")])
    note = next(text for text in picture.axes[0].texts if text.get_text() == "a")
    assert note.get_position() == (0.5, 1)


def test_time_lines_below_each_other_share_their_axis():
    line = simulate(schedule("1f1b", 4, 8), UNIT)
    later = simulate(schedule("1f1b", 4, 8), UNIT, message_s=1e-4)
    picture = plot.pipeline({"simulated": line, "measured": later}, title="t", alt=ALT)
    assert [axes.get_title(loc="left") for axes in picture.axes] == ["simulated", "measured"]
    assert picture.axes[0].get_xlim() == picture.axes[1].get_xlim()


def test_stages_that_cannot_be_drawn_are_refused():
    with pytest.raises(ValueError, match="draw 2 to 5 ranks"):
        plot.stages(8, 2, title="t", alt=ALT)


def test_rows_may_be_stages():
    line = simulate(schedule("1f1b", 4, 8), UNIT)
    picture = plot.pipeline(
        {"simulated": line, "measured": line}, title="t", alt=ALT, lanes={"simulated": "stage"}
    )
    first = {text.get_text() for text in picture.axes[0].texts}
    second = {text.get_text() for text in picture.axes[1].texts}
    assert "stage 0" in first
    assert "rank 0" in second
