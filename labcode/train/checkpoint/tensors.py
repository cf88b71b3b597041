"""The tensors of a checkpoint: one file for each rank that wrote some, and what lies where.

    rank-0.bin ...    boxes of tensors, one after another: their numbers as they are in memory
    tensors.json      where each of them begins

    {"model/embed.weight": {"dtype": "float32", "size": [65, 64], "boxes": [
        {"offsets": [0, 0], "sizes": [33, 64], "file": "rank-0.bin", "start": 0},
        {"offsets": [33, 0], "sizes": [32, 64], "file": "rank-1.bin", "start": 0}]}, ...}

A box stands under its place in the whole tensor. A rank that reads takes from other boxes the
rows that its own need, so a checkpoint can be read on any grid. What several ranks hold is written
by one of them. Nothing in these files is ever executed, wherever they come from.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from labcode.parallel.boxes import Box
from labcode.runtime.files import write_atomically
from labcode.runtime.units import type_in_words

INDEX = "tensors.json"
ALIGNED_BYTES = 64  # each box begins at a multiple of it
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
Sizes = tuple[int, ...]


class DamagedError(Exception):
    """A checkpoint whose files are not as they were written; the text says which, and how."""


@dataclass(frozen=True)
class StoredFile:
    """A file as it was when the checkpoint was written.

    Args:
        size_bytes: Length of the file.
        sha256: Hash of its content, in hexadecimal digits.
    """

    size_bytes: int
    sha256: str


class Part(NamedTuple):
    """This rank's part of a tensor, made of some boxes of the whole.

    Args:
        own: The part; it is written, or read into.
        size: The shape of the whole tensor.
        boxes: The boxes of which the part is made.
    """

    own: torch.Tensor
    size: Sizes
    boxes: Sequence[Box]


class StoredBox(NamedTuple):
    """A block of a whole tensor, and where it lies.

    Args:
        offsets: Where it begins in the whole.
        sizes: Its shape.
        file: Name in the folder of the checkpoint.
        start: The byte at which it begins there.
    """

    offsets: Sizes
    sizes: Sizes
    file: str
    start: int


class StoredTensor(NamedTuple):
    """A whole tensor of a checkpoint."""

    dtype: torch.dtype
    size: Sizes
    boxes: list[StoredBox]


Index = dict[str, StoredTensor]
Held = dict[str, tuple[torch.dtype, Sizes, list[tuple[Sizes, Sizes]]]]  # offsets, sizes of boxes


def whole(tensor: torch.Tensor) -> Part:
    """A tensor that is not spread over ranks, as a part of one box."""
    size = tuple(tensor.shape)
    start = (0,) * len(size)
    return Part(tensor, size, [Box(start, start, size)])


# ---- writing


def held(parts: Mapping[str, Part]) -> Held:
    """What this rank holds of each tensor: what the ranks tell each other before they write."""
    found: Held = {}
    for name, part in parts.items():
        boxes = [(box.offsets, box.sizes) for box in part.boxes]
        found[name] = (part.own.dtype, part.size, boxes)
    return found


def plan(all_held: Sequence[Held]) -> Index:
    """Which rank writes which boxes, and where.

    A box is written once, by the one of its holders that has the least to write so far.

    Args:
        all_held: What `held` returned on each rank. All ranks have the same list and so make the
            same plan; nothing is communicated.
    """
    # Greedy, in the order of the boxes. It divides the writing among copies of the weights, where
    # "the first holder writes" would leave all of it to the first copy.
    index: Index = {}
    holders: dict[tuple[str, Sizes, Sizes], list[int]] = {}
    for rank, of_rank in enumerate(all_held):
        for name, (dtype, size, boxes) in of_rank.items():
            index.setdefault(name, StoredTensor(dtype, size, []))
            for offsets, sizes in boxes:
                holders.setdefault((name, offsets, sizes), []).append(rank)
    ends = [0] * len(all_held)  # where each rank's file ends so far, in bytes
    for (name, offsets, sizes), ranks in holders.items():
        writer = ranks[0]
        for rank in ranks:
            if ends[rank] < ends[writer]:
                writer = rank
        stored = StoredBox(offsets, sizes, file_of(writer), ends[writer])
        index[name].boxes.append(stored)
        end = stored.start + math.prod(sizes) * index[name].dtype.itemsize
        ends[writer] = -(-end // ALIGNED_BYTES) * ALIGNED_BYTES
    return index


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank}.bin"


def write(folder: Path, rank: int, parts: Mapping[str, Part], index: Index) -> StoredFile | None:
    """Write what a plan leaves to this rank, and bring it to the disk.

    Returns:
        Its file; None where it writes nothing.

    Raises:
        OSError: It cannot be written.
    """
    name = file_of(rank)
    own: list[tuple[int, torch.Tensor]] = []
    for key, part in parts.items():
        starts = {}
        for stored in index[key].boxes:
            if stored.file == name:
                starts[stored.offsets] = stored.start
        for box in part.boxes:
            if box.offsets in starts:
                own.append((starts[box.offsets], box.view(part.own)))
    if not own:
        return None
    own.sort(key=itemgetter(0))  # by place in the file, which is written from front to back
    digest = hashlib.sha256()
    # "x": a file that is there already is of another attempt, which has not ended as was thought
    with open(folder / name, "xb") as file:
        for start, block in own:
            # zeros up to the place where the box begins, then its numbers
            for data in (bytes(start - file.tell()), _bytes_of(block.contiguous().cpu())):
                file.write(data)
                digest.update(data)
        # To the disk, not only to the operating system: the checkpoint gets its name when all files
        # are safe, and a machine may lose power a moment later.
        file.flush()
        os.fsync(file.fileno())
        return StoredFile(file.tell(), digest.hexdigest())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    # as bytes, because numpy has no bfloat16
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_index(folder: Path, index: Index) -> None:
    """Write `tensors.json`."""
    tree = {}
    for name, stored in index.items():
        dtype = str(stored.dtype).removeprefix("torch.")
        boxes = [box._asdict() for box in stored.boxes]
        tree[name] = {"dtype": dtype, "size": stored.size, "boxes": boxes}
    write_atomically(folder / INDEX, json.dumps(tree).encode())


# ---- reading


def read_into(folder: Path, index: Index, name: str, part: Part) -> None:
    """Fill a part of a tensor from the boxes that hold some of it; nothing else is read.

    Raises:
        DamagedError: The boxes do not hold all of it, or a file has gone.
        OSError: A file cannot be read.
    """
    for box in part.boxes:
        num_values = 0
        for stored in index[name].boxes:
            num_values += _copy_common(folder, stored, index[name].dtype, box, part.own)
        if num_values != math.prod(box.sizes):
            raise DamagedError(f"its boxes of {name} do not hold each value once")


def read_whole(folder: Path, index: Index, name: str) -> torch.Tensor:
    """A whole tensor, on the CPU.

    Raises:
        DamagedError, OSError: See `read_into`.
    """
    found = torch.empty(index[name].size, dtype=index[name].dtype)
    read_into(folder, index, name, whole(found))
    return found


def _copy_common(
    folder: Path, stored: StoredBox, dtype: torch.dtype, box: Box, own: torch.Tensor
) -> int:
    """Copy what two boxes of a tensor have in common; returns how many values that is."""
    common = box.common(stored)
    # most pairs of boxes end here, before a file is opened
    if common is None:
        return 0
    target = common.view(own)
    # a tensor without dims: one number, which is read as a row of one
    if not common.sizes:
        target.copy_(_read_rows(folder, stored._replace(sizes=(1,)), dtype, 0, 1)[0])
        return 1
    firsts = [first - start for first, start in zip(common.offsets, stored.offsets)]
    source = _read_rows(folder, stored, dtype, firsts[0], common.sizes[0])
    for dim in range(1, len(firsts)):
        source = source.narrow(dim, firsts[dim], common.sizes[dim])
    target.copy_(source)
    return math.prod(common.sizes)


def _read_rows(
    folder: Path, stored: StoredBox, dtype: torch.dtype, first: int, count: int
) -> torch.Tensor:
    """Some rows of a box: indices of its first dim."""
    # Whole rows, because they lie together and are one read. A rank that needs some columns of a
    # box reads all of them: of a whole weight that tp = 8 cuts by columns eight times what it
    # keeps.
    rows = torch.empty((count, *stored.sizes[1:]), dtype=dtype)
    row_bytes = math.prod(stored.sizes[1:]) * dtype.itemsize
    try:
        with open(folder / stored.file, "rb") as file:
            file.seek(stored.start + first * row_bytes)
            num_bytes = file.readinto(_bytes_of(rows))
    except FileNotFoundError:
        raise DamagedError(f"{stored.file} is missing") from None
    if num_bytes != rows.nbytes:
        raise DamagedError(f"{stored.file} ends too early")
    return rows


# ---- the index


def to_index(tree: object, file_bytes: Mapping[str, int]) -> Index:
    """The index of a checkpoint, if it is one.

    Args:
        tree: What `tensors.json` holds; or anything else that JSON can hold.
        file_bytes: {file of the checkpoint: its size}; the index may name no other.

    Raises:
        ValueError: It is no index, or it does not fit the files.
    Held by: tests/unit/test_tensor_files.py
    """
    index: Index = {}
    for name, entry in _mapping(tree, "the index").items():
        entry = _mapping(entry, name)
        dtype = DTYPES.get(str(entry.get("dtype")))
        if dtype is None:
            raise ValueError(f"{name} has the dtype {entry.get('dtype')!r}")
        size = _sizes(entry.get("size"), f"the size of {name}")
        boxes = []
        num_values = 0
        for number, box in enumerate(_list(entry.get("boxes"), f"the boxes of {name}")):
            where = f"box {number} of {name}"
            boxes.append(_box(_mapping(box, where), where, dtype, size, file_bytes))
            num_values += math.prod(boxes[-1].sizes)
        if num_values != math.prod(size) or len({box.offsets for box in boxes}) < len(boxes):
            raise ValueError(f"the boxes of {name} are not {math.prod(size)} values, each once")
        index[name] = StoredTensor(dtype, size, boxes)
    return index


def _box(
    tree: Tree, where: str, dtype: torch.dtype, size: Sizes, file_bytes: Mapping[str, int]
) -> StoredBox:
    offsets = _sizes(tree.get("offsets"), f"the offsets of {where}")
    sizes = _sizes(tree.get("sizes"), f"the sizes of {where}")
    inside = len(offsets) == len(sizes) == len(size)
    for offset, length, end in zip(offsets, sizes, size):
        inside = inside and offset + length <= end
    if not inside:
        raise ValueError(
            f"{where} has {list(sizes)} values from {list(offsets)} on, of {list(size)}"
        )
    file = tree.get("file")
    if not isinstance(file, str) or file not in file_bytes:
        raise ValueError(f"{where} is in {file!r}, which is no file of the checkpoint")
    (start,) = _sizes([tree.get("start")], f"the place of {where}")
    end = start + math.prod(sizes) * dtype.itemsize
    if end > file_bytes[file]:
        raise ValueError(f"{where} ends at byte {end} of {file}, which has {file_bytes[file]}")
    return StoredBox(offsets, sizes, file, start)


def _mapping(value: object, what: str) -> Tree:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type_in_words(value)}")
    return value


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} are {type_in_words(value)}")
    return value


def _sizes(value: object, what: str) -> Sizes:
    """A list of whole numbers, none below 0."""
    numbers = _list(value, what)
    for number in numbers:
        # bool counts as int in Python, and torch takes 64 bits
        if type(number) is not int or not 0 <= number < 2**62:
            raise ValueError(f"{what}: {number!r} is no size")
    return tuple(numbers)
