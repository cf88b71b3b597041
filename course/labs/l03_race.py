"""Lesson 03: the open task. How long a small training takes to a given loss, by its settings.

A time is (steps to the loss) * (seconds of a step). The steps are a matter of arithmetic and the
same at each run. Of the seconds only those count in which the processor worked for this process, so
that whoever else uses the machine has next to no part in them; settings are timed in turn, and the
quickest step of each counts.

Held by: tests/unit/test_l03_labs.py
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from course.labs.l03_step import PATIENCE_S, Batches, new_model
from labcode.models import gpt

TARGET = 2.9  # nats a character, on windows that are the same for all settings
MOST_STEPS = 120
EVALUATE_EVERY = 2
LR = 1e-3
FIRST_BATCH = 1000  # another one changes the steps of small batches by some tens
DTYPES = ("float32", "bfloat16", "float16")
OPTIMIZERS = ("for_loop", "foreach", "fused")
ATTENTIONS = ("fused", "math")
SIZES = (4, 8, 16, 32)


CHOICES = {"batch": SIZES, "dtype": DTYPES, "optimizer": OPTIMIZERS, "attention": ATTENTIONS}


@dataclass(frozen=True)
class Settings:
    """How to train. A value that cannot be chosen is told by `fault`, and refused by a `Trainer`.

    Args:
        batch: Windows in a step.
        dtype: Dtype of the matrix products, by autocast.
        optimizer: How AdamW updates the weights.
        attention: `fused` is PyTorch's own choice of a kernel, `math` several plain operations.
    """

    batch: int = 32
    dtype: str = "float32"
    optimizer: str = "for_loop"
    attention: str = "fused"

    @property
    def fault(self) -> str:
        """What is wrong with the first value that cannot be chosen; empty if all can be."""
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                listed = ", ".join(map(str, known))
                return f"{name}={value!r} is not known: choose one of {listed}"
        return ""


BASELINE = Settings()


class Trainer:
    """A small GPT with its optimizer; `step` does one step and says how long it took.

    Args:
        settings: How it trains.
        batches: What it trains on.

    Raises:
        ValueError: A value of the settings is not among those that can be chosen.
    """

    def __init__(self, settings: Settings, batches: Batches) -> None:
        if settings.fault:
            raise ValueError(settings.fault)
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
        """One step of training; the processor's seconds, without those for reading the batch."""
        tokens, targets = self.batches(FIRST_BATCH + self.steps, self.settings.batch)
        backends = [SDPBackend.MATH]
        if self.settings.attention == "fused":
            backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        started = time.process_time()
        with sdpa_kernel(backends):
            self.optimizer.zero_grad()
            self.scaler.scale(self.loss(tokens, targets)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.steps += 1
        return time.process_time() - started


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


def step_seconds(*settings: Settings, rounds: int = 7) -> tuple[float, ...]:
    """Seconds of the processor for the quickest step with each of these settings, done in turn.

    Args:
        settings: Settings to compare; each trains a model of its own.
        rounds: Rounds as `l03_step.median_s` has them.
    """
    batches = Batches()
    trainers = [Trainer(one, batches) for one in settings]
    for trainer in trainers:
        trainer.step()
    found: list[list[float]] = [[] for _ in settings]
    for number in range(rounds):
        for trainer, seconds in zip(trainers, found):
            if number < 3 or sum(seconds) < PATIENCE_S:
                seconds.append(trainer.step())
    return tuple(min(seconds) for seconds in found)


class Race(NamedTuple):
    """How settings compare with BASELINE.

    Args:
        steps: Number of steps to the target; None: it is not reached.
        baseline_steps: Steps of the baseline.
        step_s: Seconds of a step.
        baseline_step_s: Seconds of a step of BASELINE.
        same_batch_s: Seconds of a step of BASELINE with the batch of the settings.
        least_s: Seconds of a step of the quickest that was found with this batch.
    """

    steps: int | None
    baseline_steps: int
    step_s: float
    baseline_step_s: float
    same_batch_s: float
    least_s: float

    @property
    def speedup(self) -> float:
        """How many times as fast as BASELINE the target is reached; 0: it is not."""
        if self.steps is None:
            return 0.0
        return self.baseline_steps * self.baseline_step_s / (self.steps * self.step_s)

    @property
    def saved(self) -> float:
        """The part of a step that the settings save by everything but their batch."""
        return 1 - self.step_s / self.same_batch_s

    @property
    def can_be_saved(self) -> float:
        """The part that the quickest saves."""
        return 1 - self.least_s / self.same_batch_s


def race(
    settings: Settings,
    count_steps: Callable[[Settings], int | None] = steps_to_target,
    seconds: Callable[..., tuple[float, ...]] = step_seconds,
) -> Race:
    """Compare settings with BASELINE, and with others of the same batch.

    Those are BASELINE with this batch, and what the rungs of the lesson make of it. Which of them
    gain depends on the processor, so all are timed in one run.

    Args:
        settings: Settings of the training.
        count_steps: Steps to the target.
        seconds: Seconds of a step, for each of several settings.
    """
    steps = count_steps(settings)
    baseline_steps = count_steps(BASELINE)
    assert baseline_steps is not None, "the baseline does not reach the target"
    same_batch = replace(BASELINE, batch=settings.batch)
    fused = replace(same_batch, optimizer="fused")
    narrow = replace(fused, dtype="bfloat16")
    rivals = (settings, BASELINE, same_batch, fused, narrow)
    different = tuple(dict.fromkeys(rivals))  # the settings may be one of the others
    taken = dict(zip(different, seconds(*different)))
    return Race(
        steps=steps,
        baseline_steps=baseline_steps,
        step_s=taken[settings],
        baseline_step_s=taken[BASELINE],
        same_batch_s=taken[same_batch],
        least_s=min(taken[settings], taken[fused], taken[narrow]),
    )
