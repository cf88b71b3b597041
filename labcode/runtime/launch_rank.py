"""What runs on each rank of `launch.run`.

    python -m labcode.runtime.launch_rank LAUNCHER FOLDER RANK MODULE ARGS

Each rank runs its module through this file for two reasons. What it prints goes straight into one
pipe, so that a line written before a barrier comes before one written after it. And it notes which
error ended it, as torchrun's report cannot tell the first failure from the ranks that lose their
peer in the same second.
"""

import contextlib
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

from labcode.runtime import processes
from labcode.runtime.files import write_atomically


class _Labelled(io.RawIOBase):
    """Writes whole lines to a descriptor, each with its rank in front."""

    def __init__(self, descriptor: int, rank: str) -> None:
        self.descriptor = descriptor
        self.label = f"[rank {rank}] ".encode()
        self.rest = b""  # of a line whose end has not come yet
        self.lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1  # for child processes: their output is labelled by the relay

    def write(self, data: bytes) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        with self.lock:
            *lines, self.rest = (self.rest + bytes(data)).split(b"\n")
            text = b""
            for line in lines:
                # A progress bar is redrawn in place: only its last state is passed on.
                last_state = line.rstrip(b"\r").rpartition(b"\r")[2]
                text += self.label + last_state + b"\n"
            if text:
                os.write(self.descriptor, text)
        return len(data)

    def finish(self) -> None:
        """Write what is left of an unfinished line."""
        if self.rest:
            self.write(b"\n")


def _relay(rank: str) -> int:
    """Label what C++ libraries and child processes write to stdout and stderr.

    A process of its own does it, which outlives a crash of this one.

    Returns:
        The descriptor of the pipe to the process that launched the ranks.
    """
    pipe = os.dup(1)
    source, sink = os.pipe()
    if os.fork() == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(sink)
        out = _Labelled(pipe, rank)
        data = os.read(source, 65536)
        while data:
            out.write(data)
            data = os.read(source, 65536)
        out.finish()
        os._exit(0)
    os.close(source)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)
    return pipe


def main(launcher: str, folder: str, rank: str, module: str, *args: str) -> None:
    """Run `module` as `__main__`.

    An error that ends it is noted and not printed: the launcher shows the first one, not n of them.
    """
    ending = processes.Ending()
    out: Any = _Labelled(_relay(rank), rank)  # it writes and flushes, which is all that is asked
    stream = io.TextIOWrapper(out, encoding="utf-8", errors="replace", write_through=True)
    sys.stdout = stream
    sys.stderr = stream
    # A closed notebook must not go on training. torchrun's main thread has started this process.
    processes.end_with_parents(
        int(launcher), before_end=lambda: _remove_for(int(launcher), folder), at_once=True
    )
    # of an attempt before this one, after which torchrun has started all ranks again
    Path(folder, f"rank-{rank}.json").unlink(missing_ok=True)
    sys.argv = [module, *args]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        ending.with_code(0)
    except SystemExit as stop:
        if stop.code in (None, 0):
            sys.exit(ending.with_code(0))
        if isinstance(stop.code, str):
            _note(folder, rank, stop.code)
            sys.exit(1)
        _note(folder, rank, f"exit code {stop.code}")
        sys.exit(stop.code)
    except BaseException as error:
        report = traceback.TracebackException.from_exception(error)
        _forget_own_frames(report.stack)
        last_line = "".join(report.format_exception_only()).strip()
        _note(folder, rank, last_line, "".join(report.format()))
        sys.exit(1)
    finally:
        out.finish()


def _remove_for(launcher: int, folder: str) -> None:
    """Remove the folder of a launcher that cannot do so; one that lives will read it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if processes.alive(psutil.Process(launcher)):
            return
    processes.remove_from_outside(folder)


def _forget_own_frames(stack: traceback.StackSummary) -> None:
    ours = (__file__, "<frozen runpy>")
    stack[:] = [frame for frame in stack if frame.filename not in ours]


def _note(folder: str, rank: str, error: str, text: str = "") -> None:
    """Write down which error ended this rank, and when."""
    note = {"rank": int(rank), "time": time.time(), "error": error, "traceback": text}
    write_atomically(Path(folder, f"rank-{rank}.json"), json.dumps(note).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
