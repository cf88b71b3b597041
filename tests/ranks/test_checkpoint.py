"""A run that was stopped and goes on is the run that was never stopped.

A checkpoint is whole or it is not used.
"""

import dataclasses
import errno
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
import torch
from covering import first
from faults import forks
from faults.waiting import until

from labcode import recipes
from labcode.measure import metrics
from labcode.runtime import combinations
from labcode.train.checkpoint.folder import read_about

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
    "dp 2, tp 2, ZeRO-1": {
        "parallel.tp": 2,
        "parallel.zero_stage": 1,
        "parallel.data_parallel": "labcode",
    },
    "dp 4, ZeRO-3": {"parallel.zero_stage": 3, "parallel.data_parallel": "labcode"},
    "dp 4, FSDP2": {"parallel.zero_stage": 3, "parallel.data_parallel": "ddp"},
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
    from trained import built

    from labcode.comm.grid import Grid
    from labcode.run import run

    size = dist.get_world_size()
    grid = Grid.create(combinations.check(config, size))
    training = built(config, start)
    if not start:
        # a state of the generators that no fresh run would have
        torch.manual_seed(seed + grid.coord("dp"))
    rows = []
    for row in run.train(training, out):
        if "loss" in row:
            rows.append((row["step"], row["loss"], row["grad_norm"]))
    return rows, {name: tensor.clone() for name, tensor in training.model.full_state_dict()}


@pytest.mark.parametrize("grid", first(2, GRIDS))
def test_going_on_gives_bit_for_bit_the_run_that_never_stopped(ranks4, tmp_path, grid):
    config = recipes.with_changes(CONFIG, GRIDS[grid])
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


OURS = {"parallel.data_parallel": "labcode"}
SEQUENCE = {"parallel.sequence_parallel": True}
LAYOUTS = {  # name: (number of ranks, what makes the layout)
    "one process": (1, {}),
    "dp 2": (2, {}),
    "tp 2": (2, {"parallel.tp": 2}),
    "pp 2": (2, {"parallel.pp": 2, "train.micro_batch": 2}),
    "cp 2": (2, {"parallel.cp": 2}),
    "ZeRO-1": (2, {"parallel.zero_stage": 1, **OURS}),
    "ZeRO-3": (2, {"parallel.zero_stage": 3, **OURS}),
    "FSDP2": (2, {"parallel.zero_stage": 3}),
    "tp 4, sequence parallel": (4, {"parallel.tp": 4, **SEQUENCE}),
    "tp 2, ZeRO-3": (4, {"parallel.tp": 2, "parallel.zero_stage": 3, **OURS}),
    "pp 2, ZeRO-2": (
        4,
        {"parallel.pp": 2, "train.micro_batch": 1, "parallel.zero_stage": 2, **OURS},
    ),
    "dp 4, two copies": (4, {"parallel.zero_stage": 3, "parallel.zero_replicas": 2, **OURS}),
}
EXPERTS = {  # the same for a model with experts
    "experts on one process": (1, {}),
    "experts, ep 2": (2, {"parallel.ep": 2}),
    "experts, ep 4, ZeRO-1": (4, {"parallel.ep": 4, "parallel.zero_stage": 1, **OURS}),
    "experts, tp 2": (2, {"parallel.tp": 2, **SEQUENCE}),
    "experts, ep 2 of dp 4, ZeRO-3": (4, {"parallel.ep": 2, "parallel.zero_stage": 3, **OURS}),
    "experts, ep 2, tp 2, ZeRO-3": (
        4,
        {"parallel.ep": 2, "parallel.tp": 2, "parallel.zero_stage": 3, **OURS},
    ),
    "experts, ep 2 of dp 4, FSDP2": (4, {"parallel.ep": 2, "parallel.zero_stage": 3}),
    "experts, ep 2, pp 2": (4, {"parallel.ep": 2, "parallel.pp": 2, "train.micro_batch": 2}),
}
NO_DROPOUT = recipes.with_changes(
    CONFIG, {"model.dropout": 0.0, "model.num_heads": 4, "train.steps": 4}
)
MIXTURE = recipes.with_changes(
    NO_DROPOUT,
    {
        "model.bias": False,
        "model.mlp": "swiglu",
        "model.num_experts": 4,
        "model.shared_ffn_size": 8,
        "model.router_bias_rate": 0.01,
    },
)


def pairs_of_layouts():
    """A ring through all layouts: each is written once, and read once by another one.

    Files name the part of the whole tensor that they hold, and no layout. So a pair that is not
    here writes and reads what two pairs of the ring do.
    """
    pairs = []
    for names in (list(LAYOUTS), list(EXPERTS)):
        pairs += zip(names, [*names[1:], names[0]])
    return pairs


def laid_out(name):
    """(number of ranks, config) of a layout."""
    size, changes = (LAYOUTS | EXPERTS)[name]
    return size, recipes.with_changes(MIXTURE if name in EXPERTS else NO_DROPOUT, changes)


@pytest.fixture(scope="module")
def written_in(request, tmp_path_factory):
    """`written_in(layout)`: (its folder, rows and final weights) of a run with checkpoints."""
    made = {}

    def of(name):
        if name not in made:
            size, config = laid_out(name)
            folder = tmp_path_factory.mktemp("layout")
            pool = request.getfixturevalue(f"ranks{size}")
            rows, weights = pool.run(train, config, folder, None, 3)[0]
            made[name] = (folder, rows, weights)
        return made[name]

    return of


@pytest.mark.parametrize(("first", "second"), pairs_of_layouts())
def test_a_run_goes_on_in_any_other_layout(request, written_in, tmp_path, first, second):
    folder, whole_rows, whole = written_in(first)
    size, config = laid_out(second)
    start = tmp_path / "checkpoints" / "step-00000002"
    shutil.copytree(folder / "checkpoints" / start.name, start)
    pool = request.getfixturevalue(f"ranks{size}")
    rows, again = pool.run(train, config, tmp_path, start, 3)[0]
    assert [row[0] for row in rows] == [3, 4]
    expected = torch.tensor(whole_rows[2:], dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(rows, dtype=torch.float64), expected, rtol=0, atol=1e-9)
    assert whole.keys() == again.keys()
    torch.testing.assert_close(again, whole, rtol=0, atol=1e-9)


def test_a_checkpoint_that_is_older_than_a_field_can_be_resumed_from(ranks2, tmp_path):
    ranks2.run(train, CONFIG, tmp_path, None, 3)
    start = tmp_path / "checkpoints" / "step-00000006"
    about = read_about(start)
    del about.config["parallel"]["zero_stage"]
    del about.config["model"]["tie_embeddings"]
    del about.config["fp8"]
    (start / "run.json").write_bytes(about.to_json())
    assert set(ranks2.run(newest, CONFIG, tmp_path)) == {start}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_of_fsdp2_that_was_finished_before_writes_its_result_again(ranks2, tmp_path, stage):
    """Rank 0 alone makes a sample, of weights that no rank has whole."""
    changes = {"parallel.zero_stage": stage, "train.steps": 2, "train.sample_tokens": 4}
    config = recipes.with_changes(CONFIG, changes)
    ranks2.run(train, config, tmp_path, None, 3)
    start = tmp_path / "checkpoints" / "step-00000002"
    (tmp_path / "result.txt").unlink()
    (rows, _), _ = ranks2.run(train, config, tmp_path, start, 3)
    assert rows == []
    assert (tmp_path / "result.txt").read_text()


def test_ranks_that_hold_the_same_weights_write_them_once(ranks4, tmp_path):
    ranks4.run(train, CONFIG, tmp_path, None, 3)  # dp 4
    folder = tmp_path / "checkpoints" / "step-00000006"
    index = json.loads((folder / "tensors.json").read_text())
    weights = [entry for key, entry in index.items() if key.startswith("model/")]
    assert len(weights) > 10
    assert all(len(entry["boxes"]) == 1 for entry in weights)
    # and they share the work
    assert len({entry["boxes"][0]["file"] for entry in weights}) == 4


def run(*args, cwd, **options):
    """`python -m labcode.train gpt_tiny ...` with the settings of TINY."""
    return forks.train([*TRAIN[3:], *args], cwd=cwd, timeout_s=280, **options)


def test_going_on_from_a_folder_that_is_not_there_yet_begins(tmp_path):
    done = run("--train.out=run", "--checkpoint.resume", cwd=tmp_path)
    assert done.codes == [0], done.err
    assert "resuming" not in done.out[0]
    assert run("--train.out=run", cwd=tmp_path).codes == [2]  # without resume it is not touched
    done = run("--train.out=run", "--checkpoint.resume", cwd=tmp_path)
    # a finished run has nothing left to do
    assert "resuming from run/checkpoints/step-00000006" in done.out[0]
    assert done.codes == [0]
    steps = [row["step"] for row in metrics.read(tmp_path / "run") if "loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    assert run("--train.out=run", cwd=folder).codes == [0]
    return folder


@pytest.fixture
def written(finished, tmp_path):
    """A copy of a finished run with checkpoints of steps 2, 4 and 6."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def flip_a_bit(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_told_and_an_older_one_taken(written):
    folder = written / "run" / "checkpoints"
    data = next((folder / "step-00000006").glob("*.bin"))
    data.write_bytes(data.read_bytes()[:-1])
    (folder / "step-00000004" / "tensors.json").unlink()
    # killed while it was written
    shutil.copytree(folder / "step-00000002", folder / "step-00000008.partial")
    damaged = contents(folder / "step-00000006")
    done = run(
        "--train.out=run",
        "--checkpoint.resume",
        "--train.steps=5",
        "--checkpoint.every=3",
        cwd=written,
    )
    assert done.codes == [0], done.err
    assert "step-00000006 is damaged: rank-0.bin has" in done.out[0]
    assert "step-00000004 is damaged: tensors.json is missing" in done.out[0]
    assert "resuming from run/checkpoints/step-00000002" in done.out[0]
    # They used to be removed here. But what this attempt calls damaged may be a disk that was not
    # ready, and it is somebody's work: it makes room under another name, and is counted no more.
    assert names(folder) == [
        "step-00000002",
        "step-00000003",
        "step-00000004.unused",
        "step-00000005",
        "step-00000006.unused",
    ]
    assert "step-00000006 was not resumed from: it is kept as step-00000006.unused" in done.out[0]
    kept = contents(folder / "step-00000006.unused")
    assert list(kept.values()) == list(damaged.values())


def test_nothing_begins_where_no_checkpoint_can_be_read(written):
    folder = written / "run" / "checkpoints"
    (folder / "step-00000002" / "run.json").unlink()
    (folder / "step-00000004" / "run.json").write_text("[]")
    flip_a_bit(next((folder / "step-00000006").glob("*.bin")), 3000)
    before = contents(written)
    done = run("--train.out=run", "--checkpoint.resume", "--checkpoint.keep=1", cwd=written)
    assert done.codes == [2]
    (line,) = done.errors
    assert "no checkpoint in run/checkpoints can be read" in line
    assert "step-00000002: run.json is missing" in line
    assert "step-00000004: run.json is a list" in line
    assert "step-00000006: rank-0.bin is not as it was written" in line
    assert contents(written) == before


def test_a_checkpoint_of_this_attempt_replaces_none_that_it_did_not_resume_from(ranks1, written):
    folder = written / "run" / "checkpoints"
    shutil.copytree(folder / "step-00000006", folder / "step-00000006.unused")
    ranks1.run(train, CONFIG, written / "run", folder / "step-00000004", 3)
    assert names(folder) == [
        "step-00000002",
        "step-00000004",
        "step-00000006",
        "step-00000006.unused",
        "step-00000006.unused-2",
    ]


def test_a_damaged_checkpoint_is_not_one_of_those_that_are_kept(written):
    """Else a second damaged one could leave none that can be read."""
    folder = written / "run" / "checkpoints"
    flip_a_bit(folder / "step-00000006" / "run.json", 50)
    shutil.copytree(folder / "step-00000006", folder / "step-00000005")
    args = ("--checkpoint.every=3", "--checkpoint.keep=2", "--checkpoint.resume")
    done = run("--train.out=run", *args, "--train.steps=8", cwd=written)
    assert done.codes == [0], done.err
    assert names(folder) == [
        "step-00000005.unused",
        "step-00000006",
        "step-00000006.unused",
        "step-00000008",
    ]


@pytest.mark.parametrize("name", ["rank-0.bin", "run.json", "tensors.json"])
def test_a_flipped_bit_anywhere_is_seen(ranks1, written, name):
    folder = written / "run" / "checkpoints"
    path = folder / "step-00000006" / name
    content = path.read_bytes()
    for place in (len(content) // 3, len(content) // 2, len(content) - 2):
        flip_a_bit(path, place)
        (found,) = ranks1.run(newest, CONFIG, written / "run")
        assert found == folder / "step-00000004"
        path.write_bytes(content)


def test_files_of_an_older_step_are_seen(ranks1, written):
    folder = written / "run" / "checkpoints"
    older = folder / "step-00000002"
    shutil.copy(older / "rank-0.bin", folder / "step-00000006" / "rank-0.bin")
    shutil.rmtree(folder / "step-00000004")
    shutil.copytree(older, folder / "step-00000004")
    assert ranks1.run(newest, CONFIG, written / "run") == [older]


@pytest.mark.parametrize("name", ["run.json", "rank-0.bin"])
def test_links_and_pipes_in_a_checkpoint_are_not_followed(ranks1, written, name):
    folder = written / "run" / "checkpoints"
    path = folder / "step-00000006" / name
    path.rename(written / name)
    path.symlink_to(written / name)
    assert ranks1.run(newest, CONFIG, written / "run") == [folder / "step-00000004"]
    path.unlink()
    os.mkfifo(path)
    assert ranks1.run(newest, CONFIG, written / "run") == [folder / "step-00000004"]


def test_of_a_checkpoint_that_lies_elsewhere_only_the_link_is_removed(written):
    folder = written / "run" / "checkpoints"
    (folder / "step-00000006").rename(written / "elsewhere")
    (folder / "step-00000006").symlink_to(written / "elsewhere")
    before = contents(written / "elsewhere")
    args = ["--train.steps=7", "--checkpoint.keep=1"]
    done = run("--train.out=run", "--checkpoint.resume", *args, cwd=written)
    assert done.codes == [0], done.err
    assert "resuming from run/checkpoints/step-00000006" in done.out[0]
    assert names(folder) == ["step-00000007"]
    assert contents(written / "elsewhere") == before


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_disk_that_cannot_be_read_now_is_no_damage(written, number):
    def patch():
        from labcode.train.checkpoint import folder as module

        def fail(path):
            raise OSError(number, os.strerror(number), str(path))

        module.stored = fail

    before = contents(written)
    done = run("--train.out=run", "--checkpoint.resume", cwd=written, patch=patch)
    assert done.codes == [2]
    (line,) = done.errors
    assert "step-00000006 cannot be read: " in line and os.strerror(number).lower() in line
    assert "nothing was changed; mend that" in line
    assert contents(written) == before


def test_a_folder_of_checkpoints_that_cannot_be_listed_is_not_an_empty_one(written):
    folder = written / "run" / "checkpoints"
    folder.rename(written / "elsewhere")
    folder.write_bytes(b"")
    done = run("--train.out=run", "--checkpoint.resume", cwd=written)
    assert done.codes == [2]
    assert "checkpoints: not a directory" in done.errors[0]


def pick_a_pickle():
    """A pickle that leaves a file behind if it is loaded."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, ("was-here",)

    return pickle.dumps(Evil())


def test_what_a_stranger_puts_in_the_place_of_tensors_is_never_run(written):
    folder = written / "run" / "checkpoints" / "step-00000006"
    data = folder / "rank-0.bin"
    data.write_bytes(pick_a_pickle())
    tell_what_is_there(folder)
    done = run("--train.out=run", "--checkpoint.resume", cwd=written)
    assert done.codes == [0], done.err
    assert "step-00000006 is damaged: tensors.json: box 0 of " in done.out[0]
    assert "resuming from run/checkpoints/step-00000004" in done.out[0]
    assert not (written / "was-here").exists()


def tell_what_is_there(folder):
    """Write a `run.json` that fits the files, as they are now."""
    from labcode.train.checkpoint.folder import read_about, stored

    about = read_about(folder)
    files = {name: stored(folder / name) for name in about.files}
    (folder / "run.json").write_bytes(dataclasses.replace(about, files=files).to_json())


def change_index(folder, change):
    path = folder / "tensors.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    tell_what_is_there(folder)


WEIGHT = "model/norm.weight"


def without_a_weight(index):
    del index[WEIGHT]


def with_another_shape(index):
    index[WEIGHT]["size"] = [4]
    index[WEIGHT]["boxes"][0]["sizes"] = [4]


def with_another_dtype(index):
    index[WEIGHT]["dtype"] = "float32"


def without_a_moment(index):
    del index["optim/norm.weight/exp_avg"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_weight, f"it has no {WEIGHT}"),
        (with_another_shape, f"{WEIGHT} is [4] float64, and this run needs [16] float64"),
        (with_another_dtype, f"{WEIGHT} is [16] float32, and this run needs [16] float64"),
        (without_a_moment, "it has no optim/norm.weight/exp_avg"),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_an_older_checkpoint_is_taken(
    written, change, message
):
    change_index(written / "run" / "checkpoints" / "step-00000006", change)
    done = run("--train.out=run", "--checkpoint.resume", cwd=written)
    assert done.codes == [0], done.err
    assert f"step-00000006 is damaged: {message}" in done.out[0]
    assert "resuming from run/checkpoints/step-00000004" in done.out[0]


def load(config, out, broken):
    """What `load` takes if reading `broken` fails on the last rank, and what was filled by then."""
    import torch.distributed as dist
    from trained import built

    from labcode.comm.grid import Grid
    from labcode.train.checkpoint.store import Checkpoints
    from labcode.train.checkpoint.tensors import DamagedError

    rank = dist.get_rank()
    size = dist.get_world_size()
    grid = Grid.create(combinations.check(config, size))
    training = built(config)
    before = {name: param.clone() for name, param in training.state.params.items()}
    checkpoints = Checkpoints(config, grid, out)
    read = training.state.read
    untouched = []

    def read_or_fail(folder, index, **options):
        same = [torch.equal(param, before[name]) for name, param in training.state.params.items()]
        untouched.append(all(same) and not training.optimizer.state)
        tensors = read(folder, index, **options)
        if rank == size - 1 and folder.name in broken:
            raise DamagedError("the last tensor is missing")
        return tensors

    training.state.read = read_or_fail
    taken = checkpoints.load(training.state, checkpoints.newest())
    return taken.name, training.steps_done, untouched


def test_a_rank_that_cannot_read_its_part_sends_all_to_the_older_one_unchanged(ranks2, tmp_path):
    config = recipes.with_changes(CONFIG, {"parallel.pp": 2, "parallel.pipeline_schedule": "1f1b"})
    ranks2.run(train, config, tmp_path, None, 3)
    results = ranks2.run(load, config, tmp_path, ["step-00000006"])
    assert results == [("step-00000004", 4, [True, True])] * 2
    everything = names(tmp_path / "checkpoints")
    with pytest.raises(Exception, match=r"step-00000002: the last tensor is missing \(on rank 1\)"):
        ranks2.run(load, config, tmp_path, everything)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--model.hidden_size=32"],
            "step-00000006 was written with model.hidden_size=16, this run has 32",
        ),
        (["--train.global_batch=4"], "was written with train.global_batch=8, this run has 4"),
        (["--train.steps=5"], "step-00000006 is later than the end of this run, train.steps=5"),
    ],
)
def test_what_cannot_go_on_is_refused_in_one_line_and_nothing_is_lost(written, args, message):
    before = contents(written / "run")
    done = run("--train.out=run", "--checkpoint.resume", *args, cwd=written)
    assert done.codes == [2], done.out
    assert len(done.errors) == 1 and message in done.errors[0], done.err
    assert contents(written / "run") == before


def test_another_recipe_is_called_by_its_name(written):
    args = ["vit_tiny", "--train.out=run", "--checkpoint.resume"]
    done = forks.train(args, cwd=written)
    assert done.codes == [2]
    expected = "step-00000006 was written by the recipe gpt_tiny, this run is vit_tiny (they differ"
    assert expected in done.errors[0]


def test_a_text_that_has_changed_is_refused(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 500)
    args = ["--train.out=run", "--checkpoint.resume", "--data.path=text.txt"]
    assert run(*args, "--train.steps=2", cwd=tmp_path).codes == [0]
    text.write_text("to eb or not to be\n" * 500)  # the same letters, the same length
    done = run(*args, cwd=tmp_path)
    assert done.codes == [2]
    assert "the data has changed since run/checkpoints/step-00000002 was written" in done.errors[0]


def newest(config, out):
    import torch.distributed as dist

    from labcode.comm.grid import Grid
    from labcode.train.checkpoint.store import Checkpoints

    return Checkpoints(
        config, Grid.create(combinations.check(config, dist.get_world_size())), out
    ).newest()


def save_with_damage(config, out, start):
    """What saving says after the last rank has got a weight that is not a number."""
    import torch.distributed as dist
    from trained import built, checkpoints_of

    from labcode.train.finite import Diverged
    from labcode.train.step import TrainStep

    rank = dist.get_rank()
    size = dist.get_world_size()
    training = built(config, start)
    step = TrainStep(training)
    training.close()
    step()
    if rank == size - 1:
        next(iter(training.state.params.values())).data.view(-1)[0] = float("nan")
    with pytest.raises(Diverged) as error:
        checkpoints_of(training, out).save(training.state)
    return str(error.value)


def test_a_run_that_has_diverged_does_not_replace_its_last_checkpoint(ranks2, tmp_path):
    changes = {"parallel.tp": 2, "checkpoint.keep": 1, "train.steps": 2}
    config = recipes.with_changes(CONFIG, changes)
    ranks2.run(train, config, tmp_path, None, 3)
    folder = tmp_path / "checkpoints"
    before = contents(folder)
    first, second = ranks2.run(save_with_damage, config, tmp_path, folder / "step-00000002")
    assert first == second
    assert "has 1 value that is not finite on rank 1: lower optim.lr" in first
    assert first.endswith(f"the last checkpoint is {folder / 'step-00000002'}")
    assert contents(folder) == before


# nobody catches it, as nobody catches SIGKILL; and torch can send it to the other ranks
Killed = GeneratorExit


def save_and_die_at_every_moment(config, out):
    """What is found in the folder after each of the saves that ended before their time."""
    from trained import built, checkpoints_of

    from labcode.train.step import TrainStep

    training = built(config)
    step = TrainStep(training)
    training.close()
    step()
    checkpoints = checkpoints_of(training, out)
    checkpoints.save(training.state)
    found = []
    moment = 0
    ended = False
    while not ended:
        moment += 1
        training.batches.advance()  # the next step, with the same weights
        calls = itertools.count(1)
        with pytest.MonkeyPatch.context() as patched:
            for holder, name in ((os, "replace"), (os, "fsync"), (shutil, "rmtree")):
                patched.setattr(holder, name, dying(getattr(holder, name), calls, moment))
            try:
                checkpoints.save(training.state)
                ended = True
            except (Killed, OSError):
                pass
        whole = checkpoints.newest()
        found.append((training.steps_done, int(whole.name[5:]), names(checkpoints.folder)))
    return found


def dying(function, calls, moment):
    def until_the_end(*args, **kwargs):
        if next(calls) == moment:
            raise Killed
        return function(*args, **kwargs)

    return until_the_end


def test_whenever_a_save_ends_a_whole_checkpoint_is_there(ranks1, tmp_path):
    config = recipes.with_changes(CONFIG, {"checkpoint.keep": 1, "train.steps": 100})
    (found,) = ranks1.run(save_and_die_at_every_moment, config, tmp_path)
    assert len(found) > 8
    before = 1
    for step, newest_step, everything in found:
        assert newest_step in (before, step)
        assert len([name for name in everything if name.endswith(".partial")]) <= 1
        assert len(everything) <= 3
        before = newest_step
    assert found[-1][2] == [f"step-{found[-1][0]:08d}"]


@pytest.mark.release
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_does_not_kill_a_rank_that_is_ending(tmp_path, number):
    program = """if True:
        import os, sys, time
        from labcode.train.__main__ import main

        class EndsLate:
            # Python deletes what is left of its modules after it has restored the signals
            def __del__(self, write=os.write, sleep=time.sleep):
                write(1, b"is ending")
                sleep(1)

        sys.ends_late = EndsLate()
        sys.exit(main(sys.argv[1:]))
    """
    args = [*TRAIN[3:], "--train.out=run", "--checkpoint.every=5", "--train.steps=1"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *args], cwd=tmp_path, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout
        text = b""
        while b"is ending" not in text:
            more = os.read(run.stdout.fileno(), 65536)
            assert more, text
            text += more
        run.send_signal(number)
    assert run.returncode == 0


def signalled(tmp_path, patch, *args):
    """The training in one process, with `patch` run before it; the process may call `ask()`.

    It is started as `hand_down.sh` starts a rank: both signals are ignored.
    """
    program = f"""if True:
        import os, signal, sys
        from labcode.train.__main__ import main

        def ask():
            os.kill(os.getpid(), signal.SIGTERM)

        {patch}
        sys.exit(main(sys.argv[1:]))
    """

    def ignore():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    return subprocess.run(
        [sys.executable, "-c", program, *TRAIN[3:], "--train.out=run", *args],
        cwd=tmp_path,
        preexec_fn=ignore,
        capture_output=True,
        text=True,
        timeout=280,
    )


WHILE_STARTING = """
        from labcode.train.signals import StopSignals
        listen = StopSignals.listen_where_ignored
        StopSignals.listen_where_ignored = lambda signals: (listen(signals), ask())
"""


@pytest.mark.release
def test_a_signal_while_a_rank_starts_stops_it_before_its_first_step(tmp_path):
    args = ("--checkpoint.resume", "--train.steps=3")
    stopped = signalled(tmp_path, WHILE_STARTING, *args)
    line = "stopped by SIGTERM before step 1: resume with the same command"
    assert stopped.returncode == 0 and line in stopped.stderr, stopped.stderr
    assert (tmp_path / "run/stopped").read_text().startswith(line)
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    done = signalled(tmp_path, "", *args)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert (tmp_path / "run/weights.pt").exists()
    assert not (tmp_path / "run/stopped").exists()


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
        until(
            lambda: (
                job.poll() is not None or (lines.exists() and lines.read_bytes().count(b"\n") > 2)
            )
        )
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
    line = f"stopped by {number.name} after step {steps[-1]}, with a checkpoint"
    assert line in stderr
    assert (tmp_path / "run/stopped").read_text().startswith(line)
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert json.loads((folder / "run.json").read_text())["step"] == steps[-1]
    assert not (tmp_path / "run" / "weights.pt").exists()  # the run is not at its end


@pytest.mark.parametrize(
    "where",
    [
        pytest.param([], id="in the foreground"),
        pytest.param(
            ["--checkpoint.in_background"], id="in the background", marks=pytest.mark.release
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_written_leaves_the_older_one(tmp_path, on_small_disk, where):
    args = [
        *where,
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
