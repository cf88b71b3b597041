"""Lesson 17: the cluster of the open task, and what a plan costs on it.

Held by: tests/unit/test_l17_labs.py
"""

import statistics
from dataclasses import dataclass

from labcode.perf.failures import overhead, simulate

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@dataclass(frozen=True)
class Site:
    """A cluster, and the training that is to run on it: what is known beforehand.

    Args:
        gpus: Number of GPUs of the job.
        gpu_mtbf_s: Mean time between failures, of one GPU with its share of all the rest.
        preemptions_per_day: How often others take the nodes away.
        notice_s: Seconds before it at which the ranks get a signal.
        restart_s: Seconds from a failure, or a preemption, until the run works again.
        checkpoint_bytes: Bytes of one checkpoint.
        write_bytes_per_s: All ranks together, to the file system.
        copy_s: Seconds until the GPUs' tensors are copied into the memory of the nodes.
        slowdown: The part of its speed that training loses while files are written beside it.
        background_write_factor: How much longer the files take, written beside the training.
        max_writing: The part of the time in which the site lets one job write.
        quota_bytes: Bytes that the job may have on the file system.
    """

    gpus: int = 2048
    gpu_mtbf_s: float = 16_384 * 54 * DAY_S / 419
    preemptions_per_day: float = 2
    notice_s: float = 30
    restart_s: float = 900
    checkpoint_bytes: float = 12 * 70e9
    write_bytes_per_s: float = 20e9
    copy_s: float = 4
    slowdown: float = 0.1
    background_write_factor: float = 1.5
    max_writing: float = 0.05
    quota_bytes: float = 4e12


SITE = Site()
OTHER_SITE = Site(
    gpus=8192,
    preemptions_per_day=0,
    restart_s=300,
    checkpoint_bytes=12 * 30e9,
    write_bytes_per_s=60e9,
    quota_bytes=1.3e12,
)
THIRD_SITE = Site(  # here the notice suffices for a save, and no limit binds the interval
    gpus=4096,
    preemptions_per_day=8,
    notice_s=600,
    restart_s=300,
    checkpoint_bytes=12 * 180e9,
    write_bytes_per_s=5.4e9,
    max_writing=0.5,
    quota_bytes=10e12,
)
SEEDS = 8
WORK_S = 60 * DAY_S


def write_s(site: Site, kind: str) -> float:
    """Until the files of a checkpoint are written: kind "blocking" or "background"."""
    factor = site.background_write_factor if kind == "background" else 1.0
    return factor * site.checkpoint_bytes / site.write_bytes_per_s


def mtbf_s(site: Site) -> float:
    """Between two ends that lose work: failures, and preemptions if the notice is too short."""
    failures_per_s = site.gpus / site.gpu_mtbf_s
    if site.notice_s < write_s(site, "blocking"):
        failures_per_s += site.preemptions_per_day / DAY_S
    return 1 / failures_per_s


def standstill_s(site: Site, kind: str) -> float:
    """What a checkpoint costs the training, in seconds of its time."""
    if kind == "blocking":
        return write_s(site, kind)
    return site.copy_s + site.slowdown * write_s(site, kind)


def lost_extra_s(site: Site, kind: str) -> float:
    """What a failure costs beyond the work since the last checkpoint was begun.

    One that is written in the background does not count until its files are there.
    """
    return write_s(site, kind) if kind == "background" else 0.0


@dataclass(frozen=True)
class Cost:
    """What a plan costs, in parts of the work.

    Args:
        saving: Standing still for checkpoints, or being slowed down by them.
        lost: Work that is done again.
        restarting: Seconds until work resumes.
    """

    saving: float
    lost: float
    restarting: float

    @property
    def total(self) -> float:
        """All of it: 0.05 means that a run of 100 hours takes 105."""
        return self.saving + self.lost + self.restarting


def simulated(site: Site, kind: str, interval_s: float) -> Cost:
    """The mean over some simulated runs of 60 days of work."""
    extra_s = lost_extra_s(site, kind)
    stories = []
    for seed in range(SEEDS):
        stories.append(
            simulate(
                WORK_S,
                interval_s,
                standstill_s(site, kind),
                site.restart_s + extra_s,
                mtbf_s(site),
                seed,
            )
        )
    saving = statistics.mean(story.seconds("save") for story in stories) / WORK_S
    lost = statistics.mean(story.seconds("lost") for story in stories) / WORK_S
    away = statistics.mean(story.seconds("restart") for story in stories) / WORK_S
    part = extra_s / (site.restart_s + extra_s)
    return Cost(saving, lost + part * away, (1 - part) * away)


def writing(site: Site, kind: str, interval_s: float) -> float:
    """The part of the time in which a job writes."""
    pause_s = write_s(site, kind) if kind == "blocking" else site.copy_s
    return write_s(site, kind) / (interval_s + pause_s)


def best(site: Site) -> tuple[str, float, Cost]:
    """(kind, interval_s, cost) of the cheapest plan that the site allows, on a grid of 5 %."""
    found = []
    for kind in ("blocking", "background"):
        for power in range(100):
            interval_s = 60 * 1.05**power
            if writing(site, kind, interval_s) <= site.max_writing:
                found.append((expected(site, kind, interval_s), kind, interval_s))
    _, kind, interval_s = min(found)
    return kind, interval_s, simulated(site, kind, interval_s)


def expected(site: Site, kind: str, interval_s: float) -> float:
    """The cost of a plan by formula."""
    restart_s = site.restart_s + lost_extra_s(site, kind)
    return overhead(interval_s, standstill_s(site, kind), restart_s, mtbf_s(site))
