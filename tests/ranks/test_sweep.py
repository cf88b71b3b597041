"""A sweep: what it runs, what it keeps, and that nothing is done twice."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from faults.waiting import until

from labcode import recipes
from labcode.run import sweep, sweep_table
from labcode.run.sweep import Sweep, SweepConfig
from labcode.run.sweep_table import DIVERGED, DONE, FAILED
from labcode.runtime.command import UsageError

TINY = {
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.hidden_size": 16,
    "model.context_length": 16,
    "optim.warmup_steps": 2,
    "optim.clip_norm": 0.0,
    "train.steps": 6,
    "train.eval_batches": 1,
    "train.log_every": 1,
}
BASE = recipes.with_changes(recipes.gpt_tiny(), TINY)
WORDS = ["gpt_tiny", *(f"--{name}={value}" for name, value in TINY.items())]


def swept(out, seeds=(1,), **fields):
    return Sweep(seeds, SweepConfig(out=str(out), **fields))


# ---- what is run


def test_runs_differ_in_what_is_swept_alone():
    asked = swept("x", seeds=(1, 2), batch=(4, 8), lr=(1e-3, 1e-2), samples=64, evals=4)
    planned = sweep.plan(BASE, asked)
    assert len(planned) == len({one.run for one in planned}) == 8
    last = planned[-1].config
    assert (last.train.global_batch, last.train.steps, last.train.seed) == (8, 8, 2)
    assert (last.optim.lr, last.optim.min_lr) == pytest.approx((1e-2, 1e-3))
    assert last.train.eval_every == 2
    expected = recipes.with_changes(
        BASE,
        {
            "train.global_batch": 8,
            "train.steps": 8,
            "train.seed": 2,
            "train.eval_every": 2,
            "train.eval_batches": 2,  # of 8: the 16 samples that the recipe validates with
            "train.sample_tokens": 0,
        },
    )
    assert last == expected


def test_few_samples_a_step_do_not_make_a_run_long():
    asked = swept("x", batch=(4, 16), samples=160, most_steps=20)
    small, large = (one.config.train for one in sweep.plan(BASE, asked))
    assert (small.steps, large.steps) == (20, 10)


def test_warm_up_and_end_go_with_the_run():
    asked = swept("x", batch=(4, 16), lr=(1e-2,), samples=640, warmup=0.25, end_lr=1.0)
    small, large = (one.config.optim for one in sweep.plan(BASE, asked))
    assert (small.warmup_steps, large.warmup_steps) == (40, 10)
    assert small.min_lr == small.lr == 1e-2


def test_the_number_of_a_run_is_that_of_its_config():
    (one,) = sweep.plan(BASE, swept("x"))
    (elsewhere,) = sweep.plan(recipes.with_changes(BASE, {"train.out": "b"}), swept("y"))
    (other,) = sweep.plan(recipes.with_changes(BASE, {"optim.beta2": 0.9}), swept("x"))
    assert one.run == elsewhere.run != other.run


def test_a_command_line_is_taken_apart():
    words = ["--sweep.batch", "4,8", "--sweep.lr=1e-3,3e-3", "--seeds", "1,2"]
    words += ["--sweep.at_once", "1", "--optim.beta1", "0.8"]
    base, asked = sweep.parse([*WORDS, *words])
    assert asked.seeds == (1, 2)
    assert asked.sweep == SweepConfig(batch=(4, 8), lr=(1e-3, 3e-3), at_once=1)
    assert base == recipes.with_changes(BASE, {"optim.beta1": 0.8})
    _, spaced = sweep.parse([*WORDS, "--seeds", "3", "4", "--sweep.batch", "4", "8"])
    assert (spaced.seeds, spaced.sweep.batch) == ((3, 4), (4, 8))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sweep.btach", "4"], r"--sweep\.btach.*--sweep\.batch"),
        (["--sweep.batch", "4,x"], "--sweep.batch: 'x' is not"),
        (["--sweep.lr", "-1"], "sweep.lr"),
        (["--sweep.at_once", "100000"], "sweep.at_once=100000 runs on"),
        (["--sweep.end_lr", "2"], "sweep.end_lr=2.0: give a part of the rate"),
        (["--parallel.tp", "2"], "dp"),
        (["--sweep.batch", "4,6", "--train.micro_batch", "4"], "global_batch=6 is not a multiple"),
        (["--train.stepz", "4"], "--train.stepz"),
    ],
)
def test_a_wrong_word_is_one_line(words, message):
    with pytest.raises(UsageError, match=message) as caught:
        sweep.parse([*WORDS, *words])
    assert "\n" not in str(caught.value)


# ---- what is kept


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """(Folder, rows) of a sweep in which one of four runs diverges."""
    out = tmp_path_factory.mktemp("sweep")
    asked = swept(out, batch=(4, 8), lr=(1e-3, 1e300), at_once=1)
    return out, sweep.run(BASE, asked, show=False)


@pytest.mark.release
def test_a_run_that_diverges_is_a_row_with_its_reason(first):
    out, rows = first
    assert [row.status for row in rows] == [DONE, DIVERGED, DONE, DIVERGED]
    assert "lower optim.lr" in rows[1].reason
    assert rows[1].val_loss is None
    assert sorted(sweep_table.read(out), key=_run) == sorted(rows, key=_run)
    assert (rows[2].batch, rows[2].steps) == (8, 6)
    assert [step for step, _ in rows[2].losses] == [1, 2, 3, 4, 5, 6]
    assert rows[2].val_loss is not None and rows[2].step_s > 0


def _run(row):
    return row.run


@pytest.mark.release
def test_a_run_of_a_sweep_is_the_run_of_the_same_config(first, ranks1):
    _, rows = first
    (one,) = sweep.plan(BASE, swept("x", batch=(4,), lr=(1e-3,)))
    (expected,) = ranks1.run(losses_of, one.config)
    assert [loss for _, loss in rows[0].losses] == pytest.approx(expected, abs=1e-6)


def losses_of(config):
    """The training loss of each step of one run in this pool."""
    from trained import built

    from labcode.run import run

    training = built(config)
    rows = run.train(training)
    return [row["loss"] for row in rows if "loss" in row]


def test_only_the_missing_runs_are_done(first):
    out, rows = first
    before = {path.name: path.stat().st_mtime_ns for path in (out / "rows").iterdir()}
    asked = swept(out, seeds=(1, 2), batch=(4,), lr=(1e-3,), at_once=1)
    again = sweep.run(BASE, asked, show=False)
    assert again[0] == rows[0]
    assert again[1].seed == 2
    assert len(sweep_table.read(out)) == 5
    after = {path.name: path.stat().st_mtime_ns for path in (out / "rows").iterdir()}
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {f"{again[1].run}.log"}


def test_a_changed_config_gets_a_row_of_its_own(first):
    out, _ = first
    base = recipes.with_changes(BASE, {"optim.weight_decay": 0.2})
    before = len(sweep_table.read(out))
    (row,) = sweep.run(base, swept(out, batch=(4,), lr=(1e-3,)), show=False)
    assert len(sweep_table.read(out)) == before + 1
    assert row.run not in {other.run for other in sweep_table.read(out)[:before]}


@pytest.mark.release
def test_a_run_that_fails_is_a_row_and_is_tried_again_where_that_is_asked_for(tmp_path):
    text = tmp_path / "text.txt"
    base = recipes.with_changes(BASE, {"data.path": str(text), "data.cache_dir": str(tmp_path)})
    asked = swept(tmp_path / "out", batch=(4, 8), at_once=1)
    rows = sweep.run(base, asked, show=False)
    assert [row.status for row in rows] == [FAILED, FAILED]
    assert "text.txt" in rows[0].reason
    text.write_text("to be or not to be " * 200)
    assert sweep.run(base, asked, show=False) == rows
    retried = swept(tmp_path / "out", batch=(4, 8), at_once=1, retry=True)
    assert [row.status for row in sweep.run(base, retried, show=False)] == [DONE, DONE]


@pytest.mark.release
def test_a_run_that_gets_worse_has_diverged_and_one_that_learns_by_heart_has_not():
    from course.labs import l06_runs

    wild = {"optim.lr": 30.0, "optim.min_lr": 30.0, "optim.warmup_steps": 0}
    row = l06_runs.trained(wild | {"train.log_every": 1}, steps=30)
    assert row.status == DIVERGED
    by_heart = {"data.val_fraction": 0.9995, "optim.lr": 1e-2}
    row = l06_runs.trained(by_heart, steps=400)
    assert row.status == DONE
    assert row.loss < 1.5 < min(loss for _, loss in row.val_losses)
    assert row.val_loss > min(loss for _, loss in row.val_losses) + 0.05


def test_a_run_ends_at_its_target(first, tmp_path):
    _, rows = first
    target = rows[2].val_loss + 0.05
    asked = swept(tmp_path, batch=(8,), lr=(1e-3,), target=target, most_steps=100, samples=10**6)
    base = recipes.with_changes(BASE, {"train.eval_every": 1})
    (row,) = sweep.run(base, asked, show=False)
    assert row.status == DONE
    assert row.steps < 100
    *before, last = row.val_losses
    assert last == (row.steps, row.val_loss)
    assert row.val_loss <= target < min(loss for _, loss in before)


def test_a_run_that_does_not_end_is_ended(tmp_path):
    base = recipes.with_changes(BASE, {"train.steps": 1_000_000, "train.eval_every": 0})
    asked = swept(tmp_path, limit_s=3.0)
    (row,) = sweep.run(base, asked, show=False)
    assert row.status == FAILED
    assert "did not end within sweep.limit_s=3 s: see" in row.reason


@pytest.mark.release
def test_a_sweep_that_was_killed_goes_on_with_the_missing_runs(tmp_path, survivors):
    words = [*WORDS, "--sweep.batch=4,8,16", "--seeds=1", "--sweep.at_once=1"]
    words += [f"--sweep.out={tmp_path}", "--train.steps=40"]
    program = [sys.executable, "-m", "labcode.run.sweep", *words]
    table = tmp_path / "results.jsonl"
    with subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(table.exists)
        under_way = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
    kept = sweep_table.read(tmp_path)
    assert 1 <= len(kept) < 3
    assert survivors(under_way) == []
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    rows = sweep_table.read(tmp_path)
    assert len(rows) == 3
    assert rows[: len(kept)] == kept
    assert "3 runs: " in done.stdout
    assert all(json.loads(line)["status"] == DONE for line in table.read_text().splitlines())


def test_two_sweeps_do_not_share_a_folder(first, monkeypatch):
    from labcode.run import run_lock

    out, _ = first
    monkeypatch.setattr(run_lock, "WAIT_S", 0.2)
    lock = run_lock.RunLock(out)
    lock.take()
    try:
        with pytest.raises(ValueError, match="is in use by"):
            sweep.run(BASE, swept(out), show=False)
    finally:
        lock.release()
