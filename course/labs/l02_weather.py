"""What lesson 02 reads: small weather files of two chunkings, crops of them, and a counting store.

The files are made of the ERA5 sample of the course on a grid of 1 degree, and compressed, so that a
chunk costs what it costs elsewhere: it has to be unpacked as a whole.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from zarr.storage import LocalStore, WrapperStore

from labcode.data.generate import VARIABLES, generate

DEGREES = 1.0
STATE_BYTES = 4 * len(VARIABLES) * 180 * 360  # of one time
SIZE = 60  # rows and columns of a crop
CHUNK_KEY = "/c/"  # in the name of a chunk, in format 3 of zarr


class CountingStore(WrapperStore):
    """A store of zarr that notes which chunks were asked for.

    Attributes:
        chunks: Their names, in order.

    Held by: tests/unit/test_l02_labs.py
    """

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.chunks: list[str] = []

    async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        """What the store holds under a name."""
        if CHUNK_KEY in key:
            self.chunks.append(key)
        return await super().get(key, *args, **kwargs)


def make(path: str | Path, chunks: Sequence[int], num_times: int = 32) -> Path:
    """A file of 1 degree in chunks of (times, latitudes, longitudes); not made again if there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        gb = num_times * STATE_BYTES / 1e9
        generate(path, gb, DEGREES, chunks, compress=True, progress=False)
    return path


def open_counted(path: str | Path) -> tuple[list[Any], CountingStore]:
    """(The array of each variable, [T, Y, X], and what notes the chunks that are read of them)."""
    store = CountingStore(LocalStore(path, read_only=True))
    group: Any = zarr.open_group(store, mode="r")
    arrays = [group[name] for name in VARIABLES]
    store.chunks.clear()
    return arrays, store


class Crops:
    """Pairs of a part of the map now and six hours later, from a file of zarr.

    Which part is drawn from the number of the sample alone: it does not matter who reads it.

    Args:
        path: The file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.arrays = None  # opened by the process that reads

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """States and targets of some samples, each [B, C, 60, 60]."""
        if self.arrays is None:
            group: Any = zarr.open_group(self.path, mode="r")
            self.arrays = [group[name] for name in VARIABLES]
        pairs = torch.stack([self.pair(int(number)) for number in indices])
        mean = pairs.mean(dim=(0, 1, 3, 4), keepdim=True)
        std = pairs.std(dim=(0, 1, 3, 4), keepdim=True)
        pairs = (pairs - mean) / std
        return pairs[:, 0], pairs[:, 1]

    def pair(self, number: int) -> torch.Tensor:
        """One sample as it is in the file: [2, C, 60, 60]."""
        assert self.arrays is not None
        num_times, num_rows, num_columns = self.arrays[0].shape
        generator = np.random.default_rng(number)
        first = generator.integers(num_times - 1)
        top = generator.integers(num_rows - SIZE + 1)
        left = generator.integers(num_columns - SIZE + 1)
        fields = []
        for array in self.arrays:
            part = array[first : first + 2, top : top + SIZE, left : left + SIZE]
            fields.append(part)
        return torch.from_numpy(np.stack(fields, axis=1))


def batches(crops: Crops, batch_size: int, num_batches: int) -> Iterator[Any]:
    """Consecutive batches, each read when it is asked for."""
    for number in range(num_batches):
        yield crops[range(number * batch_size, (number + 1) * batch_size)]


class Damaged:
    """A dataset for PyTorch's DataLoader with one sample that cannot be used."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> torch.Tensor:
        """A sample.

        Raises:
            ValueError: It is the damaged one.
        """
        if number == 11:
            raise ValueError("sample 11: t2m is NaN at row 3, column 20")
        return torch.full((2,), float(number))
