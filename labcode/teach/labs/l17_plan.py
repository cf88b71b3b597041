"""Lesson 17: the cluster of the open task, and what a plan costs on it.

Held by: tests/unit/test_l17_labs.py
"""

import statistics
from dataclasses import dataclass

from labcode.perf.failures import overhead, simulate

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@dataclass(frozen=True)
class Cluster:
    """A cluster, and the training that is to run on it.

    Args:
        gpus: Of the job.
        gpu_mtbf_s: Mean time between failures, of one GPU with its share of all the rest.
        preemptions_per_day: How often others take the nodes away.
        notice_s: So long before that the ranks get a signal.
        restart_s: From a failure, or a preemption, until the run works again.
        params: Of the model.
        bytes_per_param: In a checkpoint.
        write_bytes_per_s: All ranks together, to the file system.
        copy_s: Until the GPUs' tensors are copied into the memory of the nodes.
        slowdown: The part of its speed that training loses while files are written beside it.
        background_write_factor: How much longer the files take, written beside the training.
        max_writing: The part of the time in which the site lets one job write.
        quota_bytes: Of the job, on the file system.
    """

    gpus: int = 2048
    gpu_mtbf_s: float = 16_384 * 54 * DAY_S / 419
    preemptions_per_day: float = 2
    notice_s: float = 30
    restart_s: float = 900
    params: float = 70e9
    bytes_per_param: float = 12
    write_bytes_per_s: float = 20e9
    copy_s: float = 4
    slowdown: float = 0.1
    background_write_factor: float = 1.5
    max_writing: float = 0.05
    quota_bytes: float = 4e12

    @property
    def checkpoint_bytes(self) -> float:
        """One checkpoint."""
        return self.params * self.bytes_per_param

    def write_s(self, kind: str) -> float:
        """Until the files of a checkpoint are written: kind "blocking" or "background"."""
        factor = self.background_write_factor if kind == "background" else 1.0
        return factor * self.checkpoint_bytes / self.write_bytes_per_s

    @property
    def mtbf_s(self) -> float:
        """Between two ends that lose work: failures, and preemptions if the notice is too short."""
        failures_per_s = self.gpus / self.gpu_mtbf_s
        if self.notice_s < self.write_s("blocking"):
            failures_per_s += self.preemptions_per_day / DAY_S
        return 1 / failures_per_s

    def standstill_s(self, kind: str) -> float:
        """What a checkpoint costs the training, in seconds of its time."""
        if kind == "blocking":
            return self.write_s(kind)
        return self.copy_s + self.slowdown * self.write_s(kind)

    def lost_extra_s(self, kind: str) -> float:
        """What a failure costs beyond the work since the last checkpoint was begun.

        One that is written in the background does not count until its files are there.
        """
        return self.write_s(kind) if kind == "background" else 0.0


SITE = Cluster()
SEEDS = 8
WORK_S = 60 * DAY_S


@dataclass(frozen=True)
class Cost:
    """What a plan costs, in parts of the work.

    Args:
        saving: Standing still for checkpoints, or being slowed down by them.
        lost: Work that is done again.
        restarting: Until work goes on.
    """

    saving: float
    lost: float
    restarting: float

    @property
    def total(self) -> float:
        """All of it: 0.05 means that a run of 100 hours takes 105."""
        return self.saving + self.lost + self.restarting


def simulated(cluster: Cluster, kind: str, interval_s: float) -> Cost:
    """The mean over some simulated runs of 60 days of work."""
    extra_s = cluster.lost_extra_s(kind)
    stories = []
    for seed in range(SEEDS):
        stories.append(
            simulate(
                WORK_S,
                interval_s,
                cluster.standstill_s(kind),
                cluster.restart_s + extra_s,
                cluster.mtbf_s,
                seed,
            )
        )
    saving = statistics.mean(story.seconds("save") for story in stories) / WORK_S
    lost = statistics.mean(story.seconds("lost") for story in stories) / WORK_S
    away = statistics.mean(story.seconds("restart") for story in stories) / WORK_S
    part = extra_s / (cluster.restart_s + extra_s)
    return Cost(saving, lost + part * away, (1 - part) * away)


def writing(cluster: Cluster, kind: str, interval_s: float) -> float:
    """The part of the time in which a job writes."""
    pause_s = cluster.write_s(kind) if kind == "blocking" else cluster.copy_s
    return cluster.write_s(kind) / (interval_s + pause_s)


def best(cluster: Cluster) -> tuple[str, float, Cost]:
    """(kind, interval_s, cost) of the cheapest plan that the site allows, on a grid of 5 %."""
    found = []
    for kind in ("blocking", "background"):
        for power in range(100):
            interval_s = 60 * 1.05**power
            if writing(cluster, kind, interval_s) <= cluster.max_writing:
                found.append((expected(cluster, kind, interval_s), kind, interval_s))
    _, kind, interval_s = min(found)
    return kind, interval_s, simulated(cluster, kind, interval_s)


def expected(cluster: Cluster, kind: str, interval_s: float) -> float:
    """The cost of a plan by formula."""
    restart_s = cluster.restart_s + cluster.lost_extra_s(kind)
    return overhead(interval_s, cluster.standstill_s(kind), restart_s, cluster.mtbf_s)
