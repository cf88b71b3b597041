"""Processes that are forked from one which has imported what they need: how they begin and end."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from faults.waiting import until

from course.pool.fork_server import NUMBER, Child, ForkServer


@pytest.fixture(params=[True, False], ids=["forks", "spawns"])
def server(request, tmp_path):
    folder = tmp_path / "server"
    folder.mkdir()
    server = ForkServer(["json"], folder, forks=request.param)
    yield server
    server.close()
    assert not folder.exists()


@pytest.fixture
def start(server, tmp_path):
    """Starts a function of this module in a process of its own."""
    here = str(Path(__file__).parent)

    def start(function, *args, **options):
        sys.path.append(here)
        try:
            name = f"{Path(__file__).stem}:{function.__name__}"
            return server.start(name, *args, log=tmp_path / "log", **options)
        finally:
            sys.path.remove(here)

    return start


def leaves_with(code):
    sys.exit(code)


def returns(code):
    return code


def fails():
    raise ValueError("as it must")


def dies(number):
    os.kill(os.getpid(), number)


def sleeps():
    import time

    time.sleep(1000)


def writes(descriptor, name):
    text = f"{os.environ.get(name)} {'json' in sys.modules} {os.getcwd()}"
    os.write(descriptor, text.encode())


def draws(descriptor):
    import random

    os.write(descriptor, b"%.17f " % random.random())


@pytest.mark.parametrize(
    ("function", "args", "code"),
    [
        (returns, (None,), 0),
        (returns, (4,), 4),
        (leaves_with, (3,), 3),
        (leaves_with, ("a word",), 1),
        (fails, (), 1),
        (dies, (signal.SIGKILL,), -signal.SIGKILL),
        (dies, (signal.SIGTERM,), -signal.SIGTERM),
    ],
)
def test_a_child_ends_with_its_exit_code(start, tmp_path, function, args, code):
    child = start(function, *args)
    assert child.wait(60) == child.poll() == child.returncode == code
    if function is fails:
        assert "ValueError: as it must" in (tmp_path / "log").read_text()


def test_a_child_has_its_descriptors_its_variables_and_what_the_server_has_imported(start):
    reader, writer = os.pipe()
    child = start(writes, "LABCODE_TEST_WORD", fds=[writer], env={"LABCODE_TEST_WORD": "here"})
    assert child.wait(60) == 0
    assert os.read(reader, 1000).decode() == f"here True {os.getcwd()}"
    os.close(reader)
    os.close(writer)


class _BetweenTwoLooks(Child):
    """A child whose number arrives as soon as somebody has looked for it in vain."""

    def __init__(self, status, server):
        super().__init__(status)
        self.server = server
        self.number_is_sent = False

    def _has_word(self, timeout):
        found = super()._has_word(timeout)
        if not self.number_is_sent:
            self.number_is_sent = True
            self.server.sendall(NUMBER.pack(1234))
        return found


def test_a_number_that_comes_between_two_looks_is_no_exit_code():
    ours, server = socket.socketpair()
    with ours, server:
        child = _BetweenTwoLooks(ours, server)
        assert child.poll() is None
        assert child.poll() is None
        assert child.pid == 1234
        server.sendall(NUMBER.pack(3))
        assert child.wait(10) == 3


def test_a_server_that_ends_without_a_word_has_killed_its_child():
    ours, server = socket.socketpair()
    with ours:
        child = Child(ours)
        server.close()
        assert child.poll() == -signal.SIGKILL


def test_children_draw_different_numbers(start):
    reader, writer = os.pipe()
    for child in [start(draws, fds=[writer]) for _ in range(3)]:
        assert child.wait(60) == 0
    assert len(set(os.read(reader, 1000).split())) == 3
    os.close(reader)
    os.close(writer)


def test_a_child_that_runs_can_be_waited_for_and_killed(start):
    child = start(sleeps)
    assert child.poll() is None and psutil.Process(child.pid).is_running()
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.1)
    child.kill()
    assert child.wait(60) == -signal.SIGKILL
    child.kill()  # which does nothing


def test_with_the_server_its_children_end(server, start, survivors):
    children = [start(sleeps) for _ in range(2)]
    seen = [psutil.Process(child.pid) for child in children]
    os.kill(server.pid, signal.SIGKILL)
    assert [child.wait(60) for child in children] == [-signal.SIGKILL] * 2
    assert survivors(seen) == []
    until(lambda: not server.is_there())
    with pytest.raises(RuntimeError, match=r"^the process that starts the others has ended"):
        start(sleeps)
    server.folder.joinpath("server.log").unlink()
    server.folder.rmdir()  # nobody is left to do it


OWNER = """
import sys, time
from pathlib import Path
from course.pool.fork_server import ForkServer

folder = Path(sys.argv[1])
server = ForkServer([], folder)
child = server.start("time:sleep", 1000, log=folder / "log")
print(server.pid, child.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_with_its_owner_all_ends(tmp_path, survivors, stopped):
    folder = tmp_path / "server"
    folder.mkdir()
    command = [sys.executable, "-c", OWNER, str(folder)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    family = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    if stopped:
        family[1].suspend()
    owner.kill()
    owner.wait()
    assert survivors(family) == []
    until(lambda: not folder.exists())


def test_a_module_that_is_not_there_is_named(tmp_path):
    server = ForkServer(["no_such_module"], tmp_path)
    until(lambda: not server.is_there())
    with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
        server.start("time:sleep", 1, log=tmp_path / "log")
    server.close()
