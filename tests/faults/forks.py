"""Trainings as forks of a process that has torch imported: 0.3 s each in place of 5.

    done = train(["gpt_tiny", *SMALL, "--train.out", "run"], cwd=tmp_path, ranks=2)
    assert done.codes == [2, 2]
    assert done.errors == ["error: ..."]

    running = start(args, cwd=tmp_path, ranks=2)
    running.signal(1, signal.SIGTERM)
    done = running.wait()

Each rank is a process as `python -m labcode.train` would be: a session and a process group of its
own, its own folder, environment, descriptors 1 and 2, signal handlers, and exit code. Several ranks
get the variables of torchrun, but there is no agent. What differs from a real process: torch and
labcode were imported before the fork, so that what they read from the environment while they are
imported is that of the tests.

Tests import this module as `faults.forks`.
"""

import atexit
import contextlib
import functools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import psutil

from course.pool.fork_server import Child, ForkServer

from .waiting import comes, free_port

PRELOADED = (
    "torch",
    "torch._dynamo",  # optimizers import it at their first step
    "torch.utils.tensorboard",
    "labcode.train.__main__",
    "labcode.run.run",
    "tokenizers",
    "xarray",
    "zarr",
    "h5netcdf",
    "psutil",
    __name__,
)
# Variables of a parent that is itself a rank, or runs under SLURM: a rank here gets its own.
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM")
LEAVING_S = 60.0  # how long what a rank has started may need to end after it, on a busy machine
TIMEOUT_S = 240.0  # of a training that hangs; not for a busy machine, where it takes a tenth of it
LOOK_S = 0.02  # between two looks at a training

Patch = Callable[[], object]
Env = Mapping[str, str | None]


@dataclass
class Done:
    """What became of a training.

    Args:
        codes: The exit code of each rank; negative: the signal that ended it.
        out: What each rank wrote to stdout.
        err: What each rank wrote to stderr.
        hung: It did not end in time and was killed.
        left: Processes that ran on after their rank, and were killed.
        seconds: Wall time.
    """

    codes: list[int]
    out: list[str]
    err: list[str]
    hung: bool
    left: list[str]
    seconds: float

    @property
    def errors(self) -> list[str]:
        """All lines of all ranks that begin with "error: "."""
        lines = "\n".join(self.err).splitlines()
        return [line for line in lines if line.startswith("error: ")]

    @property
    def tracebacks(self) -> int:
        """How many tracebacks the ranks printed."""
        return "\n".join(self.err).count("Traceback (most recent call last)")


class Running:
    """A training that runs. `wait` must be called, or it must be used in a `with` block.

    When its time is over all of it is killed, whether anybody waits for it or not.

    Args:
        processes: The ranks.
        folder: Where their output goes; removed at the end.
        timeout_s: Time after which all are killed.
    """

    def __init__(self, processes: list[Child], folder: Path, timeout_s: float) -> None:
        self._processes = processes
        self._folder = folder
        self._started = time.monotonic()
        self._hung = False
        self._timeout_s = timeout_s
        self._timer = threading.Timer(timeout_s, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    @property
    def pids(self) -> list[int]:
        """The process number of each rank."""
        return [process.pid for process in self._processes]

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank; nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)

    def kill(self, rank: int) -> None:
        """Kill one rank."""
        self.signal(rank, signal.SIGKILL)

    def alive(self) -> bool:
        """Whether any rank runs."""
        return any(process.poll() is None for process in self._processes)

    def ended(self, rank: int) -> bool:
        """Whether one rank has ended."""
        return self._processes[rank].poll() is not None

    def text(self, rank: int = 0) -> str:
        """What a rank has written to stdout so far."""
        return _text(self._folder / f"{rank}.out")

    def until(self, true: Callable[[], object]) -> None:
        """Wait until something is true of the training, or it has ended."""
        comes(lambda: true() or not self.alive(), self._timeout_s, LOOK_S)

    def wait(self) -> Done:
        """Wait for all ranks. Nothing of them is left then."""
        for process in self._processes:
            process.wait()
        seconds = time.monotonic() - self._started
        left = [] if self._hung else self._left()
        self._end()
        done = Done(
            codes=[process.wait() for process in self._processes],
            out=[_text(self._folder / f"{rank}.out") for rank in range(len(self._processes))],
            err=[_text(self._folder / f"{rank}.err") for rank in range(len(self._processes))],
            hung=self._hung,
            left=left,
            seconds=seconds,
        )
        shutil.rmtree(self._folder, ignore_errors=True)
        return done

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _left(self) -> list[str]:
        """What still runs in the ranks' sessions, after it had some time to end."""
        comes(lambda: not _in_sessions(self.pids), LEAVING_S, LOOK_S)
        return [_described(process) for process in _in_sessions(self.pids)]

    def _give_up(self) -> None:
        """The time is over."""
        self._hung = self.alive()
        self._kill()

    def _kill(self) -> None:
        for member in _in_sessions(self.pids):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        for process in self._processes:
            process.kill()

    def _end(self) -> None:
        self._timer.cancel()
        self._kill()
        for process in self._processes:
            process.wait()


def train(
    args: Sequence[str],
    *,
    cwd: Path,
    ranks: int = 1,
    env: Env | Sequence[Env] | None = None,
    timeout_s: float = TIMEOUT_S,
    patch: Patch | None = None,
) -> Done:
    """`python -m labcode.train ARGS` on some ranks, until all have ended.

    Args:
        args: Arguments of the command line, the recipe first.
        cwd: The folder in which they run.
        ranks: How many.
        env: Environment variables to set, or to unset where the value is None; of all ranks, or
            one mapping for each.
        timeout_s: Time after which all are killed.
        patch: Called in each rank before the training; the rank's number is in RANK. A function of
            a module, a `functools.partial`, or anything that cloudpickle takes.
    """
    running = start(args, cwd=cwd, ranks=ranks, env=env, timeout_s=timeout_s, patch=patch)
    with running:
        return running.wait()


def start(
    args: Sequence[str],
    *,
    cwd: Path,
    ranks: int = 1,
    env: Env | Sequence[Env] | None = None,
    timeout_s: float = TIMEOUT_S,
    patch: Patch | None = None,
) -> Running:
    """Like `train`, but return at once."""
    folder = Path(tempfile.mkdtemp(prefix="labcode-forks-"))
    common = _clean_environment()
    if ranks > 1:
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    packed = cloudpickle.dumps(patch)
    children = []
    for rank in range(ranks):
        own = dict(common)
        if ranks > 1:
            own |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            own |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        changes = env if isinstance(env, Mapping) or env is None else env[rank]
        own = _changed(own, changes or {})
        words = list(map(str, args))
        output = folder / str(rank)
        child = _server().start(
            f"{__name__}:_rank",
            *(words, str(cwd), own, str(output), packed),
            log=output.with_suffix(".log"),
        )
        children.append(child)
    return Running(children, folder, timeout_s)


# ---- the server


_starting = threading.Lock()


def _server() -> ForkServer:
    """The process that ranks are forked from; it ends with this one."""
    with _starting:  # with the cache alone, threads that come at once would start a server each
        return _started()


@functools.cache
def _started() -> ForkServer:
    folder = Path(tempfile.mkdtemp(prefix="labcode-forks-"))
    path = os.pathsep.join(filter(None, sys.path))
    return ForkServer(PRELOADED, folder, env=_clean_environment() | {"PYTHONPATH": path})


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _clean_environment() -> dict[str, str]:
    """This process's environment, with one thread and without what launchers set."""
    inherited = os.environ.items()
    clean = {name: value for name, value in inherited if not name.startswith(LAUNCHERS)}
    return clean | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _changed(env: dict[str, str], changes: Env) -> dict[str, str]:
    changed = dict(env)
    for name, value in changes.items():
        if value is None:
            changed.pop(name, None)
        else:
            changed[name] = value
    return changed


# ---- a rank


def _rank(args: list[str], cwd: str, env: dict[str, str], output: str, packed: bytes) -> None:
    """The life of a rank, from the fork to its exit code."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # a job in the background of a shell ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _redirect(output)
    _set_environment(env)
    os.chdir(cwd)
    sys.argv = ["labcode.train", *args]
    code = _finished(args, packed)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # waits for threads that are no daemons, as every process does
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _finished(args: list[str], packed: bytes) -> int:
    """Run the program to its end; the exit code that Python would give the process."""
    try:
        patch = cloudpickle.loads(packed)
        if patch is not None:
            patch()
        from labcode.train.__main__ import main

        return main(args)
    except SystemExit as stop:
        if stop.code is None:
            return 0
        if isinstance(stop.code, int):
            return stop.code
        print(stop.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1


def _redirect(output: str) -> None:
    """Descriptors 1 and 2 go to files, and so does what C++ and child processes write."""
    for descriptor, suffix in ((1, ".out"), (2, ".err")):
        file = os.open(output + suffix, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )


# ---- afterwards


def _in_sessions(leaders: Sequence[int]) -> list[psutil.Process]:
    """The processes, no zombies, in the sessions of some ranks."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            running = process.status() != psutil.STATUS_ZOMBIE
            if running and os.getsid(process.pid) in leaders:
                found.append(process)
    return found


def _described(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    return str(process.pid)


def _text(path: Path) -> str:
    """What a rank wrote; nothing if it never came so far."""
    try:
        return path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return ""
