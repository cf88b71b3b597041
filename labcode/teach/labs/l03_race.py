"""Lesson 03: the open task. How long a small training takes to a given loss, by its settings.

A time is (steps to the loss) * (median seconds of a step). The steps are a matter of arithmetic and
the same at each run; only the seconds are those of a clock, so two settings are timed in turn.

Held by: tests/unit/test_l03_labs.py
"""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from labcode.models import gpt
from labcode.teach.labs.l03_step import Batches, new_model

TARGET = 2.9  # nats a character, on windows that are the same for all settings
MOST_STEPS = 120
EVALUATE_EVERY = 2
LR = 1e-3
FIRST_BATCH = 1000  # another one changes the steps of small batches by some tens
DTYPES = ("float32", "bfloat16", "float16")
OPTIMIZERS = ("for_loop", "foreach", "fused")
ATTENTIONS = ("fused", "math")
SIZES = (4, 8, 16, 32)


@dataclass(frozen=True)
class Settings:
    """How to train.

    Args:
        batch: Windows in a step.
        dtype: Of the matrix products, by autocast.
        optimizer: How AdamW updates the weights.
        attention: `fused` is PyTorch's own choice of a kernel, `math` several plain operations.

    Raises:
        ValueError: A value that is not among those that can be chosen.
    """

    batch: int = 32
    dtype: str = "float32"
    optimizer: str = "for_loop"
    attention: str = "fused"

    def __post_init__(self) -> None:
        choices = {
            "batch": SIZES,
            "dtype": DTYPES,
            "optimizer": OPTIMIZERS,
            "attention": ATTENTIONS,
        }
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                listed = ", ".join(map(str, known))
                raise ValueError(f"{name}={value!r} is not known: choose one of {listed}")


BASELINE = Settings()


class Trainer:
    """A small GPT with its optimizer; `step` does one step and returns its seconds.

    Args:
        settings: How it trains.
        batches: What it trains on.
    """

    def __init__(self, settings: Settings, batches: Batches) -> None:
        self.settings = settings
        self.batches = batches
        self.model = new_model()
        fused = settings.optimizer == "fused"
        foreach = settings.optimizer == "foreach"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, fused=fused, foreach=foreach
        )
        self.scaler = torch.amp.GradScaler("cpu", enabled=settings.dtype == "float16")
        self.steps = 0

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss, in the dtype of the settings."""
        dtype = getattr(torch, self.settings.dtype)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            return gpt.loss(self.model(tokens), targets)

    def step(self) -> float:
        """One step of training; its seconds, without those for reading the batch."""
        tokens, targets = self.batches(FIRST_BATCH + self.steps, self.settings.batch)
        backends = [SDPBackend.MATH]
        if self.settings.attention == "fused":
            backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        started = time.perf_counter()
        with sdpa_kernel(backends):
            self.optimizer.zero_grad()
            self.scaler.scale(self.loss(tokens, targets)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.steps += 1
        return time.perf_counter() - started


@functools.cache
def steps_to_target(settings: Settings) -> int | None:
    """Steps until the loss on fixed windows is at most TARGET, twice in a row.

    Returns:
        None: not within MOST_STEPS.
    """
    batches = Batches()
    held_out = batches(10**6, 16)
    trainer = Trainer(settings, batches)
    times_below = 0
    while trainer.steps < MOST_STEPS:
        trainer.step()
        if trainer.steps % EVALUATE_EVERY == 0:
            with torch.no_grad():
                found = trainer.loss(*held_out).item()
            times_below = times_below + 1 if found <= TARGET else 0
            if times_below == 2:
                return trainer.steps
    return None


def step_seconds(first: Settings, second: Settings, rounds: int = 7) -> tuple[float, float]:
    """Median seconds of a step with either of two settings, measured in turn."""
    batches = Batches()
    trainers = (Trainer(first, batches), Trainer(second, batches))
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for trainer, seconds in zip(trainers, found):
            taken = trainer.step()
            if number:
                seconds.append(taken)
    return statistics.median(found[0]), statistics.median(found[1])


def speedup(
    settings: Settings, count_steps: Callable[[Settings], int | None] = steps_to_target
) -> float:
    """How many times as fast as BASELINE a training reaches the target; 0: it does not.

    Args:
        settings: Of the training.
        count_steps: Steps to the target.
    """
    steps = count_steps(settings)
    baseline_steps = count_steps(BASELINE)
    if steps is None or baseline_steps is None:
        return 0.0
    seconds, baseline_seconds = step_seconds(settings, BASELINE)
    return baseline_steps * baseline_seconds / (steps * seconds)
