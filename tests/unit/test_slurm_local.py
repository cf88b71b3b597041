"""A job without SLURM: two emulated nodes on this machine, the same handle, and no process left."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from labcode.slurm.cli import main
from labcode.slurm.run import local
from labcode.slurm.run.client import Client
from labcode.slurm.run.handle import JobFailed
from labcode.slurm.run.submit import submit
from labcode.slurm.run.supervisor import MODULE, Plan, Record
from labcode.slurm.script.job import Job
from labcode.slurm.script.site import load

TINY = (
    "--train.steps",
    "3",
    "--train.eval_every",
    "0",
    "--train.eval_batches",
    "1",
    "--train.sample_tokens",
    "0",
)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch, living):
    """A folder for each test, which ranks can import from; no process that works there is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    yield
    assert living(tmp_path) == []


def module(name, code):
    Path(f"{name}.py").write_text(textwrap.dedent(code))
    return name


@pytest.mark.release
def test_a_recipe_trains_on_two_emulated_nodes_and_says_where(monkeypatch, capfd):
    for ask in ("find", "own"):
        # a machine without any SLURM
        monkeypatch.setattr(Client, ask, classmethod(lambda *_: None))
    handle = submit(Job("gpt_tiny", TINY, nodes=2, ranks_per_node=1, name="two words"))
    assert handle.where == "this machine, no SLURM: 2 emulated nodes x 1 rank"
    outcome = handle.wait(timeout_s=250)
    assert (outcome.state, handle.state, str(outcome)) == ("COMPLETED", "COMPLETED", "COMPLETED")
    out = capfd.readouterr().out
    first, *_, last = out.splitlines()
    assert first.startswith(
        f"job {handle.number} on {handle.where} (slurm/cluster up 2 starts one); log: "
    )
    assert (
        "validation loss" in out
        and "2 ranks on" in out
        and last == f"job {handle.number} COMPLETED"
    )
    assert (
        handle.path == Path(f"two words-{handle.number}.log").absolute()
        and "validation loss" in handle.log()
    )
    assert Path(f"runs/two words-{handle.number}/config.json").is_file()
    assert main(["status", handle.number]) == 0 and "COMPLETED" in capfd.readouterr().out
    assert local.find(handle.number, Path()).info().nodes == "2 emulated"


def test_a_scratch_folder_that_only_the_cluster_has_is_runs_here(monkeypatch):
    site = load("perlmutter")
    assert site.scratch == "$SCRATCH/labcode"
    monkeypatch.delenv("SCRATCH", raising=False)
    assert local.scratch_here(site) == "runs"
    monkeypatch.setenv("SCRATCH", "")
    assert local.scratch_here(site) == "runs"
    monkeypatch.setenv("SCRATCH", "/disk/me")
    assert local.scratch_here(site) == "/disk/me/labcode"


@pytest.mark.release
def test_the_failing_rank_is_named_and_the_others_are_ended():
    code = """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("no such thing as 7")
        time.sleep(200)
    """
    handle = submit(Job("", nodes=2, ranks_per_node=1, module=module("failing", code)), here=True)
    with pytest.raises(JobFailed, match="FAILED: rank 1: ValueError: no such thing as 7") as error:
        handle.wait(echo=False, timeout_s=250)
    assert error.value.outcome.rank == 1


def test_an_interrupted_submission_ends_its_job():
    waiting = module("waiting", "import time; print('asleep', flush=True); time.sleep(200)")
    argv = [
        sys.executable,
        "-m",
        "labcode.slurm",
        "submit",
        "",
        "--module",
        waiting,
        "--ranks-per-node",
        "1",
        "--here",
    ]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    number = process.stdout.readline().split()[1]
    while "asleep" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=40)
    assert (
        process.returncode == 130
        and f"interrupted: job {number} is cancelled" in err
        and "Traceback" not in out + err
    )
    assert local.find(number, Path()).state == "CANCELLED"


def test_when_the_submitter_is_killed_the_job_ends_by_itself(tmp_path, living, until):
    waiting = module("waiting", "import time; print('asleep', flush=True); time.sleep(200)")
    argv = [
        sys.executable,
        "-m",
        "labcode.slurm",
        "submit",
        "",
        "--module",
        waiting,
        "--ranks-per-node",
        "1",
        "--here",
    ]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    while "asleep" not in process.stdout.readline():
        assert process.poll() is None
    process.kill()
    process.communicate()
    until(lambda: not living(tmp_path))


def test_ranks_end_when_their_supervisor_is_killed(tmp_path, living, until):
    waiting = module("waiting", "import time; print('asleep', flush=True); time.sleep(200)")
    handle = submit(Job("", ranks_per_node=1, module=waiting), here=True, keep=True)
    until(lambda: "asleep" in handle.log())
    handle.process.kill()
    until(lambda: not living(tmp_path))
    assert handle.wait(check=False).reason == "the supervisor of the job was killed"


@pytest.mark.release
def test_before_the_time_limit_ranks_are_told_and_at_the_limit_ended():
    code = """
        import signal, time
        signal.signal(signal.SIGUSR1, lambda *_: print("told", flush=True))
        print("ready", flush=True)
        for _ in range(2000):
            time.sleep(0.1)
    """
    patient = module("patient", code)
    # As torchrun does.
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-m', '{patient}'])"
    record = Path("a-1.json").absolute()
    log = Path("a.log").absolute()
    Record("RUNNING", "a", nodes=1, minutes=12 / 60, log=str(log), started=time.time()).save(record)
    plan = Plan(agents=[[sys.executable, "-c", start]], record=str(record), usr1_s=8)
    subprocess.run([sys.executable, "-m", MODULE, json.dumps(asdict(plan))], check=True)
    ended = Record.read(record)
    assert ended.state == "TIMEOUT" and ended.ended - ended.started > 11
    first, *others = log.read_text().split()
    # again and again, and not before it listens
    assert first == "ready" and set(others) == {"told"}


@pytest.mark.parametrize(("leaves", "state"), [("stopped", "TIMEOUT"), ("weights", "COMPLETED")])
def test_a_run_that_finishes_after_it_was_asked_has_completed(leaves, state):
    code = f"""
        import pathlib, signal, sys, time
        def stop(*_):
            pathlib.Path("{leaves}").touch()
            sys.exit(0)
        signal.signal(signal.SIGUSR1, stop)
        time.sleep(200)
    """
    start = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-m', '{module('ends', code)}'])"
    )
    record = Path("a-1.json").absolute()
    Record("RUNNING", "a", nodes=1, minutes=5, log=str(Path("a.log").absolute())).save(record)
    agents = [[sys.executable, "-c", start]]
    plan = Plan(agents, str(record), usr1_s=0.5, stopped=str(Path("stopped").absolute()))
    subprocess.run([sys.executable, "-m", MODULE, json.dumps(asdict(plan))], check=True)
    assert Record.read(record).state == state
