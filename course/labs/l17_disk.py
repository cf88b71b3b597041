"""Lesson 17: a program that is killed at any of its operations on the disk, and what it leaves.

    with operations(folder) as seen:                 # only watch
        save(...)
    with operations(folder, killed_at=3), suppress(Killed):
        save(...)                                    # dies before its fourth operation

Nothing is killed in fact: `Killed` is raised where the process would end, and again at whatever the
code still tries to do to the disk afterwards, so that no `finally` can tidy up.

Held by: tests/unit/test_l17_labs.py
"""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

CHANGES = {  # audit event: what it is called in a hint
    "open": "open",
    "os.mkdir": "mkdir",
    "os.rename": "rename",
    "os.remove": "remove",
    "os.rmdir": "rmdir",
    "os.link": "link",
    "os.symlink": "link",
    "os.truncate": "truncate",
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Killed(BaseException):
    """Where a real process would have ended."""


@dataclass
class Rename:
    """A name that was given.

    Args:
        source: The old one.
        target: The new one.
        unsynced: Files below the old name whose content was not on the disk by then, each with
            whether a part of it was.
        unsynced_names: Files below it whose names were not on the disk by then: the folder that
            holds them was not synced since.
    """

    source: Path
    target: Path
    unsynced: list[tuple[str, bool]]
    unsynced_names: list[str]


@dataclass
class FolderSync:
    """A moment at which the names in the folder were on the disk.

    Args:
        after_renames: How many names had been given by then.
        files: What was in the folder, as paths below it.
    """

    after_renames: int
    files: frozenset[str]


@dataclass
class Seen:
    """What a program has done to the disk.

    Args:
        root: The folder that is watched.
        killed_at: The number of the operation before which it dies; None: it lives.
        names: Names of its operations, such as "mkdir step-00000008.partial".
        renames: Within the folder, or into it.
        synced: {(device, inode): size when it was last synced}.
        synced_names: {(device, inode) of a folder: what was in it when it was last synced}.
        folder_syncs: When the folder itself was synced.
    """

    root: Path
    killed_at: int | None = None
    names: list[str] = field(default_factory=list)
    renames: list[Rename] = field(default_factory=list)
    synced: dict[tuple[int, int], int] = field(default_factory=dict)
    synced_names: dict[tuple[int, int], frozenset[str]] = field(default_factory=dict)
    folder_syncs: list[FolderSync] = field(default_factory=list)

    def operation(self, name: str) -> None:
        """Called before an operation.

        Raises:
            Killed: It is the one that is not done any more, or comes after that one.
        """
        number = len(self.names)
        self.names.append(name)
        if self.killed_at is not None and number >= self.killed_at:
            raise Killed(name)

    def sync(self, status: os.stat_result) -> None:
        """A file, or a folder, is on the disk."""
        synced = _identity(status)
        self.synced[synced] = status.st_size
        for folder in [self.root, *self.root.rglob("*")]:
            if folder.is_dir() and _identity(folder.stat()) == synced:
                self.synced_names[synced] = frozenset(os.listdir(folder))
        if _identity(self.root.stat()) == synced:
            files = []
            for path in self.root.rglob("*"):
                if path.is_file():
                    files.append(str(path.relative_to(self.root)))
            self.folder_syncs.append(FolderSync(len(self.renames), frozenset(files)))

    def sync_all(self) -> None:
        """All that is in the folder is on the disk."""
        for path in [self.root, *self.root.rglob("*")]:
            self.sync(path.stat())

    def rename(self, source: Path, target: Path) -> None:
        """Note a rename before it happens."""
        unsynced = []
        files = [source] if source.is_file() else sorted(source.rglob("*"))
        unsynced_names = []
        for path in files:
            if path.is_file():
                status = path.stat()
                synced_bytes = self.synced.get(_identity(status))
                if synced_bytes != status.st_size:
                    unsynced.append((path.name, synced_bytes is not None))
            if path != source and path.name not in self._names_on_disk(path.parent):
                unsynced_names.append(path.name)
        self.renames.append(Rename(source, target, unsynced, unsynced_names))

    def _names_on_disk(self, folder: Path) -> frozenset[str]:
        return self.synced_names.get(_identity(folder.stat()), frozenset())


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


_watching: dict[int, Seen] = {}  # by thread


@functools.cache
def _install() -> None:
    """Once and for good, as Python has it; the hook looks at the threads in `_watching` only."""
    sys.addaudithook(_hook)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    seen = _watching.get(threading.get_ident()) if event in CHANGES else None
    if seen is None:
        return
    if event == "open":
        path, _, flags = args
        if not isinstance(path, str | bytes | os.PathLike) or not flags & WRITING:
            return
        if not _is_below(path, seen.root):
            return
    name = Path(os.fsdecode(args[0])).name if not isinstance(args[0], int) else ""
    if event == "os.rename":
        source, target = (Path(os.fsdecode(arg)).absolute() for arg in args[:2])
        # what a rename would move is looked at first: it does not count as the program's own
        with _paused():
            seen.rename(source, target)
    seen.operation(f"{CHANGES[event]} {name}".strip())


def _is_below(path: str | bytes | os.PathLike, root: Path) -> bool:
    return Path(os.fsdecode(path)).absolute().is_relative_to(root)


@contextlib.contextmanager
def _paused() -> Iterator[None]:
    thread = threading.get_ident()
    seen = _watching.pop(thread)
    try:
        yield
    finally:
        _watching[thread] = seen


@contextlib.contextmanager
def operations(root: Path, killed_at: int | None = None) -> Iterator[Seen]:
    """Watch, and end, what this thread does to a folder.

    Args:
        root: The folder, absolute.
        killed_at: The number, from 0, of the operation before which `Killed` is raised.
    """
    _install()
    seen = Seen(root, killed_at)
    fsync = os.fsync

    def synced(file: Any) -> None:
        seen.operation("fsync")
        fsync(file)
        descriptor = file if isinstance(file, int) else file.fileno()
        seen.sync(os.fstat(descriptor))

    def all_synced() -> None:
        seen.operation("sync")
        seen.sync_all()

    patches = [
        mock.patch.object(os, "fsync", synced),
        mock.patch.object(os, "fdatasync", synced, create=True),
        mock.patch.object(os, "sync", all_synced, create=True),
    ]
    thread = threading.get_ident()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        _watching[thread] = seen
        try:
            yield seen
        finally:
            del _watching[thread]


def killed_in_the_middle(save: Callable[..., Any], folder: Path, *args: Any, at: int) -> str:
    """Run `save(folder, *args)` and kill it before an operation.

    Args:
        save: Writes into the folder.
        folder: Folder of the checkpoints.
        args: The rest of its arguments.
        at: The number of the operation.

    Returns:
        The operation that was not done any more; "" if it came to its end before.
    """
    with operations(folder.absolute(), killed_at=at) as seen:
        try:
            save(folder, *args)
        except Killed:
            return seen.names[at]
    return ""


def tree(folder: Path, sizes: Mapping[str, int] | None = None) -> str:
    """What is in a folder of checkpoints, a line for each of them.

    Args:
        folder: Folder of the checkpoints.
        sizes: {file: its bytes, were it whole}; shorter ones are told.
    """
    lines = []
    for path in sorted(folder.iterdir()):
        parts = []
        for file in sorted(path.iterdir()):
            size = file.stat().st_size
            whole = (sizes or {}).get(file.name, size)
            shown = f"{size} B" if size == whole else f"only {size} of {whole} B"
            parts.append(f"{file.name} ({shown})")
        lines.append(f"{path.name:<24} {', '.join(parts) or 'empty'}")
    return "\n".join(lines) or "nothing"
