"""How the batches of a training come to its device: read at once, or by workers ahead of time.

Whoever reads, the batch of a step is a function of seed and step alone. So a run is the same for
every number of workers, and after a resume, a rollback or a jump. The place in the data that a
checkpoint keeps is that of `sampler.Batches`, which the loop advances when a step is done: what was
read ahead and not trained on does not count.

    Loader -> source: _InProcess | _Workers | dali.DaliSource -> StepReader -> dataset[indices]
                                      on a GPU a CopyAhead stands between the two
"""

import atexit
import copy
import errno
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from labcode.config import LoaderConfig
from labcode.data.copy_ahead import CopyAhead
from labcode.data.errors import DataError
from labcode.data.sampler import Batches
from labcode.runtime import processes

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, targets

# what the process that workers are forked from imports, if this process has it too
PRELOADED = ("labcode.data.loader", "xarray", "zarr", "h5netcdf", "h5py")
# Workers do as their rank does, which answers these: a SIGTERM of SLURM goes to every process of a
# job, and a checkpoint may need one more batch.
BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TOLD_S = 2.0  # within which the end of a worker is known
JOIN_S = 5.0  # how long a worker that was killed may take to be gone


@runtime_checkable
class DrawsAnew(Protocol):
    """A dataset whose samples are drawn anew in each epoch, such as random crops."""

    def in_epoch(self, epoch: int) -> Any:
        """The same dataset, with what it draws in that epoch."""
        ...


class StepReader(Dataset):
    """What this rank reads at a step: `reader[step]`, in micro-batches, on the CPU.

    It is a function of the step alone, and can be sent to another process.

    Args:
        dataset: `dataset[indices] -> (inputs [B, ...], targets [B, ...])`.
        batches: Which samples a step takes; its own position is not looked at.
        num_parts: Micro-batches of a step.

    Held by: tests/unit/test_loader.py
    """

    def __init__(self, dataset: Any, batches: Batches, num_parts: int) -> None:
        self.dataset = dataset
        self.batches = copy.copy(batches)
        self.num_parts = num_parts

    def parts(self, step: int) -> tuple[Any, list[np.ndarray]]:
        """(The dataset as it is in the epoch of a step, the samples of each micro-batch)."""
        data = self.dataset
        if isinstance(data, DrawsAnew):
            data = data.in_epoch(self.batches.epoch_of(step))
        return data, np.array_split(self.batches.indices(step), self.num_parts)

    def __getitem__(self, step: int) -> list[Batch]:
        """(inputs, targets) of each micro-batch.

        Raises:
            DataError: The dataset has found something wrong in them.
        """
        data, parts = self.parts(step)
        return [read(data, part) for part in parts]


def read(data: Any, indices: np.ndarray) -> Batch:
    """Some samples of a dataset.

    Raises:
        DataError: It has found something wrong in them, such as NaN in a file that is read as it
            is needed.
    """
    try:
        return data[indices]
    except ValueError as error:
        raise DataError(str(error)) from error


class Source(Protocol):
    """Where the batches of consecutive steps come from."""

    def begin(self, step: int) -> None:
        """The next batch is that of this step; called again for a jump."""
        ...

    def next(self) -> list[Batch]:
        """The batch of the next step."""
        ...

    def close(self) -> None:
        """End all that reads ahead."""
        ...


class Loader:
    """The batches of a training, step by step, on the device.

    Args:
        dataset: As for `StepReader`.
        batches: Which samples a step takes.
        num_parts: Micro-batches of a step.
        config: Who reads, and how far ahead.
        device: Device that the batches go to.
        dtype: Dtype of floating-point samples on the device; None: they keep theirs.

    Attributes:
        waited_s: Seconds that `take` has kept the loop waiting so far, all steps together: the
            whole of reading where nothing is read ahead, else what reading ahead does not hide.
        steps_taken: Batches taken so far.

    Raises:
        ValueError: A backend that is not installed, or that cannot read this dataset.

    Held by: tests/unit/test_loader.py, tests/ranks/test_loader_in_training.py
    """

    def __init__(
        self,
        dataset: Any,
        batches: Batches,
        num_parts: int = 1,
        config: LoaderConfig | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.batches = batches
        self.config = config or LoaderConfig()
        self.device = torch.device(device)
        self.dtype = dtype
        self.waited_s = 0.0
        self.steps_taken = 0
        self._source = self._make_source(StepReader(dataset, batches, num_parts))
        self._next_step: int | None = None

    def _make_source(self, reader: StepReader) -> Source:
        on_gpu = self.device.type == "cuda"
        if self.config.backend == "dali":
            # an optional package of 1 GB: only who asks for it imports it
            from labcode.data.dali import DaliSource

            return DaliSource(reader, self.config, self.device)
        pinned = self.config.pin_memory and on_gpu
        if self.config.workers == 0:
            return _InProcess(reader, pinned)
        workers = _Workers(reader, self.config.workers, self.config.prefetch, pinned)
        return CopyAhead(workers, self.device) if on_gpu else workers

    def take(self, step: int) -> list[Batch]:
        """The micro-batches of a step; those that follow are read ahead.

        Any step can be asked for. One that does not follow the last one drops what was read ahead.

        Raises:
            DataError: A sample cannot be read, or a worker has died.
        """
        started = time.perf_counter()
        if step != self._next_step:
            self._source.begin(step)
        self._next_step = None  # until this one is there
        batches = self._source.next()
        self._next_step = step + 1
        self.waited_s += time.perf_counter() - started
        self.steps_taken += 1
        return [self._to_device(batch) for batch in batches]

    def read(self, dataset: Any, parts: Sequence[np.ndarray]) -> list[Batch]:
        """Some samples of any dataset, such as that for validation, read now by this process.

        Args:
            dataset: As for `StepReader`.
            parts: Indices of the samples of each batch.

        Raises:
            DataError: A sample cannot be read.
        """
        return [self._to_device(read(dataset, part)) for part in parts]

    def close(self) -> None:
        """End the workers; the next `take` starts them again."""
        self._source.close()
        self._next_step = None

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _to_device(self, batch: Batch) -> Batch:
        inputs, targets = batch
        return self._moved(inputs), self._moved(targets)

    def _moved(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.dtype if self.dtype and x.is_floating_point() else x.dtype
        return x.to(self.device, dtype, non_blocking=True)


class _InProcess:
    """The training process reads each batch when it is asked for."""

    def __init__(self, reader: StepReader, pinned: bool) -> None:
        self.reader = reader
        self.pinned = pinned
        self._step = 0

    def begin(self, step: int) -> None:
        self._step = step

    def next(self) -> list[Batch]:
        batches = self.reader[self._step]
        self._step += 1
        if self.pinned:
            return [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in batches]
        return batches

    def close(self) -> None:
        pass


# ---- workers


@dataclass(frozen=True)
class _Failure:
    """What a worker could not read, in one line: an exception would bring its traceback along."""

    text: str


class _Guarded(Dataset):
    """A reader in a worker, whose errors are values: an exception would bring 80 lines along."""

    def __init__(self, reader: StepReader) -> None:
        self.reader = reader

    def __getitem__(self, step: int) -> list[Batch] | _Failure:
        try:
            batches = self.reader[step]
            # Done here, where an error can be told: the thread of multiprocessing that would do it
            # prints its errors and drops the batch, for which the rank then waits forever.
            for batch in batches:
                for tensor in batch:
                    tensor.share_memory_()
            return batches
        except DataError as error:
            return _Failure(str(error))
        except MemoryError as error:
            text = f"a loader worker is out of memory ({error})" if str(error) else ""
            return _Failure(f"{text or 'a loader worker is out of memory'}: {FEWER}")
        except Exception as error:
            if _lacks_shared_memory(error):
                return _Failure(f"a loader worker found no more shared memory: {ENLARGE}")
            what = " ".join(f"{type(error).__name__}: {error}".split())
            return _Failure(
                f"a loader worker failed at the batch of step {step}: {what}{_place_of(error)}: "
                "--loader.workers 0 reads in the training process and shows the whole traceback"
            )


FEWER = "lower loader.workers or loader.prefetch"
ENLARGE = (
    "enlarge /dev/shm (docker: --shm-size=8g or --ipc=host), lower loader.workers or "
    "loader.prefetch, or use --loader.workers 0"
)


def _place_of(error: Exception) -> str:
    """ " (file, line 12)": the innermost line that belongs to no installed package."""
    for entry in reversed(traceback.extract_tb(error.__traceback__)):
        if "site-packages" not in entry.filename:
            return f" ({Path(entry.filename).name}, line {entry.lineno})"
    return ""


def _lacks_shared_memory(error: Exception) -> bool:
    """Whether an error is that of a full /dev/shm, where workers put what they have read."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return error.filename is None  # semaphores have no name; a full disk names its file
    # how torch says it, which makes a RuntimeError of it: "unable to allocate shared memory(shm)",
    # "unable to write to file </torch_32632_2>", "unable to mmap 512 bytes from file </torch_...>"
    text = str(error)
    is_torch = isinstance(error, RuntimeError) and "unable to " in text
    return is_torch and ("shared memory" in text or "</torch_" in text)


class _Steps(Sampler):
    """The steps from one on, without end."""

    def __init__(self) -> None:
        self.first = 0

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.first)


class _Workers:
    """torch's DataLoader, in which each worker reads whole steps.

    Workers are forked from a server: a process that was started for that, has imported torch and
    has no threads. A fork of the rank itself would be there sooner, by the seconds of that import,
    but it would also hold the rank's connections and the lock of its run, so that the other ranks
    would not notice its death and its successor could not begin; and locks that other threads held
    at that moment, such as those of OpenMP, HDF5 and gloo, would stay locked in it.

    Workers end with their rank, also when it is killed (`processes.end_with_parents`).

    Args:
        reader: What they read.
        workers: How many there are, at least 1.
        prefetch: Steps that each of them reads ahead.
        pinned: A thread of this process copies what they have read to page-locked memory.
    """

    def __init__(self, reader: StepReader, workers: int, prefetch: int, pinned: bool) -> None:
        self.reader = reader
        self.workers = workers
        self.prefetch = prefetch
        self.pinned = pinned
        self._steps = _Steps()
        self._loader: DataLoader | None = None
        self._iterator: Any = None

    def begin(self, step: int) -> None:
        self._steps.first = step
        with warnings.catch_warnings():
            # "our suggested max number of worker ...": lesson 02 shows that more is not faster
            warnings.simplefilter("ignore", UserWarning)
            if self._loader is None:
                self._loader = self._make_loader()
            # workers that are there already are kept, and what they have read is dropped
            self._iterator = self._guarded(partial(iter, self._loader))

    def _make_loader(self) -> DataLoader:
        _start_server()
        # runs before the hook of multiprocessing, which would wait for workers forever
        atexit.register(_close_at_exit, weakref.ref(self))
        return DataLoader(
            _Guarded(self.reader),
            batch_size=None,  # a "sample" is the whole batch of a step
            sampler=self._steps,
            num_workers=self.workers,
            prefetch_factor=self.prefetch,
            collate_fn=_as_it_is,
            pin_memory=self.pinned,
            persistent_workers=True,
            multiprocessing_context=multiprocessing.get_context("forkserver"),
            worker_init_fn=partial(_begin_worker, os.getpid()),
            # else it would draw from the generator that dropout draws from
            generator=torch.Generator(),
        )

    def next(self) -> list[Batch]:
        found = self._guarded(partial(next, self._iterator))
        if isinstance(found, _Failure):
            raise DataError(found.text)
        return found

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Say in one line that a worker has died or could not be given what it needs.

        torch finds out within 5 s, or meets the closed connection of the worker before.
        """
        try:
            return work()
        except (RuntimeError, OSError, EOFError) as error:
            if _lacks_shared_memory(error):
                text = f"the loader's workers find no more shared memory: {ENLARGE}"
                raise DataError(text) from error
            dead = self._dead_worker()
            if dead is None and isinstance(error, EOFError | ConnectionError):
                # torch's own words and numbers come as a RuntimeError: this is about a pipe
                text = (
                    "the process that starts the loader's workers has ended, as it is when memory "
                    f"runs out: {FEWER}, or use --loader.workers 0"
                )
                raise DataError(text) from error
            if dead is None:
                raise
            raise DataError(_why_it_died(dead)) from error

    def _dead_worker(self) -> Any:
        """A worker that has ended, or None; the server tells of an end a moment later."""
        deadline = time.monotonic() + TOLD_S
        while time.monotonic() < deadline:
            for worker in self._processes():
                if not worker.is_alive():
                    return worker
            time.sleep(0.05)
        return None

    def _processes(self) -> list[Any]:
        return list(getattr(getattr(self._loader, "_iterator", None), "_workers", ()))

    def close(self) -> None:
        iterator = getattr(self._loader, "_iterator", None)
        self._loader = None
        self._iterator = None
        if iterator is None:
            return
        workers = list(iterator._workers)
        # A worker may be reading for seconds. It is killed, unless a thread reads what it sends,
        # which would wait for the rest of a message forever.
        if not self.pinned:
            _kill(workers)
            # one that was killed may have held the lock of their common event, and nobody is left
            # who would ask for the event
            iterator._workers_done_event = threading.Event()
        iterator._shutdown_workers()
        _kill(workers)


def _close_at_exit(workers: "weakref.ref[_Workers]") -> None:
    """A process that has forgotten to close a loader ends all the same."""
    there = workers()
    if there is not None:
        there.close()


def _kill(workers: Sequence[Any]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        worker.join(JOIN_S)


def _as_it_is(batches: Any) -> Any:
    return batches


def _start_server() -> None:
    """Start what workers are forked from, unless it runs: once for this process.

    The signals are blocked in it from the beginning, and so in all workers.
    """
    names = [name for name in PRELOADED if name in sys.modules]
    multiprocessing.get_context("forkserver").set_forkserver_preload(names)
    # its start unblocks signals: it comes before
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(rank_pid: int, _number: int) -> None:
    """What each worker does first."""
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    # The server may outlive its rank, as each worker holds the pipe on which it waits for the end
    # of all; workers look for the rank each second, and take the server along.
    processes.end_with_parents(rank_pid, at_once=True)
    sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of a worker's thread, unless the rank has broken off the connection.

    The thread of multiprocessing that passes tensors to the rank meets that when the rank is
    killed. Errors of reading do not come here: they travel to the rank.
    """
    if not isinstance(error, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


def _why_it_died(worker: Any) -> str:
    """One line about a worker that has ended by itself."""
    code = worker.exitcode
    who = f"loader worker {worker.pid}"
    if code == -signal.SIGBUS:
        return f"{who} found no more shared memory (SIGBUS): {ENLARGE}"
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        reason = ", as it is when memory runs out" if name == "SIGKILL" else ""
        return f"{who} was ended by {name}{reason}: {FEWER}, or use --loader.workers 0"
    return f"{who} ended with exit code {code}: what it said is above; try --loader.workers 0"
