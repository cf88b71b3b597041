"""The folder of one checkpoint: what its files are, and whether they are as they were written.

    rank-0.bin ...    tensors, one file for each rank that wrote some
    tensors.json      where each tensor lies in them
    run.json          step, config, grid, data, and size and sha256 of every other file

Nothing here knows of a run in progress: `store` decides what to do.
"""

import contextlib
import hashlib
import json
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labcode.runtime.units import type_in_words
from labcode.train.checkpoint.tensors import INDEX, DamagedError, Index, StoredFile, to_index

ABOUT = "run.json"
MAX_JSON_BYTES = 2**30  # an index of three million tensors; more is not one of ours
OF_A_RANK = re.compile(r"rank-(\d+)\.bin")


@dataclass(frozen=True)
class About:
    """What `run.json` says.

    Args:
        step: Optimizer steps done.
        config: The config of the run, nested as its dataclasses are.
        grid: Sizes of the axes and their order.
        data_sha256: Hash of the data; empty if that was not known.
        files: Every other file of the checkpoint that is read again.
    """

    step: int
    config: dict[str, Any]
    grid: dict[str, Any]
    data_sha256: str
    files: dict[str, StoredFile]

    @property
    def file_bytes(self) -> dict[str, int]:
        """{file: its size}"""
        return {name: file.size_bytes for name, file in self.files.items()}

    def to_json(self) -> bytes:
        """The content of `run.json`, with a checksum of itself."""
        tree = asdict(self)
        tree["sha256"] = _checksum(tree)
        return json.dumps(tree, indent=2).encode()


def read_about(folder: Path) -> About:
    """What a checkpoint is, once `run.json` is known to be as it was written.

    Raises:
        DamagedError: It is not.
        OSError: It cannot be read for a reason that says nothing about it.
    """
    tree = _read_json(folder / ABOUT)
    if not isinstance(tree, dict):
        raise DamagedError(f"{ABOUT} is {type_in_words(tree)}")
    # the checksum is of everything but itself
    tree = dict(tree)
    found = tree.pop("sha256", None)
    if found is None:
        raise DamagedError(f"{ABOUT} has no checksum")
    if found != _checksum(tree):
        raise DamagedError(f"{ABOUT} is not as it was written: its checksum differs")
    about = _about(tree)
    if folder.name != step_name(about.step):
        raise DamagedError(f"{ABOUT} is of {step_name(about.step)}")
    return about


def read_index(folder: Path, about: About) -> Index:
    """Where the tensors lie.

    Raises:
        DamagedError: The index is none, or does not fit the files.
        OSError: It cannot be read.
    """
    try:
        return to_index(_read_json(folder / INDEX), about.file_bytes)
    except ValueError as error:
        raise DamagedError(f"{INDEX}: {error}") from None


def step_name(step: int) -> str:
    """The name of the folder of a step."""
    return f"step-{step:08d}"


def share_of(rank: int, num_ranks: int, names: Iterable[str]) -> list[str]:
    """The files that a rank compares with their checksums: each file is one rank's."""
    share = []
    # By the rank that wrote a file, and not in turn: on the same grid a rank reads what its machine
    # wrote, and may still have it in memory.
    for name in names:
        match = OF_A_RANK.fullmatch(name)
        owner = int(match[1]) % num_ranks if match else 0
        if owner == rank:
            share.append(name)
    return share


def stored(path: Path) -> StoredFile:
    """Size and sha256 of a file; 0.7 s per GB on one core."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")  # pyright: ignore[reportArgumentType]
        return StoredFile(file.tell(), digest.hexdigest())


def verify(folder: Path, files: Mapping[str, StoredFile], names: Iterable[str]) -> None:
    """Read some files of a checkpoint and compare them with what was written.

    Args:
        folder: The checkpoint.
        files: See `About`.
        names: The names of some of them.

    Raises:
        DamagedError: One is missing, or another.
        OSError: One cannot be read.
    """
    for name in names:
        path = folder / name
        expected = files[name]
        size_bytes = _plain_size(path)
        if size_bytes != expected.size_bytes:
            raise DamagedError(f"{name} has {size_bytes} bytes of {expected.size_bytes}")
        with _missing_is_damage(name):
            found = stored(path)
        if found != expected:
            raise DamagedError(f"{name} is not as it was written: its checksum differs")


def _about(tree: dict[str, Any]) -> About:
    """What `run.json` says, if it has the shape that is written."""
    types = {"step": int, "config": dict, "grid": dict, "data_sha256": str, "files": dict}
    for name, expected in types.items():
        # not isinstance: JSON's true is an int in Python
        if type(tree.get(name)) is not expected:
            raise DamagedError(f"{name} in {ABOUT} is no {expected.__name__}")
    files = {}
    for name, file in tree["files"].items():
        # a name with a slash in it would lead out of the folder
        if not name or name in (".", "..") or set(name) & set("/\\\0"):
            raise DamagedError(f"{ABOUT} names a file {name!r}, which is no name in its folder")
        known = isinstance(file, dict) and type(file.get("size_bytes")) is int
        if not known or not isinstance(file.get("sha256"), str):
            raise DamagedError(f"{ABOUT} has no size and sha256 of {name}")
        files[name] = StoredFile(file["size_bytes"], file["sha256"])
    if INDEX not in files:
        raise DamagedError(f"{ABOUT} does not name {INDEX}")
    return About(tree["step"], tree["config"], tree["grid"], tree["data_sha256"], files)


def _checksum(tree: dict[str, Any]) -> str:
    """The sha256 of some JSON, whatever its spaces and the order of its keys."""
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _read_json(path: Path) -> Any:
    """What a JSON file says.

    Raises:
        DamagedError: It is no JSON, or there is no such file.
        OSError: It cannot be read.
    """
    size_bytes = _plain_size(path)
    if size_bytes > MAX_JSON_BYTES:
        raise DamagedError(f"{path.name} has {size_bytes} bytes")
    with _missing_is_damage(path.name):
        content = path.read_bytes()
    try:
        return json.loads(content)
    # RecursionError: brackets nested by the thousand
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path.name} is not JSON: {error}") from None


def _plain_size(path: Path) -> int:
    """The size of a file that is neither a link nor a pipe, which would have no end."""
    with _missing_is_damage(path.name):
        status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a plain file"
        raise DamagedError(f"{path.name} is {kind}")
    return status.st_size


@contextlib.contextmanager
def _missing_is_damage(name: str) -> Iterator[None]:
    """A file that is not there is damage; one that may not be read, or not now, is not."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(f"{name} is missing") from None
