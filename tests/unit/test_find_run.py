"""Which run a user means: held locks, real processes, a job."""

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from labcode.doctor import find_run
from labcode.doctor.find_run import processes_of, runs_of_process
from labcode.runtime.files import is_held

# Stands in for rank 0: it holds the lock as RunLock does, without torch.
HOLDER = """
import fcntl, os, socket, sys, time
file = open(sys.argv[1] + "/run.lock", "a")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(f"process {os.getpid()} on {socket.gethostname()}, since now")
file.flush()
print("holds", flush=True)
time.sleep(600)
"""
SLEEPER = "print('sleeps', flush=True); import time; time.sleep(600)"
# Stands in for torchrun: two children, rank 0 of which holds the lock.
PARENT = """
import os, subprocess, sys, time
port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[3], "WORLD_SIZE": "2"}
programs = [[sys.executable, "-c", sys.argv[1], sys.argv[4]], [sys.executable, "-c", sys.argv[2]]]
children = []
for rank, program in enumerate(programs):
    env = os.environ | port | {"RANK": str(rank)}
    children.append(subprocess.Popen(program, env=env, stdout=subprocess.PIPE))
    children[-1].stdout.readline()
print(*[child.pid for child in children], flush=True)
try:
    sys.stdin.read()
finally:
    for child in children:
        child.kill()
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        return folder

    return make


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a Python program; returns it when it has written its first line."""
    started = []

    def begin(program: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.communicate(timeout=60) if process.args[2] == PARENT else process.kill()
        process.wait()


def test_the_run_that_goes_on_is_found_without_a_word(run, start, tmp_path) -> None:
    ended = run("a-001")
    (ended / "run.lock").write_text("process 1 on nowhere, since long ago")  # it was killed
    with pytest.raises(ValueError, match=r"no run goes on in .*runs: give the folder"):
        find_run.find_run(None, tmp_path)
    held = run("a-002")
    start(HOLDER, held).stdout.readline()
    assert find_run.find_run(None, tmp_path) == held
    assert find_run.find_run(str(held), tmp_path) == held
    assert is_held(held) and not is_held(ended)
    with pytest.raises(ValueError, match="no process holds this run"):
        find_run.find_run(str(ended), tmp_path)
    other = run("b-001")
    start(HOLDER, other).stdout.readline()
    with pytest.raises(ValueError, match=r"2 runs go on .*a-002.*b-001"):
        find_run.find_run(None, tmp_path)


def test_a_run_is_found_from_any_of_its_processes_and_they_from_it(run, start, tmp_path) -> None:
    held = run("a-001")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        parent = start(PARENT, HOLDER, SLEEPER, port, held)
        ranks = [int(word) for word in parent.stdout.readline().split()]
        for pid in (parent.pid, *ranks):
            assert find_run.find_run(str(pid), tmp_path) == held
        found = processes_of(held, [])
        assert {rank: process.pid for rank, process in found.items()} == dict(enumerate(ranks))


def test_a_process_beside_a_run_that_is_no_rank_has_none(run, start) -> None:
    held = run("a-001")
    start(HOLDER, held).stdout.readline()
    sleeper = start(SLEEPER)
    sleeper.stdout.readline()
    assert list(runs_of_process(sleeper.pid)) == []


def test_a_run_of_one_process_has_rank_0(run, start) -> None:
    held = run("a-001")
    holder = start(HOLDER, held)
    holder.stdout.readline()
    found = processes_of(held, [])
    assert {rank: process.pid for rank, process in found.items()} == {0: holder.pid}


def test_what_is_neither_is_refused_in_one_line(tmp_path) -> None:
    with pytest.raises(ValueError, match="no folder, no process and no job"):
        find_run.find_run("gpt_tiny", tmp_path)
    unused = max(psutil.pids()) + 100_000
    with pytest.raises(ValueError, match=str(unused)):
        find_run.find_run(str(unused), tmp_path)


def test_this_process_can_look_at_a_lock_that_it_holds_itself(run) -> None:
    held = run("a-001")
    with open(held / "run.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_held(held)
        assert held in list(runs_of_process(os.getpid()))
