"""Plots of numbers hold what was asked for: every series, value, reference and label."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from course.figures import plot

ALT = "Four words at least"


def written(texts):
    return [text.get_text() for text in texts]


# ---- lines and curves


def test_lines_circles_points_and_begins_at_zero():
    picture = plot.lines(
        {"ring": [6, 5, 7]}, points={"the fastest": ([1], [5])}, from_zero=True, alt=ALT
    )
    (axes,) = picture.axes
    circle = axes.lines[1]
    assert (list(circle.get_xdata()), list(circle.get_ydata())) == ([1], [5])
    assert circle.get_linestyle() == "None"
    assert axes.get_ylim()[0] == 0
    assert written(axes.get_legend().get_texts()) == ["ring", "the fastest"]


def test_lines_draws_each_series_and_the_references():
    picture = plot.lines(
        {"ring": [1, 2, 4], "tree": ([0, 5], [3, 3])},
        x=[1, 10, 100],
        xlabel="bytes",
        logx=True,
        reference={"floor": 1},
        alt=ALT,
    )
    (axes,) = picture.axes
    ring, tree, floor = axes.lines
    assert [line.get_label() for line in axes.lines] == ["ring", "tree", "floor"]
    assert list(ring.get_xdata()) == [1, 10, 100]
    assert list(ring.get_ydata()) == [1, 2, 4]
    assert list(tree.get_xdata()) == [0, 5]
    assert list(tree.get_ydata()) == [3, 3]
    assert list(floor.get_ydata()) == [1, 1]
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "bytes"
    assert ring.get_color() != tree.get_color()
    assert ring.get_marker() != tree.get_marker()
    assert written(axes.get_legend().get_texts()) == ["ring", "tree", "floor"]


def test_lines_can_have_upright_lines_and_few_with_marks():
    picture = plot.lines(
        {"many": [1, 2, 3], "few": [3, 2, 1]}, marks=["few"], upright={"here": 1.5}, alt=ALT
    )
    many, few, here = picture.axes[0].lines
    assert many.get_marker() == "None"
    assert few.get_marker() != "None"
    assert many.get_linestyle() == few.get_linestyle() == "-"
    assert list(here.get_xdata()) == [1.5, 1.5]
    assert written(picture.axes[0].get_legend().get_texts()) == ["many", "few", "here"]


@pytest.mark.parametrize(("scale", "plain"), [(1, True), (1e-3, False), (1e4, False)])
def test_small_numbers_on_a_log_axis_are_written_plainly(scale, plain):
    picture = plot.lines({"a": [scale * 1.7, scale * 40]}, logy=True, alt=ALT)
    picture.png()  # labels are made when it is drawn
    axis = picture.axes[0].yaxis
    labels = {*written(axis.get_ticklabels()), *written(axis.get_ticklabels(minor=True))}
    assert ({"2", "10", "40"} <= labels) == plain


@pytest.mark.parametrize(
    ("x", "logx", "ticks"),
    [
        ([1, 2, 4], False, ["1", "2", "4"]),  # not 1.5
        ([1, 2, 4, 64], True, ["1", "2", "4", "64"]),
        ([64, 1, 4], True, ["1", "4", "64"]),
    ],
)
def test_few_whole_numbers_are_the_ticks(x, logx, ticks):
    picture = plot.lines({"a": x}, x=x, logx=logx, alt=ALT)
    picture.png()
    assert written(picture.axes[0].xaxis.get_ticklabels()) == ticks
    assert written(picture.axes[0].xaxis.get_ticklabels(minor=True)) == []


@pytest.mark.parametrize(
    "x",
    [[1, 2, 4, 8, 64], list(range(30)), [0, 1_000_000]],
    ids=["too near to each other", "too many", "too long"],
)
def test_other_whole_numbers_have_whole_ticks(x):
    picture = plot.lines({"a": x}, x=x, alt=ALT)
    ticks = picture.axes[0].get_xticks()
    assert list(ticks) != x
    assert all(tick == int(tick) for tick in ticks)


def test_fractions_have_the_usual_ticks():
    picture = plot.lines({"a": [1, 2, 3]}, x=[0, 0.5, 1], alt=ALT)
    assert any(tick != int(tick) for tick in picture.axes[0].get_xticks())


def test_curves_skip_rows_without_the_key():
    rows = [{"step": s, "loss": 5.0 - s, "val_loss": 4.0 if s == 2 else None} for s in range(4)]
    (loss,) = plot.curves({"run": rows}, alt=ALT).axes[0].lines
    assert list(loss.get_ydata()) == [5, 4, 3, 2]
    (val_loss,) = plot.curves({"run": rows}, y="val_loss", alt=ALT).axes[0].lines
    assert list(val_loss.get_xdata()) == [2]
    with pytest.raises(ValueError, match="no row of 'run' holds both 'step' and 'lr'"):
        plot.curves({"run": rows}, y="lr", alt=ALT)


def test_curves_read_the_file_of_a_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n')
    for run in (path, str(path)):
        (loss,) = plot.curves({"run": run}, alt=ALT).axes[0].lines
        assert list(loss.get_ydata()) == [3, 2]


# ---- bars


def test_bars_stand():
    axes = plot.bars({"2 ranks": 0.707, "4 ranks": 0.866}, ylabel="error", alt=ALT).axes[0]
    assert [patch.get_height() for patch in axes.patches] == [0.707, 0.866]
    assert axes.get_ylabel() == "error"
    assert written(axes.texts) == ["0.707", "0.866"]


@pytest.mark.parametrize("labels", [("a", "b"), ("a long name of a moment", "another long name")])
def test_stacked_bars_end_with_their_sum(labels):
    values = {labels[0]: {"x": 1.0, "y": 2.0}, labels[1]: {"x": 4.0}}
    axes = plot.bars(values, alt=ALT, stacked=True).axes[0]
    assert [text.get_text() for text in axes.texts] == ["3", "4"]
    assert max(*axes.get_xlim(), *axes.get_ylim()) == pytest.approx(1.12 * 4.0)


def test_bars_with_long_labels_lie():
    groups = {}
    for i in range(3):
        groups[f"a rather long label, number {i}"] = {"predicted": i + 1, "measured": i + 2}
    axes = plot.bars(groups, ylabel="ms", alt=ALT).axes[0]
    assert [patch.get_width() for patch in axes.patches] == [1, 2, 3, 2, 3, 4]
    assert axes.get_xlabel() == "ms"
    assert len({to_hex(patch.get_facecolor()) for patch in axes.patches}) == 2


def test_a_bar_that_is_missing_in_a_group_leaves_its_place_empty():
    picture = plot.bars({"a": {"p": 1}, "b": {"p": 2, "q": 3}}, alt=ALT)
    assert written(picture.axes[0].texts) == ["1", "2", "", "3"]
    assert written(picture.figure.legends[0].get_texts()) == ["p", "q"]


# ---- matrices and maps


def test_heatmap_writes_every_number():
    matrix = np.arange(6).reshape(2, 3)
    axes = plot.heatmap(matrix, rows=["a", "b"], unit="MB", alt=ALT).axes[0]
    assert np.array_equal(axes.images[0].get_array(), matrix)
    assert written(axes.texts) == list("012345")


def test_a_wide_line_lies_beneath_the_others_and_its_legend_is_wide_too():
    picture = plot.lines(
        {"truth": [1, 2, 3], "same": [1, 2, 3]},
        wide="truth",
        beside=True,
        alt="Two equal lines, one of them wide",
    )
    truth, same = picture.axes[0].lines
    assert truth.get_linewidth() > 3 * same.get_linewidth()
    assert truth.get_zorder() < same.get_zorder()
    shown = picture.axes[0].get_legend().get_lines()
    assert shown[0].get_linewidth() == truth.get_linewidth()


def test_lines_look_the_same_with_a_wide_line_and_without():
    runs = {"a": [1, 2, 3], "b": [2, 2, 3]}
    alone = plot.lines(runs, alt=ALT).axes[0].lines
    _, *beside_truth = plot.lines({"truth": [1, 2, 3]} | runs, wide="truth", alt=ALT).axes[0].lines
    for one, other in zip(alone, beside_truth, strict=True):
        assert one.get_color() == other.get_color()
        assert one.get_marker() == other.get_marker()
