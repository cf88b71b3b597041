"""Figures of a recorded run: bars as long as their step, layers as high as the memory."""

import pytest
from made_traces import MadeTrace

from course.figures import plot
from labcode.perf.breakdown import REASONS, breakdown, mean
from labcode.perf.memory_timeline import CATEGORIES, MemoryTimeline

ALT = "Where the time of each step went"
MIB = 2**20


def trace():
    made = MadeTrace().step(1, 0, 1000).part("data", 0, 400).operation("aten::mm", 400, 1000)
    return made.step(2, 1000, 3000).operation("aten::mm", 1000, 2500).trace()


def texts(picture):
    return [text.get_text().strip() for text in picture.axes[0].texts]


def test_one_run_is_shown_step_by_step():
    axes = plot.step_breakdown(trace(), alt=ALT).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["step 1", "step 2"]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx([0.6, 0, 0.4, 0, 1.5, 0, 0, 0.5])
    assert len(widths) == 2 * len(REASONS)


def test_several_runs_are_shown_by_their_means():
    times = breakdown(trace())
    picture = plot.step_breakdown({"all": times, "first": times[0], "as one": trace()}, alt=ALT)
    assert texts(picture) == [
        *("70%", "13%", "17%", "1.5 ms"),
        *("60%", "40%", "1.0 ms"),
        *("70%", "13%", "17%", "1.5 ms"),
    ]
    assert mean(times).total_ms == pytest.approx(1.5)


def test_layers_of_memory_add_up_to_the_peak():
    used = {name: [0, 0] for name in CATEGORIES}
    used |= {"parameters": [2 * MIB, 2 * MIB], "activations": [0, 3 * MIB]}
    parts = [("forward", 0.0, 4.0), ("data", 4.0, 4.1)]
    picture = plot.memory_timeline(MemoryTimeline(7, [0.0, 2.0], used, parts), alt=ALT)
    axes = picture.axes[0]
    assert "peak 5 MiB" in texts(picture)
    assert "forward" in texts(picture)
    assert "data" not in texts(picture)  # too narrow for its name
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["activations", "parameters"]  # as they lie, from the top


def test_parts_that_come_again_have_all_a_name_or_all_a_letter():
    used = {name: [MIB] for name in CATEGORIES}
    parts = [("forward", 0, 5), ("backward", 5, 30), ("forward", 30, 35), ("backward", 35, 60)]
    wide = [("forward", 0, 29), ("backward", 29, 60), ("optimizer", 60, 61)]
    for shown, expected in ((parts, ["F", "B", "F", "B"]), (wide, ["forward", "backward"])):
        picture = plot.memory_timeline(MemoryTimeline(1, [0.0], used, shown), alt=ALT)
        found = [text for text in texts(picture) if not text.startswith("peak")]
        assert found == expected


def test_several_steps_have_one_scale():
    low = {name: [MIB] for name in CATEGORIES}
    high = {name: [4 * MIB] for name in CATEGORIES}
    steps = {
        "plain": MemoryTimeline(1, [0.0], high, [("forward", 0.0, 2.0)]),
        "in chunks": MemoryTimeline(1, [0.0], low, [("forward", 0.0, 3.0)]),
    }
    picture = plot.memory_timeline(steps, alt=ALT)
    above, below = picture.axes
    assert above.get_ylim() == below.get_ylim() == (0, 1.2 * 4 * len(CATEGORIES))
    assert [axes.get_ylabel() for axes in picture.axes] == ["plain\nMiB", "in chunks\nMiB"]
