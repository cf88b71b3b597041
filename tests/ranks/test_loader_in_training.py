"""Trainings whose batches are read by workers: the same weights, and no process left behind."""

import multiprocessing
import os
import shutil
import signal

import psutil
import pytest
import torch
from faults.forks import start, train

from labcode.measure import metrics

SMALL = ["gpt_tiny", "--model.num_layers=1", "--model.num_heads=2", "--model.hidden_size=16"]
SMALL += ["--model.context_length=32", "--model.dropout=0.1", "--train.global_batch=8"]
SMALL += ["--train.log_every=1", "--train.eval_batches=1", "--train.sample_tokens=0"]
SMALL += ["--train.micro_batch=2", "--train.out=run"]


def may_have_children():
    """The ranks of these tests are daemons of multiprocessing; those of people are not."""
    multiprocessing.current_process()._config["daemon"] = False


@pytest.mark.release
def test_workers_change_nothing_and_a_run_resumes_with_another_number_of_them(tmp_path):
    weights = {}
    for name, more in {
        "alone": (),
        "workers": ("--loader.workers=2", "--checkpoint.every=3", "--checkpoint.keep=9"),
    }.items():
        (tmp_path / name).mkdir()
        done = train(
            [*SMALL, "--train.steps=6", *more],
            cwd=tmp_path / name,
            ranks=2,
            patch=may_have_children,
        )
        assert done.codes == [0, 0], done.err
        assert done.left == []
        weights[name] = torch.load(tmp_path / name / "run" / "weights.pt", weights_only=True)
    checkpoints = tmp_path / "workers" / "run" / "checkpoints"
    (newest,) = checkpoints.glob("step-*6")
    shutil.rmtree(newest)
    done = train(
        [*SMALL, "--train.steps=6", "--checkpoint.resume", "--loader.workers=1"],
        cwd=tmp_path / "workers",
        ranks=2,
        patch=may_have_children,
    )
    assert done.codes == [0, 0], done.err
    assert "resuming from" in done.out[0]
    weights["resumed"] = torch.load(tmp_path / "workers/run/weights.pt", weights_only=True)
    for name in ("workers", "resumed"):
        for key, tensor in weights["alone"].items():
            assert torch.equal(tensor, weights[name][key]), (name, key)


def to_group(running, number):
    """Send the signal as a terminal or SLURM does: to all processes."""
    os.killpg(running.pids[0], number)


def to_worker(running, number):
    """To the first worker of the first server; the rank then ends the others."""
    for process in psutil.Process(running.pids[0]).children(recursive=True):
        workers = process.children()
        if workers:  # the server has some
            workers[0].send_signal(number)
            return


def to_rank(running, number):
    running.signal(0, number)


@pytest.mark.parametrize(
    ("whom", "number", "code", "line"),
    [
        (to_worker, signal.SIGKILL, 2, "was ended by SIGKILL"),
        (to_group, signal.SIGTERM, 0, "stopped by SIGTERM after step"),
        pytest.param(to_group, signal.SIGINT, 130, "interrupted", marks=pytest.mark.release),
        pytest.param(to_rank, signal.SIGKILL, -9, "", marks=pytest.mark.release),
    ],
)
def test_however_a_run_ends_its_workers_end_with_it(tmp_path, whom, number, code, line):
    args = [*SMALL, "--train.steps=100000", "--checkpoint.every=50000", "--loader.workers=2"]
    with start(args, cwd=tmp_path, patch=may_have_children, timeout_s=300) as running:
        running.until(lambda: "step 5/" in running.text())
        whom(running, number)
        done = running.wait()
    assert not done.hung
    assert done.codes == [code], done.err
    assert line in done.err[0]
    assert done.tracebacks == 0
    assert done.left == []


PARTS = ["vit_tiny", "--model.num_layers=2", "--model.num_heads=2", "--model.hidden_size=8"]
PARTS += ["--data.crop", "20", "30", "--train.dtype=float64", "--train.steps=5"]
PARTS += ["--train.global_batch=4", "--train.eval_batches=3", "--train.log_every=1"]
PARTS += ["--train.micro_batch=1", "--train.out=run"]


@pytest.mark.release
def test_parts_of_a_map_give_every_grid_the_losses_of_one_process(tmp_path):
    layouts = {
        "alone": (1, ()),
        "dp": (2, ("--loader.workers=1",)),
        "tp": (2, ("--parallel.tp=2",)),
        "pp": (2, ("--parallel.pp=2",)),
    }
    found = {}
    for name, (ranks, more) in layouts.items():
        (tmp_path / name).mkdir()
        args = [*PARTS, *more]
        done = train(args, cwd=tmp_path / name, ranks=ranks, patch=may_have_children)
        assert set(done.codes) == {0}, done.err
        rows = metrics.read(tmp_path / name / "run")
        found[name] = [row.get("loss", row.get("val_loss")) for row in rows]
    assert len(found["alone"]) == 6
    for losses in found.values():
        assert losses == pytest.approx(found["alone"], rel=1e-9)
