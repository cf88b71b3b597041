"""What is read from the table of a sweep."""

import dataclasses
import math

import pytest

from labcode.run import sweep_table
from labcode.run.sweep_table import DIVERGED, FAILED, Row, fit_tradeoff, steps_to

ROW = Row(
    "a1",
    "gpt_tiny",
    batch=8,
    lr=1e-3,
    seed=0,
    steps=30,
    loss=2.1,
    val_loss=2.0,
    step_s=0.5,
    losses=((10, 4.0), (20, 3.0), (30, 2.1)),
    val_losses=((10, 4.0), (20, 3.0), (30, 2.0)),
)


def like(**fields):
    return dataclasses.replace(ROW, **fields)


def test_rows_come_back_as_they_were_written(tmp_path):
    rows = [ROW, like(run="b2", status=DIVERGED, reason="the loss is nan", val_loss=None)]
    sweep_table.write(tmp_path, rows)
    assert sweep_table.read(tmp_path) == rows
    assert sweep_table.read(tmp_path / "results.jsonl") == rows


@pytest.mark.parametrize("line", ["{", "[]", '{"run": "a"}', '{"what": 1}'])
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    (tmp_path / "results.jsonl").write_text(f"{sweep_table.to_json(ROW)}\n{line}\n")
    with pytest.raises(ValueError, match=r"results\.jsonl, line 2 is no row of a sweep"):
        sweep_table.read(tmp_path)


def test_a_table_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="does not exist: give the folder that a sweep has"):
        sweep_table.read(tmp_path)


@pytest.mark.parametrize(
    ("target", "steps"), [(4.5, 10), (4.0, 10), (3.5, 15), (2.25, 27.5), (2.0, 30), (1.9, None)]
)
def test_the_way_to_a_loss_is_interpolated(target, steps):
    assert steps_to(ROW, target) == steps


def test_a_loss_that_rises_again_was_reached_the_first_time():
    row = like(val_losses=((10, 3.0), (20, 5.0), (30, 2.0)))
    assert steps_to(row, 3.0) == 10
    assert steps_to(row, 2.5) == pytest.approx(20 + 10 * 2.5 / 3)


def test_each_batch_is_taken_at_its_best_rate():
    slow = ((10, 4.0), (20, 3.5), (30, 3.0))
    rows = [
        like(lr=1e-4, val_losses=slow),
        like(seed=1),
        like(),
        like(lr=1e-2),  # as fast, but one of its seeds diverges
        like(lr=1e-2, seed=1, status=DIVERGED, val_losses=()),
        like(batch=16, step_s=0.8, val_losses=((5, 4.0), (10, 2.0))),
        like(batch=32, val_losses=slow[:2]),  # never reaches it
    ]
    small, large = sweep_table.to_loss(rows, 3.0)
    assert (small.batch, small.lr, small.steps, small.samples) == (8, 1e-3, 20, 160)
    assert small.seconds == pytest.approx(10)
    assert (large.batch, large.steps) == (16, 7.5)
    assert large.seconds == pytest.approx(6.0)


def test_good_rates_are_nearly_as_fast_as_the_best():
    rows = [
        like(batch=8, lr=1e-2, val_losses=((10, 4.0), (22, 3.0))),
        like(batch=8, lr=1e-3),  # 20 steps to a loss of 3
        like(batch=8, lr=1e-4, val_losses=((10, 4.0), (23, 3.0))),
        like(batch=8, lr=1e-1, val_losses=((10, 3.0),)),  # the fastest, but not with each seed
        like(batch=8, lr=1e-1, seed=1, val_losses=((10, 4.0),)),
        like(batch=4, lr=1e-3, val_losses=((40, 3.0),)),
        like(batch=2, lr=1e-3, val_losses=((40, 4.0),)),  # never reaches it
    ]
    assert sweep_table.good_rates(rows, 3.0) == {4: [1e-3], 8: [1e-3, 1e-2]}
    assert sweep_table.good_rates(rows, 3.0, slack=1.2)[8] == [1e-4, 1e-3, 1e-2]


def test_the_curve_is_found_again():
    batches = [4, 8, 16, 64, 256]
    steps = [100 + 3200 / batch for batch in batches]
    found = fit_tradeoff(batches, steps)
    assert found.least_steps == pytest.approx(100)
    assert found.least_samples == pytest.approx(3200)
    assert found.critical_batch == pytest.approx(32)
    assert found.relative_error == pytest.approx(0, abs=1e-9)
    for batch, count in zip(batches, steps):
        assert found.steps(batch) == pytest.approx(count)
        samples = batch * count
        product = (count / found.least_steps - 1) * (samples / found.least_samples - 1)
        assert product == pytest.approx(1)


def test_steps_that_only_fall_have_no_critical_batch_in_sight():
    found = fit_tradeoff([4, 8, 16], [800, 390, 190])  # falls faster than 1 / B
    assert found.least_samples == pytest.approx(3150, rel=0.05)
    assert found.critical_batch > 1e3


def test_steps_that_do_not_fall_are_all_beyond_it():
    found = fit_tradeoff([4, 8, 16], [100, 101, 102])
    assert found.least_steps == pytest.approx(101, rel=0.01)
    assert found.critical_batch < 1


@pytest.mark.parametrize(("batches", "steps"), [([8], [10]), ([8, 8], [10, 11]), ([], [])])
def test_one_size_of_batch_is_no_curve(batches, steps):
    with pytest.raises(ValueError, match="of two sizes at least"):
        fit_tradeoff(batches, steps)


def test_losses_are_laid_out_by_batch_and_rate():
    rows = [
        like(val_loss=2.0),
        like(seed=1, val_loss=3.0),
        like(lr=1e-2, val_loss=2.4),
        like(batch=16, val_loss=5.0),
        like(batch=16, lr=1e-2, status=FAILED, val_loss=None),
        like(batch=32, lr=1e-2, status=DIVERGED, val_loss=9.0),
    ]
    batches, rates, matrix = sweep_table.final_losses(rows)
    assert (batches, rates) == ([8, 16, 32], [1e-3, 1e-2])
    assert matrix[0][:2] == [2.5, 5.0]
    assert math.isnan(matrix[0][2])
    assert matrix[1] == [2.4, math.inf, math.inf]


def test_a_row_holds_what_the_metrics_of_its_run_say():
    history = []
    for step in range(1, 21):
        entry = {"step": step, "loss": 5 - step / 10, "step_s": 0.1, "lr": 1e-3}
        history.append(entry | ({"noise_scale": 7.0} if step == 19 else {}))
    history.insert(10, {"step": 10, "val_loss": 4.5})
    history.append({"step": 20, "val_loss": 4.0})
    named = {"run": "c", "recipe": "gpt_tiny", "batch": 4, "lr": 1e-3, "seed": 2}
    row = sweep_table.row_of_history(named, history, 20)
    assert row.val_losses == ((10, 4.5), (20, 4.0))
    assert (row.val_loss, row.noise_scale) == (4.0, 7.0)
    assert row.loss == pytest.approx((3.1 + 3.0) / 2)
    assert row.step_s == pytest.approx(0.1)
    broken_off = sweep_table.row_of_history(named, history[:5], 7)
    assert broken_off.val_loss is None
