"""Ways to damage a file."""

import os
import random
from pathlib import Path


def write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def cut(part: float, path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, size - 1 if part < 0 else int(size * part))


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def fill(byte: bytes, path: Path) -> None:
    path.write_bytes(byte * path.stat().st_size)


def noise(seed: float, path: Path) -> None:
    path.write_bytes(random.Random(seed).randbytes(path.stat().st_size))


def flip(place: float, path: Path) -> None:
    content = bytearray(path.read_bytes())
    index = int(place * len(content))
    content[index] ^= 1 << (index % 8)
    path.write_bytes(content)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)
