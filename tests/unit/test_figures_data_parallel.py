"""The drawings of data parallelism say what they should, and refuse what does not fit."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from course import catalog
from course.figures import plot
from course.labs import l05_slow_link
from labcode.run.sweep_table import Row

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
FIGURES = ROOT / "course" / "figures"
ALT = "Four words at least"


def words(picture):
    return [text.get_text() for axes in picture.axes for text in axes.texts if text.get_text()]


def test_a_step_names_shares_gradients_and_ranks():
    found = words(plot.data_parallel(3, alt=ALT))
    for rank in range(3):
        assert {f"rank {rank}", f"share {rank}", f"gradient {rank}"} <= set(found)
    assert found.count("mean") == 3
    with pytest.raises(ValueError, match="draw 2 to 4 ranks"):
        plot.data_parallel(5, alt=ALT)


def test_accumulation_has_forward_and_backward_of_each_micro_batch():
    found = words(plot.accumulation(3, alt=ALT))
    assert [word for word in found if word[0] in "FB" and len(word) == 2] == [
        "F0",
        "B0",
        "F1",
        "B1",
        "F2",
        "B2",
    ]
    with pytest.raises(ValueError, match="draw 2 to 4 micro-batches"):
        plot.accumulation(9, alt=ALT)


def test_the_weights_of_samples_are_written_as_fractions():
    found = words(plot.sample_weights([[1 / 10], [1 / 6, 1 / 6]], alt=ALT))
    assert {"1/10", "1/6", "1/3, what each should weigh"} <= set(found)
    assert {"rank 0\n1 samples", "rank 1\n2 samples"} <= set(found)


def test_buckets_are_numbered_in_the_order_in_which_they_leave():
    found = words(plot.buckets([3, 1, 2], [[2], [1, 0]], 4, alt=ALT))
    messages = [word for word in found if word.startswith("message")]
    assert messages == ["message 1: 2 of 4", "message 2: 4 of 4"]
    assert found.count("g1: 1") == 1  # among the gradients, with its size
    rows = [word for word in found if word in ("g0", "g1", "g2")]
    assert rows == ["g2", "g1", "g0"]  # in the order of the bucket


def test_each_rank_keeps_everything_but_its_activations():
    found = words(plot.copies(2, alt=ALT))
    assert found.count("weights") == 2
    assert found.count("activations 1") == 1


def test_the_lessons_that_divide_a_copy_are_named_as_the_course_has_them():
    titles = {lesson.number: lesson.title.lower() for lesson in catalog.lessons(NOTEBOOKS)}
    text = next(word for word in words(plot.copies(2, alt=ALT)) if "Divided in lessons" in word)
    named = re.findall(r"^(\d\d) (.+)$", text.partition("Divided")[2], re.MULTILINE)
    assert [number for number, _ in named] == ["09", "12", "13"]
    for number, name in named:
        for part in name.lower().split(", "):
            assert part in titles[number]


def test_no_figure_calls_a_lesson_planned():
    """All lessons exist."""
    for file in FIGURES.glob("*.py"):
        assert "(planned)" not in file.read_text(), file.name


def test_clipping_says_which_step_is_left():
    found = words(plot.clipping([3, -1], max_norm=1, alt=ALT))
    assert [word for word in found if word.startswith("step")] == ["step: 1", "step: 0"]


def test_overlap_says_how_long_a_step_takes():
    found = words(l05_slow_link.draw_overlap(4, compute_ms=10, send_ms=8, title=""))
    assert {"72 ms", "48 ms", "sent after backward", "sent during backward"} <= set(found)
    assert found.count("wait") == 2
    with pytest.raises(ValueError, match="no step to draw"):
        plot.overlap({}, alt=ALT)


def test_loss_against_cost_leaves_out_of_the_log_axis_what_has_sent_nothing():
    curve = plot.LossCurve([0, 10, 20], [0.0, 1.0, 2.0], [0.0, 1e6, 2e6], [4.0, 3.0, 2.0])
    picture = plot.loss_against_cost({"one": curve, "other": curve}, alt=ALT)
    against_time, against_bytes = picture.axes
    assert against_time.lines[0].get_xdata().tolist() == [0, 1, 2]
    assert against_bytes.lines[1].get_xdata().tolist() == [1, 2]  # MB
    assert against_bytes.lines[1].get_ydata().tolist() == [3, 2]
    shorter = plot.LossCurve([0, 10], [0.0, 1.5], [0.0, 1e6], [4.0, 3.0])
    picture = plot.loss_against_cost({"one": curve, "shorter": shorter}, alt=ALT)
    (together,) = picture.axes[0].patches  # where both still run
    assert together.get_bbox().intervalx.tolist() == [0, 1.5]
    with pytest.raises(ValueError, match="draw 1 to 6"):
        plot.loss_against_cost({}, alt=ALT)


def test_each_way_to_train_has_its_name_and_the_difference_of_its_mean_loss():
    one_process = torch.tensor([4.0, 3.5, 3.0], dtype=torch.float64)
    runs = {"averaged": [(one_process, one_process)] * 2, "alone": [(one_process + 1, one_process)]}
    picture = plot.off_one_process(runs, one_process)
    assert {"averaged", "alone"} <= set(words(picture))
    equal, apart = picture.axes[0].lines
    assert list(equal.get_ydata()) == [1e-17] * 3
    assert list(apart.get_ydata()) == [1.0] * 3
    lines = plot.losses_of_ranks(one_process, [one_process + 1, one_process - 1], one_process)
    assert len(lines.axes[0].lines) == 4


def test_epochs_are_rows_with_and_without_set_epoch():
    orders = {True: [list(range(n, n + 16)) for n in range(3)], False: [list(range(16))] * 3}
    picture = plot.epochs(lambda epoch, set_epoch, num_samples: orders[set_epoch][epoch])
    rows = [label.get_text() for label in picture.axes[0].get_yticklabels()]
    assert rows[0] == "epoch 0, without set_epoch" and rows[-1] == "epoch 2, with set_epoch"
    assert words(picture)[-16:] == [str(number) for number in range(2, 18)]


def test_a_sweep_names_the_steps_that_were_not_enough():
    row = Row(
        "a", "gpt_tiny", batch=8, lr=1e-3, seed=0, steps=40, val_losses=((20, 3.0), (40, 2.0))
    )
    rows = [row, replace(row, lr=1e-2, steps=35, val_losses=((35, 2.6),))]
    found = words(plot.sweep(rows, of="steps", target=2.5, alt=ALT))
    assert found == ["30", "> 40"]  # of the batch, whatever ended that run


def test_good_rates_stand_beside_what_rules_say():
    good = {4: [3e-3, 1e-2], 16: [1e-2]}
    picture = plot.rates_against_batch(good, {"a rule": [4e-3, 8e-3]}, alt=ALT)
    drawn = [line.get_ydata().tolist() for line in picture.axes[0].lines]
    assert drawn == [[3e-3, 1e-2], [1e-2], [4e-3, 8e-3]]


def test_price_and_speed_name_the_devices():
    picture = plot.speed_and_price({1: 1.0, 2: 0.6}, {1: 1.0, 2: 1.2}, alt=ALT)
    assert words(picture) == ["1 device", "2 devices"]


def test_gradients_travel_during_a_step_and_weights_after_it():
    picture = plot.local_steps(inner_steps=2, num_ranks=1, alt=ALT)
    for axes, messages in zip(picture.axes, (4, 2)):
        boxes = [patch for patch in axes.patches if not patch.get_hatch()]
        sent = [patch for patch in axes.patches if patch.get_hatch()]
        assert (len(boxes), len(sent)) == (4, messages)
        ends = [box.get_x() + box.get_width() for box in boxes]
        overlaps = any(bar.get_x() < end <= bar.get_x() + 1 for bar in sent for end in ends)
        assert overlaps == (messages == 4)
