"""What runs in the process of a rank: it meets the others, and then does what it is asked for.

A request comes over the channel: a function to call, a cell to run, or the question where this rank
is. A failure is answered and changes nothing else: the pool ends the processes of all ranks then,
and the next call starts others.
"""

import contextlib
import gc
import inspect
import linecache
import os
import queue
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from course.pool import cells, recorder, wire
from course.pool.answers import failure_of, text_of
from labcode.comm.grid import made_by_grid
from labcode.runtime import bootstrap
from labcode.runtime.units import type_in_words


class Engine:
    """One rank.

    Args:
        channel: Channel to the pool.
        rank: Rank of this process.
        folder: Folder of the pool.
    """

    def __init__(self, channel: Connection, rank: int, folder: Path) -> None:
        self.rank = rank
        self.folder = folder
        self.cells: dict[str, Any] = {"__name__": "__main__"}  # what `%%px` cells have defined
        self._channel = channel
        self._sends = threading.Lock()
        self._requests: queue.SimpleQueue[Sequence[Any]] = queue.SimpleQueue()
        self._leftover: list[Any] = []  # process groups that the last call made

    def join(
        self, n: int, timeout_s: float, address: tuple[str, int], listener: int | None
    ) -> None:
        """Enter the process group of all ranks.

        Args:
            n: Number of ranks.
            timeout_s: How long a collective waits for a rank that does not come.
            address: Host and port, at which rank 0 keeps the store.
            listener: On rank 0 the descriptor that listens there.
        """
        recorder.start(str(self.folder), self.rank, n)
        store = dist.TCPStore(
            *address,
            n,
            is_master=listener is not None,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        place = bootstrap.Place(
            self.rank, n, local_rank=self.rank, local_world_size=n, launcher="pool"
        )
        world = bootstrap.start(place, share_gpus=True, timeout_s=timeout_s, store=store)
        recorder.finish()
        names = {"rank": self.rank, "world_size": n, "device": world.device}
        self.cells.update(names, torch=torch, dist=dist)

    def answer(self, message: dict[str, Any]) -> None:
        """Tell the pool something; from whatever thread."""
        with self._sends:
            self._channel.send(message)

    def listen(self) -> None:
        """In a thread: take requests as they come, and end this process with the pool."""
        while True:
            try:
                request = self._channel.recv()
            except (EOFError, OSError):
                os._exit(0)
            if request[0] == "where":
                self.answer({"where": self.rank, "frames": frames_of_main_thread()})
            else:
                self._requests.put(request)

    def serve(self) -> None:
        """Do what is asked for, one request after another."""
        while True:
            kind, *what = self._requests.get()
            self.answer(self._answer_to(kind, what))

    def _answer_to(self, kind: str, what: Sequence[Any]) -> dict[str, Any]:
        engine = os.getpid()
        self._drop_groups()
        recorder.begin()
        try:
            try:
                value = self._call(*what) if kind == "call" else self._run_cell(*what)
            finally:
                if os.getpid() != engine:
                    # A fork made by the user's code comes out of it as well. It must not answer:
                    # there is one engine, and one answer.
                    os._exit(0)
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                recorder.finish()
            result = self._stored(value, what[0]) if kind == "call" else None
        except BaseException as error:
            return {"failure": failure_of(error, self.rank)}
        return {"result": result}

    def _call(self, path: str, places: Sequence[str], pass_rank: bool) -> Any:
        """Run one function.

        Args:
            path: A file with the function and its arguments, as `wire.pack_call` packs them.
            places: Folders where the caller finds modules.
            pass_rank: Put this rank before the arguments.
        """
        before = set(distributed_c10d._world.pg_map)
        sys.path.extend(entry for entry in places if entry not in sys.path)
        try:
            fn, args, kwargs = wire.loads(Path(path).read_bytes())
            self._add_names_of_cells(fn)
            if pass_rank:
                args = (self.rank, *args)
            return fn(*args, **kwargs)
        finally:
            for group in distributed_c10d._world.pg_map:
                # Those of a grid serve the grids of the next calls: with the same ranks they are
                # made once per pool.
                if group not in before and not made_by_grid(group):
                    self._leftover.append(group)

    def _stored(self, value: Any, path: str) -> str:
        """Write the result of a call into a file of its own, and name it.

        Args:
            value: The result.
            path: The file of the call.
        """
        try:
            packed = wire.dumps(value)
        except Exception as error:
            raise TypeError(
                f"the result, {type_in_words(value)}, cannot be sent back: "
                f"{text_of(error)}: return numbers or tensors"
            ) from None
        result = Path(f"{path}-{self.rank}")
        result.write_bytes(packed)
        return str(result)

    def _run_cell(self, source: str, name: str) -> None:
        """Run a `%%px` cell.

        Args:
            source: Text of the code.
            name: Name by which tracebacks know it.
        """
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        cells.run(source, name, self.cells)

    def _add_names_of_cells(self, fn: Any) -> None:
        """A function from a notebook sees the names that `%%px` cells defined, as a cell does."""
        names = getattr(inspect.unwrap(fn), "__globals__", {})
        if names.get("__name__") == "__main__":
            for name, value in self.cells.items():
                names.setdefault(name, value)

    def _drop_groups(self) -> None:
        """Destroy the process groups that the last call made: by now all ranks have left it.

        Gloo keeps sockets and threads of a group until nothing refers to it, and the model that
        does may be in a circle.
        """
        if not self._leftover:
            return
        while self._leftover:
            with contextlib.suppress(ValueError):  # destroyed already, by the user
                dist.destroy_process_group(self._leftover.pop())
        gc.collect()


def frames_of_main_thread() -> list[tuple[str, int | None, str, str | None]]:
    """Where the user's code is in the main thread, as `answers.failure_of` has it."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    found = []
    for each in reversed(traceback.extract_stack(frame)):
        if each.filename in (__file__, cells.__file__):
            break
        if each.filename not in (recorder.__file__, bootstrap.__file__):
            found.append((each.filename, each.lineno, each.name, each.line))
    return found[::-1]


def _printed_to(path: Path) -> TextIO:
    """The file for what this rank prints, line by line; the pool reads it."""
    return open(path, "a", buffering=1, errors="replace")


def main(
    channel: int,
    listener: int,
    rank: int,
    n: int,
    folder: str,
    timeout_s: float,
    address: tuple[str, int],
) -> None:
    """One rank, until the pool ends.

    Args:
        channel: Descriptor of the connection to the pool.
        listener: Descriptor that listens at the address; for rank 0.
        rank: Rank of this process.
        n: Number of ranks.
        folder: Folder of the pool.
        timeout_s: How long a collective waits for a rank that does not come.
        address: Host and port, at which the ranks meet.
    """
    if n > 1:
        torch.set_num_threads(1)
    sys.stdout = _printed_to(Path(folder, f"out-{rank}"))
    sys.stderr = _printed_to(Path(folder, f"err-{rank}"))
    engine = Engine(Connection(channel), rank, Path(folder))
    threading.Thread(target=engine.listen, daemon=True).start()
    try:
        if rank != 0:
            os.close(listener)
        engine.join(n, timeout_s, address, listener if rank == 0 else None)
    except Exception as error:
        engine.answer({"failure": failure_of(error, rank)})
    else:
        engine.answer({"result": None})
    engine.serve()
