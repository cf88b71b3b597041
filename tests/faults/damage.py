"""Ways to damage a file."""

import os
import random
from pathlib import Path


def write(content: bytes, path: Path) -> None:
    """Something else in place of it."""
    path.write_bytes(content)


def cut(part: float, path: Path) -> None:
    """The first part of it, from 0 to 1; below 0: all but the last byte."""
    size = path.stat().st_size
    os.truncate(path, size - 1 if part < 0 else int(size * part))


def append(path: Path) -> None:
    """A byte more."""
    path.write_bytes(path.read_bytes() + b"x")


def fill(byte: bytes, path: Path) -> None:
    """Write the same byte everywhere, as after a crash of some file systems."""
    path.write_bytes(byte * path.stat().st_size)


def noise(seed: float, path: Path) -> None:
    """Write as many random bytes."""
    path.write_bytes(random.Random(seed).randbytes(path.stat().st_size))


def flip(place: float, path: Path) -> None:
    """One bit, at a part of the file from 0 to 1."""
    content = bytearray(path.read_bytes())
    index = int(place * len(content))
    content[index] ^= 1 << (index % 8)
    path.write_bytes(content)


def folder_instead(path: Path) -> None:
    """A folder of its name."""
    path.unlink()
    path.mkdir()


def loop(path: Path) -> None:
    """A link that leads to itself."""
    path.unlink()
    path.symlink_to(path.name)
