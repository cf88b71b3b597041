"""The lab of lesson 12: on a real SLURM each fault shows its symptom and is gone afterwards; without one nothing raises."""

import os
import re
from pathlib import Path

import pytest

from labcode.minislurm import Cluster, needs
from labcode.minislurm.place import base
from labcode.slurm.script.job import Job
from labcode.teach.labs import l12_cluster

HELLO = """\
import socket, sys
import torch, torch.distributed as dist
from labcode.comm import bootstrap

HIDDEN = 64
world = bootstrap.start(timeout_s=float(sys.argv[1]))
total = torch.ones(HIDDEN)
dist.all_reduce(total)
print(f"rank {world.rank} on {socket.gethostname()}: {HIDDEN} numbers, each {total[0]:g}")
bootstrap.stop()
"""
WELL = "rank 0 on n1: 64 numbers, each 2\nrank 1 on n2: 64 numbers, each 2"


@pytest.fixture(scope="module")
def lab(slurm, tmp_path_factory):
    here, folder = os.getcwd(), tmp_path_factory.mktemp("lab")
    os.chdir(folder)
    lab = l12_cluster.open_lab("test-lab", nodes=2)
    (folder / "runs/hello.py").write_text(HELLO)
    yield lab
    lab.close()
    os.chdir(here)
    assert not list(base().glob(f"test-lab-{os.getpid()}"))


# fault: (options of `hello`, what a rank says)
SYMPTOMS = {
    "name": ({"interface": None}, r"Connection refused, remote=\[127\.0\.1\.1\]"),
    "port": (
        {"wait_s": 5},
        r"cannot meet the others at n1:20017: (The client socket has t|T)imed out",
    ),
    "code": ({}, "(96 vs 64|64 vs 96|size doesn't match)"),
}


@pytest.mark.parametrize("fault", SYMPTOMS)
def test_a_fault_shows_its_symptom_and_leaves_nothing_behind(lab, fault):
    options, symptom = SYMPTOMS[fault]
    with lab.fault(fault):
        lab.hello(**options)
        assert re.search(symptom, l12_cluster.told(lab.said)), lab.said
        cure = {"name": {}, "port": {"port": 18017}}.get(fault)
        if cure is not None:
            lab.hello(**cure)
            assert l12_cluster.told(lab.said) == WELL
    lab.hello()
    assert l12_cluster.told(lab.said) == WELL, lab.said


def test_the_wrong_interface_is_refused_by_its_address(lab):
    lab.hello(interface="docker0")
    assert "Connection refused, remote=[172.17.0.1]" in l12_cluster.told(lab.said)


def test_a_slower_link_makes_the_steps_of_a_running_job_longer(lab):
    options = (
        "--train.steps=100000",
        "--train.log_every=1",
        "--train.eval_every=0",
        "--model.hidden_size=256",
    )
    options += (
        "--model.num_layers=1",
        "--model.context_length=16",
        "--train.global_batch=2",
        "--checkpoint.every=100000",
    )
    handle = lab.submit(Job("gpt_tiny", options, nodes=2, ranks_per_node=1, name="slowed"))
    found = l12_cluster.at_rates(lab, handle, ["off", "20mbit"], count=3)
    wire_s = 4 * 811_008 / (20e6 / 8)
    assert [len(rows) for rows in found.values()] == [3, 3]
    assert all(seconds > 0.8 * wire_s for *_, seconds in found["20mbit"])
    assert sorted(seconds for *_, seconds in found["off"])[1] < wire_s
    lab.client.cancel(handle.number, signal="USR1")
    assert handle.wait(echo=False).state == "COMPLETED"
    assert "stopped by SIGUSR1" in handle.log()


def test_a_second_lab_in_the_same_folder_gives_its_jobs_other_numbers(lab, capsys):
    Path("runs/first.sbatch").write_text(FIRST)
    lab.batch("runs/first.sbatch")
    assert "COMPLETED" in capsys.readouterr().out
    again = l12_cluster.open_lab("test-again", nodes=1)
    try:
        numbers = [
            int(re.search(r"-(\d+)", name)[1])
            for name in os.listdir("runs")
            if name.startswith("first-")
        ]
        again.sh("sbatch", "--output=/dev/null", "--wrap", "true")
        assert int(re.search(r"job (\d+)", again.said)[1]) > max(numbers)
    finally:
        again.close()


FIRST = "#!/bin/bash\n#SBATCH --output=runs/%x-%j.log\n#SBATCH --job-name=first\nhostname\n"


def test_a_lab_that_was_killed_is_removed_by_the_next(lab):
    Cluster.up(nodes=1, name="test-again-999999999")
    l12_cluster.open_lab("test-again", nodes=1).close()
    assert not list(base().glob("test-again-*"))


def test_a_set_up_cell_that_is_run_again_begins_anew(lab):
    first = l12_cluster.open_lab("test-again", nodes=1)
    first.sh("sbatch", "--output=/dev/null", "--wrap", "sleep 600")
    again = l12_cluster.open_lab("test-again", nodes=1)
    try:
        assert again.client.queue() == []
    finally:
        again.close()


def test_without_slurm_commands_are_shown_and_nothing_raises(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(needs.PACKAGES, "no-such-program", "no-such-package")
    lab = l12_cluster.open_lab("test-none")
    lab.sh("sinfo")
    with lab.fault("port"):
        lab.hello()
    assert lab.batch("runs/first.sbatch") == "" and lab.until(lambda: 1 / 0) is False
    lab.close()
    said = capsys.readouterr().out
    assert "no-such-package" in said and "head$ sinfo\n(not run" in said
    assert lab.said == "" and lab.client is None


def test_an_unknown_fault_is_refused_with_those_there_are():
    with (
        pytest.raises(ValueError, match="choose one of name, port, code"),
        l12_cluster.Lab(None).fault("cable"),
    ):
        pass


def test_errors_of_ranks_are_their_last_lines_without_places_in_sources():
    said = (
        "1: Traceback (most recent call last):\n"
        '1:   File "/somewhere/bootstrap.py", line 195, in _meet\n'
        "1: torch.distributed.DistNetworkError: timed out\n"
        "1: ValueError: rank 1 cannot meet\n"
        "0:   what():  [enforce fail at /w/gloo/pair.cc:456] a. 96 vs 64. Received\n"
        "srun: error: n2: task 1: Exited with exit code 1\n"
    )
    assert (
        l12_cluster.told(said)
        == "rank 0: what():  a. 96 vs 64. Received\nrank 1: ValueError: rank 1 cannot meet"
    )


def test_step_lines_of_a_log():
    log = "2 ranks on 1 node\nstep 1/9 | loss 4.40 | lr 3e-04 | 0.25 s/step | 50 tokens/s\nstep 9/9 | ..."
    assert l12_cluster.steps(log) == [(1, 4.40, 0.25)]
