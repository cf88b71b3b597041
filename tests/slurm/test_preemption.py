"""A job that SLURM takes off its nodes for another one saves, goes back into the queue, and never
fails: whatever process tracking the cluster has, and however early it is asked.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from submitted import LOCAL, LONG, Submitted, job

from labcode.minislurm import Cluster

FREEZER = Path("/sys/fs/cgroup/freezer")
PREEMPTING = {
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
}
PARTITIONS = {
    "low": {"PriorityTier": 1, "PreemptMode": "REQUEUE", "GraceTime": 200},
    "high": {"PriorityTier": 10, "PreemptMode": "OFF"},
}
CGROUP = {"CgroupPlugin": "cgroup/v1", "CgroupMountpoint": "/sys/fs/cgroup"}
pytestmark = [pytest.mark.release, pytest.mark.timeout(600)]


def cgroups_can_be_written() -> bool:
    trial = FREEZER / "labcode-trial"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError:
        return False
    return True


KINDS = [
    (tracking, launcher)
    for tracking in ("linuxproc", "cgroup", "pgid")
    for launcher in ("torchrun", "srun")
]
kinds = pytest.mark.parametrize(
    ("preempting", "launcher"), KINDS, indirect=["preempting"], scope="module"
)


@pytest.fixture(scope="module")
def preempting(slurm: Callable[[str], str], request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster whose partition `high` takes nodes away from jobs in `low`."""
    tracking = request.param
    cgroup = CGROUP if tracking == "cgroup" else {}
    if cgroup and not cgroups_can_be_written():
        pytest.skip("cgroups of version 1 cannot be written here")
    settings = {**PREEMPTING, "ProctrackType": f"proctrack/{tracking}"}
    name = slurm(tracking)
    with Cluster.up(
        nodes=2, name=name, settings=settings, partitions=PARTITIONS, cgroup=cgroup
    ) as cluster:
        yield cluster
    assert not list(FREEZER.glob("slurm_n*")), "`down` leaves groups of processes behind"


# The agent of one node is told to stop a moment before that of the other, and says in its exit
# barrier that the other's store is gone.
TORCHRUNS_OWN = re.compile(r"^.*torch/distributed/elastic/.*$", re.MULTILINE)


def in_low(cluster: Cluster, folder: Path, name: str, launcher: str) -> Submitted:
    site = LOCAL.__class__(**{**vars(LOCAL), "launcher": launcher, "partition": "low"})
    return Submitted(cluster, folder, job(name, LONG, ranks_per_node=1), site, "--exclusive")


def preempt(submitted: Submitted) -> str:
    """The log of the job's first attempt, once it has given way to another job."""
    cluster = submitted.cluster
    high = ("sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive")
    cluster.exec([*high, "--output=/dev/null", "--wrap=sleep 600"])
    submitted.until(
        lambda job: job.info["Restarts"] == "1" or job.info["JobState"] in ("FAILED", "COMPLETED")
    )
    state = submitted.info
    submitted.until(lambda job: "stopped by SIG" in job.log)  # the first attempt's last words
    log = submitted.log
    cluster.exec(["scancel", "--user=root"], check=False)
    cluster.exec(["scancel", "--full", str(submitted.number)], check=False)
    assert state["Restarts"] == "1", f"{state}\n{log}"
    return log


def is_starting(submitted: Submitted) -> bool:
    """Whether Python runs on a node, which imports torch for seconds."""
    found = submitted.cluster.exec(
        ["pgrep", "-f", "[l]abcode.train"], node="n2", check=False
    ).stdout
    return bool(found.strip())


@kinds
def test_a_preempted_job_saves_and_is_requeued(
    preempting: Cluster, tmp_path: Path, launcher: str
) -> None:
    submitted = in_low(preempting, tmp_path, launcher, launcher)
    submitted.until(lambda job: len(job.steps()) >= 3)
    log = preempt(submitted)
    assert "Traceback" not in TORCHRUNS_OWN.sub("", log)
    found = re.search(r"stopped by SIG(?:USR1|TERM) after step (\d+), with a checkpoint", log)
    assert found, log
    saved = int(found[1])
    newest = max((submitted.out / "checkpoints").iterdir())
    assert newest.name == f"step-{saved:08d}"


@kinds
def test_a_job_that_is_preempted_while_it_starts_is_requeued_too(
    preempting: Cluster, tmp_path: Path, launcher: str
) -> None:
    submitted = in_low(preempting, tmp_path, f"early-{launcher}", launcher)
    submitted.until(is_starting)
    log = preempt(submitted)
    assert "stopped by SIG" in log and "Traceback" not in TORCHRUNS_OWN.sub("", log)
