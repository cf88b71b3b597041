"""What the course generates, trained by a real SLURM on nodes of its own, faults included."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
from submitted import ENDED, LOCAL, LONG, TINY, Submitted, command_line, job

from labcode import recipes
from labcode.measure import metrics
from labcode.minislurm import Cluster
from labcode.slurm.script.job import Job

pytestmark = pytest.mark.timeout(900)  # each wait inside has its own limit


def losses(rows):
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def alone(folder, steps):
    """The losses of the same run on one process, started by hand."""
    out = folder / "alone"
    command = [
        sys.executable,
        "-m",
        "labcode.train",
        "gpt_tiny",
        *command_line(TINY | {"train.steps": steps, "train.out": out}),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    return losses(metrics.read(out))


def processes_of_training(cluster, nodes):
    """The command lines of a training that run on some nodes."""
    found = [
        cluster.exec(["pgrep", "-fa", "[l]abcode.train"], node=node, check=False).stdout
        for node in nodes
    ]
    return "".join(found)


@pytest.fixture(scope="session")
def cluster(slurm):
    """The cluster that the tests of this file share, but for those that change its settings."""
    with Cluster.up(nodes=4, cpus=8, name=slurm("train")) as cluster:
        yield cluster


@pytest.mark.release
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_both_launchers_train_on_two_nodes_with_every_rank_on_its_node(cluster, tmp_path, launcher):
    submitted = Submitted(
        cluster,
        tmp_path,
        job(launcher, 6),
        dataclasses.replace(LOCAL, launcher=launcher),
        "--nodelist=n1,n2",
    )
    assert submitted.end() == "COMPLETED", submitted.log
    first = next(line for line in submitted.log.splitlines() if " ranks on " in line)
    assert first.startswith("4 ranks on 2 nodes (n1: 0, 1; n2: 2, 3), gloo on cpu; grid dp 4")
    expected = alone(tmp_path, 6)
    assert losses(metrics.read(submitted.out)) == pytest.approx(expected, rel=0, abs=1e-9)
    assert "step 6/6 | loss " in submitted.log


@pytest.mark.release
def test_four_nodes_train_one_grid(cluster, tmp_path):
    grid = {"parallel.tp": 2, "parallel.pp": 2, "parallel.sequence_parallel": True}
    submitted = Submitted(
        cluster, tmp_path, job("grid", 6, nodes=4, ranks_per_node=1, changes=grid)
    )
    assert submitted.end() == "COMPLETED", submitted.log
    first = "4 ranks on 4 nodes (n1: 0; n2: 1; n3: 2; n4: 3), gloo on cpu; "
    first += "grid dp 1 x pp 2 x cp 1 x tp 2"
    assert first in submitted.log
    assert losses(metrics.read(submitted.out)) == pytest.approx(alone(tmp_path, 6), rel=0, abs=1e-9)


@pytest.mark.release
def test_an_array_runs_each_number_and_a_job_waits_for_its_dependency(cluster, tmp_path):
    hello = Job("", module="platform", ranks_per_node=1, name="hello", requeue=False)
    array = Submitted(cluster, tmp_path, dataclasses.replace(hello, name="array", array="0-2"))
    after = Submitted(
        cluster,
        tmp_path,
        dataclasses.replace(hello, name="after", dependency=f"afterok:{array.number}"),
    )
    broken = Submitted(
        cluster, tmp_path, dataclasses.replace(hello, name="broken", module="no_such_module")
    )
    never = Submitted(
        cluster,
        tmp_path,
        dataclasses.replace(hello, name="never", dependency=f"afterok:{broken.number}"),
    )
    assert after.end() == "COMPLETED"
    assert len(list(tmp_path.glob("array-*.log"))) == 3
    assert broken.end() == "FAILED"
    assert never.end() == "CANCELLED"  # and does not wait for ever


@pytest.mark.release
def test_a_job_of_an_array_that_is_asked_for_a_checkpoint_stops_alone(cluster, tmp_path):
    array = Submitted(
        cluster, tmp_path, job("several", LONG, nodes=1, ranks_per_node=1, array="0-1")
    )

    def log(task):
        path = tmp_path / f"several-{tasks()[task]['JobId']}.log"
        return path.read_text() if path.exists() else ""

    def tasks():
        lines = cluster.exec(
            ["scontrol", "--oneliner", "show", "job", str(array.number)]
        ).stdout.splitlines()
        return {
            info["ArrayTaskId"]: info
            for info in (dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines)
        }

    array.until(lambda _: len(tasks()) == 2 and all("step 2/" in log(task) for task in "01"))
    # also the array's number
    asked = next(task for task, info in tasks().items() if info["JobId"] == str(array.number))
    cluster.exec(["scancel", "--batch", "--signal=USR1", f"{array.number}_{asked}"])
    array.until(lambda _: tasks()[asked]["Restarts"] == "1")
    (other,) = set("01") - {asked}
    assert "stopped by SIGUSR1" in log(asked) and "stopped by" not in log(other)
    assert tasks()[other]["JobState"] == "RUNNING" and tasks()[other]["Restarts"] == "0"
    cluster.exec(["scancel", str(array.number)])
    array.until(lambda _: {info["JobState"] for info in tasks().values()} == {"CANCELLED"})


@pytest.mark.release
@pytest.mark.parametrize(
    ("what", "pattern"),
    [("rank", "-u -m [l]abcode.train"), ("torchrun", "^[^ ]*python -m torch.distributed.run")],
)
def test_a_killed_process_ends_the_job_as_failed_and_long_before_its_end(
    cluster, tmp_path, what, pattern
):
    submitted = Submitted(cluster, tmp_path, job(f"killed-{what}", LONG), LOCAL, "--nodelist=n1,n2")
    submitted.until(lambda job: len(job.steps()) >= 2)
    cluster.exec(["pkill", "-KILL", "-n", "-f", "--", pattern], node="n2")
    # `until` gives up long before LONG would have ended by itself
    submitted.until(lambda job: job.info["JobState"] not in ("RUNNING", "COMPLETING"))
    assert submitted.info["JobState"] == "FAILED"
    # ranks never outlive their torchrun
    submitted.until(lambda _: not processes_of_training(cluster, ("n1", "n2")))


@pytest.mark.release
def test_a_killed_rank_is_started_again_within_the_job(cluster, tmp_path):
    """Each node has its torchrun, and only one of them has lost a rank."""
    # steps take a hundredth of a second, and the order to kill a rank may take one to arrive
    steps = 400
    every_5 = {"checkpoint.every": 5}
    one_more_chance = job("restarted", steps, ranks_per_node=1, changes=every_5, max_restarts=2)
    submitted = Submitted(cluster, tmp_path, one_more_chance, LOCAL)
    submitted.until(lambda job: len(job.steps()) >= 6)
    cluster.exec(["pkill", "-KILL", "-n", "-f", "--", "-u -m [l]abcode.train"], node="n2")
    assert submitted.end() == "COMPLETED", submitted.log
    assert submitted.info["Restarts"] == "0"  # SLURM has seen nothing of it
    assert "checkpoints/step-00000" in re.search(r"resuming from (\S+)", submitted.log)[1]
    assert losses(metrics.read(submitted.out)) == pytest.approx(
        alone(tmp_path, steps), rel=0, abs=1e-9
    )


@pytest.mark.release
def test_scancel_leaves_no_process_on_any_node(cluster, tmp_path):
    submitted = Submitted(cluster, tmp_path, job("cancelled", LONG, nodes=4, ranks_per_node=1))
    submitted.until(lambda job: len(job.steps()) >= 2)
    cluster.exec(["scancel", str(submitted.number)])
    assert submitted.end() == "CANCELLED"

    nodes = [f"n{number}" for number in range(1, 5)]
    submitted.until(lambda _: not processes_of_training(cluster, nodes))


@pytest.mark.release
def test_near_its_time_limit_a_job_is_requeued_and_goes_on_with_the_same_losses(slurm, tmp_path):
    """Two minutes of wall time, of which the signal leaves a part.

    SLURM may send the signal up to a minute early: after 0 to 60 s here. A slow link makes the
    steps take longer than that until the second attempt begins.
    """
    # with pgid, as with cgroups, a signal reaches what SLURM has started, and no rank of a torchrun
    settings = {"ProctrackType": "proctrack/pgid"}
    with Cluster.up(nodes=2, cpus=8, name=slurm("time"), settings=settings) as cluster:
        cluster.slow("n1", "512kbit")
        submitted = Submitted(cluster, tmp_path, job("time", 80, minutes=2, signal_s=60))
        # a job that has ended will not be requeued any more
        submitted.until(
            lambda job: job.info.get("Restarts") == "1" or job.info["JobState"] in ENDED
        )
        assert submitted.info.get("Restarts") == "1", submitted.log[-3000:]
        cluster.slow("n1", "off")
        # two attempts are enough
        cluster.exec(["scontrol", "update", f"JobId={submitted.number}", "TimeLimit=10"])
        assert submitted.end() == "COMPLETED", submitted.log
        assert submitted.info["Restarts"] == "1"
    stop = re.search(
        r"stopped by SIGUSR1 (?:after step (\d+), with a checkpoint|before step 1)", submitted.log
    )
    assert stop, submitted.log
    if stop[1]:  # on a busy machine the signal may come while the ranks start
        resumed_from = re.search(r"resuming from (\S+)", submitted.log)[1]
        assert f"checkpoints/step-{int(stop[1]):08d}" in resumed_from
    assert submitted.steps() == list(range(1, 81))
    assert losses(metrics.read(submitted.out)) == pytest.approx(
        alone(tmp_path, 80), rel=0, abs=1e-9
    )
    about = json.loads((submitted.out / "config.json").read_text())
    assert (
        about["model"]["hidden_size"]
        == recipes.with_changes(recipes.gpt_tiny(), TINY).model.hidden_size
    )


@pytest.mark.release
def test_a_node_that_loses_power_gives_its_job_another_attempt(slurm, tmp_path):
    """SLURM is not told, finds out, and begins the job again on the nodes that are left."""
    with Cluster.up(nodes=3, name=slurm("node")) as cluster:
        submitted = Submitted(cluster, tmp_path, job("node", 60, changes={"checkpoint.every": 10}))
        submitted.until(lambda job: len(job.steps()) >= 12)
        names = ["scontrol", "show", "hostnames", submitted.info["NodeList"]]
        _, second = cluster.exec(names).stdout.split()
        cluster.kill(second)
        submitted.until(lambda job: int(job.info.get("Restarts", 0)) >= 1)
        assert submitted.end() == "COMPLETED", submitted.log
    assert "resuming from" in submitted.log
    assert submitted.steps() == list(range(1, 61))
