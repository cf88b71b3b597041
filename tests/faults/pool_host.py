"""`python -m tests.faults.pool_host RANKS`: the owner of a pool, on whose ranks things go wrong.

It reads lines from stdin, each a JSON object with the name of a fault and the rank that has it, and
answers each with a line: what the pool raised or returned, and whether it could be used afterwards.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 8.0

# ---- what the other rank waits in, while one raises


def _other(rank: int) -> int:
    return 1 - rank


WAITS: dict[str, Callable[[int], object]] = {
    "all_reduce": lambda rank: dist.all_reduce(torch.ones(3)),
    "all_gather": lambda rank: dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3)),
    "broadcast from the other": lambda rank: dist.broadcast(torch.ones(3), src=_other(rank)),
    "reduce": lambda rank: dist.reduce(torch.ones(3), dst=rank),
    "gather": lambda rank: dist.gather(torch.ones(3), [torch.ones(3), torch.ones(3)], dst=rank),
    "scatter": lambda rank: dist.scatter(torch.ones(3), src=_other(rank)),
    "all_to_all": lambda rank: dist.all_to_all_single(torch.ones(4), torch.ones(4)),
    "barrier": lambda rank: dist.barrier(),
    "recv": lambda rank: dist.recv(torch.ones(3), src=_other(rank)),
    "irecv": lambda rank: dist.irecv(torch.ones(3), src=_other(rank)).wait(),
    "all_gather_object": lambda rank: dist.all_gather_object([None, None], "x"),
    "broadcast_object_list": lambda rank: dist.broadcast_object_list([None], src=_other(rank)),
    "async all_reduce": lambda rank: dist.all_reduce(torch.ones(3), async_op=True).wait(),
    "new_group": lambda rank: dist.new_group([0, 1]),
    "monitored_barrier": lambda rank: dist.monitored_barrier(),
    "a long sleep": lambda rank: time.sleep(60),
    "a lock": lambda rank: _lock(),
    "a busy loop": lambda rank: _busy(),
    "a queue": lambda rank: _queue(),
    "a process": lambda rank: _process(),
}


def _lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _busy() -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass


def _queue() -> None:
    import queue

    queue.Queue().get()


def _process() -> None:
    import subprocess

    subprocess.run(["sleep", "60"], check=False)


# ---- what one rank does, while the other one does nothing


class _Hostile(Exception):
    def __str__(self) -> str:
        raise ValueError("no text for you")


class _Quits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class _Interrupts(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("will not travel")


class _Trap:
    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise RuntimeError("does not arrive")


def _raise(error: BaseException) -> None:
    raise error


def _recurse(depth: int = 0) -> int:
    return _recurse(depth + 1)


def _swallow() -> None:
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(60)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(60)


def _thread_in_collective() -> None:
    threading.Thread(target=dist.all_reduce, args=(torch.ones(3),), daemon=True).start()
    time.sleep(0.2)


def _fork() -> int:
    child = os.fork()
    if child == 0:
        time.sleep(0.5)
        os._exit(0)
    return 1


def _workers() -> int:
    from torch.utils.data import DataLoader

    loader = iter(DataLoader(list(range(8)), num_workers=1))  # pyright: ignore
    next(loader)
    return 1


def _kill(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


ERROR = "error"  # the pool raises a RankError that names the rank
DEATH = "death"  # it says that the rank is gone
FINE = "fine"  # it returns
ANY = "any"  # it may raise or return, with a pool that can be used afterwards

DEEDS: dict[str, tuple[Callable[[], object], str]] = {
    "ValueError": (lambda: _raise(ValueError("no good")), ERROR),
    "an error without a text": (lambda: _raise(RuntimeError()), ERROR),
    "an error of many lines": (lambda: _raise(ValueError("a\n" * 1000)), ERROR),
    "an error of 30 MB": (lambda: _raise(ValueError("x" * 30_000_000)), ERROR),
    "an error that has no text": (lambda: _raise(_Hostile()), ERROR),
    "an error whose text exits": (lambda: _raise(_Quits()), ERROR),
    "an error whose text interrupts": (lambda: _raise(_Interrupts()), ERROR),
    "an error that cannot travel": (lambda: _raise(ValueError(_Unpicklable())), ERROR),
    "KeyboardInterrupt": (lambda: _raise(KeyboardInterrupt()), ERROR),
    "StopIteration": (lambda: _raise(StopIteration()), ERROR),
    "GeneratorExit": (lambda: _raise(GeneratorExit()), ERROR),
    "a group of errors": (lambda: _raise(ExceptionGroup("two", [ValueError("a")])), ERROR),
    "sys.exit": (lambda: sys.exit(3), ERROR),
    "sys.exit with a text": (lambda: sys.exit("enough"), ERROR),
    "exit": (lambda: _raise(SystemExit()), ERROR),
    "MemoryError": (lambda: _raise(MemoryError()), ERROR),
    "too much memory": (lambda: torch.empty(10**15), ERROR),
    "endless recursion": (_recurse, ERROR),
    "an error in C++": (lambda: torch.ones(2) @ torch.ones(3), ERROR),
    "a result that cannot travel": (lambda: _Unpicklable(), ERROR),
    "a result that explodes": (lambda: _Trap(), ANY),
    "a lambda": (lambda: lambda: 1, ANY),
    "a generator": (lambda: (number for number in range(3)), ANY),
    "a lock as result": (threading.Lock, ANY),
    "a module": (lambda: os, ANY),
    "a file": (lambda: open("/dev/null"), ANY),  # noqa: SIM115
    "20 MB": (lambda: torch.zeros(5_000_000), FINE),
    "a tensor with a graph": (lambda: torch.ones(2, requires_grad=True) * 2, FINE),
    "a sparse tensor": (lambda: torch.eye(3).to_sparse(), FINE),
    "SIGSEGV": (lambda: ctypes.string_at(0), DEATH),
    "SIGKILL": (lambda: _kill(signal.SIGKILL), DEATH),
    "SIGTERM": (lambda: _kill(signal.SIGTERM), ANY),
    "SIGABRT": (os.abort, DEATH),
    "os._exit(0)": (lambda: os._exit(0), DEATH),
    "os._exit(3)": (lambda: os._exit(3), DEATH),
    "SIGSTOP": (lambda: _kill(signal.SIGSTOP), ANY),
    "errors are swallowed": (_swallow, ANY),
    "interrupts are ignored": (_ignore_interrupts, ANY),
    "the process group is destroyed": (dist.destroy_process_group, ANY),
    "a thread in a collective": (_thread_in_collective, ANY),
    "a fork": (_fork, FINE),
    "a DataLoader left open": (_workers, ANY),
    "50000 lines": (lambda: print("\n".join(map(str, range(50_000)))), FINE),
    "half a line": (lambda: print("no end", end=""), FINE),
    "bytes that are no text": (lambda: os.write(1, b"\xff\xfe\n"), FINE),
    "stdout closed": (lambda: os.close(1), ANY),
    "sys.stdout closed": (lambda: sys.stdout.close(), ANY),
    "another folder": (lambda: os.chdir("/"), FINE),
    "a warning": (lambda: warnings.warn("mind", stacklevel=1), FINE),
    "a handler of signals": (lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN) and None, FINE),
    "a thread that prints": (lambda: threading.Timer(0.2, print, ["late"]).start(), FINE),
    "an environment emptied": (os.environ.clear, ANY),
    "sys.path emptied": (sys.path.clear, ANY),
    "the default device changed": (lambda: torch.set_default_device("meta"), ANY),
}
# deeds that never end: there the other rank raises, so that the pool must end them
ENDLESS = ("SIGTERM", "SIGSTOP", "errors are swallowed", "interrupts are ignored")
# both ranks in one collective, with what does not fit
MISMATCHES: dict[str, Callable[[int], object]] = {
    "shapes in all_reduce": lambda rank: dist.all_reduce(torch.ones(3 + rank)),
    "many more numbers in all_reduce": lambda rank: dist.all_reduce(torch.ones(3 + 10000 * rank)),
    "dtypes in all_reduce": lambda rank: dist.all_reduce(
        torch.ones(4, dtype=torch.float64 if rank else torch.float32)
    ),
    "shapes in broadcast": lambda rank: dist.broadcast(torch.ones(3 + rank), src=0),
    "two collectives": lambda rank: (
        dist.all_reduce(torch.ones(3)) if rank else dist.broadcast(torch.ones(3), src=0)
    ),
    "one more call": lambda rank: [dist.all_reduce(torch.ones(3)) for _ in range(1 + rank)],
    "both receive": lambda rank: dist.recv(torch.ones(3), src=1 - rank),
}


def play(ranks: Any, fault: str, kind: str, who: int) -> dict[str, Any]:
    """Let a fault happen and say what the pool made of it."""
    from labcode.pool.ranks import RankError

    started = time.monotonic()
    text = ""
    raised = ""
    try:
        if kind == "wait":
            ranks.run(_wait_or_raise, fault, who)
        elif kind == "deed":
            ranks.run(_do, fault, who)
        else:
            ranks.run(_mismatch, fault)
    except RankError as error:
        raised, text = "RankError", str(error)
    except BaseException as error:
        raised, text = type(error).__name__, str(error)
    seconds = time.monotonic() - started
    usable = _usable(ranks)
    return {
        "raised": raised,
        "text": text[:2000],
        "length": len(text),
        "seconds": seconds,
        "usable": usable,
    }


def _wait_or_raise(rank: int, fault: str, who: int) -> None:
    if rank == who:
        raise ValueError("no good")
    WAITS[fault](rank)


def _do(rank: int, fault: str, who: int) -> object:
    if rank == who:
        return DEEDS[fault][0]()
    if fault in ENDLESS:
        time.sleep(0.5)
        raise ValueError("enough")
    return None


def _mismatch(rank: int, fault: str) -> None:
    torch.set_default_device("cpu")  # an earlier fault may have changed it
    MISMATCHES[fault](rank)


def _sum(rank: int) -> float:
    total = torch.tensor(float(rank + 1), device="cpu")
    dist.all_reduce(total)
    return total.item()


def _usable(ranks: Any) -> str:
    """Empty if the pool computes, at once or after the restart that it asks for."""
    try:
        return _computes(ranks)
    except BaseException as error:
        if "restart" not in str(error):
            return f"next call: {type(error).__name__}: {str(error)[:300]}"
    try:
        ranks.restart()
        return _computes(ranks)
    except BaseException as error:
        return f"after a restart: {type(error).__name__}: {str(error)[:300]}"


def _computes(ranks: Any) -> str:
    sums = ranks.run(_sum)
    return "" if sums == [3.0, 3.0] else f"a wrong sum: {sums}"


def main() -> None:
    """Serve faults until stdin closes."""
    from labcode.pool.ranks import Ranks

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what ranks print is no answer
    warnings.simplefilter("ignore")
    with Ranks(2, timeout_s=TIMEOUT_S) as ranks:
        answers.write('{"ready": true}\n')
        for line in sys.stdin:
            order = json.loads(line)
            answers.write(json.dumps(play(ranks, **order)) + "\n")


if __name__ == "__main__":
    main()
