"""`python -m labcode.train` as people start it: files, errors, Ctrl-C, a full disk."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch
from faults.waiting import until

from labcode.measure import metrics
from labcode.perf.chrome_trace import PARTS
from labcode.runtime import processes

SMALL = [
    *(
        "--model.num_layers",
        "1",
        "--model.num_heads",
        "2",
        "--model.hidden_size",
        "16",
        "--model.context_length",
        "32",
    ),
    *(
        "--train.global_batch",
        "4",
        "--train.log_every",
        "1",
        "--train.eval_batches",
        "1",
        "--train.sample_tokens",
        "20",
    ),
]
TRAIN = [sys.executable, "-m", "labcode.train"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "-m",
    "labcode.train",
]


def run(*command, cwd):
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=280, check=False
    )


def error_line(done):
    """The one line that the program says, without torchrun's own report around it."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_two_ranks_write_metrics_tensorboard_weights_and_a_sample(tmp_path):
    done = run(
        *TORCHRUN,
        "gpt_tiny",
        *SMALL,
        "--train.steps",
        "4",
        "--train.micro_batch",
        "1",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    out = tmp_path / "runs" / "gpt_tiny-001"
    rows = metrics.read(out)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    assert set(rows[0]) - {"utilisation"} == {
        *(
            "step",
            "loss",
            "grad_norm",
            "lr",
            "step_s",
            "data_s",
            "forward_s",
            "backward_s",
            "communication_s",
            "optimizer_s",
            "samples_per_s",
            "tokens_per_s",
            "tokens_per_s_per_rank",
            "memory_bytes",
            "flops_per_s",
            "matmul_share",
        )
    }
    parts_s = sum(rows[1][f"{part}_s"] for part in PARTS)
    assert 0 < parts_s <= 1.001 * rows[1]["step_s"]
    assert rows[0]["tokens_per_s"] == pytest.approx(2 * rows[0]["tokens_per_s_per_rank"])
    assert rows[0]["tokens_per_s"] == pytest.approx(4 * 32 / rows[0]["step_s"])
    assert "val_loss" in rows[-1]
    assert list((out / "tensorboard").glob("events.out.tfevents.*"))
    weights = torch.load(out / "weights.pt", weights_only=True)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    assert (out / "result.txt").read_text().strip() in done.stdout
    assert json.loads((out / "config.json").read_text())["train"]["steps"] == 4
    assert not list(out.glob("*.partial"))
    logged = [line for line in done.stdout.splitlines() if line.startswith("step 4/4 | loss ")]
    assert len(logged) == 1  # of rank 0 alone; on a terminal it is a bar
    first = "2 ranks on 1 node, gloo on cpu; grid dp 2 x pp 1 x cp 1 x tp 1; "
    first += "4 samples a step = dp 2 x 2 micro-batches of 1"
    assert done.stdout.splitlines()[0] == first


@pytest.mark.release
def test_ranks_that_share_a_model_write_the_weights_of_the_whole_and_its_sample(tmp_path):
    steps = (
        "--train.steps",
        "3",
        "--train.dtype",
        "float64",
        "--train.seed",
        "4",
        "--model.num_layers",
        "2",
    )
    ways = {
        "alone": (TRAIN, ()),
        "tp": (
            TORCHRUN,
            (
                "--parallel.tp",
                "2",
                "--parallel.order",
                "cp-tp-dp-pp",
                "--parallel.sequence_parallel",
            ),
        ),
        "pp": (
            TORCHRUN,
            (
                "--parallel.pp",
                "2",
                "--train.micro_batch",
                "1",
                "--parallel.pipeline_schedule",
                "zero_bubble",
            ),
        ),
    }
    for name, (command, extra) in ways.items():
        done = run(*command, "gpt_tiny", *SMALL, *steps, *extra, "--train.out", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    weights = {name: torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ways}
    for name in ("tp", "pp"):
        torch.testing.assert_close(weights[name], weights["alone"], rtol=0, atol=1e-9)
        assert (tmp_path / name / "result.txt").read_text() == (
            tmp_path / "alone" / "result.txt"
        ).read_text()


@pytest.mark.release
def test_an_existing_folder_is_never_overwritten_silently(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    args = ("gpt_tiny", *SMALL, "--train.steps", "1")
    done = run(*TRAIN, *args, "--train.out", "mine", cwd=tmp_path)
    assert done.returncode == 2
    assert "mine exists already" in error_line(done)
    done = run(*TRAIN, *args, "--train.out", "mine", "--train.overwrite", cwd=tmp_path)
    assert done.returncode == 2
    assert "not the folder of a run" in error_line(done)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    for extra in ((), ("--train.overwrite",)):
        assert run(*TRAIN, *args, "--train.out", "run", *extra, cwd=tmp_path).returncode == 0


@pytest.mark.release
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gpt_tini"], "unknown recipe 'gpt_tini': did you mean gpt_tiny?"),
        (["gpt_tiny", "--train.stepz", "1"], "did you mean --train.steps?"),
        (["gpt_tiny", "--data.path", "nowhere.txt"], "nowhere.txt"),
        (["gpt_tiny", "--data.path", "empty.txt"], "empty.txt is an empty file"),
        (["gpt_tiny", "--data.path", "short.txt"], "short.txt is too short"),
        (["vit_tiny", "--data.path", "corrupt.zarr"], "corrupt.zarr"),
        (["vit_tiny", "--model.patch_size", "7"], "is not a multiple of patch_size=7"),
        (["gpt_tiny", "--model.vocab_size", "5"], "model.vocab_size=5 but the text has"),
        (
            ["gpt_tiny", "--parallel.dp", "2"],
            "2*1*1*1 = 2 but WORLD_SIZE is 1: change an axis or launch 2 ranks",
        ),
        (["gpt_tiny", "--parallel.tp", "3"], "model.num_heads=4 is not divisible by parallel.tp=3"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(tmp_path, args, message):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "corrupt.zarr").mkdir()
    (tmp_path / "corrupt.zarr" / "zarr.json").write_text("{")
    if args[-1] == "3":
        done = run(*TORCHRUN[:-3], "--nproc-per-node=3", *TORCHRUN[-2:], *args, cwd=tmp_path)
        assert done.returncode != 0
    else:
        done = run(*TRAIN, *args, cwd=tmp_path)
        assert done.returncode == 2
    assert message in error_line(done)
    assert not (tmp_path / "runs").exists()


def test_over_several_ranks_a_bad_input_is_still_one_message(tmp_path):
    done = run(*TORCHRUN, "gpt_tiny", "--data.path", "nowhere.txt", cwd=tmp_path)
    assert done.returncode != 0
    assert "nowhere.txt" in error_line(done)


def test_a_refused_grid_is_one_line_and_torchrun_reports_a_single_failure(tmp_path):
    done = run(*TORCHRUN, "gpt_tiny", "--parallel.dp", "3", cwd=tmp_path)
    assert done.returncode != 0
    line = error_line(done)
    assert "= 3 but WORLD_SIZE is 2" in line
    lines = done.stderr.splitlines()
    assert lines[-2] == f"  traceback : {line}"  # its last words say once more what is wrong
    assert lines[-5].strip().startswith("rank      : 0")  # the only failure that torchrun lists
    assert not [line for line in lines if "rank      : 1" in line]


BROKEN = """
import sys
from labcode.runtime import bootstrap
from labcode.data.text import TextDataset

where, recipe = sys.argv[1:3]
rank = bootstrap.read_environment().rank
choose_device, read = bootstrap.choose_device, TextDataset.__getitem__
reads = 0

def broken_device(place):
    if place.rank == 1:
        raise ValueError("this GPU has fallen off the bus")
    return choose_device(place)

def broken_read(dataset, indices):
    global reads
    reads += 1
    if rank == 1 and reads == 4:
        raise OSError(5, "Input/output error", "tokens.bin")
    return read(dataset, indices)

if where == "device":
    bootstrap.choose_device = broken_device
else:
    TextDataset.__getitem__ = broken_read

from labcode.train.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.release
@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("device", "error: rank 1: this GPU has fallen off the bus"),
        ("data", "error: rank 1: after step 3: tokens.bin: input/output error"),
    ],
)
def test_an_error_that_one_rank_alone_knows_is_told_by_that_rank(tmp_path, where, line):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    steps = ("--train.steps", "10", "--train.micro_batch", "2")
    done = run(*TORCHRUN[:-2], str(script), where, "gpt_tiny", *SMALL, *steps, cwd=tmp_path)
    assert done.returncode != 0
    assert error_line(done) == line


@pytest.mark.release
def test_a_vocabulary_above_the_tokenizers_gives_a_sample_all_the_same(tmp_path):
    """One step leaves the additional tokens almost as likely as the others."""
    args = ("--model.vocab_size", "2000", "--train.steps", "1", "--train.sample_tokens", "40")
    done = run(*TRAIN, "gpt_tiny", *SMALL, *args, "--train.out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.txt").read_text().strip()


def test_ctrl_c_ends_all_ranks_and_leaves_valid_files(tmp_path):
    out = tmp_path / "run"
    job = subprocess.Popen(
        [*TORCHRUN, "gpt_tiny", *SMALL, "--train.steps", "100000", "--train.out", str(out)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        written = out / metrics.FILE_NAME
        until(lambda: job.poll() is not None or (written.is_file() and len(metrics.read(out)) >= 5))
        assert job.poll() is None
        ranks = psutil.Process(job.pid).children(recursive=True)
        os.killpg(job.pid, signal.SIGINT)  # what a terminal does
        stderr = job.communicate(timeout=280)[1]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode != 0
    assert "interrupted after step" in stderr
    assert len(ranks) >= 2
    assert not psutil.wait_procs(ranks, timeout=200)[1]
    lines = (out / metrics.FILE_NAME).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))


@pytest.mark.release
def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path):
    out = tmp_path / "run"
    job = subprocess.Popen(
        [*TORCHRUN, "gpt_tiny", *SMALL, "--train.steps", "100000", "--train.out", str(out)],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    ranks = []
    try:
        until(lambda: job.poll() is not None or (out / metrics.FILE_NAME).is_file())
        assert job.poll() is None
        ranks = psutil.Process(job.pid).children(recursive=True)
        assert len(ranks) >= 2
        job.kill()
        assert not psutil.wait_procs(ranks, timeout=280)[1]
    finally:
        processes.end([job])
        for rank in ranks:
            if processes.alive(rank):
                rank.kill()


def test_reading_metrics_forgives_a_line_cut_short_at_the_end_only(tmp_path):
    path = tmp_path / metrics.FILE_NAME
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert metrics.read(tmp_path) == [{"step": 1, "loss": 2.0}]
    path.write_text('{"step": 1, "lo\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        metrics.read(path)
    with pytest.raises(ValueError, match="give the folder that a training printed"):
        metrics.read(tmp_path / "nowhere")
