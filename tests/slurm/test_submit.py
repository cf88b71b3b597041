"""`submit` on a real SLURM: the log comes, and the end has a state and a reason.

An interrupt leaves no job behind.
"""

import dataclasses
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from labcode.slurm.run.client import Client, SlurmError, UnknownJob
from labcode.slurm.run.handle import JobFailed, SlurmHandle
from labcode.slurm.run.submit import submit
from labcode.slurm.script.job import Job
from labcode.slurm.script.site import load

CLI = [sys.executable, "-m", "labcode.slurm"]
QUICK = [
    "--train.steps",
    "4",
    "--train.eval_every",
    "0",
    "--train.eval_batches",
    "1",
    "--train.sample_tokens",
    "0",
]


@pytest.fixture
def client(cluster2, tmp_path, monkeypatch):
    """The client of the cluster.

    Jobs of the test write into a folder of its own, and import modules from there.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    client = Client.of(cluster2)
    yield client
    assert client.queue() == []


@pytest.fixture
def ranks():
    """The local site with one task for each rank: no torch to wait for."""
    return dataclasses.replace(load("local"), launcher="srun", python=sys.executable)


def module(name, code):
    Path(f"{name}.py").write_text(textwrap.dedent(code))
    return name


def test_a_recipe_trains_on_two_nodes_and_says_so(client, cluster2):
    size = ["--nodes", "2", "--ranks-per-node", "1", "--minutes", "5", "--name", "two nodes"]
    done = subprocess.run(
        [*CLI, "submit", "gpt_tiny", "--cluster", cluster2.name, *size, *QUICK],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("job ") and "SLURM cluster" in first and last.endswith("COMPLETED")
    assert (
        "validation loss" in done.stdout
        and "2 ranks on 2 nodes" in done.stdout
        and done.stderr == ""
    )
    number = first.split()[1]
    log, script = Path(f"two nodes-{number}.log"), Path(f"two nodes-{number}.sbatch")
    assert "validation loss" in log.read_text() and "--job-name" in script.read_text()
    assert not list(Path.cwd().glob("*.partial"))
    shown = subprocess.run(
        [*CLI, "status", number, "--cluster", cluster2.name],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert "COMPLETED" in shown.stdout and "n[1-2]" in shown.stdout


def test_the_rank_that_fails_is_named_and_a_job_that_waits_for_it_never_starts(
    client, ranks, capfd
):
    failing = module(
        "failing",
        "import os, time; print('hello', flush=True); time.sleep(1); "
        "os._exit(5 * (os.environ['SLURM_PROCID'] == '3'))",
    )
    job = Job("", nodes=2, module=failing)
    handle = submit(job, ranks, client=client)
    with pytest.raises(JobFailed, match=r"FAILED: rank 3: exited with exit code 5 on n2") as error:
        handle.wait(timeout_s=250)
    assert (error.value.outcome.rank, handle.outcome.ok, handle.state) == (3, False, "FAILED")
    assert "hello" in handle.log() and "hello" in capfd.readouterr().out
    after = submit(
        dataclasses.replace(job, dependency=f"afterok:{handle.number}"), ranks, client=client
    )
    outcome = after.wait(check=False, timeout_s=250)
    assert outcome.state == "CANCELLED" and outcome.reason.startswith("DependencyNeverSatisfied")


@pytest.mark.release
def test_under_torchrun_the_failing_rank_and_its_error_are_found(client):
    failing = module(
        "raising", "import os\nif os.environ['RANK'] == '1': raise ValueError('no such thing as 7')"
    )
    outcome = submit(Job("", nodes=2, ranks_per_node=1, module=failing), client=client).wait(
        check=False, timeout_s=250
    )
    assert (outcome.state, outcome.rank) == ("FAILED", 1) and "no such thing as 7" in outcome.reason


@pytest.mark.release
def test_a_requeued_job_is_followed_into_its_second_attempt(client, tmp_path):
    script = tmp_path / "again.sbatch"
    options = "#SBATCH --requeue --open-mode=append --output=again.log"
    again = 'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then '
    # exec: a shell whose `sleep` is ended before itself would go on to the next command
    again += 'scontrol requeue "$SLURM_JOB_ID"; exec sleep 30; fi; echo second'
    script.write_text(f"#!/bin/bash\n{options}\necho first\n{again}\n")
    handle = SlurmHandle(client, client.submit(script))
    outcome = handle.wait(timeout_s=250)
    assert (outcome.state, outcome.restarts, str(outcome)) == (
        "COMPLETED",
        1,
        "COMPLETED after 1 restart",
    )
    assert [line for line in handle.log().splitlines() if "slurmstepd" not in line] == [
        "first",
        "first",
        "second",
    ]


@pytest.mark.parametrize("keep", [False, True])
def test_an_interrupt_leaves_no_job_behind_unless_it_is_told_to(client, cluster2, keep):
    sleeping = module("sleeping", "import time; print('asleep', flush=True); time.sleep(100)")
    Path("own.yaml").write_text(f"launcher: srun\npython: {sys.executable}\n")
    argv = [
        *CLI,
        "submit",
        "",
        "--module",
        sleeping,
        "--site",
        "own.yaml",
        "--cluster",
        cluster2.name,
    ]
    argv += ["--keep"] if keep else []
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    number = process.stdout.readline().split()[1]
    while "asleep" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 130 and f"job {number}" in err and "Traceback" not in out + err
    assert client.job(number).state == ("RUNNING" if keep else "CANCELLED")
    SlurmHandle(client, number).cancel()
    assert client.job(number).state == "CANCELLED"


def test_nobody_trains_on_a_login_node_by_mistake(client, cluster2, tmp_path_factory):
    # with another folder for temporary files the cluster is none of `slurm/cluster`
    elsewhere = ["env", f"TMPDIR={tmp_path_factory.mktemp('elsewhere')}"]
    done = cluster2.exec([*elsewhere, *CLI, "submit", "gpt_tiny", *QUICK], check=False)
    assert done.returncode == 2 and done.stdout == ""
    way_out = r"name its profile with --site; to run here all the same: --here\n"
    assert re.fullmatch(
        r"error: this machine belongs to SLURM cluster \S+: " + way_out, done.stderr
    )
    assert list(Path.cwd().iterdir()) == []


def test_what_slurm_refuses_is_one_line_and_leaves_nothing(client, ranks):
    with pytest.raises(SlurmError, match="Invalid partition name") as error:
        submit(
            Job("", nodes=2, module="platform"),
            dataclasses.replace(ranks, partition="none"),
            client=client,
        )
    assert "\n" not in str(error.value) and list(Path.cwd().glob("*.sbatch")) == []
    with pytest.raises(UnknownJob, match=r"^no job 999999 on SLURM cluster"):
        client.job("999999")
    assert [group.nodes for group in client.nodes()] == ["n[1-2]"]


def test_a_script_that_breaks_a_rule_is_not_submitted(client, ranks):
    site = dataclasses.replace(ranks, setup=("#SBATCH --nodes=2",))
    with pytest.raises(
        ValueError, match=r"not submitted: line \d+: S02: directive after the first"
    ):
        submit(Job("", module="platform"), site, client=client)
