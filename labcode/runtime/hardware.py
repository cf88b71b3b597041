"""What computes: peak speed and memory of GPUs, each with its source, and what this process may
use of this machine.

A device that is not in the table has no peak here, and no MFU is computed for it: a wrong one is
worse than none. What a device reaches in practice is measured by `measure.device_speed`.
"""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
# Names of the files of a memory cgroup by the version: the limit, what is used, and the beginning
# of the names in memory.stat of what is used by it and by all groups inside it.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_VERSION_2 = ("memory.max", "memory.current", "")


@dataclass(frozen=True)
class Device:
    """A kind of GPU.

    Args:
        peak_flops_per_s: Dense matrix-product peak by dtype name, without structured sparsity: that
            of the tensor cores where they know the dtype.
        memory_bytes: Size of the device memory.
        memory_bytes_per_s: Peak bandwidth of the device memory.
        source: The datasheet that states them.
    """

    peak_flops_per_s: dict[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    source: str


_V100 = {"float16": 125e12, "float32": 15.7e12, "float64": 7.8e12}
# tf32: float32 whose factors the tensor cores round to 10 bits of mantissa
_A100 = {
    "bfloat16": 312e12,
    "float16": 312e12,
    "tf32": 156e12,
    "float32": 19.5e12,
    "float64": 19.5e12,  # with tensor cores; 9.7e12 without
}
_HOPPER = {
    "fp8": 1979e12,  # the datasheet's 3958e12 are those of matrices with zeros in a pattern
    "bfloat16": 989e12,
    "float16": 989e12,
    "tf32": 494e12,
    "float32": 67e12,
    "float64": 67e12,  # with tensor cores; 34e12 without
}

_B200 = {
    "fp8": 4500e12,
    "bfloat16": 2250e12,
    "float16": 2250e12,
    "tf32": 1100e12,
}
_MI300X = {
    "fp8": 2614.9e12,
    "bfloat16": 1307.4e12,
    "float16": 1307.4e12,
    "tf32": 653.7e12,
    "float32": 163.4e12,
    "float64": 163.4e12,  # with matrix cores; 81.7e12 without
}

# Keyed by the name that the driver reports, so that a slower variant of a chip (H100 PCIe) is not
# mistaken for a faster one (H100 SXM).
DEVICES = {
    "Tesla V100-SXM2-16GB": Device(_V100, 16e9, 900e9, "NVIDIA V100 datasheet, 2020"),
    "Tesla V100-SXM2-32GB": Device(_V100, 32e9, 900e9, "NVIDIA V100 datasheet, 2020"),
    "NVIDIA A100-SXM4-40GB": Device(_A100, 40e9, 1555e9, "NVIDIA A100 datasheet, 2021"),
    "NVIDIA A100-SXM4-80GB": Device(_A100, 80e9, 2039e9, "NVIDIA A100 datasheet, 2021"),
    "NVIDIA H100 80GB HBM3": Device(_HOPPER, 80e9, 3.35e12, "NVIDIA H100 datasheet, 2023 (SXM)"),
    "NVIDIA H200": Device(_HOPPER, 141e9, 4.8e12, "NVIDIA H200 datasheet, 2024 (SXM)"),
    "NVIDIA B200": Device(_B200, 180e9, 7.7e12, "NVIDIA HGX B200 datasheet, 2025"),
    "AMD Instinct MI300X": Device(_MI300X, 192e9, 5.3e12, "AMD Instinct MI300X datasheet, 2023"),
}


def find(device_name: str) -> Device | None:
    """The device that the driver calls `device_name`; None if it is not in the table."""
    return DEVICES.get(device_name)


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What this machine's processor is called.

    Args:
        cpuinfo: Where Linux says it; elsewhere, and on ARM, Python is asked.
    """
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def mfu(flops_per_s: float, device_name: str, dtype: str) -> float | None:
    """Model FLOPs utilisation: the share of the peak that goes into the model's own arithmetic.

        MFU = (FLOPs that the model needs, without activation checkpointing) / (seconds * peak)

    Args:
        flops_per_s: Model FLOPs per second on one device.
        device_name: Name as the driver reports it.
        dtype: Dtype of the matrix products, such as "bfloat16".

    Returns:
        A fraction of the peak, or None for an unknown device or dtype.
    Source: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    """
    device = find(device_name)
    if device is None or dtype not in device.peak_flops_per_s:
        return None
    return flops_per_s / device.peak_flops_per_s[dtype]


# ---- what this process may use


def usable_cores() -> frozenset[int]:
    """The numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def gpus_of_driver() -> int:
    """How many GPUs the NVIDIA driver of this machine has; 0 without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()


def memory_bytes() -> int:
    """Memory that the processes of this machine may use together: RAM, or less where a cgroup says
    so, and swap.
    """
    import psutil  # imported late: the doctor says when it is missing

    limits = [limit for limit, _ in _cgroups()]
    return min([psutil.virtual_memory().total, *limits]) + psutil.swap_memory().total


def free_memory_bytes() -> int:
    """RAM that is free on this machine, or in the fullest of this process's cgroups."""
    import psutil

    free = [max(0, limit - used) for limit, used in _cgroups()]
    return min([psutil.virtual_memory().available, *free])


def _cgroups() -> Iterator[tuple[int, int]]:
    """(Limit, bytes in use) of the memory of this process's cgroup and of those around it.

    As a container, a job of SLURM or a systemd service has them. Those that cannot be read are left
    out.
    """
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if not controllers:  # version 2: one tree for everything
            tree = CGROUPS
            names = _VERSION_2
        elif "memory" in controllers.split(","):
            tree = CGROUPS / "memory"
            names = _VERSION_1
        else:
            continue
        limit_name, used_name, prefix = names
        folder = tree / own.strip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(tree):
                continue
            limit = _number_in(group / limit_name)
            if limit is not None:
                used = _number_in(group / used_name) or 0
                yield limit, used - _given_back(group / "memory.stat", prefix)


def _number_in(file: Path) -> int | None:
    """The number in a file, if there is one; "max" is none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _given_back(stat: Path, prefix: str) -> int:
    """Bytes of files that the kernel keeps in memory while nobody else needs it."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(" ", 1) for line in lines if " " in line)
    return sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
