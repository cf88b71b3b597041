"""The fork server itself: a forked rank is to tests what a process of its own would be."""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from faults import forks
from faults.forks import start, train

# as they are when this file is imported in a rank
MODULES = set(sys.modules)
SMALL = [
    "gpt_tiny",
    "--model.num_layers=1",
    "--model.hidden_size=16",
    "--model.num_heads=2",
    "--model.context_length=16",
    "--train.steps=2",
    "--train.global_batch=4",
    "--train.eval_batches=1",
    "--train.sample_tokens=4",
]


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr(forks, "LEAVING_S", 0.3)


def act(what):
    """Stands in for the training: a patch that ends the rank in some way."""
    rank = os.environ.get("RANK")
    if what == "exit":
        sys.exit(3)
    if what == "text":
        sys.exit("the last word")
    if what == "raise":
        raise ValueError("no good")
    if what == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    if what == "describe":
        print(os.getcwd(), rank, os.environ.get("MARK"), os.environ.get("HOME"), flush=True)
        os.write(2, b"by descriptor\n")
        os._exit(int(rank or 7))
    if what == "modules":
        # imported before the fork; one thread; SIGTERM is heard
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        preloaded = "labcode.train.loop" in MODULES
        print(preloaded, torch.get_num_threads(), signal.SIGTERM not in blocked, flush=True)
        os._exit(0)
    if what == "wait":
        if os.fork() == 0:
            time.sleep(600)
        print("here", flush=True)
        time.sleep(600)
    if what == "leave":
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)


def test_a_training_on_two_ranks_writes_its_files(tmp_path):
    done = train([*SMALL, "--train.out=run"], cwd=tmp_path, ranks=2)
    assert done.codes == [0, 0], done.err
    assert "step 2/2 | loss " in done.out[0]
    assert (tmp_path / "run" / "weights.pt").is_file()
    assert not (done.hung or done.left or done.errors or done.tracebacks)


def test_an_error_is_one_line_and_an_exit_code(tmp_path):
    done = train(["gpt_tini"], cwd=tmp_path)
    assert done.codes == [2]
    assert done.errors == [
        line for line in done.err[0].splitlines() if "did you mean gpt_tiny" in line
    ]


def test_exit_codes_are_those_of_processes(tmp_path):
    codes = {"exit": 3, "text": 1, "raise": 1, "die": -11, "interrupt": -2}
    for what, code in codes.items():
        done = train(SMALL, cwd=tmp_path, patch=partial(act, what))
        assert done.codes == [code], what
        assert done.tracebacks == (1 if what in ("raise", "interrupt") else 0)


@pytest.mark.release
def test_threads_that_wait_at_the_same_time_get_the_exit_codes_of_their_own_ranks(tmp_path):
    """Before they took turns, one of 40 got the code 255 instead."""

    def code(_):
        return train(SMALL, cwd=tmp_path, patch=partial(os._exit, 3)).codes[0]

    with ThreadPoolExecutor(16) as threads:
        codes = list(threads.map(code, range(300)))
    assert codes == [3] * 300


def test_a_rank_has_what_the_server_has_imported_and_one_thread_and_hears_its_signals(tmp_path):
    done = train(SMALL, cwd=tmp_path, patch=partial(act, "modules"))
    assert done.out == ["True 1 True\n"], done.err


def test_folder_environment_and_descriptors_are_the_ranks_own(tmp_path):
    env = [{"MARK": "a", "HOME": None}, {"MARK": "b"}]
    done = train(SMALL, cwd=tmp_path, ranks=2, env=env, patch=partial(act, "describe"))
    assert done.codes == [0, 1]
    assert done.out[0].split() == [str(tmp_path), "0", "a", "None"]
    assert done.out[1].split()[:3] == [str(tmp_path), "1", "b"]
    assert done.err == ["by descriptor\n"] * 2
    assert "MARK" not in os.environ


def test_what_does_not_end_in_time_is_killed_with_its_children(tmp_path):
    done = train(SMALL, cwd=tmp_path, timeout_s=5, patch=partial(act, "wait"))
    assert done.hung and done.codes == [-9]
    assert done.out == ["here\n"]
    done = train(SMALL, cwd=tmp_path, patch=partial(act, "leave"))
    assert not done.hung and done.codes == [0] and len(done.left) == 1


def test_a_rank_that_runs_can_be_signalled(tmp_path):
    with start(SMALL, cwd=tmp_path, ranks=2, patch=partial(act, "wait")) as running:
        running.until(lambda: running.text(0) and running.text(1))
        running.signal(0, signal.SIGTERM)
        running.kill(1)
        done = running.wait()
    assert done.codes == [-15, -9]
    assert len(done.left) == 2  # their children
