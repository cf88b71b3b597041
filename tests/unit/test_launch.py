"""torchrun from Python: labelled output in order, the first failure as one error, nothing left."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from labcode.runtime import hardware, launch, processes

COMMON = """
import atexit, os, subprocess, sys, time
from pathlib import Path

rank = int(os.environ["RANK"])

def tell(name):
    Path(name).touch()

def wait(name):
    while not Path(name).exists():
        time.sleep(0.01)

"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that ranks can run by name; a rank starts in the folder of the caller."""
    monkeypatch.chdir(tmp_path)

    def write(code, name="job"):
        (tmp_path / f"{name}.py").write_text(COMMON + textwrap.dedent(code))
        return name

    return write


class Reader:
    """A stdout that answers the first line: proof that lines arrive while the ranks run."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        if "question" in text:
            Path("answer").touch()

    def flush(self):
        pass


def test_output_streams_labelled_and_in_order(module, monkeypatch):
    name = module("""
        if rank == 0:
            print("question")
        wait("answer")
        for turn in range(10):
            if turn % 2 == rank:
                print("turn", turn, file=sys.stderr if turn > 7 else sys.stdout)
                tell(f"turn-{turn}")
            wait(f"turn-{turn}")
        if rank == 1:
            os.write(1, b"from C\\n")
            subprocess.run(["echo", "from a child"], check=True)
            print("x" * 10_000)
            print("10%\\r50%\\r100%")
            print(sys.argv[1:], os.environ["WORLD_SIZE"], os.environ["COLOUR"], end="")
    """)
    reader = Reader()
    monkeypatch.setattr(sys, "stdout", reader)
    done = launch.run(
        name, "--steps", 3, "a b", "$HOME", nproc=2, env_extra={"COLOUR": "blue"}, timeout_s=250
    )
    lines = done.output.splitlines()
    assert reader.text == done.output + "\n" and done.seconds > 0
    assert lines[:11] == [
        "[rank 0] question",
        *(f"[rank {turn % 2}] turn {turn}" for turn in range(10)),
    ]
    # The first two take another way than Python's own prints: they come somewhere among them.
    due = [
        "from C",
        "from a child",
        "x" * 10_000,
        "100%",
        "['--steps', '3', 'a b', '$HOME'] 2 blue",
    ]
    assert sorted(lines[11:]) == sorted(f"[rank 1] {line}" for line in due)


def test_one_rank_runs_under_torchrun_too_and_can_be_silent(module, capsys):
    name = module("""
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        print(rank, os.environ["WORLD_SIZE"], under_torchrun, __name__, sys.argv)
    """)
    done = launch.run(name, nproc=1, echo=False)
    assert done.output == f"[rank 0] 0 1 True __main__ ['{Path('job.py').resolve()}']"
    assert capsys.readouterr().out == ""


def test_the_first_failure_is_the_error(module):
    name = module("""
        print("ready", flush=True)
        if rank == 1:
            wait("ready")  # or torchrun may end rank 0 before it has printed
            atexit.register(tell, "failed")  # runs when the error has been noted
            raise ValueError("boom")
        tell("ready")
        wait("failed")
        raise RuntimeError("lost my peer")
    """)
    with pytest.raises(launch.LaunchError) as caught:
        launch.run(name, nproc=2, timeout_s=250)
    assert re.fullmatch(r"rank 1 failed after \d+\.\d s: ValueError: boom", str(caught.value))
    assert caught.value.rank == 1
    assert sorted(caught.value.output.splitlines()) == ["[rank 0] ready", "[rank 1] ready"]
    (note,) = caught.value.__notes__
    assert 'raise ValueError("boom")' in note and "runpy" not in note and "launch_rank" not in note


def test_the_error_of_a_rank_while_another_waits_in_a_collective(module):
    name = module("""
        from labcode.runtime import bootstrap
        import torch.distributed as dist
        bootstrap.start(timeout_s=3000)
        if rank == 1:
            raise ValueError("boom")
        dist.barrier()
    """)
    # Whoever waited for the time-out of the collective would meet that of the test first.
    with pytest.raises(launch.LaunchError, match=r"^rank 1 failed after .* s: ValueError: boom"):
        launch.run(name, nproc=2, timeout_s=250, echo=False)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("sys.exit('unknown recipe')", "unknown recipe"),
        ("sys.exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), 9)", "killed by signal 9"),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_other_ways_to_fail(module, code, reason):
    name = module(f"if rank == 1:\n    {code}\nwait('never')")
    with pytest.raises(launch.LaunchError) as caught:
        launch.run(name, nproc=2, timeout_s=250, echo=False)
    assert re.fullmatch(rf"rank 1 failed after \d+\.\d s: {re.escape(reason)}", str(caught.value))


KILLED_WHILE_IT_NOTES = """
import resource, signal, sys
from labcode.runtime import launch_rank

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))  # the kernel ends it at the 21st byte
launch_rank._note(sys.argv[1], "1", "ValueError: of rank 1")
"""


def test_a_rank_that_is_killed_while_it_notes_its_error_leaves_no_half_note(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_NOTES, tmp_path], check=False)
    assert done.returncode == -signal.SIGXFSZ
    report = f"rank      : 1 (local_rank: 1)\n  exitcode  : {done.returncode} (pid: 7)"
    (tmp_path / "torchrun.log").write_text(report)
    error = launch._error(tmp_path, 1, 3.0, 0, "")
    assert str(error) == f"rank 1 failed after 3.0 s: killed by signal {signal.SIGXFSZ:d}"


def test_a_time_out_ends_every_process(module, monkeypatch, living, survivors):
    def monotonic():
        """Jumps over the time-out once both ranks run."""
        both_run = os.path.exists("pids-0") and os.path.exists("pids-1")
        return time.monotonic() + (1000 if both_run else 0)

    monkeypatch.setattr(
        launch, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep, time=time.time)
    )
    monkeypatch.setattr(launch, "GRACE_S", 1.0)
    name = module("""
        import signal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        print("started")
        Path(f"part-{rank}").write_text(f"{os.getpid()} {child.pid}")
        Path(f"part-{rank}").rename(f"pids-{rank}")
        wait("never")
    """)
    with pytest.raises(
        launch.LaunchError, match=r"^job did not end within 600 s: all 2 ranks were ended"
    ) as caught:
        launch.run(name, nproc=2, timeout_s=600, echo=False)
    assert sorted(caught.value.output.splitlines()) == ["[rank 0] started", "[rank 1] started"]
    pids = [int(pid) for path in Path().glob("pids-*") for pid in path.read_text().split()]
    assert len(pids) == 4
    assert survivors(psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)) == []
    assert living(Path.cwd()) == []


LAUNCHER = """
from labcode.runtime import launch, processes
try:
    launch.run("job", nproc=2)
finally:
    print("ended", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_launcher_is_interrupted_or_killed(module, how, until, survivors):
    module("""
        tell(f"started-{rank}")
        try:
            wait("never")
        finally:
            tell(f"cleaned-{rank}")
    """)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until(lambda: os.path.exists("started-0") and os.path.exists("started-1"))
    children = psutil.Process(launcher.pid).children(recursive=True)
    assert len(children) >= 3  # torchrun and two ranks
    command = children[-1].cmdline()
    launcher.send_signal(how)
    if how == signal.SIGINT:
        out, err = launcher.communicate(timeout=280)
        assert out == "ended\n" and err.strip().endswith("KeyboardInterrupt")
        # The ranks could close their files.
        assert os.path.exists("cleaned-0")
        assert os.path.exists("cleaned-1")
    assert survivors(children) == []
    launcher.communicate(timeout=280)
    folders = [word for word in command if word.startswith("/") and "labcode-launch-" in word]
    assert folders
    until(lambda: not any(map(os.path.exists, folders)))


def test_a_killed_torchrun_is_the_error(module, until, survivors):
    """The ranks end with it, and leave the folder to the launcher, which reads what it holds."""
    name = module("""
        tell(f"started-{rank}")
        if rank == 0:
            wait("started-1")
            os.kill(os.getppid(), 9)
        wait("never")
    """)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(
        launch.LaunchError, match=r"^torchrun failed after \d+\.\d s: killed by signal 9$"
    ):
        launch.run(name, nproc=2, timeout_s=250, echo=False)
    assert survivors(set(psutil.Process().children(recursive=True)) - before) == []


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"nproc": 0}, r"nproc=0: launch at least 1 rank"),
        ({"nproc": "2"}, r"nproc='2': it is the number of ranks, such as 2"),
        ({"nproc": True}, r"nproc=True: it is the number of ranks, such as 2"),
        ({"nproc": 1.0}, r"nproc=1.0: it is the number of ranks, such as 2"),
        ({"nproc": 10**9}, r"nproc=1000000000: launch at most 512 ranks on one machine"),
        ({"timeout_s": 0}, r"timeout_s=0: it is a time in seconds, above 0, such as 600"),
        ({"timeout_s": float("nan")}, r"timeout_s=nan: it is a time in seconds.*"),
        ({"timeout_s": float("inf")}, r"timeout_s=inf: it is a time in seconds.*"),
        ({"timeout_s": "60"}, r"timeout_s='60': it is a time in seconds.*"),
        ({"restarts": -1}, r"restarts=-1: it is a number of restarts, 0 or more"),
        ({"restarts": True}, r"restarts=True: it is a number of restarts, 0 or more"),
        ({"module": "my job.py"}, r"module='my job.py': it is a dotted name, such as .*"),
        ({"module": ""}, r"module='': it is a dotted name, such as 'labcode.train'"),
    ],
)
def test_what_cannot_be_launched_is_one_line(odd, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        launch.run(**{"module": "job"} | odd)


STOPPABLE = """
import signal
from labcode.runtime import processes

processes.end_with_parents(at_once=True)

def stop(number, frame):
    tell(f"{sys.argv[1]}-checkpoint-{rank}")
    sys.exit(0)

signal.signal(signal.SIGUSR1, stop)
signal.signal(signal.SIGTERM, stop)
tell(f"{sys.argv[1]}-started-{rank}")
wait("never")
"""
PASSED_ON = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def test_what_torchrun_does_with_a_signal_is_what_the_readme_says(module, until, survivors):
    """To the ranks: code 0. To torchrun: SIGUSR1 kills it, and its ranks end without a checkpoint;
    SIGTERM is passed on, the ranks write one, and torchrun ends with 1.
    """
    cases = {
        # name: options of torchrun, signal, who gets it, its code, whether ranks could stop
        "ranks": ([], signal.SIGUSR1, "ranks", 0, True),
        "usr1": ([], signal.SIGUSR1, "torchrun", -signal.SIGUSR1, False),
        "term": ([], signal.SIGTERM, "torchrun", 1, True),
        "passed": ([PASSED_ON], signal.SIGUSR1, "torchrun", 1, True),
    }
    name = module(STOPPABLE)
    running = {}
    for case, (options, *_) in cases.items():
        command = [*launch.torchrun("--standalone", *options, nproc=2), "-m", name, case]
        running[case] = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    ranks = []
    try:
        for case, (_, number, whom, *_) in cases.items():
            until(lambda case=case: all(os.path.exists(f"{case}-started-{n}") for n in (0, 1)))
            own_ranks = psutil.Process(running[case].pid).children()
            ranks += own_ranks
            if whom == "torchrun":
                running[case].send_signal(number)
            else:
                # what the guide advises
                subprocess.run(["pkill", "-USR1", "-P", str(running[case].pid)], check=True)
        for case, (*_, code, has_checkpoint) in cases.items():
            assert running[case].wait(timeout=120) == code, case
            found = [os.path.exists(f"{case}-checkpoint-{n}") for n in (0, 1)]
            assert found == [has_checkpoint] * 2, case
        assert survivors(ranks) == []
    finally:
        processes.end(list(running.values()))
    guide = Path(__file__).resolve().parents[2] / "book" / "guide" / "training.md"
    advice = guide.read_text()
    assert "pkill -USR1 -P" in advice
    assert PASSED_ON in advice


@pytest.mark.parametrize(
    ("in_driver", "visible", "nproc", "hides"),
    [
        (0, None, 2, False),  # no GPU at all
        (1, None, 1, False),
        (1, None, 2, True),
        (4, None, 4, False),
        (4, "0,1", 4, True),
        (4, "", 4, False),  # they are hidden already
    ],
)
def test_more_ranks_than_gpus_compute_on_the_cpu(monkeypatch, in_driver, visible, nproc, hides):
    monkeypatch.setattr(hardware, "gpus_of_driver", lambda: in_driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launch._on_the_cpu(nproc) == ({"CUDA_VISIBLE_DEVICES": ""} if hides else {})
