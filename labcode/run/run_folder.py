"""The output folder of a run: chosen, or made new; never somebody else's, and never lost.

    look     refuse a folder that may not be used; nothing is changed
    claim    when all that can fail before the first step has succeeded: give an old run another
             name, make the folder, write config.json
    keep     what this run has written stays
    close    without `keep`: remove what this run has made, give the old run its name again

Nothing is ever removed but what this run has written itself. A run that is to be overwritten is
renamed to DIR.old-1, or the next number that is free.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path

from labcode.config import Config
from labcode.run.run_lock import RunLock
from labcode.runtime.files import (
    CONFIG_NAME,
    LOCK_NAME,
    UNFINISHED,
    remove_unfinished,
    sync_folder,
    write_atomically,
)

STOPPED_NAME = "stopped"  # there if a signal stopped the last attempt of a run, which can resume
# what every config has, of whatever version
SECTIONS = ("model", "data", "parallel", "optim", "train")


class RunFolder:
    """The output folder of one run, as its first rank handles it.

    Every rank has one; the methods are for rank 0 alone, and `close` does nothing elsewhere.

    Args:
        config: Config of the run.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.path: Path | None = None
        self._lock: RunLock | None = None  # of the folder
        self._made: list[Path] = []  # the folder and its parents, as far as this run made them
        self._old_run: Path | None = None  # the new name of the run that was overwritten
        self._old_config: bytes | None = None  # config.json of a run that is resumed
        self._is_new = False  # it holds nothing that this run has not written
        self._may_undo = False

    # ---- before anything is written

    def look(self) -> Path:
        """Choose the folder, and refuse one that may not be used.

        A run that is there already is locked from here on.

        Raises:
            ValueError: It exists, and neither `train.overwrite` nor `checkpoint.resume` is set; it
                is not the folder of a run, or is in use.
            OSError: It cannot be looked at.
        """
        if self.config.train.out is None:
            self.path = _next_free(self.config.name)
            return self.path
        self.path = out = _checked_path(self.config.train.out)
        if is_new(out):
            _check_writable(out)
            return out
        if self.config.checkpoint.resume:
            _check_resumable(out)
        elif self.config.train.overwrite:
            check_movable(out)
        else:
            raise ValueError(
                f"{out} exists already: choose another train.out, or add --train.overwrite, "
                "which gives the old one another name"
            )
        self._lock = RunLock(out)
        self._lock.take()
        return out

    @property
    def mark(self) -> str:
        """What stands in the folder as long as this run holds it, and in no other; "" before."""
        return "" if self._lock is None else self._lock.text

    # ---- from here to the first step

    def claim(self) -> Path:
        """Take the folder; an old run that is to be overwritten gets another name.

        Returns:
            The folder; another one than `look` has chosen if that was taken meanwhile and the
            config names none.

        Raises:
            ValueError: Another run has taken it meanwhile.
            OSError: It cannot be made.
        """
        assert self.path is not None, "look() comes first"
        self._may_undo = True
        if self._lock is not None and self.config.checkpoint.resume:
            self._old_config = _bytes_of(self.path / CONFIG_NAME)
        elif self._lock is not None:
            self._move_old_run()
        if self.config.train.out is None:
            self._make_numbered()
        elif self._lock is None:
            self._make()
        if self._lock is None:
            self._take_new()
        remove_unfinished(self.path)
        (self.path / STOPPED_NAME).unlink(missing_ok=True)
        write_config(self.config, self.path)
        return self.path

    def _move_old_run(self) -> None:
        assert self.path is not None and self._lock is not None
        old_run = _next_old_name(self.path)
        os.rename(self.path, old_run)
        self._old_run = old_run
        self._lock.moved(old_run)
        self._lock.release()
        self._lock = None
        sync_folder(old_run.parent)
        print(f"{self.path}: the run that was there is now {old_run}", flush=True)

    def _take_new(self) -> None:
        """Lock a folder that was new when this run looked at it.

        Raises:
            ValueError: It is not new any more.
        """
        assert self.path is not None
        self._lock = RunLock(self.path)
        self._lock.take()
        # under the lock: who has written before it was taken is seen here, and nobody comes after
        self._is_new = is_new(self.path)
        if not self._is_new:
            raise ValueError(
                f"{self.path} was taken by another run meanwhile: start again, or choose another"
            )

    def _make(self) -> None:
        assert self.path is not None
        for folder in reversed([self.path, *self.path.parents]):
            if not folder.exists():
                self._made.append(folder)
                folder.mkdir(exist_ok=True)

    def _make_numbered(self) -> None:
        """Make the next free folder; one that appears at this moment is another run's."""
        while True:
            # asked again: between `look` and now lie minutes in which others may have begun
            self.path = _next_free(self.config.name)
            if not self.path.parent.exists():
                self._made.append(self.path.parent)
                self.path.parent.mkdir(exist_ok=True)
            try:
                self.path.mkdir()
            except FileExistsError:
                continue
            self._made.append(self.path)
            return

    # ---- from the first step to the end

    def keep(self) -> None:
        """What this run has written stays."""
        self._may_undo = False

    def note_stop(self, line: str) -> None:
        """Leave word that this attempt was stopped, which tells it from one that has finished.

        A job script cannot tell by the exit code, which is 0 for both: torchrun and srun take any
        other for a failure.

        Args:
            line: What stopped it, and how it resumes.

        Raises:
            OSError: It cannot be written.
        """
        assert self.path is not None
        write_atomically(self.path / STOPPED_NAME, f"{line}\n".encode())

    def close(self) -> None:
        """Let go of the folder; if `keep` was never called, all is as it was before `claim`.

        Raises:
            OSError: An old run could not be given its name again.
        """
        try:
            if self._may_undo:
                self._undo()
        finally:
            self._may_undo = False
            if self._lock is not None:
                self._lock.release()

    def _undo(self) -> None:
        assert self.path is not None
        if self._old_config is not None:
            write_atomically(self.path / CONFIG_NAME, self._old_config)
            return
        self._remove_new()
        if self._old_run is not None:
            os.rename(self._old_run, self.path)
            sync_folder(self.path.parent)

    def _remove_new(self) -> None:
        """Remove the new run, and the folders above it that were made for it."""
        assert self.path is not None
        if self._is_new:
            _empty(self.path)
        elif self._lock is not None:
            self._lock.release()
        for folder in reversed(self._made):
            try:
                folder.rmdir()
            except OSError:
                return  # another run uses it, or it is gone


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run: by what stands in its `config.json`.

    Args:
        folder: Which may not exist. A link is none: to rename it would leave the run in its place.
    """
    if folder.is_symlink():
        return False
    try:
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict) or not isinstance(config.get("name"), str):
        return False
    if not all(isinstance(config.get(section), dict) for section in SECTIONS):
        return False
    return {"steps", "global_batch"} <= config["train"].keys()


def is_new(folder: Path) -> bool:
    """Whether there is nothing in a folder but what a run leaves that is killed as it begins.

    Args:
        folder: Which may not exist.
    """
    if not folder.exists():
        return True
    for path in folder.iterdir():
        is_empty = path.name == "checkpoints" and path.is_dir() and not any(path.iterdir())
        if path.name != LOCK_NAME and not UNFINISHED.fullmatch(path.name) and not is_empty:
            return False
    return True


def check_movable(out: Path) -> None:
    """Refuse to give another name to what is not the folder of a run.

    Args:
        out: The folder, which exists.

    Raises:
        ValueError: What is in the way.
    """
    whole = out.resolve()
    if Path.cwd().resolve().is_relative_to(whole):
        raise ValueError(
            f"train.out: {out} is the working directory or above it: choose another train.out"
        )
    if out.is_symlink():
        raise ValueError(f"{out} is a link to {whole}: name the folder itself")
    if not is_run(out):
        raise ValueError(
            f"{out} is not the folder of a run: nothing was changed, choose another train.out"
        )
    _check_writable(out.parent)


def write_config(config: Config, out: Path) -> None:
    """Write `config.json`, which also marks the folder as that of a run.

    Args:
        config: Config of the run.
        out: Folder of the run.
    """
    text = json.dumps(dataclasses.asdict(config), indent=2)
    write_atomically(out / CONFIG_NAME, text.encode())


def _checked_path(name: str) -> Path:
    """The folder that `train.out` names.

    Raises:
        ValueError: It names none.
    """
    if not name.strip():
        raise ValueError(
            "train.out is empty: name a folder; if it comes from a shell variable, that is not set"
        )
    out = Path(name)
    if out.is_symlink() and not out.exists():
        raise ValueError(f"train.out: {out} is a link to nothing: choose another train.out")
    if out.exists() and not out.is_dir():
        raise ValueError(f"train.out: {out} is a file: choose another train.out")
    return out


def _check_writable(parent: Path) -> None:
    """Look whether something can be made in a folder, or in the one above that exists.

    Raises:
        ValueError: The folder above it is not one, or may not be written to.
    """
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise ValueError(f"train.out: {parent} is a file: choose another train.out")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"train.out: {parent} is read-only here: choose another train.out")


def _check_resumable(out: Path) -> None:
    if not is_run(out.resolve()) and not list(out.glob("checkpoints/step-*")):
        raise ValueError(
            f"{out} is not the folder of a run: nothing was changed, choose another train.out"
        )


def _next_free(name: str) -> Path:
    """runs/NAME-001, or the first number after it that is free."""
    number = 1
    while (Path("runs") / f"{name}-{number:03d}").exists():
        number += 1
    return Path("runs") / f"{name}-{number:03d}"


def _next_old_name(out: Path) -> Path:
    """DIR.old-1, or the first number after it that is free."""
    number = 1
    while os.path.lexists(out.with_name(f"{out.name}.old-{number}")):
        number += 1
    return out.with_name(f"{out.name}.old-{number}")


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _bytes_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
