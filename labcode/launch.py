"""Run a module under torchrun from Python, for notebooks and tests: one call, one labelled output, one error.

    launch.run("labcode.train", "gpt_tiny", "--train.steps", "20", nproc=2)

A bare `!torchrun ...` in a notebook cannot fail: a non-zero exit is no error there, and Ctrl-C may leave ranks behind. Each
rank runs the module through this file (`python -m labcode.launch`), for two reasons: what it prints goes straight into one
pipe, so that a line written before a barrier comes before one written after it; and it notes which error ended it, as
torchrun's report cannot tell the first failure from the ranks that lose their peer in the same second.
"""

import contextlib
import io
import json
import os
import queue
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import psutil

GRACE_S = 5.0  # how long ranks may take to end after an interrupt, before they are killed
_REPORT = re.compile(
    r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+)"
)  # in torchrun's account of a failure


class LaunchError(RuntimeError):
    """A launched module failed: "rank 1 failed after 3.2 s: ValueError: ..."; that rank's traceback is a note of it.

    Args:
        message: The line above.
        rank: The rank that failed first; None when no single rank did.
        output: What all ranks printed until then.
    """

    def __init__(self, message: str, rank: int | None = None, output: str = ""):
        super().__init__(message)
        self.rank, self.output = rank, output


@dataclass(frozen=True)
class Completed:
    """A launch that succeeded.

    Args:
        output: What all ranks printed, each line as "[rank 1] ...".
        seconds: Wall time, start-up included.
    """

    output: str
    seconds: float


def run(
    module: str,
    *args,
    nproc: int = 2,
    timeout_s: float = 600.0,
    env_extra: dict[str, str] | None = None,
    echo: bool = True,
) -> Completed:
    """Run `python -m module args` on `nproc` ranks of this machine under torchrun and wait for them.

    Args:
        module: Dotted name, as after `python -m`.
        args: Command line of the module; each is turned into a string.
        nproc: Number of ranks.
        timeout_s: Time after which all ranks are ended.
        env_extra: Environment variables to add.
        echo: Print each line as it comes.

    Raises:
        LaunchError: A rank failed, or the time is over. No process is left then, nor after Ctrl-C.
        ValueError: `nproc` is not positive.
    """
    if nproc < 1:
        raise ValueError(f"nproc={nproc}: launch at least 1 rank")
    with tempfile.TemporaryDirectory(prefix="labcode-launch-") as folder:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--log-dir",
            folder,
        ]
        on_rank = [
            "-m",
            "labcode.launch",
            str(os.getpid()),
            folder,
            "${local_rank}",
        ]  # torchrun fills in the rank
        started = time.monotonic()
        with open(Path(folder, "torchrun.log"), "wb") as log:
            process = subprocess.Popen(
                [*torchrun, "--nproc-per-node", str(nproc), *on_rank, module, *map(str, args)],
                env={**os.environ, **(env_extra or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # of the ranks alone: torchrun itself writes to stderr
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the others
            )
        output = _Output(process, echo)
        try:
            in_time = output.follow(started + timeout_s)
        finally:
            _end(process)
            output.drain()
        seconds = time.monotonic() - started
        if not in_time:
            raise LaunchError(
                f"{module} did not end within {timeout_s:g} s: all {nproc} ranks were ended",
                None,
                output.text,
            )
        if process.returncode:
            raise _error(Path(folder), process.returncode, seconds, output.text)
        return Completed(output.text, seconds)


class _Output:
    """The lines that a process writes, collected and echoed as they come."""

    def __init__(self, process, echo):
        self.process, self.echo = process, echo
        self.lines, self.incoming, self.open = [], queue.SimpleQueue(), True
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def text(self):
        return "\n".join(self.lines)

    def _read(self):
        with self.process.stdout as stream:
            for line in stream:
                self.incoming.put(line.decode(errors="replace").rstrip("\n"))
        self.incoming.put(None)

    def _next(self, timeout_s):
        """Take one line; False if none came."""
        try:
            line = self.incoming.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if line is None:
            self.open = False
            return False
        self.lines.append(line)
        if self.echo:
            print(line, flush=True)
        return True

    def follow(self, deadline) -> bool:
        """Until the process ends; False if the deadline comes first."""
        while self.open or self.process.poll() is None:
            if time.monotonic() > deadline:
                return False
            if not self._next(0.1) and self.process.poll() is not None:
                break
            if not self.open:
                time.sleep(0.05)
        return True

    def drain(self):
        """What is still in the pipe; a stray grandchild that keeps it open is not waited for."""
        while self.open and self._next(1.0):
            pass


def _end(process):
    """End torchrun and all below it: a rank leads a session of its own, which a signal to torchrun's group cannot reach."""
    if process.poll() is not None:
        return
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [
            *psutil.Process(process.pid).children(recursive=True),
            psutil.Process(process.pid),
        ]
    try:
        process.send_signal(signal.SIGINT)  # torchrun passes it on: ranks may close their files
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


def _error(folder, code, seconds, output) -> LaunchError:
    """The first failure, from what the ranks noted and from torchrun's report."""
    notes = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    noted = {note["rank"] for note in notes}
    log = (folder / "torchrun.log").read_text(errors="replace")
    for rank, exit_code in (map(int, pair) for pair in _REPORT.findall(log)):
        if rank not in noted and exit_code not in (
            0,
            -signal.SIGTERM,
            -signal.SIGINT,
        ):  # these end the other ranks
            reason = f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
            # a crash comes before the errors it causes elsewhere; an abort may be caused itself, by NCCL's watchdog
            when = time.time() if exit_code == -signal.SIGABRT else 0.0
            notes.append({"rank": rank, "time": when, "error": reason, "traceback": ""})
    if not notes:
        lines = [line for line in log.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {code}"
        return LaunchError(f"torchrun failed after {seconds:.1f} s: {reason}", None, output)
    first = min(notes, key=lambda note: note["time"])
    # when all fail alike the message should not vary
    first = min(
        (note for note in notes if note["error"] == first["error"]), key=lambda note: note["rank"]
    )
    error = LaunchError(
        f"rank {first['rank']} failed after {seconds:.1f} s: {first['error']}",
        first["rank"],
        output,
    )
    if first["traceback"]:
        error.add_note(f"on rank {first['rank']}: {first['traceback'].rstrip()}")
    return error


# --------------------------------------------------------------------------------------------------------- on each rank


class _Labelled(io.RawIOBase):
    """Writes whole lines to a descriptor, each with its rank in front."""

    def __init__(self, descriptor, rank):
        self.descriptor, self.label, self.rest = descriptor, f"[rank {rank}] ".encode(), b""
        self.lock = threading.Lock()

    def writable(self):
        return True

    def fileno(self):
        return 1  # for child processes: their output is labelled by the relay

    def write(self, data):
        with self.lock:
            *lines, self.rest = (self.rest + bytes(data)).split(b"\n")
            if lines:  # of a progress bar that was redrawn in place the last state
                text = b"".join(
                    self.label + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in lines
                )
                os.write(self.descriptor, text)
        return len(data)

    def finish(self):
        if self.rest:
            self.write(b"\n")


def _relay(rank):
    """Label what C++ libraries and child processes write to stdout and stderr; outlives a crash of this process.

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
        while data := os.read(source, 65536):
            out.write(data)
        out.finish()
        os._exit(0)
    os.close(source)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)
    return pipe


def _main(parent, folder, rank, module, *args):
    """Run `module` as `__main__`; an error that ends it is noted and not printed, so that the first is shown and not n."""
    out = _Labelled(_relay(rank), rank)
    sys.stdout = sys.stderr = io.TextIOWrapper(
        out, encoding="utf-8", errors="replace", write_through=True
    )
    threading.Thread(target=_watch, args=(int(parent), os.getppid(), folder), daemon=True).start()
    sys.argv = [module, *args]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        _note(
            folder, rank, stop.code if isinstance(stop.code, str) else f"exit code {stop.code}", ""
        )
        sys.exit(1 if isinstance(stop.code, str) else stop.code)
    except BaseException as error:
        report = traceback.TracebackException.from_exception(error)
        report.stack[:] = [
            frame for frame in report.stack if frame.filename not in (__file__, "<frozen runpy>")
        ]
        _note(
            folder, rank, "".join(report.format_exception_only()).strip(), "".join(report.format())
        )
        sys.exit(1)
    finally:
        out.finish()


def _note(folder, rank, error, text):
    note = {"rank": int(rank), "time": time.time(), "error": error, "traceback": text}
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(note))


def _watch(launcher, torchrun, folder):
    """End this rank when those who started it are gone, even by SIGKILL: a closed notebook must not go on training."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(launcher)
        while (
            os.getppid() == torchrun
            and process.is_running()
            and process.status() != psutil.STATUS_ZOMBIE
        ):
            time.sleep(1.0)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _main(*sys.argv[1:])
