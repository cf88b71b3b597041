"""Where a user's clusters keep their state, and one process at a time to change it."""

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from pathlib import Path


def base() -> Path:
    """The folder of this user's clusters, which no other user may look into; it need not exist.

    Raises:
        RuntimeError: The folder belongs to somebody else.
    """
    folder = Path(tempfile.gettempdir()).resolve() / f"labcode-slurm-{os.geteuid()}"
    with contextlib.suppress(FileNotFoundError):
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise RuntimeError(
                f"{folder} is not a folder of yours alone: remove it, or set TMPDIR to another place"
            )
    return folder


def _lock(path):
    while True:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            lock = open(path, "a")  # noqa: SIM115 - held until the caller is done
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.samestat(
                os.fstat(lock.fileno()), path.stat()
            ):  # else its last owner has just removed it
                return lock
            lock.close()


@contextlib.contextmanager
def alone(name):
    """One process at a time starts or stops a cluster of this name."""
    path = base() / f".{name}.lock"
    with _lock(path):
        try:
            yield
        finally:
            if not (base() / name).exists():
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    path.parent.rmdir()  # unless another cluster is in it


def named(name: str | None) -> str:
    """A cluster's name as a folder's, "default" for None.

    Raises:
        ValueError: It is no such name.
    """
    name = name or "default"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,30}", name):
        raise ValueError(f"cluster name {name!r}: use up to 31 letters, digits, _ and -")
    return name
