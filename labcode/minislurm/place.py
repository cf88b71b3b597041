"""Where a user's clusters keep their state, and a lock for the process that changes one."""

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,30}")


def base() -> Path:
    """The folder of this user's clusters, which no other user may look into; it need not exist.

    Raises:
        RuntimeError: The folder belongs to somebody else.
    """
    folder = Path(tempfile.gettempdir()).resolve() / f"labcode-slurm-{os.geteuid()}"
    with contextlib.suppress(FileNotFoundError):
        if not _is_private_folder(folder.lstat()):
            raise RuntimeError(
                f"{folder} is not a folder of yours alone: "
                "remove it, or set TMPDIR to another place"
            )
    return folder


def _is_private_folder(found: os.stat_result) -> bool:
    is_mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    is_open_to_others = found.st_mode & 0o077
    return is_mine and not is_open_to_others


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """One process at a time starts or stops a cluster of this name."""
    path = base() / f".{name}.lock"
    with _lock(path):
        try:
            yield
        finally:
            if not (base() / name).exists():
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    path.parent.rmdir()  # fails if another cluster is in it


def _lock(path: Path) -> TextIO:
    """Wait for the lock of a file, which its last owner may just remove; returns the open file."""
    while True:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            lock = open(path, "a")  # noqa: SIM115 - held until the caller is done
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The lock counts only if the file is still the one that others will open.
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
            lock.close()


def is_name(text: str) -> bool:
    """Whether a cluster may have this name."""
    return _NAME.fullmatch(text) is not None


def named(name: str | None) -> str:
    """A cluster's name, "default" for None; it is also the name of its folder.

    Raises:
        ValueError: It is no such name.
    """
    name = name or "default"
    if not is_name(name):
        raise ValueError(f"cluster name {name!r}: use up to 31 letters, digits, _ and -")
    return name
