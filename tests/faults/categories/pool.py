"""The pool behind a notebook: ranks that fail, mismatches, hostile results, owners that die."""

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ..cases import EITHER, Case, Room, scaled
from ..forks import Done
from ..pool_host import ANY, DEATH, DEEDS, ERROR, FINE, MISMATCHES, WAITS

ROOT = Path(__file__).resolve().parents[3]
HOSTS = 3  # pools, one after another
START_S = 90.0
FAULT_S = 90.0
GONE_S = 10.0
MOST_LETTERS = 20_000  # of an error: more is no message

# arguments of Ranks: whether they are possible
ARGUMENTS = [
    "Ranks(0)",
    "Ranks(-1)",
    "Ranks('2')",
    "Ranks(None)",
    "Ranks(1.5)",
    "Ranks(True)",
    "Ranks([2])",
    "Ranks(float('nan'))",
    "Ranks(2, timeout_s=0)",
    "Ranks(2, timeout_s=-1)",
    "Ranks(2, timeout_s=float('nan'))",
    "Ranks(2, timeout_s=float('inf'))",
    "Ranks(2, timeout_s='5')",
    "Ranks(2, timeout_s=None)",
    "Ranks()",
]
IDLE = "ranks = Ranks(2); print('ready', flush=True); time.sleep(600)"
BUSY = "ranks = Ranks(2); print('ready', flush=True); ranks.run(lambda: time.sleep(600))"
STARTING = "print('ready', flush=True); ranks = Ranks(2); time.sleep(600)"
# what the owner does, and how it ends
OWNERS = {
    (IDLE, signal.SIGKILL): "idle",
    (IDLE, signal.SIGTERM): "idle",
    (IDLE, signal.SIGINT): "idle",
    (BUSY, signal.SIGKILL): "in a call",
    (BUSY, signal.SIGTERM): "in a call",
    (BUSY, signal.SIGINT): "in a call",
    (BUSY, signal.SIGSEGV): "in a call",
    (STARTING, signal.SIGKILL): "at the start",
    (STARTING, signal.SIGTERM): "at the start",
    (STARTING, signal.SIGINT): "at the start",
}


def cases(rng: random.Random) -> list[Case]:
    faults = [("wait", fault, who) for fault in WAITS for who in (0, 1)]
    for fault in DEEDS:
        faults.append(("deed", fault, 0))
        faults.append(("deed", fault, 1))
    faults += [("mismatch", fault, 0) for fault in MISMATCHES]
    made = []
    for number, (kind, fault, who) in enumerate(faults):
        host = number * HOSTS // len(faults)
        made.append(
            Case(
                _words(kind, fault, who), answer=EITHER, act=partial(_play, host, kind, fault, who)
            )
        )
    for call in ARGUMENTS:
        made.append(Case(call, names=["n=", "timeout_s", "n "], act=partial(_construct, call)))
    for (code, number), what in OWNERS.items():
        delay_s = rng.uniform(0.2, 4.0) if what == "at the start" else 0.3
        text = f"{signal.Signals(number).name} to the owner {what}"
        made.append(Case(text, answer=EITHER, act=partial(_owner, code, number, delay_s)))
    return made


def _words(kind: str, fault: str, who: int) -> str:
    if kind == "wait":
        return f"rank {who} raises while the other is in {fault}"
    if kind == "deed":
        return f"rank {who}: {fault}"
    return f"both ranks: {fault}"


# ---- faults on a pool


class _Host:
    """An owner of a pool, to which faults are sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None

    def ask(self, order: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to a fault; None if there was none in time."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            process = self.process
            assert process is not None and process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            answer = self._read(FAULT_S)
            if answer is None:
                self.close()
            return answer

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.pool_host"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": _path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()
        assert self._read(START_S) is not None, "the pool did not start"

    def _listen(self, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def _read(self, limit_s: float) -> dict[str, Any] | None:
        try:
            line = self.answers.get(timeout=scaled(limit_s))
        except queue.Empty:
            return None
        return json.loads(line) if line else None

    def close(self) -> None:
        """End it and all below it."""
        if self.process is None:
            return
        for member in [*_family(self.process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        self.process.wait()
        self.process = None


_hosts = [_Host() for _ in range(HOSTS)]


def close() -> None:
    """End all pools."""
    for host in _hosts:
        host.close()


def _play(number: int, kind: str, fault: str, who: int, room: Room) -> None:
    started = time.monotonic()
    answer = _hosts[number].ask({"fault": fault, "kind": kind, "who": who})
    seconds = time.monotonic() - started
    expected = DEEDS[fault][1] if kind == "deed" else ERROR
    room.commands.append(f"pool {number}: {room.case.what}: {expected}")
    if answer is None:
        room.answer = Done([-1], [""], ["no answer"], True, [], seconds)
        return
    raised = answer["raised"]
    lines = answer["text"].splitlines() or [""]
    line = f"error: {raised}: {lines[0]}\n" if raised else ""
    room.answer = Done([2 if raised else 0], [""], [line], False, [], seconds)
    if answer["usable"]:
        room.flag("wrong", answer["usable"])
    if answer["length"] > MOST_LETTERS:
        room.flag("unclear", f"an error of {answer['length']} letters")
    problem = _problem(raised, answer["text"], expected, who if kind != "mismatch" else None)
    if problem:
        room.flag("unclear", problem)


def _problem(raised: str, text: str, expected: str, who: int | None) -> str:
    """What is not as it should be in what the pool raised; empty if all is well."""
    if expected == ANY:
        return ""
    if expected == FINE:
        return f"raised {raised}" if raised else ""
    if not raised:
        return "returned as if nothing had happened"
    if raised != "RankError":
        return f"raised {raised}"
    if who is not None and f"rank {who}" not in text:
        return f"does not name rank {who}"
    if expected == DEATH and "died" not in text and "restart" not in text:
        return "does not say that the rank died"
    return ""


# ---- owners of their own


def _construct(call: str, room: Room) -> None:
    """Arguments that are impossible: one line that names them, before anything starts."""
    code = f"""
import sys
from labcode.pool.ranks import Ranks
try:
    pool = {call}
    pool.close()
except (TypeError, ValueError) as error:
    sys.exit(f"error: {{error}}")
"""
    process = _run(code, room)
    try:
        out, err = process.communicate(timeout=scaled(START_S))
        hung = False
    except subprocess.TimeoutExpired:
        hung = True
        _end(process)
        out, err = process.communicate()
    done = Done([2 if "error: " in err else process.returncode], [out], [err], hung, [], 0.0)
    room.answer = done
    if not hung and "Ranks()" in call and "missing" in err:
        room.answer.err = [err.replace("missing", "n is missing")]


def _owner(code: str, number: int, delay_s: float, room: Room) -> None:
    """However the owner ends, its ranks end too and leave no files."""
    process = _run(f"import time\nfrom labcode.pool.ranks import Ranks\n{code}", room)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(delay_s)
    family = _family(process.pid)
    process.send_signal(number)
    deadline = time.monotonic() + scaled(GONE_S)
    left = family
    while left and time.monotonic() < deadline:
        left = [member for member in family if _runs(member)]
        process.poll()
        time.sleep(0.05)
    if left:
        room.flag("left behind", f"{len(left)} processes of {len(family)}")
        for member in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    _end(process)
    process.communicate()
    # a killed owner cannot remove its folder of logs: the next start may, nobody else does
    for path in room.tmp.iterdir():
        if number in (signal.SIGKILL, signal.SIGSEGV):
            subprocess.run(["rm", "-rf", str(path)], check=False)
    room.answer = Done([0], [""], [""], False, [], 0.0)


def _run(code: str, room: Room) -> subprocess.Popen:
    room.commands.append(code.strip())
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=room.folder,
        env=os.environ | {"PYTHONPATH": _path(), "TMPDIR": str(room.tmp)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, sys.path)])


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(process: subprocess.Popen) -> None:
    for member in _family(process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
