"""What stands between SLURM and the ranks: signals reach the ranks, and nothing else."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from faults.waiting import pause

from labcode.runtime import processes
from labcode.slurm import hand_down

TEXT = hand_down.PATH.read_text()
ASKED = (signal.SIGUSR1, signal.SIGTERM)
# a launcher that would die of both signals, and that starts a rank in a session of its own
LAUNCHER = """
import subprocess, sys, signal
sys.exit(subprocess.call([sys.executable, "rank.py"], start_new_session=True))
"""
RANK = """
import os, signal, subprocess, sys, time
from pathlib import Path

def tell(name):
    Path(name + ".part").write_text(str(os.getpid()))
    Path(name + ".part").rename(name)

def wait(name):
    while not Path(name).exists():
        time.sleep(0.01)

def stop(number, frame):
    print("heard", signal.Signals(number).name, flush=True)
    sys.exit(0)

tell("started")
wait("listen")
signal.signal(signal.SIGUSR1, stop)
nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
helper = subprocess.Popen(["sleep", "600"], **nowhere)  # has no handler: it would be killed
tell("listening")
wait("never")
"""

Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(*command)`: the command below hand_down, in `tmp_path` with the files above."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "rank.py").write_text(RANK)
    running = []

    def begin(*command: str) -> subprocess.Popen:
        process = subprocess.Popen(
            ["bash", "-c", TEXT, "rank", *command],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield begin
    processes.end(running)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("command", ["launcher.py", "rank.py"])
def test_a_request_reaches_the_rank_alone_wherever_it_is(
    start: Start, tmp_path: Path, until, asked: signal.Signals, command: str
) -> None:
    (tmp_path / "listen").touch()
    process = start(sys.executable, command)
    until((tmp_path / "listening").exists)
    helper = psutil.Process(int((tmp_path / "listening").read_text())).children()[0]
    process.send_signal(asked)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "heard SIGUSR1\n", "")
    assert processes.alive(helper)
    helper.kill()


@pytest.mark.parametrize("asked", ASKED)
def test_a_request_while_the_rank_starts_is_kept_for_it(
    start: Start, tmp_path: Path, until, asked: signal.Signals
) -> None:
    process = start(sys.executable, "launcher.py")
    until((tmp_path / "started").exists)
    # to all processes of it, as SLURM does with some kinds of process tracking
    for member in processes.family([process.pid]):
        member.send_signal(asked)
    pause(1.5)  # longer than it takes to look for ranks a first time
    (tmp_path / "listen").touch()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "heard SIGUSR1\n", "")


@pytest.mark.parametrize("code", [0, 3, 130])
def test_it_ends_as_the_command_does(start: Start, code: int) -> None:
    process = start("bash", "-c", f"exit {code}")
    assert process.wait(60) == code


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_it_dies_of_what_has_killed_the_command(start: Start, by: signal.Signals) -> None:
    reset = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_DFL)"
    process = start(sys.executable, "-c", f"{reset}; os.kill(os.getpid(), {int(by)})")
    assert process.wait(60) == -by


def test_arguments_arrive_as_they_were_given(start: Start) -> None:
    process = start("printf", "%s|", "a b", "$HOME", "*", "")
    assert process.communicate(timeout=60)[0] == "a b|$HOME|*||"


def test_torchrun_leaves_the_signal_to_the_ranks(start: Start, tmp_path: Path, until) -> None:
    """It would end with code 1 and, told twice, with eighty lines of tracebacks."""
    (tmp_path / "listen").touch()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "rank.py")
    process = start(sys.executable, *torchrun)
    until((tmp_path / "listening").exists)
    for _ in range(2):
        for member in processes.family([process.pid]):
            if "torch.distributed.run" in member.cmdline() or member.pid == process.pid:
                member.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "heard SIGUSR1\n")
    assert "Traceback" not in err


def test_the_command_that_prints_it_needs_neither_torch_nor_anything_else(tmp_path: Path) -> None:
    root = Path(hand_down.__file__).parents[2]
    command = [sys.executable, "-S", "-m", "labcode.slurm.hand_down"]  # without site-packages
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True
    )
    assert done.stdout.decode() == TEXT


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_passes() -> None:
    done = subprocess.run(
        ["shellcheck", "--severity=style", str(hand_down.PATH)], capture_output=True, text=True
    )
    assert done.stdout == ""
