"""GPUs and clusters as data: what a plan has to know of them, each number with its source.

    hardware_data/gpus.toml        kinds of GPU: peaks, and what programs reach of them
    hardware_data/clusters.toml    how many make a node, and the links inside and between nodes

A file of your own may hold both, a kind of GPU under [gpu.NAME]; ten lines are enough:

    [mine]
    gpu = "a100-80gb"
    gpus_per_node = 4
    inside_GB_per_s = 220
    inside_latency_us = 6
    between_GB_per_s = 12.5
    between_latency_us = 7
    source = "two 200 Gb/s adapters a node; nccl-tests of one node"

What a file does not say stays unknown: nothing is filled in, and an estimate that needs it is
refused with the name of the missing number.

Held by: tests/unit/test_cluster_data.py
"""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labcode.perf import alpha_beta
from labcode.perf.alpha_beta import Link
from labcode.perf.transformer import HARDWARE_DATA
from labcode.runtime import hardware
from labcode.runtime.suggest import unknown
from labcode.runtime.units import GIB

GPUS = HARDWARE_DATA / "gpus.toml"
CLUSTERS = HARDWARE_DATA / "clusters.toml"

GPU_FIELDS = (
    "driver_name",
    "peak_tflops",
    "memory_GiB",
    "memory_TB_per_s",
    "matmul_share",
    "layer_share",
    "memory_share",
    "attention_share",
    "multiprocessors",
    "source",
)
NEEDED = (
    "gpu",
    "gpus_per_node",
    "inside_GB_per_s",
    "inside_latency_us",
    "between_GB_per_s",
    "between_latency_us",
    "source",
)
CLUSTER_FIELDS = (*NEEDED, "launch_us", "host_computes", "once_us", "collectives")


# eq=False: a GPU and a cluster are compared, and looked up in caches, as the objects they are
@dataclass(frozen=True, eq=False)
class Gpu:
    """A kind of GPU, or another device.

    Args:
        name: Name of its table, such as "h100".
        peak_flops_per_s: FLOP/s from the datasheet, by dtype.
        memory_bytes: What a process can have of its memory.
        memory_bytes_per_s: Bytes per second from the datasheet.
        matmul_share: By dtype, what a large matrix product reaches of the peak.
        memory_share: What an operation that computes little reaches of the memory's bandwidth.
        attention_share: By kernel, what a fused attention reaches of the peak; as KERNEL_causal,
            where that was measured apart, with half of the square.
        multiprocessors: How many tiles of a product it computes at a time; None: unknown.
        source: Source of the numbers.
        layer_share: By dtype, what a linear layer reaches of the peak: less than the best product.
    """

    name: str
    peak_flops_per_s: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    matmul_share: Mapping[str, float]
    memory_share: float | None
    attention_share: Mapping[str, float]
    multiprocessors: int | None
    source: str
    layer_share: Mapping[str, float] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """FLOP/s of the datasheet.

        Raises:
            ValueError: A dtype without a peak.
        """
        return self._known("peak_tflops", self.peak_flops_per_s, dtype)

    def matmul_flops_per_s(self, dtype: str) -> float:
        """FLOP/s that a large matrix product reaches.

        Raises:
            ValueError: A dtype of which nobody has measured it.
        """
        return self.peak(dtype) * self._known("matmul_share", self.matmul_share, dtype)

    def layer_flops_per_s(self, dtype: str) -> float:
        """FLOP/s that a wide linear layer reaches, on some thousand tokens.

        Raises:
            ValueError: A dtype of which nobody has measured it.
        """
        return self.peak(dtype) * self._known("layer_share", self.layer_share, dtype)

    def attention_flops_per_s(self, kernel: str, dtype: str) -> float:
        """FLOP/s that a fused attention reaches.

        Raises:
            ValueError: A kernel of which nobody has measured it.
        """
        return self.peak(dtype) * self._known("attention_share", self.attention_share, kernel)

    @property
    def stream_bytes_per_s(self) -> float:
        """Bytes/s that an operation reads and writes which computes little.

        Raises:
            ValueError: Nobody has measured it.
        """
        if self.memory_share is None:
            raise ValueError(
                f"GPU {self.name}: memory_share is unknown; measure it, and give it in a file of "
                "your own"
            )
        return self.memory_bytes_per_s * self.memory_share

    def _known(self, what: str, numbers: Mapping[str, float], key: str) -> float:
        if key not in numbers:
            there = ", ".join(numbers) if numbers else "none"
            raise ValueError(
                f"GPU {self.name}: {what} of {key} is unknown (known: {there}); choose one of "
                "these, or measure it and give it in a file of your own"
            )
        return numbers[key]


@dataclass(frozen=True, eq=False)
class Cluster:
    """Nodes full of GPUs; ranks fill them in order.

    Args:
        name: Name of its table.
        gpu: What a node is full of.
        gpus_per_node: How many.
        inside: A link of a ring inside a node, as a collective sees it.
        between: A link between nodes: what each GPU has of the node's adapters.
        source: Source of the numbers.
        launch_s: Seconds that the host needs for one operation; None: `layer_time.LAUNCH_S`.
        host_computes: Whether the host is the device, as on a CPU, so that nothing hides a launch.
        once_s: Seconds of the host once a step, whatever its size: data, clipping, the update.
        collectives: {collective: its own link inside a node}, where each was measured.
    """

    name: str
    gpu: Gpu
    gpus_per_node: int
    inside: Link
    between: Link
    source: str
    launch_s: float | None = None
    host_computes: bool = False
    once_s: float = 0.0
    collectives: Mapping[str, Link] = field(default_factory=dict)


def cluster_names() -> list[str]:
    """The clusters that ship with the course."""
    return list(_table(CLUSTERS))


def gpu_names() -> list[str]:
    """The kinds of GPU that ship with the course."""
    return list(_table(GPUS))


@functools.cache
def load_gpu(name: str) -> Gpu:
    """A kind of GPU from hardware_data/gpus.toml.

    Raises:
        ValueError: An unknown name.
    """
    if name not in _table(GPUS):
        raise ValueError(unknown("GPU", name, gpu_names()))
    return _gpu(name, _table(GPUS)[name], str(GPUS.name))


def load_cluster(name: str) -> Cluster:
    """A cluster by name, or from a file of your own (its name ends in .toml).

    Raises:
        ValueError: An unknown name, or a file that is not as described above.
    """
    if name.endswith(".toml"):
        return _from_file(Path(name))
    if name not in _table(CLUSTERS):
        raise ValueError(
            unknown("cluster", name, cluster_names()) + ", or a file of your own: my.toml"
        )
    return _shipped(name)


@functools.cache
def _shipped(name: str) -> Cluster:
    return _cluster(name, _table(CLUSTERS)[name], {}, CLUSTERS.name)


@functools.cache
def _table(path: Path) -> dict[str, dict[str, Any]]:
    return tomllib.loads(path.read_text())


def _from_file(path: Path) -> Cluster:
    try:
        found = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}: write one, or name a cluster") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from None
    gpus = found.pop("gpu", {})
    if len(found) != 1:
        raise ValueError(
            f"{path} has {len(found)} clusters ({', '.join(found) or 'none'}): give one table, "
            "[NAME], and kinds of GPU as [gpu.NAME]"
        )
    ((name, table),) = found.items()
    own = {gpu: _gpu(gpu, numbers, str(path)) for gpu, numbers in gpus.items()}
    return _cluster(name, table, own, str(path))


def _cluster(name: str, table: dict[str, Any], own: Mapping[str, Gpu], file: str) -> Cluster:
    _check_keys(table, CLUSTER_FIELDS, f"{file}, [{name}]")
    missing = [key for key in NEEDED if key not in table]
    if missing:
        raise ValueError(f"{file}, [{name}] needs {', '.join(missing)}: add what you know of it")
    gpu = own[table["gpu"]] if table["gpu"] in own else load_gpu(table["gpu"])
    launch_us = table.get("launch_us")
    collectives = {}
    for collective, numbers in table.get("collectives", {}).items():
        if collective not in alpha_beta.COLLECTIVES:
            raise ValueError(
                f"{file}, [{name}]: " + unknown("collective", collective, alpha_beta.COLLECTIVES)
            )
        collectives[collective] = Link(numbers["latency_us"] * 1e-6, numbers["GB_per_s"] * 1e9)
    return Cluster(
        name=name,
        gpu=gpu,
        gpus_per_node=table["gpus_per_node"],
        inside=Link(table["inside_latency_us"] * 1e-6, table["inside_GB_per_s"] * 1e9),
        between=Link(table["between_latency_us"] * 1e-6, table["between_GB_per_s"] * 1e9),
        source=table["source"],
        launch_s=None if launch_us is None else launch_us * 1e-6,
        host_computes=table.get("host_computes", False),
        once_s=table.get("once_us", 0.0) * 1e-6,
        collectives=collectives,
    )


def _gpu(name: str, table: dict[str, Any], file: str) -> Gpu:
    where = f"{file}, GPU {name}"
    _check_keys(table, GPU_FIELDS, where)
    peaks: dict[str, float] = {}
    memory_bytes = None
    memory_bytes_per_s = None
    driver_name = table.get("driver_name")
    if driver_name is not None:
        device = hardware.find(driver_name)
        if device is None:
            raise ValueError(f"{where}: " + unknown("driver_name", driver_name, hardware.DEVICES))
        peaks |= device.peak_flops_per_s
        memory_bytes = device.memory_bytes
        memory_bytes_per_s = device.memory_bytes_per_s
    for dtype, tflops in table.get("peak_tflops", {}).items():
        peaks[dtype] = tflops * 1e12
    if "memory_GiB" in table:
        memory_bytes = table["memory_GiB"] * GIB
    if "memory_TB_per_s" in table:
        memory_bytes_per_s = table["memory_TB_per_s"] * 1e12
    if memory_bytes is None or memory_bytes_per_s is None or not peaks:
        raise ValueError(
            f"{where} needs driver_name, or peak_tflops, memory_GiB and memory_TB_per_s"
        )
    return Gpu(
        name=name,
        peak_flops_per_s=peaks,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        matmul_share=table.get("matmul_share", {}),
        memory_share=table.get("memory_share"),
        attention_share=table.get("attention_share", {}),
        multiprocessors=table.get("multiprocessors"),
        source=table.get("source", "not given"),
        layer_share=table.get("layer_share", {}),
    )


def _check_keys(table: Mapping[str, object], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise ValueError(f"{where}: " + unknown("field", key, known, quoted=False))
