"""Ranges, recorded steps and the memory timeline on a GPU; skipped without one."""

import json
import subprocess
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trained(folder, *options):
    args = ["gpt_tiny", "--train.steps=8", f"--train.out={folder}", "--train.sample_tokens=0"]
    command = [sys.executable, "-m", "labcode.train", *args, "--train.eval_every=0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_ranges_count_the_time_of_the_device():
    from labcode.measure.ranges import StepRanges

    ranges = StepRanges(on_gpu=True)
    cycles = 50_000_000  # some 30 ms; the host queues them at once
    for _ in range(2):
        with ranges("forward"):
            torch.cuda._sleep(cycles)
        with ranges("backward"):
            torch.cuda._sleep(2 * cycles)
        ranges.end_step()
    seconds = ranges.take()
    assert seconds["backward"] == pytest.approx(2 * seconds["forward"], rel=0.2)


def test_a_recorded_run(tmp_path):
    from labcode.perf.breakdown import breakdown
    from labcode.perf.chrome_trace import read
    from labcode.perf.memory_timeline import memory_timeline
    from labcode.perf.operations import launches
    from labcode.perf.summary import summary

    run = trained(tmp_path / "run", "--profile.steps=5:8", "--profile.memory")
    trace = read(run)
    assert trace.has_gpu
    assert sorted(trace.steps()) == [5, 6, 7]
    for times in breakdown(trace):
        assert 0 < times.computing_ms < times.total_ms
    kept = launches(trace)
    assert kept is not None
    assert kept.kernels > 100
    assert kept.at_once is not None
    assert "\n-> " in summary(trace)
    timeline = memory_timeline(trace)
    assert timeline.most("activations") > 0
    assert timeline.most("gradients") >= 0.9 * timeline.most("parameters")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["forward_s"] > 0


def test_the_parts_of_a_step_are_on_the_device_too():
    x = torch.randn(512, 512, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        with record_function("optimizer"):
            x @ x
        torch.cuda.synchronize()
    from labcode.perf.chrome_trace import read

    names = {event.name for event in read(recorded).of("gpu_user_annotation")}
    assert "optimizer" in names
