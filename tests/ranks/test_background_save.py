"""Checkpoints that are written while training goes on: the same files, and the same promises."""

import signal
import time

import pytest
import torch
from covering import first
from faults import forks
from test_checkpoint import CONFIG, GRIDS, TRAIN, names, run, train

from labcode import recipes
from labcode.measure import metrics

BACKGROUND = {"checkpoint.in_background": True}


@pytest.mark.parametrize(
    "name", first(1, ["dp 4, ZeRO-3", "dp 2, tp 2, sequence parallel", "dp 4, FSDP2"])
)
def test_a_run_goes_on_bit_for_bit_from_a_checkpoint_written_in_the_background(
    ranks4, tmp_path, name
):
    config = recipes.with_changes(CONFIG, GRIDS[name] | BACKGROUND)
    (whole_rows, whole), *_ = ranks4.run(train, config, tmp_path, None, 3)
    found = names(tmp_path / "checkpoints")
    assert found == ["step-00000002", "step-00000004", "step-00000006"]
    (rows, again), *_ = ranks4.run(train, config, tmp_path, tmp_path / "checkpoints" / found[0], 3)
    assert rows == whole_rows[2:]
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def save_while_training(config, out):
    """What is in the folder around two saves, of which the first is held back on rank 0.

    Returns:
        The names in the folder: while the first is written and steps are done, after the second has
        begun, at the end; and the losses of all steps.
    """
    import threading

    import torch.distributed as dist
    from trained import built, checkpoints_of

    from labcode.train.checkpoint import store as checkpoint
    from labcode.train.step import TrainStep

    rank = dist.get_rank()
    training = built(config)
    step = TrainStep(training)
    training.close()
    checkpoints = checkpoints_of(training, out)
    go_on = threading.Event()
    write = checkpoint.write

    def held_back(*args):
        if rank == 0:
            go_on.wait()
        return write(*args)

    losses = [step().loss.item()]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint, "write", held_back)
        checkpoints.begin(training.state)
        for _ in range(3):
            losses.append(step().loss.item())
            checkpoints.finish_if_written()
        meanwhile = names(checkpoints.folder)
        # the next one waits for the first
        threading.Timer(0.3, go_on.set).start()
        checkpoints.begin(training.state)
        after_second = names(checkpoints.folder)
    checkpoints.finish()
    at_the_end = names(checkpoints.folder)
    return meanwhile, after_second, at_the_end, losses


@pytest.mark.release
def test_training_goes_on_while_a_checkpoint_is_written_and_what_it_holds_is_the_step_it_began_at(
    ranks2, tmp_path
):
    config = recipes.with_changes(CONFIG, {"train.steps": 4})
    found, *_ = ranks2.run(save_while_training, config, tmp_path)
    meanwhile, after_second, at_the_end, losses = found
    assert meanwhile == ["step-00000001.partial"]
    assert after_second[0] == "step-00000001"
    assert at_the_end == ["step-00000001", "step-00000004"]
    start = tmp_path / "checkpoints" / "step-00000001"
    resumed, *_ = ranks2.run(losses_from, config, start)
    assert resumed == losses[1:]


def losses_from(config, start):
    """The losses of this rank from a checkpoint on."""
    from trained import built

    from labcode.train.step import TrainStep

    training = built(config, start)
    step = TrainStep(training)
    losses = []
    while training.steps_done < config.train.steps:
        losses.append(step().loss.item())
    return losses


def slow_to_write():
    """Each rank takes a second to write its part of a checkpoint."""
    from labcode.train.checkpoint import store as checkpoint

    write = checkpoint.write

    def slow(*args):
        print("writing", flush=True)
        time.sleep(1)
        return write(*args)

    checkpoint.write = slow


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.release)])
@pytest.mark.parametrize("number", first(1, [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_while_a_checkpoint_is_written_leaves_nothing_half_done(tmp_path, ranks, number):
    steps = "--train.steps=100000"
    args = [*TRAIN[3:], "--train.out=run", steps, "--checkpoint.in_background"]
    with forks.start(args, cwd=tmp_path, ranks=ranks, patch=slow_to_write) as running:
        running.until(lambda: "writing" in running.text())
        for rank in range(ranks):
            running.signal(rank, number)
        done = running.wait()
    assert done.tracebacks == 0 and not done.hung, done.err
    found = names(tmp_path / "run" / "checkpoints")
    assert not [name for name in found if name.endswith(".partial")]
    if number == signal.SIGINT:
        assert done.codes == [130] * ranks, done.err
        return
    assert done.codes == [0] * ranks, done.err
    last = metrics.read(tmp_path / "run")[-1]["step"]
    assert found[-1] == f"step-{last:08d}"


def test_ranks_that_are_killed_while_they_write_leave_what_the_next_run_removes(tmp_path):
    """Both are killed: how the others of a lost rank end is told in faults/test_lost_peers.py."""
    args = [*TRAIN[3:], "--train.out=run", "--train.steps=100000", "--checkpoint.in_background"]
    with forks.start(args, cwd=tmp_path, ranks=2, patch=slow_to_write) as running:
        running.until(lambda: "writing" in running.text())
        for rank in (1, 0):
            running.signal(rank, signal.SIGKILL)
        done = running.wait()
    assert done.codes == [-signal.SIGKILL] * 2
    assert any(name.endswith(".partial") for name in names(tmp_path / "run" / "checkpoints"))
    done = run("--train.out=run", "--checkpoint.resume", cwd=tmp_path)
    assert done.codes == [0], done.err
    found = names(tmp_path / "run" / "checkpoints")
    assert found[-1] == "step-00000006"
    assert not any(name.endswith(".partial") for name in found)
