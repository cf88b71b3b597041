"""The output folder of a run: chosen, or made new; never somebody else's, and never lost.

    look     refuse a folder that may not be used; nothing is changed
    claim    when all that can fail before the first step has succeeded: set an old run aside, make
             the folder, write config.json
    keep     the first step stands: remove the old run
    close    without `keep`: remove what this run has made, put the old run back

A process that is killed between `claim` and `keep` leaves the old run under its second name. The
next one that looks at the folder puts it back.
"""

import dataclasses
import json
import os
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

from labcode.config import Config
from labcode.files import UNFINISHED, remove_unfinished, sync_folder, write_atomically
from labcode.train.run_lock import LOCK_NAME, RunLock

CONFIG_NAME = "config.json"
STOPPED_NAME = "stopped"  # there if a signal stopped the last attempt of a run, which can resume
# the second names of a folder, beside it: of an old run that may come back, or is being removed
SET_ASIDE = ".set-aside"
DISCARDED = ".discarded"
# all that a run writes
OWN_FILES = (
    CONFIG_NAME,
    LOCK_NAME,
    STOPPED_NAME,
    "metrics.jsonl",
    "device.jsonl",
    "result.txt",
    "weights.pt",
    "checkpoints",
    "checkpoints/step-*",
    "profile",
    "profile/*.pt.trace.json.gz",
    "tensorboard",
    "tensorboard/events.out.tfevents.*",
    "hang",
    "hang/*",
    "record",
    "record/step-*",
    "debug",
    "debug/nvdlfw_inspect_*",
    "debug/tensorboard",
)
WRITTEN_FOLDERS = ("checkpoints", "profile", "tensorboard", "hang", "record", "debug")
# what other programs put into any folder that they show
HARMLESS = (".DS_Store", ".ipynb_checkpoints", ".nfs*")
# what every config has, of whatever version
SECTIONS = ("model", "data", "parallel", "optim", "train")


class RunFolder:
    """The output folder of one run, as its first rank handles it.

    Every rank has one; the methods are for rank 0 alone, and `close` does nothing elsewhere.

    Args:
        config: Of the run.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.path: Path | None = None
        self._lock: RunLock | None = None  # of the folder
        self._old_lock: RunLock | None = None  # of the run that was set aside
        self._made: list[Path] = []  # the folder and its parents, as far as this run made them
        self._old_config: bytes | None = None  # config.json of a run that is resumed
        self._is_new = False  # it holds nothing that this run has not written
        self._claimed = False
        self._kept = False

    # ---- before anything is written

    def look(self) -> Path:
        """Choose the folder, and refuse one that may not be used.

        A run that is there already is locked from here on.

        Raises:
            ValueError: It exists, and neither `train.overwrite` nor `checkpoint.resume` is set; it
                is not the folder of a run, holds something else as well, or is in use.
            OSError: It cannot be looked at.
        """
        if self.config.train.out is None:
            self.path = _next_free(self.config.name)
            return self.path
        self.path = out = _checked_path(self.config.train.out)
        self._repair(out)
        if is_new(out):
            _check_writable(out)
            return out
        if self.config.checkpoint.resume:
            _check_resumable(out)
        elif self.config.train.overwrite:
            check_removable(out)
        else:
            raise ValueError(
                f"{out} exists already: "
                "choose another train.out, or replace it with --train.overwrite"
            )
        if self._lock is None:
            self._lock = RunLock(out)
            self._lock.take()
        return out

    def _repair(self, out: Path) -> None:
        """Finish what a run that was killed between `claim` and `keep`, or in `keep`, left undone.

        Raises:
            ValueError: The run is alive; or something else has the second name.
        """
        discarded = second_name(out, DISCARDED)
        if discarded.is_dir() and not discarded.is_symlink() and not strangers(discarded):
            shutil.rmtree(discarded, ignore_errors=True)
        aside = second_name(out, SET_ASIDE)
        if not is_run(aside):
            return
        lock = RunLock(aside)
        lock.take()
        if not is_run(aside):  # its holder has ended meanwhile, and has put it back or removed it
            lock.release()
            return
        self._lock = lock
        _put_back(out)
        lock.moved(out)
        print(f"{out}: the run that another one was about to overwrite is back", flush=True)

    @property
    def mark(self) -> str:
        """What stands in the folder as long as this run holds it, and in no other; "" before."""
        return "" if self._lock is None else self._lock.text

    # ---- from here to the first step

    def claim(self) -> Path:
        """Take the folder; an old run that is to be overwritten gets its second name.

        Returns:
            The folder; another one than `look` has chosen if that was taken meanwhile and the
            config names none.

        Raises:
            ValueError: Another run has taken it meanwhile.
            OSError: It cannot be made.
        """
        assert self.path is not None, "look() comes first"
        self._claimed = True
        found_a_run = self._lock is not None
        if found_a_run and self.config.checkpoint.resume:
            self._old_config = _bytes_of(self.path / CONFIG_NAME)
        elif found_a_run:
            self._set_aside()
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

    def _set_aside(self) -> None:
        assert self.path is not None and self._lock is not None
        aside = second_name(self.path, SET_ASIDE)
        self._old_lock = self._lock
        self._lock = None
        os.rename(self.path, aside)
        self._old_lock.moved(aside)
        sync_folder(aside.parent)

    def _take_new(self) -> None:
        """Lock a folder that was new when this run looked at it.

        Raises:
            ValueError: It is not new any more.
        """
        assert self.path is not None
        self._lock = RunLock(self.path)
        self._lock.take()
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
        """The new run stands: remove the one that was set aside."""
        if self._kept or not self._claimed:
            return
        assert self.path is not None
        if self._old_lock is not None:
            discarded = second_name(self.path, DISCARDED)
            # from this moment on the old run does not come back
            os.rename(second_name(self.path, SET_ASIDE), discarded)
            self._kept = True
            shutil.rmtree(discarded, ignore_errors=True)
            self._old_lock.moved(discarded)
            self._old_lock.release()
            self._old_lock = None
        self._kept = True

    def note_stop(self, line: str) -> None:
        """Leave word that this attempt was stopped, which tells it from one that has finished.

        A job script cannot tell by the exit code, which is 0 for both: torchrun and srun take any
        other for a failure.

        Raises:
            OSError: It cannot be written.
        """
        assert self.path is not None
        write_atomically(self.path / STOPPED_NAME, f"{line}\n".encode())

    def close(self) -> None:
        """Let go of the folder; if `keep` was never called, all is as it was before `claim`.

        Raises:
            OSError: Something could not be put back; then the next run does it.
        """
        try:
            if self._claimed and not self._kept:
                self._undo()
        finally:
            self._claimed = False
            for lock in (self._lock, self._old_lock):
                if lock is not None:
                    lock.release()

    def _undo(self) -> None:
        assert self.path is not None
        if self._old_config is not None:
            write_atomically(self.path / CONFIG_NAME, self._old_config)
        elif self._old_lock is not None:
            if is_run(second_name(self.path, SET_ASIDE)):
                _put_back(self.path)
                self._old_lock.moved(self.path)
        else:
            self._remove_new()

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
    """Whether a folder holds a run: by what stands in its `config.json`."""
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
    """Whether there is nothing in a folder but what a run leaves that is killed as it begins."""
    if not folder.exists():
        return True
    for path in folder.iterdir():
        is_empty = path.name == "checkpoints" and path.is_dir() and not any(path.iterdir())
        if path.name != LOCK_NAME and not UNFINISHED.fullmatch(path.name) and not is_empty:
            return False
    return True


def check_removable(out: Path) -> None:
    """Refuse to overwrite what is not a run, or not only a run.

    Raises:
        ValueError: What is in the way.
    """
    whole = out.resolve()
    home = Path(os.path.expanduser("~"))
    for name, place in (("the working directory", Path.cwd()), ("your home", home)):
        if place.resolve().is_relative_to(whole):
            raise ValueError(
                f"train.out: {out} is {name} or above it, which is never removed: choose another"
            )
    if out.is_symlink():
        raise ValueError(
            f"{out} is a link to {whole}, which is never removed: name the folder itself"
        )
    if not is_run(out):
        raise ValueError(
            f"{out} is not the folder of a run: nothing was removed, choose another train.out"
        )
    others = strangers(out)
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise ValueError(
            f"{out} holds what no run has written, {', '.join(others[:3])}{more}: "
            "nothing was removed, move that away or choose another train.out"
        )
    _check_writable(out.parent)
    for suffix in (SET_ASIDE, DISCARDED):
        other = second_name(out, suffix)
        if os.path.lexists(other):
            raise ValueError(f"{other} is in the way, and is not a run: move it away")


def strangers(out: Path) -> list[str]:
    """What lies in the folder of a run and no run writes, sorted."""
    found = []
    paths = list(out.iterdir())
    for folder in WRITTEN_FOLDERS:
        paths += out.glob(f"{folder}/*")
    for path in paths:
        name = str(path.relative_to(out))
        own = any(fnmatchcase(name, pattern) for pattern in OWN_FILES)
        harmless = any(fnmatchcase(path.name, pattern) for pattern in HARMLESS)
        if not own and not harmless and not UNFINISHED.fullmatch(path.name):
            found.append(name)
    return sorted(found)


def second_name(out: Path, suffix: str) -> Path:
    """The name beside a folder under which an old run waits for its fate."""
    whole = Path(os.path.abspath(out)) if out.name in ("", "..") else out
    return whole.parent / (whole.name + suffix)


def write_config(config: Config, out: Path) -> None:
    """Write `config.json`, which also marks the folder as that of a run."""
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


def _put_back(out: Path) -> None:
    """Give the old run its name again; the new one, which has done no step, is removed.

    Raises:
        ValueError: What has the name now is more than a run that has not begun.
    """
    aside = second_name(out, SET_ASIDE)
    discarded = second_name(out, DISCARDED)
    if out.is_dir() and not is_new(out):
        begun = list(out.glob("checkpoints/step-*")) + list(out.glob("weights.pt"))
        if begun or not is_run(out) or strangers(out):
            raise ValueError(f"both {out} and {aside} hold something: keep one of them")
    if out.is_dir():
        os.rename(out, discarded)
    os.rename(aside, out)
    sync_folder(out.parent)
    shutil.rmtree(discarded, ignore_errors=True)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _bytes_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
