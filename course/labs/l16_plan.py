"""Lesson 16: models and budgets, and how a choice is judged: bytes and seconds by formula."""

from collections.abc import Iterator
from dataclasses import dataclass

from course.labs.l16_limited import Settings
from labcode.config import GPTConfig
from labcode.perf.training_memory import training_memory

FORWARD = 2.0  # FLOPs for each parameter and token; backward takes twice as many
MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model that has to fit.

    Args:
        about: Description in words.
        model: Shape of the model.
        global_batch: Samples of a step, which must not change.
        room_bytes: Bytes for tensors.
        flops_per_s: {dtype: what the device reaches in products of it}.
        launch_s: What each micro-batch costs beyond its products.
    """

    about: str
    model: GPTConfig
    global_batch: int
    room_bytes: float
    flops_per_s: dict[str, float]
    launch_s: float


_SMALL = GPTConfig(vocab_size=512, context_length=128, num_layers=6, num_heads=4, hidden_size=128)
_GPT2 = GPTConfig(
    vocab_size=50304, context_length=1024, num_layers=12, num_heads=12, hidden_size=768
)
_WIDE = GPTConfig(
    vocab_size=32000, context_length=2048, num_layers=24, num_heads=16, hidden_size=2048
)
_LONG = GPTConfig(
    vocab_size=32000, context_length=16384, num_layers=24, num_heads=16, hidden_size=2048
)
_SLOW_BF16 = {"float32": 60e9, "bfloat16": 20e9}
_FAST_BF16 = {"float32": 60e12, "bfloat16": 400e12}
_OLD_GPU = {"float32": 14e12, "bfloat16": 7e12}

CASES = (
    Case("a small GPT on this machine", _SMALL, 16, 60 * MIB, _SLOW_BF16, 0.010),
    Case("the same, where each micro-batch costs more", _SMALL, 16, 42 * MIB, _SLOW_BF16, 0.060),
    Case("GPT-2 on a GPU with 24 GiB", _GPT2, 64, 22 * GIB, _FAST_BF16, 0.008),
    Case("GPT-2 where bfloat16 is slow", _GPT2, 64, 15 * GIB, _OLD_GPU, 0.008),
    Case("1.3B on a GPU with 80 GiB", _WIDE, 32, 76 * GIB, _FAST_BF16, 0.015),
    Case("1.3B with 16,384 tokens, 48 GiB", _LONG, 8, 45 * GIB, _FAST_BF16, 0.015),
)


def candidates(case: Case) -> Iterator[Settings]:
    """All settings that keep the global batch."""
    for micro_batch in range(1, case.global_batch + 1):
        if case.global_batch % micro_batch:
            continue
        for checkpointing in ("none", "full"):
            for dtype in case.flops_per_s:
                count = case.global_batch // micro_batch
                yield Settings(micro_batch, count, checkpointing, dtype)


def peak_bytes(case: Case, settings: Settings) -> float:
    """The most bytes within a step, by `perf.training_memory`."""
    return training_memory(
        case.model,
        micro_batch=settings.micro_batch,
        num_micro_batches=settings.num_micro_batches,
        dtype=settings.dtype,
        activation_checkpointing=settings.activation_checkpointing,
        data_parallel="none",
    ).total


def fits(case: Case, settings: Settings) -> bool:
    """Whether the peak is within the room."""
    return peak_bytes(case, settings) <= case.room_bytes


def step_s(case: Case, settings: Settings) -> float:
    """Seconds of a step: three forwards' worth of products, four with checkpointing, and launches.

    Source: 6 FLOPs for each parameter and token, Kaplan et al. 2020 (arXiv:2001.08361); one more
        forward, Korthikanti et al. 2022 (arXiv:2205.05198).
    """
    tokens = case.global_batch * case.model.context_length
    forwards = 4 if settings.activation_checkpointing == "full" else 3
    flops = forwards * FORWARD * case.model.num_parameters * tokens
    products_s = flops / case.flops_per_s[settings.dtype]
    return products_s + settings.num_micro_batches * case.launch_s


def best(case: Case) -> Settings:
    """The fastest settings that fit.

    Raises:
        ValueError: Nothing fits.
    """
    fitting = [settings for settings in candidates(case) if fits(case, settings)]
    if not fitting:
        raise ValueError(f"{case.about}: nothing fits in {case.room_bytes / MIB:.0f} MiB")
    return min(fitting, key=lambda settings: step_s(case, settings))
