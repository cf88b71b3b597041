"""How busy the device is while a run trains on it, sampled by a thread and written beside the loss.

Of a GPU the driver knows it (NVML, which nvidia-smi asks too), of a CPU the operating system
(psutil). Rank 0 samples its own device; the rows go to `device.jsonl`, TensorBoard, and as a mean
into the rows of metrics.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import psutil

from labcode.runtime.hardware import usable_cores

if TYPE_CHECKING:
    import torch  # what only reads the rows need not wait for it

FILE_NAME = "device.jsonl"
LAST_SAMPLE_S = 5.0  # so long the end of a run waits for a sample that is being taken

# name: unit, as axis labels and the lessons print them
UNITS = {
    "time_s": "seconds since 1970",
    "utilisation": "GPU: fraction of the time in which a kernel ran; CPU: fraction of its cores "
    "that this process kept busy",
    "memory_bytes": "GPU: bytes in use on it, by all processes; CPU: bytes of this process",
    "power_w": "watts that the GPU draws",
    "cpu_cores": "cores that this process kept busy",
    "load": "processes of the machine that wanted a core, mean over a minute",
}


class Meter(Protocol):
    """What can say how busy a device is since it was asked last."""

    def read(self) -> dict[str, float]:
        """Some of the values of `UNITS`."""
        ...


class ProcessMeter:
    """What the operating system says of this process and this machine."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._num_cores = len(usable_cores())
        self._cpu_s = self._used_s()
        self._read_at = time.perf_counter()

    def read(self) -> dict[str, float]:
        """CPU time since the last call, memory now, load of the last minute."""
        cpu_s = self._used_s()
        now = time.perf_counter()
        cores = (cpu_s - self._cpu_s) / max(now - self._read_at, 1e-9)
        self._cpu_s = cpu_s
        self._read_at = now
        return {
            "utilisation": min(1.0, cores / self._num_cores),
            "memory_bytes": self._process.memory_info().rss,
            "cpu_cores": cores,
            "load": psutil.getloadavg()[0],
        }

    def _used_s(self) -> float:
        """Seconds of CPU time that all threads of this process have used."""
        times = self._process.cpu_times()
        return times.user + times.system


class GpuMeter:
    """What the driver says of one GPU, and the operating system of this process.

    Args:
        device: One of CUDA. The driver numbers GPUs in its own way, and knows nothing of
            CUDA_VISIBLE_DEVICES: it is asked by the GPU's UUID.

    Raises:
        ValueError: The driver cannot say it, as of a part of a GPU (MIG); or there is none.

    Source: NVIDIA Management Library, nvmlDeviceGetUtilizationRates and nvmlDeviceGetMemoryInfo.
    """

    def __init__(self, device: "torch.device") -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._process = ProcessMeter()
        try:
            pynvml.nvmlInit()
            self._gpu: Any = pynvml.nvmlDeviceGetHandleByUUID(_uuid(device))
            self.read()
        except pynvml.NVMLError as error:
            raise ValueError(f"the driver says nothing of {device}: {error}") from None

    def read(self) -> dict[str, float]:
        """Utilisation over the driver's last interval, memory and power now."""
        nvml: Any = self._nvml
        process = self._process.read()
        return {
            "utilisation": nvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu / 100,
            "memory_bytes": nvml.nvmlDeviceGetMemoryInfo(self._gpu).used,
            "power_w": nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1000,
            "cpu_cores": process["cpu_cores"],
            "load": process["load"],
        }


def _uuid(device: "torch.device") -> str:
    """The GPU's own number, as the driver writes it."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def meter_for(device: "torch.device") -> Meter:
    """What measures this device; a GPU of which the driver says nothing counts as a CPU."""
    if device.type != "cuda":
        return ProcessMeter()
    try:
        return GpuMeter(device)
    except ValueError:
        return ProcessMeter()


class DeviceSampler(AbstractContextManager):
    """Reads a meter at regular intervals within a `with` block, in a thread of its own.

    Args:
        meter: What to read.
        period_s: Seconds between two samples; 0 never samples and starts no thread.
        steps_done: Function that is asked at each sample how far the run is.
        write: Function that gets each row; it is called in the thread.

    Attributes:
        problem: Why it has stopped before its time; "" if it has not.

    Held by: tests/unit/test_device_samples.py
    """

    def __init__(
        self,
        meter: Meter,
        period_s: float,
        steps_done: Callable[[], int],
        write: Callable[[dict[str, float]], object],
    ) -> None:
        self.problem = ""
        self._meter = meter
        self._period_s = period_s
        self._steps_done = steps_done
        self._write = write
        self._recent: list[float] = []  # utilisation, since somebody asked for its mean
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._period_s > 0:
            self._thread = threading.Thread(target=self._sample, name="device samples", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(LAST_SAMPLE_S)

    def utilisation(self) -> float | None:
        """Mean over the samples since the last call; None where there is none."""
        recent = self._recent
        self._recent = []
        return sum(recent) / len(recent) if recent else None

    def _sample(self) -> None:
        while not self._end.wait(self._period_s):
            try:
                self.take()
            # a disk that is full ends the run with the next row of metrics, not here
            except Exception as error:
                self.problem = str(error)
                return

    def take(self) -> None:
        """Take one sample now."""
        values = self._meter.read()
        row = {"step": self._steps_done(), "time_s": round(time.time(), 3)} | values
        self._recent.append(values["utilisation"])
        self._write(row)
