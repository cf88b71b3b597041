"""The lab of lesson 14, on a real SLURM and without one.

Each fault shows its symptom and is gone afterwards; without SLURM nothing raises.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from answers import solution_of

from course.answer import Hint
from course.exercises import l14
from course.labs import l14_cluster
from course.labs.l14_scripts import Ended
from labcode.minislurm import Cluster, needs
from labcode.minislurm.place import base
from labcode.run import scaling
from labcode.slurm.lint.model import BatchJob
from labcode.slurm.script.job import Job

HELLO = """\
import socket, sys
import torch, torch.distributed as dist
from labcode.runtime import bootstrap

HIDDEN = 64
world = bootstrap.start(timeout_s=float(sys.argv[1]))
total = torch.ones(HIDDEN)
dist.all_reduce(total)
print(f"rank {world.rank} on {socket.gethostname()}: {HIDDEN} numbers, each {total[0]:g}")
bootstrap.stop()
"""
WELL = "rank 0 on n1: 64 numbers, each 2\nrank 1 on n2: 64 numbers, each 2"


FIRST = "#!/bin/bash\n#SBATCH --output=runs/%x-%j.log\n#SBATCH --job-name=first\nhostname\n"
FAULT_PORT = 20017
OPEN_PORT = 18017


@pytest.fixture(scope="module")
def open_labs(
    slurm: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[l14_cluster.Lab, Path]]:
    """(a lab of two nodes, its folder), for all tests of this file."""
    folder = tmp_path_factory.mktemp("lab")
    with contextlib.chdir(folder):
        lab = l14_cluster.open_lab(slurm("lab"), nodes=2)
        Path("runs/hello.py").write_text(HELLO)
    yield lab, folder
    with contextlib.chdir(folder):
        lab.close()
    assert not list(base().glob(f"{slurm('lab')}-*"))


@pytest.fixture
def lab(
    open_labs: tuple[l14_cluster.Lab, Path], monkeypatch: pytest.MonkeyPatch
) -> l14_cluster.Lab:
    """The lab, in its folder: a lab belongs to the folder that its notebook runs in."""
    lab, folder = open_labs
    monkeypatch.chdir(folder)
    return lab


@pytest.fixture
def again(slurm: Callable[[str], str]) -> str:
    """The name of a second lab."""
    return slurm("again")


# ------------------------------------------------------------------------------------------ faults


def state_of(lab: l14_cluster.Lab) -> dict[tuple[str, str], str]:
    """All that a fault changes: names, rules for ports, and the program that each node runs."""
    assert lab.cluster is not None
    found = {}
    for node in ("n1", "n2"):
        for command in ("cat /etc/hosts", "ip rule list", "cksum runs/hello.py"):
            found[node, command] = lab.cluster.node(node, command.split()).stdout
    return found


def test_without_a_fault_all_is_well(lab: l14_cluster.Lab) -> None:
    lab.hello()
    assert l14_cluster.told(lab.said) == WELL, lab.said


@pytest.mark.release
def test_a_node_that_takes_its_own_name_for_local_is_refused(lab: l14_cluster.Lab) -> None:
    before = state_of(lab)
    with lab.fault("name"):
        lab.hello(interface=None)
        symptom = l14_cluster.told(lab.said)
        assert "Connection refused, remote=[127.0.1.1]" in symptom, lab.said
        lab.hello(interface="eth0")
        assert l14_cluster.told(lab.said) == WELL, lab.said
    assert state_of(lab) == before


@pytest.mark.release
def test_a_closed_port_is_a_time_out(lab: l14_cluster.Lab) -> None:
    before = state_of(lab)
    with lab.fault("port"):
        lab.hello(wait_s=5, port=FAULT_PORT, kill=False)  # both are to say what they saw
        symptom = rf"nobody answers at n1:{FAULT_PORT} .*no answer"
        assert re.search(symptom, l14_cluster.told(lab.said)), lab.said
        lab.hello(port=OPEN_PORT)
        assert l14_cluster.told(lab.said) == WELL, lab.said
    assert state_of(lab) == before


def test_other_code_on_one_node_is_a_message_of_another_size(lab: l14_cluster.Lab) -> None:
    before = state_of(lab)
    with lab.fault("code"):
        lab.hello()
        symptom = "(96 vs 64|64 vs 96|size doesn't match|aborted by gloo::EnforceNotMet)"
        assert re.search(symptom, l14_cluster.told(lab.said)), lab.said
    assert state_of(lab) == before


def test_the_wrong_interface_is_refused_by_its_address(lab: l14_cluster.Lab) -> None:
    lab.hello(interface="docker0")
    assert "Connection refused, remote=[172.17.0.1]" in l14_cluster.told(lab.said)


def test_an_unknown_fault_is_refused_with_those_there_are() -> None:
    refused = pytest.raises(ValueError, match="choose one of name, port, code")
    with refused, l14_cluster.Lab(None).fault("cable"):
        pass


# ------------------------------------------------------------------------------- learners' scripts


def script(name: str) -> str:
    """A batch script of the lesson's solution."""
    namespace: dict[str, str] = {}
    exec(solution_of("14", name), namespace)
    return namespace[name]


@pytest.mark.release
def test_a_hand_written_script_has_its_ranks_on_two_nodes(
    lab: l14_cluster.Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    l14.own_script(script("my_script"), lab)
    assert "4 ranks on 2 nodes (n1: 0, 1; n2: 2, 3)" in capsys.readouterr().out


@pytest.mark.release
def test_a_hand_written_script_saves_is_requeued_and_resumes(
    lab: l14_cluster.Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    l14.lasting_script(script("my_lasting_script"), lab)
    assert "COMPLETED after 1 restart" in capsys.readouterr().out


def test_the_log_shows_how_many_ranks_each_node_has() -> None:
    l14._on_two_nodes("4 ranks on 2 nodes (n1: 0, 1; n2: 2, 3), gloo on cpu; grid dp 4")
    l14._on_two_nodes("4 ranks on 2 nodes (n2: 0, 2; n3: 1, 3), gloo on cpu; grid dp 4")
    uneven = "4 ranks on 2 nodes (n1: 0, 1, 2; n2: 3)"
    with pytest.raises(Hint) as error:
        l14._on_two_nodes(f"{uneven}, gloo on cpu; grid dp 4")
    assert str(error.value).endswith(f"the log says: {uneven}")


def test_a_login_shell_is_named_where_it_hides_a_program() -> None:
    ended = Ended("FAILED", "ModuleNotFoundError: No module named 'torch'\n")
    with pytest.raises(Hint, match="a login shell, which sets PATH afresh"):
        l14._ran(ended, BatchJob("#!/bin/bash -l\nsrun python train.py\n"))
    with pytest.raises(Hint) as error:
        l14._ran(ended, BatchJob("#!/bin/bash -e\nsrun python train.py\n"))
    assert "login" not in str(error.value)


# ---------------------------------------------------------------------------------------- scaling


@pytest.mark.release
def test_a_weak_scaling_gives_every_job_its_batch_rate_and_steps(
    lab: l14_cluster.Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--model.patch_size=30", "--model.hidden_size=16", "--model.num_layers=1")
    variables = {"RANKS_PER_NODE": 1, "SAMPLES_PER_RANK": 4, "STEPS": 16}
    folders = lab.script("slurm/weak_scaling", 1, 2, "--", *small, env=variables)
    said = capsys.readouterr().out
    assert said.count(" COMPLETED\n") == 2, said
    one, two = [scaling.read(folder).row for folder in folders]
    assert (one.devices, one.batch, one.steps) == (1, 4, 16)
    assert (two.devices, two.batch, two.steps) == (2, 8, 8)
    assert math.isclose(one.lr, 1e-3, rel_tol=0.01)
    assert math.isclose(two.lr, 1e-3 * math.sqrt(2), rel_tol=0.01)
    assert len(one.val_losses) >= 8  # a curve, not a point


# ------------------------------------------------------------------------------------------- links


@pytest.mark.release
def test_a_slower_link_makes_the_steps_of_a_running_job_longer(lab: l14_cluster.Lab) -> None:
    options = (
        "--train.steps=100000",
        "--train.log_every=1",
        "--train.eval_every=0",
        "--model.hidden_size=256",
        "--model.num_layers=1",
        "--model.context_length=16",
        "--train.global_batch=2",
        "--checkpoint.every=100000",
    )
    handle = lab.submit(Job("gpt_tiny", options, nodes=2, ranks_per_node=1, name="slowed"))
    sent = l14_cluster.sent_per_step(lab, handle, node="n2", count=30)
    found = l14_cluster.at_rates(lab, handle, ["off", "20mbit"], count=3)
    num_weights = 811_520
    assert sent is not None
    assert math.isclose(sent, 4 * num_weights, rel_tol=0.1)  # two ranks: the gradients once
    wire_s = 4 * num_weights / (20e6 / 8)  # float32, over a link of 20 Mbit/s
    free_s = [seconds for _, _, seconds in found["off"]]
    slow_s = [seconds for _, _, seconds in found["20mbit"]]
    assert (len(free_s), len(slow_s)) == (3, 3)
    assert min(slow_s) > 0.8 * wire_s
    assert min(free_s) < min(slow_s)
    assert lab.cluster is not None
    assert lab.client is not None
    assert "tbf" not in lab.cluster.node("n2", ["tc", "qdisc"]).stdout
    lab.client.cancel(handle.number, signal="USR1")
    assert handle.wait(echo=False).state == "COMPLETED"
    assert "stopped by SIGUSR1" in handle.log()


# ------------------------------------------------------------------------------ labs come and go


def test_a_second_lab_in_the_same_folder_gives_its_jobs_other_numbers(
    lab: l14_cluster.Lab, again: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/first.sbatch").write_text(FIRST)
    lab.batch("runs/first.sbatch")
    assert "COMPLETED" in capsys.readouterr().out
    numbers = [int(path.stem.removeprefix("first-")) for path in Path("runs").glob("first-*.log")]
    assert numbers
    second = l14_cluster.open_lab(again, nodes=1)
    try:
        second.sh("sbatch", "--output=/dev/null", "--wrap", "true")
        number = re.findall(r"job (\d+)", second.said)[0]
        assert int(number) > max(numbers)
    finally:
        second.close()


def test_a_lab_that_was_killed_is_removed_by_the_next(lab: l14_cluster.Lab, again: str) -> None:
    Cluster.up(nodes=1, name=f"{again}-999999999")  # of a process that cannot be
    l14_cluster.open_lab(again, nodes=1).close()
    assert not list(base().glob(f"{again}-*"))


def test_a_job_that_goes_on_is_not_spoken_of_as_if_it_had_ended(
    lab: l14_cluster.Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/long.sbatch").write_text("#!/bin/bash\n#SBATCH --output=runs/%x-%j.log\nsleep 600\n")
    lab.batch("runs/long.sbatch", timeout_s=0.5)
    said = capsys.readouterr().out
    number = said.partition("batch job ")[2].split()[0]
    assert f"It has not ended, and goes on: `squeue` and `scancel {number}` are yours." in said
    assert "The log says" not in said
    lab.sh("scancel", number)


def test_options_words_and_environment_reach_a_script(lab: l14_cluster.Lab) -> None:
    script = FIRST.replace("hostname\n", 'echo "$SLURM_JOB_NUM_NODES $* $WANTED"\n')
    Path("runs/words.sbatch").write_text(script)
    said = lab.batch("runs/words.sbatch", "--nodes=2", words=["--config", "x"], env={"WANTED": 1})
    assert said == "2 --config x 1\n"


def test_a_set_up_cell_that_is_run_again_begins_anew(lab: l14_cluster.Lab, again: str) -> None:
    first = l14_cluster.open_lab(again, nodes=1)
    first.sh("sbatch", "--output=/dev/null", "--wrap", "sleep 600")
    second = l14_cluster.open_lab(again, nodes=1)
    try:
        assert second.client is not None
        assert second.client.queue() == []
    finally:
        second.close()


# ------------------------------------------------------------------------------------ without SLURM


def test_without_slurm_commands_are_shown_and_nothing_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(needs.PACKAGES, "no-such-program", "no-such-package")
    lab = l14_cluster.open_lab("test-none")
    lab.sh("sinfo")
    with lab.fault("port"):
        lab.hello()
    assert lab.batch("runs/first.sbatch") == ""
    assert lab.until(lambda: bool(1 / 0)) is False
    lab.close()
    said = capsys.readouterr().out
    assert "no-such-package" in said
    assert "head$ sinfo\n(not run" in said
    assert lab.said == ""
    assert lab.client is None


# ------------------------------------------------------------------------------------ what logs say


def test_errors_of_ranks_are_their_last_lines_without_places_in_sources() -> None:
    said = (
        "1: Traceback (most recent call last):\n"
        '1:   File "/somewhere/bootstrap.py", line 195, in _meet\n'
        "1: torch.distributed.DistNetworkError: timed out\n"
        "1: ValueError: rank 1 cannot meet\n"
        "0:   what():  [enforce fail at /w/gloo/pair.cc:456] a. 96 vs 64. Received\n"
        "srun: error: n2: task 1: Exited with exit code 1\n"
    )
    assert l14_cluster.told(said).splitlines() == [
        "rank 0: what():  a. 96 vs 64. Received",
        "rank 1: ValueError: rank 1 cannot meet",
    ]


def test_a_rank_that_aborts_is_named_also_when_its_last_words_are_lost() -> None:
    said = "0: terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    assert l14_cluster.told(said) == "rank 0: aborted by gloo::EnforceNotMet"
    said += "0:   what():  a. 96 vs 64. Received\n"
    assert l14_cluster.told(said) == "rank 0: what():  a. 96 vs 64. Received"


def test_step_lines_of_a_log() -> None:
    log = (
        "2 ranks on 1 node\n"
        "step 1/9 | loss 4.40 | lr 3e-04 | 0.25 s/step | 50 tokens/s\n"
        "step 9/9 | ..."
    )
    assert l14_cluster.steps(log) == [(1, 4.40, 0.25)]
