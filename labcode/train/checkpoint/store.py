"""Checkpoints: all that a run needs to resume as if it had never stopped, whole or not at all.

    OUT/checkpoints/step-00000120/
        rank-0.bin ...    tensors (`tensors`)
        tensors.json      where each of them lies
        run.json          step, config, grid, data; size and sha256 of every file

Every rank writes its own part of each tensor, in boxes under their place in the whole; of those
that hold the same, one writes it. The folder is called `....partial` until the last rank is done.
It must be one that all ranks see.

A run may be resumed on another grid, on another number of ranks and at another stage of ZeRO: each
rank reads the boxes that it needs. On the same grid the run is the same bit for bit. On another one
sums are made in another order, and the random numbers of dropout start again.

A run never removes what it did not write, unless it is older than what it has written and
`checkpoint.keep` asks for it. A later checkpoint that it could not resume from makes room for its
own under another name, `step-00000120.unused`.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from labcode.comm.grid import Grid
from labcode.config import Config
from labcode.runtime.agreement import PeerError, SharedError, on_every_rank, on_first_rank
from labcode.runtime.errors import text_of
from labcode.runtime.files import sync_folder, write_atomically
from labcode.train import finite
from labcode.train.checkpoint.folder import (
    ABOUT,
    About,
    read_about,
    read_index,
    share_of,
    step_name,
    stored,
    verify,
)
from labcode.train.checkpoint.same_run import as_json, check_same_run
from labcode.train.checkpoint.state import RunState, Tensors
from labcode.train.checkpoint.tensors import (
    INDEX,
    DamagedError,
    Index,
    Part,
    StoredFile,
    file_of,
    held,
    plan,
    write,
    write_index,
)

T = TypeVar("T")
Together = Callable[[Callable[[], Any]], Any]  # on_every_rank or on_first_rank

STEP = re.compile(r"step-\d{1,20}")  # the folder of a checkpoint that is complete
UNFINISHED = "step-*.partial"
LAST_FILES_S = 2.0  # in which the other ranks of an interrupted run stop writing


class CheckpointError(SharedError, OSError):
    """A checkpoint could not be written, or none could be read; all ranks know."""


class _Writing:
    """A checkpoint whose files a thread writes.

    The thread does not keep the process alive: one that waits for a rank that is gone may be left.

    Args:
        folder: Final name of the folder.
        write: Writes the files; returns those of this rank.
    """

    def __init__(self, folder: Path, write: Callable[[], dict[str, StoredFile]]) -> None:
        self.folder = folder
        self._future: Future[dict[str, StoredFile]] = Future()
        self._write = write
        name = f"write {folder.name}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._future.set_result(self._write())
        # whatever it is: a result that never comes would let all ranks wait in `finish`
        except BaseException as error:
            self._future.set_exception(error)

    def is_done(self) -> bool:
        """Whether this rank's files are written, or could not be."""
        return self._future.done()

    def wait(self, limit_s: float) -> None:
        """Until it is done, at most so long."""
        concurrent.futures.wait([self._future], limit_s)

    def result(self) -> dict[str, StoredFile]:
        """This rank's files.

        Raises:
            OSError: They could not be written, with the reason.
        """
        return self._future.result()


class Checkpoints:
    """The checkpoints of one run, in `OUT/checkpoints`.

    Args:
        config: The run.
        grid: Grid with the process groups.
        out: Folder of the run, the same for all ranks.
        data_sha256: Hash of its data (`Task.data_sha256`); empty if that is not known.
    """

    def __init__(self, config: Config, grid: Grid, out: Path, data_sha256: str = "") -> None:
        self.config = config
        self.grid = grid
        self.folder = out / "checkpoints"
        self.data_sha256 = data_sha256
        self._unused: list[Path] = []
        self._writing: _Writing | None = None  # in the background
        self._memory: Tensors = {}  # of the copy that is written there

    # ---- writing

    def resumed_from(self, step: int) -> None:
        """Complete checkpoints of later steps are not those of this run.

        They are damaged, or it would have resumed from the last of them. The first one that this
        run completes takes their place, so that `checkpoint.keep` counts only what can be read.
        """
        self._unused = [folder for folder in self._complete_ones() if _step_of(folder) > step]

    def save(self, state: RunState) -> Path:
        """Write a checkpoint and remove the oldest.

        It has a temporary name until every rank is done. Each rank hashes what it writes.

        Communicates: all-gathers of what the ranks hold, and of their checksums; a few broadcasts
            of a short text.

        Raises:
            Diverged: A weight, or what the optimizer keeps for it, is not finite; on every rank.
            CheckpointError: It could not be written, on every rank; nothing of it is left, the
                older ones are.
            KeyboardInterrupt: Ctrl-C came, here or on another rank.
        Held by: tests/ranks/test_checkpoint.py::
            test_a_checkpoint_that_cannot_be_written_leaves_the_older_one
        """
        self.finish()
        self._check_finite(state)
        folder = self.folder / step_name(state.batches.step)
        # of an earlier attempt that was killed while it wrote
        on_first_rank(self._remove_unfinished)
        with self._cleaned_up(folder):
            tensors = state.tensors()
            index = _agreed_plan(tensors)
            own = on_every_rank(_write_files, _unfinished(folder), tensors, index)
            self._publish(folder, own)
        return folder

    def begin(self, state: RunState) -> None:
        """Copy the run, and write a checkpoint of the copy while training continues.

        A thread writes it, which talks to those of the other ranks through a group of its own. The
        checkpoint counts once `finish_if_written` or `finish` has given it its name. One that is
        still being written is finished first.

        Communicates: a few broadcasts of a short text.

        Raises:
            Diverged: See `save`.
            CheckpointError: The one before could not be written.
        Held by: tests/ranks/test_background_save.py
        """
        self.finish()
        self._check_finite(state)
        folder = self.folder / step_name(state.batches.step)
        on_first_rank(self._remove_unfinished)
        group = self.grid.background()
        copies = state.copies(self._memory)

        def write_copies() -> dict[str, StoredFile]:
            return _write_files(_unfinished(folder), copies, _agreed_plan(copies, group))

        self._writing = _Writing(folder, write_copies)

    def finish_if_written(self) -> None:
        """Complete the checkpoint that is written in the background, if every rank is done with it.

        Communicates: while one is written, an all-reduce of one number; if it is done what `finish`
            communicates.

        Raises:
            CheckpointError: It could not be written, on every rank.
        """
        if self._writing is None:
            return
        # The least of all ranks: `finish` is collective, so all enter it in one step, and none
        # waits there for a rank that still writes.
        done = torch.tensor(int(self._writing.is_done()))
        dist.all_reduce(done, dist.ReduceOp.MIN)
        if done.item():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is written in the background, if there is one.

        Communicates: an all-gather of the checksums; a few broadcasts of a short text.

        Raises:
            CheckpointError: It could not be written, on every rank; the older ones are there.
        """
        writing = self._writing
        if writing is None:
            return
        self._writing = None
        with self._cleaned_up(writing.folder):
            own = on_every_rank(writing.result)
            self._publish(writing.folder, own)

    def abandon(self) -> None:
        """The run ends early: nothing is left of a checkpoint that is still being written."""
        writing = self._writing
        if writing is None:
            return
        self._writing = None
        writing.wait(LAST_FILES_S)
        self._clean_up_alone()

    @contextlib.contextmanager
    def _cleaned_up(self, folder: Path) -> Iterator[None]:
        """While a checkpoint is written: if that fails, nothing of it is left.

        Raises:
            CheckpointError: It failed, on every rank, with the reason.
            KeyboardInterrupt: Ctrl-C came, here or on another rank.
        """
        try:
            yield
        except (OSError, PeerError) as error:
            self._clean_up_alone()
            message = f"checkpoint {folder} could not be written: {_by_whom(error)}"
            complete = self._complete_ones()
            if complete:
                message += f"; the last complete one is {complete[-1]}"
            raise CheckpointError(message) from None
        except (KeyboardInterrupt, RuntimeError):  # which may be a connection that is closed
            self._clean_up_alone()
            raise

    def _check_finite(self, state: RunState) -> None:
        """A checkpoint of a run that has diverged would take the place of one that can be used."""
        try:
            finite.check(state.model, state.optimizer)
        except finite.Diverged as error:
            complete = on_first_rank(self._complete_ones)
            if not complete:
                raise
            raise finite.Diverged(f"{error}; the last checkpoint is {complete[-1]}") from None

    def _publish(self, folder: Path, own: dict[str, StoredFile]) -> None:
        """Describe what all ranks have written, and give it its final name.

        Args:
            folder: That name.
            own: The files that this rank has written.
        """
        parts: list[dict[str, StoredFile]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, own)
        files = {}
        for part in parts:
            files |= part
        about = About(
            step=_step_of(folder),
            config=dataclasses.asdict(self.config),
            grid=dataclasses.asdict(self.grid.shape),
            data_sha256=self.data_sha256,
            files=dict(sorted(files.items())),
        )
        on_first_rank(self._complete, _unfinished(folder), folder, about)

    def _complete(self, unfinished: Path, folder: Path, about: About) -> None:
        """Describe the files that all ranks have written, rename their folder, remove old ones."""
        # Read back before it counts: what rank 0 has put together must fit the files of all ranks.
        try:
            read_index(unfinished, about)
        except DamagedError as error:
            raise OSError(str(error)) from None
        write_atomically(unfinished / ABOUT, about.to_json())
        # of this step or later ones: damaged, or this run would have resumed from the last of them
        for other in self._complete_ones():
            if _step_of(other) >= about.step or other in self._unused:
                _put_aside(other)
        self._unused = []
        # This is the moment from which it counts: a rename is whole or not at all. It is brought to
        # the disk before an older one goes; else a loss of power could leave neither of them.
        os.replace(unfinished, folder)
        sync_folder(self.folder)
        for old in self._complete_ones()[: -self.config.checkpoint.keep]:
            # a kill leaves no folder with the name of a checkpoint that lacks some of its files
            doomed = old.with_suffix(".partial")
            os.replace(old, doomed)
            _remove(doomed)

    def _remove_unfinished(self) -> None:
        for unfinished in self.folder.glob(UNFINISHED):
            _remove(unfinished)

    def _clean_up_alone(self) -> None:
        """Remove what is unfinished, without asking the others: they may have gone already.

        Rank 0 alone does it: under another rank's hands it may be giving the folder its final name.
        Another rank may still be opening its file, and a folder is removed only when it is empty.
        """
        if dist.get_rank() != 0:
            return
        deadline = time.monotonic() + LAST_FILES_S
        self._remove_unfinished()
        while any(self.folder.glob(UNFINISHED)) and time.monotonic() < deadline:
            time.sleep(0.05)
            self._remove_unfinished()

    # ---- reading

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole, the same on all ranks; None if there is none at all.

        A damaged one is told, and the next older one is taken. Every file is read and compared with
        its checksum; the ranks share that work.

        Communicates: a broadcast and two all-gathers of short texts for each checkpoint looked at.

        Raises:
            ValueError: It was written by another model or on other data, or it is
                later than the end of the run.
            CheckpointError: There are some and none is whole, or one cannot be read for a reason
                that says nothing about it, such as a missing right.
        Held by: tests/ranks/test_checkpoint.py
        """
        # rank 0 looks for all: on a network file system two ranks may see two lists for some
        # seconds
        folders = on_first_rank(self._complete_ones)
        if not folders:
            return None
        newest = self._newest_of(folders, [])
        steps = self.config.train.steps
        if _step_of(newest) > steps:
            raise ValueError(
                f"{newest} is later than the end of this run, train.steps={steps}: "
                f"give {_step_of(newest)} steps or more"
            )
        return newest

    def load(self, state: RunState, start: Path) -> Path:
        """Fill a run from a checkpoint or, if that cannot be read, from the next older one.

        Nothing of the run is changed before every rank has read all that it needs.

        Communicates: an all-gather of a short text for each checkpoint tried.

        Args:
            state: The state of a run as it was set up.
            start: A checkpoint, such as `newest` returns.

        Returns:
            The checkpoint that was taken.

        Raises:
            CheckpointError: None can be read.
        """
        wrong: list[str] = []
        folder = start
        while True:
            # its checksums were right when `newest` looked; a file may be gone since
            tensors = self._read(state, folder, wrong)
            if tensors is not None:
                state.fill(tensors)
                return folder
            complete = on_first_rank(self._complete_ones)
            older = [other for other in complete if _step_of(other) < _step_of(folder)]
            folder = self._newest_of(older, wrong)
            if dist.get_rank() == 0:
                print(f"resuming from {folder}", flush=True)

    def _newest_of(self, folders: list[Path], wrong: list[str]) -> Path:
        """The last of some checkpoints that is whole.

        Args:
            folders: The oldest first.
            wrong: What was found wrong with others; it grows by what is found here.

        Raises:
            CheckpointError: None of them is.
        """
        for folder in reversed(folders):
            if self._is_whole(folder, wrong):
                return folder
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"no checkpoint in {self.folder} can be read ({'; '.join(wrong[:5])}{more}): "
            "nothing was changed; put back what is missing, or begin again in another train.out"
        )

    def _is_whole(self, folder: Path, wrong: list[str]) -> bool:
        """Whether all files of a checkpoint are as they were written, in the eyes of all ranks."""

        def look() -> About:
            about = read_about(folder)
            check_same_run(about, folder, self.config, self.data_sha256)
            return about

        about = self._agreed(folder, wrong, look, on_first_rank)
        if about is None:
            return False

        def compare() -> bool:
            share = share_of(dist.get_rank(), dist.get_world_size(), about.files)
            verify(folder, about.files, share)
            return True

        return self._agreed(folder, wrong, compare, on_every_rank) is not None

    def _read(self, state: RunState, folder: Path, wrong: list[str]) -> Tensors | None:
        """This rank's tensors of a checkpoint; None if any rank cannot read its own."""

        def read() -> Tensors:
            about = read_about(folder)
            same_grid = about.grid == as_json(dataclasses.asdict(self.grid.shape))
            tensors = state.read(folder, read_index(folder, about), same_grid=same_grid)
            step = int(tensors["step"])
            if step != about.step:
                raise DamagedError(f"its tensors are of step {step}")
            return tensors

        return self._agreed(folder, wrong, read, on_every_rank)

    def _agreed(
        self, folder: Path, wrong: list[str], work: Callable[[], T], together: Together
    ) -> T | None:
        """What `work` finds in a checkpoint; None if it is damaged in the eyes of any rank.

        Args:
            folder: The checkpoint.
            wrong: List that gets a line about the damage.
            work: Reads; raises `DamagedError`, or `OSError` for what says nothing about the files.
            together: `on_every_rank`, or `on_first_rank` where one finds it out for all.
        """

        def result_or_damage() -> tuple[T | None, str]:
            try:
                return work(), ""
            except (DamagedError, RecursionError) as error:
                return None, str(error)
            except OSError as error:
                _refuse(folder, error)

        found, own_damage = together(result_or_damage)
        damages = [""] * dist.get_world_size()
        dist.all_gather_object(damages, own_damage)
        for rank, damage in enumerate(damages):
            if damage:
                seen_by = f" (on rank {rank})" if rank > 0 else ""
                wrong.append(f"{folder.name}: {damage}{seen_by}")
                if dist.get_rank() == 0:
                    print(
                        f"checkpoint {folder} is damaged: {damage}{seen_by}: "
                        "looking for an older one",
                        flush=True,
                    )
                return None
        return found

    def _complete_ones(self) -> list[Path]:
        """Folders with their final name, oldest first; damaged ones included.

        Raises:
            OSError: The folder cannot be listed, which is not the same as an empty one.
        """
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        folders = [self.folder / name for name in names if STEP.fullmatch(name)]
        return sorted(folders, key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _unfinished(folder: Path) -> Path:
    """What a checkpoint is called until it is complete."""
    return folder.with_suffix(".partial")


def _agreed_plan(tensors: Mapping[str, Part], group: dist.ProcessGroup | None = None) -> Index:
    """Which rank writes what, the same on all of them.

    Args:
        tensors: What `RunState.tensors` returns.
        group: A group of all ranks; None is the default group.
    """
    all_held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_held, held(tensors), group=group)
    return plan(all_held)


def _write_files(folder: Path, tensors: Mapping[str, Part], index: Index) -> dict[str, StoredFile]:
    """Write this rank's file, and on rank 0 the index; returns them with their checksums."""
    rank = dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    own = write(folder, rank, tensors, index)
    if own is not None:
        files[file_of(rank)] = own
    if rank == 0:
        write_index(folder, index)
        files[INDEX] = stored(folder / INDEX)
    return files


def _remove(folder: Path) -> None:
    """Remove a checkpoint; of one that is a link to somewhere else, the link."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
    else:
        # what cannot be removed now is called `.partial`, and the next save tries again
        shutil.rmtree(folder, ignore_errors=True)


def _put_aside(folder: Path) -> None:
    """Give a checkpoint that was not resumed from a name that is no checkpoint's."""
    aside = folder.with_suffix(".unused")
    number = 1
    while aside.exists():
        number += 1
        aside = folder.with_suffix(f".unused-{number}")
    os.replace(folder, aside)
    print(f"{folder} was not resumed from: it is kept as {aside.name}", flush=True)


def _by_whom(error: Exception) -> str:
    """What kept a rank from writing; the error of another rank says whose it is."""
    return str(error) if isinstance(error, PeerError) else f"rank {dist.get_rank()}: {error}"


def _refuse(folder: Path, error: OSError) -> NoReturn:
    """An older checkpoint is no answer to a disk that cannot be read now."""
    raise OSError(
        f"checkpoint {folder} cannot be read: {text_of(error)}: nothing was changed; "
        "mend that, or move the checkpoint away to resume from an older one"
    )
