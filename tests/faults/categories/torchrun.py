"""Real processes: torchrun, its ranks and `labcode.launch`, killed, signalled, refused."""

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil

from .. import fixtures
from ..cases import BASE, EITHER, Case, Room, scaled, wait_until
from ..fixtures import LONG, RESUME
from ..forks import Done
from ..waiting import free_port

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 90.0
IMPORT_S = 1.5
GONE_S = 15.0  # how long ranks may live after their torchrun
LAUNCH = """
import sys
from labcode import launch

try:
    launch.run(sys.argv[1], *sys.argv[2:], nproc=2, timeout_s=60, echo=False)
except launch.LaunchError as error:
    sys.exit(f"error: {error}")
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)
"""


def cases(rng: random.Random) -> list[Case]:
    del rng
    made = []
    for number in (signal.SIGKILL, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        for when in ("in step 3", "in set-up"):
            what = f"{number.name} to torchrun {when}"
            made.append(_case(what, partial(_signal, "torchrun", number, when)))
    for target in ("rank 0", "rank 1"):
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1):
            what = f"{number.name} to {target} of torchrun"
            made.append(_case(what, partial(_signal, target, number, "in step 3")))
    for number in (signal.SIGKILL, signal.SIGINT):
        what = f"{number.name} to a program that has launched ranks"
        made.append(_case(what, partial(_signal, "launcher", number, "in step 3")))
    what = "SIGKILL to the torchrun of labcode.launch"
    made.append(_case(what, partial(_signal, "launched torchrun", signal.SIGKILL, "in step 3")))
    for what, words in {
        "an unknown field": ["--train.stepz=3"],
        "a grid that does not fit": ["--parallel.tp=3"],
        "no such text": ["--data.path=nowhere.txt"],
    }.items():
        names = [words[0].partition("=")[0].removeprefix("--"), "parallel", "tp", "nowhere.txt"]
        made.append(Case(f"torchrun, {what}", words, names, ranks=2, act=_refused))
    made.append(Case("a launched training with an error", act=_launched_error))
    made.append(Case("the port of torchrun is taken", answer=EITHER, act=_port_taken))
    made.append(Case("the reader of the log goes after a line", answer=EITHER, act=_head))
    return made


def _case(what: str, act) -> Case:
    return Case(what, answer=EITHER, ranks=2, act=act, replaced=["run"])


def _environment(room: Room) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return os.environ | {"TMPDIR": str(room.tmp), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _torchrun(room: Room, *words: str, module: str = "tests.faults.slow") -> subprocess.Popen:
    """The ranks write to files of their own: what torchrun says itself is not judged."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--redirects=3", f"--log-dir={room.folder / 'log'}"]
    command += ["-m", module, *BASE, f"--data.cache_dir={room.cache}", *words]
    room.commands.append(f"torchrun {' '.join(words)}")
    return _popen(room, command)


def _launched(room: Room, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-c", LAUNCH, "tests.faults.slow"]
    command += [*BASE, f"--data.cache_dir={room.cache}", *words]
    room.commands.append(f"launch {' '.join(words)}")
    return _popen(room, command)


def _popen(room: Room, command: list[str]) -> subprocess.Popen:
    with open(room.folder / "own.err", "wb") as file:
        return subprocess.Popen(
            command,
            cwd=room.folder,
            env=_environment(room),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
        )


def _signal(target: str, number: signal.Signals, when: str, room: Room) -> None:
    """A signal; then nothing may be left, and the run goes on to the very same end."""
    launched = "launch" in target
    process = _launched(room, *RESUME) if launched else _torchrun(room, *RESUME)
    rows = room.folder / "run" / "metrics.jsonl"
    family: list[psutil.Process] = []
    try:
        if when == "in set-up":
            wait_until(lambda: len(_children(process)) >= 2, LIMIT_S)
            time.sleep(IMPORT_S)  # not while Python itself starts
        else:
            wait_until(lambda: _lines(rows) >= 3 or process.poll() is not None, LIMIT_S)
        family = _children(process)
        _target(target, process, family).send_signal(number)
        left = _survivors(process, family)
    finally:
        for member in [*family, *_children(process)]:
            _kill(member)
        if process.poll() is None:
            process.kill()
        process.wait()
    if left:
        room.flag("left behind", f"processes: {left}")
    done = _ended(room, process, hung=False)
    if done.tracebacks and not launched:
        room.flag("unclear", f"a rank printed a traceback: {done.err}")
    room.train(*RESUME)
    fixtures.compare_with_whole(room, room.folder / "run", 2)
    _clean(room)


def _children(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _target(target: str, process: subprocess.Popen, family: list[psutil.Process]) -> psutil.Process:
    own = psutil.Process(process.pid)
    if target in ("torchrun", "launcher"):
        return own
    if target == "launched torchrun":
        return own.children()[0]
    for member in family:
        if member.environ().get("RANK") == target.removeprefix("rank "):
            return member
    return own


def _survivors(process: subprocess.Popen, family: list[psutil.Process]) -> str:
    """What still runs some time after the signal."""
    deadline = time.monotonic() + scaled(GONE_S + 30)  # torchrun waits 30 s for its ranks
    alive = family
    while time.monotonic() < deadline:
        alive = [member for member in family if _runs(member)]
        if not alive and process.poll() is not None:
            return ""
        time.sleep(0.1)
    return f"{len(alive)} of {len(family)}"


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _ended(room: Room, process: subprocess.Popen, *, hung: bool) -> Done:
    """The end of a job, with what its ranks wrote."""
    err = [path.read_text() for path in sorted(room.folder.glob("log/**/stderr.log"))]
    if not err:
        err = [(room.folder / "own.err").read_text()]
    code = process.returncode
    text = "\n".join(err)
    if code != 0:
        # torchrun has exit codes of its own
        code = 130 if "interrupted" in text else 2
    done = Done([code], [""] * len(err), err, hung, [], 0.0)
    room.answer = done
    return done


def _wait(room: Room, process: subprocess.Popen) -> Done:
    hung = False
    try:
        process.wait(scaled(LIMIT_S))
    except subprocess.TimeoutExpired:
        hung = True
        for member in _children(process):
            _kill(member)
        process.kill()
        process.wait()
    return _ended(room, process, hung=hung)


def _clean(room: Room) -> None:
    """Remove what the trial itself has written."""
    subprocess.run(["rm", "-rf", "log", "own.err"], cwd=room.folder, check=False)
    # torchrun keeps a folder when it is killed; ours begin with labcode
    for path in room.tmp.iterdir():
        if not path.name.startswith("labcode"):
            subprocess.run(["rm", "-rf", str(path)], check=False)


def _refused(room: Room) -> None:
    words = ["--train.out=out", *room.case.args]
    done = _wait(room, _torchrun(room, *words, module="labcode.train"))
    if (room.folder / "out").exists():
        room.flag("left behind", "out")
    del done
    _clean(room)


def _launched_error(room: Room) -> None:
    _wait(room, _launched(room, "--train.out=out", "--train.stepz=3"))
    text = (room.folder / "own.err").read_text()
    if "rank 0" not in text:
        room.flag("unclear", f"names no rank: {text[-200:]}")
    _clean(room)


def _port_taken(room: Room) -> None:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
        server.listen()
        port = server.getsockname()[1]
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        room.train("--train.out=out", ranks=2, env=env)
    answer = room.answer
    assert answer is not None
    # they cannot meet: each says so
    answer.err = [
        text.replace("error: ", "(also) ") if n else text for n, text in enumerate(answer.err)
    ]


def _head(room: Room) -> None:
    """`... | head -1`: the run may end, or go on without a reader; in one line at most."""
    command = [
        sys.executable,
        "-m",
        "labcode.train",
        *BASE,
        f"--data.cache_dir={room.cache}",
        *LONG,
    ]
    room.commands.append("python -m labcode.train ... | head -1")
    process = subprocess.Popen(
        command,
        cwd=room.folder,
        env=_environment(room),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    code = process.wait()
    room.answer = Done([2 if code and "error: " in err else code], [""], [err], False, [], 0.0)
    room.began = True
    _clean(room)
