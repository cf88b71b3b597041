"""Checkpoints: all that a run needs to resume as if it had never stopped, whole or not at all.

    OUT/checkpoints/step-00000120/
        __0_0.distcp ... .metadata    tensors, by torch.distributed.checkpoint (DCP)
        run.json                      step, config, grid, and the size of every file

Every rank writes its own part of each tensor, under a name with the coordinate of every axis that
cuts the tensor (`ParamSharding.key`): ranks with the same name hold the same values, and DCP writes
them once. The folder is called `....partial` until the last rank is done. Resuming needs the same
grid. The folder must be one that all ranks see.
"""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from labcode.comm.agreement import PeerError, SharedError, on_first_rank
from labcode.comm.grid import Grid
from labcode.config import Config
from labcode.files import write_atomically
from labcode.recipes import field_paths
from labcode.train.state import RunState, first_cause

ABOUT = "run.json"
# What may differ between the run that wrote a checkpoint and the one that resumes from it.
MAY_CHANGE = (
    "name",
    "checkpoint.",
    "optim.",
    "data.cache_dir",
    "parallel.bucket_mb",
    "parallel.data_parallel",
    "parallel.dp",
    "parallel.share_gpus",
    "train.eval_",
    "train.log_every",
    "train.out",
    "train.overwrite",
    "train.sample_tokens",
    "train.steps",
)

TORCH_WRITER = (
    "inline_container"  # the file of torch that writes tensors; it names itself in errors
)
FULL_DISK_BYTES = 64 * 1024  # fewer are free where a write has just failed for want of space


class CheckpointError(SharedError, OSError):
    """A checkpoint could not be written; all ranks know, since all took part."""


class Checkpoints:
    """The checkpoints of one run, in `OUT/checkpoints`.

    Args:
        config: The run.
        grid: Its process groups.
        out: Folder of the run, the same for all ranks.
    """

    def __init__(self, config: Config, grid: Grid, out: Path) -> None:
        self.config = config
        self.grid = grid
        self.folder = out / "checkpoints"

    def save(self, state: RunState) -> Path:
        """Write a checkpoint and remove the oldest.

        It has a temporary name until every rank is done.

        Communicates: what `dcp.save` does, plans gathered on rank 0 and scattered; two broadcasts
        of a short text.

        Raises:
            CheckpointError: It could not be written, on every rank; nothing of it is left, the
                older ones are.
        Held by: tests/ranks/test_checkpoint.py::
            test_a_checkpoint_that_cannot_be_written_leaves_the_older_one
        """
        folder = self.folder / f"step-{state.batches.step:08d}"
        unfinished = folder.with_suffix(".partial")
        # of an earlier attempt that was killed while it wrote
        on_first_rank(self._remove_unfinished)
        try:
            dcp.save(state.tensors(), storage_writer=dcp.FileSystemWriter(unfinished))
            on_first_rank(lambda: self._complete(unfinished, folder, state.batches.step))
        except (CheckpointException, OSError, PeerError) as error:
            cause = self._cause(error)
            on_first_rank(self._remove_unfinished)
            message = f"checkpoint {folder} could not be written: {cause}"
            complete = self._complete_ones()
            if complete:
                message += f"; the last complete one is {complete[-1]}"
            raise CheckpointError(message) from None
        return folder

    def _cause(self, error: BaseException) -> str:
        """What went wrong, also where torch does not say that the disk was full.

        The writer of its files gives the reason of the system only if the first bytes of a tensor
        fail; if later ones do, it counts positions. So look at the disk while the files are there.
        """
        cause = first_cause(error)
        if TORCH_WRITER not in cause or "No space left" in cause:
            return cause
        free_bytes = shutil.disk_usage(self.folder.parent).free
        if free_bytes >= FULL_DISK_BYTES:
            return cause
        rank, _, _ = cause.partition(":")
        return f"{rank}: No space left on device ({free_bytes} bytes are free)"

    def _complete(self, unfinished: Path, folder: Path, step: int) -> None:
        """Describe the files that all ranks have written, rename their folder, remove old ones."""
        sizes = {file.name: file.stat().st_size for file in sorted(unfinished.iterdir())}
        about = {
            "step": step,
            "config": _plain(dataclasses.asdict(self.config)),
            "grid": _plain(dataclasses.asdict(self.grid.shape)),
            "files": sizes,
        }
        write_atomically(unfinished / ABOUT, json.dumps(about, indent=2).encode())
        # one of this step is damaged, or this run would have resumed from it
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
        # later ones are damaged, or from an attempt that this run resumed before
        later = [other for other in self._complete_ones() if other > folder]
        earlier = [other for other in self._complete_ones() if other <= folder]
        for old in later + earlier[: -self.config.checkpoint.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _remove_unfinished(self) -> None:
        for unfinished in self.folder.glob("*.partial"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def newest(self) -> Path | None:
        """The newest checkpoint that is complete, the same on all ranks; None if there is none.

        Raises:
            ValueError: It was written by another model, on other data or on another grid.
        """
        return on_first_rank(self._newest)

    def _newest(self) -> Path | None:
        for folder in reversed(self._complete_ones()):
            try:
                about = _read(folder)
            except _DamagedError as error:
                print(
                    f"checkpoint {folder} is damaged: {error}: looking for an older one", flush=True
                )
                continue
            self._check(about, folder)
            return folder
        return None

    def _check(self, about: dict[str, Any], folder: Path) -> None:
        """Compare the run that wrote a checkpoint with this one.

        Args:
            about: Its `run.json`.
            folder: The checkpoint.

        Raises:
            ValueError: They differ in more than `MAY_CHANGE`.
        """
        shape = _plain(dataclasses.asdict(self.grid.shape))
        if about["grid"] != shape:
            raise ValueError(
                f"{folder} was written on the grid {_grid(about['grid'])}, "
                f"this run is on {_grid(shape)}: "
                "start it as it was, or begin again in another train.out"
            )
        then = _flat(about["config"])
        now = _plain(field_paths(self.config))
        for name in sorted(now.keys() | then.keys()):
            if then.get(name) != now.get(name) and not name.startswith(MAY_CHANGE):
                raise ValueError(
                    f"{folder} was written with {name}={then.get(name)}, "
                    f"this run has {now.get(name)}: "
                    "resume with the same, or begin again in another train.out"
                )

    def _complete_ones(self) -> list[Path]:
        """Folders with their final name, oldest first; damaged ones included."""
        folders = self.folder.glob("step-*")
        return sorted(path for path in folders if re.fullmatch(r"step-\d+", path.name))


class _DamagedError(Exception):
    """A checkpoint whose files are not as they were written."""


def _read(folder: Path) -> dict[str, Any]:
    """`run.json` of a checkpoint, once the sizes of its files are checked.

    Raises:
        _DamagedError: A file is missing, shorter or not readable.
    """
    try:
        about = json.loads((folder / ABOUT).read_text())
        for name, size in about["files"].items():
            found = (folder / name).stat().st_size
            if found != size:
                raise _DamagedError(f"{name} has {found} bytes of {size}")
    except (OSError, ValueError, KeyError) as error:
        raise _DamagedError(f"{type(error).__name__}: {error}") from None
    return about


def _plain(value: Any) -> Any:
    """As JSON gives it back: tuples become lists."""
    return json.loads(json.dumps(value))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"steps": 3}} as {"train.steps": 3}."""
    flat = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _grid(shape: dict[str, Any]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in shape.items())
