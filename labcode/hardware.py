"""Peak speed and memory of the GPUs that the course needs, each with its source; the CPU's name.

A device that is not in the table has no peak here, and no MFU is computed for it: a wrong one is
worse than none. What a device reaches in practice is measured by `train.device_speed`.
"""

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Device:
    """A kind of GPU.

    Args:
        peak_flops_per_s: Dense matrix-product peak by dtype name, without structured sparsity.
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
    "float64": 9.7e12,
}
_HOPPER = {
    "fp8": 1979e12,  # the datasheet's 3958e12 are those of matrices with zeros in a pattern
    "bfloat16": 989e12,
    "float16": 989e12,
    "tf32": 494e12,
    "float32": 67e12,
    "float64": 34e12,
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
    "float64": 81.7e12,
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
        device_name: As the driver reports it.
        dtype: Of the matrix products, such as "bfloat16".

    Returns:
        A fraction of the peak, or None for an unknown device or dtype.
    Source: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    """
    device = find(device_name)
    if device is None or dtype not in device.peak_flops_per_s:
        return None
    return flops_per_s / device.peak_flops_per_s[dtype]
