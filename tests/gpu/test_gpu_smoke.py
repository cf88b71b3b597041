"""The same commands run on a GPU: NCCL and bfloat16 without a change.

Several ranks on one GPU speak over gloo.
"""

import subprocess
import sys

import pytest
import torch

from labcode.measure import device_samples, device_speed, metrics
from labcode.runtime import hardware

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train(cwd, *args, ranks=1):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    command += ["-m", "labcode.train", "gpt_tiny", *args]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=280, check=False
    )


def losses(folder):
    return [row["loss"] for row in metrics.read(folder) if "loss" in row]


def test_gpt_tiny_learns_in_bfloat16_over_nccl(tmp_path):
    done = train(tmp_path, "--train.steps", "100", "--train.out", "run")
    assert done.returncode == 0, done.stderr
    rows = [row for row in metrics.read(tmp_path / "run") if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert 0 < rows[-1]["memory_bytes"] < torch.cuda.get_device_properties(0).total_memory
    assert 0 < rows[-1]["matmul_share"] < 1


STEPS = (
    "--train.steps",
    "6",
    "--train.dtype",
    "float64",
    "--train.log_every",
    "1",
    "--train.sample_tokens",
    "0",
)


@pytest.mark.parametrize("grid", [(), ("--parallel.tp", "2")], ids=["dp", "tp"])
def test_two_ranks_that_share_a_gpu_over_gloo_train_like_one(tmp_path, grid):
    for ranks, extra in ((1, ()), (2, ("--parallel.share_gpus", *grid))):
        done = train(tmp_path, *STEPS, *extra, "--train.out", f"run{ranks}", ranks=ranks)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run2") == pytest.approx(losses(tmp_path / "run1"), abs=1e-9)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL does not share one")
@pytest.mark.parametrize(
    "grid",
    [
        ("--parallel.tp", "2"),
        ("--parallel.tp", "2", "--parallel.sequence_parallel"),
        ("--parallel.cp", "2"),
        ("--parallel.cp", "2", "--parallel.context_attention", "all_gather"),
    ],
    ids=" ".join,
)
def test_two_gpus_that_share_a_model_train_like_one(tmp_path, grid):
    for ranks, extra in ((1, ()), (2, grid)):
        done = train(tmp_path, *STEPS, *extra, "--train.out", f"run{ranks}", ranks=ranks)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run2") == pytest.approx(losses(tmp_path / "run1"), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_has_a_fused_kernel_for_blocks_of_ring_attention(dtype):
    from labcode.parallel.attention_block import fastest_kernel

    q = torch.zeros(1, 4, 32, 64, device="cuda", dtype=dtype)
    assert fastest_kernel(q, q).name != "plain"


def test_more_ranks_than_gpus_is_one_line_that_says_what_to_do(tmp_path):
    ranks = torch.cuda.device_count() + 1
    done = train(tmp_path, "--train.steps", "1", "--train.global_batch", str(ranks), ranks=ranks)
    assert done.returncode != 0
    assert f"{ranks} ranks on node " in done.stderr
    assert f" but {ranks - 1} GPU(s)" in done.stderr
    assert "--parallel.share_gpus" in done.stderr


def test_the_device_and_backend_are_the_gpu_and_nccl():
    from labcode.runtime import bootstrap

    world = bootstrap.start(bootstrap.Place())
    try:
        assert (world.device.type, world.backend) == ("cuda", "nccl")
        x = torch.ones(3, device=world.device)
        torch.distributed.all_reduce(x)
        assert x.tolist() == [1.0, 1.0, 1.0]
    finally:
        bootstrap.stop()


def test_the_driver_says_how_busy_the_gpu_is(tmp_path):
    meter = device_samples.GpuMeter(torch.device("cuda", 0))
    held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    row = meter.read()
    assert held.numel() < row["memory_bytes"] < 1e12
    assert 0 <= row["utilisation"] <= 1 and row["power_w"] > 0
    done = train(tmp_path, "--train.steps=200", "--train.sample_device_s=0.1", "--train.out=run")
    assert done.returncode == 0, done.stderr
    samples = metrics.read(tmp_path / "run" / "device.jsonl")
    assert max(sample["utilisation"] for sample in samples) > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_large_matrix_product_reaches_a_good_part_of_the_datasheet(dtype):
    name = torch.cuda.get_device_name()
    found = device_speed.matmul_flops_per_s(torch.device("cuda", 0), getattr(torch, dtype))
    share = hardware.mfu(found, name, dtype)
    if share is None:
        pytest.skip(f"{name} has no peak in {dtype} in the table")
    assert 0.4 < share < 1.05
