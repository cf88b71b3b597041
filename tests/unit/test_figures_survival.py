"""The drawings of checkpoints show what they are given."""

import pytest

from course.figures import plot

ALT = "A sentence of some words"


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_a_box_shows_only_what_it_takes_and_from_whom():
    written = [((0, 0), (2, 4)), ((2, 0), (2, 4)), ((0, 4), (4, 2))]
    picture = plot.boxes(written, ((1, 1), (2, 3)), alt=ALT)
    whole, box = picture.axes
    assert texts(whole)[:3] == ["rank 0", "rank 1", "rank 2"]
    assert texts(whole)[3:] == [*"0123", *"012345"]  # rows, then columns
    assert texts(box) == ["0", "1"]


def test_each_moment_of_a_save_shows_its_folders():
    moments = {"before": {"step-4": "whole"}, "write": {"step-4": "whole", "step-8": "partial"}}
    picture = plot.save_steps(moments, alt=ALT)
    assert [len(axes.patches) for axes in picture.axes] == [1, 2]
    assert "step-8" in texts(picture.axes[1])


def test_a_folder_is_whole_or_partial():
    with pytest.raises(ValueError, match="neither 'whole' nor 'partial'"):
        plot.save_steps({"before": {"step-4": "half"}}, alt=ALT)


def test_a_run_has_a_lane_with_all_its_events():
    events = [("work", 0, 60), ("save", 60, 65), ("lost", 65, 70), ("restart", 70, 90)]
    picture = plot.runs({"every minute": events}, unit_s=60, xlabel="minutes", alt=ALT)
    axes = picture.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["every minute"]
    assert axes.get_xlim()[1] >= 1.5
