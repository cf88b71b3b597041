"""A training that is much slower than it has to be, for the open end of lesson 02.

Everything that it does is counted, so that a faster version can be judged on a busy machine.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import record_function

from course.labs.l02_weather import SIZE, open_counted

HIDDEN = 64
LEARNING_RATE = 0.01


class Job:
    """A small network that learns six hours of weather, and the steps that a training is made of.

    Args:
        path: The weather file.

    Attributes:
        counts: How often each method was called, and how many chunks they have read ("chunks").

    Held by: tests/unit/test_l02_labs.py
    """

    def __init__(self, path: str | Path) -> None:
        self._arrays, self._store = open_counted(path)
        self.counts: Counter[str] = Counter()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._model = nn.Sequential(nn.Conv2d(4, HIDDEN, 3, padding=1), nn.GELU())
            self._model.append(nn.Conv2d(HIDDEN, 4, 3, padding=1))
        self._optimizer = torch.optim.SGD(self._model.parameters(), LEARNING_RATE)

    def place(self, step: int) -> tuple[int, int]:
        """(First row, first column) of the crop of a step."""
        generator = np.random.default_rng(step)
        num_rows, num_columns = self._arrays[0].shape[1:]
        return (
            int(generator.integers(num_rows - SIZE + 1)),
            int(generator.integers(num_columns - SIZE + 1)),
        )

    def read_map(self, time: int) -> torch.Tensor:
        """The whole map at a time, [C, Y, X]."""
        with self._counted("read_map"):
            return self._read(time, slice(None), slice(None))

    def read_crop(self, time: int, place: tuple[int, int]) -> torch.Tensor:
        """A part of the map at a time, [C, 60, 60]."""
        top, left = place
        with self._counted("read_crop"):
            return self._read(time, slice(top, top + SIZE), slice(left, left + SIZE))

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and deviation of each variable, from four maps of the file: two of [C, 1, 1]."""
        with self._counted("statistics"):
            maps = [self._read(time, slice(None), slice(None)) for time in range(4)]
            stacked = torch.stack(maps)
            mean = stacked.mean(dim=(0, 2, 3))
            return mean[:, None, None], stacked.std(dim=(0, 2, 3))[:, None, None]

    def train_on(self, state: torch.Tensor, target: torch.Tensor) -> float:
        """One step with a crop and what follows it, both normalised: the loss before it."""
        with self._counted("train_on"):
            self._optimizer.zero_grad()
            loss = (self._model(state[None]) - target[None]).square().mean()
            loss.backward()
            self._optimizer.step()
            return loss.item()

    def weights_are_finite(self) -> bool:
        """Whether no weight has become NaN or infinite."""
        with self._counted("weights_are_finite"):
            return all(bool(weight.isfinite().all()) for weight in self._model.parameters())

    def validate(self, mean: torch.Tensor, std: torch.Tensor) -> float:
        """The loss on the whole maps of three times at the end of the file."""
        with self._counted("validate"), torch.no_grad():
            last = self._arrays[0].shape[0] - 1
            losses = []
            for time in range(last - 3, last):
                state, target = self._read_pair(time, mean, std)
                losses.append((self._model(state[None]) - target[None]).square().mean())
            return torch.stack(losses).mean().item()

    def weights(self) -> torch.Tensor:
        """All weights in one row."""
        return nn.utils.parameters_to_vector(self._model.parameters()).detach()

    def _read_pair(
        self, time: int, mean: torch.Tensor, std: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        everything = slice(None)
        state = self._read(time, everything, everything)
        target = self._read(time + 1, everything, everything)
        return (state - mean) / std, (target - mean) / std

    def _read(self, time: int, rows: slice, columns: slice) -> torch.Tensor:
        fields: list[Any] = [array[time, rows, columns] for array in self._arrays]
        return torch.from_numpy(np.stack(fields))

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        self.counts[name] += 1
        before = len(self._store.chunks)
        with record_function(name):
            yield
        self.counts["chunks"] += len(self._store.chunks) - before
