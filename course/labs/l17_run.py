"""Lesson 17: a training small enough to be killed a hundred times, and its checkpoints.

    training = Training()
    loss = training.step()        # dropout draws from torch's generator, a batch from `batches`
    write(folder, 1, {"model": training.model.state_dict(), ...})
    state = read(newest)          # DamagedError unless it is as it was written

Held by: tests/unit/test_l17_labs.py
"""

import hashlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labcode.runtime.files import sync_folder

CHECKSUMS = "checksums.json"
STATE = "state.pt"


class DamagedError(ValueError):
    """A checkpoint is not as it was written."""


class Batches:
    """Samples in a random order that its seed decides; `position` is how many were taken."""

    def __init__(self, seed: int, size: int) -> None:
        self.order = torch.randperm(512, generator=torch.Generator().manual_seed(seed))
        self.size = size
        self.position = 0

    def take(self) -> torch.Tensor:
        """The next batch, [size, 8]."""
        first = self.position % len(self.order)
        numbers = self.order[first : first + self.size]
        self.position += self.size
        return torch.sin(numbers[:, None] * torch.arange(1, 9) * 0.37)


class Training:
    """A model with dropout, AdamW, and batches in a random order: all that a large run has."""

    def __init__(self) -> None:
        torch.manual_seed(17)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.batches = Batches(seed=3, size=16)

    def step(self) -> float:
        """One step; returns its loss."""
        before_step(self)
        batch = self.batches.take()
        loss = (self.model(batch) - batch.flip(1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def before_step(training: Training) -> None:
    """Called at the begin of each step; the check of an exercise puts its own here."""


def write(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> None:
    """Write a checkpoint, whole or not at all, and keep the newest ones.

    Args:
        folder: Folder of all checkpoints.
        step: Steps done.
        state: What `torch.save` can write.
        keep: How many stay.
    """
    content = io.BytesIO()
    torch.save(state, content)
    save(folder, step, {STATE: content.getvalue()}, keep)


def save(folder: Path, step: int, files: dict[str, bytes], keep: int) -> None:
    """Write a checkpoint like `write`, from bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:08d}"
    partial = final.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    checksums = {}
    for name, content in files.items():
        _write_synced(partial / name, content)
        checksums[name] = hashlib.sha256(content).hexdigest()
    _write_synced(partial / CHECKSUMS, json.dumps(checksums).encode())
    sync_folder(partial)
    shutil.rmtree(final, ignore_errors=True)  # damaged: else the run had resumed from it
    os.replace(partial, final)
    sync_folder(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def checkpoints(folder: Path) -> list[Path]:
    """The folders that bear the name of a checkpoint, the oldest first."""
    found = []
    for path in folder.glob("step-*"):
        if path.name.removeprefix("step-").isdigit():
            found.append(path)
    return sorted(found)


def read(path: Path) -> dict[str, Any]:
    """The state that `write` was given.

    Raises:
        DamagedError: A file is missing, or not as it was written.
    """
    damage = damage_of(path)
    if damage:
        raise DamagedError(f"{path.name}: {damage}")
    return torch.load(path / STATE, weights_only=True)


def damage_of(path: Path) -> str:
    """What is wrong with a checkpoint; "" if nothing is."""
    try:
        checksums = json.loads((path / CHECKSUMS).read_text())
    except (OSError, ValueError):
        return f"there is no {CHECKSUMS} that can be read"
    for name, expected in checksums.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        found = hashlib.sha256((path / name).read_bytes()).hexdigest()
        if found != expected:
            return f"{name} is not as it was written: its checksum differs"
    return ""
