"""Families of processes: ended as a whole, and ending with their parents."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from labcode.runtime import processes


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts Python code in a session and folder of its own; `tell(name)` in it makes a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    (tmp_path / "common.py").write_text(
        textwrap.dedent("""
            import os, signal, subprocess, sys, time
            from pathlib import Path

            def tell(name):
                Path(name + ".part").write_text(str(os.getpid()))
                Path(name + ".part").rename(name)

            def sleep():
                time.sleep(600)
        """)
    )
    (tmp_path / "sleeper.py").write_text("from common import *\ntell(sys.argv[1])\nsleep()\n")
    started = []

    def run(code):
        code = "from common import *\n" + textwrap.dedent(code)
        process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        started.append(process)
        return process

    yield run
    processes.end(started)


def read(*names):
    """The processes that told their numbers."""
    return [psutil.Process(int(Path(name).read_text())) for name in names]


SLEEPER = "subprocess.Popen([sys.executable, '-m', 'sleeper', '{name}'], start_new_session={alone})"


def test_a_family_ends_as_a_whole_whatever_sessions_it_made(start, until, survivors):
    parent = start(
        f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        {SLEEPER.format(name="same", alone=False)}
        {SLEEPER.format(name="alone", alone=True)}
        tell("parent")
        sleep()
        """
    )
    names = ("parent", "same", "alone")
    until(lambda: all(Path(name).exists() for name in names))
    members = read(*names)
    assert set(processes.family([parent.pid])) == set(members)
    processes.end([parent], ask=signal.SIGTERM, grace_s=0.1)
    assert parent.returncode == -signal.SIGKILL
    assert survivors(members) == []
    assert processes.family([parent.pid]) == []


def test_who_is_asked_first_may_close_its_files(start, until):
    parent = start(
        """
        def close(*_):
            tell("closed")
            sys.exit(0)

        signal.signal(signal.SIGINT, close)
        tell("ready")
        sleep()
        """
    )
    until(lambda: Path("ready").exists())
    processes.end([parent], ask=signal.SIGINT, grace_s=60)
    assert Path("closed").exists()
    assert parent.returncode == 0


def test_what_a_dead_process_left_in_its_group_is_ended_too(start, until, survivors):
    parent = start(SLEEPER.format(name="orphan", alone=False))
    assert parent.wait() == 0
    until(lambda: Path("orphan").exists())
    members = read("orphan")
    processes.end([parent])
    assert survivors(members) == []


def test_ending_what_has_ended_is_fine(start):
    parent = start("pass")
    assert parent.wait() == 0
    processes.end([parent], ask=signal.SIGTERM)
    processes.end([])


# A launcher starts an agent, the agent a rank, as `launch` does with torchrun; the rank has a
# worker.
AGENT = """
import labcode.runtime.processes
command = [sys.executable, "-c", {rank!r}]
subprocess.Popen(command, start_new_session=True)
tell("agent")
sleep()
"""
RANK = """
from common import *
from labcode.runtime import processes
processes.end_with_parents({others}before_end=lambda: Path("kept").unlink())
subprocess.Popen([sys.executable, "-m", "sleeper", "worker"])
tell("rank")
sleep()
"""


@pytest.mark.parametrize("killed", ["launcher", "agent"])
def test_a_rank_ends_with_its_agent_and_with_its_launcher(start, until, survivors, killed):
    Path("kept").touch()
    rank = RANK.format(others="int(Path('launcher').read_text()), ")
    agent = "from common import *\n" + AGENT.format(rank=rank)
    start(
        f"""
        tell("launcher")
        subprocess.Popen([sys.executable, "-c", {agent!r}], start_new_session=True)
        sleep()
        """
    )
    names = ("launcher", "agent", "rank", "worker")
    until(lambda: all(Path(name).exists() for name in names))
    members = dict(zip(names, read(*names), strict=True))
    members[killed].kill()
    if killed == "agent":
        assert processes.alive(members.pop("launcher"))
    assert survivors(members.values()) == []
    assert not Path("kept").exists()


def test_a_rank_whose_launcher_is_gone_already_ends_at_once(start):
    launcher = start("pass")
    assert launcher.wait() == 0
    Path("kept").touch()
    rank = RANK.format(others=f"{launcher.pid}, ")
    agent = start(AGENT.format(rank=rank))
    assert agent.wait() == -signal.SIGKILL  # it would wait for ever
    assert not Path("kept").exists()


def test_a_module_is_run_with_its_arguments_and_ends_with_its_parent(start, until, survivors):
    parent = start(
        f"""
        subprocess.Popen(
            [sys.executable, "-m", "labcode.runtime.processes", "{os.getpid()}", "sleeper", "name"]
        )
        sleep()
        """
    )
    until(lambda: Path("name").exists())
    members = read("name")
    parent.kill()
    assert survivors(members) == []


ORPHAN = """
from common import *
parent = os.getppid()
tell("rank")
while not Path("agent is gone").exists():  # as if it imported torch meanwhile
    time.sleep(0.02)
from labcode.runtime import processes
processes.end_with_parents(at_once=True, parent=parent)
sleep()
"""


def test_a_rank_whose_agent_ended_while_it_started_ends_at_once(start, until, survivors):
    agent = start(AGENT.format(rank=ORPHAN))
    until(lambda: Path("agent").exists() and Path("rank").exists())
    (rank,) = read("rank")
    agent.kill()
    agent.wait()
    Path("agent is gone").touch()
    assert survivors([rank]) == []


STOPPED_RANK = """
from common import *
from labcode.runtime import processes
processes.end_with_parents(at_once=True)
tell("rank")
os.kill(os.getpid(), signal.SIGSTOP)
sleep()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends it: Linux only")
def test_a_stopped_rank_ends_with_its_agent(start, until, survivors):
    """It cannot look whether the agent is there."""
    start(AGENT.format(rank=STOPPED_RANK))
    until(lambda: Path("agent").exists() and Path("rank").exists())
    members = dict(zip(("agent", "rank"), read("agent", "rank"), strict=True))
    until(lambda: members["rank"].status() == psutil.STATUS_STOPPED)
    members["agent"].kill()
    assert survivors([members["rank"]]) == []


def test_a_module_that_ends_with_its_parent_removes_its_folder(start, until, survivors):
    Path("folder").mkdir()
    Path("folder/file").touch()
    parent = start(
        f"""
        options = ["--remove", "folder", "{os.getpid()}"]
        command = [sys.executable, "-m", "labcode.runtime.processes", *options, "sleeper", "name"]
        subprocess.Popen(command)
        sleep()
        """
    )
    until(lambda: Path("name").exists())
    members = read("name")
    parent.kill()
    assert survivors(members) == []
    until(lambda: not Path("folder").exists())


def test_a_folder_is_removed_although_the_process_that_wants_it_is_ended(start, until):
    """It is ended with all that it has started, and with its process group."""
    Path("folder").mkdir()
    for name in range(2000):
        Path("folder", str(name)).touch()
    process = start(
        """
        from labcode.runtime import processes
        processes.remove_from_outside("folder")
        tell("asked")
        sleep()
        """
    )
    until(lambda: Path("asked").exists())
    assert processes.family([process.pid]) == [psutil.Process(process.pid)]
    processes.end([process])
    until(lambda: not Path("folder").exists())


# A C++ object that aborts when the process takes itself apart, as torch's threads sometimes do.
ABORTS_AT_THE_END = """if True:
    import ctypes, sys
    from labcode.runtime.processes import Ending

    ending = Ending()
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)

    import atexit
    atexit.register(print, "a handler")
    print("work is done", end=" ")
    {end}
"""


@pytest.mark.parametrize("code", [0, 2])
def test_a_process_that_has_done_its_work_ends_before_anything_can_abort_it(code):
    program = ABORTS_AT_THE_END.format(end=f"sys.exit(ending.with_code({code}))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "work is done a handler\n"), done.stderr
    # as it always was, where no code is given
    program = ABORTS_AT_THE_END.format(end=f"sys.exit({code})")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGABRT, "work is done a handler\n")


def test_what_a_process_wrote_to_files_that_are_still_open_is_in_them(tmp_path):
    program = f"""if True:
        import sys
        from labcode.runtime.processes import Ending

        ending = Ending()
        text = open({str(tmp_path / "text")!r}, "w")
        text.write("a line")
        data = open({str(tmp_path / "data")!r}, "wb")
        data.write(b"some bytes")
        sys.exit(ending.with_code(0))
    """
    subprocess.run([sys.executable, "-c", program], check=True)
    assert (tmp_path / "text").read_text() == "a line"
    assert (tmp_path / "data").read_bytes() == b"some bytes"


def test_a_process_that_fails_ends_with_its_traceback():
    program = (
        "from labcode.runtime.processes import Ending\nending = Ending()\nending.with_code(1 / 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
