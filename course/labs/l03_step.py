"""Lesson 03: a small GPT, its batches, and how a step of it is counted and timed.

Held by: tests/unit/test_l03_labs.py
"""

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labcode.config import GPTConfig, TextData, ViTConfig
from labcode.data import text
from labcode.models.gpt import GPT
from labcode.models.vit import ViT

CONTEXT_LENGTH = 64
CHARACTERS = 83  # of the text that the course ships
NUM_STEPS = 32  # of the trainings that the lesson compares
# in the four epochs of runs of NERSC's README, by workers: a ViT on one A100, 16 samples in a step
NERSC_BY_WORKERS = {
    0: (8.34, 9.31, 8.85, 8.81),
    4: (12.24, 12.51, 12.58, 12.58),
    8: (10.39, 12.00, 11.83, 12.06),
    16: (7.77, 10.84, 10.80, 10.63),
}
# in the last epoch
NERSC_SAMPLES_PER_S = {
    "baseline": NERSC_BY_WORKERS[0][-1],
    "4 data workers": NERSC_BY_WORKERS[4][-1],
    "DALI": 13.19,
    "bfloat16": 53.21,
    "fused Adam": 53.31,
    "torch.compile": 54.98,
}
NERSC_WITHOUT_TF32 = 10.08  # the rung DALI with NVIDIA_TF32_OVERRIDE=0
# its model (config/ViT.yaml); 4,050 patches
NERSC_VIT = ViTConfig(
    num_variables=20,
    num_forcings=0,
    lat=360,
    lon=720,
    patch_size=8,
    num_layers=12,
    num_heads=8,
    hidden_size=384,
)
ON_A_GPU = Path(__file__).resolve().parents[2] / "labcode" / "assets" / "on_a_gpu.json"
NO_WORK = ("profiler", "_local_scalar_dense", "lift_fresh", "detach", "alias")


def config(**changes: Any) -> GPTConfig:
    """The GPT of this lesson: 2 layers, 256 features, 1.6 million parameters.

    Args:
        changes: Fields that are to differ.
    """
    sizes: dict[str, Any] = {
        "vocab_size": CHARACTERS,
        "context_length": CONTEXT_LENGTH,
        "num_layers": 2,
        "num_heads": 4,
        "hidden_size": 256,
    }
    sizes.update(changes)
    return GPTConfig(**sizes)


def new_model(seed: int = 0, **changes: Any) -> GPT:
    """A GPT with the same weights at each call.

    Args:
        seed: Seed of the weights.
        changes: Fields of its config that are to differ.
    """
    torch.manual_seed(seed)
    return GPT(config(**changes))


def narrow_model() -> GPT:
    """The same GPT with half its width, about a quarter of its FLOPs."""
    return new_model(hidden_size=128)


def autocast(dtype: torch.dtype) -> torch.autocast:
    """The block in which products on the CPU have this dtype."""
    return torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)


def nersc_forward() -> torch.Tensor:
    """A forward of `NERSC_VIT` for one sample, on tensors without memory (device "meta")."""
    with torch.device("meta"):
        model = ViT(NERSC_VIT)
        assert NERSC_VIT.num_variables and NERSC_VIT.lat and NERSC_VIT.lon
        x = torch.empty(1, NERSC_VIT.num_variables, NERSC_VIT.lat, NERSC_VIT.lon)
        return model(x)


class Batches:
    """Windows of Shakespeare's characters, the same at each call with the same number."""

    def __init__(self) -> None:
        self._windows = text.load(TextData(), CONTEXT_LENGTH).train

    @property
    def frequencies_loss(self) -> float:
        """The loss of who knows how frequent each character is, and no more."""
        return self._windows.unigram_entropy()

    def __call__(self, step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets of a step, each [size, CONTEXT_LENGTH] int64."""
        generator = np.random.default_rng(step)
        return self._windows[generator.integers(len(self._windows), size=size)]


def recorded(part: str) -> tuple[dict[str, Any], Any]:
    """(the device, the results) of a part that `benchmarks/on_a_gpu.py` has measured on a GPU."""
    record = json.loads(ON_A_GPU.read_text(encoding="utf-8"))[part]
    return record["on"], record["results"]


# ---- counting


class _Operations(TorchDispatchMode):
    """Counts what reaches the kernels of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func).split(".")
        if name[0] not in NO_WORK and name[1] not in NO_WORK:
            self.found[name[1]] += 1
        return func(*args, **(kwargs or {}))


def operations(work: Callable[[], object]) -> Counter[str]:
    """How often some work calls each operation of PyTorch, by its name.

    On a GPU most of them launch one kernel. Those that only read a number or make a view of
    nothing new (`detach`) do not count.

    Args:
        work: What to do.
    """
    with _Operations() as counted:
        work()
    return counted.found


# ---- timing


PATIENCE_S = 5.0  # for a piece of work, unless three rounds take longer: 16 bits without a unit do


def median_s(works: Mapping[str, Callable[[], object]], rounds: int = 9) -> dict[str, float]:
    """Median seconds of several pieces of work, done in turn.

    So a neighbour who keeps the machine busy for a while slows all of them. One round before does
    not count.

    Args:
        works: `{"label": what to do}`.
        rounds: That count; what has taken PATIENCE_S gets only three.
    """
    found: dict[str, list[float]] = {label: [] for label in works}
    for number in range(rounds + 1):
        for label, work in works.items():
            if number > 3 and sum(found[label]) > PATIENCE_S:
                continue
            taken = seconds_of(work)
            if number:
                found[label].append(taken)
    return {label: statistics.median(times) for label, times in found.items()}


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of some work, done once."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
