"""The loader: the same batches whoever reads them, workers that die, and what is left of them."""

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import covering
import numpy as np
import psutil
import pytest
import torch
from faults.waiting import pause

from labcode.config import LoaderConfig, TextData, WeatherData
from labcode.data import copy_ahead, text, weather
from labcode.data import loader as loader_module
from labcode.data.copy_ahead import CopyAhead
from labcode.data.errors import DataError
from labcode.data.loader import Loader, StepReader, _Failure, _Guarded, _InProcess, _report
from labcode.data.sampler import Batches


class Numbers:
    """Sample i is the number i; 666 cannot be read, 999 ends the process that reads it."""

    def __init__(self, slow_s=0.0, length=48):
        self.slow_s = slow_s
        self.length = length
        self.bad = ()

    def __len__(self):
        return self.length

    def __getitem__(self, indices):
        time.sleep(self.slow_s)
        if 7 in indices and "refuse" in self.bad:
            raise ValueError("sample 7 cannot be read")
        if 7 in indices and "kill" in self.bad:
            os.kill(os.getpid(), signal.SIGKILL)
        if 7 in indices and "bug" in self.bad:
            raise KeyError("a bug")
        if 7 in indices:
            for read in filter(callable, self.bad):
                read(indices)
        numbers = torch.from_numpy(np.asarray(indices)).float()
        return numbers, -numbers


def batches(dataset, **changes):
    return Batches(len(dataset), **({"global_batch": 8, "seed": 3} | changes))


def workers(count, prefetch=2):
    return LoaderConfig(workers=count, prefetch=prefetch)


def flat(step):
    return [part.tolist() for pair in step for part in pair]


@pytest.fixture(scope="module")
def plain():
    """The batches of twenty steps, more than three epochs, without a loader."""
    dataset = Numbers()
    order = batches(dataset)
    found = []
    for step in range(20):
        parts = np.array_split(order.indices(step), 2)
        found.append(
            [part for indices in parts for part in map(torch.Tensor.tolist, dataset[indices])]
        )
    return found


# ---- the batch of a step is a function of the step


@pytest.mark.parametrize("config", [LoaderConfig(), workers(1), workers(3, 1)], ids=str)
def test_every_number_of_workers_gives_the_same_batches_after_any_jump(plain, config):
    dataset = Numbers()
    with Loader(dataset, batches(dataset), 2, config) as loader:
        for step in (*range(8), 3, 4, 5, 17, 18, 0, 0, 1):
            assert flat(loader.take(step)) == plain[step]
        assert loader.steps_taken == 16


def test_what_is_read_ahead_does_not_count(plain):
    dataset = Numbers()
    order = batches(dataset)
    with Loader(dataset, order, 2, workers(2, 3)) as loader:
        for step in range(3):
            loader.take(step)
            order.advance()
    assert order.state_dict() == {"step": 3}
    with Loader(dataset, batches(dataset, step=3), 2, workers(1)) as resumed:
        assert flat(resumed.take(3)) == plain[3]


def test_the_parts_of_all_ranks_are_the_batch_of_one(plain):
    dataset = Numbers()
    loaders = []
    for coord in range(2):
        order = batches(dataset, dp_size=2, dp_coord=coord)
        loaders.append(Loader(dataset, order, 1, workers(1)))
    for step in (0, 1, 9):
        (first,), (second,) = (loader.take(step) for loader in loaders)
        whole = torch.cat([first[0], second[0]]).tolist()
        assert whole == plain[step][0] + plain[step][2]
    for loader in loaders:
        loader.close()


def test_nothing_is_drawn_from_the_generator_of_dropout():
    dataset = Numbers()
    before = torch.get_rng_state()
    with Loader(dataset, batches(dataset), 1, workers(1)) as loader:
        loader.take(0)
        loader.take(5)
    assert torch.equal(before, torch.get_rng_state())


def test_a_loader_begins_again_after_it_was_closed(plain):
    dataset = Numbers()
    loader = Loader(dataset, batches(dataset), 2, workers(1))
    for step in (0, 1):
        assert flat(loader.take(step)) == plain[step]
        loader.close()
    loader.close()


# ---- what is sent to workers


def test_token_files_are_mapped_and_weather_is_shared_not_copied(tmp_path):
    splits = text.load(TextData(), 32, tmp_path)
    for dataset in (splits.train, splits.val):
        sent = pickle.dumps(dataset)
        assert len(sent) < 2000
        there = pickle.loads(sent)
        assert isinstance(there.tokens, np.memmap)
        assert len(there) == len(dataset)
        assert torch.equal(there[[0, len(dataset) - 1]][1], dataset[[0, len(dataset) - 1]][1])
    maps = weather.load(WeatherData(roll=True, sun=True)).train
    order = batches(maps, global_batch=2)
    with Loader(maps, order, 1, workers(2)) as loader:
        for step in range(3):
            ours = maps[order.indices(step)]
            for one, other in zip(ours, loader.take(step)[0]):
                assert torch.equal(one, other)
    assert maps._file.read._shared.is_shared()


# ---- waiting


def test_waiting_is_counted_and_reading_ahead_hides_it():
    dataset = Numbers(slow_s=0.1)
    waited = {}
    for count in (0, 1):
        with Loader(dataset, batches(dataset), 1, workers(count)) as loader:
            loader.take(0)  # workers start
            begun = loader.waited_s
            for step in range(1, 5):
                pause(0.15)  # a training that computes
                loader.take(step)
            waited[count] = loader.waited_s - begun
    assert waited[0] >= 0.4
    assert waited[1] < waited[0]


# ---- errors and ends


@pytest.mark.parametrize("count", [0, 2])
def test_a_sample_that_cannot_be_read_is_one_line(count):
    dataset = Numbers()
    dataset.bad = ("refuse",)
    with (
        Loader(dataset, batches(dataset), 1, workers(count)) as loader,
        pytest.raises(DataError, match=r"^sample 7 cannot be read$"),
    ):
        for step in range(6):
            loader.take(step)


def bus_error(indices):
    os.kill(os.getpid(), signal.SIGBUS)  # as the kernel does where a page of /dev/shm is missing


def ended(indices):
    os._exit(7)  # as a library does that calls exit()


def raising(error):
    def read(indices):
        raise error

    return read


# as torch, multiprocessing and readers of data sets say it; the last is a full disk
NO_SHARED = "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left (28)"
NO_FILE = "unable to write to file </torch_77_88_0>: No space left on device (28)"
WORKER_ENDS = {
    "killed": ("kill", r"loader worker \d+ was ended by SIGKILL, as .* --loader.workers 0$"),
    "bus error": (bus_error, r"loader worker \d+ found no more shared memory \(SIGBUS\): .*--shm"),
    "exit": (ended, r"loader worker \d+ ended with exit code 7: .* --loader.workers 0$"),
    "no shm": (raising(RuntimeError(NO_SHARED)), r"a loader worker found no more .*--shm-size"),
    "no file": (raising(RuntimeError(NO_FILE)), r"a loader worker found no more .*--shm-size"),
    "no semaphore": (raising(OSError(28, "No space left on device")), r".* found no .*--shm-size"),
    "KeyError": ("bug", r".* failed at the batch of step \d: KeyError: 'a bug' \(test_loader.py, "),
    "IndexError": (raising(IndexError("index 9 is out of bounds")), r".*: IndexError: index 9 is"),
    "cuda": (
        raising(RuntimeError("Cannot re-initialize CUDA in forked subprocess.")),
        r".*: RuntimeError: Cannot re-initialize CUDA .*--loader.workers 0",
    ),
    "two lines": (raising(TypeError("first\n second")), r".*: TypeError: first second \(test_load"),
    "unpicklable": (raising(AttributeError("Can't pickle 'f'")), r".*: AttributeError: Can't pic"),
    "full disk": (
        raising(OSError(28, "No space", "/d/x")),
        r".*OSError: \[Errno 28\] No space: '/d",
    ),
}


@pytest.mark.parametrize("end", WORKER_ENDS)
def test_whatever_ends_a_worker_is_one_line(end, monkeypatch):
    bad, told = WORKER_ENDS[end]
    dataset = Numbers()
    dataset.bad = (bad,)
    reader = StepReader(dataset, batches(dataset), 1)
    if isinstance(bad, str) or bad in (bus_error, ended):
        with (
            Loader(dataset, batches(dataset), 1, workers(1)) as loader,
            pytest.raises(DataError, match=told) as caught,
        ):
            for step in range(6):
                loader.take(step)
        text = str(caught.value)
    else:  # what a worker does, without its process
        failures = [_Guarded(reader)[step] for step in range(6)]
        (failure,) = [found for found in failures if isinstance(found, _Failure)]
        text = failure.text
    assert re.match(told, text), text
    assert "\n" not in text


def test_the_end_of_the_server_of_the_workers_is_one_line(monkeypatch):
    """What Python raises for its fork server, which a shortage of memory may end."""

    def meet_a_closed_pipe():
        raise EOFError("unexpected EOF")

    monkeypatch.setattr(loader_module, "TOLD_S", 0.0)
    dataset = Numbers()
    source = loader_module._Workers(StepReader(dataset, batches(dataset), 1), 1, 2, False)
    with pytest.raises(DataError, match="workers has ended, as it is when memory runs out: lower"):
        source._guarded(meet_a_closed_pipe)


def test_shared_memory_that_does_not_suffice_for_the_workers_is_one_line(monkeypatch):
    def share_memory(tensor):
        raise RuntimeError(NO_SHARED)

    dataset = Numbers()
    # done as the reader is sent to the workers, as WeatherFile does, or for a batch in a worker
    monkeypatch.setattr(torch.Tensor, "share_memory_", share_memory)
    found = _Guarded(StepReader(dataset, batches(dataset), 1))[0]
    assert isinstance(found, _Failure) and "--shm-size" in found.text
    dataset.sent = Sent()
    with (
        Loader(dataset, batches(dataset), 1, workers(1)) as loader,
        pytest.raises(
            DataError, match=r"find no more shared memory: enlarge /dev/shm .*--shm-size"
        ),
    ):
        loader.take(0)


class Sent:
    """Moves to shared memory as it is sent to a process."""

    def __getstate__(self):
        torch.zeros(3).share_memory_()


def test_without_workers_a_bug_is_a_bug():
    dataset = Numbers()
    dataset.bad = ("bug",)
    with Loader(dataset, batches(dataset), 1, workers(0)) as loader, pytest.raises(KeyError):
        for step in range(6):
            loader.take(step)


def reported(error, capsys):
    _report(type(error), error, None)
    return capsys.readouterr().err


def test_a_worker_says_nothing_of_a_connection_that_its_rank_has_broken_off(capsys):
    assert reported(ConnectionResetError("by peer"), capsys) == ""
    assert reported(EOFError(), capsys) == ""
    assert reported(OSError("no space left"), capsys) == "OSError: no space left\n"
    assert reported(KeyError(3), capsys) == "KeyError: 3\n"


def family(pid):
    return psutil.Process(pid).children(recursive=True)


def test_closing_ends_workers_in_the_middle_of_a_read():
    dataset = Numbers(slow_s=3600.0)
    loader = Loader(dataset, batches(dataset), 1, workers(2))
    loader._source.begin(0)
    pids = [worker.pid for worker in loader._source._processes()]
    assert len(pids) == 2
    loader.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


RANK = """
import sys, time
sys.path[:0] = sys.argv[1].split(":")
from test_loader import *
if __name__ == "__main__":
    dataset = Numbers()
    loader = Loader(dataset, batches(dataset), 1, workers(2))
    loader.take(0)
    print("ready", flush=True)
    if sys.argv[2] == "ends":
        sys.exit()
    time.sleep(600)
"""


@pytest.mark.parametrize("how", covering.first(1, [signal.SIGKILL, "ends", signal.SIGINT]))
def test_no_process_outlives_its_rank(tmp_path, how):
    (tmp_path / "rank.py").write_text(RANK)
    here = Path(__file__).parent
    command = [sys.executable, str(tmp_path / "rank.py"), f"{here}:{here.parent}", str(how)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as rank:
        assert rank.stdout.readline() == b"ready\n"
        left = family(rank.pid) if how != "ends" else []
        if how != "ends":
            assert len(left) >= 3  # the server and two workers
            rank.send_signal(how)
        try:
            _, said = rank.communicate(timeout=300)
        finally:
            rank.kill()
        assert b"DataLoader" not in said
    _, alive = psutil.wait_procs(left, timeout=120)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_workers_do_not_hear_what_is_meant_for_their_rank():
    dataset = Numbers()
    with Loader(dataset, batches(dataset), 1, workers(2)) as loader:
        for step in range(2):  # both have begun
            loader.take(step)
        told = loader._source._processes()
        for worker in told:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(worker.pid, number)
        for step in range(2, 10):
            loader.take(step)
        assert loader._source._processes() == told
        assert all(worker.is_alive() for worker in told)


# ---- the thread that copies to a GPU, here without one


def test_copying_ahead_keeps_the_order_the_jumps_and_the_errors(plain):
    dataset = Numbers()
    reader = StepReader(dataset, batches(dataset), 2)
    ahead = CopyAhead(_InProcess(reader, False), torch.device("cpu"))
    for first in (0, 5, 2):
        ahead.begin(first)
        for step in range(first, first + 4):
            assert flat(ahead.next()) == plain[step]
    dataset.bad = ("refuse",)
    ahead.begin(0)
    with pytest.raises(DataError, match="sample 7"):
        for _ in range(6):
            ahead.next()
    ahead.close()
    assert ahead._thread is None


class OneAtATime:
    """A source that notes whether it is asked to begin anew while it still reads."""

    def __init__(self):
        self.reads = threading.Event()
        self.begun = threading.Event()
        self.together = False

    def begin(self, step):
        self.together |= self.reads.is_set()
        self.begun.set()

    def next(self):
        self.begun.clear()
        self.reads.set()
        self.begun.wait(0.2)  # only who does not wait for the end of this read comes meanwhile
        self.reads.clear()
        return []

    def close(self):
        pass


def test_copying_ahead_waits_for_a_slow_read_before_the_source_begins_anew(monkeypatch):
    monkeypatch.setattr(copy_ahead, "LEAVE_S", 0.0)
    source = OneAtATime()
    ahead = CopyAhead(source, torch.device("cpu"))
    ahead.begin(0)
    source.reads.wait()
    ahead.begin(5)
    assert not source.together
    ahead.close()
