"""How busy the device is: by the operating system, by a driver, and in the files of a run."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from faults.forks import train
from faults.waiting import pause

from labcode.config import TrainConfig
from labcode.measure import device_samples, metrics
from labcode.measure.device_samples import DeviceSampler, GpuMeter, ProcessMeter, meter_for

ARGS = ["gpt_tiny", "--model.num_layers=1", "--model.hidden_size=16", "--model.num_heads=2"]
ARGS += ["--model.context_length=32", "--train.global_batch=4", "--train.log_every=1"]
ARGS += ["--train.eval_batches=1", "--train.sample_tokens=0", "--train.out=run"]


class Steady:
    """A meter that always reads the same."""

    def __init__(self):
        self.reads = 0

    def read(self):
        self.reads += 1
        return {"utilisation": 0.25, "memory_bytes": 100.0}


def sampling_threads():
    return [thread for thread in threading.enumerate() if thread.name == "device samples"]


# ---- the thread


def test_samples_are_taken_within_the_block_and_stop_with_it(until):
    rows = []
    sampler = DeviceSampler(Steady(), 0.01, lambda: 7, rows.append)
    with sampler:
        until(lambda: len(rows) >= 3)
        assert len(sampling_threads()) == 1
    assert not sampling_threads()
    assert {row["step"] for row in rows} == {7}
    times = [row["time_s"] for row in rows]
    assert times == sorted(times)
    assert sampler.utilisation() == 0.25
    assert sampler.utilisation() is None, "the mean is that of the samples since the last call"


def test_a_period_of_zero_starts_no_thread_and_reads_nothing():
    meter = Steady()
    sampler = DeviceSampler(meter, 0.0, lambda: 0, print)
    with sampler:
        assert not sampling_threads()
    assert meter.reads == 0 and sampler.utilisation() is None


def test_the_thread_ends_with_an_error_of_the_block_and_keeps_its_own_to_itself(until):
    def full(row):
        raise OSError("no space left")

    sampler = DeviceSampler(Steady(), 0.01, lambda: 0, full)
    with pytest.raises(KeyError), sampler:
        until(lambda: sampler.problem)
        raise KeyError("the training")
    assert sampler.problem == "no space left" and not sampling_threads()


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (0.001, "sample_device_s=0.001 would disturb what it measures: give at least 0.01, or 0"),
        (-1, "train.sample_device_s=-1: give the seconds, or 0 for none"),
        (float("nan"), "give a finite number"),
        ("often", "train.sample_device_s='often' is not a number"),
    ],
)
def test_an_impossible_period_is_refused_in_one_line(seconds, message):
    with pytest.raises(ValueError, match=message) as caught:
        TrainConfig(sample_device_s=seconds)
    assert "\n" not in str(caught.value)


# ---- the meters


def test_the_cpu_time_of_this_process_is_seen():
    meter = ProcessMeter()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        sum(range(1000))
    busy = meter.read()
    assert busy["cpu_cores"] > 0
    assert 0 < busy["utilisation"] <= 1
    assert 10e6 < busy["memory_bytes"] < 1e12
    pause(0.3)  # in which this process does nothing, whatever others do
    assert meter.read()["cpu_cores"] < busy["cpu_cores"] + 0.5
    assert set(busy) <= set(device_samples.UNITS)


class NVMLError(Exception):
    """The error as pynvml has it."""


def fake_driver(**changes):
    """A module like pynvml for a machine with two GPUs, of which CUDA shows the second."""
    utilisation = {b"1": 93, b"0": 0}

    def by_uuid(uuid):
        if uuid != "GPU-11-22":
            raise NVMLError("Not Found")
        return b"1"

    functions = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=utilisation[gpu]),
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=5 * 10**9),
        "nvmlDeviceGetPowerUsage": lambda gpu: 345_000,  # milliwatts
    }
    return SimpleNamespace(**(functions | changes))


def show_gpu(monkeypatch, uuid="11-22", **changes):
    monkeypatch.setitem(sys.modules, "pynvml", fake_driver(**changes))
    properties = SimpleNamespace(uuid=uuid)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return torch.device("cuda", 0)


def test_a_gpu_is_asked_of_the_driver_by_its_own_number(monkeypatch):
    meter = meter_for(show_gpu(monkeypatch))
    assert isinstance(meter, GpuMeter)
    row = meter.read()
    assert (row["utilisation"], row["memory_bytes"], row["power_w"]) == (0.93, 5e9, 345.0)
    assert row["cpu_cores"] >= 0 and set(row) <= set(device_samples.UNITS)


def test_a_gpu_of_which_the_driver_says_nothing_leaves_what_the_system_says(monkeypatch):
    def refuse(gpu):
        raise NVMLError("Not Supported")

    for device in (
        show_gpu(monkeypatch, uuid="a part of a GPU"),
        show_gpu(monkeypatch, nvmlDeviceGetUtilizationRates=refuse),
    ):
        with pytest.raises(ValueError, match="the driver says nothing of cuda:0: Not "):
            GpuMeter(device)
        assert isinstance(meter_for(device), ProcessMeter)


# ---- a run


def test_a_run_writes_its_samples_and_appends_to_them_when_it_is_resumed(tmp_path):
    sampled = [*ARGS, "--train.sample_device_s=0.01", "--checkpoint.every=20"]
    done = train([*sampled, "--train.steps=40"], cwd=tmp_path)
    assert done.codes == [0], done.err
    first = metrics.read(tmp_path / "run" / "device.jsonl")
    assert first and 0 <= first[0]["step"] <= first[-1]["step"] <= 40
    rows = [row for row in metrics.read(tmp_path / "run") if "loss" in row]
    for row in rows:
        assert row["samples_per_s"] == pytest.approx(4 / row["step_s"])
        assert row["tokens_per_s"] == pytest.approx(32 * row["samples_per_s"])
        assert 0 < row["matmul_share"] < 2 and row["flops_per_s"] > 0
        assert "mfu" not in row, "MFU is a share of a datasheet's peak, which a CPU has not"
    assert any("utilisation" in row for row in rows)

    done = train([*sampled, "--train.steps=80", "--checkpoint.resume"], cwd=tmp_path)
    assert done.codes == [0], done.err
    both = metrics.read(tmp_path / "run" / "device.jsonl")
    assert both[: len(first)] == first and len(both) > len(first)
    assert 40 <= both[len(first)]["step"] <= both[-1]["step"] <= 80
    assert set(both[-1]) <= {"step", *device_samples.UNITS}


def test_a_file_of_samples_that_is_damaged_does_not_stop_the_training(tmp_path):
    sampled = [*ARGS, "--train.sample_device_s=0.01", "--checkpoint.every=20"]
    assert train([*sampled, "--train.steps=20"], cwd=tmp_path).codes == [0]
    (tmp_path / "run" / "device.jsonl").write_text("not JSON\n{}\n")
    done = train([*sampled, "--train.steps=60", "--checkpoint.resume"], cwd=tmp_path)
    assert done.codes == [0], done.err
    assert "the device was not sampled to the end: " in done.out[0]
    assert "device.jsonl, line 1 is not JSON" in done.out[0]
    assert (tmp_path / "run" / "device.jsonl").read_text() == "not JSON\n{}\n"


def test_off_writes_no_file(tmp_path):
    done = train([*ARGS, "--train.steps=3", "--train.sample_device_s=0"], cwd=tmp_path)
    assert done.codes == [0], done.err
    assert not (tmp_path / "run" / "device.jsonl").exists()
    assert all("utilisation" not in row for row in metrics.read(tmp_path / "run"))
