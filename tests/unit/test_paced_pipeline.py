"""What lesson 12 shows of a schedule: as text, and where its ranks wait."""

import pytest

from course.labs import l12_paced_pipeline
from labcode.perf.pipeline import StageTimes, simulate
from labcode.schedules import schedule

UNIT = StageTimes(1e-3, 1e-3, 1e-3)


def test_the_table_shows_what_each_rank_does_in_each_tick():
    expected = ["rank 0  F0 F1 ·  B0 ·  B1", "rank 1  ·  F0 B0 F1 B1 ·"]
    assert l12_paced_pipeline.table(schedule("1f1b", 2, 2), 2).splitlines() == expected


def test_a_long_table_is_narrow_and_writes_second_stages_small():
    lines = l12_paced_pipeline.table(schedule("interleaved", 8, 8, 4), 8).splitlines()
    assert lines[0].startswith("rank 0  F0F1F2F3f0f1f2f3F4")
    assert max(map(len, lines)) < 90
    assert "B7" in lines[3] and "b7" in lines[3]


def test_the_gaps_of_1f1b_have_four_places_and_the_lengths_of_the_lesson():
    line = simulate(schedule("1f1b", 4, 8), StageTimes(1, 1, 1))
    for rank in range(4):
        gaps = l12_paced_pipeline.gaps(line, rank)
        waited = {}
        for letter, spans in gaps.items():
            waited[letter] = sum(stop_s - start_s for start_s, stop_s in spans)
        behind = 3 - rank
        assert waited == {"a": rank, "b": 2 * behind, "c": behind, "d": 2 * rank}
        assert len(gaps["c"]) == behind
        assert len(l12_paced_pipeline.notes(line, rank)) == sum(map(len, gaps.values()))


@pytest.mark.parametrize(("one", "word"), [(1.0, "more"), (0.1 + 0.2, "the same"), (0.1, "less")])
def test_a_comparison_in_words(one, word):
    assert l12_paced_pipeline.in_words(one, 0.3) == word


def test_the_measured_time_line_is_that_of_the_median_step():
    actions = schedule("1f1b", 1, 1)[0]
    rows = [
        [(action, begin + i, begin + i + length) for i, action in enumerate(actions)]
        for begin, length in ((10, 0.5), (20, 0.9), (30, 0.7))
    ]
    played = l12_paced_pipeline.Played(rows, begins=[10, 20, 30], peak=1, sent=(0, 0), gradients={})
    line = l12_paced_pipeline.timeline([played])
    assert line.total_s == pytest.approx(1.7)
    assert [row.start_s for row in line.rows] == [0, 1]
    assert line.busy_s() == pytest.approx(1.4)


def test_gradients_of_one_process_have_every_stage():
    found = l12_paced_pipeline.gradients(3, 2)
    assert list(found) == [0, 1, 2]
    assert all(grad.abs().sum() > 0 for grad in found.values())
