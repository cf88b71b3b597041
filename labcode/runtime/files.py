"""Files that exist whole or not at all, and text for a pipe whose reader may have left."""

import contextlib
import os
import re
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

UNFINISHED = re.compile(r".+\.[0-9a-f]{32}\.partial")
CONFIG_NAME = "config.json"  # of a run, or of a model on the Hub
LOCK_NAME = "run.lock"  # in the folder of a run, as long as a process trains into it


def print_out(text: str) -> None:
    """Print a text; a reader that has seen enough, such as `head`, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is left is written at the end of Python


def write_atomically(path: Path, *parts: "Buffer") -> None:
    """Writes a file beside `path` and renames it, so that `path` is never half written.

    A full disk, a kill or a loss of power leaves the old file, or none if there was none.
    Several processes may write the same path at once; one of them wins, with a whole file.

    Args:
        path: The file; its folder exists.
        parts: bytes or contiguous arrays, written one after another.

    Held by: tests/unit/test_files.py
    """
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(unfinished, "xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            # on network disks "no space left" may come only here, before the rename
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power, where the system has a way to do so.

    A renamed file is on the disk when its folder is. A system that cannot do it says so with an
    error, which changes nothing: the file is there.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_unfinished(folder: Path) -> None:
    """Remove what was left by processes that were killed in `write_atomically`.

    Only for a folder that nobody else writes to at this moment.
    """
    for path in folder.glob("*.partial"):
        if UNFINISHED.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)


def written_at(path: Path) -> float:
    """When a file was written last, in seconds: the key by which files are sorted by age."""
    return path.stat().st_mtime
