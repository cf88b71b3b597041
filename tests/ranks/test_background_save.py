"""Checkpoints that are written while training goes on: the same files, and the same promises."""

import itertools
import json
import random
import signal
import time

import pytest
import torch
from faults import forks
from faults.waiting import pause
from test_checkpoint import CONFIG, GRIDS, TRAIN, names, run, train

from labcode import recipes
from labcode.train import metrics

BACKGROUND = {"checkpoint.in_background": True}


@pytest.mark.parametrize("name", ["dp 2, tp 2, sequence parallel", "dp 4, ZeRO-3", "dp 4, FSDP2"])
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
    import torch.distributed.checkpoint as dcp

    from labcode.comm.bootstrap import Place, World
    from labcode.comm.grid import Grid
    from labcode.train.loop import Trainer
    from labcode.train.tasks import make_task

    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(Place(rank, size, rank, size), torch.device("cpu"), "gloo")
    trainer = Trainer(config, world, Grid.create(config.check(size)), make_task(config), out)
    trainer.close()
    checkpoints = trainer.checkpoints
    assert checkpoints is not None
    go_on = threading.Event()
    write_data = dcp.FileSystemWriter.write_data

    def held_back(self, plan, planner):
        if rank == 0:
            go_on.wait()
        return write_data(self, plan, planner)

    losses = [trainer.step().loss.item()]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dcp.FileSystemWriter, "write_data", held_back)
        checkpoints.begin(trainer.state)
        for _ in range(3):
            losses.append(trainer.step().loss.item())
            checkpoints.finish_if_written()
        meanwhile = names(checkpoints.folder)
        # the next one waits for the first
        threading.Timer(0.3, go_on.set).start()
        checkpoints.begin(trainer.state)
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
    import torch.distributed as dist

    from labcode.comm.bootstrap import Place, World
    from labcode.comm.grid import Grid
    from labcode.train.loop import Trainer
    from labcode.train.tasks import make_task

    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(Place(rank, size, rank, size), torch.device("cpu"), "gloo")
    grid = Grid.create(config.check(size))
    trainer = Trainer(config, world, grid, make_task(config), None, start)
    losses = []
    while trainer.steps_done < config.train.steps:
        losses.append(trainer.step().loss.item())
    return losses


@pytest.mark.release
def test_a_full_disk_is_told_at_the_next_step_and_leaves_the_older_one(tmp_path, on_small_disk):
    args = [
        "--train.steps=100000",
        "--train.log_every=100000",
        "--checkpoint.every=1",
        "--checkpoint.in_background",
        "--train.out=disk/run",
    ]
    done = on_small_disk("2m", *TRAIN, *args)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "could not be written: rank 0" in line and "No space left on device" in line
    kept = names(tmp_path / "run" / "checkpoints")
    assert kept and not [name for name in kept if name.endswith(".partial")]
    assert f"the last complete one is disk/run/checkpoints/{max(kept)}" in line


def slow_to_write():
    """Each rank takes a second to write its part of a checkpoint."""
    import torch.distributed.checkpoint as dcp

    write_data = dcp.FileSystemWriter.write_data

    def slow(self, plan, planner):
        print("writing", flush=True)
        time.sleep(1)
        return write_data(self, plan, planner)

    dcp.FileSystemWriter.write_data = slow


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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


def test_a_rank_that_is_killed_while_it_writes_ends_the_run(tmp_path):
    args = [*TRAIN[3:], "--train.out=run", "--train.steps=100000", "--checkpoint.in_background"]
    with forks.start(args, cwd=tmp_path, ranks=2, patch=slow_to_write) as running:
        running.until(lambda: "writing" in running.text())
        running.signal(1, signal.SIGKILL)
        done = running.wait()
    assert not done.hung, done.err
    assert done.codes[0] not in (0, None) and done.codes[1] == -signal.SIGKILL
    # what is left is no checkpoint, and the next run removes it
    done = run("--train.out=run", "--checkpoint.resume", cwd=tmp_path)
    assert done.codes == [0], done.err
    assert names(tmp_path / "run" / "checkpoints")[-1] == "step-00000006"


def newest_step(folder):
    """The step of the newest complete checkpoint of a run; 0 if there is none."""
    found = [name for name in names(folder) if name.count(".") == 0] if folder.exists() else []
    return int(found[-1].removeprefix("step-")) if found else 0


@pytest.mark.release
@pytest.mark.parametrize("in_background", [False, True])
def test_killed_at_forty_random_moments_a_run_never_loses_its_previous_checkpoint(
    tmp_path, in_background
):
    """All ranks die at once by SIGKILL, most of the time while they write: a save at each step."""
    rng = random.Random(in_background)
    args = [*TRAIN[3:], "--train.out=run", "--train.steps=100000", "--train.log_every=100000"]
    args += ["--checkpoint.every=1", "--checkpoint.keep=1", "--checkpoint.resume"]
    args += [f"--checkpoint.in_background={in_background}"]
    folder = tmp_path / "run" / "checkpoints"
    halfway = 0
    for _ in range(40):
        before = newest_step(folder)
        with forks.start(args, cwd=tmp_path, ranks=2) as running:
            running.until(lambda: newest_step(folder) > before)  # noqa: B023 - it is called here
            assert running.alive(), running.wait().err
            pause(rng.uniform(0.0, 0.3))
            for rank in range(2):
                running.signal(rank, signal.SIGKILL)
            running.wait()
        after = newest_step(folder)
        assert after > before
        halfway += any(name.endswith(".partial") for name in names(folder))
        about = json.loads((folder / f"step-{after:08d}" / "run.json").read_text())
        assert about["step"] == after
    # each attempt has resumed from the newest, whose files it has compared with their checksums
    assert halfway >= 1, "no kill met a save: how often one does depends on the machine"
    done = forks.train([*args, f"--train.steps={after + 1}"], cwd=tmp_path, ranks=2)
    assert done.codes == [0, 0], done.err
    assert f"resuming from run/checkpoints/step-{after:08d}" in done.out[0]
    assert "damaged" not in "".join(itertools.chain(*done.out))
