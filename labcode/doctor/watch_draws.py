"""Which random numbers a loader's augmentation draws: those of another worker or rank?

A generator's state says all that it will draw. It is looked at before and after each batch, in the
process that reads it: if it has moved, the batch has drawn, and what it has drawn is known by the
state before. Two workers that draw from one state draw the same numbers.

PyTorch seeds worker w with b + w, where each rank draws b from its global generator: ranks that all
called `torch.manual_seed(0)` have the same b. A fixed seed in `worker_init_fn` makes workers
of one rank alike as well, and a generator that the dataset keeps is copied to all of them.

Held by: tests/ranks/test_doctor_watch.py::test_the_doctor_names_exactly_the_bug
"""

import array
import random
import zlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

NOTED_BATCHES = 16  # of each worker
NOTED_GENERATORS = 6
OWN_KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


class Draws:
    """Observes how the batches of a DataLoader are made, in its workers or in this process.

    Args:
        loader: Loader of a dataset with `__getitem__`. Its `collate_fn` and `worker_init_fn` are to
            be replaced by `collate` and `begin_worker`.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._collate = loader.collate_fn
        self._begin_worker = loader.worker_init_fn
        self._dataset = loader.dataset
        self._in_workers = loader.num_workers > 0
        self._before: list[int] | None = None
        size = (max(1, loader.num_workers), NOTED_BATCHES, NOTED_GENERATORS)
        self._notes = torch.zeros(size, dtype=torch.int64)
        if self._in_workers:
            self._notes.share_memory_()

    def begin_worker(self, number: int) -> None:
        """A worker process begins."""
        if self._begin_worker is not None:
            self._begin_worker(number)
        self._before = _states(self._dataset)

    def begin_batch(self, number: int) -> None:
        """This process is about to ask for a batch.

        The first one is left out where no worker reads it: the order of the samples is drawn then.
        """
        if not self._in_workers and not self._is_full(0):
            self._before = _states(self._dataset) if number else None

    def collate(self, samples: Any) -> Any:
        """The samples of a batch are there."""
        self._note()
        return self._collate(samples)

    def _note(self) -> None:
        worker = get_worker_info()
        row = worker.id if worker else 0
        if self._before is None or self._is_full(row):
            return
        after = _states(self._dataset)
        moved = [one for one, other in zip(self._before, after) if one != other]
        self._before = after
        if moved:
            place = int(self._notes[row].any(1).sum())
            self._notes[row, place, : len(moved)] = torch.tensor(moved)

    def _is_full(self, row: int) -> bool:
        return bool(self._notes[row, -1].any())

    def plain(self) -> list[list[list[int]]]:
        """[worker][batch that drew]: the states from which it drew."""
        found = []
        for batches in self._notes.tolist():
            noted = [list(filter(None, states)) for states in batches]
            found.append([states for states in noted if states])
        return found


def draws_of(loader: Any) -> Draws | None:
    """The observer; None where there is nothing to see, or it could not be told.

    Datasets that are streams may draw alike on all ranks on purpose, to agree on an order of files.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return Draws(loader)


def _states(dataset: Any) -> list[int]:
    """A number for the state of each generator that a dataset may draw from."""
    generators = [random, np.random, torch, *_own_generators(dataset)][:NOTED_GENERATORS]
    found = []
    for place, generator in enumerate(generators, start=1):
        found.append((place << 32) | zlib.crc32(_state(generator)))
    return found


def _own_generators(dataset: Any) -> list[Any]:
    """Those that a dataset, or something that it holds, keeps."""
    found = []
    for value in getattr(dataset, "__dict__", {}).values():
        if _has_state(value):
            found.append(value)
        elif not isinstance(value, torch.Tensor):
            held = getattr(value, "__dict__", {}).values()
            found.extend(filter(_has_state, held))
    return found


def _has_state(value: Any) -> bool:
    return isinstance(value, OWN_KINDS) and not isinstance(value, random.SystemRandom)


def _state(generator: Any) -> bytes:
    if generator is torch:
        return torch.get_rng_state().numpy().tobytes()
    if isinstance(generator, torch.Generator):
        return generator.get_state().cpu().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state).encode()
    if generator is np.random or isinstance(generator, np.random.RandomState):
        _, key, place, *_ = generator.get_state()
        return np.asarray(key).tobytes() + str(place).encode()
    return array.array("I", generator.getstate()[1]).tobytes()
