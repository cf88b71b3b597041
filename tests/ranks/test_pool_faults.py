"""What users do to a pool of ranks that nobody planned for: one line, and a pool that works."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from course.pool import limits
from course.pool.ranks import RankError, Ranks


@pytest.fixture(scope="module")
def pool():
    """A pool that tests may break."""
    with Ranks(2) as pool:
        yield pool


def works(pool):
    def all_reduced(rank):
        x = torch.tensor([rank])
        dist.all_reduce(x)
        return x.item()

    return pool.run(all_reduced) == [1, 1]


# ---- ranks that leave


def leave(rank, *code):
    if rank == 1:
        exit(*code)
    dist.barrier()


@pytest.mark.parametrize(("code", "text"), [((), "exit()"), ((3,), "exit(3)")])
def test_exit_on_a_rank_is_an_error_of_that_call(pool, code, text):
    with pytest.raises(RankError) as caught:
        pool.run(leave, *code)
    assert str(caught.value) == f"rank 1 called {text}: its process is needed: use return"
    assert works(pool)


def test_an_engine_that_is_told_to_end_is_named(pool):
    def told(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    text = r"^process of rank 1 died \(told to end by SIGTERM\): the next call"
    with pytest.raises(RankError, match=text):
        pool.run(told)
    assert works(pool)


# ---- errors and results that misbehave


def test_a_message_of_megabytes_is_cut_in_its_middle(pool):
    def verbose():
        raise ValueError("begin" + "x" * 30_000_000 + "end")

    with pytest.raises(RankError) as caught:
        pool.run(verbose)
    text = str(caught.value)
    assert text.startswith("rank 0: ValueError: beginxxx") and text.endswith("xxxend")
    assert "x ... [29996008 characters left out] ... x" in text
    assert works(pool)


class _Silent(Exception):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def __str__(self):
        raise self.kind


class _Hostile:
    """Raises when it is packed, or when it is unpacked."""

    def __init__(self, error, where):
        self.error = error
        self.where = where

    def __getstate__(self):
        if self.where == "rank":
            raise self.error
        return self.__dict__

    def __setstate__(self, state):
        raise state["error"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, KeyError])
def test_an_error_whose_text_raises_is_that_of_its_rank(pool, kind):
    def fail(rank, error, kind):
        if rank == 1:
            raise error(kind)
        dist.barrier()

    text = f"^rank 1: _Silent: <no message: its __str__ raised {kind.__name__}>"
    with pytest.raises(RankError, match=text):
        pool.run(fail, _Silent, kind)
    assert works(pool)


RESULTS = [
    (ValueError("no"), "rank", "TypeError: the result, a _Hostile, cannot be sent back: no: "),
    (SystemExit(2), "rank", "called exit(2)"),
    (KeyboardInterrupt(), "rank", "KeyboardInterrupt"),
    (ValueError("no"), "here", "the result arrived but cannot be read here: ValueError: no: "),
    (SystemExit(2), "here", "the result arrived but cannot be read here: SystemExit: 2: "),
]


@pytest.mark.parametrize(("error", "where", "text"), RESULTS)
def test_a_result_that_cannot_travel_is_that_of_its_rank(pool, error, where, text):
    def result(rank, kind, error, where):
        return kind(error, where) if rank == 1 else None

    with pytest.raises(RankError) as caught:
        pool.run(result, _Hostile, error, where)
    assert str(caught.value).startswith("rank 1") and text in str(caught.value)
    assert caught.value.rank == 1
    assert works(pool)


# ---- processes of the ranks


def test_what_ranks_start_does_not_hang_and_ends_with_the_pool(survivors):
    def fork():
        if os.fork() == 0:
            return "a second answer"
        return "the answer"

    def left_open():
        from torch.utils.data import DataLoader

        global batches
        loader = DataLoader(torch.arange(8), num_workers=1, persistent_workers=True)
        batches = iter(loader)
        sleeper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        sleeper.start()
        return next(batches).item()

    def in_processes():
        with multiprocessing.get_context("fork").Pool(2) as workers:
            return workers.map(abs, [1, -2])

    with Ranks(1) as pool:
        assert pool.run(fork) == ["the answer"]
        assert pool.run(in_processes) == [[1, 2]]
        assert pool.run(left_open) == [0]
        engine = psutil.Process(pool.run(os.getpid)[0])
        children = engine.children(recursive=True)
        assert len(children) >= 2
        assert pool.run(os.getpid) == [engine.pid]
    assert survivors([engine, *children]) == []


OWNER = """
import os, sys, time
from course.pool.ranks import Ranks

pool = Ranks(2)
print(*pool.run(os.getpid), flush=True)
time.sleep(1000)
"""


def test_a_stopped_engine_ends_with_its_owner(survivors):
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    engines = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    family = psutil.Process(owner.pid).children(recursive=True)
    engines[1].suspend()
    owner.kill()
    owner.wait()
    assert survivors([*engines, *family]) == []


def test_threads_of_a_notebook_take_turns(pool):
    def both(rank, number):
        x = torch.tensor([number])
        dist.all_reduce(x)
        return x.item()

    found = {}

    def ask(number):
        found[number] = pool.run(both, number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [2 * number] * 2 for number in range(6)}


def test_a_fork_of_the_notebook_has_no_pool(pool):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            pool.run(os.getpid)
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    text = f"this pool of 2 ranks belongs to process {os.getpid()}, and this one is a fork of it: "
    assert os.read(reader, 1000).decode().startswith(text)
    assert works(pool)


# ---- limits


BAD = [
    ({"n": "2"}, "Ranks(n='2', timeout_s=30.0): the number of ranks is a whole number"),
    ({"n": 2.5}, "Ranks(n=2.5, timeout_s=30.0): the number of ranks is a whole number"),
    ({"n": True}, "Ranks(n=True, timeout_s=30.0): the number of ranks is a whole number"),
    ({"n": None}, "Ranks(n=None, timeout_s=30.0): the number of ranks is a whole number"),
    ({"n": -1}, "Ranks(n=-1, timeout_s=30.0): a pool needs at least 1 rank"),
    ({"n": 2, "timeout_s": "30"}, "Ranks(n=2, timeout_s='30'): the number of ranks is"),
    ({"n": 2, "timeout_s": float("nan")}, "Ranks(n=2, timeout_s=nan): a time-out is at most"),
    ({"n": 2, "timeout_s": float("inf")}, "Ranks(n=2, timeout_s=inf): a time-out is at most"),
    ({"n": 2, "timeout_s": True}, "Ranks(n=2, timeout_s=True): the number of ranks is"),
    ({"n": 2, "device": "gpu"}, "Ranks(device='gpu'): give 'cpu' or 'cuda'"),
    ({"n": 10**6}, "Ranks(n=1000000): a rank takes some 128.00 MiB before it computes"),
]


@pytest.mark.parametrize(("arguments", "text"), BAD)
def test_arguments_that_no_pool_can_have_are_one_line(arguments, text):
    with pytest.raises(ValueError) as caught:
        Ranks(**arguments)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def test_memory_for_the_ranks_is_asked_for_with_both_numbers(monkeypatch):
    monkeypatch.setattr(limits, "free_memory_bytes", lambda: 3 * limits.ENGINE_BYTES)
    limits.make_room(3)
    with pytest.raises(ValueError, match=r"4 of them need 512.00 MiB, .* has 384.00 MiB free"):
        limits.make_room(4)


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(monkeypatch):
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: raised.append(both))
    limits.make_room(2)
    assert len(raised) == 1 and raised[0][0] > 64 and raised[0][1] == 4096
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(ValueError, match=r"2 ranks need \d+ open files .* have 64 \(ulimit -Hn\)"):
        limits.make_room(2)
