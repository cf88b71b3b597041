"""A run that was stopped and goes on is the run that was never stopped.

A checkpoint is whole or it is not used.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from labcode import recipes
from labcode.train import metrics

TINY = {
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.hidden_size": 16,
    "model.context_length": 32,
    "model.dropout": 0.1,
    "optim.warmup_steps": 2,
    "train.steps": 6,
    "train.global_batch": 8,
    "train.micro_batch": 1,
    "train.dtype": "float64",
    "train.eval_batches": 1,
    "train.log_every": 1,
    "train.sample_tokens": 0,
    "checkpoint.every": 2,
    "checkpoint.keep": 9,
}
CONFIG = recipes.with_changes(recipes.gpt_tiny(), TINY)
GRIDS = {
    "dp 2, tp 2, sequence parallel": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "dp 2, pp 2, zero bubble": {
        "parallel.pp": 2,
        "parallel.pipeline_schedule": "zero_bubble",
        "parallel.data_parallel": "labcode",
    },
    "cp 2, tp 2": {"parallel.cp": 2, "parallel.tp": 2, "model.dropout": 0.0},
}
TRAIN = [
    sys.executable,
    "-m",
    "labcode.train",
    "gpt_tiny",
    *(f"--{key}={value}" for key, value in TINY.items()),
]


def train(config, out, start, seed):
    """One run in this pool: (loss and gradient norm of each step, final weights of the model)."""
    import torch.distributed as dist

    from labcode.comm.bootstrap import Place, World
    from labcode.comm.grid import Grid
    from labcode.train.loop import Trainer
    from labcode.train.tasks import make_task

    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(Place(rank, size, rank, size), torch.device("cpu"), "gloo")
    grid = Grid.create(config.check(size))
    trainer = Trainer(config, world, grid, make_task(config), out, start)
    if not start:
        # a state of the generators that no fresh run would have
        torch.manual_seed(seed + grid.coord("dp"))
    rows = [(row["step"], row["loss"], row["grad_norm"]) for row in trainer.fit() if "loss" in row]
    trainer.close()
    return rows, {name: tensor.clone() for name, tensor in trainer.model.full_state_dict()}


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_going_on_gives_bit_for_bit_the_run_that_never_stopped(ranks4, tmp_path, grid):
    config = recipes.with_changes(CONFIG, grid)
    (whole_rows, whole), *_ = ranks4.run(train, config, tmp_path, None, 3)
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert found == ["step-00000002", "step-00000004", "step-00000006"]
    (rows, again), *_ = ranks4.run(train, config, tmp_path, tmp_path / "checkpoints" / found[0], 3)
    assert [row[0] for row in rows] == [3, 4, 5, 6]
    assert rows == whole_rows[2:]
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    kept = [row["step"] for row in metrics.read(tmp_path) if "loss" in row]
    assert kept == [1, 2, 3, 4, 5, 6]  # those of the two attempts, each once


def test_ranks_that_hold_the_same_weights_write_them_once(ranks4, tmp_path):
    import torch.distributed.checkpoint as dcp

    ranks4.run(train, CONFIG, tmp_path, None, 3)  # dp 4
    folder = tmp_path / "checkpoints" / "step-00000006"
    metadata = dcp.FileSystemReader(folder).read_metadata()
    weights = [key for key in metadata.state_dict_metadata if "/model/" in key]
    # a key names the axes that cut the weight, and tp cuts some of them
    assert {key.split("/")[0] for key in weights} == {"pp0", "pp0-tp0"}
    stored = [index for index in metadata.storage_data if index.fqn in weights]
    assert len(stored) == len(weights)


def run(*args, cwd):
    return subprocess.run(
        [*TRAIN, *args], cwd=cwd, capture_output=True, text=True, timeout=280, check=False
    )


def test_going_on_from_a_folder_that_is_not_there_yet_begins(tmp_path):
    done = run("--train.out=run", "--checkpoint.resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "going on" not in done.stdout
    assert run("--train.out=run", cwd=tmp_path).returncode == 2  # without resume it is not touched
    done = run("--train.out=run", "--checkpoint.resume", cwd=tmp_path)
    # a finished run has nothing left to do
    assert "resuming from run/checkpoints/step-00000006" in done.stdout
    assert done.returncode == 0
    assert [row["step"] for row in metrics.read(tmp_path / "run") if "loss" in row] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    assert run("--train.out=run", cwd=folder).returncode == 0
    return folder


@pytest.fixture
def written(finished, tmp_path):
    """A copy of a finished run with checkpoints of steps 2, 4 and 6."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path


def test_a_damaged_checkpoint_is_told_and_an_older_one_taken(written):
    folder = written / "run" / "checkpoints"
    data = next((folder / "step-00000006").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    (folder / "step-00000004" / ".metadata").unlink()
    # killed while it was written
    shutil.copytree(folder / "step-00000002", folder / "step-00000008.partial")
    done = run(
        "--train.out=run",
        "--checkpoint.resume",
        "--train.steps=5",
        "--checkpoint.every=3",
        cwd=written,
    )
    assert done.returncode == 0, done.stderr
    assert "step-00000006 is damaged" in done.stdout
    assert "step-00000004 is damaged" in done.stdout
    assert "resuming from run/checkpoints/step-00000002" in done.stdout
    # what lies behind this run's steps is damaged, or another history
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == ["step-00000002", "step-00000003", "step-00000005"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--model.hidden_size=32"],
            "step-00000006 was written with model.hidden_size=16, this run has 32",
        ),
        (["--train.global_batch=4"], "was written with train.global_batch=8, this run has 4"),
    ],
)
def test_what_cannot_go_on_is_refused_in_one_line_and_nothing_is_lost(written, args, message):
    before = {path: path.read_bytes() for path in (written / "run").rglob("*") if path.is_file()}
    done = run("--train.out=run", "--checkpoint.resume", *args, cwd=written)
    assert done.returncode == 2, done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], done.stderr
    assert {
        path: path.read_bytes() for path in (written / "run").rglob("*") if path.is_file()
    } == before


def test_another_grid_is_refused_with_both_grids_named(ranks2, written):
    with pytest.raises(
        Exception, match=r"written on the grid dp=1, .*this run is on dp=2, .*start it as it was"
    ):
        ranks2.run(newest, CONFIG, written / "run")


def newest(config, out):
    import torch.distributed as dist

    from labcode.comm.grid import Grid
    from labcode.train.checkpoint import Checkpoints

    return Checkpoints(config, Grid.create(config.check(dist.get_world_size())), out).newest()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_rank_stops_all_ranks_with_a_checkpoint_and_exit_code_0(tmp_path, number):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        *TRAIN[1:],
    ]
    args = [
        "--train.steps=100000",
        "--train.out=run",
        "--checkpoint.every=0",
        "--checkpoint.resume",
    ]
    job = subprocess.Popen(
        [*torchrun, *args], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        lines = tmp_path / "run" / metrics.FILE_NAME
        while job.poll() is None and not (lines.exists() and lines.read_bytes().count(b"\n") > 2):
            time.sleep(0.05)
        last = max(
            psutil.Process(job.pid).children(), key=lambda child: int(child.environ()["RANK"])
        )
        os.kill(last.pid, number)
        stderr = job.communicate(timeout=280)[1]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, stderr
    steps = [row["step"] for row in metrics.read(tmp_path / "run") if "loss" in row]
    assert f"stopped by {number.name} after step {steps[-1]}, with a checkpoint" in stderr
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert json.loads((folder / "run.json").read_text())["step"] == steps[-1]
    assert not (tmp_path / "run" / "weights.pt").exists()  # the run is not at its end


def test_a_checkpoint_that_cannot_be_written_leaves_the_older_one(tmp_path, on_small_disk):
    args = [
        "--train.steps=100000",
        "--train.log_every=100000",
        "--checkpoint.every=1",
        "--train.out=disk/run",
    ]
    done = on_small_disk("2m", *TRAIN, *args)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "could not be written: rank 0" in line and "No space left on device" in line
    kept = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert kept and not [name for name in kept if name.endswith(".partial")]
    assert f"the last complete one is disk/run/checkpoints/{max(kept)}" in line
