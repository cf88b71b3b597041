"""Where each tensor of a checkpoint lies in its files, as JSON.

    {"model/embed.weight": {"dtype": "float32", "size": [65, 64], "chunks": [
        {"offsets": [0, 0], "sizes": [65, 64], "file": "__0_0.distcp", "start": 0, "bytes": 17805}
    ]}, ...}

PyTorch writes the same to `.metadata`, with pickle. Whoever reads a pickle runs what it asks for,
so that file is left to PyTorch's own tools, and a checkpoint is read by way of this one.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}

Tree = dict[str, Any]  # of JSON


class Reader(dcp.FileSystemReader):
    """PyTorch's reader, with an index that was read from JSON in place of `.metadata`.

    Args:
        folder: The checkpoint.
        index: As `to_metadata` gives it.
    """

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index; no file is read."""
        return self._index


class Writer(dcp.FileSystemWriter):
    """PyTorch's writer, which leaves in the index that `dcp.save` returns where each tensor lies.

    Since PyTorch 2.12 its own does so as well; that of 2.11 writes it to a copy of the index.
    """

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Note the places, and write `.metadata`.

        Args:
            metadata: Of all ranks' tensors.
            results: Of each rank, what it has written where.
        """
        places = {}
        for of_rank in results:
            for result in of_rank:
                places[result.index] = result.storage_data
        metadata.storage_data = places
        super().finish(metadata, results)


def to_tree(metadata: Metadata) -> Tree:
    """The index of a checkpoint that PyTorch has just written.

    Args:
        metadata: What `dcp.save` returned.
    """
    tree = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{name} is no tensor: a checkpoint holds nothing else")
        chunks = []
        for chunk in entry.chunks:
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            chunks.append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": place.relative_path,
                    "start": place.offset,
                    "bytes": place.length,
                }
            )
        tree[name] = {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "size": list(entry.size),
            "chunks": chunks,
        }
    return tree


def to_metadata(tree: object, file_bytes: Mapping[str, int]) -> Metadata:
    """An index as PyTorch's reader wants it.

    Args:
        tree: As `to_tree` gave it; or anything else that JSON can hold.
        file_bytes: {file of the checkpoint: its size}; the index may name no other.

    Raises:
        ValueError: It is no index, or it does not fit the files.
    Held by: tests/unit/test_tensor_index.py
    """
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, entry in _mapping(tree, "the index").items():
        entry = _mapping(entry, name)
        dtype = DTYPES.get(str(entry.get("dtype")))
        if dtype is None:
            raise ValueError(f"{name} has the dtype {entry.get('dtype')!r}")
        size = _sizes(entry.get("size"), f"the size of {name}")
        chunks = []
        num_values = 0
        for number, chunk in enumerate(_list(entry.get("chunks"), f"the chunks of {name}")):
            where = f"chunk {number} of {name}"
            chunk = _mapping(chunk, where)
            offsets = _sizes(chunk.get("offsets"), f"the offsets of {where}")
            sizes = _sizes(chunk.get("sizes"), f"the sizes of {where}")
            _check_inside(offsets, sizes, size, where)
            place = _place(chunk, where, file_bytes)
            needed_bytes = math.prod(sizes) * dtype.itemsize
            if needed_bytes > place.length:
                raise ValueError(f"{where} needs {needed_bytes} bytes and has {place.length}")
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            places[MetadataIndex(name, offsets)] = place
            num_values += math.prod(sizes)
        if num_values != math.prod(size):
            # torch would leave the rest as it was in memory
            raise ValueError(f"the chunks of {name} hold {num_values} of {math.prod(size)} values")
        entries[name] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
    return Metadata(entries, planner_data={}, storage_data=places)


def _place(chunk: Tree, where: str, file_bytes: Mapping[str, int]) -> _StorageInfo:
    """The part of a file that holds a chunk."""
    file = chunk.get("file")
    if not isinstance(file, str) or file not in file_bytes:
        raise ValueError(f"{where} is in {file!r}, which is no file of the checkpoint")
    start, length = _sizes([chunk.get("start"), chunk.get("bytes")], f"the place of {where}")
    if start + length > file_bytes[file]:
        raise ValueError(
            f"{where} ends at byte {start + length} of {file}, which has {file_bytes[file]}"
        )
    return _StorageInfo(file, start, length)


def _check_inside(offsets: torch.Size, sizes: torch.Size, whole: torch.Size, where: str) -> None:
    inside = len(offsets) == len(sizes) == len(whole)
    for offset, size, end in zip(offsets, sizes, whole):
        inside = inside and offset + size <= end
    if not inside:
        raise ValueError(
            f"{where} has {list(sizes)} values from {list(offsets)} on, of {list(whole)}"
        )


def _mapping(value: object, what: str) -> Tree:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a {type(value).__name__}")
    return value


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} are a {type(value).__name__}")
    return value


def _sizes(value: object, what: str) -> torch.Size:
    """A list of whole numbers, none below 0."""
    numbers = _list(value, what)
    for number in numbers:
        # bool counts as int in Python, and torch takes 64 bits
        if type(number) is not int or not 0 <= number < 2**62:
            raise ValueError(f"{what}: {number!r} is no size")
    return torch.Size(numbers)
