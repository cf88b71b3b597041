"""`python -m labcode.doctor hang`, asked about real trainings: stuck, slow, silent."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from faults import waiting
from faults.fixtures import in_step
from faults.forks import start

from labcode.doctor import answers, ask
from labcode.doctor.answers import Answer, Thread
from labcode.doctor.find_run import processes_of
from labcode.doctor.standing import Call, Standing
from labcode.runtime import launch, processes

pytestmark = pytest.mark.release

SMALL = [
    "gpt_tiny",
    "--model.num_layers=1",
    "--model.hidden_size=16",
    "--model.num_heads=2",
    "--model.context_length=16",
    "--train.steps=100000",
    "--train.global_batch=4",
    "--train.eval_batches=1",
    "--train.sample_tokens=4",
    "--train.out=run",
]
ASK = ["run", "--apart", "0.3", "--patience"]


def patch(phases: str) -> None:
    """In each rank: look often; rank 1 goes through the phases in its third step."""
    answers.LOOK_S = 0.05
    if os.environ["RANK"] == "1":
        in_step(3, partial(go_through, Path(phases)))


def go_through(phases: Path) -> None:
    """Each phase ends when somebody writes into its pipe."""
    wait_at_the_gate(phases / "stuck")
    print("passed the gate", flush=True)
    with contextlib.suppress(FileExistsError):
        work_deeper(phases / "working")
    hold_pythons_lock(phases / "locked")


def wait_at_the_gate(pipe: Path) -> None:
    print("at the gate", flush=True)
    pipe.read_text()


def work_deeper(until: Path) -> None:
    """No two looks see the same stack."""
    time.sleep(0.02)
    if until.exists():
        raise FileExistsError
    work_deeper(until)


def hold_pythons_lock(until: Path) -> None:
    """C code that keeps the lock: no other thread of this process runs meanwhile."""
    libc = ctypes.PyDLL(None)
    print("takes the lock", flush=True)
    descriptor = libc.open(str(until).encode(), os.O_RDONLY)
    os.close(descriptor)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Waits until something is true; the limit is for a test that hangs, not for a busy machine."""
    return waiting.until


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = ask.main(words)
    return code, capsys.readouterr().out


def test_stuck_working_silent_and_slow_are_told_apart(tmp_path, capsys, monkeypatch, until):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("stuck")
    os.mkfifo("locked")
    with start(SMALL, cwd=tmp_path, ranks=2, patch=partial(patch, str(tmp_path))) as running:
        until(lambda: "at the gate" in running.text(1))
        until(lambda: asked(capsys, *ASK, "60")[0] == 1)  # rank 0 waits as well

        code, text = asked(capsys, *ASK, "60")
        first, line = text.splitlines()[:2]
        assert (code, first) == (1, "run: 2 ranks were asked twice, 0.3 s apart")
        assert re.fullmatch(
            r"stuck: nothing has moved in 0\.3 s: rank 1 has not come to (\w+ #\d+ of \S.*): it is "
            r"in wait_at_the_gate \((tests/ranks/)?test_ask\.py, line \d+\); "
            r"rank 0 waits in \1 among ranks 0 and 1",
            line,
        ), text
        assert f"rank 1, process {running.pids[1]} on " in text and "2 steps done" in text
        stack = text.partition("rank 1, process")[2]
        assert re.search(
            r"wait_at_the_gate .*\n(.*\n)*? +__call__ .*/step\.py, .*\n(.*\n)*? +fit ", stack
        ), text
        assert not (tmp_path / "run" / "hang").exists()
        assert asked(capsys, str(running.pids[0]), *ASK[1:], "60")[0] == 1

        running.signal(1, signal.SIGSTOP)
        code, text = asked(capsys, *ASK, "1")
        assert code == 1 and "rank 1 does not answer (stopped, killed, or busy in C" in text
        assert "rank 0 waits in" in text
        running.signal(1, signal.SIGCONT)

        Path("stuck").write_text("")
        until(lambda: "passed the gate" in running.text(1))
        code, text = asked(capsys, *ASK, "60")
        assert code == 0 and "slow, or in a loop: rank 1 is at another place" in text, text

        Path("working").touch()
        until(lambda: "takes the lock" in running.text(1))
        code, text = asked(capsys, *ASK, "1")
        assert code == 1 and "rank 1 does not answer" in text

        Path("locked").write_text("")
        until(lambda: asked(capsys, *ASK, "60")[0] == 0)
        code, text = asked(capsys, *ASK, "60", "--threads")
        assert code == 0 and re.search(r"not stuck: it moves on, by \d+ steps? in 0\.3 s", text)
        assert "  MainThread\n" in text


def test_a_real_rank_that_is_stopped_is_named_with_its_process(tmp_path, capsys, until):
    command = launch.torchrun("--standalone", nproc=2)
    with subprocess.Popen(
        [*command, "-m", "labcode.train", *SMALL], cwd=tmp_path, start_new_session=True
    ) as agent:
        try:
            until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
            until(lambda: len(processes_of(tmp_path / "run", [])) == 2)
            rank = processes_of(tmp_path / "run", [])[1]
            rank.suspend()
            code, text = asked(capsys, str(agent.pid), "--apart", "0.3", "--patience", "5")
        finally:
            processes.end([agent])
    assert code == 1
    assert text.startswith(f"{tmp_path / 'run'}: 2 ranks were asked twice")
    silent = f"rank 1, process {rank.pid} here, does not answer: it is stopped (SIGSTOP)"
    assert silent in text and f"kill -CONT {rank.pid}" in text


# ---- what two looks mean


def answer(rank: int, step: int, number: int, line: int) -> Answer:
    call = Call("all_reduce", number, ((4,),), (0, 1), created_s=float(number))
    standing = Standing(rank, step, f"f (a.py, line {line})", call, (call,))
    threads = (Thread("MainThread", (f"f (a.py, line {line})",)),)
    return Answer("q", 2, "n1", 7, standing, threads)


def test_a_step_a_collective_and_another_line_are_movements() -> None:
    before = answer(0, step=3, number=8, line=5)
    assert Answer.from_json(before.to_json()) == before
    assert ask.movement(before, answer(0, 3, 8, 5)) == ask.STANDS
    assert ask.movement(before, answer(0, 3, 8, 6)) == ask.WORKS
    assert ask.movement(before, answer(0, 3, 9, 5)) == ask.MOVES_ON
    assert ask.movement(before, answer(0, 4, 8, 5)) == ask.MOVES_ON


def test_what_is_no_run_is_refused_in_one_line(tmp_path, capsys) -> None:
    assert ask.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: no process holds this run; it has ended, or is no run\n"
    )
